"""Runs jobs one after the other, each as a fork of this process, and waits for all their processes.

Torch and Lightning are imported here once, so that a script, or torchrun, starts at once. A job is
an ordinary child process: it receives its signals directly, and ends as any interpreter does. The
ranks that it starts are forks, too, made before it runs any code: its children, which wait for the
`Popen` that sends them arguments and environment.

This process is the subreaper of its descendants: a process whose parent has died, in any session,
becomes its child. A job is over when there is no child left.

A line on stdin is a `JobSpec` as JSON, the answer on stdout an `Ending`. At the end of stdin all
remaining processes are killed.
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
class JobSpec:
    """Specification of a job.

    Attributes:
        argv: The script and its arguments, or "torchrun" and its arguments.
        folder: Working directory; the output of all processes is written to its file "output".
        fault: File that will contain the time of the fault.
        start_s: Time in which the file must appear; else all processes are killed.
        limit_s: Time after the fault at which all processes are killed.
        num_started: Number of ranks that the first process starts.
    """

    argv: list[str]
    folder: str
    fault: str
    start_s: float
    limit_s: float
    num_started: int = 0


@dataclass
class Ending:
    """End of a job.

    Attributes:
        status: Exit code of its first process, or minus the signal that has killed it.
        seconds: Time from the fault to the end of its last process; None without a fault.
        first_seconds: Time from the fault to the end of its first process.
        left: Processes that had to be killed.
    """

    status: int = 0
    seconds: float | None = None
    first_seconds: float | None = None
    left: list[str] = field(default_factory=list)


def main() -> None:
    for name in ("torch.distributed.run", "tests.support.preload"):
        __import__(name)
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("this system has no subreapers")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while line := sys.stdin.readline():
        spec = JobSpec(**json.loads(line))
        job = os.fork()
        if job == 0:
            answers.close()
            _become(spec)
            return _run(_Spare.argv_of_this_process(spec))
        ending = _watch(job, spec)
        with contextlib.suppress(BrokenPipeError):  # the test has ended
            print(json.dumps(asdict(ending)), file=answers, flush=True)


def _become(spec: JobSpec) -> None:
    """Sets this process up as a shell does for a background process in a session of its own."""
    os.setsid()
    os.chdir(spec.folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open("output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, output + 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _Spare:
    """Child process that becomes the next process that `Popen` starts."""

    def __init__(self, earlier: list[_Spare]) -> None:
        reading, self._writing = os.pipe()
        self.pid = os.fork()
        self.reading = reading if self.pid == 0 else None
        if self.pid != 0:
            os.close(reading)
            return
        for spare in (self, *earlier):  # so that each sees the end of its own pipe
            os.close(spare._writing)

    @classmethod
    def argv_of_this_process(cls, spec: JobSpec) -> list[str]:
        """Returns argv for the job and, later, for each child that `Popen` has started."""
        spares: list[_Spare] = []
        for _ in range(spec.num_started):
            spare = cls(spares)
            if spare.reading is not None:
                return _become_started(spare.reading)
            spares.append(spare)

        original: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]

        def execute_child(popen: Any, args: Any, *others: Any) -> None:
            if not spares or args[0] != sys.executable:  # no rank
                return original(popen, args, *others)
            _, _, _, _, cwd, env, *more = others
            spare = spares.pop(0)
            spare.start(args, cwd, env, has_session=more[14])
            popen.pid, popen._child_created = spare.pid, True
            return None

        if spares:
            subprocess.Popen._execute_child = execute_child
        return spec.argv

    def start(self, args: list[str], cwd: str | None, env: Any, *, has_session: bool) -> None:
        """Sends the child what to run."""
        with os.fdopen(self._writing, "w") as pipe:
            json.dump([list(args), cwd, dict(env), has_session], pipe)


def _become_started(reading: int) -> list[str]:
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    if not text:
        os._exit(0)  # the job is over
    args, cwd, env, has_session = json.loads(text)
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


def _watch(job: int, spec: JobSpec) -> Ending:
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
        fault_at = fault_at or _time_in(spec.fault)
        deadline = begin + spec.start_s if fault_at is None else fault_at + spec.limit_s
        is_alone = bool(select.select([0], [], [], 0)[0])  # stdin has ended
        if now > deadline or is_alone:
            ending.left = ending.left or [_description(pid) for pid in _descendants()]
            for pid in _descendants():
                _kill(pid)
        time.sleep(_POLL_S)
    fault_at = fault_at or _time_in(spec.fault)
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
    """Returns all descendants of this process except zombies."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                state, parent = _read(int(name), "stat").rpartition(")")[2].split()[:2]
            except OSError:
                continue  # ended meanwhile
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
