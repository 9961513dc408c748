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
from lightning_zero.tiers.disk import machine

DAY = 24 * 3600
HERE = " ".join((*machine(), "4242"))
OTHER_MACHINE = "othernode 0badb001 4242"


def save_directory(path):
    StagedDirectory(path).publish()


def save_file(path):
    with atomic_write(path, 4) as file:
        file.write(b"complete")


def make_leftover(folder, kind, age, holder=HERE):
    """A leftover of a process that died `age` seconds ago; `holder` is the content of its lock.

    Its name has wildcard characters.
    """
    target = Path(folder, "old [1].ckpt")
    path, lock = temporary_path(target, kind), temporary_path(target, "lock")
    path.mkdir()
    (path / "__0_0.distcp").touch()
    lock.write_text(holder)
    for file in (path / "__0_0.distcp", path, lock):
        os.utime(file, (time.time() - age, time.time() - age))
    return path


@pytest.mark.parametrize(
    "start", [save_directory, save_file, lambda path: delete_leftovers(path.parent)]
)
def test_leftovers_of_a_killed_job_are_deleted_by_the_next_save_or_start(start, tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_die_while_saving, args=[tmp_path])
    process.start()
    process.join()
    make_leftover(tmp_path, "removed", age=0)
    assert len(os.listdir(tmp_path)) == 6
    alive = StagedDirectory(tmp_path / "b.ckpt")
    with atomic_write(tmp_path / "c.ckpt", 3) as file:
        start(tmp_path / "a.ckpt")
        left = {path.name for path in tmp_path.iterdir()} - {"a.ckpt"}
        assert left == {f".{n}.ckpt.zero-{kind}" for n in "bc" for kind in ("incomplete", "lock")}
        file.write(b"new")
    alive.publish()
    assert {"b.ckpt", "c.ckpt"} <= set(os.listdir(tmp_path)) <= {"a.ckpt", "b.ckpt", "c.ckpt"}


def _die_while_saving(folder):
    draft = StagedDirectory(folder / "a.ckpt")
    (draft.folder / "__0_0.distcp").touch()
    with atomic_write(folder / "b.ckpt", 3):
        os._exit(9)


@pytest.mark.parametrize(
    ("holder", "goes_at_once"),
    [(HERE, True), ("", True), (f"renamed {machine()[1]} 1", True), (OTHER_MACHINE, False)],
)
def test_leftovers_of_other_machines_stay_for_a_day(holder, goes_at_once, tmp_path):
    path = make_leftover(tmp_path, "incomplete", 0.9 * DAY, holder)
    for _ in range(2):
        delete_leftovers(tmp_path)
        assert path.exists() == (not goes_at_once)
    shutil.rmtree(path, ignore_errors=True)
    path = make_leftover(tmp_path, "incomplete", 1.1 * DAY, holder)
    (path / "__1_0.distcp").touch()
    delete_leftovers(tmp_path)
    assert path.exists() == (not goes_at_once)
    shutil.rmtree(path, ignore_errors=True)
    make_leftover(tmp_path, "incomplete", 1.1 * DAY, holder)
    delete_leftovers(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_save_deletes_the_leftovers_of_another_machine_at_its_own_path(tmp_path):
    path = make_leftover(tmp_path, "incomplete", 0, OTHER_MACHINE)
    save_directory(tmp_path / "old [1].ckpt")
    assert not path.exists()
    assert os.listdir(tmp_path) == ["old [1].ckpt"]


def test_without_locks_saves_succeed_and_leftovers_stay_for_a_day(tmp_path, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(95, "not supported")

    monkeypatch.setattr(atomic.fcntl, "flock", refuse)
    under_way = StagedDirectory(tmp_path / "a.ckpt")
    save_directory(tmp_path / "c.ckpt")
    save_file(tmp_path / "b.ckpt")
    under_way.publish()
    path = make_leftover(tmp_path, "incomplete", 0.9 * DAY)
    save_file(tmp_path / "b.ckpt")
    assert path.exists()
    shutil.rmtree(path)
    make_leftover(tmp_path, "incomplete", 1.1 * DAY)
    save_file(tmp_path / "b.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt", "c.ckpt"]


def test_a_lock_deleted_by_its_holder_meanwhile_is_made_again(tmp_path, monkeypatch):
    flock, calls = atomic.fcntl.flock, []

    def disturbed(descriptor, how):
        calls.append(how)
        if len(calls) == 1:
            temporary_path(tmp_path / "a.ckpt", "lock").unlink()  # another process
        flock(descriptor, how)

    monkeypatch.setattr(atomic.fcntl, "flock", disturbed)
    monkeypatch.setattr(atomic, "_PAUSE_S", 0.001)
    draft = StagedDirectory(tmp_path / "a.ckpt")
    with pytest.raises(OSError, match="is saving to this path"):
        StagedDirectory(tmp_path / "a.ckpt")
    draft.publish()
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_replaced_checkpoint_is_restored_and_similar_names_stay(tmp_path):
    names = {".old.ckpt.incomplete", "old.zero-removed", ".zero-removed", ".old.ckpt.lock"}
    for name in names | {".old.ckpt.zero-replaced", ".new.ckpt.zero-replaced", "new.ckpt"}:
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


def test_a_save_does_not_wait_for_a_save_to_another_path(tmp_path):
    alive = StagedDirectory(tmp_path / "b.ckpt")
    start = time.monotonic()
    for number in range(10):
        save_file(tmp_path / f"{number}.ckpt")
    assert time.monotonic() - start < 2
    alive.publish()
