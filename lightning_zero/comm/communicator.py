"""Collectives of the data plane, on process groups of its own.

An engine has two planes, each on process groups of its own, because Lightning and the user use
WORLD:

* data: flat buffers between compute devices, along the axes of a `Mesh`; `GlooBackend` on gloo,
  `DeviceBackend` otherwise. All ranks issue all-gathers and reductions in one order, so that they
  share one group. All-gathers have a group of their own on request (`separates_gathers`).
* control: integers, masks and objects between CPUs (control.py).
"""

from __future__ import annotations

import os
import resource
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.backends import (
    Backend,
    DeviceBackend,
    GlooBackend,
    Source,
    SplitSizes,
    Unfilled,
    backend_for,
)
from lightning_zero.comm.control import GlooControlPlane
from lightning_zero.comm.world import new_group, split_world
from lightning_zero.health.watchdog import Watchdog
from lightning_zero.health.world import (
    disconnect_groups,
    has_world,
    world_size,
)
from lightning_zero.layout.mesh import Mesh
from lightning_zero.record.recorder import Mark, Pending, Recorder
from lightning_zero.record.spans import Kind

__all__ = ["Communicator", "Pending", "allow_connections"]

_GROUPS_AT_ONCE = 9  # default group, control plane, channels, gloo's data plane; the watchdogs


