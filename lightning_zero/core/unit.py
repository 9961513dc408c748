"""Units: buckets that are all-gathered and freed together, and how early they are prefetched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.order import CollectiveOrder
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.plan import UnitPlan

__all__ = ["Call", "Prefetcher", "Unit", "with_base"]


class Call:
    """One forward of a unit.

    Args:
        args: Leaves of the arguments.

    Attributes:
        tensor_args: Tensor arguments with the nodes that made them; empty after the forward.
        inputs: Those of them that have nodes, by id: their gradients show that backward has left
            the call.
        prior_nodes: Those nodes, and the nodes of the tensors that the arguments are views of.
    """

    def __init__(self, args: Sequence[Any] = ()) -> None:
        self.tensor_args: list[tuple[Tensor, Any]] = []
        self.inputs: dict[int, Tensor] = {}
        self.prior_nodes: set[Any] = set()
        for tensor in args:
            if not isinstance(tensor, Tensor):
                continue
            node = tensor.grad_fn
            self.tensor_args.append((tensor, node))
            if node is not None:
                self.inputs[id(tensor)] = tensor
                for seen in with_base(tensor):
                    self.prior_nodes.add(seen.grad_fn)
        self._input_keys = frozenset(self.inputs)
        self._awaited = set(self._input_keys)  # since backward entered this call
        self._is_done = False  # backward has left this call

    def release_args(self) -> None:
        """Drops the references to the arguments after the forward, so that they can be freed."""
        self.tensor_args, self.inputs, self.prior_nodes = [], {}, set()

    def arrive(self, key: int) -> bool:
        """The gradient of an input has arrived, maybe again; returns whether it was the last."""
        is_new = key in self._awaited
        self._awaited.discard(key)
        return is_new and not self._awaited

    def enter(self) -> bool:
        """Backward enters this call; returns whether it had left it before."""
        is_again, self._is_done = self._is_done, False
        if is_again:
            self._awaited = set(self._input_keys)
        return is_again

    def finish(self) -> None:
        """Backward has left this call."""
        self._is_done = True


def with_base(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns `tensor`, and its base if it is a view of a tensor with a node in the graph."""
    base = tensor._base
    if base is None or base.grad_fn is None:
        return (tensor,)
    return tensor, base


