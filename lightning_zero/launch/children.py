"""Ranks that this process has started, from their start to the end of their job."""

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

from lightning_zero._lightning.pytorch import _TunerExitException
from lightning_zero.health.exits import describe_exit
from lightning_zero.health.world import leave_world

__all__ = ["Children", "ProcessSnapshot", "how_child_ended", "release_children"]

_VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "OMP_NUM_THREADS",
    "HYDRA_FULL_ERROR",  # set where a rank prints an error as one line
)
# Packages whose exception hooks are those of a job: a process group's prints the rank, ours leaves
# out a traceback that another rank prints.
_HOOKS_OF_JOBS = ("torch.distributed.", "lightning_zero.")


@dataclass(frozen=True)
class ProcessSnapshot:
    """State of the process that becomes rank 0, before the launch and the job change it.

    With the process group and the environment variables left in place, the next job of this process
    would assume that its ranks have started. The number of threads is reduced to a rank's share.
    """

    environment: dict[str, str]
    num_threads: int
    excepthook: Callable[..., Any]

    @classmethod
    def take(cls) -> ProcessSnapshot:
        return cls(dict(os.environ), torch.get_num_threads(), sys.excepthook)

    def restore(self) -> None:
        """Restores the state before the launch. No other rank may need this process any more."""
        leave_world()
        if str(getattr(sys.excepthook, "__module__", "")).startswith(_HOOKS_OF_JOBS):
            sys.excepthook = self.excepthook
        for name in _VARIABLES:
            if name in self.environment:
                os.environ[name] = self.environment[name]
            else:
                os.environ.pop(name, None)
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)


_POLL_S = 0.2
_GRACE_S = 8.0  # from a rank's failure until ranks that still wait for it are killed
_REPORT_S = 30.0  # from rank 0's end until a report of the ranks that still run
_GRACE_AFTER_SUCCESS_S = 60.0  # longer: this process may not need the rank any more
_END_S = 90.0  # longer than ranks wait for each other after an exception


class Children(threading.Thread):
    """Thread on rank 0 of a node that watches the node's other ranks, if there are any.

    It is also the record of the launch (see `current`). A second Trainer of the same job finds
    there the ranks that the first one has started, and the next job of a sweep can end them.

    Args:
        job: Hydra job of the launch; see `current_job`.
        first_rank: Rank of the first child.
        before: State of this process before the launch.
    """

    _launched: ClassVar[tuple[int, Children] | None] = None  # with the id of the process

    def __init__(self, job: str | None, *, first_rank: int, before: ProcessSnapshot) -> None:
        super().__init__(daemon=True, name="lightning-zero-children")
        self.job = job
        self.processes: list[subprocess.Popen[bytes]] = []
        self._first_rank = first_rank
        self.before = before
        self._is_over = threading.Event()
        self._is_needed = threading.Event()  # this process may wait for the children
        self._has_failed = False  # this process has failed; the children may not have noticed

    @classmethod
    def current(cls) -> Children | None:
        """The ranks that this process has started; None before, and in the children."""
        pid, children = cls._launched or (None, None)
        return children if pid == os.getpid() else None  # a forked process has no children

    def start(self) -> None:
        """Starts to watch, if there is another rank."""
        Children._launched = os.getpid(), self
        if self.processes:
            atexit.register(self._wait_for_children)
            super().start()

    def _wait_for_children(self) -> None:
        """Waits for the children at exit: the command ends only after all ranks have ended."""
        if self._is_over.is_set() or self._has_failed:
            return
        running = self._wait(_REPORT_S)
        if running:
            _report(f"rank 0 finished; waiting for other ranks: {self._describe(running)}.")
        for process in self.processes:
            process.wait()
        failed = [process for process in self.processes if process.returncode]
        if failed:
            _report(f"{self._describe(failed)} after rank 0 had finished.")

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """Context in which this process may wait for the children and is ended if one is gone."""
        self._is_needed.set()
        self._has_failed = False
        atexit.unregister(self._kill_rest)  # an exception before this was caught
        try:
            yield
        except _TunerExitException:  # a tuner ends its run by this exception
            raise
        except BaseException:
            # Children may wait for this process without noticing that it has failed.
            self._has_failed = True
            atexit.register(self._kill_rest)
            raise
        finally:
            self._is_needed.clear()

    def run(self) -> None:
        """Ends all ranks, this process too, some time after a needed rank has ended."""
        gone_at = None
        while not self._is_over.wait(_POLL_S):
            gone = [p for p in self.processes if p.poll() is not None]
            if not self._is_needed.is_set() or not gone:
                gone_at = None
                continue
            if gone_at is None:
                gone_at = time.monotonic()
                if any(p.returncode for p in gone):
                    _report(f"{self._describe(gone)} while rank 0 still needs it.")
            grace_s = _GRACE_S if any(p.returncode for p in gone) else _GRACE_AFTER_SUCCESS_S
            if time.monotonic() - gone_at > grace_s:
                _report(
                    f"{self._describe(gone)}, and rank 0 has waited for it for {grace_s:g} s: all "
                    "ranks of this node are terminated. Every rank must run the same script to "
                    "its end."
                )
                for process in self.processes:
                    process.kill()
                os.kill(os.getpid(), signal.SIGTERM)
                if not self._is_over.wait(_GRACE_S):  # a wait in C++ code runs no handler
                    os.kill(os.getpid(), signal.SIGKILL)
                return

    def end(self, *, has_failed: bool = False) -> None:
        """Ends the job: waits for the children. `before.restore` follows if there is a next job.

        `has_failed`: the job has failed on this rank. Children that still wait for it are killed
        sooner.
        """
        self._has_failed |= has_failed
        self._kill_rest(_GRACE_S if self._has_failed else _END_S)
        self._is_over.set()
        Children._launched = None
        if self.is_alive():
            self.join()
        atexit.unregister(self._kill_rest)

    def _kill_rest(self, timeout_s: float = _GRACE_S) -> None:
        """Waits for the children to exit, and kills those that do not."""
        running = self._wait(timeout_s)
        if running:
            what = "failed" if self._has_failed else "finished"
            _report(
                f"{self._describe(running)} {timeout_s:g} s after rank 0 had {what}, and is killed."
            )
        for process in running:
            process.kill()
            process.wait()

    def _wait(self, timeout_s: float) -> list[subprocess.Popen[bytes]]:
        """Waits for the children; returns those that have not exited after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return [process for process in self.processes if process.returncode is None]

    def _describe(self, processes: Sequence[subprocess.Popen[bytes]]) -> str:
        texts = []
        for rank, process in enumerate(self.processes, self._first_rank):
            if process in processes:
                code = process.returncode
                status = "is still running" if code is None else describe_exit(code)
                texts.append(f"rank {rank} {status}")
        return ", ".join(texts)


def release_children() -> None:
    """Declares that this process does not wait for its children any more: they may end."""
    children = Children.current()
    if children is not None:
        children._is_needed.clear()


def how_child_ended(pid: int) -> str | None:
    """Describes the exit of a rank that this process has started; None if it is not known."""
    children = Children.current()
    for process in children.processes if children is not None else ():
        if process.pid == pid and process.poll() is not None:
            return describe_exit(process.returncode)
    return None


def _report(text: str) -> None:
    """Prints `text` unbuffered: this process may be killed next."""
    print(f"lightning_zero: {text}", file=sys.stderr, flush=True)
