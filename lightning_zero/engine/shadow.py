"""A copy of the trained module that rests as shards: an average of its weights, say.

[Note: Shadows] A shadow has a parameter for each one of the module, which holds the elements that
this rank steps, in the dtype and on the device of the master: it costs what one more optimizer
state costs, 1/N where those are shards. Inside `shown` the parameters of both are plain tensors of
the same elements, 1-D and in full precision, so that averaging, swapping and copying are what they
are without sharding. Outside it, a shadow's parameter is guarded as one that rests as a shard is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.writes import Fingerprint, own_elements
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.plan import BucketPlan
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.guarded import Placement, guard, placement_of, set_placement, unguard
from lightning_zero.tensors.meta import leave_out
from lightning_zero.tensors.sharded import ShardedTensor

__all__ = ["Shadow", "ShadowBucket"]


class ShadowBucket:
    """What one bucket is to its parameters, for those of a shadow: values of their own, at rest.

    Attributes:
        parameters: Of the shadow, by slot.
        own_dtypes: Dtype of each before it became a shadow.
        shard: 1-D, as long and laid out as the bucket's master, in the dtype of that.
        pins: Number of outside looks (`gathered`) under way.
        is_shown: The parameters point at a whole buffer, to be written to.
        prints: As of a bucket.
    """

    is_gathered_before_use = True
    prints: list[Fingerprint] | None = None

    def __init__(
        self,
        bucket: Bucket,
        parameters: list[nn.Parameter],
        comm: Communicator,
        device: torch.device | None,
    ) -> None:
        """Takes rank 0's values; on the meta device, those of the bucket. Collective.

        Args:
            bucket: Of the trained module.
            parameters: By slot; whole.
            comm: The engine's.
            device: Where the shard rests; None: where the master is stepped.
        """
        self._bucket = bucket
        self._comm = comm
        self.parameters = parameters
        self.own_dtypes = [parameter.dtype for parameter in parameters]
        self.pins = 0
        self.is_shown = False
        exact = bucket.masters.exact()
        self.shard: Tensor = exact.to(device or exact.device, copy=True)
        if not any(parameter.is_meta for parameter in parameters):
            whole = FlatBuffer(bucket.plan.layout, exact.dtype, bucket.device)
            for view, parameter in zip(whole.views, parameters, strict=True):
                view.copy_(parameter.detach())
            self.accept(whole)
        for index, (slot, parameter) in enumerate(
            zip(bucket.plan.layout.slots, parameters, strict=True)
        ):
            placement = Placement(
                name=slot.name,
                shape=parameter.shape,
                dtype=parameter.dtype,
                own_class=type(parameter),
                bucket=self,
                index=index,
                make_whole=_refuse,
            )
            set_placement(parameter, placement)
            parameter.grad = None  # of an earlier fit, perhaps, and whole
        self.rest()

    # ---------------------------------------------------------------- at rest

    @property
    def plan(self) -> BucketPlan:
        """The bucket's."""
        return self._bucket.plan

    @property
    def device(self) -> torch.device:
        """Where the shard rests."""
        return self.shard.device

    @property
    def tier(self) -> Tier:
        """Where the shard rests; where both are the same memory, beside the master."""
        if self._bucket.device.type != "cpu":
            return Tier.CPU if self.device.type == "cpu" else Tier.DEVICE
        return Tier.DEVICE if self.plan.tiers.optim is Tier.DEVICE else Tier.CPU

    @property
    def steps_whole(self) -> bool:
        """Every rank holds all elements."""
        return self._bucket.steps_whole

    @property
    def masters(self) -> ShadowBucket:
        """Itself: a shadow is nothing but values in full precision."""
        return self

    def owned(self, index: int) -> range:
        """Elements of slot `index`, counted from its own first one, that this rank holds."""
        return self._bucket.owned(index)

    def exact_parts(self) -> list[Tensor]:
        """By slot, the elements `owned(index)`: 1-D views."""
        return self._bucket.shards.cut(self.shard)

    def look_at_rest(self, index: int) -> Tensor:
        """What `parameter.data` is of slot `index`."""
        part = self.exact_parts()[index]
        if self.steps_whole:
            return part.view(self.plan.layout.slots[index].shape)
        return ShardedTensor.of(_ShadowPart(self, index), self._bucket.cuts[index], "p.data", part)

    def settle(self) -> None:
        """Nothing is ever under way."""

    def put(self, index: int, values: Tensor) -> None:
        """`parameter.data = values` of slot `index`, at rest: takes this rank's elements. Local."""
        if isinstance(values, ShardedTensor):
            values = values.full_tensor()
        own = own_elements(values, self.plan.layout.slots[index], self.owned(index))
        self.exact_parts()[index].copy_(own)

    def equals(self, one: Tensor, other: Tensor) -> bool:
        """Refused, as every use of an average in shards."""
        _refuse(placement_of(one).name)

    def rest(self) -> None:
        """Points the parameters at their slices, guarded."""
        for parameter, part in zip(self.parameters, self.exact_parts(), strict=True):
            unguard(parameter)
            parameter.data = part
            guard([parameter])

    def bare(self) -> None:
        """Lets the parameters be used as what they are: slices. `collect` ends it."""
        for parameter in self.parameters:
            unguard(parameter)

    def collect(self) -> None:
        """Takes over what the bare parameters hold, which may have been moved or cast."""
        parts = [parameter.data for parameter in self.parameters]
        here = self.exact_parts()
        if any(_is_elsewhere(part, own) for part, own in zip(parts, here, strict=True)):
            self.shard = self.shard.to(parts[0].device, parts[0].dtype, copy=True)
            for own, part in zip(self.exact_parts(), parts, strict=True):
                own.copy_(part)
        self.rest()

    def load(self, read: Callable[[int, range], Tensor | None]) -> None:
        """Takes new values, each rank its own elements; as `Masters.load`. Local."""
        for index, part in enumerate(self.exact_parts()):
            values = read(index, self.owned(index))
            if values is not None:
                part.copy_(values.reshape(-1))

    # ---------------------------------------------------------------- whole

    def exact_views(self) -> list[Tensor]:
        """By slot, all elements, n-D, on the device of the bucket. Collective."""
        return self.gather_whole().views

    def gather_whole(self) -> FlatBuffer:
        """A new buffer with all elements on every rank. Collective; waits."""
        return self._bucket.masters.gather_parts(self.shard.to(self._bucket.device))

    def accept(self, exact: FlatBuffer, from_rank: int = 0) -> None:
        """Takes one rank's values of `exact` on every rank. Collective."""
        self.prints = None
        self._comm.broadcast_(exact.tensor, from_rank)
        own = exact.tensor if self.steps_whole else exact.shard(self._comm.mesh.shard_rank)
        self.shard.copy_(own)

    def show(self, views: list[Tensor]) -> None:
        """Points the parameters at `views`, plain, until `hide`."""
        self.pins += 1
        self.is_shown = True
        for parameter, view in zip(self.parameters, views, strict=True):
            unguard(parameter)
            parameter.data = view

    def hide(self) -> None:
        """Points the parameters back at their slices."""
        self.pins -= 1
        self.is_shown = False
        self.rest()

    @property
    def comm(self) -> Communicator:
        """The engine's."""
        return self._comm

    @property
    def lockstep(self) -> Any:
        """The engine's."""
        return self._bucket.lockstep

    def wait_for_all_steps(self) -> None:
        """A worker's gathers come before any other."""
        self._bucket.wait_for_all_steps()

    @property
    def is_whole(self) -> bool:
        """The parameters show all elements."""
        return self.pins > 0

    def gather(self) -> None:
        """Shows all elements until `release`. Collective."""
        if not self.is_whole:
            for parameter, view in zip(self.parameters, self.exact_views(), strict=True):
                unguard(parameter)
                parameter.data = view

    def finish_gather(self) -> None:
        """Nothing is ever under way."""

    def release(self) -> None:
        """Back at rest after `gather`."""
        if not self.pins:
            self.rest()

    def drop_whole(self) -> None:
        """As `release`: what is shown is a copy."""
        self.release()

    def give_back(self, device: torch.device | None) -> None:
        """Makes every parameter a whole tensor of its own on `device`. Collective.

        None: without values, see tensors/meta.py.
        """
        views = self.exact_views() if device is not None else []
        for index, (slot, parameter) in enumerate(
            zip(self.plan.layout.slots, self.parameters, strict=True)
        ):
            dtype = self.own_dtypes[index]
            unguard(parameter)
            set_placement(parameter, None)
            if device is None:
                leave_out(parameter, slot.name, dtype, torch.Size(slot.shape))
            else:
                parameter.data = views[index].to(device, dtype, copy=True)


