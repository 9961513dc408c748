"""Atomic replacement of files and directories: a reader finds the old or the new one, complete.

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

For remote storage see [Note: Atomic replacement on remote storage].
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from lightning_zero.checkpoint.remote import RemotePath, is_remote
from lightning_zero.tiers.disk import machine

__all__ = [
    "DISK_FULL_ERRNOS",
    "CheckpointPath",
    "StagedDirectory",
    "atomic_write",
    "delete_leftovers",
    "discard",
    "explain_os_errors",
    "file_identity",
    "file_sizes",
    "full_disk_error",
    "local_path",
    "locate",
    "make_folder",
    "name_path_in_errors",
    "read_consistently",
    "recover",
    "remove",
    "replaced_while_read_error",
    "temporary_path",
]

_LOCAL = re.compile(r"(?:file|local):(?://)?")
_MAX_NAME_BYTES = 200  # file systems allow 255
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.zero-(?:incomplete|replaced|removed|lock)", re.DOTALL)
_ABANDONED_S = 24 * 3600.0
_NUM_TRIES = 100
_PAUSE_S = 0.02
_BLOCK_BYTES = 1 << 20
_GIB = 1024**3
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSUPPORTED_ERRNOS = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_TARGET_EXISTS_ERRNOS = {errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR}

_T = TypeVar("_T")

CheckpointPath = Path | RemotePath


def locate(path: str | os.PathLike[str]) -> CheckpointPath:
    """Resolves the path of a checkpoint: `local_path`, or remote storage with a fresh listing."""
    if not is_remote(path):
        return local_path(path)
    remote = RemotePath(os.fspath(path))
    remote.refresh()
    return remote


def local_path(path: str | os.PathLike[str]) -> Path:
    """Absolute path on a local or mounted file system; `path` may begin with `~` or `file://`.

    Raises:
        ValueError: A URL of another file system.
    """
    text = os.fspath(path)
    if match := _LOCAL.match(text):
        text = text[match.end() :]
    if "://" in text:
        raise ValueError(f"expected a path on a local or mounted file system, got {text}.")
    return Path(text).expanduser().absolute()


def file_sizes(folder: CheckpointPath) -> dict[str, int]:
    """Bytes of every file below a folder, by relative name, sorted."""
    if isinstance(folder, RemotePath):
        return dict(sorted(folder.files().items()))
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


# --------------------------------------------------------------------------------------- one writer


def temporary_path(target: Path, kind: str) -> Path:
    """The name of `kind` beside `target`: "incomplete", "replaced", "removed" or "lock"."""
    name = os.fsencode(target.name)
    if len(name) > _MAX_NAME_BYTES:
        digest = hashlib.sha256(name).hexdigest()[:16]
        name = name[: _MAX_NAME_BYTES - 16] + digest.encode()
    return target.parent / f".{os.fsdecode(name)}.zero-{kind}"


def _lock(target: Path, *, num_tries: int = _NUM_TRIES) -> tuple[int, bool]:
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
        path = temporary_path(target, "lock")
        with contextlib.suppress(OSError):
            lock, is_abandoned = _lock(target, num_tries=1)
            try:
                is_abandoned = is_abandoned or _are_leftovers_old(target)
                if is_abandoned:
                    _settle(target)
            finally:
                _unlock(lock, path if is_abandoned else None)


def recover(target: CheckpointPath) -> None:
    """Restores `target` if a process stopped between the two renames of [Note: Atomic replacement].

    Waits if a process is between the two.
    """
    if isinstance(target, RemotePath) or os.path.lexists(target):
        return
    if os.path.lexists(temporary_path(target, "replaced")):
        try:
            lock, is_abandoned = _lock(target)
        except OSError:
            if os.path.lexists(target):
                return
            raise
        try:
            _restore(target)
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

    def publish(self) -> None:
        """Replaces the target with the directory, and deletes the old target."""
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


def remove(target: CheckpointPath) -> None:
    """Deletes a file, a link or a directory; a directory is renamed first."""
    if isinstance(target, RemotePath):
        target.remove()
    elif target.is_dir() and not target.is_symlink():
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


# ------------------------------------------------------------------------------------------ reading


def read_consistently(target: CheckpointPath, read: Callable[[], _T]) -> _T:
    """Result of `read`, repeated until `target` is not replaced while it is read.

    Raises:
        OSError: `target` is replaced again and again.
    """
    if isinstance(target, RemotePath):
        return read()
    for _ in range(_NUM_TRIES):
        recover(target)
        before = file_identity(target)
        try:
            result = read()
        except (OSError, ValueError):
            if file_identity(target) == before:
                raise
        else:
            if file_identity(target) == before:
                return result
    raise replaced_while_read_error(target)


def file_identity(target: Path) -> tuple[int, ...] | None:
    """Device, inode and time of the last write of `target`; None if it does not exist."""
    try:
        return _identity(target.stat())
    except OSError:
        return None


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mtime_ns  # numbers of inodes are used again


def replaced_while_read_error(target: Path) -> OSError:
    why = "another save replaced it while it was read; open it again"
    return OSError(errno.ESTALE, why, str(target))


def discard(folder: RemotePath) -> None:
    """Deletes an incomplete folder; files that cannot be deleted stay."""
    with contextlib.suppress(Exception):  # file systems of fsspec raise errors of any class
        folder.remove()


# ----------------------------------------------------------------------------------- a single file


@contextlib.contextmanager
def atomic_write(path: CheckpointPath, nbytes: int) -> Iterator[BinaryIO]:
    """Opens a new file that replaces `path` when the block ends without an exception.

    A link or a directory at `path` is replaced, a link not followed. After an exception, or if the
    process dies, `path` is unchanged. See [Note: Atomic replacement].

    Args:
        path: Target, remote or in an existing folder.
        nbytes: Size of the file, or a little more. The space is reserved first, where the file
            system supports it, so that a full disk is detected before anything is written.

    Raises:
        OSError: The file cannot be written, or another process is writing it. On a full disk it
            names the path and the bytes that are needed and free.
    """
    if isinstance(path, RemotePath):
        with name_path_in_errors(path), path.atomic_write(nbytes) as file:
            yield file
        return
    with (
        explain_os_errors(path, nbytes),
        _writing(path) as temporary,
        open(temporary, "xb", _BLOCK_BYTES) as file,
    ):
        _reserve(file, nbytes)
        yield file
        file.truncate(file.tell())
        file.flush()
        os.fsync(file.fileno())
        _replace(path)


def _reserve(file: BinaryIO, nbytes: int) -> None:
    # Not posix_fallocate: without support of the file system it writes to every block.
    allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if allocate is None or not nbytes:
        return
    arguments = (ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(nbytes))
    if allocate(file.fileno(), *arguments) and ctypes.get_errno() in DISK_FULL_ERRNOS:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextlib.contextmanager
def explain_os_errors(path: CheckpointPath, nbytes: int) -> Iterator[None]:
    """Names `path` in every OSError, and on a full disk also the bytes needed and free."""
    try:
        with name_path_in_errors(path):
            yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS or isinstance(path, RemotePath):
            raise
        free = shutil.disk_usage(path.parent).free
        raise full_disk_error(path, nbytes, free, error.errno) from error


@contextlib.contextmanager
def name_path_in_errors(path: CheckpointPath) -> Iterator[None]:
    """Names `path` in an OSError without a file name, such as those of writing and syncing."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or str(path) in str(error):
            raise
        number, why = error.errno or errno.EIO, error.strerror or str(error)
        raise OSError(number, why, str(path)) from error


def full_disk_error(path: Path, nbytes: int, free: int, number: int = errno.ENOSPC) -> OSError:
    return OSError(
        number,
        f"{path} was not written: it needs {nbytes} bytes ({nbytes / _GIB:.2f} GiB) and {free} "
        f"bytes ({free / _GIB:.2f} GiB) are free ({os.strerror(number)}); free some space or "
        "choose another folder. The previous file or directory is unchanged.",
    )
