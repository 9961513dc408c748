"""What `lightning-zero plan` has found: for people a table and a verdict, and values for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_zero.layout.offload import Tier
from lightning_zero.layout.sizes import in_words, unit_of
from lightning_zero.observe.tables import paragraph, table
from lightning_zero.planner import Estimate, Machine
from lightning_zero.strategy.settings import as_arguments

__all__ = ["Row", "as_dict", "as_text", "best_of"]


@dataclass(frozen=True)
class Row:
    """One choice.

    Attributes:
        plain: As the module is.
        checkpointed: With its repeated blocks under activation checkpointing; None where there are
            none, or activations are unknown.
    """

    plain: Estimate
    checkpointed: Estimate | None

    @property
    def used(self) -> Estimate:
        """Checkpointed where it does not fit as it is."""
        return self.plain if self.plain.fits else self.checkpointed or self.plain


def best_of(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The cheapest that fits; activation checkpointing computes the forward twice."""
    found = [(row.plain.cost, False, row.plain) for row in rows if row.plain.fits]
    found += [
        (row.checkpointed.cost, True, row.checkpointed)
        for row in rows
        if row.checkpointed is not None and row.checkpointed.fits
    ]
    # Time first; at the same time of transfers, the one that computes less.
    found.sort(key=lambda entry: (entry[0][0], entry[1], entry[0]))
    if not found:
        return None
    _, is_checkpointed, best = found[0]
    config = best.choice.config
    if is_checkpointed:
        config = config.replace(activation_checkpointing=True)
    return {
        "choice": best.choice.name,
        "strategy": as_arguments(config),
        "checkpointing": is_checkpointed,
        **_numbers(best),
    }


def _numbers(estimate: Estimate) -> dict[str, Any]:
    least, most = estimate.transfer_seconds
    return {
        "device_bytes": estimate.device_bytes,
        "host_bytes_per_node": estimate.host_bytes,
        "disk_bytes_per_node": estimate.disk_bytes,
        "transfer_seconds": [least, most],
    }


def as_dict(row: Row) -> dict[str, Any]:
    """All numbers of a choice, in bytes and seconds; as the module is, unless a key says more.

    Those of one rank are of the one that takes most.
    """
    plain, less = row.plain, row.checkpointed
    return {
        "zero": plain.choice.zero,
        "offload": plain.choice.offload,
        "fits": plain.fits,
        "fits_with_checkpointing": None if less is None else less.fits,
        **_numbers(plain),
        "device_bytes_with_checkpointing": None if less is None else less.device_bytes,
        "rest_bytes_per_rank": {
            tier.value: {state.value: nbytes for state, nbytes in states.items()}
            for tier, states in plain.resting.tiers.items()
        },
        "least_and_most_of_ranks": {
            tier.value: list(plain.ranks.span(tier)) for tier in plain.resting.tiers
        },
        "module_buffer_bytes": plain.resting.module_buffer_bytes,
        "average_bytes": plain.resting.average_bytes,
        "pool_bytes": plain.resting.pool_bytes,
        "staging_bytes": plain.staging_bytes,
        "peak_bytes": {
            "gathered": plain.peak.gathered_bytes,
            "gradient buckets": plain.peak.bucket_bytes,
            "activations": plain.peak.activation_bytes,
        },
        "step_bytes": dataclasses.asdict(plain.traffic),
        "missing_bytes": plain.excess,
    }


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
    alone = (
        f"DistributedDataParallel would hold {in_words(facts['data_parallel_bytes'])} of states on "
        "each device."
    )
    above = [head, note] if note else [head]
    below = [*_legend(rows, machine), alone]
    parts = [*map(paragraph, above), "", _table(rows, best), "", *map(paragraph, below)]
    return "\n".join([*parts, "", *_verdict(rows, best)])