class Shadow:
    """A copy of the module of an engine whose parameters rest as shards. See [Note: Shadows].

    Args:
        engine: Holds the module.
        module: The copy: parameters of the same names and shapes, whole. Collective: every rank.
        device: Where the shards rest; None: where the masters are stepped.

    Raises:
        ValueError: Other parameters than the engine's module has.
    """

    def __init__(
        self, engine: Engine, module: nn.Module, *, device: torch.device | None = None
    ) -> None:
        if not is_copy(module, engine.module):
            raise ValueError(
                f"{type(module).__name__} is no copy of the trained {type(engine.module).__name__}:"
                " its parameters have other names or shapes."
            )
        self.module = module
        self._engine = engine
        named = parameters_by_name(module)
        with torch.no_grad():
            self.buckets = [
                ShadowBucket(
                    bucket,
                    [named[slot.name] for slot in bucket.plan.layout.slots],
                    engine.comm,
                    device,
                )
                for bucket in engine.buckets
            ]
        engine.shadows.append(self)

    def allocated_bytes(self) -> dict[Tier, int]:
        """Bytes of this rank's elements, by tier."""
        held: Counter[Tier] = Counter()
        for bucket in self.buckets:
            held[bucket.tier] += bucket.shard.untyped_storage().nbytes()
        return dict(held)

    def data_parallel_bytes(self) -> int:
        """Bytes of all elements, as a copy of the module has them."""
        return sum(
            slot.numel * dtype.itemsize
            for bucket in self.buckets
            for slot, dtype in zip(bucket.plan.layout.slots, bucket.own_dtypes, strict=True)
        )

    @contextmanager
    def shown(self, *, writes: bool) -> Iterator[None]:
        """The parameters of both modules are this rank's elements. Collective where it `writes`.

        Args:
            writes: Those of the trained module are written to: narrower parameters, and whole ones
                on all ranks, then follow.
        """
        exact = [bucket.masters.show_own() for bucket in self._engine.buckets]
        try:
            with self.bare():
                yield
        finally:
            for bucket in self._engine.buckets:
                bucket.masters.hide()
        if writes:
            for bucket, values in zip(self._engine.buckets, exact, strict=True):
                bucket.masters.store(values)
            self._engine.schedule.shared.share_again()  # each rank has averaged its own

    @contextmanager
    def bare(self) -> Iterator[None]:
        """The shadow's parameters are this rank's elements, and may be moved. Local."""
        for bucket in self.buckets:
            bucket.bare()
        try:
            yield
        finally:
            for bucket in self.buckets:
                bucket.collect()

    def give_back(self, device: torch.device | None) -> None:
        """Makes the parameters whole, on `device`; None: leaves them out. Collective."""
        self._engine.shadows.remove(self)
        for bucket in self.buckets:
            bucket.give_back(device)


@dataclass(frozen=True)
class _ShadowPart:
    """This rank's elements of one parameter of the average."""

    shadow: ShadowBucket
    index: int

    def read(self) -> Tensor:
        """See `Part`."""
        return self.shadow.exact_parts()[self.index]

    def change(self, write: Callable[[Tensor], object]) -> None:
        """See `Part`."""
        write(self.read())


def _is_elsewhere(part: Tensor, own: Tensor) -> bool:
    has_moved = (part.device, part.dtype) != (own.device, own.dtype)  # an empty one has no address
    return has_moved or part.data_ptr() != own.data_ptr()


def is_copy(module: nn.Module, trained: nn.Module) -> bool:
    """Whether both have parameters of the same names and shapes."""

    def shapes(of: nn.Module) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in parameters_by_name(of).items()}

    return shapes(module) == shapes(trained)


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"parameter {name} of the averaged model rests as a shard; use "
        "`with lightning_zero.gathered(averaged_model)` on every rank to see it whole, and a "
        "checkpoint for its state dict."
    )
