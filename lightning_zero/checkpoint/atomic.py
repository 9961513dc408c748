"""Atomic replacement of files and directories: a reader finds the old or the new one, complete.

[Note: Atomic replacement] A checkpoint is written under a temporary name in the folder of its
target, `.NAME.incomplete-ID`. Its files and its folder are synced. Then it takes the name `NAME` in
one step: a file by a rename, a directory by exchanging the two names (`renameat2`). A reader
therefore finds a complete checkpoint at every moment. Where the system cannot exchange names, the
old checkpoint is first renamed to `.NAME.replaced-ID`; if the process stops between the two
renames, `recover` renames it back. The folder is synced before a replaced checkpoint is deleted.
`NAME` is always the old or the new checkpoint, never a part of one and never a mix of both.

[Note: Two writers] A writer locks what it writes with `flock` until it has replaced the target: the
file itself, or `SHA256SUMS` in a directory, which is created first and filled last. The kernel
releases the lock when the process ends, for whatever reason. A save, and each start on a folder
(`delete_leftovers`), deletes the leftovers of other processes whose lock is free. A leftover is
renamed before it is deleted, so that no process takes it for a checkpoint meanwhile. Another
process may find a new file unlocked before its writer has locked it; the writer therefore checks
after locking that the file still exists, and creates another one if it does not. IDs contain the
host, the boot, the process and a random number. On some network file systems a lock is visible on
one machine only, see `_has_shared_locks`: leftovers of other machines there, and leftovers without
a lock, are deleted if they have not been written to for a day. A replaced checkpoint may be the
only copy; it is deleted only when its target exists.

`SHA256SUMS` lists files of its directory in the format that `sha256sum -c SHA256SUMS` reads.

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
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from lightning_zero.checkpoint.remote import RemotePath, is_remote
from lightning_zero.layout.foreign_names import check_inside, printable
from lightning_zero.tiers.disk import machine, mount_of

__all__ = [
    "CHECKSUMS",
    "DISK_FULL_ERRNOS",
    "CheckpointPath",
    "StagedDirectory",
    "atomic_write",
    "delete_leftovers",
    "discard",
    "explain_os_errors",
    "file_identity",
    "file_sizes",
    "find_damage",
    "full_disk_error",
    "local_path",
    "locate",
    "make_folder",
    "name_path_in_errors",
    "read_consistently",
    "recover",
    "recover_all",
    "remove",
    "replace_atomically",
    "replaced_while_read_error",
    "temporary_path",
    "write_checksums",
]

CHECKSUMS = "SHA256SUMS"
_LOCAL = re.compile(r"(?:file|local):(?://)?")
_MAX_NAME_BYTES = 200  # file systems allow 255; kind and ID take 55
_HOST_CHARACTERS = 16
_WORD = "[A-Za-z0-9_-]"
# The first form is that of earlier versions.
_ID = rf"(?:[0-9a-f]{{8}}|(?P<host>{_WORD}+)\.(?P<boot>{_WORD}+)\.[0-9]+\.[0-9a-f]{{8}})"
_LEFTOVER = re.compile(rf"\.(?P<name>.+)\.(?P<kind>incomplete|replaced|removed)-{_ID}", re.DOTALL)
_ABANDONED_S = 24 * 3600.0
_NUM_TRIES = 100
_BLOCK_BYTES = 1 << 20  # read or written at once; small, so that verifying takes little memory
_GIB = 1024**3
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSUPPORTED_ERRNOS = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_TARGET_EXISTS_ERRNOS = {errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR}
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# A free lock is free on every machine: the disk belongs to one machine, or a server keeps locks.
_LOCAL_FILE_SYSTEMS = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
_SHARED_LOCK_FILE_SYSTEMS = {"ceph", "gpfs", "nfs", "nfs4", "ocfs2", "gfs2"}
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")

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


# --------------------------------------------------------------------------------- temporary names


def temporary_path(target: Path, kind: str) -> Path:
    """A unique name in the folder of `target`; see [Note: Two writers]."""
    host, boot = machine()
    unique = f"{host[:_HOST_CHARACTERS]}.{boot}.{os.getpid()}.{secrets.token_hex(4)}"
    return target.parent / f".{_shortened(target)}.{kind}-{unique}"


def _shortened(target: Path) -> str:
    return os.fsdecode(os.fsencode(target.name)[:_MAX_NAME_BYTES])


def _find_replaced(target: Path) -> list[Path]:
    """Predecessors of `target` that were renamed and not yet deleted."""
    wanted = "replaced", _shortened(target)
    matches = _leftovers(target.parent)
    return [target.parent / m.string for m in matches if (m["kind"], m["name"]) == wanted]


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# ---------------------------------------------------------------------------------------- leftovers


def delete_leftovers(folder: Path) -> None:
    """Restores replaced checkpoints in `folder` and deletes the leftovers of dead jobs.

    See [Note: Two writers]. Entries that cannot be read, renamed or deleted stay.
    """
    found = _leftovers(folder)
    if not found:
        return
    with contextlib.suppress(OSError):
        recover_all(folder)
        has_shared_locks = _has_shared_locks(folder)
        for match in found:
            path = folder / match.string
            if match["kind"] == "incomplete":
                is_trusted = has_shared_locks or _is_from_this_machine(match)
                _delete_abandoned(path, is_trusted=is_trusted)
            elif match["kind"] == "removed" or os.path.lexists(folder / match["name"]):
                with contextlib.suppress(OSError):  # another process may be deleting it
                    _rename_and_delete(path)


def recover_all(folder: Path) -> None:
    """Restores replaced checkpoints in `folder` whose name is free.

    Entries that cannot be read or renamed stay.
    """
    for match in _leftovers(folder):
        if match["kind"] == "replaced" and _is_full_name(match):
            with contextlib.suppress(OSError):
                recover(folder / match["name"])


def _leftovers(folder: Path) -> list[re.Match[str]]:
    with contextlib.suppress(OSError):
        matches = map(_LEFTOVER.fullmatch, sorted(os.listdir(folder)))
        return [match for match in matches if match]
    return []


def _is_full_name(match: re.Match[str]) -> bool:
    return len(os.fsencode(match["name"])) < _MAX_NAME_BYTES


def _delete_abandoned(path: Path, *, is_trusted: bool) -> None:
    with contextlib.suppress(OSError):
        is_directory = path.is_dir() and not path.is_symlink()
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = None
        with contextlib.suppress(OSError):  # no lock file yet, or one of another user
            lock = os.open(path / CHECKSUMS if is_directory else path, flags)
        try:
            is_free = None if lock is None else _try_lock(lock)
            if (is_free and is_trusted) or (is_free is not False and _is_old(path)):
                _rename_and_delete(path)
        finally:
            if lock is not None:
                os.close(lock)


def _try_lock(descriptor: int) -> bool | None:
    """Whether this process has acquired the lock; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_old(path: Path) -> bool:
    files = path.iterdir() if path.is_dir() else ()
    written: float = max(file.lstat().st_mtime for file in (path, *files))
    return time.time() - written > _ABANDONED_S


