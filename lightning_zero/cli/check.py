"""`lightning-zero check`: tries training on this machine; package `check` has the checks."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from lightning_zero.check.checks import CHECKS
from lightning_zero.check.ranks import Check, Run, join_ranks, run_check
from lightning_zero.check.report import Line, as_table, write_report
from lightning_zero.cli.plan import source_from_arguments
from lightning_zero.tiers.disk import remove_abandoned

__all__ = ["run"]


def run(args: argparse.Namespace, checks: Sequence[Check] = CHECKS) -> int:
    """Runs the checks, and writes the report on rank 0; returns 1 there if a check has failed."""
    make_model = partial(_model_of, args) if args.model or args.module else None
    if make_model is not None:
        make_model()  # an error of the arguments ends the command here
    args.out.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with tempfile.TemporaryDirectory(prefix="lightning-zero-check-", dir=args.out) as folder:
            run, store = join_ranks(args.ranks, on_cpu=args.on_cpu)
            if run.is_first:
                store.set("check/shared", str(Path(folder).resolve()))
            run = replace(run, shared=Path(store.get("check/shared").decode()))
            run = replace(run, is_quick=args.quick, nvme_path=args.nvme_path, make_model=make_model)
            lines = [_run(run, check, n, len(checks)) for n, check in enumerate(checks, 1)]
            store.add("check/ended", len(run.own))
            until = time.monotonic() + 30 if run.is_first else 0  # this process may have the store
            while store.add("check/ended", 0) < run.size and time.monotonic() < until:
                time.sleep(0.05)
    finally:
        if args.nvme_path is not None:
            remove_abandoned(Path(args.nvme_path))  # files of ranks that failed
        signal.signal(signal.SIGTERM, before)
    if not run.is_first:
        return 0
    print(f"\n{as_table(lines)}\n", flush=True)
    names = ("quick", "model", "module", "nvme_path", "on_cpu")
    print(write_report(lines, {name: bool(getattr(args, name)) for name in names}, args.out))
    return int(any(line.outcome.result == "failed" for line in lines))


def _run(run: Run, check: Check, number: int, count: int) -> Line:
    """Runs one check, and prints a line. Collective."""
    if run.is_first:
        print(f"{number:2}/{count} {check.name} ... ", end="", flush=True)
    began = time.monotonic()
    found = run_check(run, check, str(number))
    line = Line(check, found, time.monotonic() - began)
    if run.is_first:
        print(f"{found.result} ({line.seconds:.1f} s)", flush=True)
        print(found.trace, end="", file=sys.stderr, flush=True)
    return line


def _model_of(args: argparse.Namespace) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    source = source_from_arguments(args)
    if source.step is None:
        raise ValueError(
            f"the shapes of the inputs of {args.module} are not known: give them with --input "
            "8x3x224x224, for example."
        )
    return source.module, source.step
