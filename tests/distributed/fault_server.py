"""Runs jobs one after the other, each as a fork of this process, and sees when all of it is gone.

Torch and Lightning are imported here once, so that a script, or torchrun, starts at once. A job is
an ordinary child: nothing stands between it and its signals, and it ends as any interpreter does.
The ranks that it starts are forks too, made before it runs anything: its children, which wait for
the `Popen` that gives them arguments and environment.

This process is the subreaper of what it starts: a process whose parent has died, in whatever
session, becomes its child. A job is over when there is no child any more.

A line on stdin is an `Order` as JSON, the answer on stdout an `Ending`. At the end of stdin all
that still runs is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_POLL_S = 0.02
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Order:
    """A job.

    Attributes:
        argv: The script and its arguments, or those of torchrun where the first is "torchrun".
        folder: To work in; the output of all processes goes to the file "output" there.
        fault: A file which has the time of the fault, once that is near.
        start_s: Time until there is such a file, else all are killed.
        limit_s: Time after the fault until all are killed.
    """

    argv: list[str]
    folder: str
    fault: str
    start_s: float
    limit_s: float
    num_started: int = 0  # ranks that the first process starts


@dataclass
class Ending:
    """How a job has ended.

    Attributes:
        status: Exit code of its first process, or minus the signal that has killed it.
        seconds: From the fault until the last of its processes was gone; None without a fault.
        first_seconds: Likewise until its first process was gone.
        left: The processes that had to be killed.
    """

    status: int = 0
    seconds: float | None = None
    first_seconds: float | None = None
    left: list[str] = field(default_factory=list)


def main() -> None:
    for name in ("torch._dynamo", "torch.distributed.run", "lightning.pytorch", "lightning_zero"):
        __import__(name)
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("this system has no subreapers")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while line := sys.stdin.readline():
        order = Order(**json.loads(line))
        job = os.fork()
        if job == 0:
            answers.close()
            _become(order)
            return _run(_Spare.argv_of_this_process(order))
        ending = _watch(job, order)
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
            print(json.dumps(asdict(ending)), file=answers, flush=True)


def _become(order: Order) -> None:
    """A process as a shell starts it in the background of a session of its own."""
    os.setsid()
    os.chdir(order.folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open("output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, output + 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _Spare:
    """A child that becomes what `Popen` starts next."""

    def __init__(self, earlier: list[_Spare]) -> None:
        reading, self._writing = os.pipe()
        self.pid = os.fork()
        self.reading = reading if self.pid == 0 else None
        if self.pid != 0:
            os.close(reading)
            return
        for spare in (self, *earlier):  # each sees the end of what is written to it
            os.close(spare._writing)

    @classmethod
    def argv_of_this_process(cls, order: Order) -> list[str]:
        """Of the job; and, later, of each child that has become what it has started."""
        spares: list[_Spare] = []
        for _ in range(order.num_started):
            spare = cls(spares)
            if spare.reading is not None:
                return _become_started(spare.reading)
            spares.append(spare)

        def execute_child(popen: Any, args: Any, *others: Any) -> None:
            _, _, _, _, cwd, env, *more = others
            spare = spares.pop(0)
            spare.start(args, cwd, env, has_session=more[14])
            popen.pid, popen._child_created = spare.pid, True

        if spares:
            subprocess.Popen._execute_child = execute_child
        return order.argv

    def start(self, args: list[str], cwd: str | None, env: Any, *, has_session: bool) -> None:
        """Tells it what to run."""
        with os.fdopen(self._writing, "w") as pipe:
            json.dump([list(args), cwd, dict(env), has_session], pipe)


def _become_started(reading: int) -> list[str]:
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    if not told:
        os._exit(0)  # the job is over
    args, cwd, env, has_session = json.loads(told)
    if has_session:
        os.setsid()
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    assert args[0] == sys.executable
    return [arg for arg in args[1:] if arg != "-u"]


def _run(argv: list[str]) -> None:
    sys.argv = list(argv)
    if argv[0] == "torchrun":
        from torch.distributed.run import main as torchrun

        sys.exit(torchrun())
    sys.path[0] = str(Path(argv[0]).parent)
    runpy.run_path(argv[0], run_name="__main__")


def _watch(job: int, order: Order) -> Ending:
    ending = Ending()
    begin, fault_at, job_gone_at = time.monotonic(), None, None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        now = time.monotonic()
        if pid == job:
            ending.status, job_gone_at = os.waitstatus_to_exitcode(status), now
        if pid != 0:
            continue
        fault_at = fault_at or _time_in(order.fault)
        deadline = begin + order.start_s if fault_at is None else fault_at + order.limit_s
        is_alone = bool(select.select([0], [], [], 0)[0])  # nobody waits for the answer
        if now > deadline or is_alone:
            ending.left = ending.left or [_description(pid) for pid in _descendants()]
            for pid in _descendants():
                _kill(pid)
        time.sleep(_POLL_S)
    fault_at = fault_at or _time_in(order.fault)
    if fault_at is not None:
        ending.seconds = time.monotonic() - fault_at
        ending.first_seconds = job_gone_at - fault_at if job_gone_at is not None else None
    return ending


def _time_in(path: str) -> float | None:
    try:
        return float(Path(path).read_text())
    except FileNotFoundError:
        return None


def _descendants() -> list[int]:
    """All processes below this one that are no zombies."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                state, parent = _read(int(name), "stat").rpartition(")")[2].split()[:2]
            except OSError:
                continue  # gone meanwhile
            if state != "Z":
                children.setdefault(int(parent), []).append(int(name))
    found, stack = [], [os.getpid()]
    while stack:
        below = children.get(stack.pop(), [])
        found += below
        stack += below
    return found


def _description(pid: int) -> str:
    try:
        command = _read(pid, "cmdline").split(chr(0))
        parent = _read(pid, "stat").rpartition(")")[2].split()[1]
    except OSError:
        return f"{pid}"
    # A fork of this process has our command line.
    started = "no program of its own" if __spec__.name in command else " ".join(command[1:3])
    return f"{pid} of {parent} ({started})"


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
