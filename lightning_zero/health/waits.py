"""Waits of this process for other ranks, and what it does meanwhile."""

from __future__ import annotations

import faulthandler
import os
import re
import site
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

__all__ = [
    "Line",
    "RankStatus",
    "Wait",
    "announced_waits",
    "present_wait",
    "stack_of",
    "user_lines",
]

_NUM_LINES = 3
_WORLD = "world"  # a group of a `RankStatus`
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")  # by faulthandler
_PEER_TO_PEER = {"batch_isend_irecv", "irecv", "isend", "recv", "send"}
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
_NOT_USERS = tuple(
    os.path.realpath(path) + os.sep
    for path in (
        os.path.dirname(os.path.dirname(__file__)),  # this package
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        site.getusersitepackages(),
    )
)
announced_waits: dict[int, Wait] = {}  # of this process, by thread id


@dataclass(frozen=True)
class Wait:
    """A wait of this process for other ranks."""

    name: str  # operation, as in "rank 0 waits for the all_gather of layers.3"
    since: float  # time.monotonic()
    watchdog: str  # name of the watchdog that has announced it
    is_engine_group: bool = True  # on a group that is disconnected at a failure
    is_data_transfer: bool = False  # transfers data; a long wait is normal
    is_one_way: bool = False  # a long wait is normal; other ranks may have finished and exited
    has_failed: bool = False  # the operation will never complete
    number: int = 0  # of the collective, among all that this rank has issued; 0: not known


def present_wait(thread: int) -> Wait | None:
    """The wait of a thread, or else the longest of any thread; None: there is none.

    On CUDA autograd runs hooks, which wait, in a thread of its own.
    """
    wait = announced_waits.get(thread)
    return wait or min(list(announced_waits.values()), key=lambda each: each.since, default=None)


@dataclass(frozen=True)
class RankStatus:
    """Activity of one rank at a moment."""

    moment: str  # the engine's state, such as "in forward of blocks.3"; empty without an engine
    wait: str  # operation it waits for; empty: it is not known to wait for other ranks
    waited_s: float
    may_last: bool  # a long wait is normal: it transfers data, or goes one way
    lines: Sequence[str]  # innermost calls of the user's own code, the innermost last
    since: float = 0.0  # start of the wait on the rank's own clock; identifies the wait
    group: str = ""  # of the collective that it waits for: a key of `num_issued`
    number: int = 0  # of this collective on its group, from 1; 0: it is not known
    # Collectives that the rank has issued, by group; all ranks issue them in one order.
    num_issued: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, thread: int, wait: Wait | None, moment: str, num_issued: Mapping[str, int]
    ) -> RankStatus:
        """The status of this process, whose main thread is `thread`."""
        stack = stack_of(thread)
        lines = user_lines(stack)
        everything = {**num_issued, _WORLD: _num_issued_on_world()}
        if wait is not None:
            may_last = wait.is_data_transfer or wait.is_one_way
            waited_s, group = time.monotonic() - wait.since, wait.watchdog
            return cls(
                *(moment, wait.name, waited_s, may_last, lines, wait.since),
                *(group if wait.is_engine_group else _WORLD, wait.number, everything),
            )
        name = _collective_of(stack)
        number = 0 if not name or name in _PEER_TO_PEER else everything[_WORLD]
        text = f"torch.distributed.{name}" if name else ""
        return cls(moment, text, 0.0, True, lines, 0.0, _WORLD, number, everything)

    def text(self) -> tuple[str, ...]:
        """The status as lines of text, without times: equal for ranks that do the same."""
        moment = self.moment or "outside of the engine"
        wait = "computes, or waits for no other rank"
        if self.wait:
            wait = f"waits for {self.wait}"
        return (f"{moment}; {wait}", *(f"    {line}" for line in self.lines))


class Line(NamedTuple):
    """A call on the stack of a thread."""

    path: str
    number: str
    function: str


def stack_of(thread: int) -> list[Line]:
    """Returns the calls of a thread of this process, the innermost first; [] if it has ended.

    `faulthandler` reads them without making objects of the frames of a thread that may return from
    them meanwhile, which ends the process on some versions of Python.
    """
    found: list[Line] = []
    is_wanted = False
    with suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        for line in file.read().decode(errors="replace").splitlines():
            if head := re.match(r"(?:Current thread|Thread) 0x([0-9a-f]+)", line):
                is_wanted = int(head[1], 16) == thread
            elif is_wanted and (call := re.match(r'  File "(.*)", line (\S+) in (.*)', line)):
                found.append(Line(*(_ESCAPED.sub(_unescape, part) for part in call.groups())))
    return found


def _unescape(escaped: re.Match[str]) -> str:
    return chr(int(escaped[1] or escaped[2] or escaped[3], 16))


def user_lines(stack: Sequence[Line]) -> tuple[str, ...]:
    """The innermost calls outside this package and all installed packages, the innermost last."""
    found = [
        f"{line.path}:{line.number} in {line.function}"
        for line in stack
        if os.path.exists(line.path) and not os.path.realpath(line.path).startswith(_NOT_USERS)
    ]
    return tuple(reversed(found[:_NUM_LINES]))


def _collective_of(stack: Sequence[Line]) -> str:
    """Name of the function of torch.distributed that the user's code has called; "": none."""
    name = ""
    for line in stack:
        if not line.path.startswith(_DISTRIBUTED):
            break
        if line.function != "wrapper":  # a decorator of torch
            name = line.function
    return name


def _num_issued_on_world() -> int:
    """Collectives that this rank has issued on the default group; 0: it is not known."""
    world: Any = dist.group.WORLD
    with suppress(RuntimeError, AttributeError):  # there is no group, or it does not count
        return int(world._get_sequence_number_for_group())
    return 0