def _is_from_this_machine(match: re.Match[str]) -> bool:
    host, boot = machine()
    return bool(match["host"] == host[:_HOST_CHARACTERS] or match["boot"] == boot)


def _has_shared_locks(folder: Path) -> bool:
    """Whether locks of all machines are visible here, according to the mount's options."""
    kind, options = mount_of(folder)
    if kind == "lustre":
        return "flock" in options
    is_local = bool({"nolock", "local_lock=all", "local_lock=flock"} & options)
    return kind in _LOCAL_FILE_SYSTEMS or (kind in _SHARED_LOCK_FILE_SYSTEMS and not is_local)


def _rename_and_delete(path: Path) -> None:
    """Renames `path` and deletes it, so that no process uses it while it is being deleted."""
    match = _LEFTOVER.fullmatch(path.name)
    assert match is not None
    _sync_folder(path.parent)  # its successor must be on the disk first
    removed = temporary_path(path.with_name(match["name"]), "removed")
    os.rename(path, removed)
    _delete(removed)


# -------------------------------------------------------------------------------------- replacement


class StagedDirectory:
    """A temporary directory that is written, and then replaces `target` atomically.

    Attributes:
        folder: The directory, until `publish` or `discard`.
    """

    folder: Path
    _target: Path
    _lock: int | None  # file descriptor of its `SHA256SUMS`; None after `publish` or `discard`

    def __init__(self, target: Path) -> None:
        """Creates the directory and `target`'s folder; deletes leftovers of dead jobs there."""
        make_folder(target.parent)
        recover(target)
        delete_leftovers(target.parent)
        self._target = target
        for _ in range(_NUM_TRIES):
            self.folder = temporary_path(target, "incomplete")
            self.folder.mkdir()
            with contextlib.suppress(FileNotFoundError):  # another process deleted it: try again
                path = self.folder / CHECKSUMS
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                if _lock_new_file(lock, path):
                    self._lock = lock
                    return
                os.close(lock)
        raise _contention_error(target)

    def publish(self) -> None:
        """Replaces the target with the directory, and deletes the old target."""
        superseded = _rename_over(self.folder, self._target)
        self._release()
        _delete_superseded(superseded, self._target.parent)

    def discard(self) -> None:
        """Deletes the directory unless it was published; files that cannot be deleted stay."""
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._release()

    def _release(self) -> None:
        assert self._lock is not None
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # forked processes hold it, too
        os.close(self._lock)
        self._lock = None


