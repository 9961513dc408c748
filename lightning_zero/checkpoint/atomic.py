"""Atomic replacement of local files and directories: a reader finds the old or the new.

[Note: Atomic replacement] A checkpoint is written under a temporary name in the folder of its
target, `.NAME.zero-incomplete`. Its files and its folder are synced, then it is renamed to `NAME`.
A file replaces a file in this one step. Otherwise the old checkpoint is first renamed to
`.NAME.zero-replaced`. If the process stops between the two renames, `recover` renames it back. The
folder is synced before the old one is deleted. `NAME` is never a part of a checkpoint, or a mix.

[Note: One writer] A writer locks `.NAME.zero-lock` with `flock`; the file names its host, boot and
process. The kernel releases the lock when the process ends, for whatever reason. A second writer
gets an error that names the first one. Each save, and each start on a folder (`delete_leftovers`),
deletes what writers have left there whose lock is free. On some network file systems a lock is
visible on one machine only, so leftovers of other machines stay for a day, except those of the
saver's own target.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from lightning_zero.checkpoint.checksums import CHECKSUMS, write_checksums
from lightning_zero.checkpoint.new_file import create, explain_os_errors, name_path_in_errors
from lightning_zero.tiers.disk import machine

__all__ = [
    "StagedDirectory",
    "atomic_write",
    "delete_leftovers",
    "file_identity",
    "make_folder",
    "recover",
    "remove",
    "temporary_path",
]

_MAX_NAME_BYTES = 200  # file systems allow 255
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.zero-(?:incomplete|replaced|removed|lock)", re.DOTALL)
_ABANDONED_S = 24 * 3600.0
_NUM_TRIES = 100
_PAUSE_S = 0.02
_UNSUPPORTED_ERRNOS = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_TARGET_EXISTS_ERRNOS = {errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR}

# --------------------------------------------------------------------------------------- one writer


def temporary_path(target: Path, kind: str) -> Path:
    """The name of `kind` beside `target`: "incomplete", "replaced", "removed" or "lock"."""
    name = os.fsencode(target.name)
    if len(name) > _MAX_NAME_BYTES:
        digest = hashlib.sha256(name).hexdigest()[:16]
        name = name[: _MAX_NAME_BYTES - 16] + digest.encode()
    return target.parent / f".{os.fsdecode(name)}.zero-{kind}"


def _lock(target: Path, num_tries: int = _NUM_TRIES) -> tuple[int, bool]:
    """Locks `target`; tries again while another process holds it. See [Note: One writer].

    Returns:
        File descriptor of the lock, and whether no process of another machine can hold it.

    Raises:
        OSError: Another process holds it (EBUSY).
    """
    path = temporary_path(target, "lock")
    for _ in range(num_tries):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        holder = os.pread(lock, 200, 0).decode(errors="replace").split()
        has_locks = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a save, or a process that is deleting leftovers
            os.close(lock)
            time.sleep(_PAUSE_S)
            continue
        except OSError:
            has_locks = False
        if file_identity(path) == _identity(os.fstat(lock)):
            is_from_here = not holder or bool(set(holder[:2]) & set(machine()))
            return lock, has_locks and is_from_here
        os.close(lock)  # its holder has deleted it meanwhile
    host, _, process = holder if len(holder) == 3 else ("this machine", "", "(unknown)")
    why = f"process {process} on {host} is saving to this path; use another one, or try again later"
    raise OSError(errno.EBUSY, why, str(target))


def _unlock(lock: int, path: Path | None = None) -> None:
    """Releases a lock, after deleting its file if `path` is given."""
    with contextlib.suppress(OSError):
        if path is not None:
            path.unlink()
        fcntl.flock(lock, fcntl.LOCK_UN)  # forked processes hold it, too
    os.close(lock)


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """Locks `target`, and yields its temporary name, at which nothing is left in the end."""
    delete_leftovers(target.parent)
    lock, _ = _lock(target)
    temporary = temporary_path(target, "incomplete")
    try:
        with contextlib.suppress(OSError):  # the disk is full
            os.ftruncate(lock, 0)
            os.pwrite(lock, " ".join((*machine(), str(os.getpid()))).encode(), 0)
        _settle(target)
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            _delete(temporary)
        _unlock(lock, temporary_path(target, "lock"))


def _settle(target: Path) -> None:
    """Restores what a dead writer has replaced, or deletes it. The caller holds the lock."""
    _restore(target)
    paths = [temporary_path(target, kind) for kind in ("incomplete", "replaced", "removed")]
    if any(map(os.path.lexists, paths)):
        _sync_folder(target.parent)  # its successor must be on the disk before one is deleted
        _drop(paths[1], target)
        _delete(paths[0])


def _restore(target: Path) -> None:
    """Renames the replaced checkpoint back if nothing has taken its name."""
    replaced = temporary_path(target, "replaced")
    if os.path.lexists(replaced) and not os.path.lexists(target):
        os.rename(replaced, target)


def _drop(path: Path, target: Path) -> None:
    """Deletes `path` under a name that no process takes for a checkpoint."""
    removed = temporary_path(target, "removed")
    _delete(removed)
    if os.path.lexists(path):
        os.rename(path, removed)
        _sync_folder(target.parent)  # or a power failure may leave a part of it under its name
        _delete(removed)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------- leftovers


def delete_leftovers(folder: Path) -> None:
    """Restores replaced checkpoints in `folder` and deletes the leftovers of dead writers.

    See [Note: One writer]. Entries that cannot be read, renamed or deleted stay.
    """
    for target in _targets_with_leftovers(folder):
        with contextlib.suppress(OSError):
            _clean(target, num_tries=1)


def recover(target: Path) -> None:
    """Restores `target` if a process stopped between the two renames of [Note: Atomic replacement].

    Waits if a process is between the two.
    """
    if not os.path.lexists(target) and os.path.lexists(temporary_path(target, "replaced")):
        try:
            _clean(target)
        except OSError:
            if not os.path.lexists(target):
                raise


def _clean(target: Path, num_tries: int = _NUM_TRIES) -> None:
    """Restores what a writer has replaced, and deletes its leftovers if it is surely dead."""
    lock, is_abandoned = _lock(target, num_tries)
    try:
        _restore(target)
        is_abandoned = is_abandoned or _are_leftovers_old(target)
        if is_abandoned:
            _settle(target)
    finally:
        _unlock(lock, temporary_path(target, "lock") if is_abandoned else None)


def _targets_with_leftovers(folder: Path) -> list[Path]:
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(folder))
    found = dict.fromkeys(match["name"] for match in map(_TEMPORARY.fullmatch, names) if match)
    # The name of the target of a longer one is not known.
    return [folder / name for name in found if len(os.fsencode(name)) < _MAX_NAME_BYTES]


def _are_leftovers_old(target: Path) -> bool:
    paths = [temporary_path(target, k) for k in ("incomplete", "replaced", "removed", "lock")]
    paths = [path for path in paths if os.path.lexists(path)]
    paths += [file for path in paths if path.is_dir() for file in path.iterdir()]
    return time.time() - max(path.lstat().st_mtime for path in paths) > _ABANDONED_S


# -------------------------------------------------------------------------------------- replacement


class StagedDirectory:
    """A temporary directory that is written, and then replaces `target` atomically.

    Attributes:
        folder: The directory, until `publish` or `discard`.
    """

    folder: Path

    def __init__(self, target: Path) -> None:
        """Locks the target and creates the directory, in the target's folder."""
        make_folder(target.parent)
        self._target = target
        with contextlib.ExitStack() as stack:
            self.folder = stack.enter_context(_writing(target))
            self.folder.mkdir()
            self._until_end = stack.pop_all()

    def publish(self, listed: Iterable[str] = ()) -> None:
        """Replaces the target with the directory, and deletes the old target.

        `listed`: names of files that `SHA256SUMS` lists.
        """
        if names := list(listed):
            with name_path_in_errors(self.folder / CHECKSUMS):
                write_checksums(self.folder, names)
        _sync_folder(self.folder)
        _replace(self._target)
        self.discard()

    def discard(self) -> None:
        """Deletes the directory unless it was published; files that cannot be deleted stay."""
        self._until_end.close()


