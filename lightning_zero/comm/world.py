"""Collectives on WORLD, the process group that Lightning makes and the engine never uses.

For what comes before an engine and its groups, and for what Lightning itself asks of a strategy.
Without a process group the world is this process alone. They wait as long as it was made to. Other
groups end here only: `disconnect_groups`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

__all__ = [
    "DEFAULT_TIMEOUT",
    "WaitLimits",
    "as_timeout",
    "broadcast_object",
    "check_backend",
    "disconnect_groups",
    "failing_together",
    "gather_objects",
    "has_world",
    "is_world",
    "leave_world",
    "open_store",
    "raise_together",
    "describe_failure",
    "wait_for_world",
    "world_size",
]

DEFAULT_TIMEOUT = default_pg_timeout
_RENDEZVOUS_MARGIN_S = 2.0  # for an error of torch's own, which says more

_T = TypeVar("_T")


def as_timeout(value: object) -> timedelta | None:
    """What a user gave as the timeout of collectives; None: the backend's."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (timedelta, int, float)):
        raise TypeError(
            "timeout must be a datetime.timedelta or a number of seconds, got "
            f"{value!r}; one hour is timeout=timedelta(hours=1) or timeout=3600."
        )
    try:
        timeout = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (ValueError, OverflowError):  # NaN, and what has no end
        timeout = timedelta(0)
    if timeout <= timedelta(0):
        raise ValueError(
            f"timeout must be more than 0 seconds, and finite, got {value!r}; a day is "
            "timeout=timedelta(days=1)."
        )
    return timeout


@dataclass(frozen=True)
class WaitLimits:
    """How long a rank may keep the others waiting, in seconds.

    Attributes:
        report_s: A longer wait is reported once, with what every rank is doing; None: never.
        lost_s: A rank of which nothing has been received for longer is lost, which ends the job on
            all ranks; None: silence alone ends nothing.

    Raises:
        TypeError: One is no number.
        ValueError: One is not more than 0.
    """

    report_s: float | None = 30.0
    lost_s: float | None = None

    def __post_init__(self) -> None:
        _check_seconds("wait_report_s", self.report_s, "no report")
        _check_seconds("heartbeat_timeout_s", self.lost_s, "that silence alone ends nothing")


def _check_seconds(name: str, value: object, without: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{name} must be a number of seconds, or None, which means {without}, got {value!r}."
        )
    if not value > 0:  # NaN neither
        raise ValueError(
            f"{name} must be more than 0 seconds, got {value!r}; None means {without}."
        )


def check_backend(value: object) -> None:
    """Refuses a backend of a user's, such as "cpu:gloo,cuda:nccl", that torch does not know."""
    if value is None or not dist.is_available():
        return
    if not isinstance(value, str):
        raise TypeError(
            f"process_group_backend must be a name such as 'gloo' or 'nccl', got {value!r}."
        )
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    for part in value.split(","):
        name = part.rpartition(":")[2].strip().lower()
        if name not in known:
            raise ValueError(
                f"process_group_backend must be one of {', '.join(known)}, or such as "
                f"'cpu:gloo,cuda:nccl', got {value!r}; leave it out for nccl on CUDA and gloo on "
                "the CPU. A backend of another package must be registered before: import it first."
            )


def open_store(rank: int, size: int, timeout: timedelta) -> Any:
    """The store of the default process group, at MASTER_ADDR and MASTER_PORT. Collective.

    A connection to a program that is not ours may never be answered, and torch's own timeout does
    not end that; so a thread, which may stay behind, waits for it.

    Args:
        rank: This rank.
        size: Number of ranks.
        timeout: Time for all ranks to come, whatever answers at the address.

    Raises:
        RuntimeError: Not all ranks have come in time, or something else has the port.
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
    # Torch ends most failures itself, and knows how many ranks have come.
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
    return dist.is_available() and dist.is_initialized()


def is_world(group: Any) -> bool:
    """Whether `group` is the default process group, which None means too."""
    return group is None or group is dist.group.WORLD


def world_size() -> int:
    return dist.get_world_size() if has_world() else 1


def wait_for_world(device: torch.device) -> None:
    """Waits until every rank, which computes on `device`, has come here. Collective: every rank."""
    if has_world():
        on_nccl = dist.get_backend() == "nccl"
        dist.barrier(device_ids=[device.index] if on_nccl else None)


def broadcast_object(value: _T, source: int = 0) -> _T:
    """The picklable object of rank `source`, on every rank. Collective: every rank."""
    if not has_world():
        return value
    box = [value]
    dist.broadcast_object_list(box, source)
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Every rank's picklable object, on every rank. Collective: every rank."""
    if not has_world():
        return [value]
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


@contextmanager
def failing_together(
    what: str, gather: Callable[[Any], Sequence[Any]] = gather_objects
) -> Iterator[None]:
    """Around work that each rank does alone and that may fail on some: then all fail. Collective.

    Args:
        what: Is done, as in "rank 1 could not open one.ckpt".
        gather: Gives every rank's picklable object on every rank.

    Raises:
        Exception: See `raise_together`.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    raise_together(failure, gather(describe_failure(failure)), what)


def describe_failure(failure: Exception | None) -> tuple[str, int | None] | None:
    """What the other ranks learn of a failure; None where there is none."""
    if failure is None:
        return None
    number = failure.errno if isinstance(failure, OSError) else None
    return f"{type(failure).__name__}: {failure}", number


def raise_together(
    failure: Exception | None, told: Sequence[tuple[str, int | None] | None], what: str
) -> None:
    """Raises on every rank where any has failed, as `told` by each; see `failing_together`.

    Raises:
        Exception: `failure`, this rank's, where there is one.
        OSError: Another rank's was one; of the same number.
        RuntimeError: Another rank's was none. Both say which rank failed and how.
    """
    if failure is not None:
        raise failure
    for rank, one in enumerate(told):
        if one is not None:
            text, number = f"rank {rank} could not {what}: {one[0]}", one[1]
            raise RuntimeError(text) if number is None else OSError(number, text)


def leave_world() -> None:
    """Destroys it, if there is one. Local."""
    if has_world():
        dist.destroy_process_group()


def disconnect_groups(groups: Iterable[Any]) -> None:
    """Ends what is under way on groups, on this rank: gloo's connections close, NCCL aborts.

    NCCL's groups end all together: one alone may wait for a kernel that waits for another's
    (https://github.com/pytorch/pytorch/issues/119797). Groups that are destroyed are left out.
    """
    known: list[tuple[Any, set[str]]] = []
    for group in groups:
        with suppress(RuntimeError, ValueError):
            dist.get_backend(group)  # raises where it is destroyed
            # Of a group with one for each kind of device the name tells none of them.
            devices = group._device_types
            known.append((group, {group._get_backend(d).name().lower() for d in devices}))
    of_nccl = [group for group, backends in known if "nccl" in backends]
    if of_nccl:
        backend = of_nccl[0]._get_backend(torch.device("cuda"))
        backend._group_start()
        for group in of_nccl:
            with suppress(RuntimeError, ValueError):
                dist.distributed_c10d._abort_process_group(group)
        backend._group_end()
    for group, backends in known:
        if "gloo" in backends:
            _close_pairs(group)


def _close_pairs(group: Any) -> None:
    """Closes a group's connections of gloo.

    Destroying the group does not while anything, a transfer or a traceback, refers to it. A receive
    that times out closes those with all peers; where the peer has gone it fails, and closes none.
    """
    nothing = torch.empty(1)
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([nothing], peer, 2**30).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return
