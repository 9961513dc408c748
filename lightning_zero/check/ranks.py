"""Ranks of the checks. Each check has new processes, so that one that hangs or dies harms no other.

torchrun and srun start one process per rank, which starts a child for each check; without them this
process starts the children of all ranks. Children are forked from a server that has imported torch.
They form their group through the store of the parents, and put there what they found.
"""

from __future__ import annotations

import getpass
import json
import multiprocessing
import os
import platform
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.health.exits import describe_exit
from lightning_zero.health.world import open_store

__all__ = ["Check", "Found", "Outcome", "Rank", "Run", "Skipped", "form_group", "join_ranks"]
__all__ += ["redacted", "run_check"]

Found = tuple[str, Mapping[str, Any]]  # a sentence, and numbers by name
Model = tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]

_STORES: Any = dist  # its types lack them
_START = timedelta(minutes=5)  # in which the launcher starts all processes
_GRACE_S = 15.0  # from the first failure until ranks that still wait say where
_POLL_S = 0.1
_PATH = re.compile(r"(?<![\w./<])~?(?:/[\w.+@%=:-]+){2,}/?")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?")


class Skipped(Exception):  # noqa: N818
    """The check cannot run here; the text gives the reason."""


@dataclass(frozen=True)
class Run:
    """A run of all checks, as one process of the launcher sees it.

    Attributes:
        size: Number of ranks.
        own: Ranks that are children of this process, by local rank.
        num_local: Number of ranks on this node.
        on_cuda: Whether ranks train on GPUs.
        address: Host and port of the store.
        is_quick: Whether to run fewer cases.
        nvme_path: Folder on a local disk to use and to measure; None: none.
        make_model: Makes the user's model on the meta device and a function of it that returns a
            loss; None: no model was given.
        shared: Temporary folder that all nodes share, if they can.
    """

    size: int
    own: Mapping[int, int]
    num_local: int
    on_cuda: bool
    address: tuple[str, int]
    is_quick: bool = False
    nvme_path: str | None = None
    make_model: Callable[[], Model] | None = None
    shared: Path = Path()

    @property
    def is_first(self) -> bool:
        return 0 in self.own.values()

    def connect(self) -> Any:
        """A store of all processes of this run."""
        host, port = self.address
        return _STORES.PrefixStore("check", _STORES.TCPStore(host, port, timeout=_START))


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        run: Function that every rank calls.
        limit_s: Time after which ranks that have not returned fail.
        loses: What the last rank ends with, on purpose; None: it returns.
    """

    run: Callable[[Rank], Found]
    limit_s: float = 240.0
    loses: str | None = None

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", " ")


@dataclass(frozen=True)
class Rank:
    """One rank of a check; `key` is unique to the check."""

    rank: int
    local: int
    size: int
    key: str
    check: Check
    of: Run

    @property
    def device(self) -> torch.device:
        if self.of.on_cuda:  # srun may show each task its own GPU alone
            return torch.device("cuda", self.local % torch.cuda.device_count())
        return torch.device("cpu")


@dataclass(frozen=True)
class Outcome:
    """Result of a rank or a check: "ok", "failed" or "skipped"; `trace` is for the terminal."""

    result: str
    text: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    trace: str = ""


def join_ranks(num_ranks: int | None, *, on_cpu: bool) -> tuple[Run, Any]:
    """Meets the other processes of the launcher, if there is one; returns their store, too."""
    env, on_cuda = os.environ, torch.cuda.is_available() and not on_cpu
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
        local, num_local = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
    elif "SLURM_STEP_ID" in env and int(env.get("SLURM_NTASKS", 1)) > 1:
        from lightning_zero._lightning.fabric import SLURMEnvironment

        slurm = SLURMEnvironment()
        rank, size, local = slurm.global_rank(), slurm.world_size(), slurm.local_rank()
        num_local = size // int(env.get("SLURM_STEP_NUM_NODES", 1))
        env["MASTER_ADDR"], env["MASTER_PORT"] = slurm.main_address, str(slurm.main_port)
    else:
        num_gpus = torch.cuda.device_count() if on_cuda else 0
        size, most = num_ranks or num_gpus or 2, num_gpus or max(8, 4 * (os.cpu_count() or 1))
        if size > most:
            why = "one for each GPU" if on_cuda else "four for each CPU core, or 8"
            raise ValueError(f"--ranks must be at most {most} here ({why}), got {size}.")
        store: Any = _STORES.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        own = {rank: rank for rank in range(size)}
        return Run(size, own, size, on_cuda, ("127.0.0.1", store.port)), store
    if num_ranks not in (None, size):
        raise ValueError(f"--ranks must be the number that was started, {size}, got {num_ranks}.")
    store = open_store(rank, size, _START)
    address = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    return Run(size, {local: rank}, num_local, on_cuda, address), store


def run_check(run: Run, check: Check, key: str) -> Outcome:
    """Runs a check on its ranks. Collective: every process of the launcher; equal on all."""
    store = run.connect()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "lightning_zero.check.checks"])
    children: dict[int, Any] = {}
    keys = [f"{key}/{rank}" for rank in range(run.size)]
    deadline = time.monotonic() + check.limit_s + 3 * _GRACE_S
    try:
        for local, rank in run.own.items():
            at = Rank(rank, local, run.size, key, check, run)
            child = context.Process(target=_main, args=(at,), daemon=True)
            child.start()
            children[rank] = child
        while not store.check(keys) and time.monotonic() < deadline:
            for rank, child in children.items():
                if child.exitcode is not None and not store.check([keys[rank]]):
                    _report(store, key, rank, Outcome("failed", describe_exit(child.exitcode)))
            time.sleep(_POLL_S)
        lost = asdict(Outcome("failed", "does not answer"))
        answers = (json.loads(store.get(k)) if store.check([k]) else lost for k in keys)
        found = [Outcome(**answer) for answer in answers]
    finally:
        for child in children.values():
            child.kill()
            child.join()
    return _judge(check, found)


def _report(store: Any, key: str, rank: int, outcome: Outcome) -> None:
    if outcome.result == "failed":
        store.set(f"{key}/failed", "")
    outcome = replace(outcome, text=redacted(outcome.text))
    store.set(f"{key}/{rank}", json.dumps(asdict(outcome)))


def redacted(text: str) -> str:
    """`text` without paths, addresses, and the names of this host and its user."""
    names = {platform.node(), platform.node().partition(".")[0], os.environ.get("MASTER_ADDR", "")}
    with suppress(OSError, KeyError):
        names.add(getpass.getuser())
    text = _ADDRESS.sub("ADDRESS", _PATH.sub("PATH", text))
    for name in sorted(names - {""}, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "NAME", text)
    return text


def _judge(check: Check, outcomes: Sequence[Outcome]) -> Outcome:
    """The result of a check, from those of its ranks."""
    bad = {rank: found for rank, found in enumerate(outcomes) if found.result == "failed"}
    last = len(outcomes) - 1
    if check.loses is not None and outcomes[0].result != "skipped":
        if check.loses in bad.get(last, outcomes[0]).text:
            bad.pop(last, None)
        else:
            bad.setdefault(last, Outcome("failed", f"should have ended with {check.loses}"))
    if not bad:
        return outcomes[0]
    ranks: dict[str, list[str]] = {}
    for rank, found in bad.items():
        ranks.setdefault(found.text, []).append(str(rank))
    text = "; ".join(f"rank {', '.join(those)} {text}" for text, those in ranks.items())
    traces = {found.text: found.trace for found in bad.values()}
    return Outcome("failed", text, trace="".join(traces.values()))


# ---------------------------------------------------------------- a child


def _main(at: Rank) -> None:
    """Life of a child, which its parent ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    store = at.of.connect()
    threading.Thread(target=_watch, args=(at, threading.get_ident()), daemon=True).start()
    try:
        form_group(at)
        outcome = Outcome("ok", *at.check.run(at))
    except Skipped as reason:
        outcome = Outcome("skipped", str(reason))
    except BaseException as error:
        _report(store, at.key, at.rank, _describe(error))
        os._exit(1)  # as a script that raised
    _report(store, at.key, at.rank, outcome)
    threading.Event().wait()  # the others may still need this rank


