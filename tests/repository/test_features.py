"""The table of what works in docs/limits.md is the list of what marked tests show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch import callbacks

from tests.support.features import BEGIN, END

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "limits.md"
COMMAND = 'pytest -m "shows or refuses" --write-features docs/limits.md'
ABSTRACT = {"Callback", "Checkpoint", "ProgressBar"}


def between_comments(text):
    return text.partition(BEGIN)[2].partition(END)[0].strip()


@pytest.mark.slow
def test_every_row_has_a_test_and_every_marked_test_a_row():
    command = [sys.executable, "-m", "pytest", "--collect-only", "--list-features", "-qq", "tests"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    claimed = between_comments(done.stdout)
    written = between_comments(PAGE.read_text())
    assert written == claimed, f"run {COMMAND}\n{claimed}"


def test_every_callback_of_lightning_has_a_row():
    written = between_comments(PAGE.read_text())
    for name in set(callbacks.__all__) - ABSTRACT:
        assert re.search(rf"^\| .*`{name}`.* \| (yes|refused) \|", written, re.MULTILINE), name
