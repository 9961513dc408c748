"""The only door to collectives.

Two planes, each on process groups of the engine's own (Lightning broadcasts on WORLD in every
batch):

* data: flat buffers, between compute devices, along the axes of a `Mesh`. `PeerToPeer` on gloo,
  `Native` elsewhere. Gathers and reductions each have one order on all ranks, but how they
  interleave may differ by rank, so they share neither message tags nor a process group.
* control: single integers and small masks between CPUs, over gloo, so that all ranks, whatever
  their group, agree on what comes next without making a device wait. An aborting rank says so
  here, and the others fail at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.axes import AllReduce, Axes, open_axes, replica_exchange
from lightning_zero.buffer import Scratch
from lightning_zero.channel import Channel
from lightning_zero.exchange import Closed, Exchange, Native, PeerToPeer, Pending, backend_for
from lightning_zero.mesh import Mesh
from lightning_zero.recorder import Recorder
from lightning_zero.recording import Kind

__all__ = ["Communicator", "PeerAbortedError", "PeerFailedError", "Pending", "Round"]

_FAILED = -1
_NO_MARK = 2**62


class PeerAbortedError(RuntimeError):
    """Another rank stopped with an exception of its own, which is the one to read."""


class PeerFailedError(RuntimeError):
    """Another rank failed where all go on together; the text tells how."""


class Round(NamedTuple):
    """What `Communicator.agree` found."""

    lowest: int  # request of all ranks
    fewest: int  # reductions that any rank has issued
    highest: int  # request of all ranks
    is_alike: bool = True  # those that sent a mark sent the same one


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

    Raises:
        RuntimeError: A launcher has started several ranks, and no process group was initialised.
        ValueError: The group size does not divide the world size, or differs by rank.
    """

    rank: int
    size: int
    mesh: Mesh
    recorder: Recorder

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
        self._control: Any = None
        self._is_aborted = False
        self._forgotten: list[Pending] = []
        self._channels: list[Channel] = []
        self._replicas: AllReduce | None = None
        self._open_world()
        self._check_group_size(group_size)
        self.mesh = Mesh.of(self.rank, self.size, group_size)
        self._exchange: Exchange = self._open_exchange()

    def free_scratch(self) -> None:
        """Frees what was kept for the next reduction."""
        self.scratch.clear()
        if isinstance(self._exchange, PeerToPeer):
            self._exchange.scratch.clear()

    def _open_world(self) -> None:
        """Makes the groups of all ranks. Collective."""
        if dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(timeout=self._timeout)
            # The fake backend stands for N ranks in one process; gloo would wait for the others.
            control = "fake" if backend_for(self.device) == "fake" else "gloo"
            self._control = dist.new_group(timeout=self._timeout, backend=control)

    def _check_group_size(self, group_size: int | None) -> None:
        """Before groups are made, on which ranks with other sizes would wait for ever."""
        if group_size is None:
            return
        least, minus_most = self.min_ints([group_size, -group_size])
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

    @contextmanager
    def _agreeing(self, name: str) -> Iterator[None]:
        """Around waiting for the other ranks, for no data of theirs.

        Raises:
            PeerAbortedError: One of them called `abort`.
            RuntimeError: One does not come.
        """
        try:
            with self.recorder.span(Kind.AGREE, name, is_wait=True):
                yield
        except RuntimeError as error:
            if (rank := self._aborted_by()) is not None:
                raise PeerAbortedError(
                    f"rank {self.rank} stops because rank {rank} raised an exception; its "
                    "traceback, in that rank's output, tells the cause."
                ) from error
            raise RuntimeError(
                f"rank {self.rank} waited in vain for the other ranks to come to the same point. "
                "Every rank must run forward and backward together, with equally many batches (in "
                "stage 3 also a forward for a sample or an image, which `if rank == 0` would run "
                "on one rank alone; inside `with lightning_zero.lockstep(module)` on every rank, "
                "ranks may run different numbers of them); or another rank has died."
            ) from error

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

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Copies rank 0's tensor to every rank, in place, and waits."""
        if self._group is not None and self.size > 1:
            with self._agreeing("broadcast"):
                dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor

    def min_ints(self, values: Sequence[int]) -> list[int]:
        """Elementwise minimum over ranks."""
        if self.size == 1:
            return list(values)
        lowest = torch.tensor(values, dtype=torch.int64)
        with self._agreeing("minimum"):
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self._control)
        return [int(value) for value in lowest.tolist()]

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's picklable object, on every rank."""
        if self._control is None or self.size == 1:
            return value
        box = [value]
        with self._agreeing("broadcast"):
            dist.broadcast_object_list(box, group=self._control, group_src=0)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable object, on every rank."""
        if self._control is None or self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        with self._agreeing("objects"):
            dist.all_gather_object(box, value, group=self._control)
        return box

    def collect_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable object, by rank, on rank 0; nothing elsewhere."""
        if self._control is None or self.size == 1:
            return [value]
        box: list[Any] | None = None if self.rank else [None] * self.size
        with self._agreeing("objects"):
            dist.gather_object(value, box, group=self._control, group_dst=0)
        return box or []

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, by rank, on every rank: equally many on each."""
        if self._control is None or self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        everyone = [own.clone() for _ in range(self.size)]
        with self._agreeing("numbers"):
            dist.all_gather(everyone, own, group=self._control)
        return [numbers.tolist() for numbers in everyone]

    def open_channel(self) -> Channel:
        """A new channel for messages beside the collectives, closed by `abort` and `close`."""
        group = None
        if self._control is not None and self.size > 1:
            group = dist.new_group(timeout=self._timeout, backend="gloo")
        channel = Channel(self.rank, self.size, group)
        self._channels = [other for other in self._channels if other.is_open]
        self._channels.append(channel)
        return channel

    def agree(self, request: int, num_issued: int = 0, mark: int | None = None) -> Round:
        """One round of the control plane.

        Args:
            request: What this rank asks for; not negative.
            num_issued: How many reductions it has issued in this backward.
            mark: What must be the same on all ranks that send one; of less than 62 bits.

        Raises:
            PeerAbortedError: Another rank called `abort`.
            PeerFailedError: Another rank called `fail`.
        """
        return self.begin_agreement(request, num_issued, mark)()

    def begin_agreement(
        self, request: int, num_issued: int = 0, mark: int | None = None
    ) -> Callable[[], Round]:
        """As `agree`, but what it returns waits for the other ranks, and raises."""
        if self.size == 1:
            return lambda: Round(request, num_issued, request)
        marks = [_NO_MARK, _NO_MARK] if mark is None else [mark, -mark]
        agreed = torch.tensor([request, num_issued, -request, *marks], dtype=torch.int64)
        work = dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._control, async_op=True)
        return lambda: self._end_agreement(request, work, agreed)

    def _end_agreement(self, request: int, work: Any, agreed: Tensor) -> Round:
        with self._agreeing("round"):
            work.wait()
        lowest, fewest, least, low_mark, high_mark = agreed.tolist()
        if lowest == _FAILED and request != _FAILED:
            self._raise_failure(None)
        is_alike = low_mark == _NO_MARK or low_mark == -high_mark
        return Round(lowest, fewest, -least, is_alike)

    def fail(self, error: Exception) -> None:
        """Tells the other ranks, at their next `agree`, why this one fails; they raise it too.

        The caller raises `error` afterwards. All ranks can go on together where that is caught on
        all of them. Where ranks fail at once, each raises its own.
        """
        if self.size == 1 or isinstance(error, (PeerAbortedError, PeerFailedError)):
            return
        try:
            self.agree(_FAILED)
            self._raise_failure(error)
        except (PeerAbortedError, PeerFailedError):
            return
        except RuntimeError:
            self.abort()  # the error was that of a connection

    def _raise_failure(self, error: Exception | None) -> None:
        text = None if error is None else f"{type(error).__name__}: {error}"
        for rank, failure in enumerate(self.gather_objects(text)):
            if failure is not None:
                raise PeerFailedError(f"rank {rank} failed, and all ranks with it: {failure}")

    def union(self, mask: Sequence[bool]) -> list[bool]:
        """Elementwise `or` over ranks."""
        if self.size == 1:
            return list(mask)
        bits = torch.tensor(mask, dtype=torch.uint8)
        with self._agreeing("mask"):
            dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=self._control)
        return [bool(bit) for bit in bits.tolist()]

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Around work that each rank does alone and that may fail on some: then all of them fail.

        Raises:
            RuntimeError: Another rank failed; says which and how.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        failed = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(failed):
            if message is not None:
                raise RuntimeError(f"rank {rank} failed where all must succeed: {message}")

    def abort(self) -> None:
        """Makes the other ranks fail where they wait for this one. Never waits itself.

        Whatever they do next on either plane, or do already, finds its connections closed, which
        any collective notices; a message would pair with the agreement that this rank was about to
        take part in, which may be of another size.
        """
        if self._control is None or self.size == 1 or self._is_aborted:
            return
        self._is_aborted = True
        self._close_channels()
        with suppress(RuntimeError):  # the store is gone with rank 0, and they notice that too
            _store().compare_set(self._abort_key(), "", str(self.rank))
        self._hang_up(self._control)
        self._close_data()

    def _abort_key(self) -> str:
        return f"lightning_zero/abort/{self._control.group_name}"

    def _aborted_by(self) -> int | None:
        """The rank that was the first to abort."""
        if self._control is None:
            return None
        try:
            store, key = _store(), self._abort_key()
            return int(store.get(key)) if store.check([key]) else None
        except RuntimeError:  # the store is gone with rank 0
            return None

    def rally(self, deadline: timedelta) -> bool:
        """After an exception: waits until every rank has come here, then makes fresh groups.

        Returns:
            Whether all came in time. If not, no collective is possible any more.
        """
        if self.size == 1:
            return True
        if self._control is None:
            return False  # closed
        name = self._control.group_name
        self.abort()
        try:
            store = _store()
            key = f"lightning_zero/rally/{name}"
            store.add(key, 1)
            until = time.monotonic() + deadline.total_seconds()
            while store.add(key, 0) < self.size:
                if time.monotonic() > until:
                    return False
                time.sleep(0.02)
        except RuntimeError:  # the store was rank 0's, which is gone
            return False
        self.close()
        self._forgotten.clear()
        self._open_world()
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
        if self._control is not None and dist.is_initialized():
            dist.destroy_process_group(self._control)
        self._control = None

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
                self._hang_up(group)
            dist.destroy_process_group(group)
        self._group = self._axes = None

    def _hang_up(self, group: Any) -> None:
        """Closes a gloo group's connections, so that what is under way on it fails on both sides.

        Destroying it does not while anything, a transfer or a traceback, refers to it. A receive
        that times out does; but where the peer has gone it fails, and closes nothing else.
        """
        if dist.get_backend(group) != "gloo":
            return
        nothing = torch.empty(1)
        for peer in range(group.size()):
            if peer != group.rank():
                with suppress(RuntimeError):
                    group.recv([nothing], peer, 2**30).wait(timedelta(milliseconds=1))

    def _all_reduce_small(self, tensor: Tensor, op: Any) -> Tensor:
        if self._group is not None and self.size > 1:
            # Offloaded gradients are summed on the CPU.
            travelling = tensor.to(self.device)
            with self._agreeing("reduction"):
                dist.all_reduce(travelling, op=op, group=self._group)
            if travelling is not tensor:
                tensor.copy_(travelling)
        return tensor


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _sent(nbytes: int, size: int) -> int:
    """Bytes that leave a rank when each of `size` ranks gets, or gives away, all other parts."""
    return nbytes * (size - 1) // size
