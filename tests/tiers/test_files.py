"""Files on a disk: values that are written and read, access, and cleanup."""

import fcntl
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero.layout.offload import NUM_UPLOAD_BLOCKS, OffloadConfig, Tier
from lightning_zero.record import streams
from lightning_zero.tiers.memory import BufferPool, aligned_empty, make_buffers
from lightning_zero.tiers.nvme import NvmeFile, NvmeStore
from lightning_zero.tiers.storage import ParamReader, Storage
from tests.tiers.conftest import PAGE

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from lightning_zero.tiers.memory import aligned_empty
from lightning_zero.tiers.nvme import NvmeStore
store = NvmeStore(sys.argv[1], rank=1)
file = store.create("state", 2**26)
print(store.directory, flush=True)
values = aligned_empty(2**26, pin=False)
while True:
    file.write(0, values).wait()
"""


def start_a_job(path):
    """Starts a process that prints its directory and then writes without end."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_what_is_written_is_read_in_every_dtype(store, dtype):
    file = store.create("state", 10 * PAGE)
    source = torch.arange(8 * PAGE // dtype.itemsize).to(dtype)
    aligned = aligned_empty(8 * PAGE, pin=False).view(dtype).copy_(source)
    file.write(PAGE, aligned).wait()
    back = aligned_empty(8 * PAGE, pin=False).view(dtype)
    transfer = file.read(PAGE, back)
    transfer.wait()
    transfer.wait()
    assert transfer.is_done
    assert torch.equal(back, source)


def test_new_files_are_zero_and_sized_up_to_a_page(store, filled):
    file = store.create("state", 5000)
    assert file.nbytes == 2 * PAGE
    back = filled(2 * PAGE, 7)
    file.read(0, back).wait()
    assert not back.any()


def test_empty_files_and_tensors_are_allowed(store, filled):
    file = store.create("nothing", 0)
    file.write(0, filled(0)).wait()
    file.read(0, filled(0)).wait()


def test_any_parameter_name_is_a_valid_file_name(store):
    for name in ("layers.3/weight", "../..", "x" * 500, "layers.3/weight", "ß\0"):
        file = store.create(name, PAGE)
        assert file.path.parent == store.directory
    assert len(list(store.directory.glob("0*"))) == 5


def test_bytes_are_counted(store, filled):
    file = store.create("state", 8 * PAGE)
    file.write(0, filled(8 * PAGE)).wait()
    file.read(0, filled(3 * PAGE)).wait()
    assert (store.bytes_written, store.bytes_read) == (8 * PAGE, 3 * PAGE)
    (size,) = [path.stat() for path in store.directory.glob("0*")]
    assert size.st_size == 9 * PAGE  # with the page that is never written
    assert size.st_blocks * 512 >= size.st_size


RANGES = st.tuples(st.booleans(), st.integers(0, 7), st.integers(1, 8))


@settings(max_examples=60)
@given(operations=st.lists(RANGES, max_size=25))
def test_overlapping_transfers_are_done_in_the_order_of_requests(tmp_path_factory, operations):
    path = tmp_path_factory.mktemp("ordered")
    store = NvmeStore(path, rank=0, block_bytes=PAGE)
    file = store.create("state", 8 * PAGE)
    expected = torch.zeros(8 * PAGE, dtype=torch.uint8)
    transfers, reads = [], []
    for value, (is_write, first, num_pages) in enumerate(operations, start=1):
        start, stop = first * PAGE, min(first + num_pages, 8) * PAGE
        memory = aligned_empty(stop - start, pin=False).fill_(value)
        if is_write:
            expected[start:stop] = value
            transfers.append(file.write(start, memory))
        else:
            transfers.append(file.read(start, memory))
            reads.append((memory, expected[start:stop].clone()))
    for transfer in transfers:
        transfer.wait()
    assert all(torch.equal(memory, values) for memory, values in reads)
    store.close()


def test_unaligned_memory_fails_an_assertion(store):
    file = store.create("state", 4 * PAGE)
    with pytest.raises(AssertionError):
        file.read(0, aligned_empty(2 * PAGE, pin=False)[64 : 64 + PAGE])
    with pytest.raises(AssertionError):
        file.read(2 * PAGE, aligned_empty(3 * PAGE, pin=False))


def test_close_removes_everything_and_the_files_say_so(tmp_path, filled):
    store = NvmeStore(tmp_path, rank=0)
    file = store.create("state", 2**22)
    file.write(0, filled(2**22))
    store.close()
    store.close()
    assert not list(tmp_path.iterdir())
    for use in (lambda: file.read(0, filled(PAGE)), lambda: store.create("more", PAGE)):
        with pytest.raises(RuntimeError, match="closed and removed"):
            use()


@pytest.mark.slow
def test_nothing_is_left_when_the_process_ends_without_closing(tmp_path):
    script = HOLD.replace("while True:", "for _ in range(2):") + "\nraise SystemExit(3)"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, timeout=60)
    assert done.returncode == 3
    assert not list(tmp_path.iterdir())


