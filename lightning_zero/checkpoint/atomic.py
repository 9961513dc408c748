"""Files and directories that are there complete or not at all.

[Note: Complete or not there] What is written has a name of its own beside its target,
`.NAME.incomplete-ID`. Its files and its folder are synced, and it takes the name `NAME` in one
step: a file by a rename, a directory by exchanging the two names (`renameat2`), so that a reader
finds a complete checkpoint at every moment. Where the system cannot exchange names, the old one
steps aside first, as `.NAME.replaced-ID`, and comes back in `recover` should the process stop
between the two renames. The folder is synced before anything that was replaced is deleted. So
`NAME` is the old or the new checkpoint, never a part of one and never of both.

[Note: Two writers] The writer holds `flock` on what it writes, until that has taken its place: on
the file itself, or on `SHA256SUMS` in a directory, which is made first and filled last. The kernel
releases it when the process ends, however it ends. So a save, and each start on a folder
(`delete_leftovers`),
deletes the left-overs of others whose lock is free, at once; what is deleted is renamed first, to
a name of the deleting process, so that it cannot be taken for a checkpoint meanwhile. Between
making and locking a file another process may find it free: the writer looks again after locking,
and begins anew if it was deleted. IDs have host, boot, process and a random number, which rank 0
chooses. A lock may be seen by one machine only, as on some network file systems, see
`_has_shared_locks`: what another machine left there, and what has no lock, is deleted when nothing
was written to it for a day. What was set aside may be the only copy of a checkpoint and goes only
when another is in its place.

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
    "StagedDirectory",
    "CheckpointPath",
    "temporary_path",
    "discard",
    "explain_os_errors",
    "file_sizes",
    "find_damage",
    "full_disk_error",
    "file_identity",
    "local_path",
    "locate",
    "make_folder",
    "name_path_in_errors",
    "replace_atomically",
    "recover",
    "recover_all",
    "remove",
    "replaced_while_read_error",
    "atomic_write",
    "delete_leftovers",
    "read_consistently",
    "write_checksums",
]

CHECKSUMS = "SHA256SUMS"
_LOCAL = re.compile(r"(?:file|local):(?://)?")
_MAX_NAME_BYTES = 200  # of the 255 that file systems allow; kind and ID take 55
_HOST_CHARACTERS = 16
_WORD = "[A-Za-z0-9_-]"
# The first form is that of earlier versions.
_ID = rf"(?:[0-9a-f]{{8}}|(?P<host>{_WORD}+)\.(?P<boot>{_WORD}+)\.[0-9]+\.[0-9a-f]{{8}})"
_LEFTOVER = re.compile(rf"\.(?P<name>.+)\.(?P<kind>incomplete|replaced|removed)-{_ID}", re.DOTALL)
_ABANDONED_S = 24 * 3600.0
_NUM_TRIES = 100
_BLOCK_BYTES = 1 << 20  # read or written at once; little, for checking must not show in memory
_GIB = 1024**3
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSUPPORTED_ERRNOS = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_TARGET_EXISTS_ERRNOS = {errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR}
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# Where a lock that is free is free on every machine: of one machine alone, or kept by a server.
_LOCAL_FILE_SYSTEMS = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
_SHARED_LOCK_FILE_SYSTEMS = {"ceph", "gpfs", "nfs", "nfs4", "ocfs2", "gfs2"}
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")

_T = TypeVar("_T")

CheckpointPath = Path | RemotePath


def locate(path: str | os.PathLike[str]) -> CheckpointPath:
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


def temporary_path(target: Path, kind: str) -> Path:
    """A name in the same folder that nothing else has; see [Note: Two writers]."""
    host, boot = machine()
    unique = f"{host[:_HOST_CHARACTERS]}.{boot}.{os.getpid()}.{secrets.token_hex(4)}"
    return target.parent / f".{_shortened(target)}.{kind}-{unique}"


def _shortened(target: Path) -> str:
    return os.fsdecode(os.fsencode(target.name)[:_MAX_NAME_BYTES])


def _find_replaced(target: Path) -> list[Path]:
    """Where a predecessor of `target` is, that was set aside."""
    wanted = "replaced", _shortened(target)
    matches = _leftovers(target.parent)
    return [target.parent / m.string for m in matches if (m["kind"], m["name"]) == wanted]


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# --------------------------------------------------------------------------------------- left-overs


def delete_leftovers(folder: Path) -> None:
    """Puts back what was set aside in `folder`, and deletes what dead jobs have left.

    See [Note: Two writers]. What cannot be read, renamed or deleted stays.
    """
    found = _leftovers(folder)
    if not found:
        return
    with contextlib.suppress(OSError):
        recover_all(folder)
        sees_all = _has_shared_locks(folder)
        for match in found:
            path = folder / match.string
            if match["kind"] == "incomplete":
                _delete_abandoned(path, is_trusted=sees_all or _is_from_this_machine(match))
            elif match["kind"] == "removed" or os.path.lexists(folder / match["name"]):
                with contextlib.suppress(OSError):  # its own process may be deleting it
                    _rename_and_delete(path)


def recover_all(folder: Path) -> None:
    """Puts back what was set aside in `folder`, where nothing newer has its name.

    What cannot be read or renamed stays.
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
        with contextlib.suppress(OSError):  # no lock: one that was never made, or another user's
            lock = os.open(path / CHECKSUMS if is_directory else path, flags)
        try:
            is_free = None if lock is None else _try_lock(lock)
            if (is_free and is_trusted) or (is_free is not False and _is_old(path)):
                _rename_and_delete(path)
        finally:
            if lock is not None:
                os.close(lock)


