"""Long waits: rank 0 collects the status of every rank and logs them together.

    rank k         `long`      it has waited for `WAIT_REPORT_S`
    rank 0         `report`    asks all ranks
    every rank     `status`    to rank 0, which logs all of them

A wait is logged once; while it lasts, rank 0 asks again. If all ranks seem to wait for each other,
rank 0 asks once more, and ends the waits by a `deadlock` if nothing has changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

from lightning_zero.health.link import Entry
from lightning_zero.health.waits import RankStatus, Wait

__all__ = ["WAIT_REPORT_S", "Reports", "report"]

WAIT_REPORT_S = 30.0  # of waiting for other ranks until the status of all is reported
_ANSWER_S = 3.0  # for all ranks to send their status
_MAX_TEXT = 2**16  # characters of a report that is sent to all ranks
_RECHECK_S = 10.0  # between two checks of ranks that seem to wait for each other

_log = logging.getLogger(__name__)


class Reports:
    """This rank's side of reports. Used by one thread, which sends the entries that it yields.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
        status: Returns the present status of this rank.
    """

    def __init__(self, rank: int, size: int, status: Callable[[], RankStatus]) -> None:
        self._rank = rank
        self._size = size
        self._status = status
        self._reported: Wait | None = None  # the last wait of this rank that was reported
        self._reported_at = 0.0
        self._asked_at: float | None = None  # this rank's `long`, which rank 0 has not answered
        # Set on rank 0 alone.
        self._asker: int | None = None  # rank whose long wait is reported now; None: no report
        self._answers: dict[int, RankStatus] = {}
        self._is_logged = False  # this report
        self._until = 0.0  # answers are awaited
        self._recheck_at: float | None = None
        self._suspect: list[object] = []  # what all ranks seemed to wait for; []: no deadlock

    def poll(self, wait: Wait | None) -> Iterator[Entry]:
        """Looks whether `wait`, the present one, is long, and whether all answers are there."""
        now = time.monotonic()
        is_again = wait is self._reported
        since = 0.0 if wait is None else max(wait.since, self._reported_at if is_again else 0.0)
        if wait is not None and now - since > WAIT_REPORT_S:
            self._reported, self._reported_at = wait, now
            self._asked_at = self._asked_at if is_again else now
            yield {"kind": "long", "is_again": is_again}
        if self._asked_at is not None and now - self._asked_at > _ANSWER_S:
            self._asked_at = None
            head = (
                f"rank {self._rank} has waited {WAIT_REPORT_S:g} s for other ranks, and rank 0 "
                "does not answer: its process is stopped, or its node cannot be reached. What "
                f"rank {self._rank} is doing:"
            )
            _log.warning("%s", "\n  ".join([head, *self._status().text()]))
        if self._asker is not None and (len(self._answers) == self._size or now > self._until):
            yield from self._conclude([self._answers.get(rank) for rank in range(self._size)])
        elif self._recheck_at is not None and now > self._recheck_at and self._asker is None:
            yield self._ask(self._rank, is_logged=False)

    def take(self, entry: Entry, wait: Wait | None) -> Iterator[Entry]:
        """Takes an entry of the log: `long`, `report` or `status`; `wait` is the present one."""
        if entry["kind"] == "report":
            self._reported, self._reported_at, self._asked_at = wait, time.monotonic(), None
            yield {"kind": "status", "status": asdict(self._status())}
        elif self._rank == 0 and entry["kind"] == "status":
            with suppress(TypeError):  # not readable: counts as no answer
                self._answers[entry["by"]] = RankStatus(**entry["status"])
        elif self._rank == 0 and self._asker is None:
            yield self._ask(entry["by"], is_logged=not entry.get("is_again"))

    def _ask(self, asker: int, *, is_logged: bool) -> Entry:
        self._is_logged = is_logged
        self._asker, self._until = asker, time.monotonic() + _ANSWER_S
        self._answers.clear()
        return {"kind": "report"}

    def _conclude(self, answers: Sequence[RankStatus | None]) -> Iterator[Entry]:
        """On rank 0: logs the report, or ends the waits if this was the second look at them."""
        asker, self._asker = self._asker, None
        seen = [a and (a.since, a.wait, list(a.lines)) for a in answers]
        is_suspect = _may_be_deadlock(answers)
        if self._recheck_at is None:
            who = f"rank {asker} has waited {WAIT_REPORT_S:g} s for other ranks"
            if self._is_logged:
                _log.warning("%s", report(f"{who}; what every rank is doing:", answers))
            if is_suspect:
                self._suspect = [*seen]
                self._recheck_at = time.monotonic() + min(_RECHECK_S, WAIT_REPORT_S)
            return
        self._recheck_at = None
        if not is_suspect or seen != self._suspect:
            return
        text = report("all ranks wait for each other, in different places:", answers)
        end = (
            "\nUse and set up the same modules in the same order on every rank. Call your own "
            "collectives at the same point on every rank; in stage 3, outside of code that only "
            "some ranks run. If ranks use different parts of the module before a "
            "collective, such as experts that depend on data, call "
            "lightning_zero.before_collective(module) right before it, on every rank, or put those "
            "parts into one unit: unit_classes=[...] with the class of the module around them."
        )
        yield {"kind": "deadlock", "text": text[:_MAX_TEXT] + end}


def report(head: str, answers: Sequence[RankStatus | None]) -> str:
    """Formats the status of every rank, grouping ranks with equal status; None: no answer."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    silent = ("no answer: it has ended, is stopped, or its node cannot be reached",)
    groups = {answer.group for answer in answers if answer is not None and answer.num_issued}
    engines = sorted(group for group in groups if group != "world")
    for rank, status in enumerate(answers):
        if status is not None and len(engines) > 1 and status.group in engines:
            status = replace(status, wait=f"{status.wait}, of another module")
        ranks_of.setdefault(silent if status is None else status.text(), []).append(rank)
    lines = [head]
    for (first, *rest), ranks in ranks_of.items():
        waits = [status.waited_s for rank in ranks if (status := answers[rank]) is not None]
        longest = max(waits, default=0.0)
        waited = f" ({longest:.0f} s)" if longest else ""
        lines += [f"  {_ranks(ranks)}: {first}{waited}", *rest]
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    """Formats rank numbers, such as "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs]
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {', '.join(texts)}"


def _may_be_deadlock(answers: Sequence[RankStatus | None]) -> bool:
    """Whether all ranks wait, for different operations, and no wait may end without the others.

    A wait that transfers data, or one way, may end unless another rank has not issued the same
    collective yet.
    """
    known = [answer for answer in answers if answer is not None]
    if len(known) < len(answers):
        return False
    may_end = any(a.may_last and not _is_missed(a, known) for a in known)
    waits = {(answer.group, answer.wait) for answer in known}
    return not may_end and all(answer.wait for answer in known) and len(waits) > 1


def _is_missed(status: RankStatus, everyone: Sequence[RankStatus]) -> bool:
    """Whether some rank has not issued the collective that the rank of `status` waits for."""
    group, number = status.group, status.number
    return any(other.num_issued.get(group, number) < number for other in everyone)
