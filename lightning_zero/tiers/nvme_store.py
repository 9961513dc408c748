"""The files of one process that hold shards, in a directory under a shared path.

[Note: Whose directory] Jobs that share a disk must not meet, and what a killed job leaves must go.
So each process makes a directory with a name of its own and holds `flock` on a file in it, which
the kernel lets go of when the process ends, however it ends. Who finds a directory whose lock is
free removes it. Between making a directory and locking it another may find it free: the maker looks
again after locking, and begins anew if it was removed. A lock on a network disk may hold for one
machine only, so the name carries the host and the boot, and those of other machines are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

from lightning_zero.record.recorder import Recorder
from lightning_zero.tiers.memory import ALIGNMENT
from lightning_zero.tiers.nvme_file import (
    GUARD_BYTES,
    Actor,
    NvmeFile,
    allocate,
    explained,
    file_system_of,
    takes_direct,
)

__all__ = ["NvmeFile", "NvmeStore", "locked_directory", "remove_abandoned"]

_PREFIX = "lightning_zero"
_LOCK = ".lock"
_JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")


def locked_directory(path: Path, *, rank: int) -> tuple[Path, int]:
    """Make a directory of this process under `path`. See [Note: Whose directory].

    Returns:
        The directory, and the file descriptor that holds its lock: closing it gives it up.

    Raises:
        OSError: `path` is missing, no directory, or not writable.
    """
    job = next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)), "none")
    for _ in range(100):
        words = (_PREFIX, job, *_machine(), f"rank{rank}", str(os.getpid()), secrets.token_hex(4))
        directory = path / ".".join(_word(word) for word in words)
        try:
            directory.mkdir(mode=0o700)
        except OSError as error:
            raise _explained(error, path) from None
        with contextlib.suppress(FileNotFoundError):  # removed already: begin anew
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            if _is_locked(lock, directory / _LOCK):
                return directory, lock
            os.close(lock)
    raise RuntimeError(f"other processes removed every directory made under {path}, 100 times")


def remove_abandoned(path: Path) -> list[Path]:
    """Remove directories under `path` that processes of this machine left when they died.

    Returns:
        What was removed.
    """
    removed: list[Path] = []
    try:
        directories = [path / name for name in sorted(os.listdir(path))]
    except OSError:
        return removed  # whether `path` can be used is asked elsewhere
    here = {_word(word) for word in _machine()}
    for directory in directories:
        words = directory.name.split(".")
        if len(words) != 7 or words[0] != _PREFIX or not here & set(words[2:4]):
            continue
        # Another user's directory cannot be opened and is not ours to remove.
        with contextlib.suppress(OSError):
            if _remove_if_free(directory):
                removed.append(directory)
    return removed


def _remove_if_free(directory: Path) -> bool:
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        directory.rmdir()  # fails if it is not empty: then it is none of ours
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
        return True
    finally:
        os.close(lock)


def _is_locked(lock: int, path: Path) -> bool:
    """Lock it; False if another is about to remove it, or did."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: nobody can find it free
    return path.exists() and os.fstat(lock).st_ino == path.stat().st_ino


