"""What killed jobs leave beside checkpoints goes, unless somebody may be at work on it."""

import os
import subprocess
import sys
import time
from pathlib import Path

from lightning_zero.checkpoint import atomic
from lightning_zero.checkpoint.atomic import beside, remove_leftovers, replacing

CODE = """
import sys, time
from pathlib import Path
from lightning_zero.checkpoint.atomic import beside
for parent in sys.argv[1:]:
    for kind in ("incomplete", "removed"):
        folder = beside(Path(parent, "old [1].ckpt"), kind)
        folder.mkdir()
        (folder / "__0_0.distcp").touch()
print("made", flush=True)
time.sleep(600)
"""


def leftovers(folder):
    return [path.name for path in sorted(folder.iterdir()) if path.name.startswith(".old")]


def test_a_save_of_another_name_removes_what_a_dead_process_left_and_a_living_one_keeps(tmp_path):
    def save(name):
        atomic.put_in_place(atomic.begin(folders[0] / name), folders[0] / name)
        with replacing(folders[1] / name, 4) as file:
            file.write(b"whole")

    folders = [tmp_path / form for form in ("directory", "file")]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "-c", CODE, *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "made\n"
            save("a.ckpt")
            assert [len(leftovers(folder)) for folder in folders] == [2, 2]
        finally:
            process.kill()
    save("b.ckpt")
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir()) == ["a.ckpt", "b.ckpt"]


def test_what_another_machine_began_goes_when_nothing_was_written_to_it_for_a_day(tmp_path):
    folder = tmp_path / ".old.ckpt.incomplete-00000000-1-1-0123abcd"
    folder.mkdir()
    (folder / "__0_0.distcp").touch()
    yesterday = time.time() - 25 * 3600
    os.utime(folder, (yesterday, yesterday))
    assert remove_leftovers(tmp_path, time.time()) == []  # its file is new
    os.utime(folder / "__0_0.distcp", (yesterday, yesterday))
    assert remove_leftovers(tmp_path, time.time()) == [folder]


def test_what_was_set_aside_and_what_only_looks_alike_stays(tmp_path):
    names = [".old.ckpt.replaced-0123abcd", ".old.ckpt.incomplete-mine", "old.removed-0123abcd"]
    for name in names:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    own = beside(Path(tmp_path, "old.ckpt"), "incomplete")
    own.mkdir()
    os.utime(own, (0, 0))
    assert remove_leftovers(tmp_path, time.time()) == []
