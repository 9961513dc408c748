"""The ranks that this process has started, from their start to the end of their job."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

__all__ = ["Children"]

_POLL_S = 1.0
_GRACE_S = 10.0  # from a rank's failure until those that still wait for it are killed
_END_S = 90.0  # longer than ranks wait for each other after an exception
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")


class Children(threading.Thread):
    """Watches the other ranks of this node, as rank 0 of it.

    The thread is itself the record of the launch (`current` finds it), so that a second Trainer of
    the same job knows of the ranks that the first one has started, and the next job of a sweep can
    end them.

    Args:
        job: See `current_job`.
        environment: This process's before the launch.
    """

    def __init__(self, job: str | None, environment: dict[str, str]) -> None:
        super().__init__(daemon=True, name="lightning-zero-children")
        self.job = job
        self.processes: list[subprocess.Popen[bytes]] = []
        self._environment = environment
        self._is_over = threading.Event()
        self._is_needed = threading.Event()  # this process waits for what the children do

    @classmethod
    def current(cls) -> Children | None:
        """The ranks that this process has started; None before, and in the children."""
        return next((t for t in threading.enumerate() if isinstance(t, cls)), None)

    def add(self, command: Sequence[str], environment: dict[str, str], cwd: str | None) -> None:
        """Starts one more rank."""
        self.processes.append(subprocess.Popen(command, env=environment, cwd=cwd))

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """While this process may wait for the children, it must not outlive one that has failed."""
        self._is_needed.set()
        try:
            yield
        except BaseException:
            # They wait for this process where nothing tells them that it has failed.
            atexit.register(self._kill_rest)
            raise
        finally:
            self._is_needed.clear()

    def run(self) -> None:
        """Kills all ranks, this process too, some time after one has failed."""
        failed_at = None
        while not self._is_over.wait(_POLL_S):
            if not self._is_needed.is_set() or not any(p.poll() for p in self.processes):
                failed_at = None
            elif failed_at is None:
                failed_at = time.monotonic()
            elif time.monotonic() - failed_at > _GRACE_S:
                self.kill(signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)

    def kill(self, signum: int) -> None:
        """Sends a signal to those that still run."""
        for process in self.processes:
            process.send_signal(signum)

    def end(self) -> None:
        """Ends the job: waits for the children, then leaves no trace of the launch.

        The process group and the variables that the launch has set would make the next job of this
        process believe that its ranks are already there.
        """
        for process in self._wait(_END_S):
            rank_zero_warn(
                f"process {process.pid}, a rank of this job, was still running {_END_S:g} s after "
                "rank 0 had finished, and is killed."
            )
            process.kill()
            process.wait()
        self._is_over.set()
        self.join()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        for name in _VARIABLES:
            if name in self._environment:
                os.environ[name] = self._environment[name]
            else:
                os.environ.pop(name, None)
        atexit.unregister(self._kill_rest)

    def _wait(self, timeout_s: float) -> list[subprocess.Popen[bytes]]:
        """Waits for the children to exit; those that have not."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return [process for process in self.processes if process.returncode is None]

    def _kill_rest(self) -> None:
        for process in self._wait(_GRACE_S):
            process.kill()
            process.wait()
