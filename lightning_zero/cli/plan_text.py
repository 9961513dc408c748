"""What `lightning-zero plan` prints for people: a table, what its columns are, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_zero.cli.plan_report import Row
from lightning_zero.cli.sizes import in_words
from lightning_zero.layout.offload import Tier
from lightning_zero.planner import Machine

__all__ = ["as_text"]

_UNITS = {"GiB": 1024**3, "MiB": 1024**2, "KiB": 1024}
_Format = Callable[[float], str]


def as_text(
    facts: Mapping[str, Any], rows: Sequence[Row], machine: Machine, best: Any, note: str
) -> str:
    """The plan for people.

    Args:
        facts: About the job.
        rows: Of the table.
        machine: What there is.
        best: As `best_of` gives it.
        note: What is not counted; may be empty.
    """
    head = (
        f"{facts['model']}: {facts['parameters']:,} parameters, {facts['precision']}, "
        f"{facts['optimizer']}, {machine.num_ranks} ranks, {machine.ranks_per_node} on a machine"
    )
    parts = [head, *([note] if note else []), "", *_table(rows), "", _legend(rows, machine)]
    return "\n".join([*parts, "", _verdict(rows, best)])


def _table(rows: Sequence[Row]) -> list[str]:
    most = max(row.plain.device_bytes for row in rows)
    unit = next((name for name, size in _UNITS.items() if most >= size), "KiB")
    is_quick = all(row.plain.transfer_seconds[1] < 1 for row in rows)

    def in_unit(nbytes: float) -> str:
        number = nbytes / _UNITS[unit]
        return f"{number:.1f}" if number < 100 else f"{number:.0f}"

    def in_seconds(seconds: float) -> str:
        number = seconds * 1e3 if is_quick else seconds
        return f"{number:.3g}" if number < 100 else f"{number:.0f}"

    times = "ms" if is_quick else "seconds"
    header = [unit, "states", "peak", "checkpointed", "host", "disk", "sent", times, "fits"]
    lines = [header, *(_cells(row, in_unit, in_seconds) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = (0, len(header) - 1)
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _cells(row: Row, in_unit: _Format, in_seconds: _Format) -> list[str]:
    plain, less = row.plain, row.checkpointed
    times = [in_seconds(seconds) for seconds in plain.transfer_seconds]
    fits = "yes" if plain.fits else "checkpointed" if less is not None and less.fits else ""
    return [
        plain.choice.name,
        in_unit(plain.resting.tier_bytes(Tier.DEVICE)),
        in_unit(plain.device_bytes),
        "" if less is None else in_unit(less.device_bytes),
        in_unit(plain.host_bytes),
        in_unit(plain.disk_bytes),
        in_unit(plain.traffic.wire),
        times[0] if times[0] == times[1] else f"{times[0]}..{times[1]}",
        fits or f"no: {', '.join((less or plain).excess)}",
    ]


def _legend(rows: Sequence[Row], machine: Machine) -> str:
    rates = machine.rates
    used = (rates.link, rates.cpu_link, rates.nvme, rates.memory)
    link, cpu_link, disk, memory = (rate / 1e9 for rate in used)
    lines = [
        "states, peak, sent: of one rank, on its device, at rest, at most and in a step;",
        "checkpointed: the peak with activation checkpointing; host, disk: of a machine;",
        "off: plain data parallel. Times are of transfers and of steps on the CPU, all at once ..",
        f"one by one, at {link:g} GB/s between ranks, {cpu_link:g} to CPU memory, {disk:g} of",
        f"disks and {memory:g} of CPU memory for these steps (--rates).",
    ]
    if machine.is_apart:
        lines += [
            "What fits may fill the device to the last byte. CUDA, NCCL and gaps between tensors",
            "take 1 to 2 GiB of a GPU beside that: give --device-memory less by as much.",
        ]
    spans = [row.plain.ranks.span(tier) for row in rows for tier in Tier]
    if any(least != most for least, most in spans):
        lines.append("Ranks own whole tensors and differ: the numbers are of the one with most.")
    limits = {
        "--device-memory": machine.device_bytes,
        "--host-memory": machine.host_bytes,
        "--disk": machine.disk_bytes,
    }
    unbounded = [name for name, limit in limits.items() if limit is None]
    if unbounded:
        lines.append(f"Taken to be without bound, for want of {', '.join(unbounded)}.")
    return "\n".join(lines)


def _verdict(rows: Sequence[Row], best: Any) -> str:
    if best is not None:
        how = " with activation checkpointing" if best["checkpointing"] else ""
        needs = [f"{in_words(best['device_bytes'])} on each device"]
        for name, where in (("host", "of CPU memory"), ("disk", "on disk")):
            if nbytes := best[f"{name}_bytes_per_node"]:
                needs.append(f"{in_words(nbytes)} {where} for each machine")
        return f"cheapest that fits: {best['choice']}{how}: {', '.join(needs)}\n{best['strategy']}"
    estimates = [row.checkpointed or row.plain for row in rows]
    nearest = sorted(estimates, key=lambda e: sum(e.excess.values()))[:3]
    lines = ["nothing fits; nearest, all with activation checkpointing where there is a number:"]
    for one in nearest:
        missing = ", ".join(f"{in_words(n)} of {name}" for name, n in one.excess.items())
        lines.append(f"  {one.choice.name}: {missing} too little")
    return "\n".join(lines)
