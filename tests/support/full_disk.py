"""A small file system for tests of full disks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["mounted_tmpfs"]


def mounted_tmpfs(folder: Path, nbytes: int) -> Iterator[Path]:
    """Mounts a tmpfs of `nbytes` at `folder`, for a fixture; skips the test if that is refused."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a file system of a given size needs root: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        os.sync()
        subprocess.run(["umount", "-l", str(folder)], check=True)
