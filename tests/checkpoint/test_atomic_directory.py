"""Atomic replacement of checkpoint directories."""

import errno
import multiprocessing
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_zero.checkpoint import atomic
from lightning_zero.checkpoint.atomic import (
    StagedDirectory,
    atomic_write,
    recover,
    remove,
    temporary_path,
)
from lightning_zero.checkpoint.checksums import find_listed_damage, write_checksums
from lightning_zero.tiers.disk import machine


def make(target, text):
    draft = StagedDirectory(target)
    (draft.folder / "part").write_text(text)
    write_checksums(draft.folder, ["part"])
    return draft


def test_the_target_appears_only_when_complete(tmp_path):
    target = tmp_path / "deep" / "a.ckpt"
    draft = make(target, "new")
    assert not target.exists()
    draft.publish()
    assert (target / "part").read_text() == "new"
    assert os.listdir(target.parent) == ["a.ckpt"]


@pytest.mark.parametrize("old", ["directory", "file", "link to a file", "link to a directory"])
def test_any_existing_target_is_replaced(old, tmp_path):
    target = tmp_path / "a.ckpt"
    other = tmp_path / "other"
    if old == "directory":
        make(target, "old").publish()
    elif old == "file":
        target.write_text("old")
    elif old == "link to a file":
        other.write_text("other")
        target.symlink_to(other)
    else:
        make(other, "other").publish()
        target.symlink_to(other)
    make(target, "new").publish()
    assert (target / "part").read_text() == "new"
    assert not target.is_symlink()
    left = {"a.ckpt", "other"} if "link" in old else {"a.ckpt"}
    assert set(os.listdir(tmp_path)) == left
    if old == "link to a directory":
        assert (other / "part").read_text() == "other"


def test_a_file_replaces_a_directory(tmp_path):
    target = tmp_path / "a.ckpt"
    make(target, "old").publish()
    with atomic_write(target, 3) as file:
        file.write(b"new")
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_file_replaces_a_file_or_a_link_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "rename", lambda source, goal: pytest.fail("the old one steps aside"))
    (tmp_path / "other").write_text("other")
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    for name in ("file", "link"):
        with atomic_write(tmp_path / name, 3) as file:
            file.write(b"new")
        assert (tmp_path / name).read_text() == "new"
        assert not (tmp_path / name).is_symlink()
    assert (tmp_path / "other").read_text() == "other"
    assert set(os.listdir(tmp_path)) == {"file", "link", "other"}


def _die_between_two_renames(target):
    replace = os.replace

    def stop(source, goal):
        if not goal.exists():
            os._exit(9)
        replace(source, goal)

    draft = make(target, "new")
    os.replace = stop
    draft.publish()


def test_a_stop_between_two_renames_leaves_the_old_one_to_be_recovered(tmp_path):
    target = tmp_path / "a.ckpt"
    make(target, "old").publish()
    process = multiprocessing.Process(target=_die_between_two_renames, args=(target,))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert not target.exists()
    recover(target)
    assert (target / "part").read_text() == "old"
    recover(target)
    make(target, "newer").publish()
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_the_old_one_is_restored_if_the_new_one_cannot_replace_it(tmp_path, monkeypatch):
    target = tmp_path / "a.ckpt"
    make(target, "old").publish()
    draft, replace = make(target, "new"), os.replace
    errors = iter([None, OSError(errno.EDQUOT, "disk full")])

    def fail_at_second(source, place):
        if (error := next(errors)) is not None:
            raise error
        replace(source, place)

    monkeypatch.setattr(os, "replace", fail_at_second)
    with pytest.raises(OSError, match="disk full"):
        draft.publish()
    assert (target / "part").read_text() == "old"


def test_a_reader_that_comes_between_two_renames_waits_for_the_second(tmp_path, monkeypatch):
    target = tmp_path / "a.ckpt"
    make(target, "old").publish()
    draft, replace = make(target, "new"), os.replace
    with ThreadPoolExecutor(1) as thread:
        readers = []

        def read_meanwhile(source, goal):
            if not goal.exists():
                readers.append(thread.submit(recover, target))
                time.sleep(0.1)
                assert not readers[0].done()
            replace(source, goal)

        monkeypatch.setattr(os, "replace", read_meanwhile)
        draft.publish()
        readers[0].result()
    assert (target / "part").read_text() == "new"
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_reader_that_cannot_see_the_lock_and_puts_the_old_one_back_does_no_harm(
    tmp_path, monkeypatch
):
    target = tmp_path / "a.ckpt"
    make(target, "old").publish()
    draft = make(target, "new")
    replace, tries = os.replace, []

    def read_meanwhile(source, goal):
        tries.append(goal.exists())
        if len(tries) == 2:
            os.rename(temporary_path(target, "replaced"), target)
        replace(source, goal)

    monkeypatch.setattr(os, "replace", read_meanwhile)
    draft.publish()
    assert tries == [True, False, False]
    assert (target / "part").read_text() == "new"
    assert os.listdir(tmp_path) == ["a.ckpt"]


def _write_file(path):
    with atomic_write(path, 3) as file:
        file.write(b"new")


@pytest.mark.parametrize("write", [StagedDirectory, _write_file, remove])
def test_a_second_writer_gets_an_error_that_names_the_first_one(write, tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_PAUSE_S", 0.001)
    target = tmp_path / "a.ckpt"
    make(target, "old").publish()
    first = make(target, "first")
    match = rf"process {os.getpid()} on {machine()[0]} is saving to this path.*a\.ckpt"
    with pytest.raises(OSError, match=match) as caught:
        write(target)
    assert caught.value.errno == errno.EBUSY
    assert (target / "part").read_text() == "old"
    first.publish()
    assert (target / "part").read_text() == "first"
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_sha256sum_reads_the_checksums(tmp_path):
    draft = make(tmp_path / "a.ckpt", "new")
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=draft.folder, capture_output=True
    )
    assert done.returncode == 0, done


def test_every_kind_of_damage_is_named(tmp_path):
    names = ["changed", "truncated", "gone", "same"]
    for name in names:
        (tmp_path / name).write_bytes(os.urandom(100))
    write_checksums(tmp_path, names)
    assert find_listed_damage(tmp_path) == []
    (tmp_path / "changed").write_bytes(os.urandom(100))
    os.truncate(tmp_path / "truncated", 50)
    (tmp_path / "gone").unlink()
    damage = [
        "changed (100 bytes) differs from its checksum in SHA256SUMS",
        "gone is missing",
        "truncated (50 bytes) differs from its checksum in SHA256SUMS",
    ]
    assert find_listed_damage(tmp_path) == damage
    shares = [find_listed_damage(tmp_path, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(line for share in shares for line in share) == damage
    (tmp_path / "SHA256SUMS").write_text("nonsense\n")
    assert find_listed_damage(tmp_path) == ["line 1 of SHA256SUMS is not a checksum"]


def test_removing_takes_files_links_and_directories(tmp_path):
    target = tmp_path / "a.ckpt"
    make(target, "old").publish()
    (tmp_path / "link").symlink_to(target)
    remove(tmp_path / "link")
    assert target.is_dir()
    remove(target)
    (tmp_path / "file").write_text("x")
    remove(tmp_path / "file")
    remove(tmp_path / "never there")
    assert os.listdir(tmp_path) == []
