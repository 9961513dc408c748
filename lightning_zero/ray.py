"""ZeRO under Ray Train: `RayZeroStrategy`.

[Note: What Ray decides] Ray starts the ranks, gives each its device, and makes the default process
group, which it also ends. So rank, number of ranks and device are Ray's, whatever the Trainer's
`devices` and `num_nodes` are. The groups of the engine are made and ended by the engine.

[Note: Accepted by Ray] `ray.train.lightning.prepare_trainer` accepts instances of Ray's own
strategies only. Those are abstract base classes, so `RayZeroStrategy` is registered as a virtual
subclass of one: it inherits nothing from it.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from lightning_zero.health.world import has_world
from lightning_zero.strategy.strategy import ZeroStrategy

try:
    import ray.train
    import ray.train.torch
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment
except ImportError as error:
    raise ImportError(
        'lightning_zero.ray needs Ray Train: pip install "lightning-zero[ray]".'
    ) from error

__all__ = ["RayZeroStrategy"]

_SET_BY_RAY = {
    "process_group_backend": "ray.train.torch.TorchConfig(backend=...)",
    "start_method": "ray.train.ScalingConfig",
}


class RayZeroStrategy(ZeroStrategy):
    """`lightning_zero.ZeroStrategy` for a training function of Ray Train's `TorchTrainer`.

    Give it to the Trainer inside the training function, with `devices="auto"`:

        def train():
            trainer = Trainer(strategy=RayZeroStrategy(stage=3), devices="auto")
            prepare_trainer(trainer).fit(model)

    Checkpoints of both kinds are reported by Ray's `RayTrainReportCallback`. On several nodes a
    sharded checkpoint needs a directory that all nodes share.

    Args:
        stage: int or str, default 3. ZeRO stage, as of `ZeroStrategy`.
        **settings: The other arguments of `ZeroStrategy`, without `async_save`,
            `process_group_backend` and `start_method`.

    Raises:
        ValueError: A setting is Ray's, or is not possible under Ray.
        RuntimeError: There is no training function of Ray around it.
    """

    def __init__(self, stage: int | str = 3, **settings: Any) -> None:
        for name, instead in _SET_BY_RAY.items():
            if settings.get(name) is not None:
                raise ValueError(
                    f"{name} is decided by Ray, got {settings[name]!r}; use {instead} instead."
                )
        if settings.get("async_save"):
            raise ValueError(
                "async_save=True is not possible under Ray, whose callback uploads a checkpoint as "
                "soon as it is saved; leave it out, and use RayTrainReportCallback("
                "checkpoint_upload_mode=CheckpointUploadMode.ASYNC)."
            )
        if not has_world():
            raise RuntimeError(
                "RayZeroStrategy found no process group of Ray: create it in the training function "
                "of ray.train.torch.TorchTrainer, or use lightning_zero.ZeroStrategy."
            )
        super().__init__(stage, **settings)

    # ---------------------------------------------------------------- [Note: What Ray decides]

    @property
    def cluster_environment(self) -> Any:
        """Ray's environment, whatever the Trainer finds."""
        return self._environment

    @cluster_environment.setter
    def cluster_environment(self, environment: Any) -> None:
        is_rays = environment is None or isinstance(environment, RayLightningEnvironment)
        self._environment = environment if is_rays else RayLightningEnvironment()

    @property
    @override
    def root_device(self) -> torch.device:
        device: torch.device = ray.train.torch.get_device()
        return device

    @property
    @override
    def num_processes(self) -> int:
        return int(ray.train.get_context().get_local_world_size())

    @property
    @override
    def num_ranks(self) -> int:
        return int(ray.train.get_context().get_world_size())


RayDDPStrategy.register(RayZeroStrategy)
