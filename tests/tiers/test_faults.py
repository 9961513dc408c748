"""Disks that are full, removed, truncated or broken: an error with path and bytes, no hang."""

import os
import resource
import shutil
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from lightning_zero.tiers.memory import aligned_empty, make_buffers
from lightning_zero.tiers.nvme import NvmeStore
from lightning_zero.tiers.pipeline import FileRange, Pipeline
from tests.support.disks import make_ext4
from tests.tiers.conftest import PAGE

ROOT = Path(__file__).parents[2]
MIB = 2**20


def increment(pipeline, file, num_jobs=8):
    """Jobs that add 1 to a file, in equal ranges."""
    size = file.nbytes // num_jobs
    jobs = [[FileRange(file, n * size, size, True)] for n in range(num_jobs)]
    pipeline.begin(jobs)
    for _ in jobs:
        with pipeline.next_job() as views:
            views[0].add_(1)


def step(pipeline, file):
    """Runs a step and waits for its writes."""
    increment(pipeline, file)
    pipeline.drain()


def fails_clearly(file, pattern):
    """Two steps in a row raise this error, which names `file`."""
    pipeline = Pipeline(make_buffers(3, file.nbytes // 8, pin=False))
    for _ in range(2):
        with pytest.raises(OSError, match=pattern) as caught:
            step(pipeline, file)
        assert str(file.path) in str(caught.value)
        pipeline.reset()


def test_a_full_disk_is_an_error_with_the_bytes_requested_and_free(mounted, filled):
    disk = mounted("-t", "tmpfs", "-o", "size=8m", "tmpfs")
    store = NvmeStore(disk, rank=0)
    kept = store.create("kept", 2 * MIB)
    with pytest.raises(OSError, match=r"cannot allocate 16781312 bytes .* (\d+) bytes are free"):
        store.create("too large", 16 * MIB)
    assert len(list(store.directory.glob("0*"))) == 1
    store.create("fits", 4 * MIB)  # the space of the large file is free again
    kept.write(0, filled(2 * MIB, 3)).wait()
    store.close()
    assert not list(disk.iterdir())


def test_a_disk_without_space_for_a_directory_is_an_error_that_names_it(mounted):
    disk = mounted("-t", "tmpfs", "-o", "size=64k,nr_inodes=1", "tmpfs")
    with pytest.raises(OSError, match=f"is full.*{disk}"):
        NvmeStore(disk, rank=0)


def test_a_path_that_is_missing_or_a_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"does not exist; is the disk.*{tmp_path}/no"):
        NvmeStore(tmp_path / "no", rank=0)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=f"is not a directory.*{tmp_path}/file"):
        NvmeStore(tmp_path / "file", rank=0)


def test_a_path_on_a_read_only_disk_is_an_error_that_names_it(mounted):
    disk = mounted("-t", "tmpfs", "-o", "ro", "tmpfs")
    with pytest.raises(OSError, match=f"is mounted read-only.*{disk}"):
        NvmeStore(disk, rank=0)


