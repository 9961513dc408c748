"""Ranks that stay for the calls of many tests: `run_ranks` without new processes.

A call begins in an empty working directory, with seed 0, and with the environment and the warning
filters of a new rank. Anything else that it changes in its processes stays. So use
tests/support/ranks.py for a call that patches a module, ends connections, or forms groups itself.
After a call that fails, and after `_MAX_CALLS` calls, the next one gets new ranks.

What an engine has found about an optimizer of torch, with its settings, is not looked for again by
the next engine of the process: that takes half of the time of a test of a few steps.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pickle
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support import ranks
from tests.support.ranks import RankError

__all__ = ["run_ranks"]

_MAX_CALLS = 40  # engines that a test has not closed keep groups and threads
_START_S = 240.0  # the fork server imports torch and Lightning first
_LIFE_S = 24 * 3600.0
_GRACE_S = 5.0  # after the first failure, the time for the other ranks to fail, too
_DUMP_S = 1.0  # after a hang, the time to write the stacks
_TAIL_CHARACTERS = 6000


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    has_group: bool = True,
) -> list[Any]:
    """As `tests.support.ranks.run_ranks`, on ranks that other calls have used and will use."""
    __tracebackhide__ = True
    key = (world_size, has_group)
    found = _LIVING.get(key)
    if found is None or found.is_used_up or found.num_calls == _MAX_CALLS:
        if found is not None:
            found.end()
        found = _LIVING[key] = _Ranks(world_size, has_group)
    try:
        return found.call(fn, args, timeout_s)
    except BaseException:
        found.kill()
        del _LIVING[key]
        raise


class _Ranks:
    """Ranks in `_serve`, and a connection to each."""

    def __init__(self, world_size: int, has_group: bool) -> None:
        self.num_calls = 0
        self.is_used_up = False  # a call has formed groups of its own
        self._error: BaseException | None = None
        self._pipes: list[Connection] = []
        self._pids: list[int] = []
        self._logs: list[Path] = []
        with tempfile.TemporaryDirectory(prefix="zero-warm-") as folder, _listen(folder) as door:
            arguments = world_size, has_group, f"{folder}/door"
            threading.Thread(target=self._live, args=arguments, daemon=True).start()
            for _ in range(world_size):
                try:
                    pipe = Connection(door.accept()[0].detach())
                except TimeoutError:
                    raise RankError("the ranks did not begin") from self._error
                self._pipes.append(pipe)
        known = [pipe.recv() for pipe in self._pipes]
        order = sorted(range(world_size), key=known.__getitem__)
        self._pipes = [self._pipes[index] for index in order]
        self._pids, self._logs = ([known[index][i] for index in order] for i in (1, 2))

    def _live(self, world_size: int, has_group: bool, address: str) -> None:
        try:
            ranks.run_ranks(world_size, _serve, address, timeout_s=_LIFE_S, has_group=has_group)
        except BaseException as error:
            self._error = error

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        __tracebackhide__ = True
        self.num_calls += 1
        payload = pickle.dumps((fn, args))
        begins = [log.stat().st_size for log in self._logs]
        for pipe in self._pipes:
            pipe.send_bytes(payload)
        silent = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while silent and (ready := wait(list(silent), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = silent.pop(pipe)  # type: ignore[arg-type]
                try:
                    is_good, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    is_good, value = False, "died and returned nothing."
                if is_good:
                    results[rank], is_same = value
                    self.is_used_up |= not is_same
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if len(results) == len(self._pipes):
            return [results[rank] for rank in range(len(self._pipes))]
        title = f"{fn.__name__} (timeout {timeout_s:g} s)"
        raise RankError(self._report(title, failures, list(silent.values()), begins))

    def _report(
        self, title: str, failures: dict[int, str], silent: list[int], begins: list[int]
    ) -> str:
        for rank in silent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR2)  # it writes its stacks to its log
        time.sleep(_DUMP_S if silent else 0)
        size = len(self._pipes)
        parts = [f"{title} on {size} ranks that {self.num_calls - 1} calls have used:"]
        parts += [f"--- rank {rank} of {size}: {text}" for rank, text in failures.items()]
        parts += [f"--- rank {rank} of {size} did not return." for rank in silent]
        for rank, (log, begin) in enumerate(zip(self._logs, begins, strict=True)):
            output = log.read_bytes()[begin:].decode(errors="replace") if log.exists() else ""
            if output.strip():
                parts.append(f"--- output of rank {rank}:\n{output[-_TAIL_CHARACTERS:]}")
        return "\n".join(parts)

    def end(self) -> None:
        """Lets the ranks return."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
            pipe.close()

    def kill(self) -> None:
        """Ends the processes, whatever they do."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pipe in self._pipes:
            pipe.close()


_LIVING: dict[tuple[int, bool], _Ranks] = {}


@atexit.register
def _end_all() -> None:
    for found in _LIVING.values():
        found.end()


@contextlib.contextmanager
def _listen(folder: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{folder}/door")
        door.listen()
        door.settimeout(_START_S)
        yield door


# ------------------------------------------------------------------------ on a rank


def _serve(rank: int, world_size: int, address: str) -> None:
    """Answers calls until there are no more."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        pipe = Connection(client.detach())
    log = Path(os.readlink("/proc/self/fd/1"))
    _remember_probes()
    pipe.send((rank, os.getpid(), log))
    home, number = Path.cwd(), 0
    while True:
        try:
            payload = pipe.recv_bytes()
        except EOFError:
            return
        if not payload:
            return
        number += 1
        with _as_in_a_new_rank(home / str(number)):
            try:
                fn, args = pickle.loads(payload)
                result = fn(rank, world_size, *args)
                answer = pickle.dumps((True, (result, _has_groups_of_a_trainer(world_size))))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            fn = args = result = None
        if rank == 0:
            shutil.rmtree(home / str(number - 1), ignore_errors=True)
        pipe.send_bytes(answer)


def _has_groups_of_a_trainer(world_size: int) -> bool:
    """Whether the default group is the one of these ranks, if there is one."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return True
    return dist.get_world_size() == world_size and dist.get_backend() == "gloo"


def _remember_probes() -> None:
    import torch

    from lightning_zero.engine import optimizers

    probe, known = optimizers.probe, {}

    def remembered(optimizer: torch.optim.Optimizer, device: torch.device) -> Any:
        if not type(optimizer).__module__.startswith("torch.optim."):
            return probe(optimizer, device)
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
        attributes = tuple(vars(optimizer))  # a method that is replaced is one of them
        key = type(optimizer), attributes, repr(groups), frozenset(dtypes), device
        if key not in known:
            known[key] = probe(optimizer, device)
        return known[key]

    optimizers.probe = remembered


@contextlib.contextmanager
def _as_in_a_new_rank(folder: Path) -> Iterator[None]:
    import torch

    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    before = dict(os.environ)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        yield
    gc.collect()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    os.environ.clear()
    os.environ.update(before)
