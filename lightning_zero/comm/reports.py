"""What ranks wait for and what they are doing, told to all when one of them has waited long."""

from __future__ import annotations

import json
import logging
import os
import site
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any

import torch.distributed as dist

__all__ = [
    "RankStatus",
    "LogEntry",
    "Reports",
    "Wait",
    "Waits",
    "is_one_way",
    "report",
    "user_frames",
]

_ANSWER_S = 3.0  # for all ranks to say what they are doing
_AGAIN_S = 10.0  # between two looks at ranks that seem to wait for each other
_NUM_FRAMES = 3
# The innermost Python frame of a thread that waits in a collective which the engine did not call.
_COLLECTIVES = ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py")
_LOCAL = ("_object_to_tensor", "_tensor_to_object", "destroy_process_group")  # of their functions
_ONE_WAY = {"batch_isend_irecv", "broadcast", "gather", "irecv", "isend", "recv", "reduce"}
_ONE_WAY |= {"scatter", "send"}
_DISTRIBUTED = os.path.dirname(dist.__file__)
_NOT_USERS = tuple(
    os.path.realpath(path) + os.sep
    for path in (
        os.path.dirname(os.path.dirname(__file__)),  # this package
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        site.getusersitepackages(),
    )
)

_log = logging.getLogger(__name__)
LogEntry = dict[str, Any]  # an entry of the log of the watchdogs


@dataclass(frozen=True)
class RankStatus:
    """What one rank is doing."""

    moment: str  # of the engine, such as "in forward of blocks.3"; empty without one
    wait: str  # what for; empty: it does not wait for other ranks, as far as it knows
    waited_s: float
    is_data_transfer: bool  # much may be under way, so that the wait may last
    frames: Sequence[str]  # innermost calls of the user's own code, the innermost last
    since: float = 0.0  # marks the wait: the same number as long as it is the same one

    def lines(self) -> tuple[str, ...]:
        """As text, without the time, so that ranks that do the same say the same."""
        moment = self.moment or "outside of the engine"
        wait = f"waits for {self.wait}" if self.wait else "computes, or waits for no other rank"
        return (f"{moment}; {wait}", *(f"    {frame}" for frame in self.frames))


@dataclass(frozen=True)
class Wait:
    """For other ranks."""

    name: str  # what for, as in "rank 0 waits for the gather of layers.3"
    since: float  # time.monotonic()
    is_engine_group: bool = True  # on a group that is cut at a verdict
    is_data_transfer: bool = (
        False  # much may be under way, so that a long one is no sign of a fault
    )
    is_one_way: bool = False  # likewise; and others may be done with it, and gone
    has_failed: bool = False  # nothing comes any more
    ranks: tuple[int, ...] | None = None  # that take part; None: all

    def needs(self, rank: int | None) -> bool:
        """Whether it cannot end without `rank`; None: where ranks wait for each other."""
        return rank is None or self.ranks is None or rank in self.ranks


