"""Bytes of one rank between steps and moved in a step, from a run; see engine_run.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_zero.core.bucket import Bucket
from lightning_zero.engine.counting import count_held
from lightning_zero.engine.engine import Engine
from lightning_zero.engine.expected import Tiers
from lightning_zero.layout.offload import (
    MAX_GRADS_IN_FLIGHT,
    NUM_UPLOAD_BLOCKS,
    UPLOAD_BLOCK_BYTES,
    Tier,
    padded_bytes,
)
from lightning_zero.layout.stage import State
from lightning_zero.optim.state_view import raw_states
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind, Recording
from lightning_zero.tensors.composite import plain_tensors

__all__ = ["BucketCounts", "Counts", "Peak", "Windows"]

_SENT = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)


@dataclass(frozen=True)
class Peak:
    """Peak of one rank's device memory in forward and backward, without the model states.

    Attributes:
        unsharded_bytes: Bytes of unsharded parameters of stage 3.
        grad_bucket_bytes: Bytes of unsharded gradients.
        activation_bytes: Bytes of activations and of all other tensors.
        freed_bytes: Bytes of gradients that are counted as model states but are freed at the peak,
            after `zero_grad`.
    """

    unsharded_bytes: int = 0
    grad_bucket_bytes: int = 0
    activation_bytes: int = 0
    freed_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes in addition to the model states, minus those that are freed."""
        needed = self.unsharded_bytes + self.grad_bucket_bytes + self.activation_bytes
        return needed - self.freed_bytes


@dataclass(frozen=True)
class Counts:
    """Bytes of one rank, counted in a run.

    Attributes:
        held: Model states after a step, before gradients are zeroed.
        averages: Averages of the weights, by tier.
        nvme_buffer_bytes: CPU memory of the buffers through which files are read and written.
        staging_bytes: CPU memory for other tensors in transfer.
        peak: Peak of the step.
        sent: Bytes sent to other ranks in a step, without those of full tensors to and from their
            owners.
        to_cpu: Bytes copied from the device to CPU memory.
        from_cpu: Bytes copied from CPU memory to the device.
        read: Bytes read from NVMe files.
        written: Bytes written to NVMe files.
        cpu_step: Bytes that optimizer steps on the CPU read and write in CPU memory.
    """

    held: Tiers
    averages: Mapping[Tier, int]
    nvme_buffer_bytes: int
    staging_bytes: int
    peak: Peak
    sent: int
    to_cpu: int
    from_cpu: int
    read: int
    written: int
    cpu_step: int

    @property
    def by_rank(self) -> tuple[Tiers, ...]:
        """`held` of rank 0, for `MemoryByRank`."""
        return (self.held,)

    def with_averages(self, tiers: Tiers) -> Tiers:
        """Adds the averages, which count as optimizer state, to the model states of a rank."""
        found = {tier: dict(states) for tier, states in tiers.items()}
        for tier, nbytes in self.averages.items():
            found.setdefault(tier, dict.fromkeys(State, 0))[State.OPTIM] += nbytes
        return found


