"""Jobs through a few buffers have the results of the same jobs in memory."""

import random
import signal
import time
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero.record.spans import Kind
from lightning_zero.tiers.memory import aligned_empty, make_buffers
from lightning_zero.tiers.nvme import NvmeStore
from lightning_zero.tiers.pipeline import FileRange, Pipeline
from tests.tiers.conftest import PAGE

NUM_PAGES = 6  # pages of each of two files


def run(pipeline, jobs, *functions):
    """Runs jobs with a function of the views for each; one for all if there is one."""
    pipeline.begin(jobs)
    for number in range(len(jobs)):
        with pipeline.next_job() as views:
            functions[number % len(functions)](views)


def do_nothing(views):
    """Changes nothing."""


PIECES = st.lists(
    st.tuples(
        st.integers(0, 1),  # file
        st.integers(0, NUM_PAGES - 1),  # first page
        st.integers(1, 2),  # pages
        st.booleans(),  # is written
        st.booleans(),  # is read
    ),
    min_size=1,
    max_size=2,
    unique_by=lambda piece: piece[0],
)
STEPS = st.lists(
    st.tuples(st.lists(PIECES, max_size=6), st.integers(0, 6), st.booleans()), max_size=5
)


class InMemory:
    """Runs the same jobs on tensors in memory."""

    def __init__(self):
        self.files = torch.zeros(2, NUM_PAGES * PAGE, dtype=torch.uint8)

    def run(self, job, value):
        for file, first, pages, is_written, is_read in job:
            stop = min(first + pages, NUM_PAGES) * PAGE
            old = self.files[file, first * PAGE : stop]
            if is_written:
                old.copy_(old * 3 + value if is_read else torch.full_like(old, value))


def pieces_of(job, files):
    return [
        FileRange(files[file], first * PAGE, (min(first + pages, NUM_PAGES) - first) * PAGE, w, r)
        for file, first, pages, w, r in job
    ]


def content(file):
    memory = aligned_empty(file.nbytes, pin=False)
    file.read(0, memory).wait()
    return memory


@pytest.mark.slow
@settings(max_examples=60)
@given(steps=STEPS, num_buffers=st.integers(1, 4))
def test_any_jobs_in_any_steps_give_the_numbers_of_memory(tmp_path_factory, steps, num_buffers):
    """Jobs overlap in any way, and are prefetched or not, for this step or for another one."""
    store = NvmeStore(tmp_path_factory.mktemp("any"), rank=0, block_bytes=PAGE)
    files = [store.create(name, NUM_PAGES * PAGE) for name in "ab"]
    pipeline = Pipeline(make_buffers(num_buffers, 4 * PAGE, pin=False))
    memory, value = InMemory(), 0
    for drawn, num_prefetched, is_drained in steps:
        jobs, functions = [], []
        for job in drawn:
            value += 1

            def change(views, job=job, value=value):
                for view, piece in zip(views, job, strict=True):
                    view.copy_(view * 3 + value if piece[4] else torch.full_like(view, value))

            jobs.append(pieces_of(job, files))
            functions.append(change)
        pipeline.prefetch(random.Random(value).choice([jobs, jobs[::-1]])[:num_prefetched])
        run(pipeline, jobs, *functions)
        for number, job in enumerate(drawn, start=value - len(drawn) + 1):
            memory.run(job, number)
        if is_drained:
            pipeline.drain()
    pipeline.drain()
    for file, expected in zip(files, memory.files, strict=True):
        assert torch.equal(content(file), expected)
    store.close()


def seconds_waited(recorder):
    """Seconds for which the caller waited, by kind, since `recorder.begin`."""
    waited = {Kind.READ: 0.0, Kind.WRITE: 0.0}
    for span in recorder.end().spans:
        if span.is_wait:
            waited[span.kind] += span.stop_s - span.start_s
    return waited


def make_states(store, numel, num_chunks):
    """A file per state of Adam, each with a chunk per job."""
    return [store.create(name, 4 * numel * num_chunks) for name in ("param", "m", "v")]


