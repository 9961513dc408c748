"""Fault matrix: faults, the places where they happen, and how a job must end after each.

A cell is one job with one fault on one rank. `cover` chooses cells that cover each pair of values,
`run_cell` runs a cell with `scripts/fault.py`, and `problems_of` checks the result.

    LIGHTNING_ZERO_TEST_SLOWDOWN=2.5     factor for all time limits, on a busy machine
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_server import Ending, JobSpec
from tests.support.ranks import free_port

__all__ = [
    "AXES",
    "BOUND_S",
    "Cell",
    "FaultServer",
    "Report",
    "all_cells",
    "cover",
    "fault_server",
    "problems_of",
    "run_cell",
    "tuples_of",
]

SLOWDOWN = float(os.environ.get("LIGHTNING_ZERO_TEST_SLOWDOWN", "1"))
BOUND_S = 10 * SLOWDOWN  # from the fault until the last process has ended
_LIMIT_S = 3 * BOUND_S  # until all are killed, and the test fails
_START_S = 60 * SLOWDOWN  # from the start of the job until the fault

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_OF_A_LAUNCH = ("MASTER_", "NODE_", "LOCAL_", "WORLD_", "RANK", "TORCHELASTIC", "SLURM_")

AXES: dict[str, tuple[Any, ...]] = {
    "fault": ("exception", "sys.exit", "os._exit", "SIGKILL", "SIGINT", "SIGTERM"),
    "place": (
        *("setup", "configure_model", "first_forward", "mid_forward", "backward", "step"),
        *("between_batches", "validation", "save", "in_worker", "teardown"),
    ),
    "workers": ("0workers", "2workers", "2persistent"),
    "strategy": ("zero1", "zero3"),
    "launcher": ("popen", "torchrun"),
    "rank": (0, 1),
}
_BEFORE_A_BATCH = ("first_forward", "mid_forward", "backward", "step", "between_batches", "save")


@dataclass(frozen=True)
class Cell:
    """One job: a value for each axis of `AXES`."""

    fault: str
    place: str
    workers: str
    strategy: str
    launcher: str
    rank: int
    world_size: int = 2

    def __str__(self) -> str:
        parts = [self.fault, self.place, self.workers, self.strategy, self.launcher]
        return "-".join([*parts, f"rank{self.rank}", f"of{self.world_size}"])

    @property
    def is_possible(self) -> bool:
        """Whether the job can have the fault: without workers none can fail in a worker."""
        return self.place != "in_worker" or self.workers != "0workers"

    @property
    def has_parent(self) -> bool:
        """Whether the faulty rank has a parent process in the job, which gets its exit status.

        The Trainer's own launcher makes the process that was started rank 0.
        """
        return self.launcher == "torchrun" or self.rank > 0


# -------------------------------------------------------------------- which cells


def all_cells(axes: Mapping[str, Sequence[Any]], world_size: int) -> list[Cell]:
    """Returns every possible combination."""
    cells = (Cell(*values, world_size) for values in itertools.product(*axes.values()))
    return [cell for cell in cells if cell.is_possible]


def tuples_of(cell: Cell, num_axes: int) -> set[tuple[tuple[str, Any], ...]]:
    """Returns all `num_axes`-tuples of the values of `cell`, each value with its axis."""
    values = [(axis, getattr(cell, axis)) for axis in AXES]
    return set(itertools.combinations(values, num_axes))


def cover(cells: Iterable[Cell], first: Sequence[Cell], count: int, seed: int) -> list[Cell]:
    """Chooses at least `count` cells, or all, to cover all pairs and as many triples as possible.

    Greedy: the next cell has the most new pairs and, among those cells, the most new triples.

    Args:
        cells: Cells to choose from.
        first: Cells that are always chosen.
        count: Number of cells; more are chosen while pairs are missing.
        seed: Seed of the choice among equally good cells.
    """
    waiting = sorted(set(cells) - set(first), key=str)
    random.Random(seed).shuffle(waiting)
    numbers: dict[Any, int] = {}  # one bit per pair and triple: fast sets
    bits: dict[Cell, tuple[int, int]] = {}
    for cell in (*first, *waiting):
        pairs, triples = (
            sum(1 << numbers.setdefault(one, len(numbers)) for one in tuples_of(cell, n))
            for n in (2, 3)
        )
        bits[cell] = pairs, triples
    missing = [0, 0]
    for pairs, triples in bits.values():
        missing = [missing[0] | pairs, missing[1] | triples]

    def gain(cell: Cell) -> tuple[int, int]:
        new = zip(bits[cell], missing, strict=True)
        pairs, triples = ((own & left).bit_count() for own, left in new)
        return -pairs, -triples

    chosen: list[Cell] = []
    # A gain only falls, so the first cell whose gain is still what it was is the best one.
    heap = [(gain(cell), index, cell) for index, cell in enumerate(waiting)]
    heapq.heapify(heap)
    queue = list(first)
    while queue or (heap and (missing[0] or len(chosen) < count)):
        if queue:
            cell = queue.pop(0)
        else:
            old, index, cell = heapq.heappop(heap)
            if (now := gain(cell)) != old:
                heapq.heappush(heap, (now, index, cell))
                continue
        chosen.append(cell)
        missing = [left & ~own for own, left in zip(bits[cell], missing, strict=True)]
    return chosen


# -------------------------------------------------------------------- run


class FaultServer:
    """Process that has imported all modules and runs jobs. See `fault_server.py`."""

    def __init__(self) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(_OF_A_LAUNCH)}
        env |= {
            "PYTHONPATH": os.pathsep.join([str(_ROOT), env.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",  # so that output is kept if the process is killed
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fault_server"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run_script(
        self, argv: Sequence[object], folder: Path, *, num_started: int, limit_s: float = 90.0
    ) -> tuple[int, str]:
        """Runs a script, or "torchrun" and its arguments, without a fault.

        Args:
            argv: The script and its arguments.
            folder: Working directory.
            num_started: Number of ranks that the first process starts.
            limit_s: Time until all processes are killed.

        Returns:
            Exit code of the first process, and the output of all.
        """
        words, output = [str(word) for word in argv], folder / "output"
        spec = JobSpec(words, str(folder), str(folder / "none"), limit_s, 0, num_started)
        ending = self.run(spec)
        printed = output.read_text(errors="replace")
        assert not ending.left, f"{ending.left}\n{printed}"
        return ending.status, printed

    def run(self, spec: JobSpec) -> Ending:
        """Runs a job, and waits until all its processes have ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asdict(spec)), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the server has died; see its error above"
        return Ending(**json.loads(answer))

    def close(self) -> None:
        """Ends the server, and all processes of a job that still run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def fault_server() -> Iterator[FaultServer]:
    """A server for the jobs of all tests of this process."""
    made = FaultServer()
    yield made
    made.close()


@dataclass(frozen=True)
class Report:
    """Result of a job.

    Attributes:
        ending: Times and exit status of its processes.
        output: Output of all processes.
        batches: Training batches that each rank has begun.
    """

    ending: Ending
    output: str
    batches: tuple[tuple[str, ...], ...]


def run_cell(cell: Cell, server: FaultServer, folder: Path) -> Report:
    """Runs the job of `cell` in the empty `folder`; fault "none" trains to the end."""
    num_started = cell.world_size - (cell.launcher == "popen")
    spec = JobSpec(
        _command(cell, folder), str(folder), str(folder / "fault"), _START_S, _LIMIT_S, num_started
    )
    ending = server.run(spec)
    batches = [folder / f"batches-{rank}" for rank in range(cell.world_size)]
    return Report(
        ending,
        (folder / "output").read_text(errors="replace"),
        tuple(tuple(f.read_text().split()) if f.exists() else () for f in batches),
    )


def _command(cell: Cell, folder: Path) -> list[str]:
    script = [str(_HERE / "scripts" / "fault.py"), cell.fault, cell.place, cell.workers]
    script += [cell.strategy, str(cell.rank), str(cell.world_size), str(folder)]
    if cell.launcher == "popen":
        return script
    port = ["--master-port", str(free_port())]
    return ["torchrun", "--nproc-per-node", str(cell.world_size), *port, *script]


# -------------------------------------------------------------------- what must hold


def problems_of(cell: Cell, report: Report) -> list[str]:
    """Returns the problems of how a job has ended; [] if there are none."""
    ending = report.ending
    problems = []
    if cell.fault != "none" and ending.seconds is None:
        problems.append("the fault did not happen")
    if ending.left:
        left = ", ".join(ending.left)
        problems.append(f"{len(ending.left)} processes had not ended and were killed: {left}")
    elif ending.seconds is not None and ending.seconds > BOUND_S:
        problems.append(f"ended {ending.seconds:.1f} s after the fault, expected {BOUND_S:g} s")
    # Rank 0, which had finished, prints at its exit how the rank that it started has ended.
    is_late = cell.place == "teardown" and cell.launcher == "popen" and cell.rank != 0
    if (ending.status == 0) != (cell.fault == "none") and not is_late:
        problems.append(f"the exit status is {ending.status}")
    if cell.fault == "SIGTERM" and cell.place in _BEFORE_A_BATCH:
        problems += _problems_of_stop(cell, report)
    for pattern in expected_text(cell):
        if not re.search(pattern, report.output):
            problems.append(f"the output does not match {pattern!r}")
    return problems


def _problems_of_stop(cell: Cell, report: Report) -> list[str]:
    """Returns problems after SIGTERM: all ranks must end before the same batch, with status 143."""
    problems = []
    if len(set(report.batches)) > 1:
        problems.append(f"ranks ended before different batches: {report.batches}")
    if cell.launcher == "popen" and report.ending.status != 143:
        problems.append(f"the exit status is {report.ending.status}, expected 143")
    if cell.launcher == "torchrun" and not re.search(r"exitcode *: 143\b", report.output):
        problems.append("torchrun does not report exit code 143")  # its own is 1 in any case
    return problems


def expected_text(cell: Cell) -> list[str]:
    """Returns regular expressions for the rank and the cause, which the output must match."""
    rank = rf"\brank {cell.rank}\b"
    if cell.fault == "none":
        return []
    if cell.place == "in_worker":
        return _text_of_worker(cell, rank)
    if cell.fault == "exception":
        named = rf"{rank} (raised|ended with exit code 1)"
        if cell.place == "teardown":
            # The other ranks may have ended; torch prints whose traceback it is.
            named += rf"|\[rank{cell.rank}\]:.*luck"
        return [named, "out of luck"]
    if cell.fault == "SIGTERM":
        # At other places there is no handler, or Lightning's.
        return [rf"{rank}.*SIGTERM"] if cell.place in _BEFORE_A_BATCH else []
    patterns = {
        "sys.exit": rf"{rank} (raised SystemExit.*3|ended with exit code 3)",
        "os._exit": rf"{rank} ended with exit code 3",
        "SIGKILL": rf"{rank} was killed by SIGKILL",
        "SIGINT": rf"{rank} (raised KeyboardInterrupt|ended with exit code 1|was killed by SIGINT)",
    }[cell.fault]
    if cell.launcher == "torchrun":
        # torchrun may end the other ranks before they print; it then prints rank and code itself.
        code = {"sys.exit": "3", "os._exit": "3", "SIGKILL": "-9", "SIGINT": r"(1|-2)"}[cell.fault]
        patterns += rf"|failed \(exitcode: {code}\) local_rank: {cell.rank}\b"
    if not cell.has_parent and cell.place == "teardown":
        return []  # the other ranks have finished, and the shell reports it
    if not cell.has_parent:
        # The shell that started the rank has its exit status, and the user knows of Ctrl-C.
        patterns += {
            "SIGINT": "|Detected KeyboardInterrupt",
        }.get(cell.fault, rf"|{rank} (was killed|ended|died|has died|has gone|is gone)")
    return [patterns]


def _text_of_worker(cell: Cell, rank: str) -> list[str]:
    """Returns what must be printed after a fault in a worker: the rank raises torch's exception."""
    named = rf"{rank} (raised|ended with exit code 1)"
    if cell.fault == "exception":
        return [named, "out of luck"]
    killed = {
        "SIGKILL": "is killed by signal: Killed",
        "SIGTERM": "is killed by signal: Terminated",
    }
    text = killed.get(cell.fault, "exited unexpectedly")
    return [named, rf"DataLoader worker \(pid.*{text}"]
