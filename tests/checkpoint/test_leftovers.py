"""What killed jobs leave beside checkpoints goes, unless somebody may be at work on it."""

import os
import time
from pathlib import Path

import pytest

from lightning_zero.checkpoint.atomic import begin, beside, put_in_place, replacing

DAY = 24 * 3600


def save_directory(path):
    put_in_place(begin(path), path)


def save_file(path):
    with replacing(path, 4) as file:
        file.write(b"whole")


def leave(folder, kind, age):
    path = beside(Path(folder, "old [1].ckpt"), kind)
    path.mkdir()
    (path / "__0_0.distcp").touch()
    for one in (path / "__0_0.distcp", path):
        os.utime(one, (time.time() - age, time.time() - age))
    return path


@pytest.mark.parametrize("save", [save_directory, save_file])
@pytest.mark.parametrize("kind", ["incomplete", "removed"])
def test_a_save_of_another_name_removes_what_nothing_was_written_to_for_a_day(kind, save, tmp_path):
    leave(tmp_path, kind, age=1.1 * DAY)
    running = leave(tmp_path, kind, age=1.1 * DAY)
    (running / "__1_0.distcp").touch()
    leave(tmp_path, kind, age=0.9 * DAY)
    save(tmp_path / "a.ckpt")
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 3
    assert {"a.ckpt", running.name} < left


def test_what_was_set_aside_and_what_only_looks_alike_stays(tmp_path):
    names = {".old.ckpt.replaced-0123abcd", ".old.ckpt.incomplete-mine", "old.removed-0123abcd"}
    for name in names:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    save_directory(tmp_path / "a.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == names | {"a.ckpt"}