class Waits:
    """Waits of this process: those that the engine announces, and those in torch.distributed."""

    def __init__(self, main: int) -> None:
        self._main = main  # the thread in which the user's code runs
        self._announced: dict[int, Wait] = {}  # by thread
        self._outside: tuple[Any, Wait] | None = None  # a wait that nobody has announced

    def __bool__(self) -> bool:
        """Whether any is announced."""
        return bool(self._announced)

    @property
    def is_announced(self) -> bool:
        """Whether this thread has announced one."""
        return threading.get_ident() in self._announced

    @contextmanager
    def announced(self, wait: Wait) -> Iterator[None]:
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
    def after_failed_wait(self) -> Iterator[None]:
        """While this thread waits for news alone: what it has waited for does not come any more."""
        nothing = Wait("news of the other ranks", time.monotonic())
        known = self._announced.get(threading.get_ident(), nothing)
        with self.announced(replace(known, has_failed=True)):
            yield

    def main_thread_wait(self) -> Wait | None:
        """What the main thread waits for, in the engine or in torch.distributed."""
        frame = _frame_of(self._main)
        if (wait := self._announced.get(self._main)) is not None:
            return wait
        calls = _collective_calls(frame)
        if frame is None or not calls:
            self._outside = None
            # On CUDA autograd has a thread of its own, in which its hooks wait.
            return min(list(self._announced.values()), key=lambda each: each.since, default=None)
        mark = (id(frame), frame.f_lasti)
        if self._outside is None or self._outside[0] != mark:
            name, ranks = _name_of(calls), _ranks_of(calls)
            wait = Wait(
                name,
                time.monotonic(),
                is_engine_group=False,
                is_data_transfer=ranks is not None,
                is_one_way=is_one_way(name),
                ranks=ranks,
            )
            self._outside = (mark, wait)
        return self._outside[1]

    def status(self, moment: str) -> RankStatus:
        """What the main thread is doing, at this moment of the engine."""
        frames, wait = user_frames(_frame_of(self._main)), self.main_thread_wait()
        if wait is None:
            return RankStatus(moment, "", 0.0, False, frames)
        waited_s, may_last = time.monotonic() - wait.since, wait.is_data_transfer or wait.is_one_way
        return RankStatus(moment, wait.name, waited_s, may_last, frames, wait.since)


class Reports:
    """This rank's side of reports; of the watchdog's thread, with a store of its own.

    What a method yields is to be appended to the log of news before it goes on. After `after_s`
    seconds of waiting for other ranks all tell what they are doing; None: never.
    """

    describe: weakref.WeakMethod[Callable[[], str]] | None = None  # of the engine

    def __init__(
        self, name: str, rank: int, size: int, after_s: float | None, waits: Waits
    ) -> None:
        self._name = name
        self._rank = rank
        self._size = size
        self._after_s = after_s
        self._waits = waits
        self._reported: Wait | None = None
        self._texts: list[str] = []  # keys of reports that others will write
        self._second_look: tuple[float, list[float]] | None = None

    def poll(self, store: Any, wait: Wait | None) -> Iterator[LogEntry]:
        """Asks the ranks where `wait` is a long one, and tells what others have found out."""
        if self._after_s is None:
            return
        now = time.monotonic()
        is_long = wait is not None and now - wait.since > self._after_s
        if is_long and wait is not self._reported:
            self._reported = wait
            yield {"kind": "report"}
        if self._second_look is not None and now > self._second_look[0]:
            yield {"kind": "report", "is_again": True}
        for key in [key for key in self._texts if store.check([key])]:
            self._texts.remove(key)
            self._show(store.get(key).decode())

    def answer(self, store: Any, number: int, news: LogEntry) -> Iterator[LogEntry]:
        """To request `number`, `news`, tells what this rank is doing.

        The one that asked reads all answers, and writes the report.
        """
        self._reported = self._waits.main_thread_wait()
        doing = self.status()
        key = f"{self._name}/doing/{number}"
        store.set(f"{key}/{self._rank}", json.dumps(asdict(doing)))
        is_again = bool(news.get("is_again"))
        if news["by"] != self._rank:
            self._texts += [] if is_again else [f"{key}/text"]
        elif is_again:
            yield from self._look_again(self._collect(store, key))
        else:
            self._write(store, key, self._collect(store, key))

    def status(self) -> RankStatus:
        """What this rank is doing."""
        describe = self.describe() if self.describe is not None else None
        return self._waits.status(describe() if describe is not None else "")

    def _collect(self, store: Any, key: str) -> list[RankStatus | None]:
        answers: list[RankStatus | None] = [None] * self._size
        until = time.monotonic() + _ANSWER_S
        while None in answers and time.monotonic() < until:
            for rank, answer in enumerate(answers):
                if answer is None and store.check([f"{key}/{rank}"]):
                    with suppress(ValueError, TypeError):  # not readable: as if it gave no answer
                        answers[rank] = RankStatus(**json.loads(store.get(f"{key}/{rank}")))
            time.sleep(0.02)
        return answers

    def _write(self, store: Any, key: str, answers: Sequence[RankStatus | None]) -> None:
        who = f"rank {self._rank} has waited {self._after_s:g} s for other ranks"
        text = report(f"{who}; what every rank is doing:", answers)
        store.set(f"{key}/text", text)
        self._show(text, is_alone=answers[0] is None)
        if _may_be_circle(answers):
            again = time.monotonic() + min(_AGAIN_S, self._after_s or _AGAIN_S)
            self._second_look = (again, [a.since for a in answers if a is not None])

    def _look_again(self, answers: Sequence[RankStatus | None]) -> Iterator[LogEntry]:
        """Ends a wait of all ranks for each other, which has not moved since the last look."""
        assert self._second_look is not None
        _, before = self._second_look
        self._second_look = None
        now = [answer.since for answer in answers if answer is not None]
        if not _may_be_circle(answers) or now != before:
            return
        text = report("all ranks wait for each other, in different places:", answers)
        end = (
            "\nCall collectives of your own at the same point on every rank; in stage 3, outside "
            "of code that only some ranks run. Where ranks use different parts of the module "
            "before one, as experts that depend on data, call "
            "lightning_zero.before_collective(module) right before it, on every rank, or gather "
            "those parts together: unit_classes=[...] with the class of the module around them."
        )
        yield {"kind": "abort", "text": text + end, "is_own": False}

    def _show(self, text: str, *, is_alone: bool = False) -> None:
        """For people to see on rank 0, or where that one does not answer; else for the log."""
        _log.log(logging.WARNING if self._rank == 0 or is_alone else logging.INFO, "%s", text)


