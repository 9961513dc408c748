"""One process per device: identity and connection of ranks, and small collectives on WORLD."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_zero._lightning import chosen, how_to_change
from lightning_zero._lightning import pytorch as pl
from lightning_zero._lightning.fabric import (
    LightningEnvironment,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
    reset_seed,
)
from lightning_zero._lightning.pytorch import MPSAccelerator, ParallelStrategy
from lightning_zero.comm.consistency import check_equal
from lightning_zero.comm.world import broadcast_object, gather_objects, wait_for_world
from lightning_zero.health.together import Gather, run_on_all_ranks
from lightning_zero.health.watchdog import Watchdog
from lightning_zero.health.world import (
    has_world,
    is_world,
    open_store,
    world_size,
)
from lightning_zero.launch.children import how_child_ended
from lightning_zero.launch.launchers import ProcessLauncher, ScriptLauncher, end_earlier_job
from lightning_zero.layout.config import ZeroConfig, as_timeout
from lightning_zero.layout.mesh import Mesh
from lightning_zero.strategy.batch_group import BatchGroup, check_batch_group_size
from lightning_zero.strategy.requeue import with_requeueing
from lightning_zero.strategy.resume import with_resolved_ckpt_path
from lightning_zero.strategy.settings import Settings, check_backend

__all__ = ["ProcessStrategy", "Processes", "StartMethod", "check_numbering"]

_T = TypeVar("_T")
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
_START_METHODS = get_args(StartMethod)
_RENDEZVOUS_TIMEOUT = timedelta(minutes=10)  # for all ranks to start


if TYPE_CHECKING:
    _Base = ParallelStrategy  # what the mixin calls is also in Fabric's class
else:
    _Base = object


class Processes(_Base):
    """Mixin of a strategy with one process per device; independent of what it trains.

    A subclass has a `ParallelStrategy` as its other base: the Trainer's or Fabric's. Arguments are
    those of `ZeroStrategy`, and of every Lightning strategy.
    """

    _user = "Trainer"  # class that the user gives the strategy to, in messages

    def __init__(
        self,
        *,
        process_group_backend: str | None,
        timeout: timedelta | float | None,
        start_method: StartMethod,
        batch_group_size: int = 1,
        **lightning_options: Any,
    ) -> None:
        check_backend(process_group_backend)
        if start_method not in _START_METHODS:
            raise ValueError(f"start_method must be one of {_START_METHODS}, got {start_method!r}.")
        check_batch_group_size(batch_group_size)
        self._batch_group_size = batch_group_size
        self._batch_group: BatchGroup | None = None  # of the current run, or of the last one
        self.num_nodes = 1  # set by the Trainer
        self.process_group_backend = process_group_backend  # None before it is chosen
        self._timeout = as_timeout(timeout)
        self._start_method: StartMethod = start_method
        self._watchdog: Watchdog | None = None  # of the current run, or of the last one
        # Called instead of a collective; None outside `refusing_collectives`.
        self._refuse: Callable[[str], NoReturn] | None = None
        super().__init__(**lightning_options)

    @override
    def __repr__(self) -> str:
        """Appears in the error of a Trainer or Fabric that needs a strategy of another class."""
        hint = f"; {how_to_change()}" if chosen().other.is_imported else ""
        user, other = "the Trainer", "Fabric needs lightning_zero.fabric.ZeroStrategy"
        if self._user == "Fabric":
            user, other = "Fabric", "the Trainer needs lightning_zero.ZeroStrategy"
        return f"<{type(self).__name__} for {user} of {chosen().value}; {other}{hint}>"

    # ---------------------------------------------------------------- ranks and devices

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks: the Trainer then shards data and synchronizes logs."""
        return self.num_ranks > 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Number of ranks on this node."""
        return len(self.parallel_devices or ())

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job, also before they are connected."""
        return self.num_nodes * self.num_processes

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        own = self._position
        return {"num_replicas": own.num_groups, "rank": own.index}

    @property
    def batch_group(self) -> BatchGroup:
        """Ranks that get the same samples as this one, with their process group.

        Raises:
            RuntimeError: The process groups do not exist yet.
        """
        if self._batch_group is None:
            raise RuntimeError(
                f"the batch group has no process group before the {self._user} has connected the "
                "ranks; use it from the hook setup on."
            )
        return self._batch_group

    @property
    def _position(self) -> BatchGroup:
        return BatchGroup.of(self.global_rank, self.num_ranks, self._batch_group_size)

    def scaled_loss(self, loss: Tensor) -> Tensor:
        """The loss whose gradients are averaged. See [Note: Sum inside, mean over groups]."""
        return loss if self._batch_group_size == 1 else loss * self._batch_group_size

    # ---------------------------------------------------------------- start

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._refuse_mps()
        check_batch_group_size(self._batch_group_size, self.num_ranks)
        if self._start_method != "popen":
            self._launcher = ProcessLauncher(
                self, start_method=self._start_method, wrap=with_resolved_ckpt_path
            )
            return
        end_earlier_job()  # before the environment is read for the rank of this process
        # Also if torchrun or srun start the ranks: the launcher checks that the environment has the
        # layout of the Trainer.
        self._launcher = ScriptLauncher(
            self.cluster_environment,
            self.num_processes,
            self.num_nodes,
            on_cuda=any(device.type == "cuda" for device in self.parallel_devices or ()),
            wrap=_wrapped_method,
        )

    def _refuse_mps(self) -> None:
        devices = self.parallel_devices or []
        if isinstance(self.accelerator, MPSAccelerator) or any(d.type == "mps" for d in devices):
            raise ValueError(
                "ZeroStrategy shards over several devices, but a machine has one MPS device; use "
                "accelerator='cpu', or strategy='auto' to train on MPS."
            )

    @override
    def setup_environment(self) -> None:
        assert self.cluster_environment is not None
        self._refuse_mps()
        if self.cluster_environment.creates_processes_externally:
            self._check_world_size()
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        device, backend = self.root_device, self.process_group_backend
        backend = backend or _get_default_process_group_backend_for_device(device)
        self.process_group_backend = backend
        device_id = None if device.type == "cpu" else device
        settings: dict[str, Any] = {"timeout": self._timeout, "device_id": device_id}
        if not has_world():
            settings["store"] = self._rendezvous()
        _init_dist_connection(self.cluster_environment, backend, **settings)
        self._check_world_size()
        if self._watchdog is not None:
            self._watchdog.stop()
        self._watchdog = Watchdog(
            rank=self.global_rank, size=self.world_size, describe_exit=how_child_ended
        )

    def _check_group_size(self, config: ZeroConfig) -> None:
        """Raises if the size of shard groups does not divide the number of ranks."""
        Mesh.of(0, self.num_ranks, config.group_size(local_world_size=self.num_processes))

    def _compare_settings(self, settings: Settings, precision: str) -> None:
        """Raises if a setting differs between ranks. Collective.

        Called before the first collective that depends on a setting.
        """
        if settings.config.sharding_group_size == "node":
            check_numbering(self.global_rank, self.node_rank, self.num_processes)
        compared = settings.describe() | {"precision": precision}
        check_equal(self.gather_for("the settings of all ranks")({"ZeroStrategy": compared}))

    def _open_batch_group(self) -> None:
        """Makes the process groups of batch groups; ranks have compared settings. Collective."""
        assert self._watchdog is not None, "setup_environment makes it"
        if self._batch_group is not None:
            self._batch_group.close()
        self._batch_group = BatchGroup.open(
            self.global_rank,
            self.world_size,
            self._batch_group_size,
            self._timeout,
            self._watchdog,
        )

    def _rendezvous(self) -> Any:
        environment = self.cluster_environment
        assert environment is not None
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        timeout = min(self._timeout or _RENDEZVOUS_TIMEOUT, _RENDEZVOUS_TIMEOUT)
        return open_store(environment.global_rank(), environment.world_size(), timeout)

    def _check_world_size(self) -> None:
        """Raises if the Trainer's number of ranks is not the number of started ranks."""
        assert self.cluster_environment is not None
        wanted = self.num_ranks
        started = world_size() if has_world() else self.cluster_environment.world_size()
        if started == wanted:
            return
        user = self._user
        arguments = f"devices={self.num_processes}, num_nodes={self.num_nodes}"
        expects = f"{user}({arguments}) expects {wanted} ranks, but "
        if isinstance(self.cluster_environment, LightningEnvironment):  # no other launcher
            raise ValueError(
                f"{expects}an earlier {user} of this script started {started}, and a script "
                f"starts its ranks only once; give each {user} of it the same devices and "
                "num_nodes, or run them as separate scripts. If you set LOCAL_RANK and WORLD_SIZE "
                f"yourself, start as many ranks as the {user} expects."
            )
        raise ValueError(
            f"{expects}{type(self.cluster_environment).__name__} started {started}; make devices x "
            "num_nodes equal to the number of processes of torchrun (--nproc-per-node x --nnodes) "
            "or srun (--ntasks)."
        )

    def set_world_ranks(self) -> None:
        """Sets the global rank in the environment and in Lightning's rank-zero helpers."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_ranks)
        # Some environments ignore the setters, so the getter is called again. Lightning's
        # `rank_zero_only` is this function, and keeps the rank as its attribute.
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # ---------------------------------------------------------------- small collectives

    def _enter_collective(self, name: str, *, everyone: bool = True) -> bool:
        """Prepares a collective. Returns whether it is possible; otherwise the caller skips it.

        A subclass checks here that all ranks issue the same collective.

        Args:
            name: Name of the collective, the same on every rank.
            everyone: Whether all ranks take part.
        """
        if self._refuse is not None:
            self._refuse(name)
        return has_world()

    @contextmanager
    def refusing_collectives(self, refuse: Callable[[str], NoReturn]) -> Iterator[None]:
        """Context of code that this rank alone runs, in which a collective would hang. Local.

        `refuse`: raises an error for a collective, by its name. Not called if there is one rank.
        """
        self._refuse = refuse if self.world_size > 1 else None
        try:
            yield
        finally:
            self._refuse = None

    def _waiting(self, name: str, *, is_one_way: bool = False) -> AbstractContextManager[None]:
        if self._watchdog is None:
            return nullcontext()
        return self._watchdog.waiting(name, is_engine_group=False, is_one_way=is_one_way)

    @override
    def barrier(self, name: str | None = None) -> None:
        name = f"the barrier {name!r}" if name else "a barrier"
        if self._enter_collective(name):
            with self._waiting(name):
                wait_for_world(self.root_device)

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        name = f"an object of rank {src}"
        if not self._enter_collective(name):
            return obj
        with self._waiting(name, is_one_way=True):
            return broadcast_object(obj, src)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        # The repr of torch's ReduceOp has an address, which differs between ranks.
        how = reduce_op if isinstance(reduce_op, str) else "reduction"
        name = f"a {how} over ranks of {_shape_of(tensor)}"
        if not self._enter_collective(name, everyone=is_world(group)):
            return tensor
        with self._waiting(name):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        name = f"an all-gather of {_shape_of(tensor)}"
        if not self._enter_collective(name, everyone=is_world(group)):
            return tensor
        with self._waiting(name):
            gathered = super().all_gather(tensor, group=group, sync_grads=sync_grads)
        if gathered.requires_grad:
            # Its backward is a collective of all ranks, too.
            def before_backward(_: Tensor) -> None:
                self._enter_collective(f"the backward of {name}", everyone=is_world(group))

            gathered.register_hook(before_backward)
        return gathered

    def gather_for(self, name: str) -> Gather:
        """Returns a function that gathers an object of every rank; its waits are announced."""

        def gather(value: Any) -> list[Any]:
            with self._waiting(name):
                return gather_objects(value)

        return gather

    def run_on_rank_zero(self, what: str, action: Callable[[], _T], *, otherwise: Any = None) -> _T:
        """As `run_on_all_ranks`, for rank 0 alone; returns its result. Collective.

        `otherwise`: result on another rank if ranks cannot communicate, after a failure.
        """
        own: Callable[[], Any] = action if self.is_global_zero else lambda: otherwise
        result: _T = run_on_all_ranks(own, gather=lambda one: [self.broadcast(one)], what=what)[0]
        return result


class ProcessStrategy(Processes, ParallelStrategy):
    """Base of a strategy of the Trainer with one process per device."""


def _shape_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _wrapped_method(function: Callable[..., Any], trainer: pl.Trainer | None) -> Callable[..., Any]:
    """A method of the Trainer that resumes as the user and SLURM have requested."""
    return with_requeueing(with_resolved_ckpt_path(function, trainer), trainer)


def check_numbering(rank: int, node_rank: int, num_devices: int) -> None:
    """Warns on a rank that is not one of the consecutive ranks of its node."""
    if rank // num_devices != node_rank:
        warnings.warn(
            f"rank {rank} runs on node {node_rank}, expected on node {rank // num_devices}: shard "
            "groups of consecutive ranks span several nodes, and so do their all-gathers; number "
            "ranks node by node (SLURM's --distribution=block).",
            stacklevel=2,
        )