def _machine() -> tuple[str, str]:
    """Host name, which containers change, and boot, which restarts change: either is enough."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), boot[:8] or "boot"


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", text)[:60]


def _explained(error: OSError, path: Path) -> OSError:
    reasons = {
        errno.ENOENT: "does not exist; is the disk mounted? Make the directory first",
        errno.ENOTDIR: "is no directory; give a directory on a local NVMe disk",
        errno.EACCES: f"is not writable by user {os.getuid()}",
        errno.EROFS: "is mounted read-only",
        errno.ENOSPC: "is full, not even a directory can be made; free space on that disk",
    }
    reason = reasons.get(error.errno or 0, f"cannot take a directory: {error.strerror}")
    return OSError(error.errno, f"the NVMe path {reason}", str(path))


class NvmeStore:
    """The files of one process under `path`, and the threads that move their bytes.

    They lie in a directory of their own that goes with `close`, with the process or, if it was
    killed, with the next store under `path` (see [Note: Whose directory]). A forked child can
    neither use nor remove it. Any thread may use it.
    """

    directory: Path
    is_direct: bool  # whether O_DIRECT works here; else files pass through the page cache
    block_bytes: int  # of transfers from now on; may be set
    bytes_read: int  # since construction
    bytes_written: int
    bytes_allocated: int
    recorder: Recorder

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        num_read_threads: int = 4,
        num_write_threads: int = 4,
        block_bytes: int = 4 * 2**20,
        recorder: Recorder | None = None,
    ) -> None:
        """Make the directory and look whether the disk takes O_DIRECT.

        Args:
            path: An existing directory, to be shared with other jobs or not.
            rank: Of this process, for the directory's name.
            num_read_threads: Blocks that are read at once.
            num_write_threads: Blocks that are written at once.
            block_bytes: Bytes that a thread moves at once, a multiple of 4096.
            recorder: Of reads and writes, and the waits for them.

        Raises:
            OSError: `path` is missing, no directory, not writable, or full.
            ValueError: A number is out of range.
        """
        if min(num_read_threads, num_write_threads) < 1:
            raise ValueError(
                "expected at least 1 thread each to read and to write, got "
                f"num_read_threads={num_read_threads}, num_write_threads={num_write_threads}"
            )
        if block_bytes < ALIGNMENT or block_bytes % ALIGNMENT:
            raise ValueError(f"block_bytes must be a multiple of {ALIGNMENT}, got {block_bytes}")
        self.block_bytes = block_bytes
        self.recorder = recorder or Recorder()
        self.bytes_read = self.bytes_written = self.bytes_allocated = 0
        self._pid = os.getpid()
        self._actor = Actor("nvme")
        self._lock = threading.Lock()
        remove_abandoned(Path(path))
        self.directory, lock = locked_directory(Path(path), rank=rank)
        self._files: list[NvmeFile] = []
        self._descriptors = [lock]
        # Runs at exit too, after the threads have ended.
        self._finalizer = weakref.finalize(
            self, _remove, self.directory, self._descriptors, self._pid
        )
        # An inherited lock would outlive this process in the child.
        os.register_at_fork(after_in_child=_closing(self._descriptors))
        self._readers = ThreadPoolExecutor(num_read_threads, "nvme-read")
        self._writers = ThreadPoolExecutor(num_write_threads, "nvme-write")
        try:
            self.is_direct = takes_direct(self.directory)
        except OSError as error:
            self._finalizer()
            raise explained(error, self.directory, "write", 0, ALIGNMENT) from None
        if not self.is_direct and _local_rank(rank) == 0:
            warnings.warn(
                f"{path} ({file_system_of(Path(path))}) refuses O_DIRECT: its files pass through "
                "the page cache, which takes CPU time and memory; use a local NVMe disk.",
                stacklevel=2,
            )

    def create(self, name: str, nbytes: int) -> NvmeFile:
        """Make a file with room for `nbytes`, rounded up to 4096; its bytes are zero.

        Raises:
            OSError: The disk is full, or the directory is gone.
        """
        self.check_open()
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            path = self.directory / f"{len(self._files):04d}-{quote(name, safe='')[:100]}"
            allocate(path, nbytes + GUARD_BYTES)
            flags = os.O_RDWR | (os.O_DIRECT if self.is_direct else 0)
            descriptor = os.open(path, flags)
            self._descriptors.append(descriptor)
            file = NvmeFile(self, path, nbytes, descriptor, name)
            self._files.append(file)
            self.bytes_allocated += nbytes + GUARD_BYTES
        return file

    def close(self) -> None:
        """Wait for what is under way, give up what is not, and remove everything; idempotent."""
        if os.getpid() != self._pid or not self._finalizer.alive:
            return
        self._actor.ask(self._end)
        self._finalizer()

    def check_open(self) -> None:
        """Refuse to work in a forked child and after `close`.

        Raises:
            RuntimeError: It is one of these moments.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"the files in {self.directory} belong to process {self._pid}; a forked child "
                "(a DataLoader worker, say) must not use them"
            )
        if not self._finalizer.alive:
            raise RuntimeError(f"the files in {self.directory} are closed and removed")

    def tell(self, call: Callable[[], object]) -> None:
        """Have `call` run on the store's actor, after those told before it."""
        self._actor.tell(call)

    def submit(self, work: Callable[[], None], *, is_write: bool) -> None:
        """Run `work` on a thread."""
        (self._writers if is_write else self._readers).submit(work)

    def _end(self) -> None:
        for file in self._files:
            file.cancel()
        self._readers.shutdown()
        self._writers.shutdown()

    def count(self, nbytes: int, *, is_write: bool) -> None:
        """Add to the bytes read or written."""
        with self._lock:
            if is_write:
                self.bytes_written += nbytes
            else:
                self.bytes_read += nbytes


def _remove(directory: Path, descriptors: list[int], pid: int) -> None:
    if os.getpid() != pid:
        return
    # The lock, the first one, goes last: until then nobody else looks into the directory.
    while len(descriptors) > 1:
        os.close(descriptors.pop())
    shutil.rmtree(directory, ignore_errors=True)
    if descriptors:
        os.close(descriptors.pop())


def _closing(descriptors: list[int]) -> Callable[[], None]:
    def close() -> None:
        while descriptors:
            os.close(descriptors.pop())

    return close


def _local_rank(rank: int) -> int:
    """The rank on this machine where a launcher tells it."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return rank
