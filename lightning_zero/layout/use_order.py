"""In which order units are used, and what that decides: what is gathered ahead, and what stays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

from lightning_zero.layout.config import ZeroConfig

__all__ = ["Unit", "UseOrder", "gather_ahead", "stays_after_forward"]


class Unit(Protocol):
    """What is gathered and released together."""

    numel: int  # of all its buckets that rest as shards, padding included
    is_held: bool  # stays whole until the end of the step, as the root does


_U = TypeVar("_U", bound=Unit)


class UseOrder(Generic[_U]):
    """The order in which units were asked for, and so what comes next."""

    def __init__(self) -> None:
        self._last: list[_U] = []
        self._now: list[_U] = []
        self._seen: set[_U] = set()  # those of `_now`
        self._cursor = 0

    def begin(self) -> None:
        """A new pass begins; the one that ends becomes the one to follow."""
        if self._now:
            self._last, self._now = self._now, []
            self._seen.clear()
        self._cursor = 0

    def record(self, unit: _U, *, may_repeat: bool = False) -> None:
        """`unit` is asked for; finds its place in the last pass, if it has one from here on.

        Args:
            unit: The unit.
            may_repeat: If it has none, and was asked for in this pass already, a new one begins, as
                with each token that is generated.
        """
        if not self._find(unit) and may_repeat and unit in self._seen:
            self.begin()
            self._find(unit)
        self._now.append(unit)
        self._seen.add(unit)

    def _find(self, unit: _U) -> bool:
        for position in range(self._cursor, len(self._last)):
            if self._last[position] is unit:
                self._cursor = position + 1
                return True
        return False

    @property
    def is_at_end(self) -> bool:
        """The last pass ended with the unit that was recorded last."""
        return bool(self._last) and self._cursor == len(self._last)

    @property
    def following(self) -> _U | None:
        """What came after the last recorded unit, the last time."""
        return None if self._cursor >= len(self._last) else self._last[self._cursor]

    def upcoming(self) -> Iterator[_U]:
        """Likewise all that came after it, in order."""
        return islice(self._last, self._cursor, None)


def gather_ahead(
    order: UseOrder[_U], whole: Collection[_U], config: ZeroConfig, gather: Callable[[_U], object]
) -> None:
    """Gathers what comes next, as far as the settings allow.

    Args:
        order: Of this pass.
        whole: Units that are whole or on their way; `gather` adds to them.
        config: Of the engine.
        gather: Makes one whole.
    """
    budget, limit = config.prefetch_bucket_size, config.max_live_parameters
    if not config.overlap_comm:
        return
    if budget is None and sum(not unit.is_held for unit in whole) > 1:
        return
    ahead = 0
    for unit in order.upcoming():
        ahead += unit.numel
        if budget is not None and ahead > budget:
            return
        if unit not in whole:
            if limit is not None and sum(one.numel for one in whole) + unit.numel > limit:
                return
            gather(unit)
        if budget is None:
            return  # one, where there is none yet


def stays_after_forward(unit: _U, order: UseOrder[_U], config: ZeroConfig) -> bool:
    """Whether backward finds `unit` whole, which is not gathered again then.

    Args:
        unit: Its forward has ended.
        order: Of the forward pass.
        config: Of the engine.
    """
    return unit.is_held or config.reshard_after_forward is False or order.is_at_end
