"""Whether AdamW on NVMe costs no more than the slower of disk and processor.

    python -m tests.benchmarks.nvme PATH [--chunks 16] [--rounds 7] [--repeat 1] [--threads 1]

Every round times, one after the other: the steps in memory (compute), the same jobs without the
steps (disk), and both in the pipeline; then fio, as many reads as writes, on the same file. The
master and both moments rest on the disk, a chunk of 4 Mi elements of each to a job; the gradient is
in memory. The results must be equal bit for bit. `--repeat` steps each chunk several times, so that
compute takes as long as the disk, the case in which overlap is hardest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_zero.tiers.memory import make_buffers
from lightning_zero.tiers.nvme import NvmeFile, NvmeStore
from lightning_zero.tiers.pipeline import FileRange, Pipeline, Task
from tests.benchmarks.fio import fio_rates

NUMEL = 4 * 2**20  # of a chunk
CHUNK_BYTES = 4 * NUMEL
STATES = 3  # master, exp_avg, exp_avg_sq
GB = 1e9


def adamw(states: list[Tensor], gradient: Tensor, steps: Sequence[int]) -> None:
    """Fused steps of a chunk, in float32."""
    master, exp_avg, exp_avg_sq = states
    for step in steps:
        torch._fused_adamw_(
            [master], [gradient], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(step))],
            lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip


class Steps:
    """The same steps on the disk and in memory."""

    def __init__(self, store: NvmeStore, num_chunks: int, num_buffers: int) -> None:
        self.num_chunks = num_chunks
        self.file = store.create("state", num_chunks * STATES * CHUNK_BYTES)
        self.gradient = torch.randn(NUMEL)
        self.memory = [torch.zeros(STATES, NUMEL) for _ in range(num_chunks)]
        self.pipeline = Pipeline(make_buffers(num_buffers, STATES * CHUNK_BYTES, pin=False))
        self.step = 0
        self.write_from_memory()

    def jobs(self, work: Callable[[list[Tensor]], object], *, is_read: bool = True) -> list[Task]:
        """Jobs that do `work` on the states of each chunk."""
        return [
            Task(
                [
                    FileRange(self.file, (chunk * STATES + state) * CHUNK_BYTES, CHUNK_BYTES,
                          is_written=True, is_read=is_read)
                    for state in range(STATES)
                ],
                lambda views: work([view.view(torch.float32) for view in views]),
            )
            for chunk in range(self.num_chunks)
        ]  # fmt: skip

    def run(self, jobs: list[Task]) -> float:
        """Seconds until everything is written."""
        begin = time.perf_counter()
        self.pipeline.run(jobs)
        self.pipeline.drain()
        return time.perf_counter() - begin

    def round(self, repeat: int) -> tuple[float, float, float]:
        """Seconds of compute, disk, and both."""
        steps = range(self.step + 1, self.step + 1 + repeat)
        self.step += repeat
        begin = time.perf_counter()
        for states in self.memory:
            adamw(list(states), self.gradient, steps)
        compute = time.perf_counter() - begin
        disk = self.run(self.jobs(lambda states: None))
        both = self.run(self.jobs(lambda states: adamw(states, self.gradient, steps)))
        return compute, disk, both

    def write_from_memory(self) -> None:
        chunks = iter(self.memory)

        def copy(states: list[Tensor]) -> None:
            for state, expected in zip(states, next(chunks), strict=True):
                state.copy_(expected)

        self.run(self.jobs(copy, is_read=False))

    def is_equal(self) -> bool:
        """Whether the disk holds the bits of memory."""
        equal: list[bool] = []
        chunks = iter(self.memory)
        self.run(
            self.jobs(
                lambda states: equal.append(
                    all(torch.equal(a, b) for a, b in zip(states, next(chunks), strict=True))
                )
            )
        )
        return all(equal)


def fio_mixed(file: NvmeFile, is_direct: bool) -> float:
    rates = fio_rates(file, block_bytes=4 * 2**20, num_threads=4, is_direct=is_direct, seconds=1)
    return rates.mixed if rates else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--buffers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=1, help="steps of a chunk at once")
    parser.add_argument("--threads", type=int, default=1, help="of the steps")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    store = NvmeStore(args.path, rank=0)
    try:
        steps = Steps(store, args.chunks, args.buffers)
        moved = 2 * steps.file.nbytes
        rows = []
        print(f"{'compute s':>10}{'disk s':>10}{'both s':>10}{'of max':>8}{'GB/s':>8}{'fio':>8}")
        for _ in range(args.rounds):
            compute, disk, both = steps.round(args.repeat)
            if not steps.is_equal():
                raise SystemExit("the disk does not hold the bits of memory")
            fio = fio_mixed(steps.file, store.is_direct)
            steps.write_from_memory()  # over what fio wrote
            rows.append((max(compute, disk) / both, moved / disk / GB, fio / GB))
            print(
                f"{compute:>10.3f}{disk:>10.3f}{both:>10.3f}{rows[-1][0]:>8.2f}"
                f"{rows[-1][1]:>8.2f}{rows[-1][2]:>8.2f}"
            )
        of_max, rate, fio = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"median: {of_max:.2f} of max(compute, disk); {rate / fio:.2f} of fio's mixed rate")
    finally:
        store.close()


if __name__ == "__main__":
    main()