def test_an_unreferenced_store_is_removed(tmp_path):
    NvmeStore(tmp_path, rank=0)
    import gc

    gc.collect()
    assert not list(tmp_path.iterdir())


def test_two_stores_on_one_path_are_separate(tmp_path, filled):
    stores = [NvmeStore(tmp_path, rank=0), NvmeStore(tmp_path, rank=0)]
    files = [store.create("state", PAGE) for store in stores]
    for value, file in enumerate(files):
        file.write(0, filled(PAGE, value)).wait()
    for value, file in enumerate(files):
        back = filled(PAGE, 9)
        file.read(0, back).wait()
        assert (back == value).all()
    stores[0].close()
    files[1].read(0, filled(PAGE)).wait()
    stores[1].close()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_next_start_removes_what_a_killed_job_left_and_nothing_of_a_living_one(tmp_path):
    killed, living = start_a_job(tmp_path), start_a_job(tmp_path)
    (tmp_path / "lightning_zero.mine.rank0.txt").mkdir()
    try:
        killed_directory = Path(killed.stdout.readline().strip())
        living_directory = Path(living.stdout.readline().strip())
        time.sleep(0.3)  # in the midst of a write
        killed.kill()
        killed.wait(timeout=60)
        assert killed_directory.exists()
        store = NvmeStore(tmp_path, rank=0)
        assert not killed_directory.exists()
        assert {path.name for path in tmp_path.iterdir()} == {
            "lightning_zero.mine.rank0.txt",
            living_directory.name,
            store.directory.name,
        }
        assert living.poll() is None
        store.close()
    finally:
        for job in (killed, living):
            job.kill()
            job.wait(timeout=60)
            job.stdout.close()


def test_directories_of_other_machines_are_left_alone(tmp_path):
    other = tmp_path / "lightning_zero.7.othernode.00000000.rank0.12.abcdabcd"
    other.mkdir()
    (other / ".lock").touch()
    NvmeStore(tmp_path, rank=0).close()
    assert other.exists()


@pytest.mark.parametrize("kind", ["a link as lock", "a link as directory", "another user's"])
def test_links_and_files_of_other_users_are_neither_followed_nor_removed(tmp_path, kind):
    folder, other = tmp_path / "nvme", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (other / ".lock").touch()
    store = NvmeStore(folder, rank=0)
    abandoned = folder / (store.directory.name[:-8] + "0" * 8)
    store.close()
    if kind == "a link as directory":
        abandoned.symlink_to(other)
    else:
        abandoned.mkdir()
        if kind == "a link as lock":
            (abandoned / ".lock").symlink_to(other / ".lock")
        elif os.getuid():
            pytest.skip("needs root, to give a directory to another user")
        else:
            (abandoned / ".lock").touch()
            os.chown(abandoned, 1234, -1)
    NvmeStore(folder, rank=0).close()
    assert os.path.lexists(abandoned)
    assert (other / ".lock").exists()


def test_the_directory_is_named_after_the_job_and_the_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    store = NvmeStore(tmp_path, rank=3)
    assert store.directory.name.startswith("lightning_zero.4711.")
    assert f".rank3.{os.getpid()}." in store.directory.name
    store.close()


