"""The only door to collectives.

Two planes, each on process groups of the engine's own, for WORLD is Lightning's and the user's:

* data: flat buffers, between compute devices, along the axes of a `Mesh`. `PeerToPeer` on gloo,
  `Native` elsewhere. Gathers and reductions each have one order on all ranks, but how they
  interleave may differ by rank, so they share neither message tags nor a process group.
* control: integers, masks and objects between CPUs (control.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.axes import AllReduce, Axes, open_axes, replica_exchange
from lightning_zero.buffer import Scratch
from lightning_zero.channel import Channel
from lightning_zero.control import Control, hang_up
from lightning_zero.exchange import Closed, Exchange, Native, PeerToPeer, Pending, backend_for
from lightning_zero.mesh import Mesh
from lightning_zero.recorder import Recorder
from lightning_zero.recording import Kind

__all__ = ["Communicator", "Pending"]


class Communicator:
    """Collectives over flat buffers. Every method is collective: every rank, same order.

    Without a process group the world is this process alone.

    Args:
        device: Of the data plane.
        timeout: Of collectives; None: the backend's.
        group_size: Ranks that share one set of shards; None: all.

    Attributes:
        rank: In the world, as agreements count.
        size: Of the world.
        mesh: Which ranks share shards with this one, and which hold the same.
        recorder: Of what goes on in this process.
        control: What ranks tell each other.

    Raises:
        RuntimeError: A launcher has started several ranks, and no process group was initialised.
        ValueError: The group size does not divide the world size, or differs by rank.
    """

    rank: int
    size: int
    mesh: Mesh
    recorder: Recorder
    control: Control

    def __init__(
        self,
        device: torch.device,
        *,
        timeout: timedelta | None = None,
        group_size: int | None = None,
    ) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if not is_distributed and launched > 1:
            raise RuntimeError(
                f"{launched} ranks were launched, but there is no process group, so that each "
                "would train alone; call torch.distributed.init_process_group() before Engine(...)."
            )
        self.rank = dist.get_rank() if is_distributed else 0
        self.size = dist.get_world_size() if is_distributed else 1
        self.device = device
        self.recorder = Recorder(device, self.rank, self.size)
        self.scratch = Scratch(device)
        self._timeout = timeout
        self._group: Any = None  # small sums and broadcasts
        self._axes: Axes | None = None  # data; the group above among them
        self._is_aborted = False
        self._forgotten: list[Pending] = []
        self._channels: list[Channel] = []
        self._replicas: AllReduce | None = None
        self._open_group()
        # The fake backend stands for N ranks in one process; gloo would wait for the others.
        backend = "fake" if is_distributed and backend_for(device) == "fake" else "gloo"
        self.control = Control(
            self.recorder, rank=self.rank, size=self.size, backend=backend, timeout=timeout
        )
        self._check_group_size(group_size)
        self.mesh = Mesh.of(self.rank, self.size, group_size)
        self._exchange: Exchange = self._open_exchange()

    def free_scratch(self) -> None:
        """Frees what was kept for the next reduction."""
        self.scratch.clear()
        if isinstance(self._exchange, PeerToPeer):
            self._exchange.scratch.clear()

    def _open_group(self) -> None:
        """Makes the group of all ranks for data. Collective."""
        if dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(timeout=self._timeout)

    def _check_group_size(self, group_size: int | None) -> None:
        """Before groups are made, on which ranks with other sizes would wait for ever."""
        if group_size is None:
            return
        least, minus_most = self.control.min_ints([group_size, -group_size])
        if least != -minus_most:
            raise ValueError(
                f"sharding_group_size must be the same on every rank, got {least} on some and "
                f'{-minus_most} on others; "node" needs equally many ranks on every node.'
            )

    def _open_exchange(self) -> Exchange:
        """Makes the groups along the axes of the mesh. Collective."""
        mesh = self.mesh
        if self._group is None:
            return PeerToPeer(None, mesh.shard_rank, mesh.num_shards)
        is_gloo = backend_for(self.device) == "gloo"
        axes = self._axes = open_axes(
            mesh, self._group, has_gather_group=not is_gloo, timeout=self._timeout
        )
        if axes.replica is not None:
            self._replicas = replica_exchange(axes.replica, mesh, self.device, self.recorder)
        if is_gloo:
            return PeerToPeer(axes.shard, mesh.shard_rank, mesh.num_shards)
        groups, own = (axes.gather, axes.shard), mesh.shard_rank
        return Native(*groups, own, mesh.num_shards, self.device, self.recorder)

    def all_gather(
        self,
        whole: Tensor,
        name: str = "",
        source: Tensor | None = None,
        cuts: Sequence[int] | None = None,
    ) -> Pending:
        """Fills `whole` (1-D, all shards) in place from the shards of this rank's group.

        Args:
            whole: The whole buffer.
            name: Bucket, for profiler and recorder.
            source: This rank's shard, 1-D, where it is not in `whole` yet; it may be in CPU memory.
            cuts: Elements of each rank's shard; None: all alike.
        """
        sent = _sent(whole.nbytes, self.mesh.num_shards)
        issue = self._exchange.all_gather
        return self.recorder.watch(Kind.GATHER, name, sent, issue, whole, source, cuts, name)

    def reduce_scatter(
        self, whole: Tensor, out: Tensor, name: str = "", cuts: Sequence[int] | None = None
    ) -> Pending:
        """Averages `whole` over the group; this rank's shard of the mean lands in `out`.

        Args:
            whole: 1-D, all shards. Its content is lost.
            out: 1-D, shard, in the dtype of the sum. It may be this rank's shard of `whole`.
            name: Bucket, for profiler and recorder.
            cuts: Elements of each rank's shard; None: all alike.
        """
        # Elsewhere than peer to peer they travel in the dtype of the sum.
        dtype = whole.dtype if isinstance(self._exchange, PeerToPeer) else out.dtype
        sent = _sent(whole.numel() * dtype.itemsize, self.mesh.num_shards)
        issue = self._exchange.reduce_scatter
        return self.recorder.watch(Kind.REDUCE, name, sent, issue, whole, out, cuts)

    def average_replicas(self, shard: Tensor, name: str = "") -> Pending:
        """Averages `shard` (1-D) in place over the ranks that hold the same one."""
        assert self._replicas is not None, "there is one replica"
        sent = 2 * _sent(shard.nbytes, self.mesh.num_replicas)
        return self.recorder.watch(Kind.AVERAGE, name, sent, self._replicas.all_reduce, shard)

    def all_reduce(self, whole: Tensor, name: str = "") -> Pending:
        """Averages `whole` (1-D, num_shards x shard) over ranks in place. One replica only."""
        assert self.mesh.num_replicas == 1, "what rests whole on every rank has no groups"
        sent = 2 * _sent(whole.nbytes, self.mesh.num_shards)
        return self.recorder.watch(Kind.AVERAGE, name, sent, self._exchange.all_reduce, whole)

    def sum_over_shards_(self, tensor: Tensor) -> Tensor:
        """Sums a small tensor over shards in place and waits; the same bits on every rank.

        Replicas hold equal shards, of which the first counts.
        """
        if self.mesh.replica_rank:
            tensor.zero_()
        return self._all_reduce_small(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        """Takes the elementwise maximum of a small tensor over ranks in place and waits.

        A NaN of any rank stays one, which backends do not promise.
        """
        if not tensor.is_floating_point():
            return self._all_reduce_small(tensor, dist.ReduceOp.MAX)
        is_nan = tensor.isnan()
        both = torch.stack([tensor.masked_fill(is_nan, -torch.inf), is_nan.to(tensor.dtype)])
        highest, has_nan = self._all_reduce_small(both, dist.ReduceOp.MAX).unbind()
        return tensor.copy_(highest.masked_fill(has_nan.bool(), torch.nan))

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copies the tensor of rank `source` to every rank, in place, and waits."""
        if self._group is not None and self.size > 1:
            with self.control.waiting("broadcast"):
                dist.broadcast(tensor, group=self._group, group_src=source)
        return tensor

    def open_channel(self) -> Channel:
        """A new channel for messages beside the collectives, closed by `abort` and `close`."""
        group = None
        if self.control.is_open and self.size > 1:
            group = dist.new_group(timeout=self._timeout, backend="gloo")
        channel = Channel(self.rank, self.size, group)
        self._channels = [other for other in self._channels if other.is_open]
        self._channels.append(channel)
        return channel

    def fail(self, error: Exception) -> None:
        """As `Control.fail`; where the others cannot be told, they find this rank gone."""
        try:
            self.control.fail(error)
        except RuntimeError:
            self.abort()

    def abort(self) -> None:
        """Makes the other ranks fail where they wait for this one. Does not wait for them."""
        if not self.control.is_open or self.size == 1 or self._is_aborted:
            return
        self._is_aborted = True
        self._close_channels()
        self.control.abort()
        self._close_data()

    def rally(self, deadline: timedelta) -> bool:
        """After an exception: waits until every rank has come here, then makes fresh groups.

        Returns:
            Whether all came in time. If not, no collective is possible any more.
        """
        if self.size == 1:
            return True
        if not self.control.is_open:
            return False  # closed
        self.abort()
        if not self.control.rally(deadline):
            return False
        self.close()
        self._forgotten.clear()
        self._open_group()
        self.control.open()
        self._exchange = self._open_exchange()
        self._is_aborted = False
        return True

    def wait_for_sent(self, is_from_cpu: bool) -> None:
        """Before CPU memory is written to from which gathers copied: waits for the copies."""
        if is_from_cpu:
            self._exchange.wait_for_sent()

    def forget(self, pending: Pending) -> None:
        """Drops a collective without waiting; its tensors live on, as its data may still arrive."""
        self._forgotten.append(pending)

    def close(self) -> None:
        """Destroys the engine's groups. Not collective: ranks may come here at different times."""
        self._close_data()
        self._close_channels()
        self.control.close()

    def _close_channels(self) -> None:
        for channel in self._channels:
            channel.close()

    def _close_data(self) -> None:
        is_gloo = isinstance(self._exchange, PeerToPeer)
        self._exchange = Closed()
        self._replicas = None
        for group in self._axes.groups if self._axes is not None else ():
            if not dist.is_initialized():
                continue
            if self._is_aborted and self.device.type == "cuda":
                # Destroying it would wait for kernels that wait for a rank that has failed.
                dist.distributed_c10d._abort_process_group(group)
                continue
            if self._is_aborted and is_gloo:
                hang_up(group)
            dist.destroy_process_group(group)
        self._group = self._axes = None

    def _all_reduce_small(self, tensor: Tensor, op: Any) -> Tensor:
        if self._group is not None and self.size > 1:
            # Offloaded gradients are summed on the CPU.
            travelling = tensor.to(self.device)
            with self.control.waiting("reduction"):
                dist.all_reduce(travelling, op=op, group=self._group)
            if travelling is not tensor:
                tensor.copy_(travelling)
        return tensor


def _sent(nbytes: int, size: int) -> int:
    """Bytes that leave a rank when each of `size` ranks gets, or gives away, all other parts."""
    return nbytes * (size - 1) // size
