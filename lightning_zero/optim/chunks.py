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
from lightning_zero.optim.state import check_sliced_states
from lightning_zero.optim.state_view import raw_states
from lightning_zero.record import streams
from lightning_zero.record.spans import Kind
from lightning_zero.tensors.lazy import LazyTensor
from lightning_zero.tiers.pipeline import FileRange
from lightning_zero.tiers.storage import FileShardStore

__all__ = ["BucketStep", "Chunk", "ChunkStep", "chunks_of", "step_chunks"]

MASTER, PARAM, GRAD = "master", "param", "grad"


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a shard, and the files in which a part of it rests.

    The first one also stands for parameters of which this rank owns nothing.
    """

    start: int  # a multiple of the page size
    stop: int
    files: Mapping[str, FileShardStore]  # by name: "master", "param", "grad", or "state." and a key

    @property
    def ranges(self) -> list[FileRange]:
        """Of its files."""
        return [
            file.range_of(self.start, self.stop, is_read=name != PARAM, is_written=name != GRAD)
            for name, file in self.files.items()
        ]

    def tensors(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """By name, its elements, 1-D, of `views`: uint8, one for each range."""
        numel = self.stop - self.start
        named = zip(self.files.items(), views, strict=True)
        return {name: view.view(file.dtype)[:numel] for (name, file), view in named}


def chunks_of(bucket: Bucket, slots: Collection[int]) -> list[Chunk]:
    """The chunks that hold anything of `slots`; one where everything is in memory."""
    files = _files_of(bucket)
    numel = bucket.shards.ensure_master().numel
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
    own = bucket.shards.own_ranges
    return [
        Chunk(start, min(start + step, numel), files)
        for start in range(0, numel, step)
        if not start or any(_part_of(own[index], start, start + step) for index in slots)
    ]


def _part_of(own: range, start: int, stop: int) -> range:
    """Elements of a slot, which are `own` in the shard, that lie within [start, stop)."""
    first = max(own.start, start)
    return range(first, max(first, min(own.stop, stop)))


def _files_of(bucket: Bucket) -> Mapping[str, FileShardStore]:
    """By name, the stores that are files and pass through buffers."""
    if bucket.plan.layout.has_tensor_owners:
        return {}  # a chunk would end within a tensor: its shard is read and written at once
    stores = {MASTER: bucket.shards.ensure_master(), GRAD: bucket.grads.store}
    if bucket.shards.has_own_master:
        stores[PARAM] = bucket.shards.param_shard
    stores.update((f"state.{key}", store) for key, store in bucket.shards.state_stores.items())
    return {name: store for name, store in stores.items() if isinstance(store, FileShardStore)}


class BucketStep:
    """One step of one bucket, with the gradients as they are when it is made.

    Attributes:
        bucket: It is in flight (`begin_step`) while its chunks are stepped.
        device: Where they are stepped.
        grads: By slot that is stepped, the gradient as it was.
        is_in_chunks: A part of a slice may be stepped.
        known: By slot, states after the chunks so far.
    """

    def __init__(self, bucket: Bucket, clone: OptimizerClone) -> None:
        self.bucket = bucket
        self.clone = clone
        self.device = bucket.shards.storage.step_device(bucket.plan.tiers.optim)
        self.grads: dict[int, Tensor] = {}
        for index, parameter in enumerate(bucket.parameters):
            grad = bucket.grads.fetch(index)
            is_stepped = bucket.shards.is_stepped[index] and parameter in clone.group_of
            if grad is not None and is_stepped:
                self.grads[index] = grad
        self._move_states()
        self.known: dict[int, dict[str, Any]] = {}
        self.is_in_chunks = False

    def _move_states(self) -> None:
        """Moves states to where they are stepped and rest: loaded ones may be elsewhere."""
        shards = self.bucket.shards
        is_offloaded = self.device.type == "cpu" and shards.storage.has_device_memory
        if not is_offloaded and not shards.keeps_states_in_files:
            return
        for index in self.grads:
            state = raw_states(self.clone.optimizer).get(self.bucket.parameters[index], {})
            if is_offloaded:
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.device.type != "cpu":
                        state[key] = value.cpu()
            if shards.keeps_states_in_files:
                shards.adopt_state(index, state)

    def chunks(self) -> list[ChunkStep]:
        """In order. They are made when the bucket is in flight."""
        chunks = chunks_of(self.bucket, self.grads)
        self.is_in_chunks = bool(chunks[0].files) or self.bucket.shards.keeps_states_in_files
        return [ChunkStep(self, chunk) for chunk in chunks]


class ChunkStep:
    """One step of one chunk: `start_load`, `load` what is stepped, `store` what has come of it."""

    def __init__(self, of: BucketStep, chunk: Chunk) -> None:
        self.of = of
        self.chunk = chunk
        self._shards = of.bucket.shards
        self._name = of.bucket.plan.name
        self._state = raw_states(of.clone.optimizer)
        self._memory: dict[str, Tensor] = {}  # by name, what rests in files
        self._master: Tensor | None = None  # where it is stepped
        self._arrival: streams.Event | None = None
        self._slices: dict[int, tuple[range, Slice]] = {}  # by slot, with its elements

    def start_load(self) -> None:
        """A master that rests in other memory begins to travel to where it is stepped."""
        if MASTER in self.chunk.files:
            return
        resting = self._shards.ensure_master().fetch(self.chunk.start, self.chunk.stop)
        device, moving = self.of.device, self._shards.storage.recorder.copy_span
        with moving(self._name, resting.nbytes, resting.device, device):
            self._master = resting.to(device, non_blocking=True)  # page-locked, if on the CPU
        if resting.device.type == "cuda" and device.type == "cpu":
            self._arrival = streams.current(resting.device).record_event()

    def load(self, views: list[Tensor]) -> list[Slice]:
        """What is to be stepped, with gradients and states. `views`: as of `Chunk.tensors`."""
        self._memory = self.chunk.tensors(views)
        if MASTER in self._memory:
            self._master = self._memory[MASTER]
        if self._arrival is not None:
            self._arrival.synchronize()
        own_ranges, chunk = self._shards.own_ranges, self.chunk
        for index in self.of.grads:
            part = _part_of(own_ranges[index], chunk.start, chunk.stop)
            if part or (chunk.start == 0 and not own_ranges[index]):
                self._slices[index] = part, self._slice(index, part)
        return [one for _, one in self._slices.values()]

    def store(self) -> None:
        """Stepped values and states go where they rest."""
        assert self._master is not None
        for index, (part, stepped) in self._slices.items():
            self._keep_state(index, part, stepped)
        storage, shards, start = self._shards.storage, self._shards, self.chunk.start
        if MASTER not in self._memory:
            storage.upload(self._master, shards.ensure_master(), start, self._name)
        if shards.has_own_master:
            if PARAM in self._memory:
                self._memory[PARAM].copy_(self._master)
            else:
                storage.upload(self._master, shards.param_shard, start, self._name)
        self._master = self._arrival = None  # others of the step are still to come
        self._slices, self._memory = {}, {}

    def _slice(self, index: int, part: range) -> Slice:
        assert self._master is not None
        parameter, own = self.of.bucket.parameters[index], self._shards.own_ranges[index]
        here = slice(part.start - self.chunk.start, part.stop - self.chunk.start)
        if GRAD in self._memory:
            grad = self._memory[GRAD][here]
        else:
            whole = self.of.grads[index].reshape(-1)
            grad = whole[part.start - own.start : part.stop - own.start]
        grad = grad.to(self.of.device, self._master.dtype)
        data, state = self._master[here], self._state.get(parameter, {})
        if self.of.is_in_chunks:
            state = {
                key: self._chunk_of(key, value, own, part, here) for key, value in state.items()
            }
        if len(part) == len(own):
            shape = self._shards.step_shapes[index]
            data, grad = data.view(shape), grad.view(shape)
        return Slice(parameter, data, grad, state)

    def _chunk_of(self, key: str, value: Any, own: range, part: range, here: slice) -> Any:
        """What a chunk sees of a state: its elements, or a copy of what is one for all chunks."""
        if isinstance(value, LazyTensor):
            return self._memory[f"state.{key}"][here]
        if is_elementwise_state(value, len(own)):
            return value[part.start - own.start : part.stop - own.start]
        return copy.deepcopy(value)

    def _keep_state(self, index: int, part: range, stepped: Slice) -> None:
        parameter = stepped.parameter
        if not self.of.is_in_chunks:
            if stepped.state and self._state.get(parameter) is not stepped.state:  # it is new
                self._state[parameter] = stepped.state
                check_sliced_states(self.of.clone.optimizer, parameter)
            return
        shards, start = self._shards, self.chunk.start
        own = shards.own_ranges[index]
        known = self.of.known.setdefault(index, {})  # in memory; other keys are in files
        for key, value in stepped.state.items():
            if not is_elementwise_state(value, len(part)):
                known[key] = value
            elif not shards.keeps_states_in_files:
                if key not in known:
                    old = self._state.get(parameter, {}).get(key)
                    is_there = is_elementwise_state(old, len(own))
                    known[key] = old if is_there else value.new_zeros(len(own))
                _write(known[key][part.start - own.start : part.stop - own.start], value)
            elif (view := self._memory.get(f"state.{key}")) is not None:
                _write(view[part.start - start : part.stop - start], value)
            else:  # made in this step
                shards.state_store(key, value.dtype).write(part.start, value)
        if stepped.state and (not own or part.stop == own.stop):
            self._state[parameter] = {
                key: known[key] if key in known else shards.state_view(index, key)
                for key in stepped.state
            }


def step_chunks(steps: Sequence[ChunkStep], views: list[Tensor]) -> None:
    """Takes `steps`, of one optimizer and one device, in one call of the optimizer.

    `views`: uint8, of what rests in files; empty where there are several.
    """
    first, last = steps[0].of.bucket, steps[-1].of.bucket
    name = first.plan.name if first is last else f"{first.plan.name} to {last.plan.name}"
    is_host = steps[0].of.device.type == "cpu"
    span = first.shards.storage.recorder.span(Kind.STEP, name, on_host=is_host)
    with record_function(f"zero::step {name}"), span, torch.no_grad():
        slices = [one for step in steps for one in step.load(views)]
        if slices:
            steps[0].of.clone.step(slices)
        for step in steps:
            step.store()


def _write(target: Tensor, values: Tensor) -> None:
    if target.data_ptr() != values.data_ptr():
        target.copy_(values)