def _lock_new_file(lock: int, path: Path) -> bool:
    """Locks a new file; False if another process found it unlocked and deletes it."""
    if _try_lock(lock) is False:
        return False
    return path.exists() and os.path.samestat(os.fstat(lock), path.stat())


def _contention_error(target: Path) -> OSError:
    why = f"other processes deleted the temporary file {_NUM_TRIES} times"
    return OSError(errno.EBUSY, why, str(target))


def make_folder(folder: Path) -> None:
    """Creates a folder and its parents, and syncs their names to the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        _sync_folder(path.parent)


def replace_atomically(temporary: Path, target: Path) -> None:
    """Renames `temporary`, a file or a directory, to `target`, and deletes the old `target`.

    A symbolic link at `target` is replaced, not followed. See [Note: Atomic replacement].
    """
    _delete_superseded(_rename_over(temporary, target), target.parent)


def _delete_superseded(paths: list[Path], folder: Path) -> None:
    _sync_folder(folder)  # even if there are no paths; an error is raised
    for path in paths:
        with contextlib.suppress(OSError):  # the next save deletes it
            _rename_and_delete(path)


def _rename_over(temporary: Path, target: Path) -> list[Path]:
    """Renames `temporary` to `target`; returns the new names of the targets it has replaced."""
    superseded: list[Path] = []
    while True:
        try:
            os.replace(temporary, target)
            return superseded
        except OSError as error:
            if error.errno not in _TARGET_EXISTS_ERRNOS:
                recover(target)
                raise
        # `delete_leftovers` finds an exchanged directory only under a name of this module.
        if _LEFTOVER.fullmatch(temporary.name) and _exchange(temporary, target):
            return [*superseded, temporary]
        replaced = temporary_path(target, "replaced")
        with contextlib.suppress(FileNotFoundError):  # another job has just renamed it
            os.rename(target, replaced)  # again if a reader has restored it
            superseded.append(replaced)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names in one step; False if that fails for any reason."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    return not rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE))


def file_sizes(folder: CheckpointPath) -> dict[str, int]:
    """Bytes of every file below a folder, by relative name, sorted."""
    if isinstance(folder, RemotePath):
        return dict(sorted(folder.files().items()))
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def recover(target: CheckpointPath) -> None:
    """Restores `target` if a process stopped inside `replace_atomically`."""
    if isinstance(target, RemotePath):
        return
    if os.path.lexists(target) or not target.parent.is_dir():
        return
    replaced = _find_replaced(target)
    if replaced:
        try:
            os.rename(max(replaced, key=os.path.getmtime), target)
        except OSError:
            if not os.path.lexists(target):  # otherwise another process was faster
                raise


def read_consistently(target: CheckpointPath, read: Callable[[], _T]) -> _T:
    """Result of `read`, repeated until `target` is not replaced while it is read.

    Raises:
        OSError: `target` is replaced again and again.
    """
    if isinstance(target, RemotePath):
        return read()
    for _ in range(_NUM_TRIES):
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


def file_identity(target: Path) -> tuple[int, int] | None:
    """Device and inode of `target`; None if it does not exist."""
    try:
        status = target.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def replaced_while_read_error(target: Path) -> OSError:
    why = "another save replaced it while it was read; open it again"
    return OSError(errno.ESTALE, why, str(target))


def remove(target: CheckpointPath) -> None:
    """Deletes a file, a link or a directory; a directory is renamed first."""
    if isinstance(target, RemotePath):
        target.remove()
        return
    if not os.path.lexists(target):
        return
    if target.is_dir() and not target.is_symlink():
        removed = temporary_path(target, "removed")
        os.rename(target, removed)
        _sync_folder(target.parent)  # or a power failure may leave a part of it under its name
        target = removed
    with contextlib.suppress(FileNotFoundError):
        _delete(target)


def discard(folder: RemotePath) -> None:
    """Deletes an incomplete folder; files that cannot be deleted stay."""
    with contextlib.suppress(Exception):  # file systems of fsspec raise errors of any class
        folder.remove()


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


# ---------------------------------------------------------------------------------------- checksums


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Writes `SHA256SUMS` for these files of `folder`, and syncs it and the folder."""
    path = folder / CHECKSUMS
    with name_path_in_errors(path), open(path, "w", encoding="utf-8") as file:
        listed = sorted(set(names) - {CHECKSUMS})
        file.writelines(f"{_hash(folder / name)}  {name}\n" for name in listed)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)


