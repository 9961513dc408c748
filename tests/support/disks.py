"""Fixtures: disks that fail."""

import contextlib
import os
import subprocess

import pytest

__all__ = ["loop_disk", "make_ext4", "mounted"]


@pytest.fixture
def mounted(tmp_path):
    """Mounts a file system for the test: mounted("-t", "tmpfs", ...) returns its directory."""
    if os.getuid() != 0:
        pytest.skip("only root can mount")
    places = []

    def mount(*arguments):
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", *arguments, str(place)], capture_output=True, text=True, timeout=60
        )
        if done.returncode != 0:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in reversed(places):
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run(["umount", "--lazy", str(place)], timeout=60, check=False)


@pytest.fixture
def loop_disk(mounted, tmp_path):
    """An ext4 disk in a file: (its directory, the file). Truncating the file truncates the disk."""
    image = tmp_path / "disk.img"
    make_ext4(image, 48 * 2**20)
    return mounted("-o", "loop", str(image)), image


def make_ext4(image, nbytes, *options):
    """Makes an empty ext4 disk in a sparse file; skips the test where that is not possible."""
    image.touch()
    os.truncate(image, nbytes)
    try:
        subprocess.run(["mkfs.ext4", "-q", *options, str(image)], check=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("needs mkfs.ext4")
