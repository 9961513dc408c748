"""Whole units: which are at hand, ahead of use or for other ranks, and how much room there is.

In which order they are gathered is decided in layout/order.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_zero.core.unit import Unit
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.order import Order, gather_ahead
from lightning_zero.record.recorder import Recorder

__all__ = ["Gathering"]


class Gathering:
    """The units of one engine.

    Args:
        units: The root first.
        order: Of all ranks; decides.
        recorder: Is told whether prefetches came in time.
        config: How far to gather ahead.

    Attributes:
        units: The root first.
        is_needed: Some rest as shards.
    """

    def __init__(
        self, units: Sequence[Unit], order: Order, recorder: Recorder, config: ZeroConfig
    ) -> None:
        self.units = list(units)
        self.is_needed = any(unit.buckets for unit in units)
        self._order = order
        self._recorder = recorder
        self._config = config
        self._is_backward = False
        self._unclaimed: dict[Unit, None] = {}  # gathered for other ranks, or ahead; in order
        self._whole: set[Unit] = set()
        for unit in units:
            unit.join(self._whole)
        self._reads_files = any(b.shards.reader is not None for u in units for b in u.buckets)

    # ---------------------------------------------------------------- passes

    def begin_backward(self) -> None:
        """From now on units are asked for from the end of the layout on. Local."""
        self._is_backward = True

    def forget(self) -> None:
        """What was under way has ended, or never will. Local."""
        self._is_backward = False
        self._unclaimed.clear()
        for unit in self.units:
            unit.num_awaited = 0
            unit.entered.clear()

    def stays_after_forward(self, unit: Unit) -> bool:
        """Backward begins with `unit`."""
        return self._order.is_last_of_forward(unit.index)

    # ---------------------------------------------------------------- whole units

    def unshard_held(self) -> None:
        """Makes those whole that stay so throughout a step."""
        for unit in self.units:
            if unit.is_held:
                self.unshard(unit)

    def unshard(self, unit: Unit) -> None:
        """Makes `unit` whole, then gathers ahead what comes next."""
        if not unit.buckets:
            return
        may_repeat = self._order.is_loose and not torch.is_grad_enabled() and not unit.is_whole
        self._order.use(unit.index, may_repeat=may_repeat)
        if unit in self._unclaimed or not unit.is_whole:
            self._recorder.count(is_hit=unit.is_whole)
            self._drop_unclaimed(unit)
        while not unit.is_whole:
            self._order.want(unit.index, is_backward=self._is_backward)
        self._unclaimed.pop(unit, None)
        unit.finish_gather()
        self.prefetch()

    def _drop_unclaimed(self, wanted: Unit) -> None:
        """Frees what was gathered in vain: all before `wanted`, in the order of their gathers."""
        while self._unclaimed and (first := next(iter(self._unclaimed))) is not wanted:
            del self._unclaimed[first]
            first.release()

    def prefetch(self) -> None:
        """Gathers what comes next, as far as the settings allow."""
        if self._order.next_unit is not None:
            ahead = sum([unit.numel for unit in self._unclaimed])
            gather_ahead(self._order, self.units, self._whole, self._config, ahead)
        if self._reads_files:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Begins to read shards that rest in files, as far ahead as there are buffers."""
        for index in self._order.upcoming():
            if not all(bucket.read_ahead() for bucket in self.units[index].buckets):
                return

    def issue(self, unit: Unit, *, is_kept: bool) -> None:
        """Issues the gather of `unit`. Collective.

        Args:
            unit: Which; one that is whole sends its shard again.
            is_kept: It stays whole until its use, or that of another; else it is for other ranks.
        """
        was_whole = unit.is_whole
        unit.gather()
        if was_whole:
            return
        if is_kept or self._order.is_last_of_forward(unit.index):
            self._unclaimed[unit] = None
        else:
            unit.release()

    def release_all(self) -> None:
        """Frees whole parameters, also those that were gathered for other ranks. Local."""
        self._unclaimed.clear()
        for unit in self.units:
            unit.release()