def _try_lock(descriptor: int) -> bool | None:
    """Whether the lock is this process's now; None where the file system has no locks."""
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
    """Whether a lock of any machine is seen from here, according to the options of the mount."""
    kind, options = mount_of(folder)
    if kind == "lustre":
        return "flock" in options
    is_local = bool({"nolock", "local_lock=all", "local_lock=flock"} & options)
    return kind in _LOCAL_FILE_SYSTEMS or (kind in _SHARED_LOCK_FILE_SYSTEMS and not is_local)


def _rename_and_delete(path: Path) -> None:
    """Deletes `path` under another name, which no process takes for what it was."""
    match = _LEFTOVER.fullmatch(path.name)
    assert match is not None
    _sync_folder(path.parent)  # what has taken its place does so on the disk, too
    grave = temporary_path(path.with_name(match["name"]), "removed")
    os.rename(path, grave)
    _delete(grave)


# ------------------------------------------------------------------------------- taking the place


class StagedDirectory:
    """An empty directory beside `target`, to be written and then put in its place.

    Attributes:
        folder: The directory, until `publish` or `discard`.
    """

    folder: Path
    _target: Path
    _lock: int | None  # file descriptor of `SHA256SUMS` in it; None when that is over

    def __init__(self, target: Path) -> None:
        """Makes it, and `target`'s folder; deletes what dead jobs have left there."""
        make_folder(target.parent)
        recover(target)
        delete_leftovers(target.parent)
        self._target = target
        for _ in range(_NUM_TRIES):
            self.folder = temporary_path(target, "incomplete")
            self.folder.mkdir()
            with contextlib.suppress(FileNotFoundError):  # deleted already: begin anew
                path = self.folder / CHECKSUMS
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                if _lock_new_file(lock, path):
                    self._lock = lock
                    return
                os.close(lock)
        raise _contention_error(target)

    def publish(self) -> None:
        """Puts it in place of what is at the target, and deletes that."""
        superseded = _rename_over(self.folder, self._target)
        self._release()
        _delete_superseded(superseded, self._target.parent)

    def discard(self) -> None:
        """Deletes it, unless it has taken its place; what cannot be deleted stays."""
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._release()

    def _release(self) -> None:
        assert self._lock is not None
        with contextlib.suppress(OSError):  # where there are no locks
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # also that of forked processes
        os.close(self._lock)
        self._lock = None


def _lock_new_file(lock: int, path: Path) -> bool:
    """Locks a new file; False if another process has found it free before, and deletes it."""
    if _try_lock(lock) is False:
        return False
    return path.exists() and os.path.samestat(os.fstat(lock), path.stat())


def _contention_error(target: Path) -> OSError:
    why = f"other processes deleted what was begun, {_NUM_TRIES} times"
    return OSError(errno.EBUSY, why, str(target))


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it, and waits until their names are on the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        _sync_folder(path.parent)


def replace_atomically(temporary: Path, target: Path) -> None:
    """Renames `temporary`, a file or a directory, to `target`, and deletes what was there.

    A symbolic link at `target` is replaced, not followed. See [Note: Complete or not there].
    """
    _delete_superseded(_rename_over(temporary, target), target.parent)


def _delete_superseded(paths: list[Path], folder: Path) -> None:
    _sync_folder(folder)  # also where there are none; an error is raised
    for path in paths:
        with contextlib.suppress(OSError):  # goes with the next save
            _rename_and_delete(path)


