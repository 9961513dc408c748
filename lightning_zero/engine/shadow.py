"""A copy of the trained module that rests as shards: an average of its weights, say.

[Note: Shadows] Each bucket of the module has one beside it for the copy: of the same layout, in the
dtype and where the master is, and at rest as what this rank steps. That costs what one more
optimizer state costs, 1/N where those are shards. Nothing but `gathered` makes it whole. Inside
`shard_views` the parameters of both modules are plain tensors of the same elements, 1-D and in full
precision, so that averaging, swapping and copying are what they are without sharding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn

from lightning_zero.comm.backends import Source
from lightning_zero.comm.communicator import Pending
from lightning_zero.core.bucket import Bucket, Masters
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.offload import BucketTiers, Tier
from lightning_zero.layout.stage import Stage, State
from lightning_zero.tiers.grad_offload import GradQueue

__all__ = ["Shadow", "is_copy"]


class Shadow:
    """A copy of the module of an engine whose parameters rest as shards. See [Note: Shadows].

    Collective: every rank makes it.

    Args:
        engine: Holds the module.
        module: The copy: parameters of the same names and shapes, whole; rank 0's values count.
        device: Where the shards rest; None: where the masters are stepped.
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
        queue = GradQueue(engine.storage)
        for parameter in named.values():
            parameter.grad = None  # of an earlier fit, perhaps, and whole
        with torch.no_grad():
            self.buckets = [self._beside(b, named, device, queue) for b in engine.buckets]
        engine.average_buckets += self.buckets

    def _beside(
        self,
        bucket: Bucket,
        named: Mapping[str, nn.Parameter],
        device: torch.device | None,
        queue: GradQueue,
    ) -> Bucket:
        """The copy's bucket for one of the module. Collective."""
        plan, dtype = bucket.plan, bucket.shards.master_or_param.dtype
        copy = _ShadowBucket(
            dataclasses.replace(
                plan,
                dtype=dtype,
                master_dtype=dtype,
                stage=Stage(plan.stage.number, plan.stage.shards | {State.PARAM}),
                tiers=BucketTiers(param=_tier(bucket, device)),
            ),
            [named[slot.name] for slot in plan.layout.slots],
            bucket.comm,
            queue,
            self._engine.worker,
            grad_dtype=dtype,
            unshard_out_of_order=_refuse,
        )
        copy.lockstep = self._engine.lockstep
        return copy

    @contextmanager
    def shard_views(self, *, write_back: bool) -> Iterator[None]:
        """The parameters of both modules are this rank's elements. Collective where it `write_back`.

        To those of the trained module: narrower parameters, and whole ones on all ranks, follow.
        """
        with self.own_views(), _installed_views(self._engine.buckets) as shown:
            yield
        if write_back:
            for masters, values in shown:
                masters.store(values)
            self._engine.schedule.shared.share_again()  # each rank has averaged its own

    @contextmanager
    def own_views(self) -> Iterator[None]:
        """The shadow's parameters are this rank's elements; moved, they come back. Local."""
        with _installed_views(self.buckets):
            yield

    def unwrap(self, device: torch.device | None) -> None:
        """Makes the parameters whole, on `device`; None: leaves them out. Collective."""
        for bucket in self.buckets:
            self._engine.average_buckets.remove(bucket)
            bucket.unwrap(device)


@contextmanager
def _installed_views(buckets: Sequence[Bucket]) -> Iterator[list[tuple[Masters, Tensor]]]:
    """Yields masters with what their parameters show."""
    with ExitStack() as hiding:
        shown = []
        for bucket in buckets:
            shown.append((bucket.masters, bucket.masters.install_own_views()))
            hiding.callback(bucket.masters.uninstall_views)
        yield shown


class _ShadowBucket(Bucket):
    """Where optimizer states are whole, every rank has all elements: it sends only its share."""

    def all_gather_into(self, whole: Tensor, source: Source | None = None) -> Pending:
        if isinstance(source, Tensor) and self.replicates_optim:
            own = self.plan.layout.shard(self.comm.mesh.shard_rank)
            source = source[own.start : own.stop]
        return super().all_gather_into(whole, source)


def _tier(bucket: Bucket, device: torch.device | None) -> Tier:
    """Where shards on `device` rest; None, or where all memory is the CPU's: beside the master."""
    if device is None or bucket.device.type == "cpu":
        return Tier.DEVICE if bucket.plan.tiers.optim is Tier.DEVICE else Tier.CPU
    return Tier.CPU if device.type == "cpu" else Tier.DEVICE


def is_copy(module: nn.Module, trained: nn.Module) -> bool:

    def shapes(of: nn.Module) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in parameters_by_name(of).items()}

    return shapes(module) == shapes(trained)


def _refuse(bucket: Bucket, name: str) -> NoReturn:
    raise RuntimeError(
        f"parameter {name} of the averaged model rests as a shard; use "
        "`with lightning_zero.gathered(averaged_model)` on every rank to see it whole, and a "
        "checkpoint for its state dict."
    )
