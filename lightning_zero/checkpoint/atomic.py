"""Files and directories that are there whole or not at all.

[Note: Whole or not there] What is written has a name of its own beside its place,
`.NAME.incomplete-RANDOM`. Its files and its folder are synced, and it is renamed to `NAME`. A file
replaces a file in that one rename. A directory cannot: the old one steps aside first, as
`.NAME.replaced-RANDOM`, and comes back in `recover` should the machine stop between the renames. So
`NAME` is the old or the new checkpoint, never a part of one.

What a crash leaves has a name that begins with a dot. The next save to `NAME` removes what is left
of `NAME`, but for a file that its writer still has locked; a save of any name in the folder removes
what nothing was written to for a day, by the clock of the file system: other jobs may save to the
same folder at this moment, and a save writes all the time. What was set aside may be the only copy
of a checkpoint and goes only when a newer one is in its place.

`SHA256SUMS` in a directory lists files of it; `sha256sum -c SHA256SUMS` reads it.

For addresses of remote storage see [Note: Whole or not there, remotely].
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from lightning_zero.checkpoint.remote import RemotePath, is_remote
from lightning_zero.layout.foreign_names import check_inside, printable

__all__ = [
    "CHECKSUMS",
    "FULL",
    "Place",
    "begin",
    "beside",
    "discard",
    "explained",
    "files_below",
    "find_damage",
    "full_disk_error",
    "local_path",
    "locate",
    "put_in_place",
    "recover",
    "remove",
    "replacing",
    "write_checksums",
]

CHECKSUMS = "SHA256SUMS"
_LOCAL = re.compile(r"(?:file|local):(?://)?")
_MAX_NAME = 200  # of the 255 that file systems allow
_RANDOM = r"[0-9a-f]{8}"
_LEFTOVER = re.compile(rf"\..+\.(?:incomplete|removed)-{_RANDOM}")
_ABANDONED_S = 24 * 3600.0
_BLOCK_BYTES = 1 << 20  # read or written at once; little, for checking must not show in memory
_GIB = 1024**3
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_IN_THE_WAY = {errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR}
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")

Place = Path | RemotePath


def locate(path: str | os.PathLike[str]) -> Place:
    """Where a checkpoint is: `local_path`, or remote storage as it is at this moment."""
    if not is_remote(path):
        return local_path(path)
    place = RemotePath(os.fspath(path))
    place.refresh()
    return place


def local_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path on a local or mounted file system of what may begin with `~` or `file://`.

    Raises:
        ValueError: A URL of another file system.
    """
    text = os.fspath(path)
    if match := _LOCAL.match(text):
        text = text[match.end() :]
    if "://" in text:
        raise ValueError(f"expected a path on a local or mounted file system, got {text}.")
    return Path(text).expanduser().absolute()


# ------------------------------------------------------------------------------------- names beside


def beside(target: Path, kind: str) -> Path:
    return target.parent / f".{target.name[:_MAX_NAME]}.{kind}-{secrets.token_hex(4)}"


def _left_of(target: Path, kind: str) -> list[Path]:
    """What lies beside `target` under such names."""
    name = re.compile(re.escape(f".{target.name[:_MAX_NAME]}.{kind}-") + _RANDOM)
    with contextlib.suppress(OSError):
        return sorted(path for path in target.parent.iterdir() if name.fullmatch(path.name))
    return []


def _remove_leftovers(folder: Path, now: float) -> None:
    """Removes what nobody has written to for a day, by the clock of its file system.

    What cannot be removed stays.
    """
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):
                if _LEFTOVER.fullmatch(path.name):
                    files = path.iterdir() if path.is_dir() else ()
                    written = max(file.lstat().st_mtime for file in (path, *files))
                    if now - written > _ABANDONED_S:
                        _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# ------------------------------------------------------------------------------- taking the place


def begin(target: Path) -> Path:
    """Makes an empty directory beside `target` to be written; removes what crashes have left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    recover(target)
    for kind in ("incomplete", "replaced", "removed"):
        for leftover in _left_of(target, kind):
            with contextlib.suppress(OSError):  # a network file system keeps what is in use
                _delete(leftover)
    temporary = beside(target, "incomplete")
    temporary.mkdir()
    _remove_leftovers(target.parent, temporary.stat().st_mtime)
    return temporary


def put_in_place(temporary: Path, target: Path) -> None:
    """Renames `temporary`, a file or a directory, to `target`, and deletes what was there.

    A symbolic link at `target` is replaced, not followed.
    """
    replaced: list[Path] = []
    while True:
        try:
            os.replace(temporary, target)
            break
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                recover(target)  # what has stepped aside
                raise
        replaced.append(beside(target, "replaced"))
        os.rename(target, replaced[-1])  # once more where a reader has put it back
    for path in replaced:
        with contextlib.suppress(OSError):  # as in `begin`, where it goes later
            _delete(path)
    _sync_folder(target.parent)


def files_below(folder: Place) -> dict[str, int]:
    """Bytes of every file in a folder and the folders in it, by the name from there, in order."""
    if isinstance(folder, RemotePath):
        return dict(sorted(folder.files().items()))
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def recover(target: Place) -> None:
    """Puts back what `put_in_place` had set aside when the machine stopped."""
    if isinstance(target, RemotePath):
        return
    if os.path.lexists(target) or not target.parent.is_dir():
        return
    aside = _left_of(target, "replaced")
    if aside:
        try:
            os.rename(max(aside, key=os.path.getmtime), target)
        except OSError:
            if not os.path.lexists(target):  # else another process has been faster
                raise


def remove(target: Place) -> None:
    """Deletes a file, a link or a directory; what is half deleted has another name."""
    if isinstance(target, RemotePath):
        target.remove()
        return
    if not os.path.lexists(target):
        return
    if target.is_dir() and not target.is_symlink():
        aside = beside(target, "removed")
        os.utime(target)  # else it may look abandoned to the saves of others
        os.rename(target, aside)
        target = aside
    with contextlib.suppress(FileNotFoundError):
        _delete(target)


def discard(folder: Place) -> None:
    """Deletes what was not completed; what cannot be deleted stays."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(Exception):  # storage that is not there raises what it likes
        folder.remove()


