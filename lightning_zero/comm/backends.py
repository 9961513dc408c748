"""How flat tensors move between ranks: peer to peer on gloo, else by collectives of the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.world import has_world
from lightning_zero.record import streams
from lightning_zero.record.recorder import Mark, Pending, Recorder
from lightning_zero.tensors.buffer import ScratchPool

__all__ = ["Backend", "SplitSizes", "DeviceBackend", "GlooBackend", "Source", "backend_for"]

# New names of torch 2.13; 2.11 has only the old ones.
_all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

Source = Tensor | Callable[[Tensor], object]  # 1-D, or what fills a 1-D tensor on any stream
SplitSizes = Sequence[int] | None  # elements of each rank's part; None: all alike


class Backend:
    """How the data plane moves flat tensors. This one itself moves none: its groups are gone."""

    def fill(
        self, whole: Tensor, source: Source, split_sizes: SplitSizes = None, name: str = ""
    ) -> None:
        """Takes this rank's part of `whole` from `source`, before its gather."""

    def all_gather(self, whole: Tensor, split_sizes: SplitSizes = None) -> Pending:
        """Fills `whole` in place from every rank's own part."""
        raise _closed()

    def reduce_scatter(self, whole: Tensor, out: Tensor, split_sizes: SplitSizes = None) -> Pending:
        """Leaves this rank's part of the mean in `out`, and anything in `whole`."""
        raise _closed()

    def all_reduce(self, whole: Tensor) -> Pending:
        """Averages `whole` in place."""
        raise _closed()

    def wait_for_uploads(self) -> None:
        """Waits until `fill` has copied what it was given."""


def _closed() -> RuntimeError:
    return RuntimeError("the engine is closed; no collective is possible any more.")


def backend_for(device: torch.device) -> str:
    """The backend for tensors of `device`: the default group may have one for each kind."""
    backend = str(dist.get_backend()) if has_world() else "undefined"
    if backend != "undefined":
        return backend
    return "nccl" if device.type == "cuda" else "gloo"


@dataclass
class _UnderWay:
    """A collective, its tensors alive until it has arrived, and what remains to be done then."""

    works: list[Any]  # gloo's handles
    tensors: tuple[Tensor, ...] = ()
    finish: Callable[[], object] | None = None
    event: streams.Event | None = None  # of a side stream, for which the current one waits
    marks: tuple[Mark, Mark] | None = None

    def wait(self) -> None:
        while self.works:  # gloo's may be waited for once only, also if a later one fails
            self.works.pop(0).wait()
        finish, self.finish = self.finish, None  # once only: it may send, too
        if finish is not None:
            finish()
        if self.event is not None:
            streams.current(self.tensors[0].device).wait_event(self.event)
        self.event, self.tensors = None, ()


class GlooBackend(Backend):
    """Direct sends between every pair of ranks, for gloo.

    Gloo's own reduce-scatter clones its input and runs a full all-reduce, and its all-gather copies
    through a staging buffer. Here every rank sends each peer its part and adds what it receives, so
    that P(N-1)/N elements leave each rank, nothing is copied, and the sum is made in rank order, in
    the dtype of the result, the same on every run. An all-reduce is gloo's own, which goes on in
    its threads whether anybody waits or not.

    Alternatives considered: `all_to_all_single` (a copy more), broadcasts for the gather (as fast
    on one machine, but N collectives whose roots take turns). For the all-reduce a reduction and a
    gather peer to peer: the gather could begin only when somebody waits, and ranks that wait at
    different points of a backward would wait for each other.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self.scratch = ScratchPool(torch.device("cpu"))  # gloo receives into CPU memory only
        # Tags pair messages: gathers count in even numbers, reductions in odd ones.
        self._gather_tag = 0
        self._reduce_tag = 1

    def fill(
        self, whole: Tensor, source: Source, split_sizes: SplitSizes = None, name: str = ""
    ) -> None:
        own = _part(whole, self._rank, self._size, split_sizes)
        if isinstance(source, Tensor):
            own.copy_(source)
        else:
            source(own)

    def all_gather(self, whole: Tensor, split_sizes: SplitSizes = None) -> Pending:
        if self._size == 1:
            return _UnderWay([])
        if whole.device.type != "cpu":
            return self._staged(whole, lambda cpu: self.all_gather(cpu, split_sizes), whole.copy_)
        parts = _parts(whole, self._size, split_sizes)
        self._gather_tag += 2
        works = self._trade([parts[self._rank]] * self._size, parts, self._gather_tag)
        return _UnderWay(works, (whole,))

    def reduce_scatter(self, whole: Tensor, out: Tensor, split_sizes: SplitSizes = None) -> Pending:
        if self._size == 1:
            return _UnderWay([], (whole, out), lambda: _mean_in_rank_order([whole], out))
        if whole.device.type != "cpu":
            total = torch.empty(out.shape, dtype=out.dtype, device="cpu")
            return self._staged(
                whole,
                lambda cpu: self.reduce_scatter(cpu, total, split_sizes),
                lambda _: out.copy_(total),
            )
        parts = _parts(whole, self._size, split_sizes)
        own = parts[self._rank]
        received = [
            own if peer == self._rank else self.scratch.acquire(own.numel(), own.dtype)
            for peer in range(self._size)
        ]
        self._reduce_tag += 2
        works = self._trade(parts, received, self._reduce_tag)

        def finish() -> None:
            _mean_in_rank_order(received, out)
            for peer, part in enumerate(received):
                if peer != self._rank:
                    self.scratch.release(part)

        return _UnderWay(works, (whole, out), finish)

    def all_reduce(self, whole: Tensor) -> Pending:
        if self._size == 1:
            return _UnderWay([])
        work = dist.all_reduce(whole, group=self._group, async_op=True)
        return _UnderWay([work], (whole,), lambda: whole.mul_(1 / self._size))

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

        return _UnderWay([], (whole, staged), copy_back)


def _parts(whole: Tensor, size: int, split_sizes: SplitSizes) -> list[Tensor]:
    """Every rank's part of a flat tensor, views: equal ones, or as long as `split_sizes` says."""
    return list(whole.chunk(size) if split_sizes is None else whole.split(list(split_sizes)))


