"""The step of one optimizer on one bucket, in chunks that a pipeline reads and writes.

[Note: Stores in a step] A shard has up to five flat tensors: the main parameters, the parameters
that are cast from them, the gradient, and the optimizer's states (Adam: two). Each has a store:
memory of the device where the bucket is stepped, memory of another device, or a file. Tensors in
files pass through buffers of fixed size, so the shard is stepped in chunks. Other tensors are used
in place, or copied for the chunk. Full tensors on their owners (core/full_tensors.py) are stepped
in one chunk, in memory: they are collected before the step and distributed after it. So are the
shards of an optimizer that gets all slices in one call.

[Note: States in files] An optimizer creates its states in its first step, so their keys are not
known in advance. Some are tensors of the slice's length (moments); each key of these moves to a
file of its own, and `optimizer.state` then holds LazyTensors, which read the file when they are
used. Every chunk gets a copy of all other states (a step counter).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.full_tensors import Arriving
from lightning_zero.core.optim_states import is_elementwise_state
from lightning_zero.layout.offload import PAGE_BYTES
from lightning_zero.optim.clone import OptimizerClone, Slice
from lightning_zero.optim.state import check_sliced_states
from lightning_zero.optim.state_view import raw_states
from lightning_zero.record import streams
from lightning_zero.record.spans import Kind
from lightning_zero.tensors.lazy import LazyTensor, read_flat
from lightning_zero.tiers.pipeline import FileRange
from lightning_zero.tiers.storage import FileShardStore

__all__ = [
    "MAX_NUMEL_PER_CALL",
    "BucketStep",
    "Chunk",
    "ChunkStep",
    "StepCall",
    "calls_of",
    "chunks_of",
]

MASTER, PARAM, GRAD = "master", "param", "grad"
# Maximum number of elements that one call steps, by type of device; one bucket may have more. On a
# CPU a step takes longer than its call, and all-gathers overlap it, so buckets are not combined.
MAX_NUMEL_PER_CALL = {"cuda": 2**25}
# The same for shards of full tensors: ranks wait for each other after every call, and have about
# equal work in many tensors only. On the owners, parameters and gradients take 1 GB.
MAX_SHARD_NUMEL_PER_CALL = 2**27


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a shard, with the files that have tensors of the shard.

    The first chunk also includes parameters of which this rank owns no elements.

    Attributes:
        start: First element, a multiple of the page size.
        stop: Element after the last one.
        files: Files by name: "master", "param", "grad", or "state." with the key of a state.
    """

    start: int
    stop: int
    files: Mapping[str, FileShardStore]

    @property
    def ranges(self) -> list[FileRange]:
        """Range of this chunk in each file."""
        return [
            file.range_of(self.start, self.stop, is_read=name != PARAM, is_written=name != GRAD)
            for name, file in self.files.items()
        ]

    def tensors(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """Elements of this chunk by name, 1-D, as views of `views` (uint8, one for each range)."""
        numel = self.stop - self.start
        named = zip(self.files.items(), views, strict=True)
        return {name: view.view(file.dtype)[:numel] for (name, file), view in named}


def chunks_of(bucket: Bucket, slots: Collection[int], *, is_joint: bool = False) -> list[Chunk]:
    """Chunks that contain elements of `slots`.

    One chunk if all tensors are in memory, or, with `is_joint`, if one call steps all of them.
    """
    files = {} if is_joint else _files_of(bucket)
    numel = bucket.shards.layout.numel
    step = numel
    if files:
        itemsize = sum(store.dtype.itemsize for store in files.values())
        nbytes = bucket.shards.storage.step_buffer_bytes
        step = nbytes // itemsize // PAGE_BYTES * PAGE_BYTES
        if not step:
            raise ValueError(
                f"a buffer of {nbytes} bytes cannot hold {PAGE_BYTES} elements of all {len(files)} "
                f"tensors of {bucket.plan.name} that are stored in files; use a larger buffer_size."
            )
    layout = bucket.shards.layout
    return [
        Chunk(start, min(start + step, numel), files)
        for start in range(0, numel, step)
        if not start or any(layout.within(index, start, start + step) for index in slots)
    ]


def _files_of(bucket: Bucket) -> Mapping[str, FileShardStore]:
    """Stores of a bucket that are files and pass through buffers, by name."""
    if bucket.shards.has_tensor_owners:
        return {}  # a chunk could end within a tensor, so the shard is read and written at once
    stores = {MASTER: bucket.shards.ensure_master(), GRAD: bucket.grads.main.store}
    if bucket.shards.has_separate_master:
        stores[PARAM] = bucket.shards.param_shard
    stores.update((f"state.{key}", store) for key, store in bucket.shards.states.stores.items())
    return {name: store for name, store in stores.items() if isinstance(store, FileShardStore)}


class BucketStep:
    """One step of one bucket, with the gradients at the time of construction.

    Attributes:
        bucket: The bucket; in flight (`begin_step`) while its chunks are stepped.
        clone: Copy of the optimizer's settings.
        device: Device on which the chunks are stepped.
        grads: Gradients by slot, of the slots that this rank steps: 1-D, own elements, also with
            tensor owners. If one call gets all slices, None for those without a gradient.
        mean: Gradients of all slots, 1-D, own elements, if full tensors are exchanged; else None.
        is_in_chunks: Whether slices may be stepped in several parts.
        new_states: States in memory after the chunks so far, by slot.
    """

    def __init__(self, bucket: Bucket, clone: OptimizerClone, *, has_grads: bool = True) -> None:
        self.bucket = bucket
        self.clone = clone
        self.device = bucket.shards.storage.step_device(bucket.plan.tiers.optim)
        self.grads: dict[int, Tensor | None] = {}
        for index, parameter in enumerate(bucket.parameters):
            grad = bucket.grads.fetch(index) if has_grads else None
            is_stepped = bucket.shards.step_layout.is_stepped[index]
            is_member = is_stepped and parameter in clone.group_of
            if is_member and (grad is not None or clone.is_joint):
                self.grads[index] = _in_memory(grad) if clone.is_joint else grad
        is_exchanged = has_grads and bucket.shards.full_tensors is not None
        self.mean = bucket.grads.main.values() if is_exchanged else None
        self._move_states()
        self.new_states: dict[int, dict[str, Any]] = {}
        self.is_in_chunks = False

    def _move_states(self) -> None:
        """Moves states, which may have been loaded to another place, to where they are stepped."""
        shards = self.bucket.shards
        is_offloaded = self.device.type == "cpu" and shards.storage.has_device_memory
        if not is_offloaded and not shards.states.are_in_files:
            return
        for index in self.grads:
            state = raw_states(self.clone.optimizer).get(self.bucket.parameters[index], {})
            for key, value in state.items():
                if self.clone.is_joint:
                    state[key] = _in_memory(value)
                if is_offloaded and isinstance(value, Tensor) and value.device.type != "cpu":
                    state[key] = value.cpu()
            if shards.states.are_in_files and not self.clone.is_joint:
                shards.states.adopt(index, state)

    def chunks(self) -> list[ChunkStep]:
        """Chunks in order, to be created while the bucket is in flight."""
        chunks = chunks_of(self.bucket, self.grads, is_joint=self.clone.is_joint)
        keeps_files = self.bucket.shards.states.are_in_files and not self.clone.is_joint
        self.is_in_chunks = bool(chunks[0].files) or keeps_files
        return [ChunkStep(self, chunk) for chunk in chunks]


class ChunkStep:
    """One step of one chunk: `start_load`, `load`, the step, then `store`.

    With full tensors `start_load` is collective, and so is `start_store`, which comes before
    `store`.
    """

    def __init__(self, bucket_step: BucketStep, chunk: Chunk) -> None:
        self.bucket_step = bucket_step
        self.chunk = chunk
        self._shards = bucket_step.bucket.shards
        self._store = self._shards.ensure_master()
        self._exchange = self._shards.full_tensors
        self._name = bucket_step.bucket.plan.name
        self._state = raw_states(bucket_step.clone.optimizer)
        self._memory: dict[str, Tensor] = {}  # tensors of files in a buffer, by name
        self._master: Tensor | None = None  # main parameters, on the device of the step
        self._arrival: streams.Event | None = None
        # With tensor owners, tensors in flight: of parameters and gradients, then of the shard.
        self._arriving: list[Arriving] = []
        self._full: list[Tensor] = []  # parameters and gradients of full tensors: 1-D
        self._slices: dict[int, tuple[range, Slice]] = {}  # by slot, with its elements

    def start_load(self) -> None:
        """Starts to copy main parameters in other memory to the device of the step.

        With tensor owners, starts to collect parameters and gradients.
        """
        if MASTER in self.chunk.files:
            return
        stored = self._store.fetch(self.chunk.start, self.chunk.stop)
        if self._exchange is not None:
            self._master = stored
            self._arriving.append(self._exchange.collect(stored))
            if self.bucket_step.mean is not None:
                mean = read_flat(self.bucket_step.mean, 0, stored.numel())
                self._arriving.append(self._exchange.collect(mean))
            return
        self._master = self._to_device(stored)
        if stored.device.type == "cuda" and self.bucket_step.device.type == "cpu":
            self._arrival = streams.current(stored.device).record_event()

    def _to_device(self, stored: Tensor) -> Tensor:
        """Starts to copy `stored`, which is pinned if it is on the CPU."""
        device, copy_span = self.bucket_step.device, self._shards.storage.recorder.copy_span
        with copy_span(self._name, stored.nbytes, stored.device, device):
            return stored.to(device, non_blocking=True)

    def load(self, views: list[Tensor]) -> list[Slice]:
        """Returns the slices to step, with gradients and states.

        Args:
            views: Buffers of the files; see `Chunk.tensors`.
        """
        if self.chunk.files:
            self._memory = self.chunk.tensors(views)
            if MASTER in self._memory:
                self._master = self._to_device(self._memory[MASTER])
        if self._arrival is not None:
            self._arrival.synchronize()
        if self._exchange is not None:
            self._full = [full.to(self.bucket_step.device) for full in self._wait()]
        layout, chunk = self._shards.layout, self.chunk
        is_all = chunk.stop - chunk.start == self._store.numel
        for index in self.bucket_step.grads:
            own = self._shards.step_layout.ranges[index]
            part = own if is_all else layout.within(index, chunk.start, chunk.stop)
            if part or (chunk.start == 0 and not own):
                self._slices[index] = part, self._slice(index, part)
        return [part for _, part in self._slices.values()]

    def _wait(self) -> list[Tensor]:
        """Waits for the tensors in flight, and returns them."""
        found = [arriving.wait() for arriving in self._arriving]
        self._arriving = []
        return found

    def discard(self) -> None:
        """Drops tensors in flight after an exception. Local."""
        for arriving in self._arriving:
            arriving.discard()
        self._arriving, self._full = [], []

    def start_store(self) -> None:
        """Starts to distribute the new values of full tensors, if full tensors are stepped."""
        if self._exchange is not None:
            assert self._master is not None
            self._arriving.append(self._exchange.distribute(self._full[0], self._master))

    def store(self) -> None:
        """Writes stepped values and states to their stores."""
        assert self._master is not None
        if self._arriving:
            self._wait()
        for index, (part, stepped) in self._slices.items():
            parameter, state = stepped.parameter, stepped.state
            if self.bucket_step.is_in_chunks:
                self._store_chunk_of_state(index, part, stepped)
            elif not state:
                self._state.pop(parameter, None)  # the optimizer may have deleted it
            elif self._state.get(parameter) is not state:  # it is new
                self._state[parameter] = state
                check_sliced_states(self.bucket_step.clone.optimizer, parameter)
            if self._shards.states.are_in_files and not self.bucket_step.is_in_chunks:
                self._shards.states.adopt(index, state)
        storage, shards, start = self._shards.storage, self._shards, self.chunk.start
        if MASTER in self._memory:
            self._write_to_buffer(MASTER)
        else:
            storage.upload(self._master, self._store, start, self._name)
        if shards.has_separate_master:
            if PARAM in self._memory:
                self._write_to_buffer(PARAM)
            else:
                storage.upload(self._master, shards.param_shard, start, self._name)
        self._master = self._arrival = None  # free the memory for the next chunks
        self._slices, self._memory, self._full = {}, {}, []

    def _write_to_buffer(self, name: str) -> None:
        """Copies stepped values to the buffer of a file; waits for them, as it is written next."""
        assert self._master is not None
        target, copy_span = self._memory[name], self._shards.storage.recorder.copy_span
        with copy_span(self._name, self._master.nbytes, self._master.device, target.device):
            _write(target, self._master)

    def _slice(self, index: int, part: range) -> Slice:
        assert self._master is not None
        parameter = self.bucket_step.bucket.parameters[index]
        layout = self._shards.step_layout
        own = layout.ranges[index]
        here = slice(part.start - self.chunk.start, part.stop - self.chunk.start)
        values, grad = self._master, self.bucket_step.grads[index]
        if self._full:
            values = self._full[0]
        if grad is not None:
            if self._full:
                grad = self._full[1][here]
            elif GRAD in self._memory:
                grad = self._memory[GRAD][here]
            else:
                grad = grad.reshape(-1)[part.start - own.start : part.stop - own.start]
            grad = grad.to(self.bucket_step.device, values.dtype)
        data, state = values[here], self._state.get(parameter, {})
        if self.bucket_step.is_in_chunks:
            state = {
                key: self._chunk_of_state(index, key, value, part) for key, value in state.items()
            }
        if len(part) == len(own):
            shape = layout.shapes[index]
            data, grad = data.view(shape), None if grad is None else grad.view(shape)
        return Slice(parameter, data, grad, state)

    def _chunk_of_state(self, index: int, key: str, value: Any, part: range) -> Any:
        """Part of a state in this chunk, or a copy of a state that is not sharded."""
        if isinstance(value, LazyTensor):
            start = self.chunk.start
            return self._memory[f"state.{key}"][part.start - start : part.stop - start]
        if self._shards.states.is_shard(index, key, value):
            return value[self._shards.states.layouts.part(key, index, part)]
        return copy.deepcopy(value)

    def _store_chunk_of_state(self, index: int, part: range, stepped: Slice) -> None:
        parameter = stepped.parameter
        shards, start = self._shards, self.chunk.start
        own = shards.layout.ranges[index]
        new = self.bucket_step.new_states.setdefault(index, {})  # other keys are in files
        for key, value in stepped.state.items():
            buffer = self._memory.get(f"state.{key}")
            here = shards.states.layouts.part(key, index, part)
            if not is_elementwise_state(value, here.stop - here.start):
                new[key] = value
            elif not shards.states.are_in_files or key in shards.plan.blocks.memory_keys:
                if key not in new:
                    old = self._state.get(parameter, {}).get(key)
                    has_old = shards.states.is_shard(index, key, old)
                    numel = len(shards.states.layouts.of(key).owned(index))
                    new[key] = old if has_old else value.new_zeros(numel)
                _write(new[key][here], value)
            elif buffer is not None:
                _write(buffer[part.start - start : part.stop - start], value)
            else:  # created in this step
                shards.states.ensure_store(key, value.dtype).write(part.start, value)
        if not stepped.state:
            self._state.pop(parameter, None)
        elif not own or part.stop == own.stop:
            self._state[parameter] = {
                key: new[key] if key in new else shards.states.view(index, key)
                for key in stepped.state
            }


class StepCall:
    """Chunks that one call of the optimizer steps.

    Attributes:
        steps: Steps of the chunks; several only if none of them has files.
        ranges: Ranges of the files that pass through a buffer.
        ended: Buckets of which these are the last chunks.
    """

    def __init__(self, steps: Sequence[ChunkStep], ended: Sequence[Bucket]) -> None:
        self.steps = steps
        self.ranges: list[FileRange] = [part for step in steps for part in step.chunk.ranges]
        self.ended = ended

    def start_load(self) -> None:
        """Starts to copy or collect what is not on the device of the step."""
        for step in self.steps:
            step.start_load()

    def discard(self) -> None:
        """Drops tensors in flight after an exception. Local."""
        for step in self.steps:
            step.discard()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context of the call, for profilers and the recorder; without autograd."""
        first, last = self.steps[0].bucket_step.bucket, self.steps[-1].bucket_step.bucket
        name = first.plan.name if first is last else f"{first.plan.name} to {last.plan.name}"
        clone = self.steps[0].bucket_step.clone
        if clone.is_joint:
            name = type(clone.optimizer).__name__
        is_host = self.steps[0].bucket_step.device.type == "cpu"
        span = first.shards.storage.recorder.span(Kind.STEP, name, on_host=is_host)
        with record_function(f"zero::step {name}"), span, torch.no_grad():
            yield

    def load(self, views: list[Tensor]) -> list[Slice]:
        """Returns the slices to step. `views`: buffers (uint8) of `ranges`."""
        return [part for step in self.steps for part in step.load(views)]

    def store(self) -> None:
        """Writes stepped values and states to their stores. Collective with full tensors."""
        for step in self.steps:
            step.start_store()
        for step in self.steps:
            step.store()


def calls_of(work: Sequence[Sequence[ChunkStep]], *, is_joint: bool) -> list[StepCall]:
    """Divides chunks, by bucket, into calls of the optimizer.

    A call costs a millisecond of Python, so small buckets on a device share one call.
    """
    calls: list[list[ChunkStep]] = []
    numel = 0
    for step in (step for steps in work for step in steps):
        own_numel = step.chunk.stop - step.chunk.start
        last = calls[-1][-1] if calls else None
        if last is not None and (is_joint or _shares_call(last, step, numel + own_numel)):
            calls[-1].append(step)
            numel += own_numel
        else:
            calls.append([step])
            numel = own_numel
    ends = {steps[-1] for steps in work}
    return [
        StepCall(steps, [step.bucket_step.bucket for step in steps if step in ends])
        for steps in calls
    ]


def _shares_call(last: ChunkStep, step: ChunkStep, numel: int) -> bool:
    """Whether a call that steps `last` steps `step`, too, and then `numel` elements."""
    device = step.bucket_step.device
    bound = MAX_NUMEL_PER_CALL.get(device.type, 0)
    if step.bucket_step.mean is not None:
        bound = MAX_SHARD_NUMEL_PER_CALL
    is_in_memory = not last.chunk.files and not step.chunk.files
    return is_in_memory and last.bucket_step.device == device and numel <= bound


def _in_memory(value: Any) -> Any:
    return value.read() if isinstance(value, LazyTensor) else value


def _write(target: Tensor, values: Tensor) -> None:
    if target.data_ptr() != values.data_ptr():
        target.copy_(values)
