"""Waits for other ranks end with the cause, and long waits report the status of every rank."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero import Engine, ZeroConfig
from lightning_zero.core import order
from lightning_zero.health import link, reports, thread
from lightning_zero.health import watchdog as watchdogs
from lightning_zero.health.exits import describe_exit
from lightning_zero.health.failures import DesynchronizedError, PeerFailedError
from lightning_zero.health.reports import report
from lightning_zero.health.waits import Line, RankStatus, user_lines
from lightning_zero.health.watchdog import Watchdog
from lightning_zero.health.world import disconnect_groups
from tests.support.fitting import make_trainer, settings
from tests.support.models import MLPModule
from tests.support.ranks import RankError, free_port, run_ranks
from tests.support.waits import PACE, Pace, report_waits_after


@pytest.fixture(scope="module")
def waited():
    """Runs the calls of `_WAITING`, all at the same time; a function of a call and its results."""
    with ThreadPoolExecutor(len(_WAITING)) as pool:
        begun = {
            call: pool.submit(run_ranks, *call, has_group=call[1] is not _open_slowly)
            for call in _WAITING
        }
        yield lambda *call: begun[call].result()


def _error_of(action):
    """Returns the error of `action`, as text, and the seconds that it took."""
    start = time.monotonic()
    try:
        action()
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, PeerFailedError) and error.__cause__ is not None:
            text += " with the error of the transport in its traceback"
        return text, time.monotonic() - start
    return "", time.monotonic() - start


def _engine(stage=1, **options):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    optimizer = torch.optim.AdamW(module.parameters())
    engine = Engine(module, [optimizer], ZeroConfig(stage=stage), **options)
    return engine, lambda: engine.backward(module(torch.ones(2, 6)).square().mean())


# ---------------------------------------------------------------- failures


class FaultyModule(MLPModule):
    def __init__(self, fault, num_workers=0, **kwargs):
        super().__init__(**kwargs)
        self.fault, self.num_workers = fault, num_workers

    def train_dataloader(self):
        data = list(super().train_dataloader())
        return DataLoader(data, batch_size=None, num_workers=self.num_workers)

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            self.fault()
        return super().training_step(batch, batch_idx)


def _raise():
    raise ArithmeticError("out of luck")


def _fit_with_fault(rank, world_size, stage, fault, num_workers):
    module = FaultyModule(fault, num_workers, ranks=world_size)
    trainer = make_trainer(settings(stage), limit_train_batches=3)
    return _error_of(lambda: trainer.fit(module))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_an_exception_beside_workers_of_a_data_loader_ends_all_ranks(stage):
    first, second = run_ranks(2, _fit_with_fault, stage, _raise, 1, has_group=False)
    assert second[0] == "ArithmeticError: out of luck"
    assert first[0].startswith("PeerFailedError: rank 0 stops because rank 1 raised Arithmetic")
    assert "out of luck" in first[0]


class GatheringModule(FaultyModule):
    """Rank 0 waits in a collective of its own while rank 1 raises."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 0:
            dist.all_reduce(torch.ones(1))
        return super().training_step(batch, batch_idx)


def _fit_gathering(rank, world_size):
    Pace()
    watchdogs._BUSY_S *= PACE  # rank 0 is in no wait of ours
    trainer = make_trainer(settings(1), limit_train_batches=3)
    return _error_of(lambda: trainer.fit(GatheringModule(_raise, ranks=world_size)))


def test_an_exception_while_another_rank_is_in_a_collective_of_the_user_ends_both_soon():
    first, second = run_ranks(2, _fit_gathering, has_group=False)
    assert second[0] == "ArithmeticError: out of luck"
    assert first[0].startswith("RuntimeError"), "its connections are closed"
    assert max(first[1], second[1]) < 8


class _NothingOnRank0(IterableDataset):
    def __iter__(self):
        return iter([] if dist.get_rank() == 0 else [[torch.ones(4, 8), torch.ones(4, 3)]] * 3)