def in_a_child(work):
    """Whether `work()` returns True in a forked child, which then exits as a script does."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_child_can_neither_use_nor_remove_nor_lock(store, filled):
    file = store.create("state", PAGE)

    def work():
        with pytest.raises(RuntimeError, match="belong to process"):
            file.read(0, filled(PAGE))
        with pytest.raises(RuntimeError, match="belong to process"):
            store.create("more", PAGE)
        store.close()
        store._finalizer()
        names = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return not any(name.startswith(str(store.directory)) for name in names)

    assert in_a_child(work)
    assert file.path.exists()
    file.read(0, filled(PAGE)).wait()
    with open(store.directory / ".lock") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_fork_of_a_forked_child_has_the_files_of_its_own(store):
    store.create("state", PAGE)

    def opens_files_and_forks():
        own = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]  # descriptors that became free
        return in_a_child(lambda: all(os.fstat(number) for number in own))

    assert in_a_child(opens_files_and_forks)


def test_buffers_are_not_shared_with_a_forked_child():
    (buffer,) = make_buffers(1, 2 * PAGE, pin=False)
    buffer.fill_(5)
    assert in_a_child(lambda: not buffer.any())
    assert (buffer == 5).all()


def test_a_pool_returns_its_free_buffers():
    pool = BufferPool(make_buffers(2, 3 * PAGE, pin=False))
    first, second = pool.acquire(), pool.acquire()
    assert first.data_ptr() % PAGE == second.data_ptr() % PAGE == 0
    assert first.numel() == pool.nbytes == 3 * PAGE
    assert pool.acquire() is None
    pool.release(first)
    assert pool.acquire().data_ptr() == first.data_ptr()
    pool.close()
    pool.release(second)
    assert pool.acquire() is None
    with pytest.raises(ValueError, match="got 0 and 5"):
        make_buffers(0, 5, pin=False)


class AtOnce:
    """Stands for a CUDA stream and an event on it: all work is done at once."""

    def do_nothing(self, *_):
        pass

    wait_stream = synchronize = do_nothing

    def record_event(self):
        return self


def test_uploads_that_fail_leave_all_blocks_for_the_next(monkeypatch):
    for name in ("make_stream", "current"):
        monkeypatch.setattr(streams, name, lambda device: AtOnce())
    monkeypatch.setattr(streams, "on", nullcontext)
    device, target = torch.device("cpu"), torch.zeros(2)
    storage = Storage(device, rank=0)
    for _ in range(NUM_UPLOAD_BLOCKS + 1):
        with pytest.raises(RuntimeError, match="must match"):
            storage._uploader.send(torch.ones(3), target, "a")
    storage._uploader.send(torch.ones(2), target, "a")
    assert target.tolist() == [1, 1]


def test_a_read_ahead_that_is_dropped_ends_before_its_buffer_is_free(tmp_path, monkeypatch):
    place = OffloadConfig("nvme", nvme_path=str(tmp_path), buffer_count=2, buffer_size=2**16)
    storage = Storage(torch.device("cpu"), rank=0, offload_param=place)
    store = storage.make_param_store("a", torch.ones(2 * 2**16), Tier.NVME)
    reader = ParamReader(store, storage.param_pool, storage.recorder)
    move = NvmeFile._move

    def move_later(*args):
        time.sleep(0.1)
        move(*args)

    monkeypatch.setattr(NvmeFile, "_move", move_later)
    assert reader.begin()
    assert storage.param_pool.acquire() is None
    begun = [transfer for _, transfer in reader._begun]
    reader.reset()
    assert [transfer.is_done for transfer in begun] == [True, True]
    assert storage.param_pool.acquire() is not None
    storage.close()


def test_wrong_numbers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="num_write_threads=0"):
        NvmeStore(tmp_path, rank=0, num_write_threads=0)
    with pytest.raises(ValueError, match="multiple of 4096, got 5000"):
        NvmeStore(tmp_path, rank=0, block_bytes=5000)
    assert not list(tmp_path.iterdir())
