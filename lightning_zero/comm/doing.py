"""What a rank is doing, as told to the others while its main thread waits."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any

import torch.distributed as dist

__all__ = ["Doing", "Wait", "Waits", "is_one_way", "report", "user_frames"]

_NUM_FRAMES = 3
# The innermost Python frame of a thread that waits in a collective which the engine did not call.
_COLLECTIVES = ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py")
_LOCAL = ("_object_to_tensor", "_tensor_to_object", "destroy_process_group")  # of their functions
_ONE_WAY = {"batch_isend_irecv", "broadcast", "gather", "irecv", "isend", "recv", "reduce"}
_ONE_WAY |= {"scatter", "send"}
_DISTRIBUTED = os.path.dirname(dist.__file__)
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_NOT_USERS = tuple(
    {
        os.path.realpath(path) + os.sep
        for path in (
            _PACKAGE,
            sysconfig.get_path("stdlib"),
            sysconfig.get_path("purelib"),
            sysconfig.get_path("platlib"),
            site.getusersitepackages(),
        )
    }
)


@dataclass(frozen=True)
class Doing:
    """What one rank is doing.

    Attributes:
        moment: Of the engine, such as "in forward of blocks.3"; empty without one.
        wait: What it waits for; empty: it does not wait for other ranks, as far as it knows.
        waited_s: For how long.
        is_for_data: Much may be under way, so that the wait may last.
        frames: Innermost calls of the user's own code, the innermost last.
        since: Marks the wait: the same number as long as it is the same one.
    """

    moment: str
    wait: str
    waited_s: float
    is_for_data: bool
    frames: tuple[str, ...]
    since: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Doing:
        """From JSON."""
        return cls(**{**values, "frames": tuple(values["frames"])})

    def lines(self) -> tuple[str, ...]:
        """As text, without the time, so that ranks that do the same say the same."""
        moment = self.moment or "outside of the engine"
        wait = f"waits for {self.wait}" if self.wait else "computes, or waits for no other rank"
        return (f"{moment}; {wait}", *(f"    {frame}" for frame in self.frames))


@dataclass(frozen=True)
class Wait:
    """For other ranks."""

    name: str
    since: float  # time.monotonic()
    is_engines: bool = True
    is_for_data: bool = False  # which may take its time
    is_one_way: bool = False  # others may have done their part, and be gone
    has_failed: bool = False  # nothing comes any more
    ranks: tuple[int, ...] | None = None  # that take part; None: all

    def needs(self, rank: int | None) -> bool:
        """Whether it cannot end without `rank`, or where ranks wait for each other."""
        return rank is None or self.ranks is None or rank in self.ranks


class Waits:
    """Waits of this process: those that the engine announces, and those in torch.distributed.

    Args:
        main: The thread in which the user's code runs.
    """

    def __init__(self, main: int) -> None:
        self._main = main
        self._announced: dict[int, Wait] = {}  # by thread
        self._outside: tuple[Any, Wait] | None = None  # a wait that nobody has announced

    def __bool__(self) -> bool:
        """Whether any is announced."""
        return bool(self._announced)

    @contextmanager
    def announced(self, wait: Wait) -> Iterator[None]:
        """While this thread waits."""
        thread = threading.get_ident()
        outer = self._announced.get(thread)
        self._announced[thread] = wait
        try:
            yield
        finally:
            if outer is None:
                self._announced.pop(thread, None)
            else:
                self._announced[thread] = outer

    @contextmanager
    def in_vain(self) -> Iterator[None]:
        """While this thread waits for news alone: what it has waited for does not come any more."""
        nothing = Wait("news of the other ranks", time.monotonic())
        known = self._announced.get(threading.get_ident(), nothing)
        with self.announced(replace(known, has_failed=True)):
            yield

    def of_main(self) -> Wait | None:
        """What the main thread waits for, in the engine or in torch.distributed."""
        frame = frame_of(self._main)
        if (wait := self._announced.get(self._main)) is not None:
            return wait
        if not is_in_collective(frame):
            self._outside = None
            # On CUDA autograd has a thread of its own, in which its hooks wait.
            return min(list(self._announced.values()), key=lambda each: each.since, default=None)
        assert frame is not None
        mark = (id(frame), frame.f_lasti)
        if self._outside is None or self._outside[0] != mark:
            name, ranks = collective_of(frame), ranks_of_collective(frame)
            wait = Wait(
                name,
                time.monotonic(),
                is_engines=False,
                is_for_data=ranks is not None or is_one_way(name),
                is_one_way=is_one_way(name),
                ranks=ranks,
            )
            self._outside = (mark, wait)
        return self._outside[1]

    def doing(self, moment: str) -> Doing:
        """What the main thread is doing, at this moment of the engine."""
        frames, wait = user_frames(frame_of(self._main)), self.of_main()
        if wait is None:
            return Doing(moment, "", 0.0, False, frames)
        waited_s = time.monotonic() - wait.since
        return Doing(moment, wait.name, waited_s, wait.is_for_data, frames, wait.since)


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread; None: it has ended."""
    return sys._current_frames().get(thread)