class EmptyModule(MLPModule):
    def train_dataloader(self):
        return DataLoader(_NothingOnRank0(), batch_size=None)

    def training_step(self, batch, batch_idx):
        loss = self.part_loss(batch, self.global_rank)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss


def _fit_empty(rank, world_size, stage):
    Pace()
    trainer = make_trainer(settings(stage))
    return _error_of(lambda: trainer.fit(EmptyModule(ranks=world_size)))


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_without_any_batch_is_an_error_on_all_ranks(stage):
    for error, seconds in run_ranks(2, _fit_empty, stage, has_group=False):
        assert re.search("; not every rank did|another rank reached a different call", error), error
        assert seconds < 20


def _norm_alone(rank, world_size, stage, moment):
    Pace()
    engine, backward = _engine(stage)
    weight = engine.module[1].weight

    def step():
        backward()
        if rank == 0 and moment == "before":
            weight.grad.norm()
        engine.step()
        if rank == 0 and moment == "after":
            weight.grad.norm()
        engine.zero_grad()

    return _error_of(lambda: [step() for _ in range(3)])


@pytest.mark.default_cases("3-after")
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_norm_of_a_sharded_gradient_on_one_rank_alone_is_an_error_on_all(stage, moment):
    for error, _ in run_ranks(2, _norm_alone, stage, moment, timeout_s=30):
        texts = "; not every rank did|another rank reached a different call|waits in its backward"
        assert re.search(texts, error), error


class FailingSetupModule(MLPModule):
    """Fails on `failing` ranks in `setup`, while the others wait for them on the default group."""

    def __init__(self, failing, **kwargs):
        super().__init__(**kwargs)
        self.failing = failing

    def setup(self, stage):
        if self.global_rank in self.failing:
            raise ArithmeticError("out of luck")
        self.trainer.strategy.barrier("mine")


def _fail_at_setup_and_live(rank, world_size):
    trainer = make_trainer(settings(1))
    outcome = _error_of(lambda: trainer.fit(FailingSetupModule([1], ranks=world_size)))
    if rank == 1:
        time.sleep(10)  # its connections stay open
    return outcome


@pytest.mark.slow
def test_a_rank_that_fails_before_there_is_an_engine_and_lives_on_ends_the_waits_of_others():
    first, _ = run_ranks(2, _fail_at_setup_and_live, has_group=False, timeout_s=40)
    assert first[0].endswith("rank 0 stops because rank 1 raised ArithmeticError: out of luck")
    assert first[1] < 8


class LateModule(MLPModule):
    """Waits for a late rank in collectives that are not the engine's."""

    def training_step(self, batch, batch_idx):
        time.sleep(self.global_rank)
        dist.barrier()
        total = dist.ReduceOp(dist.ReduceOp.SUM)  # its text differs by rank
        self.trainer.strategy.reduce(torch.ones(()), reduce_op=total)
        return super().training_step(batch, batch_idx)


