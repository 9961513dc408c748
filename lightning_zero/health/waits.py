"""Waits of this process for other ranks, and what it does meanwhile.

An engine announces its waits. Others, such as those in collectives of the user's, are found in the
frames of the main thread.
"""

from __future__ import annotations

import gc
import os
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any

import torch.distributed as dist

__all__ = ["RankStatus", "Wait", "Waits", "is_collective_call", "is_one_way", "user_frames"]

_NUM_FRAMES = 3
# The innermost Python frame of a thread that waits in a collective which the engine did not call.
_COLLECTIVES = ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py")
# Functions in these files that wait for no other rank.
_LOCAL = ("_object_to_tensor", "_tensor_to_object", "destroy_process_group")
_ONE_WAY = {"batch_isend_irecv", "broadcast", "gather", "irecv", "isend", "recv", "reduce"}
_ONE_WAY |= {"scatter", "send"}
_PEER_TO_PEER = {"batch_isend_irecv", "irecv", "isend", "recv", "send"}
_WORLD = "world"  # a group of a `RankStatus`
_DISTRIBUTED = os.path.dirname(dist.__file__)
_NOT_USERS = tuple(
    os.path.realpath(path) + os.sep
    for path in (
        os.path.dirname(os.path.dirname(__file__)),  # this package
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        site.getusersitepackages(),
    )
)


@dataclass(frozen=True)
class RankStatus:
    """Activity of one rank at a moment."""

    moment: str  # the engine's state, such as "in forward of blocks.3"; empty without an engine
    wait: str  # operation it waits for; empty: it is not known to wait for other ranks
    waited_s: float
    is_data_transfer: bool  # the wait transfers data; a long wait is normal
    frames: Sequence[str]  # innermost calls of the user's own code, the innermost last
    since: float = 0.0  # start of the wait on the rank's own clock; identifies the wait
    group: str = ""  # of the collective that it waits for: a key of `num_issued`
    number: int = 0  # of this collective on its group, from 1; 0: it is not known
    # Collectives that the rank has issued, by group; all ranks issue them in one order.
    num_issued: Mapping[str, int] = field(default_factory=dict)

    def lines(self) -> tuple[str, ...]:
        """Returns the status as text, without times: equal for ranks that do the same."""
        moment = self.moment or "outside of the engine"
        wait = "computes, or waits for no other rank"
        if self.wait:
            wait = f"waits for {self.wait}"
        return (f"{moment}; {wait}", *(f"    {frame}" for frame in self.frames))


@dataclass(frozen=True)
class Wait:
    """A wait for other ranks."""

    name: str  # operation, as in "rank 0 waits for the all_gather of layers.3"
    since: float  # time.monotonic()
    is_engine_group: bool = True  # on a group that is disconnected at a failure
    is_data_transfer: bool = False  # transfers data; a long wait is normal
    is_one_way: bool = False  # a long wait is normal; other ranks may have finished and exited
    has_failed: bool = False  # the operation will never complete
    ranks: tuple[int, ...] | None = None  # ranks that take part; None: all
    number: int = 0  # of the collective, among all that this rank has issued; 0: not known

    def needs(self, rank: int | None) -> bool:
        """Whether the wait needs `rank` to end; None: ranks that wait for each other."""
        return rank is None or self.ranks is None or rank in self.ranks