def _end_with_parent() -> None:
    """Ends this process when its parent has ended, and with it, maybe, the store."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(0)


def _watch(at: Rank, main_thread: int) -> None:
    """Reports where the main thread is when its time is over."""
    store, deadline = at.of.connect(), time.monotonic() + at.check.limit_s
    text = f"did not return in {at.check.limit_s:g} s"
    while not store.check([f"{at.key}/{at.rank}"]):
        if deadline - time.monotonic() > _GRACE_S and store.check([f"{at.key}/failed"]):
            deadline, text = time.monotonic() + _GRACE_S, "waits for a rank that failed"
        if time.monotonic() > deadline:
            frames = traceback.extract_stack(sys._current_frames()[main_thread])
            text, trace = f"{text}: {_place(frames)}", "".join(frames.format())
            _report(store, at.key, at.rank, Outcome("failed", text, trace=trace))
        time.sleep(_POLL_S)


def _describe(error: BaseException) -> Outcome:
    frames = traceback.extract_tb(error.__traceback__)
    text = f"raised {type(error).__name__}: {' '.join(str(error).split())[:400]}"
    trace = "".join(traceback.format_exception(error))
    return Outcome("failed", f"{text} ({_place(frames)})", trace=trace)


def _place(frames: traceback.StackSummary) -> str:
    """The innermost line outside torch, and the function of torch that it is in."""
    own = [frame for frame in frames if "/torch/" not in frame.filename] or frames
    inner = "" if own[-1] is frames[-1] else f"{frames[-1].name} in "
    return f"{inner}{own[-1].name}, {Path(own[-1].filename).name}:{own[-1].lineno}"


def form_group(at: Rank) -> None:
    """Makes the default process group of a check, with the environment of torchrun."""
    host, port = at.of.address
    num_local = min(at.of.num_local, at.size)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (at.rank, at.size, at.local, num_local, host, port)
    os.environ.update(zip(names, map(str, values), strict=True))
    options: dict[str, Any] = {"backend": "gloo"}
    if at.of.on_cuda:
        torch.cuda.set_device(at.device)
        options = {"backend": "nccl", "device_id": at.device}
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_local))
    options |= {"store": _STORES.PrefixStore(at.key, at.of.connect())}
    options |= {"timeout": timedelta(seconds=at.check.limit_s + _GRACE_S)}
    dist.init_process_group(rank=at.rank, world_size=at.size, **options)
