"""Access to the parameters of one bucket by code outside of the engine.

A guarded parameter calls the methods of its `BucketAccess`: when a torch function uses it outside
of its unit's forward, when its `.data` is read or set, and when it is copied.
`lightning_zero.gathered` (core/access.py) reads the parameters here, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.lockstep import Lockstep
from lightning_zero.core.params import Phase
from lightning_zero.core.writes import own_elements
from lightning_zero.layout.stage import State
from lightning_zero.tensors.guarded import (
    BetweenStepsError,
    GuardedParameter,
    Placement,
    attributes_of,
    placement_of,
    set_placement,
)
from lightning_zero.tensors.sharded import ShardedTensor

__all__ = ["BucketAccess", "access_of", "bucket_of", "lockstep_of", "make_plain"]


class BucketAccess:
    """Access to the parameters of one bucket from outside. Implements `ParameterHolder`.

    Args:
        bucket: Bucket of the parameters.
        lockstep: Lockstep of the engine; it synchronizes ranks before collective accesses.
        unshard_out_of_order: Called with the bucket and a parameter's name before a use outside of
            the unit's forward.
    """

    def __init__(
        self,
        bucket: Bucket,
        lockstep: Lockstep,
        unshard_out_of_order: Callable[[Bucket, str], None],
    ) -> None:
        self.bucket = bucket
        self.lockstep = lockstep
        self.device = bucket.device
        self._unshard_out_of_order = unshard_out_of_order

    def install(self) -> None:
        """Makes this object the holder of the bucket's parameters."""
        bucket = self.bucket
        for parameter in bucket.parameters:
            placement = dataclasses.replace(
                placement_of(parameter),
                holder=self,
                ensure_unsharded=self._unshard_on_use,
                set_grad=self._set_grad,
                on_data_read=bucket.writes.data_read.add,
            )
            set_placement(parameter, placement)

    def _unshard_on_use(self, name: str) -> None:
        """Guard of the parameters: a torch function is applied to parameter `name`."""
        self.lockstep.ensure_run()
        self.bucket.shards.storage.state_offload.check(State.PARAM)
        if self.bucket.params.are_sharded:
            self._unshard_out_of_order(self.bucket, name)
        else:
            self.bucket.params.wait_for_unshard()

    def _set_grad(self, index: int, grad: Tensor) -> None:
        self.bucket.grads.param_grads.assign(index, grad)

    def wait_for_update(self) -> None:
        """Waits for a step in progress and the all-gather after it. Local."""
        self.lockstep.ensure_run()
        self.bucket.wait_for_update()

    # ---------------------------------------------------------------- parameter.data

    def sharded_data(self, index: int) -> Tensor:
        """`parameter.data` of slot `index`: sharded, or the unsharded tensor if replicated. Local.

        An all-gather in flight for a later use is finished and freed, so that the next one sends
        what is written here; on gloo this waits for its data. Nothing is unsharded by this call.
        """
        bucket = self.bucket
        bucket.shards.storage.state_offload.check(State.PARAM)
        self.wait_for_update()
        bucket.params.reshard()
        bucket.params.wait_for_unshard()  # inside a transform of torch.func, which does not reshard
        if bucket.params.phase is Phase.SHARDED:
            values = bucket.shards.master_view(index)
            shard = bucket.writes.data_shards.get(index)
            if shard is None:
                shard = bucket.writes.data_shards[index] = _ParamShard(self, index)
            return ShardedTensor.of(shard, bucket.shard_specs[index], "p.data", values)
        return bucket.parameters[index].data  # plain by now

    def change_sharded_data(self, index: int, write: Callable[[Tensor], object]) -> None:
        """Lets `write` change this rank's elements of `sharded_data` in place."""
        bucket = self.bucket
        bucket.shards.storage.state_offload.check(State.PARAM)
        self.wait_for_update()
        bucket.params.reshard()
        name = bucket.plan.layout.slots[index].name
        if bucket.params.phase is not Phase.SHARDED:
            raise RuntimeError(
                f"parameter.data of {name} was read while it was sharded, and the parameter is "
                "unsharded now; read parameter.data again."
            )
        self.lockstep.before_write()
        self.lockstep.order.note_write(name)
        bucket.shards.change(index, write)

    def assign_data(self, index: int, values: Tensor) -> None:
        """Implements `parameter.data = values` of slot `index` while it is guarded. Local.

        Tensors that were `parameter.data` until now keep their values.

        Args:
            index: The slot.
            values: Tensor of the full shape, plain or sharded (collective if it is sharded in
                another way), or this rank's elements, 1-D.

        Raises:
            ValueError: `values` have another shape or dtype.
            RuntimeError: The parameter is needed by a backward.
        """
        bucket = self.bucket
        bucket.shards.storage.state_offload.check(State.PARAM)
        bucket.params.reshard()  # a prefetched parameter is unsharded again
        slot, spec = bucket.plan.layout.slots[index], bucket.shard_specs[index]
        if isinstance(values, GuardedParameter):
            values = values.data
        given = values
        bucket.writes.check_dtype(index, values)
        if isinstance(values, ShardedTensor) and tuple(values.shape) == slot.shape:
            if values.is_view_of(bucket.writes.data_shards.get(index)):
                return  # unchanged
            is_own = bucket.params.phase is Phase.SHARDED and spec.matches(values.spec)
            values = values.local if is_own else values.full_tensor()
        if bucket.params.phase is Phase.UNSHARDING:  # inside a transform of torch.func
            bucket.params.wait_for_unshard()
            bucket.parameters[index].data = values  # synced by `reshard`
            return
        own = own_elements(values, slot, bucket.shards.owned(index))
        num_known = bucket.shards.num_views
        if bucket.params.is_saved_for_backward and bucket.params.unsharded.num_holders(num_known):
            raise RuntimeError(
                f"parameter.data of {slot.name} was set between a forward and its backward, which "
                "needs the values that the forward used. Set it before the forward or after the "
                "backward; if no backward follows, call the module under torch.no_grad()."
            )
        self.lockstep.before_write()
        bucket.writes.assign(index, own, given)

    # ---------------------------------------------------------------- copies

    def copy_plain(self, index: int, *, is_for_file: bool) -> nn.Parameter:
        """A copy of slot `index` as it would be without an engine: its own class, dtype and memory.

        For a file, full tensors of sharded parameters are on the CPU. Collective if the parameter
        is sharded.
        """
        bucket, slot = self.bucket, self.bucket.plan.layout.slots[index]
        parameter, dtype = bucket.parameters[index], bucket.orig_dtypes[index]
        try:
            if isinstance(parameter, GuardedParameter):
                self._unshard_on_use(slot.name)
            if tuple(parameter.shape) != slot.shape:
                dtype = parameter.dtype  # while it is stepped
            values = parameter.detach().to(dtype, copy=True)
        except BetweenStepsError:
            data = self.sharded_data(index)
            assert isinstance(data, ShardedTensor)
            device = torch.device("cpu") if is_for_file else self.device
            values = data.full_copy("copy", dtype).to(device)
        return make_plain(parameter, values)

    # ---------------------------------------------------------------- gathered

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context of `gathered` in which the parameters are unsharded, for reading. Collective."""
        bucket = self.bucket
        bucket.shards.storage.state_offload.check(State.PARAM)
        if bucket.params.has_views_installed:
            yield  # an outer context has installed views, for writing
            return
        bucket.wait_for_all_steps()
        was_unsharded = bucket.params.is_unsharded
        if bucket.params.are_sharded:
            bucket.params.unshard()
        bucket.params.wait_for_unshard()
        if bucket.params.num_pins:  # by an outer context, which finds writes
            yield
            return
        bucket.params.sync_writes()
        bucket.writes.watch()
        bucket.params.pin()
        is_kept = False
        try:
            yield
            is_kept = True
        finally:
            bucket.params.unpin()
            if not is_kept:
                bucket.params.discard_unsharded()
            elif not was_unsharded:
                bucket.params.reshard()

    def check_unchanged(self) -> None:
        """Raises if this rank finds a write to a parameter inside `reading`. Local."""
        bucket = self.bucket
        bucket.wait_for_all_steps()
        for index in bucket.writes.changed():
            outcome = "is dropped" if bucket.params.are_sharded else "stays on this rank"
            raise RuntimeError(
                f"parameter {bucket.plan.layout.slots[index].name} was changed inside "
                "lightning_zero.gathered(...), which is for reading; use gathered(..., "
                "writeback=True), which keeps the changes of one rank. The change "
                f"{outcome}."
            )


class _ParamShard:
    """This rank's elements of one sharded parameter; a copy after the parameter got new values.

    Implements `DetachableShard` of tensors/shard_spec.py.
    """

    def __init__(self, access: BucketAccess, index: int) -> None:
        self._access = access
        self._bucket = access.bucket
        self._index = index
        self._old_values: Tensor | None = None  # 1-D; None until the parameter gets new values

    def read(self) -> Tensor:
        if self._old_values is not None:
            return self._old_values
        self._bucket.shards.storage.state_offload.check(State.PARAM)
        self._bucket.wait_for_update()
        return self._bucket.shards.values(self._index).detach()

    def change(self, write: Callable[[Tensor], object]) -> None:
        if self._old_values is not None:
            write(self._old_values)
        else:
            self._access.change_sharded_data(self._index, write)

    def detach(self) -> None:
        self._old_values = self.read().clone()

    def check_memory(self, call: str, num_bytes: int) -> None:
        if self._bucket.device.type == "cpu":
            self._access.lockstep.check_cpu_memory(call, num_bytes)


def make_plain(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """A parameter like `parameter` with these values, which no engine holds. Local."""
    own_class = placement_of(parameter).own_class
    plain = Tensor._make_subclass(own_class, values, parameter.requires_grad)
    assert isinstance(plain, nn.Parameter)
    plain.__dict__.update(attributes_of(parameter))
    return plain


def access_of(placement: Placement) -> BucketAccess:
    """Access to the bucket of an engine, or of an average, that holds a parameter."""
    return cast("BucketAccess", placement.holder)


def bucket_of(placement: Placement) -> Bucket:
    """The bucket of an engine, or of an average, that holds a parameter."""
    return access_of(placement).bucket


def lockstep_of(parameter: Tensor) -> Lockstep:
    """Lockstep of the engine that holds `parameter`."""
    return access_of(placement_of(parameter)).lockstep
