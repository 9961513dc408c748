"""Backends of the data plane: peer to peer on gloo, else the backend's own collectives."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.health.world import has_world, is_nccl
from lightning_zero.record import streams
from lightning_zero.record.recorder import Mark, Pending, Recorder
from lightning_zero.tensors.buffer import ScratchPool

__all__ = [
    "Backend",
    "SplitSizes",
    "DeviceBackend",
    "GlooBackend",
    "Source",
    "Unfilled",
    "backend_for",
    "queue_warnings",
]

# New names of torch 2.13; 2.11 has only the old ones.
_all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

Source = Tensor | Callable[[Tensor], object]  # 1-D, or a function that fills a 1-D tensor


@dataclass(frozen=True)
class Unfilled:
    """A flat tensor that a backend allocates and fills where it is sent, on the stream of that.

    Attributes:
        numel: Number of elements.
        dtype: Dtype in which gloo sends them. Others send the dtype of the sum.
        fill: Writes all elements of a 1-D tensor, in any floating dtype.
        reads: Tensors that `fill` reads. On a device they are kept until the collective is done.
    """

    numel: int
    dtype: torch.dtype
    fill: Callable[[Tensor], object]
    reads: tuple[Tensor, ...] = ()


_TAG_STEP = 3  # kinds of collectives
# A tag has 16 bits of the number of the collective, and 15 of the message's size. If ranks make
# different calls, gloo waits for a message that is not sent, but aborts at one of another size.
_NUMBERS, _SIZES = _TAG_STEP * 2**14, 2**15 - 19
SplitSizes = Sequence[int] | None  # elements of each rank's shard; None: all equal


class Backend:
    """Interface of a backend; itself the null backend that is used after `close`."""

    def fill(self, buffer: Tensor, source: Source, name: str = "") -> streams.Event | None:
        """Copies this rank's shard from `source` into `buffer`, before its all-gather.

        Returns the end of the copy, on a device with streams.
        """
        return None

    def all_gather(
        self,
        buffer: Tensor,
        split_sizes: SplitSizes = None,
        filled: streams.Event | None = None,
    ) -> Pending:
        """Fills `buffer` in place from the shards of all ranks.

        `filled`: what `fill` has returned; None: this rank's shard is there for the current stream.
        """
        raise _closed_error()

    def reduce_scatter(self, buffer: Tensor | Unfilled, out: Tensor) -> Pending:
        """Writes this rank's shard of the mean to `out`; the content of `buffer` is lost."""
        raise _closed_error()

    def all_to_all(
        self, out: Tensor, parts: Tensor, out_sizes: Sequence[int], part_sizes: Sequence[int]
    ) -> Pending:
        """Sends each rank its part of `parts`, and writes the parts of all ranks to `out`.

        Tensors are 1-D; the sizes are the elements of each part, by rank.
        """
        raise _closed_error()

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Averages `tensor` in place."""
        raise _closed_error()

    def wait_for_uploads(self) -> None:
        """Waits until the copies that `fill` has issued are done."""

    def before_reduction(self) -> AbstractContextManager[Any]:
        """Context in which work precedes the next reduction, beside the compute stream."""
        return nullcontext()

    def wait_for_reductions(self) -> None:
        """Lets the compute stream wait for that work, and for the reductions before it."""

    def wait_for_all(self) -> None:
        """Lets the compute stream wait for all issued copies and collectives."""


def _closed_error() -> RuntimeError:
    return RuntimeError("the engine is closed; it can run no collective. Make a new Engine.")


def backend_for(device: torch.device) -> str:
    """Returns the backend for tensors on `device`; the default group may have one per device."""
    if has_world():
        pairs = (pair.split(":") for pair in dist.get_backend_config().split(","))
        by_device = dict(pairs)
        if device.type in by_device:
            return by_device[device.type]
    return "nccl" if device.type == "cuda" else "gloo"


def queue_warnings(device: torch.device) -> list[str]:
    """Returns warnings about settings with which two communicators on `device` can hang."""
    if not is_nccl(backend_for(device)) or os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        return []
    return [
        "CUDA_DEVICE_MAX_CONNECTIONS is 1, so that kernels of two NCCL communicators can wait for "
        "each other forever; unset it, or use overlap_step=False."
    ]


@dataclass
class _AsyncCollective:
    """A collective in flight: keeps its tensors alive, and finishes the result in `wait`."""

    works: list[Any]  # gloo's handles
    tensors: tuple[Tensor, ...] = ()
    finish: Callable[[], object] | None = None  # called once, after the works are done
    event: streams.Event | None = None  # end on a side stream; the current stream waits for it
    marks: tuple[Mark, Mark] | None = None

    def wait(self) -> None:
        while self.works:  # gloo's works may be waited for once only, even if a later one fails
            self.works.pop(0).wait()
        finish, self.finish = self.finish, None  # once only: it may also communicate
        if finish is not None:
            finish()
        if self.event is not None:
            streams.current(self.tensors[0].device).wait_event(self.event)
        self.event, self.tensors = None, ()


class GlooBackend(Backend):
    """Direct sends between every pair of ranks, for gloo.

    Gloo's own reduce-scatter clones its input and runs a full all-reduce, and its all-gather copies
    through a staging buffer. Here every rank sends each peer its shard and adds the shards that it
    receives. So P(N-1)/N elements leave each rank, nothing is copied, and the sum is computed in
    rank order, in the dtype of the result, the same on every run. An all-reduce is gloo's, which
    continues in gloo's threads whether a thread waits for it or not.

    Alternatives considered: `all_to_all_single` (one more copy); broadcasts for the all-gather (as
    fast on one machine, but N collectives with alternating roots); for the all-reduce, a
    reduce-scatter and an all-gather peer to peer: the all-gather could begin only in `wait`, and
    ranks that wait at different points of a backward would wait for each other.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self.scratch = ScratchPool(torch.device("cpu"))  # gloo receives into CPU memory only
        # Tags pair messages; those of different collectives differ modulo `_TAG_STEP`.
        self._gather_tag, self._reduce_tag, self._all_to_all_tag = range(_TAG_STEP)

    def fill(self, buffer: Tensor, source: Source, name: str = "") -> None:
        own = _shard(buffer, self._rank, self._size)
        if isinstance(source, Tensor):
            own.copy_(source)
        else:
            source(own)

    def all_gather(
        self,
        buffer: Tensor,
        split_sizes: SplitSizes = None,
        filled: streams.Event | None = None,
    ) -> Pending:
        if self._size == 1:
            return _AsyncCollective([])
        if buffer.device.type != "cpu":
            return self._via_cpu(
                buffer, lambda cpu: self.all_gather(cpu, split_sizes), buffer.copy_
            )
        shards = _shards(buffer, self._size, split_sizes)
        self._gather_tag += _TAG_STEP
        works = self._exchange([shards[self._rank]] * self._size, shards, self._gather_tag)
        return _AsyncCollective(works, (buffer,))

    def reduce_scatter(self, buffer: Tensor | Unfilled, out: Tensor) -> Pending:
        if self._size == 1:
            if isinstance(buffer, Unfilled):
                buffer.fill(out)
            else:
                _mean_in_rank_order([buffer], out)
            return _AsyncCollective([])
        flat = self._filled(buffer, out.device) if isinstance(buffer, Unfilled) else buffer
        if flat.device.type != "cpu":
            total = torch.empty(out.shape, dtype=out.dtype, device="cpu")
            return self._via_cpu(
                flat,
                lambda cpu: self.reduce_scatter(cpu, total),
                lambda _: out.copy_(total),
            )
        shards = flat.chunk(self._size)
        own = shards[self._rank]
        received = [
            own if peer == self._rank else self.scratch.acquire(own.numel(), own.dtype)
            for peer in range(self._size)
        ]
        self._reduce_tag += _TAG_STEP
        works = self._exchange(shards, received, self._reduce_tag)

        def finish() -> None:
            _mean_in_rank_order(received, out)
            for peer, shard in enumerate(received):
                if peer != self._rank:
                    self.scratch.release(shard)
            if flat is not buffer:
                self.scratch.release(flat)

        return _AsyncCollective(works, (flat, out), finish)

    def all_to_all(
        self, out: Tensor, parts: Tensor, out_sizes: Sequence[int], part_sizes: Sequence[int]
    ) -> Pending:
        if out.device.type != "cpu":
            received = torch.empty(out.shape, dtype=out.dtype, device="cpu")
            return self._via_cpu(
                parts,
                lambda cpu: self.all_to_all(received, cpu, out_sizes, part_sizes),
                lambda _: out.copy_(received),
            )
        receives, sends = out.split(list(out_sizes)), parts.split(list(part_sizes))
        receives[self._rank].copy_(sends[self._rank])
        self._all_to_all_tag += _TAG_STEP
        works = self._exchange(sends, receives, self._all_to_all_tag)
        return _AsyncCollective(works, (out, parts))

    def _filled(self, unfilled: Unfilled, device: torch.device) -> Tensor:
        if device.type == "cpu":
            flat = self.scratch.acquire(unfilled.numel, unfilled.dtype)
        else:
            flat = torch.empty(unfilled.numel, dtype=unfilled.dtype, device=device)
        unfilled.fill(flat)
        return flat

    def all_reduce(self, tensor: Tensor) -> Pending:
        if self._size == 1:
            return _AsyncCollective([])
        work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return _AsyncCollective([work], (tensor,), lambda: tensor.mul_(1 / self._size))

    def _exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor], tag: int) -> list[Any]:
        """Posts a send of `sends[peer]` and a receive of `receives[peer]`, nearest rank first.

        Empty tensors are not sent. `tag`: number of the collective.
        """
        works = []
        first = tag % _NUMBERS << 15
        for step in range(1, self._size):
            source = (self._rank - step) % self._size
            if receives[source].numel():
                sized = first + receives[source].nbytes % _SIZES
                works.append(self._group.recv([receives[source]], source, sized))
        for step in range(1, self._size):
            target = (self._rank + step) % self._size
            if sends[target].numel():
                sized = first + sends[target].nbytes % _SIZES
                works.append(self._group.send([sends[target]], target, sized))
        return works

    def _via_cpu(
        self, buffer: Tensor, run: Callable[[Tensor], Pending], finish: Callable[[Tensor], object]
    ) -> Pending:
        """Runs a collective on a CPU copy, because gloo sends and receives CPU memory only."""
        staged = buffer.to("cpu")
        pending = run(staged)

        def copy_back() -> None:
            pending.wait()
            finish(staged)

        return _AsyncCollective([], (buffer, staged), copy_back)


