"""Seeds faults into lightning_zero, one at a time, and prints which of them the tests find.

    python -m tests.tools.seed_faults run --num 5 --only FILE -- -x -q -m "not slow" tests/core

What stands after `--` is for pytest. `run` draws faults with `--seed` from all that there are, puts
each into a copy of the repository and runs pytest there. The same seed, number and sources give the
same faults. A fault is found if a test fails or does not end.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["KINDS", "Fault", "apply", "choose", "faults_in", "main"]

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_zero"
KINDS = ("comparison", "wait", "copy", "ranks")

_WAITS = {"wait", "wait_event", "wait_stream", "synchronize", "barrier", "join", "result", "drain"}
_COPIES = {"copy_", "add_", "mul_", "div_", "zero_", "fill_", "lerp_", "copy_from", "copy_to"}
_COPIES |= {"write", "store", "load", "_foreach_copy_"}
_RANKS = {"rank", "_rank", "group_rank", "global_rank", "local_rank"}
_NO_TESTS = 5  # exit code of pytest
_FAILED = (1, 2, 3)  # tests failed; collecting them did; an error inside pytest


@dataclasses.dataclass(frozen=True, order=True)
class Fault:
    """A change of one place of the source.

    Attributes:
        path: Path of the file, relative to the repository.
        line: First line of the place, from 1.
        column: From 0, in bytes of UTF-8, as are all columns of `ast`.
        end_line: Last line of the place.
        end_column: After the place.
        kind: One of `KINDS`.
        before: The source of the place.
        after: What stands there instead.
    """

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    kind: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} `{_one_line(self.before)}` -> `{_one_line(self.after)}`"


def faults_in(path: str, source: str) -> Iterator[Fault]:
    """All faults that a file can get, in the order of its lines."""
    found: list[Fault] = []
    text = _Text(source)
    for node in ast.walk(_without_checks(ast.parse(source))):
        change = _change(node, text)
        if change is not None:
            kind, before, after = change
            place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
            found.append(Fault(path, *place, kind, before, after))
    return iter(sorted(found))


def choose(faults: Sequence[Fault], num: int, seed: int) -> list[Fault]:
    """As many of each kind as there are, in turn, until it is `num`."""
    generator = random.Random(seed)
    left = {kind: [fault for fault in sorted(faults) if fault.kind == kind] for kind in KINDS}
    for of_kind in left.values():
        generator.shuffle(of_kind)
    chosen: list[Fault] = []
    while len(chosen) < num and any(left.values()):
        for of_kind in left.values():
            if of_kind and len(chosen) < num:
                chosen.append(of_kind.pop())
    return chosen


def apply(fault: Fault, source: str) -> str:
    """The source with the fault in it."""
    text = _Text(source)
    place = text.place(fault.line, fault.column, fault.end_line, fault.end_column)
    if text.raw[place].decode() != fault.before:
        raise ValueError(f"{fault.path}:{fault.line} is not `{fault.before}`; other sources?")
    before, after = text.raw[: place.start], text.raw[place.stop :]
    return (before + fault.after.encode() + after).decode()


class _Text:
    """A source in bytes, as the columns of `ast` count."""

    def __init__(self, source: str) -> None:
        self.raw = source.encode()
        lengths = map(len, self.raw.splitlines(keepends=True))
        self._starts = [0, *itertools.accumulate(lengths)]

    def place(self, line: int, column: int, end_line: int, end_column: int) -> slice:
        return slice(self._starts[line - 1] + column, self._starts[end_line - 1] + end_column)

    def of(self, node: ast.expr | ast.stmt) -> str:
        place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        return self.raw[self.place(*place)].decode()


def _change(node: ast.AST, source: _Text) -> tuple[str, str, str] | None:
    """Kind, source before and source after of the fault at a node."""
    if isinstance(node, ast.Compare):
        text = source.of(node)
        return "comparison", text, f"(not ({text}))"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        name = function.attr if isinstance(function, ast.Attribute) else ""
        text = source.of(node)
        if name in _WAITS:
            return "wait", text, "pass"
        if name in _COPIES:
            return "copy", text, "pass"
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        name = node.id if isinstance(node, ast.Name) else node.attr
        if name in _RANKS:
            text = source.of(node)
            return "ranks", text, f"({text} ^ 1)"
    return None


def _without_checks(tree: ast.Module) -> ast.Module:
    """Without what does nothing if all is well, or only when types are checked."""

    class Mutation(ast.NodeTransformer):
        def visit_Assert(self, node: ast.Assert) -> None:
            return None

        def visit_Raise(self, node: ast.Raise) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                return None
            return self.generic_visit(node)

        def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
            return None  # positions inside are those of the entire string; and it is a message

        def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
            return node.value and self.visit(node.value)

    return Mutation().visit(tree)


def _one_line(text: str) -> str:
    words = " ".join(text.split()).replace("|", "\\|")
    return words if len(words) <= 60 else words[:57] + "..."


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the tests made of a fault."""

    fault: Fault
    is_found: bool
    because: str
    duration_s: float

    def row(self) -> str:
        answer = "found" if self.is_found else "**not found**"
        cells = (self.fault.kind, str(self.fault), answer, self.because, f"{self.duration_s:.0f}")
        return f"| {' | '.join(cells)} |"


