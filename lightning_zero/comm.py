"""The only file that calls collectives.

Two planes, each on process groups of the engine's own (Lightning broadcasts on WORLD in every
batch):

* data: flat buffers, between compute devices. `_PeerToPeer` on gloo, `_Native` elsewhere. Gathers
  and reductions each have one order on all ranks, but how they interleave may differ by rank, so
  they share neither message tags nor a process group.
* control: single integers and small masks between CPUs, over gloo, so that ranks agree on what
  comes next without making a device wait. An aborting rank says so here, and the others fail at
  once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from lightning_zero.buffer import Scratch

__all__ = ["Communicator", "Pending", "PeerAbortedError"]

_ABORT = -1

# New names of torch 2.13; 2.11 has only the old ones.
_all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


class PeerAbortedError(RuntimeError):
    """Another rank stopped with an exception of its own, which is the one to read."""


class Pending(Protocol):
    """A collective under way. It keeps its tensors alive until `wait`."""

    def wait(self) -> None:
        """Makes the result safe to use on the current stream. Waiting twice is harmless."""


class _Exchange(Protocol):
    """How the data plane moves flat tensors."""

    def all_gather(self, whole: Tensor) -> Pending: ...

    def reduce_scatter(self, whole: Tensor, out: Tensor) -> Pending: ...

    def all_reduce(self, whole: Tensor) -> Pending: ...


class Communicator:
    """Collectives over flat buffers. Every method is collective: every rank, same order.

    Without a process group the world is this process alone.

    Raises:
        RuntimeError: A launcher has started several ranks, and no process group was initialised.
    """

    rank: int
    size: int

    def __init__(self, device: torch.device, *, timeout: timedelta | None = None) -> None:
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
        self.scratch = Scratch(device)
        self._timeout = timeout
        self._group: Any = None  # reductions, small sums and broadcasts
        self._gather_group: Any = None
        self._control: Any = None
        self._is_aborted = False
        self._forgotten: list[Pending] = []
        self._exchange: _Exchange = self._open()

    def free_scratch(self) -> None:
        """Frees what was kept for the next reduction."""
        self.scratch.clear()
        if isinstance(self._exchange, _PeerToPeer):
            self._exchange.scratch.clear()

    def _open(self) -> _Exchange:
        """Makes the groups. Collective."""
        is_gloo = True
        if dist.is_available() and dist.is_initialized():
            backend = _backend_for(self.device)
            is_gloo = backend == "gloo"
            self._group = dist.new_group(timeout=self._timeout)
            if not is_gloo:
                self._gather_group = dist.new_group(timeout=self._timeout)
            # The fake backend stands for N ranks in one process; gloo would wait for the others.
            control = backend if backend == "fake" else "gloo"
            self._control = dist.new_group(timeout=self._timeout, backend=control)
        if is_gloo:
            return _PeerToPeer(self._group, self.rank, self.size)
        return _Native(self._gather_group, self._group, self.rank, self.size, self.device)

    def all_gather(self, whole: Tensor, name: str = "") -> Pending:
        """Fills `whole` (1-D, size x shard) in place from every rank's own shard of it."""
        with record_function(f"zero::all_gather {name}"):
            return self._exchange.all_gather(whole)

    def reduce_scatter(self, whole: Tensor, out: Tensor, name: str = "") -> Pending:
        """Averages `whole` over ranks; this rank's shard of the mean lands in `out`.

        Args:
            whole: 1-D, size x shard. Its content is lost.
            out: 1-D, shard, in the dtype of the sum. It may be this rank's shard of `whole`.
            name: Bucket, for the profiler.
        """
        with record_function(f"zero::reduce_scatter {name}"):
            return self._exchange.reduce_scatter(whole, out)

    def all_reduce(self, whole: Tensor, name: str = "") -> Pending:
        """Averages `whole` (1-D, size x shard) over ranks in place."""
        with record_function(f"zero::all_reduce {name}"):
            return self._exchange.all_reduce(whole)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums a small tensor over ranks in place and waits."""
        return self._all_reduce_small(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        """Takes the elementwise maximum of a small tensor over ranks in place and waits."""
        return self._all_reduce_small(tensor, dist.ReduceOp.MAX)

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Copies rank 0's tensor to every rank, in place, and waits."""
        if self._group is not None and self.size > 1:
            dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's picklable object, on every rank."""
        if self._control is None or self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self._control, group_src=0)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable object, on every rank."""
        if self._control is None or self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, value, group=self._control)
        return box

    def agree(self, request: int, num_issued: int = 0) -> tuple[int, int]:
        """One round of the control plane: the lowest request and the lowest count of all ranks.

        Args:
            request: What this rank asks for; not negative.
            num_issued: How many reductions it has issued in this backward.

        Raises:
            PeerAbortedError: Another rank called `abort`.
        """
        if self.size == 1:
            return request, num_issued
        agreed = torch.tensor([request, num_issued], dtype=torch.int64)
        try:
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._control)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} waited in vain for the other ranks to come to the same point. "
                "Every rank must run forward and backward together, with equally many batches (in "
                "stage 3 also a forward for a sample or an image, which `if rank == 0` would run "
                "on one rank alone); or another rank has died."
            ) from error
        lowest, fewest = agreed.tolist()
        if lowest == _ABORT:
            raise PeerAbortedError(
                f"rank {self.rank} stops because another rank raised an exception; its traceback, "
                "in that rank's output, tells the cause."
            )
        return lowest, fewest

    def union(self, mask: Sequence[bool]) -> list[bool]:
        """Elementwise `or` over ranks."""
        if self.size == 1:
            return list(mask)
        bits = torch.tensor(mask, dtype=torch.uint8)
        dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=self._control)
        return [bool(bit) for bit in bits.tolist()]

    def abort(self) -> None:
        """Makes the other ranks fail where they wait for this one. Never waits itself.

        They learn it at their next `agree`; those that wait for data of this rank learn it from the
        closed connection.
        """
        if self._control is None or self.size == 1 or self._is_aborted:
            return
        self._is_aborted = True
        message = torch.tensor([_ABORT, 0], dtype=torch.int64)
        dist.all_reduce(message, op=dist.ReduceOp.MIN, group=self._control, async_op=True)
        self._close_data()

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
            store = dist.distributed_c10d._get_default_store()
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
        self._exchange = self._open()
        self._is_aborted = False
        return True

    def forget(self, pending: Pending) -> None:
        """Drops a collective without waiting; its tensors live on, as its data may still arrive."""
        self._forgotten.append(pending)

    def close(self) -> None:
        """Destroys the engine's groups. Not collective: ranks may come here at different times."""
        self._close_data()
        if self._control is not None and dist.is_initialized():
            dist.destroy_process_group(self._control)
        self._control = None

    def _close_data(self) -> None:
        self._exchange = _Closed()
        for group in (self._group, self._gather_group):
            if group is None or not dist.is_initialized():
                continue
            if self._is_aborted and self.device.type == "cuda":
                # Destroying it would wait for kernels that wait for a rank that has failed.
                dist.distributed_c10d._abort_process_group(group)
            else:
                dist.destroy_process_group(group)
        self._group = self._gather_group = None

    def _all_reduce_small(self, tensor: Tensor, op: Any) -> Tensor:
        if self._group is not None and self.size > 1:
            dist.all_reduce(tensor, op=op, group=self._group)
        return tensor


