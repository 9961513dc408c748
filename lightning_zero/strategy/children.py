"""The ranks that this process has started, from their start to the end of their job."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.exceptions import _TunerExitException

from lightning_zero.comm.peers import describe_exit
from lightning_zero.comm.world import leave_world

__all__ = ["Children", "ProcessSnapshot", "how_child_ended", "release_children"]

_VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "OMP_NUM_THREADS",
)


@dataclass(frozen=True)
class ProcessSnapshot:
    """What a launch changes in the process that becomes rank 0, as it was.

    The process group and the variables would make the next job of this process believe that its
    ranks are already there, and the threads are those of its share of the processors.
    """

    environment: dict[str, str]
    num_threads: int
    excepthook: Callable[..., Any]  # around it a process group puts one that says the rank

    @classmethod
    def take(cls) -> ProcessSnapshot:
        return cls(dict(os.environ), torch.get_num_threads(), sys.excepthook)

    def restore(self) -> None:
        """Leaves no trace of the launch. The ranks must have ended, or need this one no more."""
        leave_world()
        if getattr(sys.excepthook, "__module__", "") == "torch.distributed.distributed_c10d":
            sys.excepthook = self.excepthook
        for name in _VARIABLES:
            if name in self.environment:
                os.environ[name] = self.environment[name]
            else:
                os.environ.pop(name, None)
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)


_POLL_S = 0.2
_GRACE_S = 8.0  # from a rank's failure until those that still wait for it are killed
_GRACE_OF_SUCCESS_S = 60.0  # longer: it may have ended because this process needs it no more
_END_S = 90.0  # longer than ranks wait for each other after an exception


class Children(threading.Thread):
    """Watches the other ranks of this node, as rank 0 of it; no thread runs where there are none.

    It is the record of the launch (`current` finds it), so that a second Trainer of the same job
    knows of the ranks that the first one has started, and the next job of a sweep can end them.

    `first_rank` is that of the first child, `before` this process before the launch.
    """

    _launched: ClassVar[tuple[int, Children] | None] = None  # by the process of this number

    def __init__(self, job: str | None, *, first_rank: int, before: ProcessSnapshot) -> None:
        super().__init__(daemon=True, name="lightning-zero-children")
        self.job = job  # see `current_job`
        self.processes: list[subprocess.Popen[bytes]] = []
        self._first_rank = first_rank
        self._before = before
        self._is_over = threading.Event()
        self._is_needed = threading.Event()  # this process waits for what the children do
        self._has_failed = False  # this process; it may be too early for them to know

    @classmethod
    def current(cls) -> Children | None:
        """The ranks that this process has started; None before, and in the children."""
        pid, children = cls._launched or (None, None)
        return children if pid == os.getpid() else None  # a fork is none of them

    def start(self) -> None:
        """Begins to watch, if there is any other rank."""
        Children._launched = os.getpid(), self
        if self.processes:
            atexit.register(self._wait_for_children)
            super().start()

    def _wait_for_children(self) -> None:
        """The job has ended when all its ranks have: the shell gets its prompt then."""
        if self._is_over.is_set() or self._has_failed:
            return
        if running := self._wait(_GRACE_S):
            _report(f"rank 0 has come to its end, and waits: {self._names(running)}.")
        for process in self.processes:
            process.wait()
        failed = [process for process in self.processes if process.returncode]
        if failed:
            _report(f"{self._names(failed)}, after rank 0 had come to its end.")

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """While this process may wait for the children, it must not outlive one that is gone."""
        self._is_needed.set()
        self._has_failed = False
        atexit.unregister(self._kill_rest)  # an exception before this was caught
        try:
            yield
        except _TunerExitException:  # how a tuner ends its trial
            raise
        except BaseException:
            # They wait for this process where nothing tells them that it has failed.
            self._has_failed = True
            atexit.register(self._kill_rest)
            raise
        finally:
            self._is_needed.clear()

    def run(self) -> None:
        """Kills all ranks, this process too, some time after one has gone that is needed."""
        gone_at = None
        while not self._is_over.wait(_POLL_S):
            gone = [p for p in self.processes if p.poll() is not None]
            if not self._is_needed.is_set() or not gone:
                gone_at = None
                continue
            if gone_at is None:
                gone_at = time.monotonic()
                if any(p.returncode for p in gone):
                    _report(f"{self._names(gone)}, while rank 0 still needs it.")
            grace_s = _GRACE_S if any(p.returncode for p in gone) else _GRACE_OF_SUCCESS_S
            if time.monotonic() - gone_at > grace_s:
                _report(
                    f"{self._names(gone)}, and rank 0 has waited for it in vain for {grace_s:g} s: "
                    "all ranks of this node are killed. Every rank must run the same script to "
                    "its end."
                )
                for process in self.processes:
                    process.kill()
                os.kill(os.getpid(), signal.SIGKILL)

    def end(self, *, has_failed: bool = False) -> None:
        """Ends the job: waits for the children, then leaves no trace of the launch.

        `has_failed`: the job has, on this rank; the others may wait for it in vain.
        """
        self._has_failed |= has_failed
        self._kill_rest(_GRACE_S if self._has_failed else _END_S)
        self._is_over.set()
        Children._launched = None
        if self.is_alive():
            self.join()
        self._before.restore()
        atexit.unregister(self._kill_rest)

    def _kill_rest(self, timeout_s: float = _GRACE_S) -> None:
        """Waits for the children to exit, and ends those that do not."""
        running = self._wait(timeout_s)
        if running:
            what = "failed" if self._has_failed else "finished"
            _report(
                f"{self._names(running)} {timeout_s:g} s after rank 0 had {what}, and is killed."
            )
        for process in running:
            process.kill()
            process.wait()

    def _wait(self, timeout_s: float) -> list[subprocess.Popen[bytes]]:
        """Those of the children that have not exited by then."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return [process for process in self.processes if process.returncode is None]

    def _names(self, processes: Sequence[subprocess.Popen[bytes]]) -> str:
        texts = []
        for rank, process in enumerate(self.processes, self._first_rank):
            if process in processes:
                code = process.returncode
                texts.append(f"rank {rank} {'still ran' if code is None else describe_exit(code)}")
        return ", ".join(texts)


def release_children() -> None:
    """The ranks that this process has started may end now: it waits for them no more."""
    children = Children.current()
    if children is not None:
        children._is_needed.clear()


def how_child_ended(pid: int) -> str | None:
    """How a rank has ended that this process has started; None where nothing is known of it."""
    children = Children.current()
    for process in children.processes if children is not None else ():
        if process.pid == pid and process.poll() is not None:
            return describe_exit(process.returncode)
    return None


def _report(text: str) -> None:
    """At once: this process may be killed next."""
    print(f"lightning_zero: {text}", file=sys.stderr, flush=True)
