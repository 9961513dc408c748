"""Atomic replacement of files."""

import errno
import multiprocessing
import os
import random
import resource
import signal
import time

import pytest
import torch

from lightning_zero.checkpoint import atomic
from lightning_zero.checkpoint.atomic import atomic_write
from lightning_zero.checkpoint.torch_file import find_damage, write_torch_file
from tests.support.full_disk import mounted_tmpfs


@pytest.fixture
def small_disk(tmp_path):
    yield from mounted_tmpfs(tmp_path / "disk", 2**20)


def write(path, data=b"new"):
    with atomic_write(path, len(data)) as file:
        file.write(data)


def write_and_fail(path):
    with atomic_write(path, 3) as file:
        file.write(b"ne")
        raise KeyError


def write_too_much(path):
    with atomic_write(path, 10) as file:
        for _ in range(40):
            file.write(bytes(2**16))
            os.fsync(file)


def test_a_file_appears_when_the_block_ends_and_replaces_another(tmp_path):
    path = tmp_path / "a.ckpt"
    write(path, b"old")
    with atomic_write(path, 3) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path):
    write(tmp_path / ("x" * 255))
    assert os.listdir(tmp_path) == ["x" * 255]


def test_reserved_space_that_is_not_used_is_freed(tmp_path):
    with atomic_write(tmp_path / "a", 10_000) as file:
        file.write(b"short")
    assert (tmp_path / "a").stat().st_size == 5


def test_an_exception_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.ckpt"
    write(path, b"old")
    with pytest.raises(KeyError):
        write_and_fail(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_link_is_replaced_and_what_it_points_to_is_unchanged(tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    write(tmp_path / "link")
    assert (tmp_path / "target").read_bytes() == b"old"
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_bytes() == b"new"


def test_a_link_to_a_directory_is_replaced_and_the_directory_is_unchanged(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("folder")
    write(tmp_path / "link")
    assert (tmp_path / "folder" / "file").read_bytes() == b"old"
    assert (tmp_path / "link").read_bytes() == b"new"


def test_a_directory_is_replaced(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"old")
    write(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


def test_a_full_disk_is_known_before_anything_is_written(small_disk):
    path = small_disk / "a.ckpt"
    write(path, b"old")
    match = r"a\.ckpt was not written: it needs 2097152"
    with pytest.raises(OSError, match=match) as caught, atomic_write(path, 2**21):
        raise AssertionError("the block was entered")
    assert caught.value.errno == errno.ENOSPC
    assert "bytes (0.00 GiB) are free" in str(caught.value)
    assert path.read_bytes() == b"old"
    assert os.listdir(small_disk) == ["a.ckpt"]
    write(path)
    assert path.read_bytes() == b"new"


def test_a_disk_that_gets_full_while_writing_is_the_same_error(small_disk):
    path = small_disk / "a.ckpt"
    with pytest.raises(OSError, match="was not written: it needs 10 bytes"):
        write_too_much(path)
    assert os.listdir(small_disk) == []


def test_a_short_write_is_continued(tmp_path):
    process = multiprocessing.Process(target=_write_beyond_a_limit, args=(tmp_path / "a",))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert os.listdir(tmp_path) == []


def _write_beyond_a_limit(path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # only 1000 bytes are written
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(OSError, match="was not written"), atomic_write(path, 0) as file:
        file.write(bytes(1500))


def _write_endlessly(path, is_at_work):
    with atomic_write(path, 3) as file:
        file.write(b"never")
        is_at_work.set()
        time.sleep(60)


def test_leftovers_of_a_killed_writer_are_deleted_and_files_of_a_live_one_stay(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(atomic, "_PAUSE_S", 0.001)
    path = tmp_path / "a.ckpt"
    write(path, b"old")
    is_at_work = multiprocessing.Event()
    process = multiprocessing.Process(target=_write_endlessly, args=(path, is_at_work))
    process.start()
    assert is_at_work.wait(30)
    write(tmp_path / "b.ckpt")
    with pytest.raises(OSError, match=f"process {process.pid} on .* is saving to this path"):
        write(path)
    hidden = {f".a.ckpt.zero-{kind}" for kind in ("incomplete", "lock")}
    assert set(os.listdir(tmp_path)) == {"a.ckpt", "b.ckpt", *hidden}
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert path.read_bytes() == b"old"
    write(tmp_path / "b.ckpt")
    assert set(os.listdir(tmp_path)) == {"a.ckpt", "b.ckpt"}
    write(path, b"two")
    assert path.read_bytes() == b"two"


def _write_again_and_again(path, number):
    while True:
        number += 1
        write_torch_file({"numbers": torch.full((200_000,), number)}, path)


def test_after_a_kill_at_any_moment_the_file_before_or_the_new_one_is_there(tmp_path):
    path = tmp_path / "a.ckpt"
    write_torch_file({"numbers": torch.zeros(200_000, dtype=torch.int64)}, path)
    for moment in range(8):
        process = multiprocessing.Process(
            target=_write_again_and_again, args=(path, moment * 10**6)
        )
        process.start()
        time.sleep(random.Random(moment).uniform(0.02, 0.12))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert not find_damage(path)
        numbers = torch.load(path)["numbers"]
        assert (numbers == numbers[0]).all()
    write_torch_file({}, path)
    assert os.listdir(tmp_path) == ["a.ckpt"]