@pytest.mark.slow
def test_a_path_of_another_user_is_an_error_that_names_it(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    tmp_path.chmod(stat.S_IRWXU)
    script = (
        "import os, sys, torch\nfrom lightning_zero.tiers.nvme import NvmeStore\n"
        "os.setuid(65534)\nNvmeStore(sys.argv[1], rank=0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "is not writable by user 65534" in done.stderr
    assert str(tmp_path) in done.stderr


def test_a_file_system_without_o_direct_is_used_and_named_once(mounted, filled, monkeypatch):
    disk = mounted("-t", "ramfs", "ramfs")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stores = [NvmeStore(disk, rank=rank) for rank in range(3)]
    assert [store.is_direct for store in stores] == [False] * 3
    (message,) = [str(warning.message) for warning in caught]
    assert f"{disk} (ramfs) does not support O_DIRECT" in message
    file, back = stores[1].create("state", 4 * PAGE), filled(4 * PAGE)
    file.write(0, filled(4 * PAGE, 6))
    file.read(0, back).wait()
    assert (back == 6).all()
    for store in stores:
        store.close()


def test_a_truncated_file_is_an_error_and_never_read_as_zeros(store, filled):
    file = store.create("state", 64 * PAGE)
    file.write(0, filled(64 * PAGE, 1)).wait()
    os.truncate(file.path, 16 * PAGE)
    fails_clearly(file, r"cannot (read|write) \d+ bytes at offset \d+: another process truncated")
    # Our own writes must not make it look intact again.
    with pytest.raises(
        OSError, match=r"cannot write 4096 bytes at offset 258048.*truncated the file to"
    ):
        file.write(63 * PAGE, filled(PAGE)).wait()
    with pytest.raises(OSError, match="another process truncated the file to"):
        file.read(32 * PAGE, filled(PAGE)).wait()


def test_a_removed_file_is_used_as_long_as_it_is_open(store, filled):
    file = store.create("state", 8 * PAGE)
    file.path.unlink()
    pipeline = Pipeline(make_buffers(2, PAGE, pin=False))
    for _ in range(3):
        increment(pipeline, file)
    pipeline.drain()
    back = filled(8 * PAGE)
    file.read(0, back).wait()
    assert (back == 3).all()


def test_a_removed_directory_is_an_error_for_new_files_that_names_it(store):
    shutil.rmtree(store.directory)
    with pytest.raises(FileNotFoundError, match=f"cannot make a file of 8192.*{store.directory}"):
        store.create("state", PAGE)
    store.close()


def test_a_file_replaced_by_a_directory_is_not_the_one_in_use(store, filled):
    file = store.create("state", PAGE)
    file.write(0, filled(PAGE, 4)).wait()
    file.path.unlink()
    file.path.mkdir()
    back = filled(PAGE)
    file.read(0, back).wait()
    assert (back == 4).all()


def test_a_disk_that_fails_to_read_is_an_error_with_path_offset_and_bytes(loop_disk, filled):
    disk, image = loop_disk
    store = NvmeStore(disk, rank=0)
    file = store.create("state", 16 * MIB)
    file.write(0, filled(16 * MIB, 1)).wait()
    os.truncate(image, 4 * MIB)  # the rest of the disk is gone
    fails_clearly(file, r"cannot (read|write) \d+ bytes at offset \d+: Input/output error")
    store.close()


def test_a_disk_that_fails_to_write_breaks_the_bytes_until_they_are_written(mounted, tmp_path):
    """The file that holds the disk is on a full one: writes fail for real, then work again."""
    outer = mounted("-t", "tmpfs", "-o", "size=24m", "tmpfs")
    image = outer / "disk.img"
    make_ext4(image, 64 * MIB, "-O", "^has_journal")
    disk = mounted("-o", "loop", str(image))
    store = NvmeStore(disk, rank=0)
    file = store.create("state", 8 * MIB)
    ballast = outer / "ballast"
    subprocess.run(["dd", "if=/dev/zero", f"of={ballast}"], stderr=subprocess.DEVNULL, timeout=60)
    assert os.statvfs(outer).f_bavail == 0
    full = aligned_empty(8 * MIB, pin=False).fill_(1)
    with pytest.raises(OSError, match=r"cannot write \d+ bytes at offset \d+: .*0000-state"):
        file.write(0, full).wait()
    with pytest.raises(OSError, match="cannot write"):  # not the zeros in the file
        file.read(4 * MIB, aligned_empty(MIB, pin=False)).wait()
    ballast.unlink()
    file.write(0, full).wait()
    back = aligned_empty(8 * MIB, pin=False)
    file.read(0, back).wait()
    assert (back == 1).all()
    store.close()


def test_a_short_write_goes_on_and_its_error_counts(tmp_path, filled):
    """The kernel writes up to the limit, then refuses: a short write and an error, both real."""
    store = NvmeStore(tmp_path, rank=0, block_bytes=16 * PAGE)
    file = store.create("state", 64 * PAGE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (24 * PAGE, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write 65536 bytes at offset .*File too large"):
            file.write(0, filled(64 * PAGE, 2)).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.write(0, filled(64 * PAGE, 3)).wait()
    back = filled(64 * PAGE)
    file.read(0, back).wait()
    assert (back == 3).all()
    store.close()


@pytest.mark.slow
def test_short_transfers_go_on_where_they_stopped(tmp_path):
    """One call moves at most 2 GiB less a page, whatever it is asked for."""
    store = NvmeStore(tmp_path, rank=0, block_bytes=4 * 1024 * MIB)
    nbytes = 2 * 1024 * MIB + 8 * MIB
    file = store.create("state", nbytes)
    memory = aligned_empty(nbytes, pin=False)
    values = torch.arange(nbytes // 8)
    memory.view(torch.int64).copy_(values)
    file.write(0, memory).wait()
    memory.zero_()
    file.read(0, memory).wait()
    assert torch.equal(memory.view(torch.int64), values)
    assert store.bytes_written == store.bytes_read == nbytes
    store.close()
