"""`lightning-zero check`: tries training on this machine; package `check` has the checks."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from lightning_zero.check.checks import CHECKS
from lightning_zero.check.ranks import Check, Outcome, Run, join_ranks, run_check
from lightning_zero.cli.plan import source_from_arguments
from lightning_zero.observe.tables import table
from lightning_zero.tiers.disk import remove_abandoned

__all__ = ["run"]


class Line(NamedTuple):
    """A check, what it found, and how long it took."""

    check: Check
    outcome: Outcome
    seconds: float


def run(args: argparse.Namespace, checks: Sequence[Check] = CHECKS) -> int:
    """Runs the checks, and writes the report on rank 0; returns 1 there if a check has failed."""
    make_model = partial(_model_of, args) if args.model or args.module else None
    if make_model is not None:
        make_model()  # an error of the arguments ends the command here
    if args.out.is_file():
        raise ValueError(f"--out must be a folder, got the file {str(args.out)!r}.")
    args.out.mkdir(parents=True, exist_ok=True)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
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
        for number, handler in before.items():
            signal.signal(number, handler)
    if not run.is_first:
        return 0
    names = ("quick", "model", "module", "nvme_path", "on_cpu")
    _report(lines, {name: bool(getattr(args, name)) for name in names}, args.out)
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


def _report(lines: Sequence[Line], given: Mapping[str, bool], out: Path) -> None:
    """Prints a table, and writes it to a page, and all numbers to JSON. `given`: which options."""
    rows = [[c.name, found.result, f"{s:.1f}", found.text] for c, found, s in lines]
    text = table([["check", "result", "s", "found"], *rows], left=(0, 1, 3))
    print(f"\n{text}\n", flush=True)
    options = ", ".join(name for name, is_given in given.items() if is_given) or "none"
    page, data = out / "lightning-zero-check.md", out / "lightning-zero-check.json"
    page.write_text(f"# lightning-zero check\n\nOptions: {options}.\n\n```text\n{text}\n```\n")
    found = [
        {"check": c.name, "result": o.result, "seconds": round(s, 2), "text": o.text}
        | {"numbers": o.numbers}
        for c, o, s in lines
    ]
    data.write_text(json.dumps({"options": given, "checks": found}, indent=1) + "\n")
    print(
        f"Please send {page.name} and {data.name}, also if all is well: open an issue of the "
        "project, paste the page and attach the JSON file. They have no names of hosts, users or "
        "paths; read them before you send them."
    )


def _model_of(args: argparse.Namespace) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    source = source_from_arguments(args)
    if source.step is None:
        raise ValueError(
            f"the shapes of the inputs of {args.module} are not known: give them with --input "
            "8x3x224x224, for example."
        )
    if not any(parameter.requires_grad for parameter in source.module.parameters()):
        raise ValueError(f"{args.module} has no parameters that are trained.")
    return source.module, source.step
