"""Steps of several buckets, one after the other: loads, steps and stores of their chunks overlap.

`chunks` steps one bucket; the hooks of `step` decide which buckets an optimizer steps, and whether
a worker thread does so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.step_worker import StepLoop, StepWorker
from lightning_zero.optim.chunks import BucketStep, ChunkStep, calls_of, step_chunks
from lightning_zero.optim.clone import OptimizerClone
from lightning_zero.tiers.pipeline import Task
from lightning_zero.tiers.storage import Storage

__all__ = ["step_buckets"]


def step_buckets(
    buckets: Sequence[Bucket],
    clone: OptimizerClone,
    storage: Storage,
    worker: StepWorker | None,
) -> None:
    """Steps `buckets` in this order. Collective if parameters are replicated, or full tensors.

    Args:
        buckets: Buckets of the optimizer.
        clone: Copy of the optimizer's settings.
        storage: Stores of the buckets.
        worker: Its thread steps the buckets after this call has returned. None: this call does.
    """
    steps = [BucketStep(bucket, clone) for bucket in buckets]
    loop = StepLoop(storage.device, steps)
    work: list[list[ChunkStep]] = []
    try:
        for step in steps:
            step.bucket.begin_step(loop.add() if worker is not None else None)
            work.append(step.chunks())
        run = partial(_BucketLoop(loop, buckets, clone, storage).run, work)
        if worker is not None:
            worker.submit(loop, run)
        else:
            run()
    except BaseException as error:
        loop.fail(error)  # a reset waits for the end of the loop
        raise


class _BucketLoop:
    """One run over the chunks of all buckets."""

    def __init__(
        self, loop: StepLoop, buckets: Sequence[Bucket], clone: OptimizerClone, storage: Storage
    ) -> None:
        self._loop = loop
        self._rest = list(buckets)  # those that are not stepped yet
        self._num_buckets = len(self._rest)
        self._clone = clone
        self._storage = storage

    def run(self, work: Sequence[Sequence[ChunkStep]]) -> None:
        """Steps the chunks in `work`, by bucket."""
        try:
            self._run_calls(list(calls_of(work)))
        except BaseException:
            for step in (step for steps in work for step in steps):
                step.discard()
            raise
        if self._clone.error is not None:
            raise self._clone.error

    def _run_calls(self, calls: Sequence[tuple[int, list[ChunkStep]]]) -> None:
        in_files: list[Task] = []
        in_memory: list[Callable[[], object]] = []  # run with the next job that needs a buffer
        in_memory += [step.start_load for _, steps in calls[:1] for step in steps]
        for call, (number, steps) in enumerate(calls, start=1):
            in_memory.append(partial(self._end_before, number))
            in_memory += [
                step.start_load for _, others in calls[call : call + 1] for step in others
            ]
            if steps[0].chunk.files:
                in_files.append(Task(steps[0].chunk.ranges, partial(_run_all, in_memory, steps)))
                in_memory = []
            else:
                in_memory.append(partial(step_chunks, steps, []))
        if in_files:
            self._storage.pipeline.run(in_files)
        for run in in_memory:
            run()
        self._end_before(self._num_buckets)

    def _end_before(self, number: int) -> None:
        """Ends the step of each bucket before `number`, when its last writes have been issued."""
        while self._num_buckets - len(self._rest) < number:
            self._rest.pop(0).end_step()
            if self._clone.error is None:
                self._loop.advance()


def _run_all(
    before: Sequence[Callable[[], object]], steps: Sequence[ChunkStep], views: list[Tensor]
) -> None:
    for run in before:
        run()
    step_chunks(steps, views)