class Waits:
    """Waits of this process: announced by an engine, or found inside torch.distributed.

    Args:
        main: Id of the thread that runs the user's code.
        group: Name of the engine's groups in a `RankStatus`, the same on every rank.
        find_others: Returns the waits that other engines of this process announce.
        raise_failure: Called before a wait, if a rank has failed: raises the failure, unless
            another run has begun since.
        raise_cause: Called with the name and the error of a wait that has failed: raises its cause,
            if that is another one.
    """

    def __init__(
        self,
        main: int,
        group: str = "engine",
        find_others: Callable[[], Sequence[Waits]] = lambda: (),
        raise_failure: Callable[[], object] = lambda: None,
        raise_cause: Callable[[str, RuntimeError], object] = lambda name, error: None,
    ) -> None:
        self._num_issued = 0  # collectives of the data plane, of this run
        self._main = main
        self._group = group
        self._find_others = find_others
        self._raise_failure = raise_failure
        self._raise_cause = raise_cause
        self._has_rank_failed = False  # some rank, at some time
        self._announced: dict[int, Wait] = {}  # by thread id
        self._unannounced: tuple[Any, Wait] | None = None  # frame mark and wait of the main thread

    def __bool__(self) -> bool:
        """Whether any wait is announced."""
        return bool(self._announced)

    @property
    def has_main_thread(self) -> bool:
        """Whether the main thread has announced a wait."""
        return self._main in self._announced

    def count_issued(self) -> int:
        """Counts a collective of the data plane, and returns its number, from 1."""
        self._num_issued += 1
        return self._num_issued

    def restart_count(self) -> None:
        """Restarts the count, when a run begins."""
        self._num_issued = 0

    def note_failure(self) -> None:
        """Notes that a rank has failed, so that later waits call `raise_failure` first."""
        self._has_rank_failed = True

    def waiting(
        self,
        name: str,
        *,
        is_engine_group: bool = True,
        is_data_transfer: bool = False,
        is_one_way: bool = False,
        number: int = 0,
    ) -> AbstractContextManager[None]:
        """Context in which this thread waits for other ranks. See `Wait`.

        Raises:
            PeerFailedError: Another rank, or this one, has failed.
            DesynchronizedError: Another rank does not join.
        """
        if self._has_rank_failed:
            self._raise_failure()
        wait = Wait(
            name, time.monotonic(), is_engine_group, is_data_transfer, is_one_way, number=number
        )
        return self.announced(wait, partial(self._raise_cause, name))

    @contextmanager
    def announced(
        self, wait: Wait, on_error: Callable[[RuntimeError], object] | None = None
    ) -> Iterator[None]:
        """Context of a wait of this thread; `on_error` may raise another error than it is given."""
        thread = threading.get_ident()
        outer = self._announced.get(thread)
        self._announced[thread] = wait
        try:
            yield
        except RuntimeError as error:
            if on_error is not None:
                on_error(error)
            raise
        finally:
            if outer is None:
                self._announced.pop(thread, None)
            else:
                self._announced[thread] = outer

    @contextmanager
    def after_failed_wait(self) -> Iterator[None]:
        """Context in which this thread waits for a failure report: its operation has failed."""
        reports = Wait("a failure report of the other ranks", time.monotonic())
        known = self._announced.get(threading.get_ident(), reports)
        with self.announced(replace(known, has_failed=True)):
            yield

    def main_thread_wait(self) -> Wait | None:
        """Returns the wait of the main thread, in the engine or in torch.distributed."""
        with _garbage_collection_off():
            return self._find_main_thread_wait()

    def _find_main_thread_wait(self) -> Wait | None:
        frame = _frame_of(self._main)
        if (wait := self._announced.get(self._main)) is not None:
            return wait
        calls = _collective_calls(frame)
        if frame is None or not calls:
            self._unannounced = None
            # On CUDA autograd runs hooks, which wait, in a thread of its own.
            return min(list(self._announced.values()), key=lambda each: each.since, default=None)
        num_issued = _num_issued_on_world()
        mark = (id(frame), frame.f_lasti, num_issued)
        if self._unannounced is None or self._unannounced[0] != mark:
            name, ranks = _name_of(calls), _ranks_of(calls)
            wait = Wait(
                name,
                time.monotonic(),
                is_engine_group=False,
                is_data_transfer=ranks is not None,
                is_one_way=is_one_way(name),
                ranks=ranks,
                number=num_issued if ranks is None and not _is_peer_to_peer(name) else 0,
            )
            self._unannounced = (mark, wait)
        return self._unannounced[1]

    def status(self, moment: str) -> RankStatus:
        """Returns the status of the main thread, with the given moment of the engine."""
        with _garbage_collection_off():
            frames = user_frames(_frame_of(self._main))
        everyone = (self, *self._find_others())
        owner = next((waits for waits in everyone if waits.has_main_thread), self)
        wait = owner.main_thread_wait()
        if wait is None:
            return RankStatus(moment, "", 0.0, False, frames)
        waited_s, may_last = time.monotonic() - wait.since, wait.is_data_transfer or wait.is_one_way
        is_others = owner is not self and wait.is_engine_group
        return RankStatus(
            moment,
            f"{wait.name}, of another module" if is_others else wait.name,
            waited_s,
            may_last,
            frames,
            wait.since,
            owner._group if wait.is_engine_group else _WORLD,
            wait.number,
            {waits._group: waits._num_issued for waits in everyone}
            | {_WORLD: _num_issued_on_world()},
        )


@contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Context in which frames of other threads can be read safely.

    Python 3.11 may collect garbage while it makes the object of a frame. If a finalizer releases
    the GIL meanwhile, the other thread may return from that frame, whose memory the object then
    still refers to: reading it ends the process with a segmentation fault. Python 3.12 collects
    garbage only between two instructions; in Python 3.10 every frame is an object.
    """
    is_affected = sys.version_info[:2] == (3, 11) and gc.isenabled()
    if is_affected:
        gc.disable()
    try:
        yield
    finally:
        if is_affected:
            gc.enable()


def _frame_of(thread: int) -> FrameType | None:
    """Returns the innermost frame of a thread; None: it has ended."""
    return sys._current_frames().get(thread)


def _collective_calls(frame: FrameType | None) -> list[FrameType]:
    """Returns the calls of torch.distributed in which `frame` waits, the innermost first."""
    calls = []
    while frame is not None and is_collective_call(frame):
        calls.append(frame)
        frame = frame.f_back
    return calls


def is_collective_call(frame: FrameType) -> bool:
    """Whether `frame` is a function of torch.distributed that may wait for other ranks."""
    folder, file = os.path.split(frame.f_code.co_filename)
    is_there = folder == _DISTRIBUTED and file in _COLLECTIVES
    return is_there and frame.f_code.co_name not in _LOCAL


def _name_of(calls: Sequence[FrameType]) -> str:
    names = [call.f_code.co_name for call in calls]
    names = [name for name in names if name != "wrapper"]  # a decorator of torch
    outermost = names[-1] if names else ""
    return f"torch.distributed.{outermost}"


def _ranks_of(calls: Sequence[FrameType]) -> tuple[int, ...] | None:
    """Returns the ranks that take part in a collective; None: all."""
    for call in calls:
        group = call.f_locals.get("group")
        if group is not None and group is not dist.group.WORLD:
            with suppress(KeyError, ValueError, TypeError, RuntimeError):  # not a process group
                return tuple(dist.get_process_group_ranks(group))
    return None


def _is_peer_to_peer(name: str) -> bool:
    return name.rpartition(".")[2].removesuffix("_object_list") in _PEER_TO_PEER


def _num_issued_on_world() -> int:
    """Collectives that this rank has issued on the default group; 0: it is not known."""
    world: Any = dist.group.WORLD
    with suppress(RuntimeError, AttributeError):  # there is no group, or it does not count
        return int(world._get_sequence_number_for_group())
    return 0


def is_one_way(name: str) -> bool:
    """Whether some ranks may have finished a collective, and exited, while others are in it."""
    verb = name.rpartition(".")[2]
    return verb.removesuffix("_list").removesuffix("_object") in _ONE_WAY


def user_frames(frame: FrameType | None) -> tuple[str, ...]:
    """Returns the innermost calls outside this package and all installed packages."""
    found: list[str] = []
    while frame is not None and len(found) < _NUM_FRAMES:
        path = frame.f_code.co_filename
        is_real = os.path.isabs(path) or os.path.exists(path)
        if is_real and not os.path.realpath(path).startswith(_NOT_USERS):
            found.append(f"{path}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(reversed(found))
