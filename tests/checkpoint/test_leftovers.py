"""Leftovers of killed jobs are deleted, unless a process may still write to them."""

import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from lightning_zero.checkpoint import atomic
from lightning_zero.checkpoint.atomic import (
    StagedDirectory,
    atomic_write,
    delete_leftovers,
    temporary_path,
)
from lightning_zero.checkpoint.dcp_writer import ShardedSave
from lightning_zero.comm.control import Channel

DAY = 24 * 3600
OTHER_MACHINE = "othernode.0badb001.4242.0123abcd"
OLD_ID = "0123abcd"  # of earlier versions


def save_directory(path):
    StagedDirectory(path).publish()


def save_file(path):
    with atomic_write(path, 4) as file:
        file.write(b"complete")


def make_leftover(folder, kind, age, unique=None):
    """A leftover of a process that died `age` seconds ago; with a lock if its ID is current.

    Its name has wildcard characters.
    """
    path = temporary_path(Path(folder, "old [1].ckpt"), kind)
    if unique is not None:
        path = path.with_name(path.name.rpartition("-")[0] + f"-{unique}")
    path.mkdir()
    files = [path / "__0_0.distcp"] + [path / "SHA256SUMS"] * (unique != OLD_ID)
    for one in (*files, path):
        if one != path:
            one.touch()
        os.utime(one, (time.time() - age, time.time() - age))
    return path


@pytest.mark.parametrize(
    "start", [save_directory, save_file, lambda path: delete_leftovers(path.parent)]
)
def test_leftovers_of_a_killed_job_are_deleted_by_the_next_save_or_start(start, tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_die_while_saving, args=[tmp_path])
    process.start()
    process.join()
    make_leftover(tmp_path, "removed", age=0)
    assert len(os.listdir(tmp_path)) == 3
    alive = StagedDirectory(tmp_path / "b.ckpt")
    with atomic_write(tmp_path / "c.ckpt", 3) as file:
        start(tmp_path / "a.ckpt")
        left = {path.name for path in tmp_path.iterdir()} - {"a.ckpt"}
        assert len(left) == 2
        assert alive.folder.name in left
        file.write(b"new")
    alive.publish()
    assert {"b.ckpt", "c.ckpt"} <= set(os.listdir(tmp_path)) <= {"a.ckpt", "b.ckpt", "c.ckpt"}


def _die_while_saving(folder):
    StagedDirectory(folder / "a.ckpt").folder.joinpath("__0_0.distcp").touch()
    with atomic_write(folder / "b.ckpt", 3):
        os._exit(9)


def of_unknown_kind(path):
    return "fuse.unknown", set()


@pytest.mark.parametrize(
    ("unique", "mount", "goes_at_once"),
    [
        (None, of_unknown_kind, True),
        (OTHER_MACHINE, of_unknown_kind, False),
        (OTHER_MACHINE, lambda path: ("nfs4", {"rw", "local_lock=none"}), True),
        (OTHER_MACHINE, lambda path: ("nfs", {"rw", "local_lock=all"}), False),
        (OTHER_MACHINE, lambda path: ("lustre", {"rw", "localflock"}), False),
        (OLD_ID, of_unknown_kind, False),
    ],
)
def test_without_shared_locks_leftovers_of_other_machines_stay_for_a_day(
    unique, mount, goes_at_once, tmp_path, monkeypatch
):
    monkeypatch.setattr(atomic, "mount_of", mount)
    path = make_leftover(tmp_path, "incomplete", 0.9 * DAY, unique)
    delete_leftovers(tmp_path)
    assert path.exists() == (not goes_at_once)
    shutil.rmtree(path, ignore_errors=True)
    path = make_leftover(tmp_path, "incomplete", 1.1 * DAY, unique)
    (path / "__1_0.distcp").touch()
    delete_leftovers(tmp_path)
    assert path.exists() == (not goes_at_once)
    shutil.rmtree(path, ignore_errors=True)
    path = make_leftover(tmp_path, "incomplete", 1.1 * DAY, unique)
    delete_leftovers(tmp_path)
    assert os.listdir(tmp_path) == []


def test_without_locks_saves_succeed_and_leftovers_stay_for_a_day(tmp_path, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(95, "not supported")

    monkeypatch.setattr(atomic.fcntl, "flock", refuse)
    under_way = StagedDirectory(tmp_path / "a.ckpt")
    save_directory(tmp_path / "a.ckpt")
    save_file(tmp_path / "b.ckpt")
    under_way.publish()
    make_leftover(tmp_path, "incomplete", 0.9 * DAY)
    make_leftover(tmp_path, "incomplete", 1.1 * DAY)
    delete_leftovers(tmp_path)
    assert len(os.listdir(tmp_path)) == 3


def test_a_directory_deleted_before_it_is_locked_is_created_again(tmp_path, monkeypatch):
    is_held, calls = atomic._lock_new_file, []

    def disturbed(lock, path):
        calls.append(path)
        if len(calls) == 1:
            delete_leftovers(tmp_path)  # another process
        return is_held(lock, path)

    for number, save in enumerate((save_directory, save_file)):
        calls.clear()
        monkeypatch.setattr(atomic, "_lock_new_file", disturbed)
        save(tmp_path / f"{number}.ckpt")
        assert len(calls) == 2
    assert sorted(os.listdir(tmp_path)) == ["0.ckpt", "1.ckpt"]


def test_a_replaced_checkpoint_is_restored_and_similar_names_stay(tmp_path):
    names = {".old.ckpt.incomplete-mine", "old.removed-0123abcd", ".removed-0123abcd"}
    for name in names | {".old.ckpt.replaced-0123abcd", ".new.ckpt.replaced-0123abcd", "new.ckpt"}:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    save_directory(tmp_path / "a.ckpt")
    there = {"a.ckpt", "old.ckpt", "new.ckpt"}
    assert {path.name for path in tmp_path.iterdir()} == names | there


def test_an_error_of_writing_names_the_file(tmp_path):
    with pytest.raises(OSError, match=r"Input/output error: '.*a\.ckpt'"):
        _write_and_fail(tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


def _write_and_fail(path):
    with atomic_write(path, 3) as file:
        file.write(b"new")
        raise OSError(5, "Input/output error")


def test_an_error_of_writing_a_sharded_checkpoint_names_the_file_too(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(5, "Input/output error")

    content = {"state_dict": {"w": torch.ones(3)}}
    save = ShardedSave.prepare(content, tmp_path / "a.ckpt", {}, Channel(0, 1, None))
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"Input/output error: '.*__0_0\.distcp'"):
        save.run()
    assert os.listdir(tmp_path) == []
