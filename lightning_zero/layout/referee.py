"""What is wrong with a round of an `Order`, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_zero.layout.talk import Heard, Judge, Round, Talk

__all__ = ["MOST_TEXT", "Referee", "Requests"]

MOST_TEXT = 1024  # bytes, of a failure


class Requests(NamedTuple):
    """The requests of ranks that ask for no unit; see `Order`."""

    begin: int  # a pass
    together: int  # something else that all ranks do
    done: int  # has ended its step, or its backward
    left: int  # has left a loop of steps


class Referee:
    """Judges rounds; from any thread.

    Args:
        talk: Between the ranks.
        requests: Of `Order`.
        names: Of the parameters, whose `requires_grad` are the flags.

    Attributes:
        flags: Of this rank; empty: it compares none.
        failure: Of this rank, while it tells of it.
    """

    def __init__(self, talk: Talk, requests: Requests, names: Sequence[str]) -> None:
        self._talk = talk
        self._requests = requests
        self._names = list(names)
        self.flags = b""
        self.failure = ""

    def judge(self, name: str, *, alarms: bool = False) -> Judge:
        """What to ask of a round.

        Args:
            name: What this rank has come to.
            alarms: Nobody may hear it: what is wrong ends all waits.
        """

        def judge(heard: Heard) -> Exception | None:
            error = find(heard)
            if error is not None and alarms:
                self._talk.give_up(error)
            return error

        def find(heard: Heard) -> Exception | None:
            told = Round.of(heard.numbers)
            if told.failed < self._talk.size:
                return self._told_failure(told.failed)
            if told.lowest < self._requests.begin:
                return self._talk.apart(_alone(name)) if alarms else None
            if not told.is_alike_loose:
                is_apart = True
            elif told.is_loose:
                is_together = told.lowest == self._requests.together
                is_apart = is_together and (told.highest > told.lowest or not told.is_same_key)
            else:
                if not told.is_same_flags:
                    return self._told_flags()
                is_alike = told.is_same_key and told.is_same_past
                is_apart = told.lowest < told.highest or not is_alike
            if not is_apart:
                return None
            error = self._talk.apart(_alone(name))
            self._talk.give_up(error)
            return error

        return judge

    def _told_failure(self, rank: int) -> Exception | None:
        text = self.failure.encode()[:MOST_TEXT] if rank == self._talk.rank else b""
        heard = self._talk.say([], text)
        if self.failure:
            return None  # it raises its own
        told = heard.mask.rstrip(b"\0").decode(errors="replace")
        return self._talk.failed(f"rank {rank} failed, and all ranks with it: {told}")

    def _told_flags(self) -> Exception:
        """Names the first parameter of which ranks differ."""
        flags, say = self.flags, self._talk.say
        some = say([], flags).mask
        others = say([], bytes(not flag for flag in flags)).mask
        place = next((i for i, pair in enumerate(zip(some, others, strict=True)) if all(pair)), 0)
        own = bytes(self._talk.rank) + bytes([1 + flags[place]] if flags else [0])
        everyone = say([], own).mask[: self._talk.size]
        told = [flag == 2 for flag in everyone if flag]
        return RuntimeError(
            f"requires_grad of parameter {self._names[place]} differs by rank: {told}, in the order"
            " of ranks; freeze and unfreeze the same parameters on all ranks, between the same two "
            "steps."
        )


def _alone(name: str) -> str:
    return (
        f"this rank has come to {name}, and another rank to something else: it has fewer or more "
        "batches, runs a forward or backward more, or makes other calls (trainer.log_dir, "
        "self.all_gather, self.log(..., sync_dist=True), p.grad.norm() of sharded gradients). "
        "Give all ranks equally many batches, as Lightning's own sampler does, and let all make "
        "the same calls in the same order: not `if rank == 0`; or, for forwards without gradients, "
        "enter `with lightning_zero.uneven_calls(module)` on every rank."
    )
