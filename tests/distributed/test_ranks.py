"""The harness itself: a failure on a rank must never look like a success."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lightning_zero
from lightning_zero import ZeroConfig
from tests.distributed.ranks import LIVING, TRACES, RankError, run_ranks


@pytest.fixture(autouse=True)
def ranks_live_on(monkeypatch):
    monkeypatch.setenv(LIVING, "1")


def _sum_of_ranks(rank, world_size, scale):
    value = torch.tensor([float(rank)]) * scale
    dist.all_reduce(value)
    return value


def _raise_on_rank_1(rank, world_size):
    if rank == 1:
        raise LookupError("no such thing")
    dist.barrier()


def _hang_on_rank_1(rank, world_size):
    if rank == 1:
        time.sleep(1000)
    dist.barrier()


def _die(rank, world_size):
    print("last words", flush=True)
    os._exit(7)


def _environment(rank, world_size):
    Path(f"seen-by-{rank}").touch()
    return os.environ["RANK"], os.environ["WORLD_SIZE"], dist.is_initialized(), os.getcwd()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_runs_and_returns_its_result(world_size):
    results = run_ranks(world_size, _sum_of_ranks, 2.0)
    expected = 2.0 * sum(range(world_size))
    assert [result.item() for result in results] == [expected] * world_size


def test_ranks_look_launched_by_torchrun_and_share_an_empty_folder():
    first, second = run_ranks(2, _environment, has_group=False)
    assert first[:3] == ("0", "2", False)
    assert second[:3] == ("1", "2", False)
    assert first[3] == second[3]
    assert not Path(first[3]).exists()


def test_an_exception_on_one_rank_fails_with_its_traceback():
    with pytest.raises(RankError, match=r"rank 1 of 2: Traceback[\s\S]*no such thing"):
        run_ranks(2, _raise_on_rank_1)


def test_a_hang_fails_with_the_stacks_of_the_ranks_that_hang():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 did not return[\s\S]*in _hang_on_rank_1"):
        run_ranks(2, _hang_on_rank_1, timeout_s=3)
    assert time.monotonic() - start < 15


def test_a_rank_that_dies_fails_with_its_exit_code_and_output():
    with pytest.raises(RankError, match=r"exit code 7[\s\S]*last words"):
        run_ranks(1, _die)


def _pid(rank, world_size):
    return os.getpid()


def test_the_ranks_of_a_call_run_the_next_one_too():
    assert run_ranks(2, _pid) == run_ranks(2, _pid, has_group=False) == run_ranks(2, _pid)
    assert not {*run_ranks(2, _pid)} & {*run_ranks(3, _pid)}


def test_fresh_ranks_run_nothing_before_and_nothing_after():
    pids = [{*run_ranks(2, _pid, fresh=fresh)} for fresh in (False, True, False, True)]
    assert pids[0] == pids[2]
    assert not pids[1] & pids[0]
    assert not pids[1] & pids[3]


@pytest.mark.parametrize("fails", [_raise_on_rank_1, _die])
def test_no_rank_outlives_a_failure(fails):
    before = {*run_ranks(2, _pid)}
    with pytest.raises(RankError, match=r"ran [0-9]+ calls before"):
        run_ranks(2, fails)
    assert not before & {*run_ranks(2, _pid)}


def _state(rank, world_size):
    return {
        "environment": {k: v for k, v in os.environ.items() if k != "MASTER_PORT"},
        "files": os.listdir(),
        "sys": (sys.argv, sys.path, sys.excepthook.__module__),
        "seeds": (torch.randn(1).item(), random.random(), np.random.rand()),
        "dtype": torch.get_default_dtype(),
        "torch": (torch.is_grad_enabled(), torch.get_num_threads()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filters": len(warnings.filters),
        "level": logging.getLogger("lightning_zero").level,
        "handlers": len(logging.getLogger("lightning_zero").handlers),
        "signals": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "group": (dist.is_initialized(), dist.GroupMember.WORLD is None),
    }


def _change_all(rank, world_size):
    os.environ["MASTER_ADDR"] = os.environ["ONE_MORE"] = "nowhere"
    del os.environ["RANK"]
    Path("file").touch()
    os.chdir("..")
    sys.argv.append("--more")
    sys.path.insert(0, "nowhere")
    sys.excepthook = print
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    warnings.filterwarnings("ignore", "anything")
    logging.getLogger("lightning_zero").setLevel(logging.ERROR)
    logging.getLogger("lightning_zero").addHandler(logging.NullHandler())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size, init_method=f"file://{os.getcwd()}/other"
    )
    return os.getpid()


def _warn(rank, world_size):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            warnings.warn("once", UserWarning, stacklevel=1)
    return len(caught)


def test_what_a_function_changes_is_as_before_for_the_next():
    before = run_ranks(2, _state, has_group=False)
    pids = run_ranks(2, _change_all, has_group=False)
    for rank, state in enumerate(run_ranks(2, _state, has_group=False)):
        changed = [name for name, value in state.items() if value != before[rank][name]]
        assert not changed, rank
    assert run_ranks(2, _warn) == run_ranks(2, _warn) == [1, 1]
    assert run_ranks(2, _pid) == pids


def _patch(rank, world_size):
    lightning_zero.Engine.step = None


def _patch_on_rank_1(rank, world_size):
    if rank == 1:
        os.getpid = lambda: 7


class Keeper:
    kept: list[int] = []


def _keep(rank, world_size):
    Keeper.kept.append(rank)


def _remember(rank, world_size):
    Keeper.more = 1


def _leave_a_thread(rank, world_size):
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()


def _leave_a_process(rank, world_size):
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "30"])


def _leave_a_file(rank, world_size):
    os.open("open", os.O_CREAT | os.O_RDWR)


def _leave_a_mode(rank, world_size):
    torch.device("meta").__enter__()


def _replace_a_module(rank, world_size):
    sys.modules["json"] = sys


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (_patch, "lightning_zero.engine.Engine.step"),
        (_patch_on_rank_1, "os.getpid"),
        (_keep, "tests.distributed.test_ranks.Keeper.kept"),
        (_remember, "tests.distributed.test_ranks.Keeper.more"),
        (_leave_a_thread, "threads"),
        (_leave_a_process, "processes"),
        (_leave_a_file, "open files"),
        (_leave_a_mode, "torch function modes"),
        (_replace_a_module, "sys.modules['json']"),
    ],
)
def test_ranks_that_cannot_be_as_before_are_replaced(function, name, tmp_path, monkeypatch):
    before = {*run_ranks(2, _pid)}
    monkeypatch.setenv(TRACES, str(tmp_path / "traces"))
    run_ranks(2, function)
    assert name in (tmp_path / "traces").read_text()
    assert not before & {*run_ranks(2, _pid)}


def _train(rank, world_size, stage):
    module = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    engine = lightning_zero.Engine(module, [optimizer], ZeroConfig(stage=stage))
    engine.backward(module(torch.ones(1, 4)).sum())
    engine.step()
    return os.getpid()


def test_training_leaves_nothing_behind():
    pids = run_ranks(2, _pid)
    for stage in (1, 3):
        assert run_ranks(2, _train, stage) == pids