class Unit:
    """Buckets that are unsharded before a module's forward and resharded after it.

    Attributes:
        index: Position in the layout; the root is 0.
        module: Module whose forward uses the parameters; None for the root.
        buckets: The buckets whose parameters are sharded.
        numel: Elements of all buckets, padding included.
        unsharded_units: Units of the engine that are unsharded now; all of them share it.
        num_unsharded: Number of buckets that are unsharded, or whose all-gathers are in flight.
        is_unsharded: Whether all of them are.
        stays_unsharded: Whether the unit stays unsharded until the end of the step: the root, and
            units that are used outside their module's forward.
        num_awaited: Number of forwards whose input gradients have not all arrived in backward.
        calls: The forwards in progress.
        entered: The forwards that backward has entered and, as far as is known, not left.
    """

    def __init__(self, plan: UnitPlan, index: int, unsharded_units: set[Unit]) -> None:
        sharded = [bucket for bucket in plan.buckets if bucket.stage.shards_params]
        self.name = plan.name
        self.index = index
        self.buckets: list[Bucket] = []
        self.numel = sum(bucket.layout.numel for bucket in sharded)
        self.stays_unsharded = index == 0
        self.num_awaited = 0
        self.calls: list[Call] = []
        self.entered: set[Call] = set()
        self.module: nn.Module | None = None
        self.unsharded_units = unsharded_units
        self._num_buckets = len(sharded)
        self.num_unsharded = 0
        self.is_unsharded = self._num_buckets == 0

    def add(self, bucket: Bucket) -> None:
        """Appends the next bucket of the plan; each calls `count_bucket` from its beginning."""
        if bucket.params.are_sharded:
            self.buckets.append(bucket)

    def attach(self, root: nn.Module) -> nn.Module:
        """Finds the unit's module below `root`, and returns it."""
        self.module = root.get_submodule(self.name)
        return self.module

    def count_bucket(self, is_unsharded: bool) -> None:
        """Counts a bucket that is now unsharded, or no longer."""
        self.num_unsharded += 1 if is_unsharded else -1
        self.is_unsharded = self.num_unsharded == self._num_buckets
        if self.is_unsharded:
            self.unsharded_units.add(self)
        else:
            self.unsharded_units.discard(self)

    def keep_unsharded(self) -> None:
        """Keeps the unit unsharded from the beginning to the end of every step, from now on."""
        self.stays_unsharded = True

    # ---------------------------------------------------------------- calls

    def begin_call(self, args: Sequence[Any]) -> Call:
        """Begins a forward. `args`: leaves of its arguments; [] if its backward is not watched."""
        call = Call(args)
        self.calls.append(call)
        self.num_awaited += bool(call.inputs)
        return call

    def enter_backward(self, call: Call) -> None:
        """Backward has reached an output of `call`, perhaps not for the first time."""
        self.num_awaited += call.enter()  # the graph is traversed again
        self.entered.add(call)

    def leave_backward(self, call: Call) -> None:
        """All gradients of the inputs of `call` have arrived."""
        self.num_awaited -= 1
        call.finish()
        self.entered.discard(call)

    def reset_backward(self) -> None:
        """Forgets the backward in progress, which has ended or never will."""
        self.num_awaited = 0
        self.entered.clear()

    @property
    def is_backward_done(self) -> bool:
        """Whether this backward no longer needs the parameters: all have their gradients."""
        if self.num_awaited > 0 or self.stays_unsharded:
            return False
        return all(
            bucket.grads.has_all and all(p.requires_grad for p in bucket.parameters)
            for bucket in self.buckets
        )

    def note_graph(self) -> None:
        """A forward uses the parameters: with gradients, its graph may hold views of them."""
        if torch.is_grad_enabled():
            for bucket in self.buckets:
                bucket.params.keep_for_backward(True)

    def end_graphs(self, *, is_retained: bool = False) -> None:
        """Backward has traversed the graphs, and needs the parameters again only if retained."""
        for bucket in self.buckets:
            if bucket.params.is_saved_for_backward is not is_retained:
                bucket.params.keep_for_backward(is_retained)

    def is_aliased_by(self, values: Sequence[Any]) -> bool:
        """Whether one of `values` is a view of unsharded parameters, whose memory is freed."""
        for value in values:
            if isinstance(value, Tensor):
                for bucket in self.buckets:
                    if bucket.params.unsharded.aliases(value):
                        return True
        return False

    def reshard(self) -> None:
        """Frees the unsharded parameters. Local."""
        for bucket in self.buckets:
            if bucket.params.is_unsharded:
                bucket.params.reshard()


class Prefetcher:
    """Decides how far ahead of their use units are unsharded; in which order: core/order.py.

    Args:
        units: All units, the root first.
        order: The collective order of all ranks, which knows the next unit.
        config: The engine's settings.

    Attributes:
        unclaimed: Units that are unsharded, and were not used since, in this order.
    """

    def __init__(self, units: Sequence[Unit], order: CollectiveOrder, config: ZeroConfig) -> None:
        self._units = units
        self._order = order
        self._is_on = config.overlap_comm
        self._budget = config.prefetch_bucket_size
        self._keeps_forward = config.reshard_after_forward is False
        self.unclaimed: dict[Unit, None] = {}
        self._unsharded = units[0].unsharded_units
        self._reads_files = any(b.shards.reader is not None for u in units for b in u.buckets)

    def reshard_before(self, wanted: Unit) -> None:
        """Reshards units that were unsharded before `wanted` and not used, in this order."""
        for unit in list(self.unclaimed):
            if unit is wanted:
                return
            del self.unclaimed[unit]
            unit.reshard()

    def prefetch(self) -> None:
        """Unshards the next units of the schedule, as far as the settings allow. Collective."""
        order, unsharded = self._order, self._unsharded
        ahead = sum([unit.numel for unit in self.unclaimed]) if self.unclaimed else 0
        while self._is_on and order.current is not None:
            index = order.current.next_unit
            if index is None:
                break
            unit = self._units[index]
            ahead += unit.numel
            if unit in unsharded:
                break  # it may be in use, and be used once more
            # Without a budget, at most one is prefetched.
            if self._budget is not None:
                is_too_far = ahead > self._budget
            elif self._keeps_forward:  # the others may stay from their forward on
                is_too_far = bool(self.unclaimed)
            else:
                is_too_far = len([u for u in unsharded if not u.stays_unsharded]) > 1
            if is_too_far:
                break
            order.issue_next_unit()
        if self._reads_files:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Starts to read shards from files, as far ahead as there are buffers."""
        current = self._order.current
        for index in current.upcoming_units() if current is not None else ():
            if not all(bucket.params.read_ahead() for bucket in self._units[index].buckets):
                return
