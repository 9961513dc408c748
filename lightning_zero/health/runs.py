"""Failures of the ranks, and whether a run follows, as all ranks read them in one log.

[Note: Runs] A run of the ranks ends with the first exception of a rank. After it, every rank that
has raised an exception of its own appends `ready` before it goes on. A rank that raises only
because another one did appends `gone`, and so does one that ends. As all ranks read one log, they
agree: another run begins if all are ready before a rank is gone. A death ends all runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_zero.health.failures import RankFailure

__all__ = ["Runs"]


@dataclass
class _Run:
    """What all ranks read of one run."""

    raised: dict[int, RankFailure] = field(default_factory=dict)  # by rank, in the log's order
    causes: list[RankFailure] = field(default_factory=list)  # those that no other rank has caused
    ready: set[int] = field(default_factory=set)  # ranks
    gone: int | None = None  # the first rank that does not go on, unless all were ready before
    failure: RankFailure | None = None  # that this rank raises

    def fail(self, failure: RankFailure) -> None:
        """Sets the failure, unless there is one."""
        self.failure = self.failure or failure

    @property
    def first(self) -> RankFailure | None:
        """The first exception of a rank; None: there is none."""
        return next(iter([*self.causes, *self.raised.values()]), None)

    def end(self, rank: int, size: int) -> None:
        """A rank does not go on; without effect if all ranks were ready before."""
        if self.gone is None and len(self.ready) < size:
            self.gone = rank


class Runs:
    """What one rank knows of failures. See [Note: Runs].

    Attributes:
        number: Number of the present run, from 0; entries of the log have it.
        death: A rank that has died; None: none.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self.number = 0
        self.death: RankFailure | None = None
        self._by_number: dict[int, _Run] = {}

    @property
    def _run(self) -> _Run:
        return self._by_number.setdefault(self.number, _Run())

    @property
    def failure(self) -> RankFailure | None:
        """The failure that makes collectives impossible now; None: there is none."""
        return self.death or self._run.failure

    @property
    def other_failure(self) -> RankFailure | None:
        """The first exception of another rank, while this one has no failure; None: none."""
        return self._run.first if self._run.failure is None else None

    def fail(self, failure: RankFailure) -> bool:
        """Sets the failure of this run, unless there is one; returns whether it did."""
        before = self.failure
        self._run.fail(failure)
        return before is None

    def fail_with_other(self) -> bool:
        """Makes `other_failure` the failure; returns whether there is one."""
        failure = self.other_failure
        if failure is not None:
            self._run.fail(failure)
        return failure is not None

    def take(self, entry: dict[str, Any]) -> None:
        """Takes an entry of the log: `abort`, `ready` or `gone`."""
        run, by = self._by_number.setdefault(entry["epoch"], _Run()), entry["by"]
        if entry["kind"] == "ready":
            if run.gone is None:
                run.ready.add(by)
        elif entry["kind"] == "gone":
            run.end(by, self._size)
        else:
            failure = RankFailure(by, entry["text"])
            run.raised.setdefault(by, failure)
            if entry["is_cause"]:
                run.causes.append(failure)
            if by == self._rank:
                run.fail(failure)

    def record_death(self, rank: int, text: str) -> bool:
        """Records the death of a rank; returns whether it is the first.

        It may be the consequence of an exception, unless all ranks have raised one.
        """
        if self.death is not None:
            return False
        run = self._run
        is_new = not run.causes or self._rank in run.raised
        self.death = RankFailure(rank, text) if is_new else run.causes[0]
        return True

    def follows(self) -> bool | None:
        """Whether another run follows this one; None: it is not known yet."""
        run = self._run
        if len(run.ready) == self._size:
            return True
        return None if run.gone is None else False

    def begin(self) -> None:
        """Begins the next run."""
        self.number += 1

    def why_none_follows(self) -> str:
        """Why `follows` is False, as a sentence without a period."""
        failure, gone = self.failure, self._run.gone
        if failure is None:
            return f"rank {self._rank} stops: another rank does not go on"
        if failure.rank != self._rank or gone in (None, self._rank):
            return failure.explain_to(self._rank)
        return (
            f"{failure.text}, but rank {gone} did not raise an error of its own in a step, and "
            "ranks go on after an exception only together"
        )