def _rename_over(temporary: Path, target: Path) -> list[Path]:
    """Where the predecessors of `temporary` are, once it has their name."""
    superseded: list[Path] = []
    while True:
        try:
            os.replace(temporary, target)
            return superseded
        except OSError as error:
            if error.errno not in _TARGET_EXISTS_ERRNOS:
                recover(target)  # what has stepped aside
                raise
        # A name that is not of this module's kind would not be found again.
        if _LEFTOVER.fullmatch(temporary.name) and _exchange(temporary, target):
            return [*superseded, temporary]
        aside = temporary_path(target, "replaced")
        with contextlib.suppress(FileNotFoundError):  # another job has just set it aside
            os.rename(target, aside)  # once more where a reader has put it back
            superseded.append(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names in one step; False where that cannot be done, for whatever reason."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    return not rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE))


def file_sizes(folder: CheckpointPath) -> dict[str, int]:
    """Bytes of every file in a folder and the folders in it, by the name from there, in order."""
    if isinstance(folder, RemotePath):
        return dict(sorted(folder.files().items()))
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def recover(target: CheckpointPath) -> None:
    """Puts back what `replace_atomically` had set aside when the machine stopped."""
    if isinstance(target, RemotePath):
        return
    if os.path.lexists(target) or not target.parent.is_dir():
        return
    aside = _find_replaced(target)
    if aside:
        try:
            os.rename(max(aside, key=os.path.getmtime), target)
        except OSError:
            if not os.path.lexists(target):  # else another process has been faster
                raise


def read_consistently(target: CheckpointPath, read: Callable[[], _T]) -> _T:
    """What `read` returns of a checkpoint that is not replaced meanwhile; else it reads again.

    Raises:
        OSError: It is replaced again and again.
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
    """Which file or directory has this name; None where none has."""
    try:
        status = target.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def replaced_while_read_error(target: Path) -> OSError:
    why = "another save has replaced it while it was read; open it again"
    return OSError(errno.ESTALE, why, str(target))


def remove(target: CheckpointPath) -> None:
    """Deletes a file, a link or a directory; what is half deleted has another name."""
    if isinstance(target, RemotePath):
        target.remove()
        return
    if not os.path.lexists(target):
        return
    if target.is_dir() and not target.is_symlink():
        aside = temporary_path(target, "removed")
        os.rename(target, aside)
        _sync_folder(target.parent)  # else a power cut may leave a part of it under its name
        target = aside
    with contextlib.suppress(FileNotFoundError):
        _delete(target)


def discard(folder: RemotePath) -> None:
    """Deletes what was not completed; what cannot be deleted stays."""
    with contextlib.suppress(Exception):  # storage that is not there raises what it likes
        folder.remove()


def _sync_folder(folder: Path) -> None:
    """Waits until the names in `folder` are on the disk, where the file system can tell."""
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
    """Lists the checksums of these files of `folder`, and syncs the list and the folder."""
    path = folder / CHECKSUMS
    with name_path_in_errors(path), open(path, "w", encoding="utf-8") as file:
        listed = sorted(set(names) - {CHECKSUMS})
        file.writelines(f"{_hash(folder / name)}  {name}\n" for name in listed)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)


def find_damage(folder: CheckpointPath, *, rank: int = 0, world_size: int = 1) -> list[str]:
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


def _hash(path: CheckpointPath) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------- one file


@contextlib.contextmanager
def atomic_write(path: CheckpointPath, nbytes: int) -> Iterator[BinaryIO]:
    """A new file that takes the place of whatever is at `path` when the block ends well.

    A link at `path` is replaced, not followed; so is a directory. After an exception, or where
    the process dies, what was at `path` is unchanged. See [Note: Complete or not there].

    Args:
        path: Its folder exists, or it is remote.
        nbytes: Size of the file, or a little more. The space is reserved first, where the file
            system can, so that a full disk is known before anything is written.

    Raises:
        OSError: The file cannot be written. On a full disk it names path, bytes needed and free.
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
    """A new file beside `target`; see [Note: Two writers]."""
    for _ in range(_NUM_TRIES):
        path = temporary_path(target, "incomplete")
        file = open(path, "xb", _BLOCK_BYTES)  # noqa: SIM115 (the caller closes it)
        if _lock_new_file(file.fileno(), path):
            return path, file
        file.close()
    raise _contention_error(target)


def _reserve(file: BinaryIO, nbytes: int) -> None:
    # Not posix_fallocate, which writes to every block where the file system cannot do better.
    allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if allocate is None or not nbytes:
        return
    arguments = (ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(nbytes))
    if allocate(file.fileno(), *arguments) and ctypes.get_errno() in DISK_FULL_ERRNOS:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextlib.contextmanager
def explain_os_errors(path: CheckpointPath, nbytes: int) -> Iterator[None]:
    """Names `path` in every OSError; in that of a full disk also bytes needed and free."""
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
    """Names `path` in an OSError that has no file name, as those of writing and syncing."""
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
        f"bytes ({free / _GIB:.2f} GiB) are free ({os.strerror(number)}); make room or choose "
        "another folder. What was there before is unchanged.",
    )
