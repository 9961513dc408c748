"""`lightning-zero compare`: names the first step and parameter in which two runs differ."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple, TypeAlias

from lightning_zero.layout.foreign_names import escaped

__all__ = ["run"]

_FILE_NAME = "fingerprints.jsonl"  # of the callback Fingerprints
_MAX_LINES = 8


class _Values(NamedTuple):
    """Content of a line."""

    norm: float
    sum: float
    digest: str


# Lines of a file by step and kind, then by name, in the order of the file.
_Steps: TypeAlias = "dict[tuple[int, str], dict[str, _Values]]"


def run(args: argparse.Namespace) -> int:
    """Prints the first difference of two runs, or that there is none; returns 1 if there is one."""
    first, second = _read(args.first), _read(args.second)
    common = sorted(first.keys() & second.keys())  # gradients of a step before its parameters
    if not common:
        raise ValueError(
            f"{args.first} and {args.second} have no step in common; use the same every_n_steps."
        )
    for step in sorted({step for step, _ in common}):
        lines = [
            line
            for key in common
            if key[0] == step
            for line in _differences(key[1], first[key], second[key], args.rtol)
        ]
        if lines:
            print(f"step {step}: {lines[0]}")
            for line in lines[1:_MAX_LINES]:
                print(f"  also {line}")
            if len(lines) > _MAX_LINES:
                print(f"  and {len(lines) - _MAX_LINES} more")
            return 1
    steps = sorted({step for step, _ in common})
    what = "bit by bit" if not args.rtol else f"to rtol={args.rtol:g}"
    print(f"{len(steps)} steps, {steps[0]} to {steps[-1]}, are equal {what}")
    for name, missing in (
        (args.second, first.keys() - second),
        (args.first, second.keys() - first),
    ):
        for kind in sorted({kind for _, kind in missing}):
            numbers = [step for step, other in missing if other == kind]
            print(
                f"  {name} lacks the {kind}s of {len(numbers)} steps of the other, "
                f"the first is step {min(numbers)}"
            )
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
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, start=1):
            try:
                step, kind, parameter, values = _parse(text)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"line {number} of {path} is not one of the callback Fingerprints, or the run "
                    f"ended while it was written ({type(error).__name__}: {error}); remove it to "
                    "compare the others."
                ) from None
            steps.setdefault((step, kind), {})[parameter] = values
    return steps


def _parse(text: str) -> tuple[int, str, str, _Values]:
    """Step, kind, name and values of a line."""
    line = json.loads(text)
    step, kind, name = line["step"], line["kind"], line["name"]
    if type(step) is not int or not isinstance(kind, str) or not isinstance(name, str):
        raise TypeError(f"expected a number and two names, got {step!r}, {kind!r} and {name!r}")
    return step, kind, name, _Values(float(line["norm"]), float(line["sum"]), str(line["digest"]))


def _differences(
    kind: str, first: dict[str, _Values], second: dict[str, _Values], rtol: float | None
) -> list[str]:
    """One line for each parameter that differs in one step.

    With `rtol`, norm and sum may differ by `rtol` times the largest norm of this kind in this step.
    A gradient that is rounding alone, as of a bias before BatchNorm, has no equal digits.
    """
    norms = (values.norm for values in (*first.values(), *second.values()))
    limit = (rtol or 0.0) * max(filter(math.isfinite, norms), default=0.0)
    found = []
    for name in dict.fromkeys([*first, *second]):
        what = escaped(f"{kind} {name}")
        if name not in first or name not in second:
            found.append(f"{what}: only in the {'first' if name in first else 'second'} run")
            continue
        ours, other = first[name], second[name]
        if ours.digest == other.digest or (rtol and _is_close(ours, other, limit)):
            continue
        found.append(
            f"{what}: norm {ours.norm!r} and {other.norm!r}, sum {ours.sum!r} and {other.sum!r}"
        )
    return found


def _is_close(first: _Values, second: _Values, limit: float) -> bool:
    """Whether norm and sum differ by at most `limit`."""
    differences = abs(first.norm - second.norm), abs(first.sum - second.sum)
    return all(math.isfinite(difference) and difference <= limit for difference in differences)
