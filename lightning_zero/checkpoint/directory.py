"""Checkpoint directories that are whole or not there.

[Note: Whole or not there] A directory is written beside its place, as `.NAME.incomplete-RANDOM`,
files and folder are synced, and it is renamed. Where something is in its place already the two are
exchanged in one system call; where there is no such call the old one steps aside as
`.NAME.replaced-RANDOM`, and comes back in `recover` should the machine stop between the two
renames. So at every moment `NAME` is the old or the new checkpoint, never a part of one. What a
crash leaves behind has a name that begins with a dot and is removed by the next save to `NAME`, or
of another name in the folder; see [Note: Whose leftover].

`SHA256SUMS` in the directory lists every other file; `sha256sum -c SHA256SUMS` reads it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from lightning_zero.checkpoint.leftovers import beside, named_beside, remove_leftovers

__all__ = [
    "CHECKSUMS",
    "begin",
    "find_damage",
    "hash_file",
    "put_in_place",
    "recover",
    "remove",
    "sync_folder",
    "write_checksums",
]

CHECKSUMS = "SHA256SUMS"
_BLOCK_BYTES = 1 << 20  # little: checking must not show in memory
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def begin(target: Path) -> Path:
    """Makes an empty directory beside `target` to be written; removes what crashes have left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    recover(target)
    for kind in ("incomplete", "replaced", "removed"):
        for leftover in named_beside(target, kind):
            _delete(leftover)
    temporary = beside(target, "incomplete")
    temporary.mkdir()
    remove_leftovers(target.parent, temporary.stat().st_mtime)
    return temporary


def put_in_place(temporary: Path, target: Path) -> None:
    """Renames `temporary`, a file or a directory, to `target`, and deletes what was there.

    A symbolic link at `target` is replaced, not followed.
    """
    is_folder = target.is_dir() and not target.is_symlink()
    if not os.path.lexists(target):
        os.rename(temporary, target)
    elif not temporary.is_dir() and not is_folder:
        os.replace(temporary, target)  # at once, on every file system
    elif _exchange(temporary, target):
        _delete(temporary)
    else:
        aside = beside(target, "replaced")
        os.rename(target, aside)
        os.rename(temporary, target)
        _delete(aside)
    sync_folder(target.parent)


def recover(target: Path) -> None:
    """Puts a directory back that `put_in_place` had set aside when the machine stopped."""
    if os.path.lexists(target) or not target.parent.is_dir():
        return
    aside = sorted(named_beside(target, "replaced"), key=os.path.getmtime)
    if aside:
        try:
            os.rename(aside[-1], target)
        except OSError:
            if not os.path.lexists(target):  # else another process has been faster
                raise


def remove(target: Path) -> None:
    """Deletes a file, a link or a directory; what is half deleted has another name."""
    if not os.path.lexists(target):
        return
    if target.is_dir() and not target.is_symlink():
        aside = beside(target, "removed")
        os.rename(target, aside)
        target = aside
    _delete(target)


def sync_folder(folder: Path) -> None:
    """Waits until the names in `folder` are on the disk, where the file system can tell."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)


def write_checksums(folder: Path, digests: Mapping[str, str]) -> None:
    """Writes the list, by file name, and syncs it and the folder."""
    with open(folder / CHECKSUMS, "w", encoding="utf-8") as file:
        file.writelines(f"{digests[name]}  {name}\n" for name in sorted(digests))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    block = bytearray(_BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()


def find_damage(folder: Path, *, rank: int = 0, world_size: int = 1) -> list[str]:
    """What is missing or differs from `SHA256SUMS`; nothing where there is no such list.

    Args:
        folder: The checkpoint.
        rank: This rank reads its share of the files.
        world_size: Ranks among which the files are shared.

    Returns:
        One line for each damaged file of this rank's share.
    """
    sums = folder / CHECKSUMS
    if not sums.is_file():
        return []
    damage = []
    for number, line in enumerate(sums.read_text(encoding="utf-8").splitlines()):
        if number % world_size != rank:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            damage.append(f"line {number + 1} of {CHECKSUMS} is no checksum")
            continue
        digest, name = match.groups()
        if not (folder / name).is_file():
            damage.append(f"{name} is missing")
        elif hash_file(folder / name) != digest:
            size = (folder / name).stat().st_size
            damage.append(f"{name} ({size} bytes) differs from its checksum")
    return damage


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names at once; False where the system or file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if rename(*arguments) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))