def run_tests(fault: Fault, copy: Path, arguments: Sequence[str], limit_s: float) -> Outcome:
    """Puts the fault into the copy, runs pytest there, and takes it out again."""
    file, begin = copy / fault.path, time.monotonic()
    good = file.read_text()
    file.write_text(apply(fault, good))
    try:
        is_found, because = _run_pytest(copy, arguments, limit_s)
    finally:
        file.write_text(good)
    return Outcome(fault, is_found, because, time.monotonic() - begin)


def _run_pytest(copy: Path, arguments: Sequence[str], limit_s: float) -> tuple[bool, str]:
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return True, f"no end in {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    if code in _FAILED or code < 0:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        name = failed[0].split()[1] if failed else f"exit code {code}"
        return True, f"`{name.replace('|', ' ')}`"
    if code not in (0, _NO_TESTS):
        raise RuntimeError("\n".join(["pytest could not run:", *lines[-20:]]))
    return False, "no test" if code == _NO_TESTS else "all passed"


def _copy_of_the_repository(folder: str) -> Path:
    copy = Path(folder) / "copy"
    ignored = shutil.ignore_patterns(".git", "__pycache__", ".venv", ".*_cache", "outputs")
    shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
    return copy


def _all_faults(only: Sequence[str]) -> list[Fault]:
    found: list[Fault] = []
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        if not only or name in only:
            found += faults_in(name, file.read_text())
    return found


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Prints an outcome after each fault, and writes the table as far as it is."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = _copy_of_the_repository(folder)
        faults = _all_faults(options.only)
        for fault in choose(faults, options.num, options.seed):
            outcomes.append(run_tests(fault, copy, arguments, options.limit_s))
            print(outcomes[-1].row(), flush=True)
            if options.table is not None:
                options.table.write_text(table(outcomes, options.seed))
    return 0


def table(outcomes: Sequence[Outcome], seed: int) -> str:
    """In Markdown."""
    num_found = sum(outcome.is_found for outcome in outcomes)
    lines = [f"{num_found} of {len(outcomes)} faults found (seed {seed})", ""]
    lines += ["| kind | fault | | by | s |", "|---|---|---|---|---|"]
    lines += [outcome.row() for outcome in outcomes]
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    given = [*(sys.argv[1:] if words is None else words)]
    at = given.index("--") if "--" in given else len(given)
    own, arguments = given[:at], given[at + 1 :]
    parser = argparse.ArgumentParser(prog="seed_faults", description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["run", "list"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=100, help="of faults")
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE", help="of lightning_zero")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for the tests of one fault")
    parser.add_argument("--table", type=Path, help="where the table goes")
    options = parser.parse_args(own)
    if options.command == "list":
        for fault in choose(_all_faults(options.only), options.num, options.seed):
            print(fault.kind, fault)
        return 0
    return run(options, arguments)


if __name__ == "__main__":
    sys.exit(main())
