"""Units: what is gathered and released together, at hand, ahead of use or for other ranks.

In which order they are gathered is decided in layout/order.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_zero.core.bucket import Bucket
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.order import CollectiveOrder, prefetch
from lightning_zero.layout.plan import UnitPlan
from lightning_zero.record.recorder import Recorder

__all__ = ["Call", "Unsharder", "Unit"]


class Call:
    """One forward of a unit.

    Attributes:
        given: While it is under way, tensors among its arguments, and the nodes that had made them.
        old_nodes: Those nodes, with the ones of what the tensors are views of.
        inputs: Keys of the inputs whose gradients tell that backward has left it.
        awaited: Those whose gradients have not come since backward has entered it.
        is_done: Backward has left it.
    """

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, Node | None]] = []
        self.old_nodes: set[Node | None] = set()
        self.inputs: frozenset[int] = frozenset()
        self.awaited: set[int] = set()
        self.is_done = False

    def forget_given(self) -> None:
        """The forward is over: what it was given may be freed."""
        self.given, self.old_nodes = [], set()


class Unit:
    """Buckets that are gathered before a module's forward and released after it.

    Attributes:
        index: Position in the layout; the root is 0.
        module: Whose forward uses the parameters; None for the root.
        buckets: The buckets whose parameters rest as shards.
        is_unsharded: All of them are whole, or on their way.
        is_held: Stays whole until the end of the step: the root, and what is used out of turn.
        num_awaited: Forwards whose inputs, when their gradients come, tell that backward is done.
        calls: The forwards under way.
        entered: The forwards that backward has entered and, as far as can be told, not left.
    """

    def __init__(self, plan: UnitPlan, index: int, buckets: Sequence[Bucket]) -> None:
        self.name = plan.name
        self.index = index
        self.buckets = [bucket for bucket in buckets if bucket.shards_params]
        self.numel = sum(bucket.plan.layout.numel for bucket in self.buckets)
        self.stays_unsharded = index == 0
        self.num_awaited = 0
        self.calls: list[Call] = []
        self.entered: set[Call] = set()
        self.module: nn.Module | None = None
        self._num_unsharded = sum(bucket.is_unsharded for bucket in self.buckets)
        self.is_unsharded = self._num_unsharded == len(self.buckets)
        self._unsharded_units: set[Unit] = set()
        for bucket in self.buckets:
            bucket.on_unsharded_change = self._count

    def join(self, unsharded_units: set[Unit]) -> None:
        """Keeps `unsharded_units` right as to this one, if it has buckets."""
        self._unsharded_units = unsharded_units
        if self.is_unsharded and self.buckets:
            unsharded_units.add(self)

    def _count(self, is_unsharded: bool) -> None:
        self._num_unsharded += 1 if is_unsharded else -1
        self.is_unsharded = self._num_unsharded == len(self.buckets)
        change = self._unsharded_units.add if self.is_unsharded else self._unsharded_units.discard
        change(self)

    @property
    def is_backward_done(self) -> bool:
        """Nothing in this backward needs its parameters again: all have their gradients."""
        if self.num_awaited > 0 or self.stays_unsharded:
            return False
        return all(
            bucket.grads.has_all and all(p.requires_grad for p in bucket.parameters)
            for bucket in self.buckets
        )

    @property
    def is_saved_for_backward(self) -> bool:
        """A graph that a backward has still to walk may hold views of the parameters."""
        return any(bucket.is_saved_for_backward for bucket in self.buckets)

    @is_saved_for_backward.setter
    def is_saved_for_backward(self, is_saved_for_backward: bool) -> None:
        for bucket in self.buckets:
            bucket.is_saved_for_backward = is_saved_for_backward

    def aliases(self, tensor: Tensor) -> bool:
        """`tensor` is a view of whole parameters, which are freed on release."""
        return any(bucket.aliases(tensor) for bucket in self.buckets)

    def reshard(self) -> None:
        for bucket in self.buckets:
            bucket.reshard()


class Unsharder:
    """The units of one engine, the root first; the recorder hears of prefetches that come late."""

    def __init__(
        self, units: Sequence[Unit], order: CollectiveOrder, recorder: Recorder, config: ZeroConfig
    ) -> None:
        self.units = list(units)
        self.is_needed = any(unit.buckets for unit in units)  # some rest as shards
        self._order = order
        self._recorder = recorder
        self._config = config
        self._is_backward = False  # units are asked for from the end of the layout on
        self._unclaimed: dict[Unit, None] = {}  # gathered for other ranks, or ahead; in order
        self._unsharded: set[Unit] = set()
        for unit in units:
            unit.join(self._unsharded)
        self._reads_files = any(b.shards.reader is not None for u in units for b in u.buckets)

    def begin_backward(self) -> None:
        self._is_backward = True

    def reset(self) -> None:
        """What was under way has ended, or never will. Local."""
        self._is_backward = False
        self._unclaimed.clear()
        for unit in self.units:
            unit.num_awaited = 0
            unit.entered.clear()

    def unshard_for_step(self) -> None:
        """Makes those whole that stay so throughout a step."""
        for unit in self.units:
            if unit.stays_unsharded:
                self.unshard(unit)

    def unshard(self, unit: Unit) -> None:
        """Makes `unit` whole, then gathers ahead what comes next."""
        if not unit.buckets:
            return
        if not unit.is_unsharded:
            unit.buckets[0].check_outside_transform()  # ranks can agree on nothing inside of it
        may_repeat = (
            self._order.allows_uneven_calls
            and not torch.is_grad_enabled()
            and not unit.is_unsharded
        )
        self._order.mark_used(unit.index, may_repeat=may_repeat)
        if unit in self._unclaimed or not unit.is_unsharded:
            self._recorder.count_prefetch(is_hit=unit.is_unsharded)
            self._drop_unclaimed(unit)
        while not unit.is_unsharded:
            self._order.request_unshard(unit.index, is_backward=self._is_backward)
        self._unclaimed.pop(unit, None)
        for bucket in unit.buckets:
            bucket.wait_for_unshard()
        self.prefetch()

    def _drop_unclaimed(self, wanted: Unit) -> None:
        """Frees what was gathered in vain: all before `wanted`, in the order of their gathers."""
        while self._unclaimed and (first := next(iter(self._unclaimed))) is not wanted:
            del self._unclaimed[first]
            first.reshard()

    def prefetch(self) -> None:
        """Gathers what comes next, as far as the settings allow."""
        if self._order.next_unit is not None:
            ahead = sum([unit.numel for unit in self._unclaimed])
            prefetch(self._order, self.units, self._unsharded, self._config, ahead)
        if self._reads_files:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Begins to read shards that rest in files, as far ahead as there are buffers."""
        for index in self._order.upcoming():
            if not all(bucket.read_ahead() for bucket in self.units[index].buckets):
                return

    def issue_unshard(self, unit: Unit, *, is_kept: bool) -> None:
        """Issues the gather of `unit`. Collective.

        Args:
            unit: Which; one that is whole sends its shard again.
            is_kept: It stays whole until its use, or that of another; else it is for other ranks.
        """
        was_whole = unit.is_unsharded
        for bucket in unit.buckets:
            bucket.unshard()
        if was_whole:
            return
        if is_kept or self._order.is_last_of_forward(unit.index):
            self._unclaimed[unit] = None
        else:
            unit.reshard()

    def reshard_all(self) -> None:
        """Frees whole parameters, also those that were gathered for other ranks. Local."""
        self._unclaimed.clear()
        for unit in self.units:
            unit.reshard()