def find_damage(folder: CheckpointPath, *, rank: int = 0, world_size: int = 1) -> list[str]:
    """Verifies this rank's share of `SHA256SUMS`; returns one line per missing or damaged file."""
    sums = folder / CHECKSUMS
    try:
        lines = sums.read_text(encoding="utf-8").splitlines() if sums.is_file() else []
    except UnicodeDecodeError as error:
        return [f"{CHECKSUMS} is not a text file ({error})"]
    damage = []
    for number, line in list(enumerate(lines, start=1))[rank::world_size]:
        match = _LINE.fullmatch(line)
        if not match:
            damage.append(f"line {number} of {CHECKSUMS} is not a checksum")
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


def _hash(path: CheckpointPath) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


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
        OSError: The file cannot be written. On a full disk it names the path and the bytes that
            are needed and free.
    """
    if isinstance(path, RemotePath):
        with name_path_in_errors(path), path.atomic_write(nbytes) as file:
            yield file
        return
    delete_leftovers(path.parent)
    with explain_os_errors(path, nbytes):
        temporary, file = _locked_file(path)
        with file:
            try:
                _reserve(file, nbytes)
                yield file
                file.truncate(file.tell())
                file.flush()
                os.fsync(file.fileno())
                replace_atomically(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise


def _locked_file(target: Path) -> tuple[Path, BinaryIO]:
    """A new, locked temporary file for `target`; see [Note: Two writers]."""
    for _ in range(_NUM_TRIES):
        path = temporary_path(target, "incomplete")
        file = open(path, "xb", _BLOCK_BYTES)  # noqa: SIM115 (the caller closes it)
        if _lock_new_file(file.fileno(), path):
            return path, file
        file.close()
    raise _contention_error(target)


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