def _replace(target: Path) -> None:
    """Renames the incomplete checkpoint to `target`, and deletes the old one.

    A symbolic link at `target` is replaced, not followed. See [Note: Atomic replacement].
    """
    replaced = temporary_path(target, "replaced")
    while True:
        try:
            os.replace(temporary_path(target, "incomplete"), target)
            break
        except OSError as error:
            if error.errno not in _TARGET_EXISTS_ERRNOS:
                _restore(target)
                raise
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, replaced)  # again if a reader on another machine has restored it
    _sync_folder(target.parent)
    with contextlib.suppress(OSError):  # the next save deletes it
        _drop(replaced, target)


def remove(target: Path) -> None:
    """Deletes a file, a link or a directory; a directory is renamed first."""
    if target.is_dir() and not target.is_symlink():
        with _writing(target):
            _drop(target, target)
    else:
        target.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Creates a folder and its parents, and syncs their names to the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Syncs the names in `folder` to the disk, where the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with name_path_in_errors(folder):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED_ERRNOS:
            raise
    finally:
        os.close(descriptor)


def file_identity(target: Path) -> tuple[int, ...] | None:
    """Device, inode and time of the last write of `target`; None if it does not exist."""
    try:
        return _identity(target.stat())
    except OSError:
        return None


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mtime_ns  # numbers of inodes are used again


# ----------------------------------------------------------------------------------- a single file


@contextlib.contextmanager
def atomic_write(path: Path, nbytes: int) -> Iterator[BinaryIO]:
    """Opens a new file that replaces `path` when the block ends without an exception.

    A link or a directory at `path` is replaced, a link not followed. After an exception, or if the
    process dies, `path` is unchanged. See [Note: Atomic replacement].

    Args:
        path: Target in an existing folder.
        nbytes: Size of the file, or a little more. The space is reserved first, where the file
            system supports it, so that a full disk is detected before anything is written.

    Raises:
        OSError: The file cannot be written, or another process is writing it. On a full disk it
            names the path and the bytes that are needed and free.
    """
    with explain_os_errors(path, nbytes), _writing(path) as temporary:
        with create(temporary, nbytes) as file:
            yield file
        _replace(path)
