"""What one optimizer does to one bucket in one step, in chunks that a pipeline reads and writes.

[Note: Stores in a step] A shard has up to five kinds of flat tensors: the master, the parameters
that follow from it, the gradient, and the optimizer's states (Adam: two). Each has a store: memory
of the device where the bucket is stepped, other memory, or a file. What rests in files passes
through buffers of fixed size, so the shard is stepped in chunks; the rest is used where it is, or
copied for the chunk.

[Note: States in files] An optimizer makes its states in its first step, and only then we see which
there are: tensors as long as the slice (moments), and others (a step counter), which every chunk
gets a copy of. The former move to a file of their own for each key; `optimizer.state` then holds
LazyTensors, which read them when somebody looks.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.shards import is_elementwise_state
from lightning_zero.layout.offload import PAGE_BYTES
from lightning_zero.optim.clone import OptimizerClone, Slice
from lightning_zero.optim.state import check_slice
from lightning_zero.record.spans import Kind
from lightning_zero.tensors.lazy import LazyTensor
from lightning_zero.tiers import FileRange, InFile, Job

__all__ = ["BucketStep", "Chunk", "chunks_of", "part_of"]

MASTER, PARAM, GRAD = "master", "param", "grad"


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a shard.

    Attributes:
        start: A multiple of the page size.
        stop: One past the last element.
        is_first: The first chunk, which also stands for parameters of which this rank owns nothing.
        ranges: What of it rests in files.
        names: Of the ranges: "master", "param", "grad", or "state." and a key.
        dtypes: Of the ranges.
    """

    start: int
    stop: int
    is_first: bool
    ranges: tuple[FileRange, ...]
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]

    def tensors(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """By name, the ranges as 1-D tensors of `stop - start` elements.

        Args:
            views: uint8, one for each range.
        """
        numel = self.stop - self.start
        named = zip(self.names, views, self.dtypes, strict=True)
        return {name: view.view(dtype)[:numel] for name, view, dtype in named}


def chunks_of(bucket: Bucket, slots: Collection[int]) -> list[Chunk]:
    """The chunks that hold anything of `slots`; one where everything is in memory."""
    files = _files_of(bucket)
    numel = bucket.shards.stepped().numel
    step = numel
    if files:
        itemsize = sum(store.dtype.itemsize for store in files.values())
        nbytes = bucket.shards.storage.step_buffer_bytes
        step = nbytes // itemsize // PAGE_BYTES * PAGE_BYTES
        if not step:
            raise ValueError(
                f"a buffer of {nbytes} bytes cannot hold {PAGE_BYTES} elements of all {len(files)} "
                f"tensors of {bucket.plan.name} that rest in files; use a larger buffer_size."
            )
    own_ranges = bucket.shards.own_ranges
    chunks = []
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        if start and not any(part_of(own_ranges[index], start, stop) for index in slots):
            continue
        ranges = [
            store.range_of(start, stop, is_read=name != PARAM, is_written=name != GRAD)
            for name, store in files.items()
        ]
        dtypes = tuple(store.dtype for store in files.values())
        chunks.append(Chunk(start, stop, start == 0, tuple(ranges), tuple(files), dtypes))
    return chunks


def part_of(own: range, start: int, stop: int) -> range:
    """Elements of a slot, which are `own` in the shard, that lie within [start, stop)."""
    first = max(own.start, start)
    return range(first, max(first, min(own.stop, stop)))


def _files_of(bucket: Bucket) -> Mapping[str, InFile]:
    """By name, the stores that are files and pass through buffers."""
    if bucket.plan.layout.holds_whole_tensors:
        return {}  # a chunk would end within a tensor: its shard is read and written at once
    stores = {MASTER: bucket.shards.stepped(), GRAD: bucket.grads.store}
    if bucket.shards.has_own_master:
        stores[PARAM] = bucket.shards.follower
    stores.update((f"state.{key}", store) for key, store in bucket.shards.state_stores.items())
    return {name: store for name, store in stores.items() if isinstance(store, InFile)}


class BucketStep:
    """One step of one bucket.

    Attributes:
        bucket: It is in flight (`begin_step`) while jobs run.
        is_in_chunks: A job may step a part of a slice.
    """

    def __init__(self, bucket: Bucket, clone: OptimizerClone) -> None:
        """Takes the gradients as they are now.

        Args:
            bucket: At least one of its parameters has a gradient.
            clone: Steps them.
        """
        self.bucket = bucket
        self._clone = clone
        self._state = clone.optimizer.state
        self._storage = bucket.shards.storage
        self._name = bucket.plan.name
        self._device = self._storage.step_device(bucket.plan.tiers.optim)
        is_elsewhere = self._device.type == "cpu" and self._storage.is_apart
        moves_states = is_elsewhere or bucket.shards.keeps_states_in_files
        self._grads: dict[int, Tensor] = {}  # by slot that is stepped
        for index, parameter in enumerate(bucket.parameters):
            grad = bucket.grads.fetch(index)
            if grad is None or not bucket.shards.is_stepped[index]:
                continue
            if parameter in clone.group_of:
                self._grads[index] = grad
                if moves_states and (state := self._state.get(parameter)) is not None:
                    self._bring_states(index, state)
        self._known: dict[int, dict[str, Any]] = {}  # by slot: states after the chunks so far
        self.is_in_chunks = False

    def _bring_states(self, index: int, state: dict[str, Any]) -> None:
        """Moves states to where they are stepped and rest: loaded ones may be elsewhere."""
        if self._device.type == "cpu" and self._storage.is_apart:
            for key, value in state.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    state[key] = value.cpu()
        if self.bucket.shards.keeps_states_in_files:
            self.bucket.shards.adopt_state(index, state)

    def jobs(self) -> list[Job]:
        """The chunks in order."""
        chunks = chunks_of(self.bucket, self._grads)
        has_files = (
            any(chunk.ranges for chunk in chunks) or self.bucket.shards.keeps_states_in_files
        )
        self.is_in_chunks = has_files
        return [self._job(chunk) for chunk in chunks]

    def _job(self, chunk: Chunk) -> Job:
        def run(views: list[Tensor]) -> None:
            is_host = self._device.type == "cpu"
            span = self._storage.recorder.span(Kind.STEP, self._name, on_host=is_host)
            with record_function(f"zero::step {self._name}"), span, torch.no_grad():
                self._run(chunk, views)

        return Job(chunk.ranges, run)

    def _run(self, chunk: Chunk, views: list[Tensor]) -> None:
        memory = chunk.tensors(views)
        master = memory.get("master")
        if master is None:
            resting = self.bucket.shards.stepped().fetch(chunk.start, chunk.stop)
            way = (resting.device, self._device)
            with self._storage.recorder.moving(self._name, resting.nbytes, *way):
                master = resting.to(self._device)
        own_ranges = self.bucket.shards.own_ranges
        parts = {
            index: part
            for index in self._grads
            if (part := part_of(own_ranges[index], chunk.start, chunk.stop))
            or (chunk.is_first and not own_ranges[index])
        }
        slices = [self._slice(i, part, chunk, master, memory) for i, part in parts.items()]
        if slices:
            self._clone.step(slices)
        for (index, part), stepped in zip(parts.items(), slices, strict=True):
            self._keep_state(index, part, chunk, stepped, memory)
        if "master" not in memory:
            self._storage.upload(master, self.bucket.shards.stepped(), chunk.start, self._name)
        if self.bucket.shards.has_own_master:
            if "param" in memory:
                memory["param"].copy_(master)
            else:
                follower = self.bucket.shards.follower
                self._storage.upload(master, follower, chunk.start, self._name)

    def _slice(
        self,
        index: int,
        part: range,
        chunk: Chunk,
        master: Tensor,
        memory: dict[str, Tensor],
    ) -> Slice:
        parameter = self.bucket.parameters[index]
        own = self.bucket.shards.own_ranges[index]
        here = slice(part.start - chunk.start, part.stop - chunk.start)
        if "grad" in memory:
            grad = memory["grad"][here]
        else:
            whole = self._grads[index].reshape(-1)
            grad = whole[part.start - own.start : part.stop - own.start]
        grad = grad.to(self._device, master.dtype)
        data, state = master[here], self._state.get(parameter, {})
        if self.is_in_chunks:
            state = {
                key: self._chunk_of(key, value, own, part, memory, here)
                for key, value in state.items()
            }
        if len(part) == len(own):
            shape = self.bucket.shards.step_shapes[index]
            data, grad = data.view(shape), grad.view(shape)
        return Slice(parameter, data, grad, state)

    @staticmethod
    def _chunk_of(
        key: str, value: Any, own: range, part: range, memory: dict[str, Tensor], here: slice
    ) -> Any:
        """What a chunk sees of a state: its elements, or a copy of what is one for all chunks."""
        if isinstance(value, LazyTensor):
            return memory[f"state.{key}"][here]
        if is_elementwise_state(key, value, len(own)):
            return value[part.start - own.start : part.stop - own.start]
        return copy.deepcopy(value)

    def _keep_state(
        self, index: int, part: range, chunk: Chunk, stepped: Slice, memory: dict[str, Tensor]
    ) -> None:
        """Puts what the optimizer knows after the step where it belongs."""
        parameter = stepped.parameter
        if not self.is_in_chunks:
            if stepped.state and self._state.get(parameter) is not stepped.state:  # it is new
                self._state[parameter] = stepped.state
                check_slice(self._clone.optimizer, parameter)
            return
        own = self.bucket.shards.own_ranges[index]
        known = self._known.setdefault(index, {})  # in memory; other keys are in files
        for key, value in stepped.state.items():
            if not is_elementwise_state(key, value, len(part)):
                known[key] = value
            elif not self.bucket.shards.keeps_states_in_files:
                if key not in known:
                    old = self._state.get(parameter, {}).get(key)
                    is_there = is_elementwise_state(key, old, len(own))
                    known[key] = old if is_there else value.new_zeros(len(own))
                _write(known[key][part.start - own.start : part.stop - own.start], value)
            elif (view := memory.get(f"state.{key}")) is not None:
                _write(view[part.start - chunk.start : part.stop - chunk.start], value)
            else:  # made in this step
                self.bucket.shards.state_store(key, value.dtype).write(part.start, value)
        if stepped.state and (not own or part.stop == own.stop):
            self._state[parameter] = {
                key: known[key] if key in known else self.bucket.shards.look_at_state(index, key)
                for key in stepped.state
            }


def _write(target: Tensor, values: Tensor) -> None:
    if target.data_ptr() != values.data_ptr():
        target.copy_(values)
