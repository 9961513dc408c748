"""Files and directories that are there whole or not at all, and what killed jobs have left of them.

[Note: Whose leftover] While a checkpoint is written, and while an old one is deleted, it has a name
of its own beside its place: `.NAME.incomplete-OWNER-RANDOM`, `.NAME.removed-OWNER-RANDOM`. A job
that is killed leaves it, and a later save of any name in the folder removes it, if it is certain
that nobody works on it: other jobs may save to the same folder at this moment. OWNER is the process
that began it, rank 0: host, boot and process namespace in one number, process number, and when the
process started, for numbers are used again. On the owner's own machine the kernel knows whether the
process lives; without rank 0 no rank goes on with a save. Elsewhere nobody can tell (locks of a
network file system may hold for one machine only), but every save writes all the time, so what
nothing was written to for a day, by the clock of the file system itself, is nobody's.

What was set aside as `.NAME.replaced-...` may be the only copy of a checkpoint and is left alone
here.

Checkpoint directories that are whole or not there.

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

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path

from typing_extensions import Buffer

__all__ = [
    "CHECKSUMS",
    "WholeWrites",
    "begin",
    "beside",
    "explained",
    "find_damage",
    "hash_file",
    "local_path",
    "named_beside",
    "put_in_place",
    "recover",
    "remove",
    "remove_leftovers",
    "replacing",
    "sync_folder",
    "write_checksums",
]

_LOCAL = ("file://", "local://", "file:", "local:")


def local_path(path: str | os.PathLike[str]) -> Path:
    """An absolute path on a local or mounted file system.

    Args:
        path: May begin with `~`, be relative, or be a URL of the local file system (`file://`).

    Raises:
        ValueError: A URL of another file system.
    """
    text = os.fspath(path)
    for protocol in _LOCAL:
        if text.startswith(protocol):
            text = text.removeprefix(protocol)
            break
    if "://" in text:
        raise ValueError(f"expected a path on a local or mounted file system, got {text}.")
    return Path(text).expanduser().absolute()


_MAX_NAME = 200  # of the 255 that file systems allow
_OWNED = r"(?:([0-9a-f]{8})-(\d+)-(\d+)-)?[0-9a-f]{8}"
_NAME = re.compile(rf"\..+\.(?:incomplete|removed)-{_OWNED}")
_ABANDONED_S = 24 * 3600.0


def beside(target: Path, kind: str) -> Path:
    """A new name beside `target`, owned by this process. See [Note: Whose leftover]."""
    owner = f"{_machine()}-{os.getpid()}-{_started(os.getpid())}"
    name = f".{target.name[:_MAX_NAME]}.{kind}-{owner}-{secrets.token_hex(4)}"
    return target.parent / name


def named_beside(target: Path, kind: str) -> list[Path]:
    """What lies beside `target` under such names, whoever owns it."""
    name = re.compile(re.escape(f".{target.name[:_MAX_NAME]}.{kind}-") + _OWNED)
    with contextlib.suppress(OSError):
        return sorted(path for path in target.parent.iterdir() if name.fullmatch(path.name))
    return []


def remove_leftovers(folder: Path, now: float) -> list[Path]:
    """Removes what is certainly nobody's. What cannot be removed stays.

    Args:
        folder: Of checkpoints.
        now: Seconds, by the clock of its file system.

    Returns:
        What was removed.
    """
    removed = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            found = _NAME.fullmatch(path.name)
            with contextlib.suppress(OSError):
                if found and _is_abandoned(path, found, now):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                    removed.append(path)
    return removed


def _is_abandoned(path: Path, found: re.Match[str], now: float) -> bool:
    machine, pid, started = found.groups()
    if machine == _machine() and started != "0":
        since = _started(int(pid))
        return since != int(started) if since else not _lives(int(pid))
    times = [path.lstat().st_mtime]
    if path.is_dir():
        times += [entry.lstat().st_mtime for entry in path.iterdir()]
    return now - max(times) > _ABANDONED_S


def _machine() -> str:
    """Where process numbers mean the same: containers have numbers of their own."""
    words = [socket.gethostname()]
    with contextlib.suppress(OSError):
        words.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        words.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]


def _lives(pid: int) -> bool:
    """Whether there is such a process, also where /proc hides those of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _started(pid: int) -> int:
    """When a process of this machine started, in ticks since boot; 0 where there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


CHECKSUMS = "SHA256SUMS"
_BLOCK_BYTES = 1 << 20  # little: checking must not show in memory
_AHEAD_BYTES = 16 << 20  # the disk reads so much while what came before is hashed
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
    block = memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        position = 0
        while count := file.readinto(block):
            if position % _AHEAD_BYTES == 0 and hasattr(os, "posix_fadvise"):
                start, length = position + _BLOCK_BYTES, 2 * _AHEAD_BYTES
                os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_WILLNEED)
            digest.update(block[:count])
            position += count
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


_GIB = 1024**3
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WholeWrites(FileIO):
    """A file without a buffer, of which one `write` writes everything."""

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data).cast("B")
        written = 0
        while written < view.nbytes:  # the system may take less, on a disk that is getting full
            written += super().write(view[written:]) or 0
        return written


@contextlib.contextmanager
def replacing(path: Path, nbytes: int) -> Iterator[FileIO]:
    """A new file that takes the place of whatever is at `path` when the block ends well.

    A link at `path` is replaced, not followed; so is a directory. After an exception, or where
    the process dies, what was at `path` is unchanged; what a dead process has left is removed by
    the next one that writes to the same path.

    Args:
        path: Its folder exists.
        nbytes: Size of the file, or a little more. The space is reserved first, where the file
            system can, so that a full disk is known before anything is written.

    Raises:
        OSError: The file cannot be written. On a full disk it names path, bytes needed and free.
    """
    _remove_leftovers(path)
    temporary = beside(path, "incomplete")
    with explained(path, nbytes), WholeWrites(temporary, "x") as file:
        try:
            with contextlib.suppress(OSError):  # where the file system has no locks
                fcntl.flock(file, fcntl.LOCK_EX)  # at work: not a left-over
            remove_leftovers(path.parent, os.fstat(file.fileno()).st_mtime)
            _reserve(file, nbytes)
            yield file
            file.truncate(file.tell())
            os.fsync(file)
            put_in_place(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


@contextlib.contextmanager
def explained(path: Path, nbytes: int) -> Iterator[None]:
    """Says in the error of a full disk how much was needed for `path` and how much there is."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            error.errno,
            f"{path} was not written: it needs {nbytes} bytes ({nbytes / _GIB:.2f} GiB) and "
            f"{free} bytes ({free / _GIB:.2f} GiB) are free ({os.strerror(error.errno)}); make "
            "room or choose another folder. What was there before is unchanged.",
        ) from error


def _reserve(file: FileIO, nbytes: int) -> None:
    # Not posix_fallocate, which writes to every block where the file system cannot do better.
    allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if allocate is None or not nbytes:
        return
    arguments = (ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(nbytes))
    if allocate(file.fileno(), *arguments) and ctypes.get_errno() in _FULL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _remove_leftovers(path: Path) -> None:
    for leftover in named_beside(path, "incomplete"):
        if leftover.is_dir():
            continue
        with contextlib.suppress(OSError), FileIO(leftover) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
            leftover.unlink()