def _fail_then_fit(rank, world_size):
    trainer = make_trainer(settings(1))
    failing = range(world_size)
    first, _ = _error_of(lambda: trainer.fit(FailingSetupModule(failing, ranks=world_size)))
    time.sleep(2.5)
    trainer = make_trainer(settings(1), limit_train_batches=3)
    second, _ = _error_of(lambda: trainer.fit(LateModule(ranks=world_size)))
    return first, second, [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
def test_the_watchdog_of_a_failed_run_does_not_end_the_next_run_of_another_trainer():
    for first, second, threads in run_ranks(2, _fail_then_fit, has_group=False):
        assert first == "ArithmeticError: out of luck"
        assert second == ""
        assert threads.count("lightning-zero-watchdog") == 1


def _disconnect_while_waiting(rank, world_size):
    dist.init_process_group()  # with one backend per device type
    group = dist.new_group()
    dist.barrier(group=group)
    if rank == 0:
        threading.Timer(1.0, disconnect_groups, [[group]]).start()
        outcome = _error_of(lambda: dist.all_reduce(torch.ones(1), group=group))
    else:
        time.sleep(5)
        outcome = None
    dist.destroy_process_group()
    return outcome


@pytest.mark.slow
def test_a_group_with_a_backend_for_each_device_type_is_disconnected():
    (error, seconds), _ = run_ranks(2, _disconnect_while_waiting, has_group=False)
    assert error.startswith("RuntimeError")
    assert seconds < 4


# ---------------------------------------------------------------- reports


class SlowModule(MLPModule):
    """Rank 1 is late by three times a long wait, once."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            self.dawdle()
        return super().training_step(batch, batch_idx)

    def dawdle(self):
        time.sleep(3 * PACE)


def _fit_slowly(rank, world_size, stage):
    with open("err", "w") as file:
        if rank == 0:
            os.dup2(file.fileno(), 2)
    report_waits_after(PACE)
    trainer = make_trainer(settings(stage), limit_train_batches=3)
    trainer.fit(SlowModule(ranks=world_size))
    with open("err") as file:
        return file.read()


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_long_wait_reports_once_what_every_rank_is_doing(stage):
    text = run_ranks(2, _fit_slowly, stage, has_group=False)[0]
    waited = f"has waited {PACE:g} s for other ranks; what every rank is doing:"
    assert text.count(waited) == 1, text
    late = next(line for line in text.splitlines() if line.startswith("  rank 1:"))
    assert "waits for no other rank" in late
    waiting = next(line for line in text.splitlines() if line.startswith("  rank 0:"))
    assert "waits for" in waiting
    assert "test_watchdog.py" in text
    assert "in dawdle" in text


def test_a_long_wait_for_a_rank_that_opens_a_checkpoint_is_reported(waited):
    text = waited(2, _open_slowly)[0]
    assert "rank 0: outside of the engine; waits for all ranks to open a.ckpt" in text, text


def _open_slowly(rank, world_size):
    import lightning_zero.checkpoint.source as checkpoints

    trainer = make_trainer(settings(1))
    trainer.fit(MLPModule(ranks=world_size))
    trainer.save_checkpoint("a.ckpt")
    trainer.strategy.barrier()
    open_checkpoint = checkpoints.open_checkpoint

    def open_late(*args, **options):
        time.sleep(3 * PACE)
        return open_checkpoint(*args, **options)

    if rank == 1:
        checkpoints.open_checkpoint = open_late
    with open("err", "w") as file:
        if rank == 0:
            os.dup2(file.fileno(), 2)
    report_waits_after(PACE)
    trainer = make_trainer(settings(1), max_epochs=2)
    trainer.fit(MLPModule(ranks=world_size), ckpt_path="a.ckpt")
    with open("err") as file:
        return file.read()


def _take_branches(rank, world_size, pace=PACE):
    Pace(pace).report_after(1.0)
    engine, _ = _engine(3)
    first, second = engine.module

    def step():
        with engine.forward_context():
            if rank == 0:
                first(torch.ones(2, 6))
                dist.all_reduce(torch.ones(2))
            else:
                second(torch.ones(2, 6))
                first(torch.ones(2, 6))

    return _error_of(step)


def test_a_collective_of_the_user_in_a_branch_of_one_rank_ends_with_an_error(waited):
    _assert_a_branch_is_named(waited(2, _take_branches))


def _assert_a_branch_is_named(errors):
    assert "all ranks wait for each other" in errors[1][0], errors
    assert "torch.distributed.all_reduce" in errors[1][0]
    assert "lightning_zero.before_collective(module)" in errors[1][0]
    assert errors[0][0], "the collective of rank 0 is ended"


def _scatter_in_backward(rank, world_size, first_use):
    Pace().report_after(1.0)
    engine, _ = _engine(3)
    first, _ = engine.module

    def scatter(grad):
        for source in range(world_size):
            parts = [torch.ones(1)] * world_size if rank == source else None
            dist.scatter(torch.empty(1), parts, source)

    def train():
        for step in range(4):
            with engine.forward_context():
                output = engine.module(torch.ones(2, 6)) * 1  # so that its hook is the first
                output.register_hook(scatter)
                loss = output.square().mean()
                if rank == 1 and step >= first_use:
                    loss = loss + first.weight.sum()
            engine.backward(loss)

    return _error_of(train)


@pytest.mark.parametrize("first_use", [0, 3], ids=["negotiated", "replayed"])
def test_a_one_way_collective_that_another_rank_has_not_reached_ends_with_an_error(
    first_use, waited
):
    errors = waited(2, _scatter_in_backward, first_use)
    assert "all ranks wait for each other" in errors[1][0], errors
    assert "rank 0: in backward of 1; waits for torch.distributed.scatter" in errors[1][0]
    assert "rank 1: in forward of 1; waits for the all" in errors[1][0]
    assert errors[0][0], "the collective of rank 0 is ended"


def _use_other_engines(rank, world_size):
    Pace().report_after(1.0)
    engines, backwards = zip(*[_engine(3) for _ in range(2)], strict=True)
    outcome = _error_of(backwards[rank])
    del engines  # until here
    return outcome


def test_ranks_that_wait_in_different_engines_end_with_an_error(waited):
    errors = waited(2, _use_other_engines)
    for error, _ in errors:
        assert "all ranks wait for each other" in error, errors
        assert ", of another module" in error


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def _wait_in_thread(rank, world_size):
    shown = _Lines()
    logging.getLogger("lightning_zero.health.reports").addHandler(shown)
    report_waits_after(0.5)
    watchdog = Watchdog(rank=rank, size=world_size)
    is_reported = Path("reported")
    deadline = time.monotonic() + 20

    def wait():
        while not is_reported.exists() and time.monotonic() < deadline:
            if shown.lines:
                is_reported.touch()
            time.sleep(0.05)

    def wait_for_layer():
        with watchdog.waiting("the gather of a layer"):
            wait()

    if rank == 1:
        thread = threading.Thread(target=wait_for_layer)
        thread.start()
        thread.join()
    else:
        wait()
    time.sleep(PACE)  # one rank alone reports
    return "".join(shown.lines)


def test_a_wait_in_another_thread_is_reported_by_rank_0_alone():
    text, nothing = run_ranks(2, _wait_in_thread)
    assert "rank 1 has waited 0.5 s for other ranks" in text
    assert "waits for the gather of a layer" in text
    assert "no answer" not in text
    assert not nothing


def _receive_beside_ended(rank, world_size, pace=PACE):
    waits = Pace(pace)
    watchdog = Watchdog(rank=rank, size=world_size)
    if rank == 0:
        box = torch.zeros(1)
        dist.recv(box, src=2)
        return float(box)
    if rank == 1:
        watchdog._thread.end_with_process()
    waits.sleep(7)  # longer than it takes to miss a rank, and to close the connections
    if rank == 2:
        dist.send(torch.ones(1), dst=0)
    return None


def test_a_receive_continues_after_a_rank_other_than_the_sender_has_ended(waited):
    assert waited(3, _receive_beside_ended)[0] == 1


class _SlowToLoad:
    def __reduce__(self):
        return time.sleep, (7 * PACE,)


def _load_beside_ended(rank, world_size):
    Pace()
    watchdog = Watchdog(rank=rank, size=world_size)
    objects = [None, None] if rank == 0 else None
    dist.gather_object(_SlowToLoad() if rank else None, objects)
    if rank == 1:
        watchdog._thread.end_with_process()
    dist.barrier()  # the connections are open
    return objects


def test_a_rank_that_loads_what_it_was_sent_does_not_wait_for_the_sender(waited):
    assert waited(2, _load_beside_ended)[0] == [None, None]


def _barrier_beside_broadcast(rank, world_size):
    waits = Pace()
    waits.report_after(0.5)
    watchdog = Watchdog(rank=rank, size=world_size)
    if rank == 0:
        dist.barrier()
    else:
        with watchdog.waiting("an object of rank 0", is_one_way=True):
            waits.sleep(4)  # such as loading data
        dist.barrier()
    return watchdog.failure


def test_a_barrier_after_an_unfinished_broadcast_of_others_is_no_mutual_wait(waited):
    assert waited(2, _barrier_beside_broadcast) == [None, None]


def test_calls_of_the_package_are_not_the_users():
    mine, pattern = Line(__file__, "3", "mine"), Line(re.__file__, "4", "match")
    stack = [Line(order.__file__, "1", "ask"), pattern, mine, Line("<string>", "5", "<module>")]
    assert user_lines(stack) == (f"{__file__}:3 in mine",)


_READ_FRAMES_WHILE_GARBAGE_IS_COLLECTED = """
import gc, sys, threading, time
from lightning_zero.health.waits import stack_of

main = threading.get_ident()
exec("def leave_nulls(): return 0; " + "=".join(f"local{i}" for i in range(300)) + "=None")

class Garbage:
    def __init__(self):
        self.cycle = self

def call(num):
    garbage = Garbage()
    return call(num - 1) if num else leave_nulls()

def look():
    while not has_ended:
        assert stack_of(main)

has_ended = False
gc.set_threshold(3)
gc.callbacks.append(lambda *args: time.sleep(5e-4) if threading.get_ident() != main else None)
sys.setswitchinterval(1e-5)
thread = threading.Thread(target=look)
thread.start()
until = time.monotonic() + 1
while time.monotonic() < until:
    call(4)
    leave_nulls()
has_ended = True
thread.join()
"""


def _execute(rank, world_size, program):
    exec(program, {})


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="only Python 3.11 collects garbage there"
)
def test_frames_of_a_running_thread_are_read_while_garbage_is_collected():
    run_ranks(1, _execute, _READ_FRAMES_WHILE_GARBAGE_IS_COLLECTED, has_group=False)


def test_a_report_groups_ranks_with_equal_status():
    same = RankStatus(
        "in forward of blocks.1", "the gather of blocks.1", 31.0, False, ("a.py:3 in f",)
    )
    text = report("what:", [same, same, None, same])
    assert text.splitlines() == [
        "what:",
        "  ranks 0-1, 3: in forward of blocks.1; waits for the gather of blocks.1 (31 s)",
        "    a.py:3 in f",
        "  rank 2: no answer: it has ended, is stopped, or its node cannot be reached",
    ]


# ---------------------------------------------------------------- the watchdog itself


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("os._exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("sys.exit(3)", "ended with exit code 3"),
        ("raise ArithmeticError('out of luck')", "raised ArithmeticError: out of luck"),
        ("sys.exit()", "reached the end of its script"),
    ],
)
def test_a_rank_started_by_hand_that_dies_is_named_by_those_that_wait_for_it(code, text, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.replace("DIE", code))
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(script), str(tmp_path / "store")]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    _, errors = ranks[0].communicate(timeout=60)
    ranks[1].communicate()
    assert f"PeerFailedError: rank 0 stops because rank 1 {text}" in errors, errors


_SCRIPT = """
import os, sys, torch, torch.distributed as dist
from lightning_zero import Engine, ZeroConfig
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
module = torch.nn.Linear(4, 4)
engine = Engine(module, [torch.optim.SGD(module.parameters())], ZeroConfig(stage=1))
if rank == 1:
    pid = os.fork()  # as a data loader does; the child keeps the connections open
    if pid == 0:
        import time; time.sleep(8); os._exit(0)
    DIE
engine.backward(module(torch.ones(2, 4)).sum())
"""


def _wait_for_a_rank_that_has_left(rank, world_size, port):
    """Rank 1 is in its last collective when rank 0 ends, a child whose status is not read."""
    waits = Pace()
    is_first = os.fork() == 0
    rank = 0 if is_first else 1
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=is_first)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    engine, backward = _engine()
    if is_first:
        os._exit(0)
    control = engine.comm.control
    with control.waiting("the last collective"):
        waits.sleep(2)  # longer than the watchdog needs to see the end of the process
    found = control.watchdog.failure
    return found, *_error_of(backward)


def test_a_rank_that_ends_with_0_is_a_failure_only_where_another_still_waits_for_it():
    ((found, text, seconds),) = run_ranks(
        1, _wait_for_a_rank_that_has_left, free_port(), has_group=False
    )
    assert found is None
    assert "rank 1 stops because rank 0 ended with exit code 0" in text
    assert seconds < 10


def _die_with_the_store(rank, world_size, pace=PACE):
    Pace(pace)
    _, backward = _engine()
    if rank == 0:
        if os.fork() == 0:  # as a data loader does; the child keeps the connections open
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    text, seconds = _error_of(backward)
    raise AssertionError(f"{text} after {seconds:.0f} seconds")


def test_a_rank_that_dies_with_the_store_while_its_forks_hold_the_connections_is_named(waited):
    _assert_the_dead_rank_is_named(waited, 2, _die_with_the_store)


def _assert_the_dead_rank_is_named(run, *call):
    with pytest.raises(RankError) as caught:
        run(*call)
    # The exit status can be read for a moment only: the parent process reads it, too.
    text = "PeerFailedError: rank 1 stops because rank 0 (was killed by SIGKILL|has died)"
    assert re.search(text + r".* after (\d|1[0-4]) seconds", str(caught.value), re.DOTALL)


def _make_a_group_alone(rank, world_size, port):
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    watchdog = Watchdog(rank=rank, size=world_size)
    dist.barrier()
    if rank == 1:
        time.sleep(1)
        watchdog.abort(ArithmeticError("out of luck"))
        return None
    failing = pytest.raises(PeerFailedError)
    with failing as caught:
        watchdog.run("a process group", dist.new_group, None)
    return str(caught.value)


@pytest.mark.slow
def test_a_wait_in_the_store_for_a_rank_that_has_failed_ends_with_its_error():
    text = "rank 0 stops because rank 1 raised ArithmeticError: out of luck"
    assert run_ranks(2, _make_a_group_alone, free_port(), has_group=False)[0] == text


def _speak_as_a_stranger(rank, world_size):
    shown = _Lines()
    logging.getLogger("lightning_zero.health.link").addHandler(shown)
    watchdog = Watchdog(rank=rank, size=world_size)
    if rank == 1:
        store = dist.distributed_c10d._get_default_store()
        port = json.loads(store.get("lightning_zero/link/1"))["port"]
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n")
            assert stranger.recv(1) == b""
        watchdog._thread._link._connections[0].send(b'{"kind": "dea\xff\n[]\n{"kind": "abort"}\n')
        watchdog.abort(ArithmeticError("out of luck"))
    error, _ = _error_of(lambda: _wait_for_failure(watchdog))
    return error, "".join(shown.lines)


def test_what_no_rank_can_have_sent_is_skipped_and_logged():
    (error, logged), _ = run_ranks(2, _speak_as_a_stranger)
    assert error == (
        "PeerFailedError: rank 0 stops because rank 1 raised ArithmeticError: out of luck"
    )
    assert "a connection that is not from a rank of this job is closed" in logged
    assert "is not readable and is skipped" in logged


def _send_many(rank, world_size):
    watchdog = Watchdog(rank=rank, size=world_size)
    if rank == 1:
        for number in range(2000):
            watchdog._thread.send({"kind": "end", "rank": 1, "text": str(number)})
    watchdog.first_with("a traceback")  # answered by rank 0 after all that is above
    dist.barrier()
    before = len(os.listdir("/proc/self/fd"))
    dist.barrier()  # stopping closes the connection on the other rank, too
    watchdog._thread.stop()
    num_closed = before - len(os.listdir("/proc/self/fd"))
    return watchdog._thread.exits.by_rank[1].text, watchdog._thread.is_alive(), num_closed


def test_many_entries_at_once_do_not_block_and_the_thread_can_be_stopped():
    # The selector, its two wakers, a connection and a process; and on rank 0 the listener.
    assert run_ranks(2, _send_many) == [("0", False, 6), ("0", False, 5)]


def _die_on_another_node(rank, world_size, pace=PACE):
    Pace(pace)
    link.node_of_process = thread.node_of_process = lambda: f"node {rank}"
    engine, backward = _engine()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with engine.comm.control.waiting("a rank that is never named by its connection"):
        while engine.comm.control.watchdog.failure is None:
            time.sleep(0.05)
    raise AssertionError(_error_of(backward)[0])


def test_a_death_on_another_node_is_known_by_its_connection():
    with pytest.raises(RankError, match=r"rank [02] stops because rank 1 has died"):
        run_ranks(3, _die_on_another_node, timeout_s=30)


def _miss_rank_0(rank, world_size):
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=1))
    outcome = _error_of(_engine) if rank else None
    dist.barrier()
    return outcome


def test_a_rank_0_without_an_engine_is_named():
    _, (error, _) = run_ranks(2, _miss_rank_0)
    assert error.startswith("RuntimeError: rank 1 waits for rank 0, which has not set up"), error


def _stop_and_wait(rank, world_size):
    """Stops rank 0, which has the store; rank 1 continues it in the end."""
    dist.init_process_group("gloo")
    shown = _Lines()
    logging.getLogger("lightning_zero.health").addHandler(shown)
    Pace().report_after(0.5)
    reports._ANSWER_S *= PACE
    watchdog = Watchdog(rank=rank, size=world_size)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        watchdog.stop()
        return None
    timer = threading.Timer(2.5, os.kill, (pids[0], signal.SIGCONT))
    timer.start()
    with watchdog.waiting("the other rank"):
        while watchdog.failure is None and timer.is_alive():
            time.sleep(0.05)
    failure = watchdog.failure
    timer.join()
    watchdog.stop()
    return failure, "\n".join(shown.lines)


def test_a_rank_that_rank_0_does_not_answer_reports_so_itself_and_goes_on():
    _, (failure, logged) = run_ranks(2, _stop_and_wait, has_group=False)
    assert "rank 0 does not answer: its process is stopped, or its node cannot be reached" in logged
    assert "waits for the other rank" in logged
    assert failure is None


def _wait_for_failure(watchdog):
    with watchdog.waiting("the other rank"):
        watchdog._thread.wait_for(lambda: watchdog._raised_at is not None, 20)
        raise RuntimeError("Connection closed by peer")


def test_exit_codes_are_described_in_words():
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-40) == "was killed by signal 40"
    assert describe_exit(3) == "ended with exit code 3"


def test_an_error_of_this_rank_alone_is_not_reported_as_a_timeout_of_others():
    watchdog = Watchdog(rank=0, size=1)
    with pytest.raises(RecursionError, match="too deep"), watchdog.waiting("an object"):
        raise RecursionError("too deep")
    expected = pytest.raises(DesynchronizedError, match="without success")
    with expected, watchdog.waiting("an object"):
        raise RuntimeError("Timed out waiting 3000ms for recv operation to complete")


def test_there_is_nothing_to_watch_without_other_ranks():
    watchdog = Watchdog(rank=0, size=1)
    with watchdog.waiting("an object"):
        pass
    with pytest.raises(PeerFailedError), watchdog.waiting("an object"):
        raise PeerFailedError
    watchdog.finish()
    watchdog.stop()


_WAITING = [
    (3, _receive_beside_ended),
    (2, _load_beside_ended),
    (2, _die_with_the_store),
    (2, _open_slowly),
    (2, _barrier_beside_broadcast),
    (2, _take_branches),
    (2, _scatter_in_backward, 0),
    (2, _scatter_in_backward, 3),
    (2, _use_other_engines),
]


@pytest.mark.slow
def test_a_receive_continues_beside_an_ended_rank_in_a_users_time():
    assert run_ranks(3, _receive_beside_ended, 1.0)[0] == 1


@pytest.mark.slow
def test_a_branch_with_a_collective_of_the_user_is_named_in_a_users_time():
    _assert_a_branch_is_named(run_ranks(2, _take_branches, 1.0))


@pytest.mark.slow
def test_a_rank_that_dies_with_the_store_is_named_in_a_users_time():
    _assert_the_dead_rank_is_named(run_ranks, 2, _die_with_the_store, 1.0)