def _part(whole: Tensor, rank: int, size: int, split_sizes: SplitSizes) -> Tensor:
    """One rank's part, without views of the others."""
    if split_sizes is None:
        numel = whole.numel() // size
        return whole.narrow(0, rank * numel, numel)
    return whole.narrow(0, sum(split_sizes[:rank]), split_sizes[rank])


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


class DeviceBackend(Backend):
    """The backend's own collectives, on side streams of the device: NCCL, and torch's fake backend.

    Parts of different lengths go through the calls that take lists: NCCL has one broadcast or
    reduction for each of them, issued together.

    Gathers and reductions have a stream each, so that a reduction that waits for a backward does
    not hold up the gather of the next bucket, and so have copies from the CPU, which overlap the
    previous gather. Each side stream first waits for the current stream, on which the buffers were
    allocated and written. These streams have high priority: other ranks wait for what they do.

    Two communicators are under way at once on one device. Their kernels may wait for each other if
    the device has not room for both, or starts them in another order on each rank: leave
    CUDA_DEVICE_MAX_CONNECTIONS as it is (Megatron-LM sets it to 1). With NCCL 2.26 or later and
    NCCL_LAUNCH_ORDER_IMPLICIT=1 kernels start in the order in which they were issued, which is one
    order on all ranks (layout/order.py), but for a step that a worker takes. One communicator would
    be better where memory is short: each takes buffers of its own; NCCL_BUFFSIZE makes them less.

    Without a group this rank is alone, and nothing but copies is left.
    """

    def __init__(
        self,
        gather_group: Any,
        group: Any,
        rank: int,
        size: int,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        self._gather_group = gather_group
        self._group = group
        self._rank = rank
        self._size = size
        self._recorder = recorder
        self._copy_stream = streams.make_stream(device, is_high_priority=True)
        self._gather_stream = streams.make_stream(device, is_high_priority=True)
        self._reduce_stream = streams.make_stream(device, is_high_priority=True)
        # NCCL scales before it adds, so that a sum of float16 does not overflow.
        self._has_mean = backend_for(device) == "nccl"
        self._op = dist.ReduceOp.AVG if self._has_mean else dist.ReduceOp.SUM

    def fill(
        self, whole: Tensor, source: Source, split_sizes: SplitSizes = None, name: str = ""
    ) -> None:
        own = _part(whole, self._rank, self._size, split_sizes)
        with self._on(self._copy_stream):
            if isinstance(source, Tensor):
                with self._recorder.copy_span(name, own.nbytes, source.device, own.device):
                    own.copy_(source, non_blocking=True)
            else:
                source(own)
        if self._gather_stream is not None and self._copy_stream is not None:
            self._gather_stream.wait_stream(self._copy_stream)

    def all_gather(self, whole: Tensor, split_sizes: SplitSizes = None) -> Pending:
        with self._on(self._gather_stream):
            began = self._recorder.mark()
            if self._group is not None:
                own = _part(whole, self._rank, self._size, split_sizes)
                if split_sizes is None:
                    _all_gather_single(whole, own, group=self._gather_group)
                else:
                    parts = _parts(whole, self._size, split_sizes)
                    dist.all_gather(parts, own, group=self._gather_group)
            return self._under_way(self._gather_stream, began, whole)

    def reduce_scatter(self, whole: Tensor, out: Tensor, split_sizes: SplitSizes = None) -> Pending:
        with self._on(self._reduce_stream):
            began = self._recorder.mark()
            if self._group is None:
                out.copy_(whole)
                return self._under_way(self._reduce_stream, began, whole, out)
            source = whole.to(out.dtype)
            if split_sizes is None:
                _reduce_scatter_single(out, source, op=self._op, group=self._group)
            else:
                parts = _parts(source, self._size, split_sizes)
                dist.reduce_scatter(out, parts, op=self._op, group=self._group)
            if not self._has_mean:
                out.mul_(1 / self._size)
            return self._under_way(self._reduce_stream, began, whole, out)

    def all_reduce(self, whole: Tensor) -> Pending:
        with self._on(self._reduce_stream):
            began = self._recorder.mark()
            if self._group is not None:
                dist.all_reduce(whole, op=self._op, group=self._group)
                if not self._has_mean:
                    whole.mul_(1 / self._size)
            return self._under_way(self._reduce_stream, began, whole)

    def wait_for_uploads(self) -> None:
        if self._copy_stream is not None:
            self._copy_stream.synchronize()

    def _on(self, stream: streams.Stream | None) -> AbstractContextManager[Any]:
        if stream is not None:
            stream.wait_stream(streams.current(stream.device))
        return streams.on(stream)

    def _under_way(
        self, stream: streams.Stream | None, began: Mark | None, *tensors: Tensor
    ) -> Pending:
        ended = self._recorder.mark()
        event = stream.record_event() if stream is not None else None
        marks = (began, ended) if began and ended else None
        return _UnderWay([], tensors, event=event, marks=marks)
