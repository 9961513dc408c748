"""What `lightning-zero plan` has found, as values for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_zero.planner import Estimate
from lightning_zero.strategy.auto import as_arguments

__all__ = ["Row", "as_dict", "best_of"]


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
    return {
        "choice": best.choice.name,
        "strategy": as_arguments(best.choice.config),
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
