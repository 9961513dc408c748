"""`lightning-zero io-bench PATH`: what a disk gives the NVMe tier, and the settings to use."""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_zero.cli.rates import read_rates, write_rates
from lightning_zero.tiers.bench import DiskReport, measure_disk
from lightning_zero.tiers.fio import Rates

__all__ = ["add_parser", "run", "table"]

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def add_parser(subparsers: Any) -> None:
    """Add the command to what `ArgumentParser.add_subparsers` gave."""
    parser = subparsers.add_parser(
        "io-bench",
        help="measure a disk as NVMe tier",
        description="Measure a disk as the NVMe tier uses it, beside fio where that is installed, "
        "and print the settings to use. The file that it makes goes whatever happens.",
    )
    parser.add_argument("path", type=Path, help="a folder on the disk, as nvme_path")
    parser.add_argument(
        "--size", type=_bytes, default="4GiB", help="of the file (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=1.0, help="of each measurement (default: %(default)s)"
    )
    parser.add_argument("--rates", type=Path, metavar="FILE", help="write the rate to it, for plan")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Returns:
        0.

    Raises:
        OSError: The disk cannot be used.
        ValueError: The file would be too small, or fill the disk.
    """
    if args.rates is not None and args.rates.exists():
        read_rates(args.rates)  # refused now rather than when all is measured

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with _terminated_as_exit():
        report = measure_disk(args.path, nbytes=args.size, seconds=args.seconds, say=say)
    print(json.dumps(report.as_dict(), indent=2) if args.json else table(report))
    if args.rates is not None:
        write_rates(args.rates, {"io_gb_per_s": round(report.tier.mixed / 1e9, 3)})
    return 0


def table(report: DiskReport) -> str:
    """What was found, for people."""
    best = report.settings
    direct = "O_DIRECT" if report.is_direct else "through the page cache, which flatters a disk"
    lines = [
        f"{report.path} ({report.file_system}, {direct}), {report.nbytes / 2**30:.1f} GiB",
        f"{'GB/s':<8}{'read':>8}{'write':>8}{'mixed':>8}",
        _line("tier", report.tier),
        _line("fio", report.fio) if report.fio else "fio is not installed",
        "",
        f"offload: buffer_count={best.buffer_count}, buffer_size={best.buffer_size} "
        f"({best.buffer_count} x {best.buffer_bytes // 2**20} MiB of CPU memory)",
        f"measured with {best.describe()}",
        f"lightning-zero plan: --io-gb-per-s {report.tier.mixed / 1e9:.3g}",
    ]
    return "\n".join(lines)


def _line(name: str, rates: Rates) -> str:
    read, write, mixed = (rate / 1e9 for rate in (rates.read, rates.write, rates.mixed))
    return f"{name:<8}{read:>8.2f}{write:>8.2f}{mixed:>8.2f}"


def _bytes(text: str) -> int:
    """Bytes of "4GiB", "512M" or "1000000"; units are powers of 1024."""
    found = re.fullmatch(r"(\d+)\s*([kmgt]?)(i?b)?", text.strip().lower())
    if not found:
        raise argparse.ArgumentTypeError(f"expected a size such as 4GiB, got {text!r}")
    return int(found[1]) * _UNITS[found[2]]


def _seconds(text: str) -> float:
    """A time that ends."""
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")


@contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind, so that the file goes."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
