"""Interrupted and aborted collectives, on the rank itself and on its peers."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm.backends import GlooBackend
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.fake import FakeCommunicator, fake_world
from lightning_zero.health.failures import PeerFailedError
from lightning_zero.record.spans import Kind
from tests.support.ranks import run_ranks
from tests.support.waits import Pace


class Interrupted:
    """The last work of a collective: interrupted by Ctrl-C after all others are done."""

    def wait(self):
        raise KeyboardInterrupt


def _wait_twice(rank, world_size):
    exchange = GlooBackend(dist.new_group(timeout=timedelta(seconds=5)), rank, world_size)
    gathered = torch.full((4,), float(rank))
    pending = exchange.all_gather(gathered)
    pending.works.append(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    pending.wait()
    return gathered.tolist()


def test_a_collective_whose_wait_was_interrupted_can_be_waited_for_again():
    for gathered in run_ranks(2, _wait_twice, timeout_s=20):
        assert gathered == [0, 0, 1, 1]


def _unequal_parts(rank, world_size):
    backend = GlooBackend(dist.new_group(), rank, world_size)
    split_sizes = [1, 4, 2]
    start = sum(split_sizes[:rank])
    gathered = torch.zeros(7)
    gathered[start : start + split_sizes[rank]] = rank + 1
    backend.all_gather(gathered, split_sizes=split_sizes).wait()
    sizes = [[0, 2, 1], [3, 1, 0], [0, 0, 0]]  # from each rank to each rank
    parts = torch.cat([torch.full((n,), 10.0 * rank + to) for to, n in enumerate(sizes[rank])])
    received = torch.empty(sum(of_rank[rank] for of_rank in sizes))
    numels = [of_rank[rank] for of_rank in sizes]
    backend.all_to_all(received, parts, numels, sizes[rank]).wait()
    return gathered.tolist(), received.tolist()


def test_shards_of_different_lengths_are_gathered_and_parts_reach_their_ranks():
    gathered, received = zip(*run_ranks(3, _unequal_parts), strict=True)
    assert gathered == ([1, 2, 2, 2, 2, 3, 3],) * 3
    assert received == ([10, 10, 10], [1, 1, 11], [2])


def _abort_with_transfers(rank, world_size):
    comm = Communicator(torch.device("cpu"))
    comm.all_gather(torch.zeros(4)).wait()
    start = time.monotonic()
    if rank == 0:
        time.sleep(0.5)
        pending = comm.all_gather(torch.zeros(4))  # rank 1 never joins it
        comm.abort()
        time.sleep(4)
        return pending is not None
    with pytest.raises(RuntimeError):
        comm.reduce_scatter(torch.zeros(4), torch.zeros(2)).wait()
    return time.monotonic() - start


@pytest.mark.slow
def test_an_abort_reaches_the_peers_at_once_also_while_a_collective_is_held():
    _, seconds = run_ranks(2, _abort_with_transfers, timeout_s=30)
    assert seconds < 2.5


def _close_after_abort(rank, world_size):
    comm = Communicator(torch.device("cpu"))
    start = time.monotonic()
    if rank == 0:
        comm.abort()  # rank 1 sleeps and does not answer
        comm.close()
    else:
        time.sleep(4)
        with pytest.raises(RuntimeError):
            _run_round(comm)
        comm.close()
    return time.monotonic() - start


@pytest.mark.slow
def test_closing_after_an_abort_does_not_wait_for_a_rank_that_does_not_answer():
    first, second = run_ranks(2, _close_after_abort, timeout_s=30)
    assert first < 2
    assert second < 8


def _upload(rank, world_size):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    comm = Communicator(torch.device("cpu"))
    comm.recorder.begin(0)
    # "meta" stands for a device with memory of its own.
    comm.all_gather(torch.empty(8, device="meta"), "a", source=torch.ones(4)).wait()
    recording = comm.recorder.end()
    comm.close()
    return [(span.kind, span.name) for span in recording.spans if not span.is_wait]


def test_a_shard_that_is_copied_to_the_device_is_recorded_with_its_name():
    (spans,) = run_ranks(1, _upload, has_group=False)
    assert sorted(spans, key=str) == [(Kind.ALL_GATHER, "a"), (Kind.TO_DEVICE, "a")]


def _run_round(comm):
    with comm.control.waiting("a round"):
        comm.control.run_round([1], b"")


CONTROL = {
    "run_round": _run_round,
    "union": lambda comm: comm.control.union([True, False]),
    "min_ints": lambda comm: comm.control.min_ints([1, 2, 3, 4, 5]),
    "gather_objects": lambda comm: comm.control.gather_objects("x"),
    "broadcast_object": lambda comm: comm.control.broadcast_object("x"),
    "gather_floats": lambda comm: comm.control.gather_floats([1.0]),
    "max_": lambda comm: comm.max_(torch.ones(2)),
}


def _abort_before_each(rank, world_size, is_early):
    Pace()
    seconds = {}
    for name, call in CONTROL.items():
        comm = Communicator(torch.device("cpu"))
        _run_round(comm)
        time.sleep(0.1 if is_early == (rank != 1) else 0.0)
        start = time.monotonic()
        if rank != 1:
            with pytest.raises(PeerFailedError, match="because rank 1 stopped"):
                call(comm)
        comm.abort()
        seconds[name] = time.monotonic() - start
        dist.barrier()  # on WORLD, which outlives them
    return seconds


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("is_early", [True, False])
def test_an_abort_is_the_cause_that_peers_raise_wherever_they_wait(is_early):
    for seconds in run_ranks(3, _abort_before_each, is_early, timeout_s=30):
        assert max(seconds.values()) < 2.0, seconds


def _simulate(rank, world_size):
    with fake_world(1, 3):
        control = FakeCommunicator(torch.device("cpu")).control
        return (
            control.broadcast_object("own"),
            control.gather_objects("own"),
            control.collect_objects("own"),
            control.gather_floats([1.5]),
        )


def test_a_simulated_rank_receives_its_own_objects_instead_of_uninitialized_memory():
    found = run_ranks(1, _simulate, has_group=False)
    assert found == [("own", ["own"] * 3, [], [[1.5]] * 3)]