def report(head: str, answers: Sequence[RankStatus | None]) -> str:
    """What every rank is doing, by rank, those that do the same together; None: no answer."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    silent = ("no answer: it has ended, is stopped, or its node is out of reach",)
    for rank, doing in enumerate(answers):
        ranks_of.setdefault(silent if doing is None else doing.lines(), []).append(rank)
    lines = [head]
    for (first, *rest), ranks in ranks_of.items():
        longest = max(doing.waited_s if (doing := answers[rank]) else 0.0 for rank in ranks)
        waited = f" ({longest:.0f} s)" if longest else ""
        lines += [f"  {_ranks(ranks)}: {first}{waited}", *rest]
    return "\n".join(lines)


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


def _may_be_circle(answers: Sequence[RankStatus | None]) -> bool:
    """Whether every rank waits, not all for the same, and none for data under way."""
    waits = {None if a is None or a.is_data_transfer or not a.wait else a.wait for a in answers}
    return None not in waits and len(waits) > 1


def _frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread; None: it has ended."""
    return sys._current_frames().get(thread)


def _collective_calls(frame: FrameType | None) -> list[FrameType]:
    """Those of torch.distributed in which `frame` waits for other ranks, the innermost first."""
    calls = []
    while frame is not None:
        folder, file = os.path.split(frame.f_code.co_filename)
        is_there = folder == _DISTRIBUTED and file in _COLLECTIVES
        if not is_there or frame.f_code.co_name in _LOCAL:
            break
        calls.append(frame)
        frame = frame.f_back
    return calls


def _name_of(calls: Sequence[FrameType]) -> str:
    names = [call.f_code.co_name for call in calls]
    own = [name for name in names if name != "wrapper"]  # that is torch's decorators
    return f"torch.distributed.{own[-1] if own else ''}"


def _ranks_of(calls: Sequence[FrameType]) -> tuple[int, ...] | None:
    """The ranks that take part in a collective; None: all."""
    for call in calls:
        group = call.f_locals.get("group")
        if group is not None and group is not dist.group.WORLD:
            with suppress(KeyError, ValueError, TypeError, RuntimeError):  # no group after all
                return tuple(dist.get_process_group_ranks(group))
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
