"""WORLD, the process group that Lightning makes: its store, its size and its end.

Without a process group the world is this process alone. `comm.world` has its collectives.
`disconnect_groups` is for all groups.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import entry_points
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from lightning_zero.health.failures import print_now

__all__ = [
    "DEFAULT_TIMEOUT",
    "disconnect_groups",
    "end_at_exit",
    "has_world",
    "is_nccl",
    "is_world",
    "known_backends",
    "leave_world",
    "open_store",
    "world_size",
]

DEFAULT_TIMEOUT = default_pg_timeout
_RENDEZVOUS_MARGIN_S = 2.0  # wait for torch's own error, which is more precise
_ABORT_S = 5.0  # NCCL takes less than a second; then the abort is reported as failed


def known_backends() -> list[str]:
    """Names of torch's backends, with those of other packages; empty without torch.distributed."""
    if not dist.is_available():
        return []
    # Torch lists these two also if it was built without them.
    built = {"mpi": dist.is_mpi_available(), "ucc": dist.is_ucc_available()}
    listed = (name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED)
    # Torch 2.15 registers some of its own, such as nccl-legacy, where they are used first.
    lazy = (entry.name.lower() for entry in entry_points(group="torch.distributed.backends"))
    return [name for name in dict.fromkeys((*listed, *lazy)) if built.get(name, True)]


def is_nccl(backend: str) -> bool:
    """Whether a backend of this name is NCCL: torch 2.15 has nccl2, nccl-lazy and nccl-legacy."""
    return backend.startswith("nccl")


def open_store(rank: int, size: int, timeout: timedelta) -> Any:
    """Opens the store of the default process group at MASTER_ADDR and MASTER_PORT. Collective.

    Another program at that address may never answer, and torch's own timeout does not end the
    connection to it; so a thread, which may be abandoned, waits for it.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
        timeout: Time in which all ranks must connect.

    Raises:
        RuntimeError: Not all ranks have connected in time, or another program uses the port.
    """
    opened: list[Any] = []
    failures: list[Exception] = []

    def connect() -> None:
        try:
            opened.append(next(rendezvous("env://", rank, size, timeout=timeout))[0])
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=connect, daemon=True, name="lightning-zero-rendezvous")
    thread.start()
    # Torch ends most failures itself, and knows how many ranks have connected.
    thread.join(timeout.total_seconds() + _RENDEZVOUS_MARGIN_S)
    if opened:
        return dist.distributed_c10d.PrefixStore("default_pg", opened[0])
    cause = failures[0] if failures else None
    found = f"no answer in {timeout.total_seconds():g} s."
    if cause is not None:
        found = next(iter(str(cause).splitlines()), type(cause).__name__)
    raise RuntimeError(
        f"rank {rank} of {size} could not meet the other ranks at "
        f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} (MASTER_ADDR and "
        f"MASTER_PORT): {found} All ranks must start within {timeout.total_seconds():g} s, the "
        "address must be that of rank 0's node, and no other program may use the port: choose "
        "another MASTER_PORT."
    ) from cause


def has_world() -> bool:
    """Whether the default process group is initialized."""
    return dist.is_available() and dist.is_initialized()


def is_world(group: Any) -> bool:
    """Whether `group` is the default process group; None stands for it, too."""
    return group is None or group is dist.group.WORLD


def world_size() -> int:
    """Returns the number of ranks; 1 without a process group."""
    return dist.get_world_size() if has_world() else 1


def leave_world() -> None:
    """Destroys the default process group, if there is one. Local."""
    if has_world():
        dist.destroy_process_group()


def end_at_exit(owner: Any) -> None:
    """Calls `owner.end_with_process` when this process ends, unless `owner` has been freed.

    A thread that runs torch code while the interpreter ends would crash it.
    """
    reference = weakref.ref(owner)

    def end() -> None:
        if (alive := reference()) is not None:
            alive.end_with_process()

    atexit.register(end)
    # At exit, the finalizer must not run before `end`.
    weakref.finalize(owner, atexit.unregister, end).atexit = False


def disconnect_groups(groups: Iterable[Any]) -> None:
    """Ends all operations of this rank on groups: closes gloo's connections, aborts the others.

    Destroyed groups are skipped. If a group cannot be aborted, this prints why.
    """
    known: list[tuple[Any, set[str]]] = []
    for group in groups:
        with suppress(RuntimeError, ValueError):
            dist.get_backend(group)  # raises if the group is destroyed
            # A group with one backend per device type does not name them.
            devices = group._device_types
            known.append((group, {group._get_backend(d).name().lower() for d in devices}))
    aborts = [_Abort(group, backends) for group, backends in known if backends - {"gloo", "fake"}]
    for group, backends in known:
        if "gloo" in backends:
            _close_pairs(group)
    deadline = time.monotonic() + _ABORT_S
    for abort in aborts:
        abort.finish(deadline)


class _Abort:
    """The abort of a group, in a thread of its own, so that all groups are aborted at once.

    One alone may wait for a kernel that waits for a kernel of another group
    (https://github.com/pytorch/pytorch/issues/119797), and torch groups no aborts:
    ProcessGroupNCCL runs each in a thread of its own, where `_group_start` of its caller has no
    effect, and the coalescing of ProcessGroupNCCL2 starts no group of NCCL.
    """

    def __init__(self, group: Any, backends: set[str]) -> None:
        self._group, self._rank = group, dist.get_rank()
        self._backends = ", ".join(sorted(backends))
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="lightning-zero-abort")
        self._thread.start()

    def _run(self) -> None:
        try:
            if is_world(self._group):
                self._group.abort()  # torch's function would abort all groups one by one
            else:
                dist.distributed_c10d._abort_process_group(self._group)
        except ValueError:  # another thread has destroyed it meanwhile
            pass
        except Exception as error:
            self._error = error

    def finish(self, deadline: float) -> None:
        """Waits until the group is aborted or the deadline is over; prints why it is not."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._report(f"no answer in {_ABORT_S:g} s")
        elif self._error is not None:
            self._report(f"{type(self._error).__name__}: {self._error}")
        elif is_world(self._group):
            with suppress(RuntimeError, ValueError):  # torch forgets it, with all other groups
                dist.distributed_c10d._abort_process_group(self._group)

    def _report(self, reason: str) -> None:
        print_now(
            f"rank {self._rank}: a process group on {self._backends} could not be aborted "
            f"({reason}). A call on the device that waits for it ends with torch's own timeout; to "
            "end it now, end this process."
        )


def _close_pairs(group: Any) -> None:
    """Closes the gloo connections of a group.

    Destroying the group closes them only once no transfer or traceback refers to it. A receive that
    times out closes the connections with all peers; if its peer is gone it fails and closes none.
    """
    nothing = torch.empty(1)
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([nothing], peer, 2**30).wait(timedelta(milliseconds=1))