def test_adamw_steps_bit_equal_to_memory(store):
    numel, num_chunks, num_steps = 8 * PAGE // 4, 7, 4
    files = make_states(store, numel, num_chunks)
    torch.manual_seed(0)
    gradients = torch.randn(num_steps, num_chunks, numel)
    expected = [torch.zeros(num_chunks, numel) for _ in range(3)]
    pipeline = Pipeline(make_buffers(3, 3 * 4 * numel, pin=False), store.recorder)
    store.recorder.begin(0)

    def step_chunk(views, gradient, step):
        p, m, v = (view.view(torch.float32) for view in views)
        torch._fused_adamw_(
            [p], [gradient], [m], [v], [], [torch.tensor(float(step))], lr=1e-2, beta1=0.9,
            beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    jobs = [
        [FileRange(file, 4 * numel * chunk, 4 * numel, is_written=True) for file in files]
        for chunk in range(num_chunks)
    ]
    for step in range(num_steps):
        for chunk in range(num_chunks):
            step_chunk([state[chunk] for state in expected], gradients[step, chunk], step + 1)
        pipeline.prefetch(jobs)  # for this step, after the writes of the last one
        steps = [partial(step_chunk, gradient=g, step=step + 1) for g in gradients[step]]
        run(pipeline, jobs, *steps)
    pipeline.drain()
    for file, state in zip(files, expected, strict=True):
        assert torch.equal(content(file).view(torch.float32), state.view(-1))
    assert store.bytes_read == store.bytes_written + sum(file.nbytes for file in files)
    assert min(seconds_waited(store.recorder).values()) > 0


def test_the_disk_reads_ahead_and_writes_behind_while_jobs_run(store):
    file, num_jobs, slow_s = store.create("state", 8 * PAGE), 8, 0.05
    jobs = [[FileRange(file, number * PAGE, PAGE, is_written=True)] for number in range(num_jobs)]
    pipeline = Pipeline(make_buffers(3, PAGE, pin=False), store.recorder)
    store.recorder.begin(0)
    start = time.perf_counter()
    run(pipeline, jobs, lambda _: time.sleep(slow_s))
    assert time.perf_counter() - start >= num_jobs * slow_s
    # Only the first read can cause a wait.
    assert sum(seconds_waited(store.recorder).values()) < 3 * slow_s


def test_what_was_prefetched_is_not_read_again(store):
    file = store.create("state", 4 * PAGE)
    jobs = [[FileRange(file, n * PAGE, PAGE, False)] for n in range(4)]
    pipeline = Pipeline(make_buffers(4, PAGE, pin=False))
    pipeline.prefetch(jobs)
    run(pipeline, jobs, do_nothing)
    assert store.bytes_read == 4 * PAGE
    pipeline.prefetch(jobs)
    run(pipeline, jobs[::-1], do_nothing)  # in another order: what was prefetched is dropped
    assert store.bytes_read >= 8 * PAGE


def test_a_prefetch_is_read_again_after_a_write_outside_the_pipeline(store, filled):
    file, seen = store.create("state", PAGE), []
    jobs = [[FileRange(file, 0, PAGE, False)]]
    pipeline = Pipeline(make_buffers(2, PAGE, pin=False))
    pipeline.prefetch(jobs)
    file.write(0, filled(PAGE, 5)).wait()
    run(pipeline, jobs, lambda views: seen.append(int(views[0][0])))
    assert seen == [5]


def test_a_job_larger_than_a_buffer_is_refused_with_both_sizes(store):
    file = store.create("state", 4 * PAGE)
    pipeline = Pipeline(make_buffers(2, PAGE, pin=False))
    with pytest.raises(ValueError, match=r"at most 4096 bytes.*got one of 8192"):
        pipeline.begin([[FileRange(file, 0, 2 * PAGE, True)]])


def test_after_an_exception_in_a_job_the_next_step_is_right(store):
    file = store.create("state", 6 * PAGE)
    pipeline = Pipeline(make_buffers(3, PAGE, pin=False))

    def fail(views):
        views[0].fill_(99)
        raise KeyError("in the job")

    def add(views):
        views[0].add_(1)

    jobs = [[FileRange(file, n * PAGE, PAGE, True)] for n in range(6)]
    with pytest.raises(KeyError):
        run(pipeline, jobs, add, add, fail, add, add, add)
    pipeline.reset()
    run(pipeline, jobs, add)
    pipeline.drain()
    assert content(file).view(6, PAGE)[:, 0].tolist() == [2, 2, 1, 1, 1, 1]


class InterruptedHere(Exception):
    pass


@pytest.mark.parametrize("num", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_after_an_interrupt_at_any_moment_the_store_closes_and_leaves_nothing(num, tmp_path):
    """Raises, as Ctrl-C does, between any two instructions of the main thread."""

    def interrupt(*_):
        raise InterruptedHere

    def add(views):
        views[0].add_(1)

    moments, before = random.Random(0), signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(num):
            store = NvmeStore(tmp_path, rank=0, block_bytes=PAGE)
            file = store.create("state", 12 * PAGE)
            pipeline = Pipeline(make_buffers(3, 2 * PAGE, pin=False))
            jobs = [[FileRange(file, 2 * n * PAGE, 2 * PAGE, True)] for n in range(6)]
            with pytest.raises(InterruptedHere):  # noqa: PT012
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.0002, 0.006))
                until = time.monotonic() + 5
                while time.monotonic() < until:
                    run(pipeline, jobs, add)
                    pipeline.prefetch(jobs)
                raise InterruptedHere  # it was raised in a callback of the garbage collector
            pipeline.reset()
            store.close()
            assert not list(tmp_path.iterdir())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_job_may_only_write_or_only_read(store, filled):
    file, seen = store.create("state", 2 * PAGE), []
    file.write(PAGE, filled(PAGE, 7)).wait()
    job = [
        FileRange(file, 0, PAGE, is_written=True, is_read=False),
        FileRange(file, PAGE, PAGE, False),
    ]
    pipeline = Pipeline(make_buffers(1, 2 * PAGE, pin=False))
    run(pipeline, [job], lambda views: (views[0].copy_(views[1]), seen.append(len(views))))
    pipeline.drain()
    assert (store.bytes_read, store.bytes_written) == (PAGE, 2 * PAGE)
    assert (content(file) == 7).all()


def test_a_pipeline_records_how_long_it_waits_for_the_disk(store):
    file = store.create("state", 64 * 2**20)
    jobs = [[FileRange(file, n * 2**23, 2**23, True)] for n in range(8)]
    pipeline = Pipeline(make_buffers(2, 2**23, pin=False), store.recorder)
    store.recorder.begin(0)
    start = time.perf_counter()
    run(pipeline, jobs, do_nothing)
    pipeline.drain()
    spent = time.perf_counter() - start
    waited = sum(seconds_waited(store.recorder).values())
    assert 0.5 * spent < waited <= spent
