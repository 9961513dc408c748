"""What is gathered ahead of its use: one rule for the engine and the planner."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.order import Order

__all__ = ["Unit", "gather_ahead"]


class Unit(Protocol):
    """What is gathered and released together."""

    numel: int  # of all its buckets that rest as shards, padding included
    is_held: bool  # stays whole until the end of the step, as the root does


def gather_ahead(
    order: Order, units: Sequence[Unit], whole: Collection[Unit], config: ZeroConfig, ahead: int
) -> None:
    """Gathers what comes next in the plan, as far as the settings allow.

    Args:
        order: Decides what comes next.
        units: The root first.
        whole: Those that are whole or on their way.
        config: Of the engine.
        ahead: Elements that have been gathered ahead of their use.
    """
    if not config.overlap_comm:
        return
    budget, limit = config.prefetch_bucket_size, config.max_live_parameters
    while (index := order.next_unit) is not None:
        unit = units[index]
        ahead += unit.numel
        if unit in whole:
            return  # it may be in use, and be used once more
        if budget is None and len([one for one in whole if not one.is_held]) > 1:
            return  # one, where there is none yet
        if budget is not None and ahead > budget:
            return
        if limit is not None and sum([one.numel for one in whole]) + unit.numel > limit:
            return
        order.gather_ahead()
