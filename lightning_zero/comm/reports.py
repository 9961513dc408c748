"""What all ranks are doing, asked and told when one of them has waited long."""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from lightning_zero.comm.doing import Doing, Wait, Waits, report

__all__ = ["Reports"]

_ANSWER_S = 3.0  # for all ranks to say what they are doing
_AGAIN_S = 10.0  # between two looks at ranks that seem to wait for each other

_log = logging.getLogger(__name__)
_Append = Callable[[dict[str, Any]], None]  # to the log of news


class Reports:
    """This rank's side of them; of the watchdog's thread, with a store of its own.

    Args:
        name: Of the run, in the store.
        rank: Of this process.
        size: Number of ranks.
        after_s: Seconds of waiting after which all tell what they are doing; None: never.
        waits: Of this process.
    """

    def __init__(
        self, name: str, rank: int, size: int, after_s: float | None, waits: Waits
    ) -> None:
        self._name = name
        self._rank = rank
        self._size = size
        self._after_s = after_s
        self._waits = waits
        self._describe: weakref.WeakMethod[Callable[[], str]] | None = None
        self._reported: Wait | None = None
        self._texts: list[str] = []  # keys of reports that others will write
        self._second_look: tuple[float, list[float]] | None = None

    def describe_by(self, describe: Callable[[], str]) -> None:
        """From now on `describe`, a method, tells what the engine does, from another thread."""
        self._describe = weakref.WeakMethod(describe)

    def look(self, store: Any, wait: Wait | None, append: _Append) -> None:
        """Asks the ranks where `wait` is a long one, and tells what others have found out."""
        if self._after_s is None:
            return
        now = time.monotonic()
        is_long = wait is not None and now - wait.since > self._after_s
        if is_long and wait is not self._reported:
            self._reported = wait
            append({"kind": "report"})
        if self._second_look is not None and now > self._second_look[0]:
            append({"kind": "report", "is_again": True})
        for key in [key for key in self._texts if store.check([key])]:
            self._texts.remove(key)
            self._show(store.get(key).decode())

    def answer(self, store: Any, number: int, news: dict[str, Any], append: _Append) -> None:
        """Tells what this rank is doing; the one that asked reads all, and writes the report.

        Args:
            store: Of the ranks.
            number: Of the request.
            news: The request.
            append: For news of what has been found out.
        """
        self._reported = self._waits.of_main()
        describe = self._describe() if self._describe is not None else None
        doing = self._waits.doing(describe() if describe is not None else "")
        key = f"{self._name}/doing/{number}"
        store.set(f"{key}/{self._rank}", json.dumps(doing.as_dict()))
        is_again = bool(news.get("is_again"))
        if news["by"] != self._rank:
            self._texts += [] if is_again else [f"{key}/text"]
        elif is_again:
            self._look_again(self._collect(store, key), append)
        else:
            self._write(store, key, self._collect(store, key))

    def _collect(self, store: Any, key: str) -> list[Doing | None]:
        answers: list[Doing | None] = [None] * self._size
        until = time.monotonic() + _ANSWER_S
        while None in answers and time.monotonic() < until:
            for rank, answer in enumerate(answers):
                if answer is None and store.check([f"{key}/{rank}"]):
                    answers[rank] = Doing.of_dict(json.loads(store.get(f"{key}/{rank}")))
            time.sleep(0.02)
        return answers

    def _write(self, store: Any, key: str, answers: Sequence[Doing | None]) -> None:
        who = f"rank {self._rank} has waited {self._after_s:g} s for other ranks"
        text = report(f"{who}; what every rank is doing:", answers)
        store.set(f"{key}/text", text)
        self._show(text, is_alone=answers[0] is None)
        if _may_be_circle(answers):
            again = time.monotonic() + min(_AGAIN_S, self._after_s or _AGAIN_S)
            self._second_look = (again, [a.since for a in answers if a is not None])

    def _look_again(self, answers: Sequence[Doing | None], append: _Append) -> None:
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
            "of code that only some ranks run."
        )
        append({"kind": "abort", "text": text + end, "is_own": False})

    def _show(self, text: str, *, is_alone: bool = False) -> None:
        """For people to see on rank 0, or where that one does not answer; else for the log."""
        _log.log(logging.WARNING if self._rank == 0 or is_alone else logging.INFO, "%s", text)


def _may_be_circle(answers: Sequence[Doing | None]) -> bool:
    """Whether every rank waits, not all for the same, and none for data under way."""
    waits = {None if a is None or a.is_for_data or not a.wait else a.wait for a in answers}
    return None not in waits and len(waits) > 1
