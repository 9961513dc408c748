"""Runs a function on N gloo ranks, forked from a server which has torch and Lightning imported.

Each call has forks of its own. With `LIVING` in the environment, the ranks of a call that ended
well and left nothing behind that `Process.restore` could not undo (see `traces.py`) run the next
call of their number; one that must not find processes which ran something else says `fresh=True`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import pickle
import queue
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed.traces import Process

__all__ = ["LIVING", "TRACES", "RankError", "elastic_environment", "free_port", "run_ranks"]

LIVING = "LIGHTNING_ZERO_LIVING_RANKS"  # a variable: if set, ranks run one call after the other
TRACES = "LIGHTNING_ZERO_TRACES"  # a variable: the file that says why ranks were replaced

_GRACE_S = 5.0  # after the first failure, the time for the other ranks to say theirs
_DUMP_S = 2.0  # after a hang, the time to write the stacks
_CLEAN_S = 10.0  # after a call, the time for its ranks to become as they were before it
_TAIL_CHARACTERS = 6000
_MAX_CALLS = 100  # of a set of ranks; what leaks, leaks for so long only
_MAX_SETS = 3  # that live at a time, each of another number of ranks


class RankError(AssertionError):
    """A rank raised, died or did not return in time; the text has traceback, stack and output."""


@dataclass(frozen=True)
class _Call:
    payload: bytes  # pickled (fn, args)
    world_size: int
    port: int
    folder: str
    has_group: bool
    path: tuple[str, ...]  # where modules are looked for
    test: str  # the file of the test that runs

    def log(self, rank: int) -> Path:
        return Path(self.folder) / f"rank{rank}.log"


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    has_group: bool = True,
    fresh: bool = False,
) -> list[Any]:
    """Calls `fn(rank, world_size, *args)` on every rank and returns the results in rank order.

    The ranks have the environment of torchrun (so a Trainer inside creates no processes), one
    thread each, and a common, empty working directory which is deleted afterwards.

    Args:
        world_size: Number of ranks.
        fn: A function at the top level of a module.
        *args: Picklable; so must the result be. Tensors are copied.
        timeout_s: Time for all ranks together; a hang is a failure.
        has_group: Form a gloo process group first. False where `fn` or its Trainer forms one.
        fresh: The ranks are new forks, and run nothing else: for what measures the memory or the
            environment of a process, sends it signals, or lets it fail.

    Raises:
        RankError: A rank raised, died or did not return in time.
    """
    __tracebackhide__ = True  # pytest shows the ranks' tracebacks only
    is_alone = fresh or LIVING not in os.environ
    ranks = _RankSet(world_size, lives_on=False) if is_alone else _living(world_size)
    with tempfile.TemporaryDirectory(prefix="zero-ranks-") as folder:
        lives_on = False
        try:
            payload, path = pickle.dumps((fn, args)), tuple(sys.path)
            test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
            call = _Call(payload, world_size, free_port(), folder, has_group, path, test)
            results = ranks.run(call, timeout_s, fn.__name__)
            lives_on = ranks.clean()
            return results
        finally:
            if lives_on:
                _idle[world_size] = ranks
            else:
                ranks.kill()


def elastic_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets on one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def free_port() -> int:
    """A port that nobody listens on, below the range from which connections take theirs."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@functools.cache
def _context() -> multiprocessing.context.ForkServerContext:
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the server when it imports torch
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])
    return context


_idle: dict[int, _RankSet] = {}  # by number of ranks, the last used last


def _living(world_size: int) -> _RankSet:
    """The ranks that have run a call before, or new ones."""
    if world_size in _idle:
        return _idle.pop(world_size)
    while len(_idle) >= _MAX_SETS:
        _idle.pop(next(iter(_idle))).kill()
    return _RankSet(world_size, lives_on=True)


@atexit.register
def _kill_idle() -> None:
    while _idle:
        _idle.popitem()[1].kill()


@dataclass
class _Rank:
    process: multiprocessing.context.ForkServerProcess
    pipe: multiprocessing.connection.Connection