def is_in_collective(frame: FrameType | None) -> bool:
    """Whether `frame` is a call of torch.distributed that waits for other ranks."""
    if frame is None:
        return False
    folder, name = os.path.split(frame.f_code.co_filename)
    is_there = folder == _DISTRIBUTED and name in _COLLECTIVES
    return is_there and frame.f_code.co_name not in _LOCAL


def collective_of(frame: FrameType | None) -> str:
    """Name of the collective in which `frame` waits."""
    name = ""
    while frame is not None and is_in_collective(frame):
        if frame.f_code.co_name != "wrapper":  # torch's decorators
            name = frame.f_code.co_name
        frame = frame.f_back
    return f"torch.distributed.{name}"


def ranks_of_collective(frame: FrameType | None) -> tuple[int, ...] | None:
    """The ranks that take part in the collective in which `frame` waits; None: all."""
    while frame is not None and is_in_collective(frame):
        group = frame.f_locals.get("group")
        if group is not None and group is not dist.group.WORLD:
            with suppress(KeyError, ValueError, TypeError, RuntimeError):  # no group after all
                return tuple(dist.get_process_group_ranks(group))
        frame = frame.f_back
    return None


def is_one_way(name: str) -> bool:
    """Whether some ranks may be done with a collective, and gone, while others are in it."""
    verb = name.rpartition(".")[2]
    return verb.removesuffix("_list").removesuffix("_object") in _ONE_WAY


def user_frames(frame: FrameType | None) -> tuple[str, ...]:
    """The innermost calls that are neither the library's nor an installed package's."""
    found: list[str] = []
    while frame is not None and len(found) < _NUM_FRAMES:
        path = frame.f_code.co_filename
        is_real = os.path.isabs(path) or os.path.exists(path)
        if is_real and not os.path.realpath(path).startswith(_NOT_USERS):
            found.append(f"{path}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(reversed(found))


def report(head: str, answers: Sequence[Doing | None]) -> str:
    """What every rank is doing, ranks that do the same together.

    Args:
        head: First line.
        answers: By rank; None: it has not answered.
    """
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    silent = ("no answer: it has ended, is stopped, or its node is out of reach",)
    for rank, doing in enumerate(answers):
        ranks_of.setdefault(silent if doing is None else doing.lines(), []).append(rank)
    lines = [head]
    for (first, *rest), ranks in ranks_of.items():
        longest = max(((answers[rank] or _NOTHING).waited_s for rank in ranks), default=0.0)
        time = f" ({longest:.0f} s)" if longest else ""
        lines += [f"  {_ranks(ranks)}: {first}{time}", *rest]
    return "\n".join(lines)


_NOTHING = Doing("", "", 0.0, False, ())


def _ranks(ranks: Sequence[int]) -> str:
    """Such as "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