def _backend_for(device: torch.device) -> str:
    """The default group's backend for tensors of `device`; a group may have one for each kind."""
    backend = str(dist.get_backend())
    if backend != "undefined":
        return backend
    return "nccl" if device.type == "cuda" else "gloo"


class _Closed:
    """Takes the place of an exchange whose group is gone."""

    def all_gather(self, whole: Tensor) -> Pending:
        raise RuntimeError("the engine is closed; no collective is possible any more.")

    def reduce_scatter(self, whole: Tensor, out: Tensor) -> Pending:
        return self.all_gather(whole)

    def all_reduce(self, whole: Tensor) -> Pending:
        return self.all_gather(whole)


@dataclass
class _Works:
    """Gloo's work handles, and what remains to be done once they have arrived."""

    works: list[Any]
    tensors: tuple[Tensor, ...] = ()
    finish: Callable[[], None] | None = None

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        if self.finish is not None:
            self.finish()
        self.works, self.tensors, self.finish = [], (), None


class _PeerToPeer:
    """Direct sends between every pair of ranks, for gloo.

    Gloo's own reduce-scatter clones its input and runs a full all-reduce, and its all-gather copies
    through a staging buffer. Here every rank sends each peer its part and adds what it receives, so
    that P(N-1)/N elements leave each rank, nothing is copied, and the sum is made in rank order, in
    the dtype of the result, the same on every run.

    Alternatives considered: `all_to_all_single` (a copy more), broadcasts for the gather (as fast
    on one machine, but N collectives whose roots take turns).
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self.scratch = Scratch(torch.device("cpu"))  # gloo receives into CPU memory only
        # Tags pair messages: gathers count in even numbers, reductions in odd ones.
        self._gather_tag = 0
        self._reduce_tag = 1

    def all_gather(self, whole: Tensor) -> Pending:
        self._gather_tag += 2
        return self._gather(whole, self._gather_tag)

    def reduce_scatter(self, whole: Tensor, out: Tensor) -> Pending:
        if self._size == 1:
            return _Works([], (whole, out), lambda: _mean_in_rank_order([whole], out))
        if whole.device.type != "cpu":
            total = torch.empty(out.shape, dtype=out.dtype, device="cpu")
            return self._staged(
                whole, lambda cpu: self.reduce_scatter(cpu, total), lambda _: out.copy_(total)
            )
        parts = list(whole.chunk(self._size))
        received = [
            part if peer == self._rank else self.scratch.take(part.numel(), part.dtype)
            for peer, part in enumerate(parts)
        ]
        self._reduce_tag += 2
        works = self._trade(parts, received, self._reduce_tag)

        def finish() -> None:
            _mean_in_rank_order(received, out)
            for peer, part in enumerate(received):
                if peer != self._rank:
                    self.scratch.give(part)

        return _Works(works, (whole, out), finish)

    def all_reduce(self, whole: Tensor) -> Pending:
        own = whole.chunk(self._size)[self._rank]
        reduced = self.reduce_scatter(whole, own)
        # Taken now: by the time of `wait`, ranks may have issued different numbers of reductions.
        self._reduce_tag += 2
        tag = self._reduce_tag

        def gather() -> None:
            reduced.wait()
            self._gather(whole, tag).wait()

        return _Works([], (whole,), gather)

    def _gather(self, whole: Tensor, tag: int) -> Pending:
        if self._size == 1:
            return _Works([])
        if whole.device.type != "cpu":
            return self._staged(whole, lambda cpu: self._gather(cpu, tag), whole.copy_)
        parts = list(whole.chunk(self._size))
        return _Works(self._trade([parts[self._rank]] * self._size, parts, tag), (whole,))

    def _trade(self, sends: list[Tensor], receives: list[Tensor], tag: int) -> list[Any]:
        """Posts `sends[peer]` to and `receives[peer]` from each peer, the next neighbour first."""
        works = []
        for step in range(1, self._size):
            source = (self._rank - step) % self._size
            works.append(self._group.recv([receives[source]], source, tag))
        for step in range(1, self._size):
            target = (self._rank + step) % self._size
            works.append(self._group.send([sends[target]], target, tag))
        return works

    def _staged(
        self, whole: Tensor, run: Callable[[Tensor], Pending], finish: Callable[[Tensor], object]
    ) -> Pending:
        """Runs on a CPU copy: gloo sends and receives CPU memory only."""
        staged = whole.to("cpu")
        pending = run(staged)

        def copy_back() -> None:
            pending.wait()
            finish(staged)

        return _Works([], (whole, staged), copy_back)


def _mean_in_rank_order(terms: list[Tensor], out: Tensor) -> None:
    """Writes the mean of `terms` to `out`, added from rank 0 up; `out` may be one of the terms.

    The terms are receive buffers and this rank's own part, whose contents are no longer needed.
    """
    if len(terms) == 1:
        if out.data_ptr() != terms[0].data_ptr():
            out.copy_(terms[0])
        return
    if out.dtype == terms[0].dtype:
        total = terms[0]
        for term in terms[1:-1]:
            total.add_(term)
        torch.add(total, terms[-1], out=out)
    else:
        out.copy_(terms[0])
        for term in terms[1:]:
            out.add_(term)
    out.mul_(1 / len(terms))


@dataclass
class _Event:
    """A side stream's collective: (tensors, event), alive until the current stream waits for it."""

    event: torch.cuda.Event | None
    tensors: tuple[Tensor, ...] = field(default=())

    def wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream(self.tensors[0].device).wait_event(self.event)
        self.event, self.tensors = None, ()


