"""What the clocks find, and what they let pass."""

import pytest

from tests.streams.clocks import COMPUTE, HOST, Clocks

SIDE = 1
MEMORY = 7
ALL_BYTES = [(MEMORY, 0, 100)]


@pytest.fixture
def clocks():
    clocks = Clocks(lambda: "here")
    clocks.allocate(MEMORY, COMPUTE)
    clocks.use(COMPUTE, (), ALL_BYTES, "fill")
    return clocks


def kinds(clocks):
    return [text.split(":")[0] for text in clocks.problems]


def test_a_read_that_does_not_wait_for_a_write_is_a_race(clocks):
    clocks.use(SIDE, ALL_BYTES, (), "copy")
    assert kinds(clocks) == ["RACE"]


def test_a_read_after_the_event_of_a_write_is_none(clocks):
    clocks.record(1, COMPUTE)
    clocks.wait(SIDE, 1)
    clocks.use(SIDE, ALL_BYTES, (), "copy")
    assert clocks.num_checks == 1
    assert kinds(clocks) == []


def test_an_event_from_before_the_write_is_no_wait_for_it(clocks):
    clocks.record(1, COMPUTE)
    clocks.use(COMPUTE, (), ALL_BYTES, "fill")
    clocks.wait(SIDE, 1)
    clocks.use(SIDE, ALL_BYTES, (), "copy")
    assert kinds(clocks) == ["RACE"]


def test_a_write_beside_a_read_is_a_race_and_two_reads_are_none(clocks):
    clocks.synchronize([COMPUTE], "wait")
    clocks.use(SIDE, ALL_BYTES, (), "read")
    clocks.use(COMPUTE, ALL_BYTES, (), "read")
    assert kinds(clocks) == []
    clocks.use(COMPUTE, (), ALL_BYTES, "fill")
    assert kinds(clocks) == ["RACE"]


def test_other_bytes_of_the_same_memory_are_no_race(clocks):
    clocks.synchronize([COMPUTE], "wait")
    clocks.use(SIDE, (), [(MEMORY, 0, 50)], "fill")
    clocks.use(COMPUTE, [(MEMORY, 50, 100)], (), "read")
    assert kinds(clocks) == []


def test_what_the_host_has_waited_for_comes_before_all_that_it_queues_then(clocks):
    clocks.synchronize([COMPUTE], "wait")
    clocks.use(SIDE, ALL_BYTES, (), "copy")
    assert kinds(clocks) == []
    assert clocks.syncs == {"wait [here]": 1}


def test_the_host_reads_what_is_on_its_way_too_early(clocks):
    clocks.use(HOST, ALL_BYTES, (), "look")
    assert kinds(clocks) == ["RACE"]


def test_memory_goes_back_to_its_pool_while_another_stream_reads_it(clocks):
    clocks.record(1, COMPUTE)
    clocks.wait(SIDE, 1)
    clocks.use(SIDE, ALL_BYTES, (), "copy")
    clocks.free(MEMORY)
    assert kinds(clocks) == ["FREE"]


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "waited for"])
def test_memory_is_reused_after_a_wait_or_when_the_allocator_waits(clocks, is_recorded):
    clocks.record(1, COMPUTE)
    clocks.wait(SIDE, 1)
    clocks.use(SIDE, ALL_BYTES, (), "copy")
    if is_recorded:
        clocks.guard(MEMORY, SIDE)
    else:
        clocks.record(2, SIDE)
        clocks.wait(COMPUTE, 2)
    clocks.free(MEMORY)
    assert kinds(clocks) == []


def test_memory_of_the_cpu_goes_while_a_copy_reads_it(clocks):
    clocks.allocate(8, HOST)
    clocks.use(HOST, (), [(8, 0, 4)], "fill")
    clocks.use(SIDE, [(8, 0, 4)], (), "copy")
    clocks.free(8)
    assert kinds(clocks) == ["FREE-PINNED"]


def test_a_race_with_a_use_that_others_have_come_after_is_still_found(clocks):
    clocks.use(COMPUTE, ALL_BYTES, (), "read")  # covers the write, on its own stream only
    clocks.use(SIDE, ALL_BYTES, (), "copy")
    assert kinds(clocks) == ["RACE"]


def test_compute_runs_beside_a_stream_until_it_waits_for_its_last_operation(clocks):
    clocks.allocate(8, SIDE)
    clocks.use(SIDE, (), [(8, 0, 4)], "copy")
    clocks.record(1, SIDE)
    clocks.use(COMPUTE, ALL_BYTES, (), "read")
    clocks.use(COMPUTE, ALL_BYTES, (), "read")
    clocks.wait(COMPUTE, 1)
    clocks.use(COMPUTE, ALL_BYTES, (), "read")
    assert clocks.beside == {SIDE: 2}


def test_an_event_is_known_once_the_host_comes_after_it_or_if_it_is_after_nothing(clocks):
    assert clocks.is_known(1)
    clocks.record(1, COMPUTE)
    assert not clocks.is_known(1)
    clocks.synchronize([COMPUTE], "wait")
    assert clocks.is_known(1)