class Windows:
    """Recordings of the micro-batches of a step, and of the optimizer's step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.recordings: list[Recording] = []
        recorder.start()

    @contextmanager
    def next(self) -> Iterator[None]:
        """Context that is recorded."""
        self._recorder.begin(0)
        yield
        self.recordings.append(self._recorder.end())


class BucketCounts:
    """Bytes of all buckets, those of blocks that have not been run included.

    Args:
        engine: The engine, between two steps.
        num_copies: Number of parameters for which a parameter stands, by its name.
        num_micro_batches: Number of micro-batches in an optimizer step.
        averages: Tier of each average of the weights.

    Attributes:
        held: Bytes of the model states.
    """

    def __init__(
        self,
        engine: Engine,
        num_copies: Callable[[str], int],
        num_micro_batches: int,
        averages: Sequence[Tier],
    ) -> None:
        self._engine = engine
        self._num_micro_batches = num_micro_batches
        self._times = dict[Bucket, float]()  # number of buckets for which each bucket stands
        by_name: dict[str, list[tuple[int, float]]] = {}  # buckets of one unit may share a name
        for bucket in engine.buckets:
            numels = [(slot.numel, slot.name) for slot in bucket.plan.layout.slots]
            times = sum(n * num_copies(name) for n, name in numels)
            self._times[bucket] = times / sum(n for n, _ in numels)
            nbytes = bucket.plan.layout.numel * bucket.plan.dtype.itemsize
            by_name.setdefault(bucket.plan.name, []).append((nbytes, self._times[bucket]))
        self._times_of_name = {
            name: sum(n * times for n, times in found) / sum(n for n, _ in found)
            for name, found in by_name.items()
        }
        self._num_of_name = {name: len(found) for name, found in by_name.items()}
        tiers = (b.plan.tiers for b in engine.buckets)
        used = {Tier.DEVICE}.union(*((t.param, t.optim, t.grad) for t in tiers))
        held = {tier: dict.fromkeys(State, 0.0) for tier in Tier if tier in used}
        for bucket, counted in zip(
            engine.buckets, count_held(engine.buckets, engine.optimizers), strict=True
        ):
            for (tier, state), nbytes in counted.items():
                held.setdefault(tier, dict.fromkeys(State, 0.0))[state] += (
                    nbytes * self._times[bucket]
                )
        self.held = {tier: {s: round(n) for s, n in by.items()} for tier, by in held.items()}
        self._averages = self._average_bytes(averages)
        self._buffer_bytes = engine.storage.buffer_bytes
        self._cpu_step = sum(self._bytes_of_cpu_step(b) * n for b, n in self._times.items())

    def _average_bytes(self, averages: Sequence[Tier]) -> dict[Tier, int]:
        """Bytes of averages by tier: as the main parameters (`Shadow`), but never on NVMe.

        They are not made here, because the CPU is the device in this run.
        """
        found = dict[Tier, float]()
        has_device_memory = self._engine.storage.has_device_memory
        for bucket, times in self._times.items():
            plan, main = bucket.plan, bucket.shards.master_or_param
            for wanted in averages:
                is_on_device = wanted is Tier.DEVICE or not has_device_memory
                is_on_device &= plan.tiers.optim is Tier.DEVICE
                tier = Tier.DEVICE if is_on_device else Tier.CPU
                is_padded = tier.is_offloaded(has_device_memory=has_device_memory)
                nbytes = main.numel * main.dtype.itemsize
                nbytes = padded_bytes(main.numel, main.dtype) if is_padded else nbytes
                found[tier] = found.get(tier, 0.0) + nbytes * times
        return {tier: round(nbytes) for tier, nbytes in found.items()}

    def _staging_bytes(self) -> int:
        """CPU memory for gradients in transfer or accumulation, and for stepped parameters."""
        if not self._engine.storage.has_device_memory:
            return 0
        plan, accumulates = self._engine.plan, self._num_micro_batches > 1
        grad_bytes = [
            bucket.layout.shard_numel * plan.grad_dtype(bucket).itemsize
            for bucket in plan.buckets
            if bucket.tiers.grad is Tier.NVME or (bucket.tiers.grad is Tier.CPU and accumulates)
        ]
        tiers = [bucket.tiers for bucket in plan.buckets]
        is_uploaded = any(t.optim is not Tier.DEVICE and t.param is Tier.DEVICE for t in tiers)
        upload_bytes = NUM_UPLOAD_BLOCKS * UPLOAD_BLOCK_BYTES if is_uploaded else 0
        return MAX_GRADS_IN_FLIGHT * max(grad_bytes, default=0) + upload_bytes

    def _bytes_of_cpu_step(self, bucket: Bucket) -> int:
        """Bytes that a step reads and writes: gradient; twice main parameters and states."""
        if bucket.plan.tiers.optim is Tier.DEVICE or not bucket.plan.is_trainable:
            return 0
        numel = bucket.plan.layout.shard_numel
        states = 0
        for optimizer in self._engine.optimizers:
            raw = raw_states(optimizer)
            for parameter in bucket.parameters:
                states += sum(t.nbytes for t in plain_tensors(raw.get(parameter, {})) if t.dim())
        grad = self._engine.plan.grad_dtype(bucket.plan).itemsize
        return numel * (grad + 2 * bucket.plan.master_dtype.itemsize) + 2 * states

    def counts(self, windows: Windows, peak: Peak) -> Counts:
        """The bytes, after the run."""
        moved, gathers = dict.fromkeys(Kind, 0.0), Counter[str]()
        for recording, times in zip(windows.recordings, self._repeats(), strict=True):
            for span in recording.spans:
                if span.is_wait or span.start_s < 0:
                    continue
                moved[span.kind] += span.nbytes * times * self._times_of(span.name)
                if span.kind is Kind.ALL_GATHER and recording is not windows.recordings[-1]:
                    gathers[span.name] += times
        to_cpu, from_cpu = self._copies(gathers)
        return Counts(
            self.held,
            self._averages,
            self._buffer_bytes,
            self._staging_bytes(),
            peak,
            round(sum(moved[kind] for kind in _SENT)),
            to_cpu,
            from_cpu,
            round(moved[Kind.READ]),
            round(moved[Kind.WRITE]),
            round(self._cpu_step),
        )

    def _repeats(self) -> list[int]:
        """Number of micro-batches for which each recorded one stands; 1 for the step.

        Those in the middle are as the last one if it adds to the mean of those before, else as the
        first one, which is not reduced.
        """
        others = max(self._num_micro_batches - 1, 1)
        if self._num_micro_batches == 1:
            return [1, 1]
        adds = self._engine.config.states.reduces_every_backward
        return [1, others, 1] if adds else [others, 1, 1]

    def _times_of(self, name: str) -> float:
        """Number of buckets for which the bucket `name` stands, or that of the file `name`."""
        if name not in self._times_of_name:
            names = [bucket for bucket in self._times_of_name if name.startswith(f"{bucket}.")]
            name = max(names, key=len, default="")
        return self._times_of_name.get(name, 1.0)

    def _copies(self, gathers: Mapping[str, int]) -> tuple[int, int]:
        """Bytes copied to and from CPU memory. See [Note: A device on the CPU].

        An all-gather copies a shard from CPU memory, and a reduction copies the mean there. A step
        reads and writes main parameters where they are stored. Parameters beside them are cast on
        the CPU, before or after they are copied.

        Args:
            gathers: Number of all-gathers before use in a step, by bucket.
        """
        to_cpu = from_cpu = 0.0
        for bucket, times in self._times.items():
            plan, numel = bucket.plan, bucket.plan.layout.shard_numel
            param, master = numel * plan.dtype.itemsize, numel * plan.master_dtype.itemsize
            steps_on_cpu, param_on_cpu = (
                tier is not Tier.DEVICE for tier in (plan.tiers.optim, plan.tiers.param)
            )
            if param_on_cpu and plan.stage.has_shard(State.PARAM):
                from_cpu += times * param * gathers[plan.name] / self._num_of_name[plan.name]
            if not plan.is_trainable:
                continue
            if steps_on_cpu:
                reductions = self._num_micro_batches if plan.stage.reduces_every_backward else 1
                grad = numel * self._engine.plan.grad_dtype(plan).itemsize
                to_cpu += times * reductions * grad
            if steps_on_cpu is not param_on_cpu:
                if steps_on_cpu or not plan.master.is_separate:
                    from_cpu += times * (param if plan.master.is_separate else master)
                if param_on_cpu or not plan.master.is_separate:
                    to_cpu += times * master
        return round(to_cpu), round(from_cpu)
