"""`lightning-zero compare`: names the first step and parameter in which two runs differ."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["run"]

_FILE_NAME = "fingerprints.jsonl"  # of the callback Fingerprints
_MAX_LINES = 8
# Lines of a file by step, then by kind and name, in the order of the file.
_Steps: TypeAlias = "dict[int, dict[tuple[str, str], dict[str, Any]]]"


def run(args: argparse.Namespace) -> int:
    """Prints the first difference of two runs, or that there is none; returns 1 if there is one."""
    first, second = _read(args.first), _read(args.second)
    steps = sorted(first.keys() & second.keys())
    if not steps:
        raise ValueError(
            f"{args.first} and {args.second} have no step in common; use the same every_n_steps."
        )
    for step in steps:
        lines = _differences(first[step], second[step], args.rtol)
        if lines:
            print(f"step {step}: {lines[0]}")
            for line in lines[1:_MAX_LINES]:
                print(f"  also {line}")
            if len(lines) > _MAX_LINES:
                print(f"  and {len(lines) - _MAX_LINES} more")
            return 1
    what = "bit by bit" if not args.rtol else f"to rtol={args.rtol:g}"
    print(f"{len(steps)} steps, {steps[0]} to {steps[-1]}, are equal {what}")
    for name, missing in (
        (args.second, first.keys() - second),
        (args.first, second.keys() - first),
    ):
        if missing:
            print(f"  {name} lacks {len(missing)} steps of the other, from step {min(missing)} on")
    return 0


def _read(name: str) -> _Steps:
    """Lines of a file; of two lines of one step and parameter, the last one counts."""
    path = Path(name)
    path = path / _FILE_NAME if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; lightning_zero.callbacks.Fingerprints() writes it."
        )
    steps: _Steps = {}
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
                steps.setdefault(line["step"], {})[line["kind"], line["name"]] = line
                float(line["norm"]), float(line["sum"]), str(line["digest"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"line {number} of {path} is not one of the callback Fingerprints, or the run "
                    f"ended while it was written ({type(error).__name__}: {error})."
                ) from None
    return steps


def _differences(
    first: dict[tuple[str, str], dict[str, Any]],
    second: dict[tuple[str, str], dict[str, Any]],
    rtol: float | None,
) -> list[str]:
    """One line for each parameter that differs in one step."""
    found = []
    for key in dict.fromkeys([*first, *second]):
        what = " ".join(key)
        if key not in first or key not in second:
            found.append(f"{what}: only in the {'first' if key in first else 'second'} run")
            continue
        ours, other = first[key], second[key]
        if ours["digest"] == other["digest"] or (rtol and _is_close(ours, other, rtol)):
            continue
        numbers = [f"{name} {ours[name]!r} and {other[name]!r}" for name in ("norm", "sum")]
        found.append(f"{what}: {', '.join(numbers)}")
    return found


def _is_close(first: dict[str, Any], second: dict[str, Any], rtol: float) -> bool:
    """Whether norm and sum differ by at most `rtol` times the norm."""
    limit = rtol * max(abs(first["norm"]), abs(second["norm"]))
    differences = (abs(first[name] - second[name]) for name in ("norm", "sum"))
    return all(math.isfinite(difference) and difference <= limit for difference in differences)