def _shards(buffer: Tensor, size: int, split_sizes: SplitSizes) -> list[Tensor]:
    """Returns every rank's shard of a flat tensor, as views."""
    return list(buffer.chunk(size) if split_sizes is None else buffer.split(list(split_sizes)))


def _shard(buffer: Tensor, rank: int, size: int, split_sizes: SplitSizes = None) -> Tensor:
    """Returns one rank's shard, without creating views of the others."""
    if split_sizes is None:
        numel = buffer.numel() // size
        return buffer.narrow(0, rank * numel, numel)
    return buffer.narrow(0, sum(split_sizes[:rank]), split_sizes[rank])


def _mean_in_rank_order(terms: list[Tensor], out: Tensor) -> None:
    """Writes the mean of `terms` to `out`, added in rank order; `out` may be one of the terms.

    The terms are receive buffers and this rank's own shard; their contents are lost.
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

    Shards of different lengths use the call that takes lists: NCCL issues one broadcast per shard,
    in one group.

    All-gathers and reductions each have a stream, so that a reduction that waits for a backward
    does not delay the all-gather of the next bucket. Copies from the CPU have one, too, and overlap
    the previous all-gather. Each side stream first waits for the current stream, directly or
    through the copy: there the buffers were allocated and written. These streams have high
    priority, because other ranks wait for their work.

    By default both use one communicator, which runs its kernels one after the other, in the order
    in which all ranks issue them (core/order.py). `gather_group` is a second communicator. Then an
    all-gather and a reduction may overlap, but their kernels may wait for each other if the device
    cannot hold both, or starts them in a different order on each rank: CUDA_DEVICE_MAX_CONNECTIONS
    must be more than 1. With NCCL 2.26 or later and NCCL_LAUNCH_ORDER_IMPLICIT=1 kernels start in
    the order in which they were issued. Each communicator allocates its own buffers, which
    NCCL_BUFFSIZE reduces.

    A sum is divided on the shard: NCCL's own average is neither computed by NVLink switches (NVLS)
    nor on registered buffers. float16, whose sum may overflow, is averaged by NCCL, which scales
    before it adds.

    Without a group this rank is the only one, and only copies remain.
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
        self._has_avg = is_nccl(backend_for(device))

    def fill(self, buffer: Tensor, source: Source, name: str = "") -> streams.Event | None:
        own = _shard(buffer, self._rank, self._size)
        with self._side_stream(self._copy_stream):
            if isinstance(source, Tensor):
                with self._recorder.copy_span(name, own.nbytes, source.device, own.device):
                    own.copy_(source, non_blocking=True)
            else:
                source(own)
        return None if self._copy_stream is None else self._copy_stream.record_event()

    def all_gather(
        self,
        buffer: Tensor,
        split_sizes: SplitSizes = None,
        filled: streams.Event | None = None,
    ) -> Pending:
        with self._side_stream(self._gather_stream, after=filled):
            began = self._recorder.mark()
            if self._group is not None:
                own = _shard(buffer, self._rank, self._size, split_sizes)
                if split_sizes is None:
                    _all_gather_single(buffer, own, group=self._gather_group)
                else:
                    shards = _shards(buffer, self._size, split_sizes)
                    dist.all_gather(shards, own, group=self._gather_group)
            return self._make_pending(self._gather_stream, began, buffer)

    def reduce_scatter(self, buffer: Tensor | Unfilled, out: Tensor) -> Pending:
        with self._side_stream(self._reduce_stream):
            began = self._recorder.mark()
            if isinstance(buffer, Unfilled):
                reads, flat = buffer.reads, out
                if self._group is not None:
                    flat = torch.empty(buffer.numel, dtype=out.dtype, device=out.device)
                buffer.fill(flat)
            else:
                reads, flat = (buffer,), buffer.to(out.dtype)
            if self._group is None:
                if flat is not out:
                    out.copy_(flat)
            else:
                _reduce_scatter_single(out, flat, op=self._op(out), group=self._group)
            self._finish_mean(out)
            return self._make_pending(self._reduce_stream, began, out, *reads)

    def all_to_all(
        self, out: Tensor, parts: Tensor, out_sizes: Sequence[int], part_sizes: Sequence[int]
    ) -> Pending:
        # A worker may issue it, like the all-gathers after a step, beside reductions.
        with self._side_stream(self._gather_stream):
            began = self._recorder.mark()
            sizes = list(out_sizes), list(part_sizes)
            dist.all_to_all_single(out, parts, *sizes, group=self._gather_group)
            return self._make_pending(self._gather_stream, began, out, parts)

    def before_reduction(self) -> AbstractContextManager[Any]:
        return self._side_stream(self._reduce_stream)

    def wait_for_reductions(self) -> None:
        if self._reduce_stream is not None:
            streams.current(self._reduce_stream.device).wait_stream(self._reduce_stream)

    def wait_for_all(self) -> None:
        for stream in (self._copy_stream, self._gather_stream, self._reduce_stream):
            if stream is not None:
                streams.current(stream.device).wait_stream(stream)

    def all_reduce(self, tensor: Tensor) -> Pending:
        with self._side_stream(self._reduce_stream):
            began = self._recorder.mark()
            if self._group is not None:
                dist.all_reduce(tensor, op=self._op(tensor), group=self._group)
                self._finish_mean(tensor)
            return self._make_pending(self._reduce_stream, began, tensor)

    def _op(self, out: Tensor) -> Any:
        is_mean = self._has_avg and out.dtype is torch.float16
        return dist.ReduceOp.AVG if is_mean else dist.ReduceOp.SUM

    def _finish_mean(self, out: Tensor) -> None:
        if self._op(out) is dist.ReduceOp.SUM and self._size > 1:
            out.mul_(1 / self._size)

    def wait_for_uploads(self) -> None:
        if self._copy_stream is not None:
            self._copy_stream.synchronize()

    def _side_stream(
        self, stream: streams.Stream | None, after: streams.Event | None = None
    ) -> AbstractContextManager[Any]:
        """Context in which work is queued on `stream`, after an event or the current stream."""
        if stream is not None and after is not None:
            stream.wait_event(after)
        elif stream is not None:
            stream.wait_stream(streams.current(stream.device))
        return streams.on(stream)

    def _make_pending(
        self, stream: streams.Stream | None, began: Mark | None, *tensors: Tensor
    ) -> Pending:
        ended = self._recorder.mark()
        event = stream.record_event() if stream is not None else None
        marks = (began, ended) if began and ended else None
        return _AsyncCollective([], tensors, event=event, marks=marks)