def _sync_folder(folder: Path) -> None:
    """Waits until the names in `folder` are on the disk, where the file system can tell."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------- checksums


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Lists the checksums of these files of `folder`, and syncs the list and the folder."""
    with open(folder / CHECKSUMS, "w", encoding="utf-8") as file:
        file.writelines(f"{_hash(folder / name)}  {name}\n" for name in sorted(names))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)


def find_damage(folder: Place, *, rank: int = 0, world_size: int = 1) -> list[str]:
    """One line for each file in this rank's share of `SHA256SUMS` that is missing or differs."""
    sums = folder / CHECKSUMS
    try:
        lines = sums.read_text(encoding="utf-8").splitlines() if sums.is_file() else []
    except UnicodeDecodeError as error:
        return [f"{CHECKSUMS} is no text ({error})"]
    damage = []
    for number, line in list(enumerate(lines, start=1))[rank::world_size]:
        match = _LINE.fullmatch(line)
        if not match:
            damage.append(f"line {number} of {CHECKSUMS} is no checksum")
            continue
        digest, name = match.groups()
        try:
            file = folder / check_inside(name)
        except ValueError as error:
            damage.append(f"line {number} of {CHECKSUMS}: {error}")
            continue
        if not file.is_file():
            damage.append(f"{printable(name)} is missing")
        elif _hash(file) != digest:
            size = file.stat().st_size
            damage.append(
                f"{printable(name)} ({size} bytes) differs from its checksum in {CHECKSUMS}"
            )
    return damage


def _hash(path: Place) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------- one file


@contextlib.contextmanager
def replacing(path: Place, nbytes: int) -> Iterator[BinaryIO]:
    """A new file that takes the place of whatever is at `path` when the block ends well.

    A link at `path` is replaced, not followed; so is a directory. After an exception, or where
    the process dies, what was at `path` is unchanged. See [Note: Whole or not there].

    Args:
        path: Its folder exists, or it is remote.
        nbytes: Size of the file, or a little more. The space is reserved first, where the file
            system can, so that a full disk is known before anything is written.

    Raises:
        OSError: The file cannot be written. On a full disk it names path, bytes needed and free.
    """
    if isinstance(path, RemotePath):
        with path.replacing(nbytes) as file:
            yield file
        return
    _remove_unlocked(path)
    temporary = beside(path, "incomplete")
    with explained(path, nbytes), open(temporary, "xb", _BLOCK_BYTES) as file:
        try:
            with contextlib.suppress(OSError):  # where the file system has no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            _remove_leftovers(path.parent, os.fstat(file.fileno()).st_mtime)
            _reserve(file, nbytes)
            yield file
            file.truncate(file.tell())
            file.flush()
            os.fsync(file.fileno())
            put_in_place(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def _remove_unlocked(path: Path) -> None:
    for leftover in _left_of(path, "incomplete"):
        if not leftover.is_dir():
            with contextlib.suppress(OSError), open(leftover, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
                leftover.unlink()


def _reserve(file: BinaryIO, nbytes: int) -> None:
    # Not posix_fallocate, which writes to every block where the file system cannot do better.
    allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if allocate is None or not nbytes:
        return
    arguments = (ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(nbytes))
    if allocate(file.fileno(), *arguments) and ctypes.get_errno() in FULL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextlib.contextmanager
def explained(path: Place, nbytes: int) -> Iterator[None]:
    """Says in the error of a full disk how much was needed for `path` and how much there is."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or isinstance(path, RemotePath):
            raise
        free = shutil.disk_usage(path.parent).free
        raise full_disk_error(path, nbytes, free, error.errno) from error


def full_disk_error(path: Path, nbytes: int, free: int, number: int = errno.ENOSPC) -> OSError:
    return OSError(
        number,
        f"{path} was not written: it needs {nbytes} bytes ({nbytes / _GIB:.2f} GiB) and {free} "
        f"bytes ({free / _GIB:.2f} GiB) are free ({os.strerror(number)}); make room or choose "
        "another folder. What was there before is unchanged.",
    )
