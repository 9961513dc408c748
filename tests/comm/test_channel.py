"""Channels: messages that fail on all ranks or on none, also from a background thread."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch

from lightning_zero.comm.communicator import Communicator
from lightning_zero.health.together import run_on_all_ranks
from tests.support.ranks import RankError
from tests.support.warm import run_ranks


def _comm(timeout_s=60.0):
    return Communicator(torch.device("cpu"), timeout=timedelta(seconds=timeout_s))


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("world_size", [1, 3])
def test_values_arrive_on_rank_0_and_on_all_ranks(world_size):
    results = run_ranks(world_size, _send)
    assert [gathered for gathered, _, _ in results] == [
        list(range(world_size)),
        *[None] * (world_size - 1),
    ]
    assert {broadcast for _, broadcast, _ in results} == {"from 0"}
    assert results[0][2] == [rank * 10 for rank in range(world_size)]


def _send(rank, world_size):
    channel = _comm().control.open_channel()
    with channel.session():
        gathered = channel.gather(rank)
        return (
            gathered,
            channel.broadcast(f"from {rank}"),
            run_on_all_ranks(lambda: rank * 10, gather=channel.all_gather),
        )


def test_an_action_that_fails_on_one_rank_fails_on_all_and_the_channel_stays_usable():
    errors, gathered = zip(*run_ranks(3, _fail), strict=True)
    assert set(errors) == {(28, "[Errno 28] no space: 'there'")}
    assert gathered == ([0, 1, 2], None, None)


def _fail(rank, world_size):
    channel = _comm().control.open_channel()

    def action():
        if rank == 1:
            raise OSError(28, "no space", "there")

    with pytest.raises(OSError) as raised:
        run_on_all_ranks(action, gather=channel.all_gather)
    return (raised.value.errno, str(raised.value)), channel.gather(rank)


def test_ranks_that_fail_differently_raise_errors_of_one_kind():
    copied, named = zip(*run_ranks(4, _fail_differently), strict=True)
    first, third = "OSError: [Errno 28] no space", "OSError: [Errno 28] full"
    assert copied == (first, f"{first} from TypeError", third, f"{first} from None")
    text = f"OSError: [Errno 28] rank 0 could not write: {first}"
    assert named == (first, f"{text} from TypeError", third, f"{text} from None")


def _fail_differently(rank, world_size):
    channel = _comm().control.open_channel()
    failures = [OSError(28, "no space"), TypeError("a number"), OSError(28, "full"), None]

    def fail():
        if failures[rank] is not None:
            raise failures[rank]

    texts = []
    for what in (None, "write"):
        with pytest.raises(OSError) as raised:
            run_on_all_ranks(fail, gather=channel.all_gather, what=what)
        text = f"{type(raised.value).__name__}: {raised.value}"
        cause = raised.value.__cause__
        if isinstance(cause, RuntimeError):
            assert str(cause) == "rank 0 raised OSError: [Errno 28] no space"
            cause = None
        own = raised.value is failures[rank]
        texts.append(text if own else f"{text} from {type(cause).__name__ if cause else None}")
    return tuple(texts)


def test_an_interruption_does_not_hide_what_has_failed_on_another_rank():
    assert run_ranks(3, _fail_beside_an_interruption) == [
        "KeyboardInterrupt: ",
        "OSError: [Errno 28] no space",
        "OSError: [Errno 28] rank 1 could not write: OSError: [Errno 28] no space",
    ]


def _fail_beside_an_interruption(rank, world_size):
    channel = _comm().control.open_channel()
    failures = [KeyboardInterrupt(), OSError(28, "no space"), None]

    def fail():
        if failures[rank] is not None:
            raise failures[rank]

    try:
        run_on_all_ranks(fail, gather=channel.all_gather, what="write")
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


class _TwoArgumentsError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def test_an_error_that_cannot_be_copied_is_described():
    assert run_ranks(2, _fail_alone) == [
        "RuntimeError: rank 1 raised _TwoArgumentsError: one and two",
        "_TwoArgumentsError: one and two",
    ]


def _fail_alone(rank, world_size):
    channel = _comm().control.open_channel()

    def fail():
        if rank == 1:
            raise _TwoArgumentsError("one", "two")

    try:
        run_on_all_ranks(fail, gather=channel.all_gather)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_rank_that_dies_is_an_error_on_the_others_at_once():
    start = time.monotonic()
    with pytest.raises(RankError) as raised:
        run_ranks(3, _die)
    assert str(raised.value).count("RuntimeError") >= 2
    assert "did not return" not in str(raised.value)
    assert time.monotonic() - start < 20


def _die(rank, world_size):
    channel = _comm().control.open_channel()
    channel.gather(rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run_on_all_ranks(lambda: rank, gather=channel.all_gather)
    run_on_all_ranks(lambda: rank, gather=channel.all_gather)


def test_aborting_ends_the_wait_of_the_others_but_not_a_session_in_progress():
    run_ranks(2, _abort_between_sessions, timeout_s=30)


def _abort_between_sessions(rank, world_size):
    comm = _comm()
    channel = comm.control.open_channel()
    results = []
    go_on = threading.Event()

    def exchange():
        with channel.session():
            results.append(channel.broadcast(rank))
            go_on.wait()
            results.append(channel.broadcast(rank + 1))

    thread = threading.Thread(target=exchange)
    thread.start()
    while not results:
        time.sleep(0.01)
    if rank == 1:
        comm.abort()
        comm.close()
        assert not channel.is_open
    go_on.set()
    thread.join()
    assert results == [0, 1]
    if rank == 0:
        with pytest.raises(RuntimeError), channel.session():
            run_on_all_ranks(lambda: None, gather=channel.all_gather)
