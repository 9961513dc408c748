"""One fit as `ZeroMonitor` sees it: recorded steps, means over them, and files."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.offload import Tier
from lightning_zero.observe.files import write_recording
from lightning_zero.observe.job_report import Flow, JobReport, Speed
from lightning_zero.observe.memory_table import memory_reports
from lightning_zero.observe.metrics import Sample, kinds_of, metrics_of, over_ranks
from lightning_zero.observe.resident import allocated_and_peak_bytes
from lightning_zero.observe.throughput import Throughput
from lightning_zero.observe.windows import Window, Windows
from lightning_zero.record.spans import Kind, Recording
from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = ["Watch", "Watched", "forgiving"]


@dataclass(frozen=True)
class Watched:
    """One recorded step of all ranks.

    Attributes:
        num_batches: That had stepped before its last one, at which Lightning logs.
        metrics: To be logged.
        memory: Model states by rank, before the optimizer stepped; of the first such step only, and
            on rank 0.
        flows: Means over the ranks.
    """

    num_batches: int
    metrics: dict[str, float]
    memory: list[MemoryReport]
    flows: list[Flow]


class Watch:
    """What a rank keeps of a fit. Every rank makes it, and calls its methods, at the same batches.

    Args:
        strategy: With an engine.
        every_n_steps: See `Windows` for this and the next.
        trace_steps: Each of these is written to files.
        has_grad_norms: Measure norms of gradients, unless some rest in files.
        folder: For files, on rank 0.
        progress: Batches that have stepped, and optimizer steps, before this fit.

    Attributes:
        folder: For files.
        throughput: Without evaluation.
        windows: Around the steps that are recorded.
        traced: Recordings of all ranks, by step; on rank 0.
    """

    def __init__(
        self,
        strategy: ZeroStrategy,
        *,
        every_n_steps: int,
        trace_steps: Iterable[int],
        has_grad_norms: bool,
        folder: Path,
        progress: tuple[int, int],
    ) -> None:
        engine = self._engine = strategy.engine
        self.folder = folder
        self.throughput = Throughput()
        self.traced: list[list[Recording]] = []
        self.windows = Windows(
            engine.recorder,
            every_n_steps=every_n_steps,
            trace_steps=trace_steps,
            num_batches=progress[0],
            num_steps=progress[1],
            align=self._align,
        )
        self._strategy = strategy
        # Each gradient in a file would be read once more.
        in_files = any(bucket.tiers.grad is Tier.NVME for bucket in engine.plan.buckets)
        self._has_grad_norms = has_grad_norms and not in_files
        of_plan: dict[str, Any] = {"is_apart": engine.device.type != "cpu"}
        overlaps = engine.config.overlap_step
        self._metrics = metrics_of(engine.plan, engine.comm.mesh, **of_plan, overlaps_step=overlaps)
        self._kinds = kinds_of(engine.plan, engine.comm.mesh, **of_plan)
        self._kinds += [Kind.STEP] * overlaps
        self._num_steps = progress[1]
        self._memory: MemoryReport | None = None  # of the window under way
        self._norms: dict[str, Tensor] = {}  # likewise
        self._sums: dict[str, float] = {}  # of the means over ranks, without the first step
        self._num_recorded = 0  # in these sums
        self._has_seen = False
        self._is_first = True  # the step under way, or the one that is over

    # ---------------------------------------------------------------- the loop

    def before_batch(self, num_batches: int, num_steps: int) -> Watched | None:
        """Ends a window, and begins one. Collective where either is recorded; see `Windows`."""
        self.throughput.before_batch()
        return self._gather(self.windows.before_batch(num_batches, num_steps))

    def before_step(self, optimizer: Optimizer) -> None:
        """Gradients are whole means, unscaled and not clipped yet. Collective if recorded."""
        if not self.windows.is_open:
            return
        # Now, for after the step a worker may be at it still, and would be waited for.
        self._memory = self._strategy.memory_report()
        if self._has_grad_norms:
            own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            stepped = {
                b.plan.name for b in self._engine.buckets if not own.isdisjoint(b.parameters)
            }
            norms = self._engine.grad_norms()
            self._norms |= {name: norm for name, norm in norms.items() if name in stepped}

    def after_batch(self, batch: Any, num_batches: int, num_steps: int) -> None:
        """Counts a batch.

        Args:
            batch: The one that has been trained.
            num_batches: That have stepped before it.
            num_steps: Optimizer steps until now.
        """
        self.windows.after_batch(num_batches, num_steps)
        self._is_first = not self.throughput.is_warm
        self.throughput.after_batch(batch, has_stepped=num_steps > self._num_steps)
        self._num_steps = num_steps

    def _align(self) -> None:
        """Ranks whose devices have nothing left to do meet."""
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        self._engine.lockstep.meet_for("a window of the monitor")

    def cut(self) -> None:
        """Something comes that is in no window: evaluation, a checkpoint, the end of an epoch."""
        if self.windows.is_open:
            # Waits for a worker that steps beside the training: that belongs to this step.
            self._strategy.memory_report()
        if self.windows.close():
            self._memory, self._norms = None, {}

    def pause(self) -> None:
        """Something comes that is in no window and in no throughput."""
        self.cut()
        self.throughput.pause()

    def last(self) -> Watched | None:
        """The window with which training ends. Collective."""
        self.pause()
        return self._gather(self.windows.take())

    # ---------------------------------------------------------------- results

    def report(self) -> JobReport:
        """Of the whole fit; the memory is known on rank 0 alone. Collective: every rank."""
        clock = self.throughput
        own = [clock.num_steps, clock.num_batches, clock.num_samples, clock.seconds]
        means = {key: value / self._num_recorded for key, value in self._sums.items()}
        return JobReport(
            world_size=self._engine.comm.size,
            num_steps=self._num_steps,
            memory=memory_reports(self._strategy),
            speed=Speed.of(self._engine.comm.control.gather_floats(own)),
            num_recorded=self._num_recorded,
            step_s=means.get("zero/time/step_s", 0.0),
            waited_s=means.get("zero/wait/waited_s", 0.0),
            flows=[Flow.of(kind, means) for kind in self._kinds],
            is_on_cpu=self._engine.device.type == "cpu",
        )

    def _gather(self, window: Window | None) -> Watched | None:
        if window is None:
            return None
        # Another rank may have failed, and would never come to the next collective.
        self._engine.lockstep.meet_for("the metrics of the monitor")
        comm = self._engine.comm
        report = self._memory or self._strategy.memory_report()  # a step without Lightning's hooks
        resident = allocated_and_peak_bytes(self._engine.device)
        sample = Sample(window.recording, report, *resident)
        own = [metric(sample) for metric in self._metrics.values()]
        logged, means = over_ranks(self._metrics, comm.control.gather_floats(own))
        memory: list[MemoryReport] = []
        if not self._has_seen:
            memory, self._has_seen = comm.control.collect_objects(report), True
        if window.is_traced:
            self._keep(comm.control.collect_objects(window.recording))
        if self._has_grad_norms and self._memory is not None:
            logged |= self._of_gradients()
        self._memory, self._norms = None, {}
        if not self._is_first:
            self._num_recorded += 1
            for key, value in means.items():
                self._sums[key] = self._sums.get(key, 0.0) + value
        flows = [Flow.of(kind, means) for kind in self._kinds]
        return Watched(window.num_batches, logged, memory, flows)

    def _of_gradients(self) -> dict[str, float]:
        """Norms that are the same on every rank; 0 where what is trained has got no gradient."""
        norms = {plan.name: 0.0 for plan in self._engine.plan.buckets if plan.is_trainable}
        norms |= {name: float(norm) for name, norm in self._norms.items()}
        # "root[0]" and "blocks.3/frozen" are no names that every logger takes.
        logged = {re.sub(r"[^\w.-]+", ".", name).strip("."): norm for name, norm in norms.items()}
        logged["total"] = math.hypot(*norms.values())
        return {f"zero/grad_norm/{name}": norm for name, norm in logged.items()}

    def _keep(self, recordings: list[Recording]) -> None:
        if not recordings:
            return  # on the other ranks
        self.traced.append(recordings)
        with forgiving("the recording was not written"):
            for recording in recordings:
                write_recording(self.folder, recording)


@contextmanager
def forgiving(what: str) -> Iterator[None]:
    """Warns of an exception on rank 0, which would end a training or leave other ranks waiting.

    Args:
        what: Failed.
    """
    try:
        yield
    except Exception as error:
        warnings.warn(f"{what}: {type(error).__name__}: {error}", stacklevel=3)
