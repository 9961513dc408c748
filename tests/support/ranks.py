"""Runs a function on N gloo ranks, forked from a server which has torch and Lightning imported.

A fork costs about 10 ms where an import of torch and Lightning costs seconds, so each call gets
processes of its own: nothing that one test leaves behind reaches the next.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["RankError", "elastic_environment", "free_port", "run_ranks"]

_GRACE_S = 5.0  # after the first failure, the time for the other ranks to say theirs
_DUMP_S = 2.0  # after a hang, the time to write the stacks
_TAIL_CHARACTERS = 6000


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
    test: str  # that calls


@dataclass
class _Rank:
    process: multiprocessing.context.ForkServerProcess
    pipe: multiprocessing.connection.Connection
    log: Path


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    has_group: bool = True,
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

    Raises:
        RankError: A rank raised, died or did not return in time.
    """
    __tracebackhide__ = True  # pytest shows the ranks' tracebacks only
    with tempfile.TemporaryDirectory(prefix="zero-ranks-") as folder:
        payload, path = pickle.dumps((fn, args)), tuple(sys.path)
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        call = _Call(payload, world_size, free_port(), folder, has_group, path, test)
        with _ranks(call) as ranks:
            return _collect(ranks, timeout_s, fn.__name__)


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
    """A port without a listener, below the range from which connections take theirs."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@cache
def _context() -> multiprocessing.context.ForkServerContext:
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the server when it imports torch
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    return context


@contextlib.contextmanager
def _ranks(call: _Call) -> Iterator[list[_Rank]]:
    ranks: list[_Rank] = []
    try:
        for rank in range(call.world_size):
            ours, theirs = _context().Pipe()
            log = Path(call.folder) / f"rank{rank}.log"
            process = _context().Process(target=_main, args=(theirs, rank, call))
            process.start()
            theirs.close()
            ranks.append(_Rank(process, ours, log))
        yield ranks
    finally:
        for rank_ in ranks:
            rank_.pipe.close()
        for rank_ in ranks:
            rank_.process.kill()
            rank_.process.join()


def _collect(ranks: list[_Rank], timeout_s: float, name: str) -> list[Any]:
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(results) + len(failures) < len(ranks):
        open_ = {r.pipe: i for i, r in enumerate(ranks) if i not in results and i not in failures}
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
                ranks[index].process.join(_DUMP_S)
                code = ranks[index].process.exitcode
                is_good, value = False, f"died with exit code {code} and returned nothing."
            if is_good:
                results[index] = value
            else:
                if not failures:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                failures[index] = value
    if len(results) == len(ranks):
        return [results[i] for i in range(len(ranks))]
    silent = [i for i in range(len(ranks)) if i not in results and i not in failures]
    raise RankError(_report(ranks, failures, silent, f"{name} (timeout {timeout_s:g} s)"))


def _report(ranks: list[_Rank], failures: dict[int, str], silent: list[int], title: str) -> str:
    for index in silent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[index].process.pid, signal.SIGUSR2)
    if silent:
        time.sleep(_DUMP_S / 2)
    world_size = len(ranks)
    parts = [f"{title} on {world_size} ranks:"]
    parts += [f"--- rank {index} of {world_size}: {text}" for index, text in failures.items()]
    for index, rank in enumerate(ranks):
        if index in silent:
            parts.append(f"--- rank {index} of {world_size} did not return.")
        output = (
            rank.log.read_text(errors="replace")[-_TAIL_CHARACTERS:] if rank.log.exists() else ""
        )
        if output.strip():
            parts.append(f"--- output of rank {index}:\n{output}")
    return "\n".join(parts)


def _main(pipe: multiprocessing.connection.Connection, rank: int, call: _Call) -> None:
    """The life of one rank: returns never, exits when the test closes its end of the pipe."""
    _redirect_output(Path(call.folder) / f"rank{rank}.log")
    threading.Thread(target=_exit_with_parent, args=(pipe,), daemon=True).start()
    try:
        _prepare(rank, call)
        fn, args = pickle.loads(call.payload)
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
    threading.Event().wait()  # alive until all have finished: rank 0 holds the store


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


def _exit_with_parent(pipe: multiprocessing.connection.Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
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