class _RankSet:
    """Processes that are the ranks of one call after another.

    Args:
        world_size: How many.
        lives_on: They may run more than one call.
    """

    def __init__(self, world_size: int, *, lives_on: bool) -> None:
        self._lives_on = lives_on
        self._before: list[str] = []  # names of the functions that these processes ran
        self._ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                ours, theirs = _context().Pipe()
                process = _context().Process(target=_main, args=(theirs, rank, lives_on))
                process.start()
                theirs.close()
                self._ranks.append(_Rank(process, ours))
        except BaseException:
            self.kill()
            raise

    def run(self, call: _Call, timeout_s: float, name: str) -> list[Any]:
        """The results in rank order."""
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout_s
        for rank in self._ranks:
            with contextlib.suppress(ConnectionError):  # _collect reports it
                rank.pipe.send(call)
        results, failures = self._collect(deadline)
        if len(results) < len(self._ranks):
            known = results.keys() | failures.keys()
            silent = [i for i in range(len(self._ranks)) if i not in known]
            title = f"{name} (timeout {timeout_s:g} s)"
            raise RankError(self._report(call, failures, silent, title))
        self._before.append(name)
        return [results[i] for i in range(len(self._ranks))]

    def clean(self) -> bool:
        """All have returned: lets each become as it was before; False if they must be replaced."""
        if not self._lives_on or len(self._before) >= _MAX_CALLS:
            return False
        deadline = time.monotonic() + _CLEAN_S
        for rank in self._ranks:
            with contextlib.suppress(ConnectionError):
                rank.pipe.send(None)
        left = [self._what_is_left(rank, deadline) for rank in self._ranks]
        if any(left) and TRACES in os.environ:
            with Path(os.environ[TRACES]).open("a") as file:
                file.write(f"{self._before[-1]}: {left}\n")
        return not any(left)

    def _what_is_left(self, rank: _Rank, deadline: float) -> list[str]:
        try:
            if rank.pipe.poll(max(0.0, deadline - time.monotonic())):
                return rank.pipe.recv()
            return ["did not become clean in time"]
        except (EOFError, ConnectionError):
            return ["died after it had returned"]

    def kill(self) -> None:
        """Ends all."""
        for rank in self._ranks:
            rank.pipe.close()
        for rank in self._ranks:
            if rank.process.is_alive():  # else its number may be another process's by now
                rank.process.kill()
            rank.process.join()

    def _collect(self, deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < len(self._ranks):
            known = results.keys() | failures.keys()
            open_ = {r.pipe: i for i, r in enumerate(self._ranks) if i not in known}
            ready = multiprocessing.connection.wait(
                list(open_), timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            for pipe in ready:
                index = open_[pipe]
                try:
                    is_good, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    self._ranks[index].process.join(_DUMP_S)
                    code = self._ranks[index].process.exitcode
                    is_good, value = False, f"died with exit code {code} and returned nothing."
                if is_good:
                    results[index] = value
                else:
                    if not failures:
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
                    failures[index] = value
        return results, failures

    def _report(self, call: _Call, failures: dict[int, str], silent: list[int], title: str) -> str:
        for index in silent:
            if self._ranks[index].process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._ranks[index].process.pid, signal.SIGUSR2)
        if silent:
            time.sleep(_DUMP_S / 2)
        world_size = len(self._ranks)
        parts = [f"{title} on {world_size} ranks:"]
        parts += [f"--- rank {index} of {world_size}: {text}" for index, text in failures.items()]
        for index in range(world_size):
            if index in silent:
                parts.append(f"--- rank {index} of {world_size} did not return.")
            log = call.log(index)
            output = log.read_text(errors="replace")[-_TAIL_CHARACTERS:] if log.exists() else ""
            if output.strip():
                parts.append(f"--- output of rank {index}:\n{output}")
        if self._before:
            last = ", ".join(self._before[-3:])
            parts.append(
                f"--- these processes ran {len(self._before)} calls before, the last of them "
                f"{last}; without {LIVING} each call has processes of its own."
            )
        return "\n".join(parts)


def _main(pipe: multiprocessing.connection.Connection, rank: int, lives_on: bool) -> None:
    """The life of one rank: returns never, exits when the test closes its end of the pipe."""
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, requests), daemon=True).start()
    this = Process() if lives_on else None
    while True:
        with warnings.catch_warnings():
            _run(pipe, rank, requests.get(), this)
            requests.get()  # all have returned: rank 0 holds the store until then
            assert this is not None
            try:
                left = this.restore()
            except Exception:
                left = [traceback.format_exc()]
        pipe.send(left)


def _run(
    pipe: multiprocessing.connection.Connection, rank: int, call: _Call, process: Process | None
) -> None:
    """Sends what the function returns; does not return if it raises."""
    try:
        _redirect_output(call.log(rank))
        _prepare(rank, call)
        fn, args = pickle.loads(call.payload)  # imports its module
        if process is not None:
            process.look()
        coverage = _coverage(call)
        if call.has_group:
            _form_group(rank, call)
        answer = pickle.dumps((True, fn(rank, call.world_size, *args)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        sys.stdout.flush()
        os._exit(1)  # the others must see it go, as they would see a crashed peer
    if coverage is not None:
        coverage.save()  # this process may be killed now
    pipe.send_bytes(answer)
    sys.stdout.flush()


def _coverage(call: _Call) -> Any:
    """What counts the lines that this process runs, where tests are run under coverage."""
    module = sys.modules.get("coverage")
    coverage = None if module is None else module.Coverage.current()
    if coverage is not None and call.test:
        coverage.switch_context(call.test)
    return coverage


def _redirect_output(log: Path) -> None:
    fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)


def _receive(pipe: multiprocessing.connection.Connection, requests: queue.SimpleQueue[Any]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            requests.put(pipe.recv())
    os._exit(0)


def _prepare(rank: int, call: _Call) -> None:
    import torch
    from lightning_utilities.core.rank_zero import rank_zero_only

    sys.path[:] = call.path
    os.environ.update(elastic_environment(rank, call.world_size, call.port))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = Path(call.folder) / "work"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    rank_zero_only.rank = rank
    torch.set_num_threads(1)
    torch.manual_seed(0)


def _form_group(rank: int, call: _Call) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{call.folder}/store",
        rank=rank,
        world_size=call.world_size,
    )
