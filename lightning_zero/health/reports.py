"""Status of every rank, collected and reported to all when one of them has waited long."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from lightning_zero.health.waits import RankStatus, Wait, Waits

__all__ = ["WAIT_REPORT_S", "LogEntry", "Reports", "report"]

WAIT_REPORT_S = 30.0  # of waiting for other ranks until the status of all is reported
_ANSWER_S = 3.0  # for all ranks to send their status
_RECHECK_S = 10.0  # between two checks of ranks that seem to wait for each other

_log = logging.getLogger(__name__)
LogEntry = dict[str, Any]  # an entry of the watchdogs' shared log


class Reports:
    """This rank's side of reports, for the watchdog's thread, which has a store of its own.

    The caller appends each entry that a method yields to the shared log before it continues.
    After `WAIT_REPORT_S` seconds of waiting for other ranks all ranks send their status.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        waits: Waits,
        moment: Callable[[], str],
    ) -> None:
        self._name = name
        self._rank = rank
        self._size = size
        self._waits = waits
        self._moment = moment  # the engine's current one
        self._reported: Wait | None = None
        self._pending_reports: list[str] = []  # keys of reports that other ranks will write
        self._recheck: tuple[float, list[float]] | None = None
        self._is_silence_logged = False  # the store's, in the current request

    def poll(self, store: Any, wait: Wait | None) -> Iterator[LogEntry]:
        """Requests every rank's status if `wait` is long, and logs the reports of other ranks."""
        now = time.monotonic()
        is_long = wait is not None and now - wait.since > WAIT_REPORT_S
        if is_long and wait is not self._reported:
            self._reported = wait
            yield {"kind": "report"}
        if self._recheck is not None and now > self._recheck[0]:
            yield {"kind": "report", "is_again": True}
        for key in [key for key in self._pending_reports if store.check([key])]:
            self._pending_reports.remove(key)
            self._log_report(store.get(key).decode())

    def answer(self, store: Any, number: int, request: LogEntry) -> Iterator[LogEntry]:
        """Sends this rank's status in answer to log entry `number`, `request`.

        The rank that made the request reads all answers and writes the report.
        """
        self._reported = self._waits.main_thread_wait()
        status = self.status()
        key = f"{self._name}/status/{number}"
        store.set(f"{key}/{self._rank}", json.dumps(asdict(status)))
        is_again = bool(request.get("is_again"))
        if request["by"] != self._rank:
            self._pending_reports += [] if is_again else [f"{key}/text"]
        elif is_again:
            yield from self._check_again(self._collect(store, key))
        else:
            self._write(store, key, self._collect(store, key))

    def status(self) -> RankStatus:
        """Returns the status of this rank."""
        return self._waits.status(self._moment())

    def _collect(self, store: Any, key: str) -> list[RankStatus | None]:
        answers: list[RankStatus | None] = [None] * self._size
        until = time.monotonic() + _ANSWER_S
        while None in answers and time.monotonic() < until:
            for rank, answer in enumerate(answers):
                if answer is None and store.check([f"{key}/{rank}"]):
                    with suppress(ValueError, TypeError):  # not readable: counts as no answer
                        answers[rank] = RankStatus(**json.loads(store.get(f"{key}/{rank}")))
            time.sleep(0.02)
        return answers

    def _write(self, store: Any, key: str, answers: Sequence[RankStatus | None]) -> None:
        who = f"rank {self._rank} has waited {WAIT_REPORT_S:g} s for other ranks"
        text = report(f"{who}; what every rank is doing:", answers)
        store.set(f"{key}/text", text)
        self._log_report(text, is_alone=answers[0] is None)
        if _may_be_deadlock(answers):
            again = time.monotonic() + min(_RECHECK_S, WAIT_REPORT_S)
            self._recheck = (again, [a.since for a in answers if a is not None])

    def _check_again(self, answers: Sequence[RankStatus | None]) -> Iterator[LogEntry]:
        """Aborts if all ranks wait for each other, and still in the waits of the last check."""
        assert self._recheck is not None
        _, before = self._recheck
        self._recheck = None
        now = [answer.since for answer in answers if answer is not None]
        if not _may_be_deadlock(answers) or now != before:
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
        yield {"kind": "abort", "text": text + end, "is_own": False}

    def log_silence(self, place: str, seconds: float) -> None:
        """Logs this rank's status, once, while its store at `place` does not answer for long.

        Without the store the other ranks cannot get the status.
        """
        if seconds <= WAIT_REPORT_S:
            self._is_silence_logged = False
        elif not self._is_silence_logged:
            self._is_silence_logged = True
            head = (
                f"the ranks' store ({place}) has not answered rank {self._rank} for {seconds:.0f} "
                "s: its process is stopped, or its node cannot be reached. What this rank is doing:"
            )
            _log.warning("%s", "\n  ".join([head, *self.status().lines()]))

    def _log_report(self, text: str, *, is_alone: bool = False) -> None:
        """Logs a warning on rank 0, or if rank 0 does not answer; otherwise at level INFO."""
        level = logging.WARNING if self._rank == 0 or is_alone else logging.INFO
        _log.log(level, "%s", text)


def report(head: str, answers: Sequence[RankStatus | None]) -> str:
    """Formats the status of every rank, grouping ranks with equal status; None: no answer."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    silent = ("no answer: it has ended, is stopped, or its node cannot be reached",)
    for rank, status in enumerate(answers):
        ranks_of.setdefault(silent if status is None else status.lines(), []).append(rank)
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
    may_end = any(a.is_data_transfer and not _is_missed(a, known) for a in known)
    waits = {(answer.group, answer.wait) for answer in known}
    return not may_end and all(answer.wait for answer in known) and len(waits) > 1


def _is_missed(status: RankStatus, everyone: Sequence[RankStatus]) -> bool:
    """Whether some rank has not issued the collective that the rank of `status` waits for."""
    group, number = status.group, status.number
    return any(other.num_issued.get(group, number) < number for other in everyone)
