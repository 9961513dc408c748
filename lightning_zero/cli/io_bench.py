"""`lightning-zero io-bench PATH`: bandwidth of a disk as NVMe tier, and the settings to use.

Alternatives considered: `fio`. Its rates are an upper bound, but it does not find the threads,
block size and buffers with which this process comes close to it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from types import FrameType

import torch
from torch import Tensor

from lightning_zero.cli.rates import check_rates, write_rates
from lightning_zero.observe.tables import table
from lightning_zero.tiers.disk import file_system_of, free_bytes
from lightning_zero.tiers.memory import make_buffers
from lightning_zero.tiers.nvme import NvmeFile, NvmeStore
from lightning_zero.tiers.pipeline import FileRange, Pipeline, Task

__all__ = ["DiskReport", "DiskRates", "TierSettings", "as_text", "run"]

_MIB = 2**20
_GB = 1e9
_MIN_BYTES = 256 * _MIB
_MIN_FREE = 0.1  # share of the free bytes that stays free
_GOOD_ENOUGH = 0.95  # share of the best rate from which fewer threads and less memory are better
_BLOCKS_MIB = (1, 2, 4, 8, 16)
_THREADS = (1, 2, 4, 8)
_REPEATS = 3
_BUFFERS = ((2, 16), (3, 16), (4, 16), (3, 32), (4, 32), (3, 64), (4, 64))  # count, MiB; ascending
_Disk = tuple[NvmeStore, NvmeFile]


@dataclass(frozen=True)
class TierSettings:
    """Settings of the NVMe tier."""

    block_bytes: int = 4 * _MIB
    num_threads: int = 4  # to read, and as many to write
    buffer_count: int = 4
    buffer_bytes: int = 64 * _MIB

    @property
    def buffer_size(self) -> int:
        """Value of the setting `buffer_size`: elements of 4 bytes."""
        return self.buffer_bytes // 4

    @property
    def buffers(self) -> tuple[int, int]:
        return self.buffer_count, self.buffer_bytes

    def describe(self) -> str:
        return (
            f"{self.num_threads} threads each way, blocks of {self.block_bytes // _MIB} MiB, "
            f"{self.buffer_count} buffers of {self.buffer_bytes // _MIB} MiB"
        )


@dataclass(frozen=True)
class DiskRates:
    """Rates in bytes per second; `mixed`: equal reads and writes at once, both counted."""

    read: float
    write: float
    mixed: float


@dataclass(frozen=True)
class DiskReport:
    """Result of the benchmark."""

    path: Path
    file_system: str
    is_direct: bool
    nbytes: int  # size of the test file
    settings: TierSettings  # the smallest that come close to the best rate
    sweep: tuple[tuple[TierSettings, float], ...]  # mixed bytes per second
    tier: DiskRates

    def as_dict(self) -> dict[str, object]:
        """Values for JSON; rates in GB/s, where a GB is 10^9 bytes."""

        def sizes(settings: TierSettings) -> dict[str, int]:
            return {**vars(settings), "buffer_size": settings.buffer_size}

        return {
            "path": str(self.path),
            "file_system": self.file_system,
            "is_direct": self.is_direct,
            "file_bytes": self.nbytes,
            "settings": sizes(self.settings),
            "tier_gb_per_s": {name: round(rate / _GB, 3) for name, rate in vars(self.tier).items()},
            "sweep": [
                {**sizes(settings), "mixed_gb_per_s": round(rate / _GB, 3)}
                for settings, rate in self.sweep
            ],
        }


def _measure_disk(path: Path, nbytes: int, seconds: float) -> DiskReport:
    """Measures with a test file, which is deleted even after an error.

    Args:
        path: Existing directory.
        nbytes: Size of the test file; larger than the disk's caches, to measure without them.
        seconds: Duration of each of about 20 measurements.

    Raises:
        OSError: The disk cannot be used, or fails.
        ValueError: The file is too small, or would fill the disk.
    """
    if nbytes < _MIN_BYTES:
        raise ValueError(f"expected a file of at least {_MIN_BYTES} bytes, got {nbytes}")
    if path.is_dir() and nbytes > (1 - _MIN_FREE) * free_bytes(path):
        raise ValueError(
            f"a file of {nbytes} bytes would fill {path}, where {free_bytes(path)} bytes are free; "
            f"measure with at most {int((1 - _MIN_FREE) * free_bytes(path))}"
        )
    _log(f"writing files of {nbytes / 2**30:.1f} GiB")
    settings, sweep = _sweep(path, nbytes, seconds)
    with _opened(path, nbytes, settings) as (store, file):
        _log("reading, writing and both")
        directions: list[dict[str, bool]] = [{"is_written": False}, {"is_read": False}, {}]
        buffers = _noisy_buffers(settings)
        rates = [
            _rate(store, settings, _jobs(file, settings, **direction), buffers, 2 * seconds)
            for direction in directions
        ]
        kind, is_direct = file_system_of(path), store.is_direct
    return DiskReport(path, kind, is_direct, nbytes, settings, sweep, DiskRates(*rates))


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _opened(path: Path, nbytes: int, settings: TierSettings) -> Iterator[_Disk]:
    """Opens a store with a test file that has been written once: first writes are slower."""
    number = settings.num_threads
    with contextlib.closing(
        NvmeStore(
            path,
            rank=0,
            num_read_threads=number,
            num_write_threads=number,
            block_bytes=settings.block_bytes,
        )
    ) as store:
        file = store.create("io-bench", nbytes)
        settings = replace(settings, buffer_count=2, buffer_bytes=16 * _MIB)
        writes, buffers = _jobs(file, settings, is_read=False), _noisy_buffers(settings)
        _rate(store, settings, writes, buffers, math.inf)
        yield store, file


def _sweep(
    path: Path, nbytes: int, seconds: float
) -> tuple[TierSettings, tuple[tuple[TierSettings, float], ...]]:
    """Finds threads, then block size, then buffers: each time the smallest that is good enough."""
    tried: dict[TierSettings, float] = {}

    def best_of(candidates: Sequence[TierSettings], disks: Sequence[_Disk]) -> TierSettings:
        """First of `candidates`, in ascending order of cost, that comes close to the best rate.

        Candidates are measured alternately, because a disk's rate depends on the load before.
        """
        pools = {each.buffers: _noisy_buffers(each) for each in candidates}
        repeats = [
            [
                _rate(store, each, _jobs(file, each), pools[each.buffers], seconds / _REPEATS)
                for each, (store, file) in zip(candidates, cycle(disks), strict=False)
            ]
            for _ in range(_REPEATS)
        ]
        rates = dict(zip(candidates, map(median, zip(*repeats, strict=True)), strict=True))
        for settings, rate in rates.items():
            _log(f"{rate / _GB:6.2f} GB/s mixed with {settings.describe()}")
        tried.update(rates)
        threshold = _GOOD_ENOUGH * max(rates.values())
        return next(settings for settings, rate in rates.items() if rate >= threshold)

    best = TierSettings()
    threads = [{"num_threads": number} for number in _THREADS]
    for changes in (threads, [{"block_bytes": size * _MIB} for size in _BLOCKS_MIB]):
        candidates = [replace(best, **change) for change in changes]
        with contextlib.ExitStack() as stack:  # threads and blocks belong to a store
            size = nbytes // len(candidates)
            disks = [stack.enter_context(_opened(path, size, each)) for each in candidates]
            best = best_of(candidates, disks)
    buffers = [{"buffer_count": count, "buffer_bytes": size * _MIB} for count, size in _BUFFERS]
    with _opened(path, nbytes, best) as disk:
        best = best_of([replace(best, **change) for change in buffers], [disk])
    return best, tuple(tried.items())


def _jobs(
    file: NvmeFile, settings: TierSettings, *, is_read: bool = True, is_written: bool = True
) -> list[Task]:
    """Tasks that read and write a file buffer by buffer, without computation."""
    size = settings.buffer_bytes
    return [
        Task(
            [FileRange(file, start, min(size, file.nbytes - start), is_written, is_read)],
            lambda views: None,
        )
        for start in range(0, file.nbytes, size)
    ]


def _rate(
    store: NvmeStore,
    settings: TierSettings,
    jobs: Sequence[Task],
    buffers: Sequence[Tensor],
    seconds: float,
) -> float:
    """Runs `jobs` in a loop for `seconds`; returns bytes per second, read and written together.

    If `seconds` is infinite, they run once.
    """
    pipeline = Pipeline(buffers)
    size = len(jobs) if math.isinf(seconds) else 4 * settings.buffer_count
    batches = [jobs[start : start + size] for start in range(0, len(jobs), size)]
    before = store.bytes_read + store.bytes_written
    begin = perf_counter()
    try:
        for batch in cycle(batches):
            pipeline.run(batch)
            if math.isinf(seconds) or perf_counter() - begin >= seconds:
                break
        pipeline.drain()
        return (store.bytes_read + store.bytes_written - before) / (perf_counter() - begin)
    finally:
        pipeline.reset()


def _noisy_buffers(settings: TierSettings) -> list[Tensor]:
    """Buffers of random bytes: some disks store zeros and compressible data faster."""
    noise = torch.randint(256, (_MIB,), dtype=torch.uint8)
    buffers = make_buffers(settings.buffer_count, settings.buffer_bytes, pin=False)
    for buffer in buffers:
        buffer.view(-1, _MIB).copy_(noise)
    return buffers


def run(args: argparse.Namespace) -> int:
    check_rates(args.rates)
    with _terminated_as_exit():
        report = _measure_disk(args.path, args.size, args.seconds)
    print(json.dumps(report.as_dict(), indent=2) if args.json else as_text(report))
    if args.rates is not None:
        write_rates(args.rates, {"io_gb_per_s": round(report.tier.mixed / _GB, 3)})
    return 0


def as_text(report: DiskReport) -> str:
    rates = {name: f"{rate / _GB:.2f}" for name, rate in vars(report.tier).items()}
    best = report.settings
    direct = "O_DIRECT" if report.is_direct else "through the page cache, so rates are too high"
    lines = [
        f"{report.path} ({report.file_system}, {direct}), {report.nbytes / 2**30:.1f} GiB",
        table([["GB/s", *rates], ["tier", *rates.values()]]),
        "",
        f"offload: buffer_count={best.buffer_count}, buffer_size={best.buffer_size} "
        f"({best.buffer_count} x {best.buffer_bytes // _MIB} MiB of CPU memory)",
        f"measured with {best.describe()}",
        f"lightning-zero plan: --io-gb-per-s {report.tier.mixed / _GB:.3g}",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """Turns SIGTERM into SystemExit, so that the test file is deleted."""

    def exit_on_signal(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
