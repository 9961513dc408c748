"""One process for each device: who the ranks are, how they start, how they talk on WORLD."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_zero.comm.watchdog import Watchdog, next_name
from lightning_zero.comm.world import (
    as_timeout,
    as_wait_report_s,
    broadcast_object,
    check_backend,
    has_world,
    is_world,
    wait_for_world,
)
from lightning_zero.strategy.children import how_child_ended
from lightning_zero.strategy.launch import (
    START_METHODS,
    StartMethod,
    check_world_size,
    make_launcher,
)

__all__ = ["ProcessStrategy"]


class ProcessStrategy(ParallelStrategy):
    """What a strategy with a process for each device tells Lightning, whatever it trains.

    Args:
        process_group_backend: None: nccl on CUDA, gloo on CPU.
        timeout: Of collectives, in seconds where it is a number; None: the backend's.
        wait_report_s: Seconds of waiting for other ranks after which all tell what they are doing;
            None: never.
        start_method: How the ranks are started where nobody else has.
        **of_lightning: As in every Lightning strategy.

    Raises:
        ValueError: An unknown start method or backend, or a timeout that is not positive.
        TypeError: A setting of the wrong type.
    """

    def __init__(
        self,
        *,
        process_group_backend: str | None,
        timeout: timedelta | float | None,
        wait_report_s: float | None,
        start_method: StartMethod,
        **of_lightning: Any,
    ) -> None:
        check_backend(process_group_backend)
        if start_method not in START_METHODS:
            raise ValueError(f"start_method must be one of {START_METHODS}, got {start_method!r}.")
        self._num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = as_timeout(timeout)
        self._wait_report_s = as_wait_report_s(wait_report_s)
        self._start_method: StartMethod = start_method
        self._watchdog: Watchdog | None = None  # of the running run, and until the next one
        super().__init__(**of_lightning)

    # ---------------------------------------------------------------- who and where

    @property
    def is_distributed(self) -> bool:
        """The Trainer shards data and synchronises logged values, where there are several ranks."""
        return self.num_nodes * self.num_processes > 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the default process group; None before it is chosen."""
        return self._process_group_backend

    # ---------------------------------------------------------------- start

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._refuse_mps()
        self._launcher = make_launcher(
            self, self.cluster_environment, self._start_method, self._num_nodes
        )

    def _refuse_mps(self) -> None:
        devices = self.parallel_devices or []
        if isinstance(self.accelerator, MPSAccelerator) or any(d.type == "mps" for d in devices):
            raise ValueError(
                "ZeroStrategy shards over several devices, and a machine has one MPS device; use "
                "accelerator='cpu', or strategy='auto' to train on MPS."
            )

    @override
    def setup_environment(self) -> None:
        assert self.cluster_environment is not None
        self._refuse_mps()
        if self.cluster_environment.creates_processes_externally:
            check_world_size(self.cluster_environment, self.num_processes, self.num_nodes)
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        backend = self._process_group_backend
        self._process_group_backend = backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        device_id = self.root_device if self.root_device.type != "cpu" else None
        _init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device_id,
        )
        check_world_size(self.cluster_environment, self.num_processes, self.num_nodes)
        self._begin_watch()

    def _begin_watch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
        Watchdog.stop_those_that_left()
        self._watchdog = Watchdog(
            next_name(self.global_rank),
            rank=self.global_rank,
            size=self.world_size,
            report_after_s=self._wait_report_s,
            rallies=True,
            how_ended=how_child_ended,
        )

    def set_world_ranks(self) -> None:
        """Tells the environment and Lightning's rank-zero helpers who this rank is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        # Some environments ignore the setters, so the getter is asked again.
        # Lightning's `rank_zero_only` is this one, and keeps its rank on the function.
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # ---------------------------------------------------------------- small collectives

    def _meets(self, name: str, *, everyone: bool = True) -> bool:
        """Whether a collective of every rank, or of some, is possible; else there is none.

        Where a subclass brings ranks together that are not at the same point.

        Args:
            name: Of the collective: the same on every rank.
            everyone: All ranks take part.
        """
        return has_world()

    def _waiting(self, name: str, *, is_one_way: bool = False) -> AbstractContextManager[None]:
        if self._watchdog is None:
            return nullcontext()
        return self._watchdog.waiting(name, is_engines=False, is_one_way=is_one_way)

    @override
    def barrier(self, name: str | None = None) -> None:
        name = f"the barrier {name!r}" if name else "a barrier"
        if self._meets(name):
            with self._waiting(name):
                wait_for_world(self.root_device)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        name = f"an object of rank {src}"
        if not self._meets(name):
            return obj
        with self._waiting(name, is_one_way=True):
            return broadcast_object(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        # Torch's ReduceOp says its address, which is another on every rank.
        how = reduce_op if isinstance(reduce_op, str) else "reduction"
        name = f"a {how} over ranks of {_shape_of(tensor)}"
        if not self._meets(name, everyone=is_world(group)):
            return tensor
        with self._waiting(name):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        name = f"an all-gather of {_shape_of(tensor)}"
        if not self._meets(name, everyone=is_world(group)):
            return tensor
        with self._waiting(name):
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)


def _shape_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