def _table(rows: Sequence[Row], best: Any) -> str:
    unit, size = unit_of(max(row.plain.device_bytes for row in rows))
    is_quick = all(row.plain.transfer_seconds[1] < 1 for row in rows)

    def short(number: float, digits: int = 3) -> str:
        return f"{number:.{digits}g}" if number < 99.5 else f"{number:.0f}"

    def in_unit(nbytes: float) -> str:
        return f"{nbytes / size:.1f}" if nbytes < 100 * size else f"{nbytes / size:.0f}"

    def cells(row: Row) -> list[str]:
        plain, less = row.plain, row.checkpointed
        least, most = (seconds * (1e3 if is_quick else 1) for seconds in plain.transfer_seconds)
        span = list(dict.fromkeys([short(least, 2), short(most, 2)]))
        fits = "yes" if plain.fits else "with ckpt." if row.used.fits else ""
        is_best = best is not None and best["choice"] == plain.choice.name
        return [
            f"{plain.choice.zero}{' *' if is_best else ''}",
            plain.choice.offload,
            in_unit(plain.resting.tier_bytes(Tier.DEVICE)),
            in_unit(plain.device_bytes),
            "" if less is None else in_unit(less.device_bytes),
            in_unit(plain.host_bytes),
            in_unit(plain.disk_bytes),
            in_unit(plain.traffic.wire),
            "..".join(span) if len(span) > 1 else short(most),
            fits or f"no: {', '.join(row.used.excess)}".replace(" memory,", ","),
        ]

    times = "ms" if is_quick else "seconds"
    header = [
        unit, "offload", "states", "peak", "peak, ckpt.", "host", "disk", "sent", times, "fits"
    ]  # fmt: skip
    return table([header, *map(cells, rows)], left=(0, 1, len(header) - 1))


def _legend(rows: Sequence[Row], machine: Machine) -> Iterator[str]:
    rates = machine.rates
    used = (rates.link, rates.cpu_link, rates.nvme, rates.memory)
    link, cpu_link, disk, memory = (rate / 1e9 for rate in used)
    yield (
        "*: the cheapest that fits; off: stage 0, all replicated; ckpt.: with activation "
        "checkpointing; states, peak, sent: of one rank, on its device, at rest, at most and in a "
        "step; host, disk: of a machine."
    )
    yield (
        "Times are of transfers and of steps on the CPU, at once .. one by one, at "
        f"{link:g} GB/s between ranks, {cpu_link:g} to CPU memory, {disk:g} of disks and "
        f"{memory:g} of CPU memory for these steps (--rates)."
    )
    if machine.is_apart:
        yield (
            "What fits may fill the device to the last byte. CUDA, NCCL and gaps between tensors "
            "take 1 to 2 GiB of a GPU beside that: give --device-memory less by as much."
        )
    spans = [row.plain.ranks.span(tier) for row in rows for tier in Tier]
    if any(least != most for least, most in spans):
        yield "Ranks own whole tensors and differ: the numbers are of the one with most."
    limits = {
        "--device-memory": machine.device_bytes,
        "--host-memory": machine.host_bytes,
        "--disk": machine.disk_bytes,
    }
    unbounded = [name for name, limit in limits.items() if limit is None]
    if unbounded:
        yield f"Taken to be without bound, for want of {', '.join(unbounded)}."


def _verdict(rows: Sequence[Row], best: Any) -> Iterator[str]:
    if best is not None:
        how = " with activation checkpointing" if best["checkpointing"] else ""
        needs = [f"{in_words(best['device_bytes'])} on each device"]
        for name, where in (("host", "of CPU memory"), ("disk", "on disk")):
            if nbytes := best[f"{name}_bytes_per_node"]:
                needs.append(f"{in_words(nbytes)} {where} for each machine")
        yield paragraph(f"cheapest that fits: {best['choice']}{how}: {', '.join(needs)}")
        yield best["strategy"]
        return
    estimates = [row.used for row in rows]
    yield "nothing fits; nearest, with activation checkpointing where that is known:"
    for one in sorted(estimates, key=lambda e: sum(e.excess.values()))[:3]:
        missing = ", ".join(f"{in_words(n)} of {name}" for name, n in one.excess.items())
        yield paragraph(f"  {one.choice.name}: {missing} too little")