class Communicator:
    """Collectives over flat buffers. Every rank calls them in one order.

    Without a process group the world is this process alone.

    Args:
        device: Device on which the data plane communicates.
        timeout: Timeout of collectives; None: the backend's.
        group_size: Number of ranks that share one set of shards; None: all.
        separates_gathers: Whether all-gathers have a process group of their own, so that they may
            overlap with reductions, or are issued by another thread.
        check: Called on the control plane before any group is made that depends on settings; it
            raises on every rank or on none.
        watchdog: Reports failures of other ranks; None: the communicator makes its own.

    Raises:
        PeerFailedError: A rank has failed meanwhile.
        OSError: This rank cannot connect to rank 0.
        RuntimeError: A launcher has started several ranks, and no process group was initialized.
        ValueError: The group size does not divide the world size.
    """

    rank: int  # in the world
    size: int  # number of ranks of the world
    mesh: Mesh  # ranks that share shards with this one, and ranks that hold the same shard
    recorder: Recorder  # records the collectives and transfers of this process
    control: GlooControlPlane

    def __init__(
        self,
        device: torch.device,
        *,
        timeout: timedelta | None = None,
        group_size: int | None = None,
        separates_gathers: bool = False,
        check: Callable[[GlooControlPlane], None] | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        _check_world()
        if watchdog is not None:
            watchdog.raise_if_failed()
        self.rank = dist.get_rank() if has_world() else 0
        self.size = world_size()
        self.device = device
        self._owns_watchdog = watchdog is None
        self.recorder = Recorder(device, self.rank, self.size)
        self._separates_gathers = separates_gathers
        self._before_collective: Callable[[str], object] = lambda name: None
        self._timeout = timeout
        self._group: Any = None  # the data plane's group of all ranks
        self._axis_groups: list[Any] = []  # the others, in order of destruction
        self._backend = Backend()  # along the shard axis
        self._replicas: Backend | None = None  # along the replica axis
        self._is_disconnected = False  # no collective is possible
        self._discarded: list[Pending] = []
        if has_world():
            allow_connections(self.size)
        if watchdog is None:
            watchdog = _own_watchdog(self)
        self._watchdog = watchdog
        try:
            self._group = new_group(watchdog, timeout)
            self.control = GlooControlPlane(
                self.recorder, watchdog, rank=self.rank, size=self.size, timeout=timeout
            )
        except BaseException as error:
            watchdog.abort(error)
            raise
        watchdog.failure_callbacks.add(self._disconnect)
        try:
            if check is not None:
                check(self.control)
            self.mesh = Mesh.of(self.rank, self.size, group_size)
        except BaseException:
            self.close()
            raise
        with self.closed_on_error():
            self._open_axes()

    def free_scratch(self) -> None:
        """Frees the memory that is kept for the next reduction."""
        if isinstance(self._backend, GlooBackend):
            self._backend.scratch.clear()

    def _open_axes(self) -> None:
        """Makes shard groups and replica groups, in one order on all ranks. Collective."""
        mesh, shard = self.mesh, self._group
        gather = replica = None
        if self._group is not None:
            split = partial(split_world, self._watchdog, timeout=self._timeout, parent=self._group)
            if mesh.num_replicas > 1:
                shard = split(mesh.shard_groups())
            if self._separates_gathers and backend_for(self.device) != "gloo":
                gather = split(mesh.shard_groups())
            if mesh.num_replicas > 1:
                replica = split(mesh.replica_groups())
                self._replicas = self._make_backend(replica, mesh.replica_rank, mesh.num_replicas)
            made = (gather, shard, replica)
            self._axis_groups = [g for g in made if g not in (None, self._group)]
        self._backend = self._make_backend(shard, mesh.shard_rank, mesh.num_shards, gather)

    def _make_backend(self, group: Any, rank: int, size: int, gather_group: Any = None) -> Backend:
        if backend_for(self.device) == "gloo":
            return GlooBackend(group, rank, size)
        gather_group = group if gather_group is None else gather_group
        return DeviceBackend(gather_group, group, rank, size, self.device, self.recorder)

    def all_gather(
        self,
        buffer: Tensor,
        name: str = "",
        source: Source | None = None,
    ) -> Pending:
        """Fills `buffer` in place from the equal shards of the ranks of this rank's shard group.

        Args:
            buffer: The unsharded buffer: 1-D, all shards.
            name: Name of the bucket, for profiler and recorder.
            source: This rank's shard, if it is not in `buffer` yet: 1-D, on the device or in CPU
                memory; or a function that fills a 1-D tensor with it, on any stream.
        """
        filled = None if source is None else self._backend.fill(buffer, source, name)
        sent = _bytes_sent(buffer.nbytes, self.mesh.num_shards)
        issue = self._backend.all_gather
        return self._issue(Kind.ALL_GATHER, name, sent, issue, buffer, None, filled)

    def all_gather_shards(
        self, shard: Tensor, name: str = "", split_sizes: SplitSizes = None
    ) -> Tensor:
        """Returns the shards of this rank's shard group, one after another: 1-D, new. Waits.

        Args:
            shard: This rank's shard: 1-D, of any dtype, on any device.
            name: As in `all_gather`.
            split_sizes: Elements of each rank's shard, none of which is empty; None: all equal.
        """
        sizes = split_sizes or [shard.numel()] * self.mesh.num_shards
        buffer = torch.empty(sum(sizes), dtype=shard.dtype, device=self.device)
        start = sum(sizes[: self.mesh.shard_rank])
        buffer[start : start + shard.numel()].copy_(shard.detach())
        itemsize = shard.dtype.itemsize  # bytes, because backends do not send every dtype
        in_bytes = None if len(set(sizes)) == 1 else [itemsize * numel for numel in sizes]
        sent = _bytes_sent(buffer.nbytes, self.mesh.num_shards)
        issue, flat = self._backend.all_gather, buffer.view(torch.uint8)
        self._issue(Kind.ALL_GATHER, name, sent, issue, flat, in_bytes).wait()
        return buffer

    def reduce_scatter(
        self,
        buffer: Tensor | Unfilled,
        out: Tensor,
        name: str = "",
    ) -> Pending:
        """Averages `buffer` over the shard group; writes this rank's shard of the mean to `out`.

        Args:
            buffer: 1-D, all shards. Its content is lost. `Unfilled`: made where it is sent.
            out: 1-D, one shard, in the dtype of the sum. It may be this rank's shard of `buffer`.
            name: As in `all_gather`.
        """
        # Peer to peer sends the buffer's dtype; the backends' own collectives send the sum's.
        dtype = buffer.dtype if isinstance(self._backend, GlooBackend) else out.dtype
        numel = buffer.numel if isinstance(buffer, Unfilled) else buffer.numel()
        sent = _bytes_sent(numel * dtype.itemsize, self.mesh.num_shards)
        issue = self._backend.reduce_scatter
        return self._issue(Kind.REDUCE_SCATTER, name, sent, issue, buffer, out)

    def all_to_all(
        self,
        out: Tensor,
        parts: Tensor,
        out_sizes: Sequence[int],
        part_sizes: Sequence[int],
        name: str = "",
    ) -> Pending:
        """Sends each rank of the shard group its part, and receives the parts of all ranks.

        Args:
            out: 1-D; the received parts one after another, in the order of ranks.
            parts: 1-D, of the dtype and on the device of `out`; the sent parts, likewise.
            out_sizes: Elements of each received part, by rank; possibly 0.
            part_sizes: Elements of each sent part, by rank. What one rank sends to another is as
                large as the other expects.
            name: As in `all_gather`.
        """
        sent = (sum(part_sizes) - part_sizes[self.mesh.shard_rank]) * parts.itemsize
        issue = self._backend.all_to_all
        return self._issue(Kind.ALL_TO_ALL, name, sent, issue, out, parts, out_sizes, part_sizes)

    def before_reduction(self) -> AbstractContextManager[Any]:
        """Context in which work precedes the next reduction, beside the compute stream. Local.

        What it reads must live until that reduction is done.
        """
        return self._backend.before_reduction()

    def wait_for_reductions(self) -> None:
        """Lets the compute stream wait for work of `before_reduction`. Local."""
        self._backend.wait_for_reductions()

    def average_replicas(self, shard: Tensor, name: str = "") -> Pending:
        """Averages `shard` (1-D) in place over the ranks of this rank's replica group."""
        assert self._replicas is not None, "there is one replica"
        sent = 2 * _bytes_sent(shard.nbytes, self.mesh.num_replicas)
        return self._issue(Kind.ALL_REDUCE, name, sent, self._replicas.all_reduce, shard)

    def all_reduce(self, tensor: Tensor, name: str = "") -> Pending:
        """Averages `tensor` (1-D, num_shards x shard) over ranks in place; needs one replica."""
        assert self.mesh.num_replicas == 1, "replicated states have no groups of replicas"
        sent = 2 * _bytes_sent(tensor.nbytes, self.mesh.num_shards)
        return self._issue(Kind.ALL_REDUCE, name, sent, self._backend.all_reduce, tensor)

    def _issue(
        self, kind: Kind, name: str, nbytes: int, issue: Callable[..., Pending], *args: Any
    ) -> Pending:
        """Issues a collective; a failure of another rank is raised where this rank waits."""
        what, watchdog = f"the {kind.value} of {name}", self._watchdog
        number = watchdog.count_issued()
        waiting = partial(watchdog.waiting, what, is_data_transfer=True, number=number)
        with waiting():
            pending = self.recorder.watch(kind, name, nbytes, issue, *args)
        is_on_host = self.size > 1 and isinstance(self._backend, GlooBackend)
        return _HostPending(pending, waiting) if is_on_host else pending

    def sum_over_shards_(self, tensor: Tensor, name: str = "a sum over shards") -> Tensor:
        """Sums a small tensor over shards in place and waits; the same bits on every rank.

        Replicas hold equal shards; those of the first replica count. `name` describes the sum, and
        is the same on every rank.
        """
        if self.mesh.replica_rank:
            tensor.zero_()
        return self._all_reduce_small(tensor, dist.ReduceOp.SUM, name)

    def mean_(self, tensor: Tensor, name: str) -> Tensor:
        """Averages a dense tensor over all ranks in place and waits."""
        return self._all_reduce_small(tensor.div_(self.size), dist.ReduceOp.SUM, name)

    def max_(self, tensor: Tensor, name: str = "a maximum over ranks") -> Tensor:
        """Computes the elementwise maximum over ranks in place and waits.

        The result is NaN where any rank has NaN, which backends do not guarantee.
        """
        if not tensor.is_floating_point():
            return self._all_reduce_small(tensor, dist.ReduceOp.MAX, name)
        is_nan = tensor.isnan()
        both = torch.stack([tensor.masked_fill(is_nan, -torch.inf), is_nan.to(tensor.dtype)])
        highest, has_nan = self._all_reduce_small(both, dist.ReduceOp.MAX, name).unbind()
        return tensor.copy_(highest.masked_fill(has_nan.bool(), torch.nan))

    def set_before_collective(self, announce: Callable[[str], object]) -> None:
        """Sets the function that is called with the name of a collective on request. Local.

        It is called before the collective is issued, and has all ranks issue it together.
        """
        self._before_collective = announce

    def announce(self, name: str) -> None:
        """Has all ranks issue collective `name` together, if there are others. Collective."""
        if self._group is not None and self.size > 1:
            self._before_collective(name)

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copies the tensor of rank `source` to every rank, in place, and waits."""
        if self._group is not None and self.size > 1:
            with self.control.waiting(f"a broadcast of rank {source}", is_one_way=True):
                dist.broadcast(tensor, group=self._group, group_src=source)
        return tensor

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Context that aborts and closes if its body raises: other ranks may wait for this one."""
        try:
            yield
        except BaseException as error:
            self.abort(error)
            self._disconnect()  # also if the watchdog could not reach the others
            self.close()
            raise

    def abort(self, error: BaseException | None = None) -> None:
        """Ends the other ranks' waits for this rank with an error that names `error`.

        Does not wait for the other ranks.
        """
        if self.control.is_open and self.size > 1:
            self._watchdog.abort(error)

    def begin_run(self, deadline: timedelta) -> bool:
        """Makes new process groups after `abort`, once every rank calls this.

        Args:
            deadline: For all ranks to call; or the timeout of collectives, if that is less.

        Returns:
            Whether all ranks called in time. If not, no collective is possible any more.
        """
        if self.size == 1 or self.control.is_simulated:
            self._backend.wait_for_all()
            return True
        deadline = min(deadline, self._timeout or deadline)
        if not self.control.is_open or not self._watchdog.begin_run(deadline):
            return False
        self._disconnect()  # data in flight arrives no more
        self._backend.wait_for_all()
        self._close_groups()
        self._discarded.clear()
        self._group = new_group(self._watchdog, self._timeout)
        self.control.open()
        self._open_axes()
        self._is_disconnected = False
        self._watchdog.failure_callbacks.add(self._disconnect)
        return True

    def _disconnect(self) -> None:
        """Unblocks all waiters of this rank. From any thread."""
        self._is_disconnected = True
        groups = filter(None, (*self._axis_groups, self._group))
        for disconnect in (self.control.disconnect, partial(disconnect_groups, groups)):
            with suppress(RuntimeError, ValueError):  # the group has been destroyed
                disconnect()

    def wait_for_uploads(self, is_from_cpu: bool) -> None:
        """Waits for all-gathers' copies from CPU memory, before that memory is overwritten."""
        if is_from_cpu:
            self._backend.wait_for_uploads()

    def discard(self, pending: Pending) -> None:
        """Drops a collective without waiting for other ranks.

        Its tensors stay alive until the next run, because its data may still arrive.
        """
        if self.size == 1:
            pending.wait()
        else:
            self._discarded.append(pending)

    def close(self) -> None:
        """Destroys the engine's groups. Not collective: ranks may close at different times."""
        self._close_groups()
        if self._owns_watchdog:
            self._watchdog.finish()

    def _close_groups(self) -> None:
        self._watchdog.failure_callbacks.remove(self._disconnect)
        self._backend, self._replicas = Backend(), None
        for group in filter(None, (*self._axis_groups, self._group)):
            # An NCCL group that was disconnected is destroyed already.
            if dist.is_initialized() and not (self._is_disconnected and self.device.type == "cuda"):
                dist.destroy_process_group(group)
        self._group, self._axis_groups = None, []
        self.control.close()

    def _all_reduce_small(self, tensor: Tensor, op: Any, name: str) -> Tensor:
        self.announce(name)
        if self._group is not None and self.size > 1:
            # Offloaded gradients are summed on the CPU.
            on_device = tensor.to(self.device)
            with self.control.waiting(name, kind=Kind.ALL_REDUCE):
                dist.all_reduce(on_device, op=op, group=self._group)
            if on_device is not tensor:
                tensor.copy_(on_device)
        return tensor


@dataclass
class _HostPending:
    """A collective whose end the host waits for."""

    pending: Pending
    waiting: Callable[[], AbstractContextManager[None]]
    marks: tuple[Mark, Mark] | None = None  # None: the recorder has read them already

    def wait(self) -> None:
        with self.waiting():
            self.pending.wait()


def _check_world() -> None:
    """Raises a RuntimeError if several ranks were launched, without a process group."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if not has_world() and launched > 1:
        raise RuntimeError(
            f"{launched} ranks were launched (WORLD_SIZE), but there is no process group, so "
            "each rank would train alone; call torch.distributed.init_process_group() before "
            "Engine(...)."
        )


def _own_watchdog(owner: Communicator) -> Watchdog:
    """Makes a watchdog that stops when `owner` is freed."""
    watchdog = Watchdog(rank=owner.rank, size=owner.size)
    end = weakref.finalize(owner, watchdog.stop)
    end.atexit = False  # the watchdog ends itself with the process
    return watchdog


def allow_connections(size: int) -> None:
    """Raises this process's limit of open files to what the groups of `size` ranks may need.

    gloo opens a connection to each rank in each group. The usual soft limit of 1,024 is for
    programs that call select(). The hard limit, which an administrator sets, stays. Local.

    Alternative considered: TORCH_GLOO_LAZY_INIT=1, with which gloo connects two ranks when they
    first exchange a message. With 32 ranks a control plane then has 10 connections instead of 32,
    and three groups are made in 0.06 s instead of 0.64 s. But if a rank dies before its first
    message to another rank, that rank can wait for 5 times the group's timeout, 2.5 hours by
    default, where an open connection ends at once (torch 2.13; pytorch/gloo#520).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1024 + _GROUPS_AT_ONCE * size
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _bytes_sent(nbytes: int, size: int) -> int:
    """Returns the bytes that a rank sends in an all-gather or a reduce-scatter of `nbytes`."""
    return nbytes * (size - 1) // size
