"""A sharded copy of the trained module, such as an average of its weights.

[Note: Shadows] For each bucket of the module there is one for the copy. It has the same layout, the
dtype and tier of the main parameters, and holds the elements that this rank steps. That costs as
much memory as one more optimizer state: 1/N if those are sharded. Only `gathered` unshards the
copy. Inside `shard_views` the parameters of both modules are plain tensors of the same elements,
1-D and in full precision, so that averaging, swapping and copying work as without sharding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn

from lightning_zero.core.bucket import Bucket, BucketResources
from lightning_zero.core.bucket_access import BucketAccess
from lightning_zero.core.masters import Masters
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.offload import BucketTiers, Tier
from lightning_zero.layout.stage import Stage, State
from lightning_zero.tiers.grad_offload import GradQueue

__all__ = ["Shadow", "is_copy"]


class Shadow:
    """A copy of an engine's module with sharded parameters. See [Note: Shadows].

    Collective: every rank creates it.

    Args:
        engine: Engine that holds the trained module.
        module: The copy: full parameters of the same names and shapes. Rank 0's values are used.
        device: Device of the shards. None: the device where main parameters are stepped.
    """

    def __init__(
        self, engine: Engine, module: nn.Module, *, device: torch.device | None = None
    ) -> None:
        if not is_copy(module, engine.module):
            raise ValueError(
                f"{type(module).__name__} is not a copy of the trained "
                f"{type(engine.module).__name__}: its parameters have other names or shapes."
            )
        self.module = module
        self._engine = engine
        named = parameters_by_name(module)
        queue = GradQueue(engine.storage)
        for parameter in named.values():
            parameter.grad = None  # a full gradient of an earlier fit, perhaps
        with torch.no_grad():
            self.buckets = [self._copy_of(b, named, device, queue) for b in engine.buckets]
        engine.average_buckets.extend(self.buckets)

    def _copy_of(
        self,
        bucket: Bucket,
        named: Mapping[str, nn.Parameter],
        device: torch.device | None,
        queue: GradQueue,
    ) -> Bucket:
        """Bucket of the copy for one bucket of the module. Collective."""
        plan, dtype = bucket.plan, bucket.shards.master_or_param.dtype
        copy = Bucket(
            dataclasses.replace(
                plan,
                dtype=dtype,
                master_dtype=dtype,
                stage=Stage(plan.stage.number, plan.stage.shards | {State.PARAM}),
                tiers=BucketTiers(param=_tier(bucket, device)),
            ),
            [named[slot.name] for slot in plan.layout.slots],
            BucketResources(bucket.comm, queue, self._engine.worker, self._engine.live_tensors),
            grad_dtype=dtype,
        )
        BucketAccess(copy, self._engine.lockstep, _raise_sharded).install()
        return copy

    @contextmanager
    def shard_views(self, *, write_back: bool) -> Iterator[None]:
        """Context in which parameters of both modules are views of this rank's shard.

        Collective with `write_back`.

        Args:
            write_back: Store the values of the trained module's views in its parameters, also in
                16-bit ones and, where these are replicated, on all ranks.
        """
        with self.own_views(), _installed_views(self._engine.buckets) as installed:
            yield
        if write_back:
            for masters, values in installed:
                masters.store(values)
            self._engine.coordinator.shared.share_again()  # each rank has averaged its own shard

    @contextmanager
    def own_views(self) -> Iterator[None]:
        """Context in which the shadow's parameters are views of this rank's shard. Local.

        Inside, `module.to(...)` may move them; afterwards the shard is on its own device again.
        """
        with _installed_views(self.buckets):
            yield

    def unwrap(self, device: torch.device | None) -> None:
        """Unshards the parameters on `device`. None: leaves them without values. Collective."""
        for bucket in self.buckets:
            self._engine.average_buckets.remove(bucket)
            bucket.unwrap(device)


@contextmanager
def _installed_views(buckets: Sequence[Bucket]) -> Iterator[list[tuple[Masters, Tensor]]]:
    """Installs views of this rank's shard as parameters; yields (masters, values) per bucket."""
    with ExitStack() as uninstalling:
        installed = []
        for bucket in buckets:
            installed.append((bucket.masters, bucket.masters.install_own_views()))
            uninstalling.callback(bucket.params.uninstall_views)
        yield installed


def _tier(bucket: Bucket, device: torch.device | None) -> Tier:
    """Tier of shards on `device`. None, or a CPU accelerator: the tier of the main parameters."""
    if device is None or bucket.device.type == "cpu":
        return Tier.DEVICE if bucket.plan.tiers.optim is Tier.DEVICE else Tier.CPU
    return Tier.CPU if device.type == "cpu" else Tier.DEVICE


def is_copy(module: nn.Module, trained: nn.Module) -> bool:
    """Whether parameters of both modules have the same names and shapes."""

    def shapes(of: nn.Module) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in parameters_by_name(of).items()}

    return shapes(module) == shapes(trained)


def _raise_sharded(bucket: Bucket, name: str) -> NoReturn:
    raise RuntimeError(
        f"parameter {name} of the averaged model is sharded; use "
        "`with lightning_zero.gathered(averaged_model)` on every rank to read its values, and a "
        "checkpoint for its state dict."
    )
