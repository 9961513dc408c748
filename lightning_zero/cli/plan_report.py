"""What `lightning-zero plan` prints: a table and a verdict, or values for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_zero.cli.sizes import in_words
from lightning_zero.offload import Tier
from lightning_zero.planner import Estimate, Machine

__all__ = ["Row", "as_dict", "as_text", "best_of"]

_GIB = 1024**3


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
    return {"choice": best.choice.name, "checkpointing": is_checkpointed, **_numbers(best)}


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


# -------------------------------------------------------------------- for people


def as_text(
    facts: dict[str, Any], rows: Sequence[Row], machine: Machine, best: Any, note: str
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
    header = ["GiB", "states", "peak", "checkpointed", "host", "disk", "sent", "seconds", "fits"]
    lines = [header, *(_line(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
    legend = (
        "states, peak, sent: of one rank, on its device, in a step; checkpointed: the peak with\n"
        "activation checkpointing; host, disk: of a machine; seconds: transfers of a step, all at\n"
        "once and one after another."
    )
    spans = [row.plain.ranks.span(tier) for row in rows for tier in Tier]
    if any(least != most for least, most in spans):
        legend += "\nRanks own whole tensors and differ: the numbers are of the one with most."
    return "\n".join(
        part
        for part in (head, note, "", table, "", legend, _verdict(rows, best))
        if part is not None
    )


def _line(row: Row) -> list[str]:
    plain, less = row.plain, row.checkpointed
    on_device = sum(next(iter(plain.resting.tiers.values())).values())
    least, most = plain.transfer_seconds
    fits = "yes" if plain.fits else "checkpointed" if less is not None and less.fits else "no"
    return [
        plain.choice.name,
        _gib(on_device),
        _gib(plain.device_bytes),
        "" if less is None else _gib(less.device_bytes),
        _gib(plain.host_bytes),
        _gib(plain.disk_bytes),
        _gib(plain.traffic.wire),
        f"{least:.3g}..{most:.3g}",
        fits,
    ]


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f}" if nbytes < 100 * _GIB else f"{nbytes / _GIB:.0f}"


def _verdict(rows: Sequence[Row], best: Any) -> str:
    if best is not None:
        how = " with activation checkpointing" if best["checkpointing"] else ""
        return (
            f"cheapest that fits: {best['choice']}{how}: {in_words(best['device_bytes'])} on each "
            f"device, {in_words(best['host_bytes_per_node'])} of CPU memory and "
            f"{in_words(best['disk_bytes_per_node'])} on disk for each machine"
        )
    estimates = [row.checkpointed or row.plain for row in rows]
    nearest = sorted(estimates, key=lambda e: sum(e.excess.values()))[:3]
    lines = ["nothing fits; nearest, all with activation checkpointing where there is a number:"]
    for one in nearest:
        missing = ", ".join(f"{in_words(n)} of {name}" for name, n in one.excess.items())
        lines.append(f"  {one.choice.name}: {missing} too little")
    return "\n".join(lines)
