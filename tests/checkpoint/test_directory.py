"""Checkpoint directories that are whole or not there."""

import errno
import os
import subprocess

import pytest

from lightning_zero.checkpoint.atomic import (
    begin,
    find_damage,
    put_in_place,
    recover,
    remove,
    write_checksums,
)


def make(target, text):
    temporary = begin(target)
    (temporary / "part").write_text(text)
    write_checksums(temporary, ["part"])
    return temporary


def test_nothing_is_at_the_place_until_it_is_whole(tmp_path):
    target = tmp_path / "deep" / "a.ckpt"
    temporary = make(target, "new")
    assert not target.exists()
    put_in_place(temporary, target)
    assert (target / "part").read_text() == "new"
    assert os.listdir(target.parent) == ["a.ckpt"]


@pytest.mark.parametrize("old", ["directory", "file", "link to a file", "link to a directory"])
def test_whatever_is_there_is_replaced(old, tmp_path):
    target = tmp_path / "a.ckpt"
    other = tmp_path / "other"
    if old == "directory":
        put_in_place(make(target, "old"), target)
    elif old == "file":
        target.write_text("old")
    elif old == "link to a file":
        other.write_text("other")
        target.symlink_to(other)
    else:
        put_in_place(make(other, "other"), other)
        target.symlink_to(other)
    put_in_place(make(target, "new"), target)
    assert (target / "part").read_text() == "new"
    assert not target.is_symlink()
    left = {"a.ckpt", "other"} if "link" in old else {"a.ckpt"}
    assert set(os.listdir(tmp_path)) == left
    if old == "link to a directory":
        assert (other / "part").read_text() == "other"


def test_a_file_replaces_a_directory(tmp_path):
    target = tmp_path / "a.ckpt"
    put_in_place(make(target, "old"), target)
    (tmp_path / "new").write_text("new")
    put_in_place(tmp_path / "new", target)
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_file_replaces_a_file_or_a_link_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "rename", lambda one, other: pytest.fail("the old one steps aside"))
    (tmp_path / "other").write_text("other")
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    for name in ("file", "link"):
        (tmp_path / "new").write_text("new")
        put_in_place(tmp_path / "new", tmp_path / name)
        assert (tmp_path / name).read_text() == "new"
        assert not (tmp_path / name).is_symlink()
    assert (tmp_path / "other").read_text() == "other"
    assert set(os.listdir(tmp_path)) == {"file", "link", "other"}


def test_a_stop_between_two_renames_leaves_the_old_one_to_be_recovered(tmp_path, monkeypatch):
    target = tmp_path / "a.ckpt"
    put_in_place(make(target, "old"), target)
    temporary = make(target, "new")
    replace = os.replace

    def stop(source, goal):
        if not goal.exists():
            raise KeyboardInterrupt
        replace(source, goal)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        put_in_place(temporary, target)
    monkeypatch.undo()
    assert not target.exists()
    recover(target)
    assert (target / "part").read_text() == "old"
    recover(target)
    put_in_place(make(target, "newer"), target)
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_where_the_new_one_cannot_take_the_place_the_old_one_comes_back(tmp_path, monkeypatch):
    target = tmp_path / "a.ckpt"
    put_in_place(make(target, "old"), target)
    temporary, replace = make(target, "new"), os.replace
    errors = iter([None, OSError(errno.EDQUOT, "no room")])

    def fail_at_second(source, place):
        if (error := next(errors)) is not None:
            raise error
        replace(source, place)

    monkeypatch.setattr(os, "replace", fail_at_second)
    with pytest.raises(OSError, match="no room"):
        put_in_place(temporary, target)
    assert (target / "part").read_text() == "old"


def test_a_reader_that_puts_the_old_one_back_meanwhile_does_no_harm(tmp_path, monkeypatch):
    target = tmp_path / "a.ckpt"
    put_in_place(make(target, "old"), target)
    temporary = make(target, "new")
    replace, tries = os.replace, []

    def read_meanwhile(source, goal):
        tries.append(goal.exists())
        if len(tries) == 2:
            recover(target)
        replace(source, goal)

    monkeypatch.setattr(os, "replace", read_meanwhile)
    put_in_place(temporary, target)
    assert tries == [True, False, False]
    assert (target / "part").read_text() == "new"
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_the_next_save_removes_what_a_crash_left_of_the_same_name_only(tmp_path):
    make(tmp_path / "a[1].ckpt", "crashed")
    make(tmp_path / "b.ckpt", "under way")
    target = tmp_path / "a[1].ckpt"
    put_in_place(make(target, "new"), target)
    assert target.is_dir()
    assert len(os.listdir(tmp_path)) == 2


def test_sha256sum_reads_the_checksums(tmp_path):
    temporary = make(tmp_path / "a.ckpt", "new")
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=temporary, capture_output=True
    )
    assert done.returncode == 0, done


def test_every_kind_of_damage_is_named(tmp_path):
    names = ["changed", "cut", "gone", "same"]
    for name in names:
        (tmp_path / name).write_bytes(os.urandom(100))
    write_checksums(tmp_path, names)
    assert find_damage(tmp_path) == []
    (tmp_path / "changed").write_bytes(os.urandom(100))
    os.truncate(tmp_path / "cut", 50)
    (tmp_path / "gone").unlink()
    damage = [
        "changed (100 bytes) differs from its checksum in SHA256SUMS",
        "cut (50 bytes) differs from its checksum in SHA256SUMS",
        "gone is missing",
    ]
    assert find_damage(tmp_path) == damage
    shares = [find_damage(tmp_path, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(line for share in shares for line in share) == damage
    (tmp_path / "SHA256SUMS").write_text("nonsense\n")
    assert find_damage(tmp_path) == ["line 1 of SHA256SUMS is no checksum"]


def test_removing_takes_files_links_and_directories(tmp_path):
    target = tmp_path / "a.ckpt"
    put_in_place(make(target, "old"), target)
    (tmp_path / "link").symlink_to(target)
    remove(tmp_path / "link")
    assert target.is_dir()
    remove(target)
    (tmp_path / "file").write_text("x")
    remove(tmp_path / "file")
    remove(tmp_path / "never there")
    assert os.listdir(tmp_path) == []