class _Native:
    """The backend's own collectives, on side streams of the device: NCCL, and torch's fake backend.

    Gathers and reductions have a stream each, so that a reduction that waits for a backward does
    not hold up the gather of the next bucket. Each side stream first waits for the current stream,
    on which the buffers were allocated and written.
    """

    def __init__(
        self, gather_group: Any, group: Any, rank: int, size: int, device: torch.device
    ) -> None:
        self._gather_group = gather_group
        self._group = group
        self._rank = rank
        self._size = size
        has_streams = device.type == "cuda"
        self._gather_stream = torch.cuda.Stream(device) if has_streams else None
        self._reduce_stream = torch.cuda.Stream(device) if has_streams else None
        # NCCL scales before it adds, so that a sum of float16 does not overflow.
        self._has_mean = _backend_for(device) == "nccl"

    def all_gather(self, whole: Tensor) -> Pending:
        own = whole.chunk(self._size)[self._rank]
        with self._on(self._gather_stream):
            _all_gather_single(whole, own, group=self._gather_group)
            return self._event(self._gather_stream, whole)

    def reduce_scatter(self, whole: Tensor, out: Tensor) -> Pending:
        with self._on(self._reduce_stream):
            source = whole.to(out.dtype)
            op = dist.ReduceOp.AVG if self._has_mean else dist.ReduceOp.SUM
            _reduce_scatter_single(out, source, op=op, group=self._group)
            if not self._has_mean:
                out.mul_(1 / self._size)
            return self._event(self._reduce_stream, whole, out)

    def all_reduce(self, whole: Tensor) -> Pending:
        with self._on(self._reduce_stream):
            op = dist.ReduceOp.AVG if self._has_mean else dist.ReduceOp.SUM
            dist.all_reduce(whole, op=op, group=self._group)
            if not self._has_mean:
                whole.mul_(1 / self._size)
            return self._event(self._reduce_stream, whole)

    def _on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        return torch.cuda.stream(stream)

    @staticmethod
    def _event(stream: torch.cuda.Stream | None, *tensors: Tensor) -> _Event:
        return _Event(stream.record_event() if stream is not None else None, tensors)
