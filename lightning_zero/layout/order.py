"""The order in which gathers and reductions are issued: one on all ranks, agreed on once.

[Note: Who waits for whom] Every rank issues the same gathers and reductions in the same order, its
*events*. No event is decided on by what one rank alone knows. A *pass* is what comes between two
boundaries: a forward and its backward in training, a forward elsewhere. It has a *key*: what kind
of pass it is, which parameters are trained, what the pass before it was.

* A pass whose key is new is *asked for*: a rank that needs a unit asks in a round (comm.control);
  of all requests the lowest goes first, and every rank takes part in that gather. The round also
  tells how many reductions, in the order of `eager`, every rank is ready for; all issue them then.
  A rank that has ended its pass goes on answering until all have. So all events of all ranks are
  decided by rounds, and every rank logs the same ones.
* A log that was the same twice running becomes the *plan* of its key, with gathers moved ahead of
  the reductions in front of them (`hoisted`). A pass with a plan has no rounds: every rank issues
  the plan, each event when it needs it, or is ready for it, or needs one behind it.
* A rank that needs a unit which is not in the rest of its plan issues that rest, with what there
  is, and asks for it. The others answer in the round at the end of their pass. Gradients that come
  after their reduction are *late*: reduced once more, after the end. Before its own backward the
  rank reduces zeros, and what the others had waits beside what users see, who may zero that, until
  the rank comes to its backward. Where plans do not fit often they are given up, and twice as many
  equal logs are needed for the next.

Why nobody waits in a circle:

1. In a pass with a plan all ranks issue its events in the order of the plan, and all of them before
   they enter any round that they wait for: one that ends the pass, one in its middle, before a
   collective of the user's, or one in which they ask. In a pass without, all issue what a round has
   told before they enter the next.
2. A rank waits for the data of events only that it has issued itself. So of all ranks that wait for
   data the one that has issued least waits for an event which all have issued: it completes.
3. A rank waits for a round only when it has issued all events up to that round. Whoever has not
   come to it computes, or waits for data, which comes by 2.
4. Whether a pass has a plan follows from its key and from the results of rounds, which are the same
   on all ranks. A key that does not follow from the rounds before it (`_following`) is compared in
   a round that is waited for before the first event; one that does, in a round that nobody waits
   for, so that ranks which come to different points find it out though some of them wait for data.

A boundary is a round in which nobody asks for a unit any more. Such rounds carry, besides, what any
rank has touched, what a rank wishes (to stop, say) and marks of what is trained and of all that was
done together before: what differs there is an error on all ranks.

In a *loose* context, which ranks leave one after the other (lockstep.py), a rank that has left
takes part in the passes of the others, in the same way: it issues their plans, or answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Protocol

from lightning_zero.layout.hoist import hoisted
from lightning_zero.layout.referee import MOST_TEXT, Referee, Requests
from lightning_zero.layout.talk import Heard, Round, Said, Talk

__all__ = ["Issuer", "Order"]

_ALIKE = 2  # equal logs that make a plan
_MOST_ALIKE = 64
_TRUST, _MOST_TRUST = 4, 8  # of a new plan; a pass that deviates costs 4, one in vain 1
_CONTEXTS = (8, 4, 2, 1)  # numbers of passes from which the next one is foretold
_MOST_LOGGED = 100_000  # events
_MOST_KNOWN = 1000  # keys: where each pass has a new one, none would be met again
_MOST_BOUNDARIES = 8  # between batches, without a round


class Issuer(Protocol):
    """Who does what this decides on."""

    def issue_gather(self, unit: int, *, is_kept: bool) -> None:
        """Issues the gather of a unit, which stays whole until its use or not."""

    def issue_reduction(self, bucket: int) -> None:
        """Issues the reduction of a bucket, with the gradients that there are."""

    def begin_pass(self) -> None:
        """Calls `Order.begin`: a unit is used, and no pass is open."""


@dataclass
class _Pass:
    key: int | None  # None: nothing is learned from it
    is_training: bool = False
    plan: tuple[int, ...] | None = None
    is_learned: bool = True  # the plan comes from logs
    saying: Future[Heard] | None = None  # the round of its beginning
    is_begun: bool = True  # that one has been heard, or need not be before an event
    cursor: int = 0
    log: list[int] = field(default_factory=list)
    has_turned: bool = False
    has_logged_turn: bool = False
    eager: list[int] = field(default_factory=list)  # buckets, in the order of reductions
    ready: set[int] = field(default_factory=set)
    reduced: list[int] = field(default_factory=list)
    used: set[int] = field(default_factory=set)  # units
    has_deviated: bool = False
    is_in_vain: bool = False


@dataclass
class _Known:
    """Of one key."""

    log: tuple[int, ...] = ()
    num_alike: int = 0
    num_needed: int = _ALIKE
    plan: tuple[int, ...] | None = None
    trust: int = _TRUST


class Order:
    """The events of this rank. See [Note: Who waits for whom].

    A request is one integer, of which the lowest of all ranks goes first:

        0 .. n-1       a unit, in forward by its place in the layout
        n .. 2n-1      a unit, in backward from the end of the layout on
        2n .. 2n+3     `Requests`

    Args:
        talk: Between the ranks.
        issuer: Does what is decided.
        numels: Elements of each unit; 0 for one that is not gathered.
        num_buckets: That are reduced.
        names: Of the parameters, whose `requires_grad` are the flags of a pass.
        ahead: Elements to gather ahead of use; None: one unit; 0: none.

    Attributes:
        requests: Those that ask for no unit.
        wish: Tells what this rank wishes; the lowest counts.
        is_loose: Ranks may leave one after the other.
        is_mid_event: This rank takes part in an event that it has not issued in full.
    """

    def __init__(
        self,
        talk: Talk,
        issuer: Issuer,
        *,
        numels: Sequence[int],
        num_buckets: int,
        names: Sequence[str] = (),
        ahead: int | None = None,
    ) -> None:
        self._talk = talk
        self._issuer = issuer
        self._numels = list(numels)
        self._num = len(self._numels)
        self._turn = self._num  # the event at which a backward begins, above gathers
        self._gathers = any(self._numels)
        self._ahead = ahead
        first = 2 * self._num
        self.requests = Requests(first, first + 1, first + 2, first + 3)
        self._referee = Referee(talk, self.requests, names)
        self.wish: Callable[[], int | None] = lambda: None
        self.is_loose = False
        self.is_mid_event = False
        self._pass: _Pass | None = None
        self._ended: _Pass | None = None  # until a boundary has been heard
        self._unheard: list[Future[Heard]] = []  # sayings that nobody waits for
        self._known: dict[int, _Known] = {}
        self._following: dict[tuple[int, ...], int] = {}
        self._context: tuple[int, ...] = ()
        self._last_log = 0  # a hash of what the last training pass has issued
        self._past = 0  # a hash of what was done together
        self._flags_mark: int | None = None  # of what trains in this pass
        self._heard_wish: int | None = None
        self._num_boundaries = _MOST_BOUNDARIES  # between batches, since a step's end
        talk.widen(max(2 * num_buckets + len(names), talk.size, MOST_TEXT))

    # ---------------------------------------------------------------- passes

    @property
    def is_training(self) -> bool:
        """A pass of training is open."""
        return self._pass is not None and self._pass.is_training

    def begin(self, kind: str, flags: Sequence[bool] | None = None) -> None:
        """A pass begins. Collective.

        Args:
            kind: Of pass: the same on every rank.
            flags: In training: what is trained.
        """
        is_training = flags is not None
        is_settled = self._pass is None and self._ended is None and not self.is_loose
        self._leave()
        if flags is not None:
            self._look(flags)
            key = _hash(kind, self._flags_mark, self._last_log)
        else:
            self._forget_flags()
            key = _hash(kind)
        one = self._pass = _Pass(key, is_training)
        is_foretold = False
        if is_training:
            is_foretold = is_settled and self._foretell() == key
            if len(self._following) > _MOST_KNOWN:
                self._following.clear()
            for length in _CONTEXTS:
                self._following[self._context[-length:]] = key
            self._context = (*self._context, key)[-_CONTEXTS[0] :]
        one.is_begun = False
        one.saying = self._begin_saying(self.requests.begin, key, is_heard=not is_foretold)
        if is_foretold:
            one.is_begun = True
            one.plan = self._plan_of(key)

    def _foretell(self) -> int | None:
        """The key that came after as many of the last ones as are known to have come before."""
        told = (self._following.get(self._context[-length:]) for length in _CONTEXTS)
        return next((key for key in told if key is not None), None)

    def _look(self, flags: Sequence[bool]) -> None:
        self._referee.flags = bytes(flags)
        self._flags_mark = _hash(self._referee.flags)

    def _forget_flags(self) -> None:
        self._referee.flags, self._flags_mark = b"", None

    def _plan_of(self, key: int | None) -> tuple[int, ...] | None:
        known = self._known.get(key) if key is not None else None
        return known.plan if known is not None else None

    def confirm(self) -> None:
        """Waits until all ranks have begun this pass, where that is not foretold."""
        if self._pass is not None:
            self._confirm()

    def _confirm(self) -> _Pass:
        """Before an event: all ranks have begun the same pass, where that is not foretold."""
        one = self._pass
        if one is None:
            one = self._pass = _Pass(None)
        if one.is_begun:
            return one
        assert one.saying is not None
        heard = self._hear(one.saying, "the beginning of a pass")
        while heard.lowest < self.requests.begin:
            self._answer(heard)
            heard = self._say(self.requests.begin, one.key, "the beginning of a pass")
        self._learn(heard)
        one.is_begun = True
        one.log.clear()  # of a pass that has failed on this rank, and on others later
        one.has_logged_turn = False
        if not heard.is_same_key:
            one.key = None
        if one.is_learned:
            one.plan = self._plan_of(one.key)
        return one

    def turn(self, flags: Sequence[bool], kind: str, eager: Sequence[int]) -> None:
        """Backward begins. Collective.

        Args:
            flags: What is trained now.
            kind: Of the pass that begins where none is open, or its flags were others.
            eager: Buckets that will be reduced, in this order, if there is no plan: the same on
                every rank.
        """
        if not self.is_training or bytes(flags) != self._referee.flags:
            self.begin(kind, flags)
        one = self._pass
        assert one is not None
        if not one.eager:
            one.eager = list(eager)
        if not self._gathers and one.plan is None:
            one.plan, one.is_learned = tuple(map(self._reduction, eager)), False
            one.has_turned = True
            return
        if one.has_turned:
            return
        if one.plan is not None and self._turn in islice(one.plan, one.cursor, None):
            self._advance(one.plan.index(self._turn, one.cursor) + 1, None)
        one.has_turned = True

    def end(self, mask: Callable[[], bytes], finish: Callable[[], None]) -> bytes:
        """Backward has ended: the boundary. Collective. `conclude` follows.

        Args:
            mask: Tells what this rank has touched, when it has issued all it can.
            finish: Is called while the round is under way.

        Returns:
            What any rank has touched.
        """
        self._leave()
        done = self.requests.done
        saying = self._begin_saying(done, None, mask(), is_heard=True)
        finish()
        name = "the end of the backward on all ranks"
        heard = self._hear(saying, name)
        while True:
            self._answer(heard)
            if heard.lowest >= done:
                break
            heard = self._say(done, None, name, mask())
        self._heard_wish, self._num_boundaries = heard.wish, 0
        self._heard = heard
        return self._heard_mask

    def conclude(self, *, is_complete: bool) -> None:
        """After `end`: all that was touched had been reduced before it, the same on every rank."""
        if not is_complete and self._ended is not None and self._ended.plan is None:
            self._ended.key = None  # its log lacks what comes now
        self._learn(self._heard, is_incomplete=not is_complete)

    def _leave(self) -> None:
        """This rank has ended its pass: issues what is left of the plan."""
        if self._pass is None:
            return
        one = self._confirm()
        if one.plan is not None:
            self._advance(len(one.plan), None)
        self._ended, self._pass = one, None

    def _learn(self, heard: Round, *, is_incomplete: bool = False) -> None:
        """At a boundary: from the pass that it has ended, the same on every rank."""
        one, self._ended = self._ended, None
        if one is None:
            return
        log = tuple(one.log) if one.is_learned else ()
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        known = self._known.setdefault(one.key, _Known()) if one.key is not None else _Known()
        mark, is_as_last = _hash(log if one.plan is None else known.log), False
        if one.is_training:
            self._last_log, is_as_last = mark, mark == self._last_log
        if one.key is None or not one.is_learned or len(log) >= _MOST_LOGGED:
            return
        if one.plan is None:
            known.num_alike = known.num_alike + 1 if log == known.log else 1 + is_as_last
            known.log = log
            if known.num_alike >= known.num_needed:
                known.plan, known.trust = hoisted(log, self._numels, self._ahead), _TRUST
            return
        change = -4 if heard.has_deviated or is_incomplete else -1 if heard.is_in_vain else 1
        known.trust = min(known.trust + change, _MOST_TRUST)
        if known.trust < 0:
            known.plan, known.log, known.num_alike = None, (), 0
            known.num_needed = min(2 * known.num_needed, _MOST_ALIKE)

    def give_up_pass(self) -> None:
        """After an exception on this rank: issues what is left of the plan. Collective.

        Ranks that follow it come to its end, and to a round: there they find out whether all have
        failed, and go on together.
        """
        one = self._pass
        if one is not None and one.is_begun and not self.is_mid_event:
            self._leave()

    def forget(self) -> None:
        """After an exception: nothing is under way, and nothing known. Local."""
        self._pass = self._ended = None
        self._unheard.clear()
        self._forget_flags()
        self._known.clear()
        self._following.clear()
        self._context = ()
        self._last_log = 0
        self._num_boundaries = _MOST_BOUNDARIES
        self.is_mid_event = False

    def restart(self) -> None:
        """As `forget`, on all ranks, which have come together anew. Local."""
        self.forget()
        self._past = 0
        self._heard_wish = None

    # ---------------------------------------------------------------- events

    def _reduction(self, bucket: int) -> int:
        return self._num + 1 + bucket

    def use(self, unit: int, *, may_repeat: bool) -> None:
        """This rank uses `unit` now.

        Args:
            unit: Which.
            may_repeat: If the pass has used it already and will not again, another one begins, as
                with each token that is generated.
        """
        if self._pass is None:
            self._issuer.begin_pass()
        if self._pass is None:
            self._pass = _Pass(None)  # nothing that another rank could have part in
        if may_repeat and unit in self._pass.used and unit not in self.upcoming():
            self.begin("another forward of a step")
        self._pass.used.add(unit)

    def want(self, unit: int, *, is_backward: bool) -> None:
        """Issues the gather of a unit that this rank needs now, or answers others once.

        Call it until the unit is whole.
        """
        one = self._confirm()
        if one.plan is not None:
            with_unit = (
                place for place in range(one.cursor, len(one.plan)) if one.plan[place] == unit
            )
            place = next(with_unit, None)
            if place is not None:
                self._advance(place + 1, unit)
                return
            one.has_deviated = True
            self._advance(len(one.plan), None)
        request = 2 * self._num - 1 - unit if is_backward else unit
        self._answer(self._say(request, None, f"the gather of unit {unit}"), is_kept=True)

    def ready(self, bucket: int) -> None:
        """All gradients of `bucket` are there: it is reduced when those before it are."""
        one = self._confirm()
        one.ready.add(bucket)
        self.go_on()

    def go_on(self) -> None:
        """Issues reductions that are next in the plan and ready."""
        one = self._pass
        while one is not None and one.plan is not None and one.cursor < len(one.plan):
            event = one.plan[one.cursor]
            if event <= self._turn or event - self._turn - 1 not in one.ready:
                return
            self._advance(one.cursor + 1, None)

    @property
    def next_unit(self) -> int | None:
        """The unit whose gather is the next event of the plan."""
        one = self._pass
        if one is None or one.plan is None or one.cursor >= len(one.plan):
            return None
        event = one.plan[one.cursor]
        return event if event < self._turn else None

    def gather_ahead(self) -> None:
        """Issues the gather of `next_unit`, which this rank will need."""
        one = self._confirm()
        assert one.plan is not None
        self._advance(one.cursor + 1, one.plan[one.cursor])
        self.go_on()

    def upcoming(self) -> Iterator[int]:
        """Units that the plan will gather."""
        one = self._pass
        if one is not None and one.plan is not None:
            yield from (e for e in islice(one.plan, one.cursor, None) if e < self._turn)

    def is_last_of_forward(self, unit: int) -> bool:
        """Backward begins with the unit that forward has gathered last: it may stay whole."""
        one = self._pass
        if one is None or one.plan is None or one.has_turned or one.cursor >= len(one.plan):
            return False
        if one.plan[one.cursor] != self._turn:
            return False
        gathers = (e for e in reversed(one.plan[: one.cursor]) if e < self._turn)
        return next(gathers, None) == unit

    def _advance(self, stop: int, wanted: int | None) -> None:
        """Issues events of the plan up to `stop`; the last one may be the unit that is wanted."""
        one = self._confirm()
        assert one.plan is not None
        while one.cursor < stop:
            event = one.plan[one.cursor]
            one.cursor += 1
            is_wanted = event == wanted and one.cursor == stop
            if event < self._turn:
                one.is_in_vain |= not is_wanted
            elif event > self._turn and event - self._turn - 1 not in one.ready:
                one.has_deviated = True
            self._issue(event, is_kept=is_wanted)

    def _issue(self, event: int, *, is_kept: bool = False) -> None:
        one = self._ended or self._pass
        if one is not None and len(one.log) < _MOST_LOGGED:
            one.log.append(event)
        self.is_mid_event = True
        if event < self._turn:
            self._issuer.issue_gather(event, is_kept=is_kept)
        elif event > self._turn:
            if one is not None:
                one.reduced.append(event - self._turn - 1)
            self._issuer.issue_reduction(event - self._turn - 1)
        self.is_mid_event = False

    def _answer(self, heard: Round, *, is_kept: bool = False) -> None:
        """Issues what a round has told: reductions that all are ready for, then the gather."""
        one = self._ended or self._pass
        if one is not None and one.plan is None:
            is_backward = self._num <= heard.lowest < self.requests.begin or heard.num_ready
            if is_backward and not one.has_logged_turn:
                one.log.append(self._turn)  # where all ranks have turned
                one.has_logged_turn = True
            while len(one.reduced) < min(heard.num_ready, len(one.eager)):
                self._issue(self._reduction(one.eager[len(one.reduced)]))
        if heard.lowest < self.requests.begin:
            lowest = heard.lowest
            unit = lowest if lowest < self._num else 2 * self._num - 1 - lowest
            self._issue(unit, is_kept=is_kept)

    # ---------------------------------------------------------------- boundaries

    def meet(self, request: int, name: str) -> None:
        """Takes part in what other ranks still ask for, until none is behind `request`.

        Args:
            request: One of `requests`.
            name: What this rank waits for, to be read by people.
        """
        topic = _hash(name) if request == self.requests.together else None
        one, kept = self._pass, None
        if one is not None and one.is_training and request == self.requests.together:
            kept = _Pass(_hash(one.key or 0, topic or 0), is_training=True)  # goes on behind it
            kept.has_turned, kept.ready = one.has_turned, one.ready
        self._leave()
        while True:
            heard = self._say(request, topic, name)
            self._answer(heard)
            if heard.lowest < self.requests.begin:
                continue
            self._learn(heard)
            if heard.lowest >= request:
                break
            if heard.lowest == self.requests.begin:  # others begin a pass: it is followed
                key = heard.key if heard.is_same_key else None
                self._pass = _Pass(key, plan=self._plan_of(key))
                self._leave()
        if request == self.requests.together:
            self._past = _hash(self._past, topic or 0)
        if kept is not None and one is not None:
            kept.plan = self._plan_of(kept.key)
            kept.eager = [bucket for bucket in one.eager if bucket not in one.reduced]
            self._pass = kept
        self._heard_wish = heard.wish

    def leave(self, name: str) -> None:
        """`meet` if a pass is open: before collectives that are no part of it. Collective."""
        if self._pass is not None or self._ended is not None:
            self.meet(self.requests.together, name)
            self._pass = None

    def announce(self, name: str) -> None:
        """Before a collective that all ranks come to: `meet`, which nobody waits for if need be."""
        if self._pass is not None or self._ended is not None or self.is_loose:
            self.meet(self.requests.together, name)
            return
        topic = _hash(name)
        self._begin_saying(self.requests.together, topic, is_heard=False)
        self._past = _hash(self._past, topic)

    def note(self, name: str) -> None:
        """All ranks come to `name` here; found out at the next round if not. Local."""
        self._past = _hash(self._past, name)

    def pass_boundary(self, name: str) -> int | None:
        """Between two batches: the lowest wish of any rank, as the last boundary has told it.

        Collective. Holds a round of its own where there has been none for long.
        """
        self._num_boundaries += 1
        is_settled = self._pass is None and self._ended is None and not self.is_loose
        if self._talk.size > 1 and is_settled and self._num_boundaries <= _MOST_BOUNDARIES:
            self.note(name)
        else:
            self.meet(self.requests.together, name)
            self._num_boundaries = 0
        wish, self._heard_wish = self._heard_wish, None
        return wish

    def meet_for(self, name: str) -> int | None:
        """`meet` before something that all ranks do together: the lowest wish of any rank."""
        self.meet(self.requests.together, name)
        return self._heard_wish

    def fail(self, error: Exception) -> None:
        """Tells the other ranks, in their next round, why this one fails; they raise it too.

        The caller raises `error` afterwards.

        Raises:
            RuntimeError: They cannot be told.
        """
        self._leave()
        self._referee.failure = f"{type(error).__name__}: {error}"
        try:
            numbers, judge = self._numbers(-1, None, failed=True), self._referee.judge("")
            with self._talk.waiting("the failure of this rank"):
                heard = self._talk.say(numbers, b"", judge)
        finally:
            self._referee.failure = ""
        if heard.error is not None:
            raise heard.error

    # ---------------------------------------------------------------- rounds

    _heard: Round
    _heard_mask = b""

    def _numbers(self, request: int, key: int | None, *, failed: bool = False) -> list[int]:
        one = self._ended or self._pass
        ready = 0
        if one is not None and one.plan is None:
            is_done = request >= self.requests.done
            ready = len(one.eager) if is_done else _prefix(one.eager, one.ready)
        elif one is not None:
            ready = len(one.eager)
        of_last = self._ended or one
        compares = not self.is_loose and self.requests.begin <= request <= self.requests.done
        return Said(
            request,
            key,
            ready,
            self._flags_mark if compares else None,
            self._past if compares else None,
            self.wish(),
            has_deviated=of_last is not None and of_last.has_deviated,
            is_in_vain=of_last is not None and of_last.is_in_vain,
            is_loose=self.is_loose,
            failed=self._talk.rank if failed else self._talk.size,
        ).numbers()

    def _begin_saying(
        self, request: int, key: int | None, mask: bytes = b"", *, is_heard: bool
    ) -> Future[Heard]:
        """Begins a round; if nobody will hear it before an event, what is wrong ends all waits."""
        judge = self._referee.judge("the next forward or backward", alarms=not is_heard)
        saying = self._talk.begin_saying(self._numbers(request, key), mask, judge)
        if not is_heard:
            self._unheard.append(saying)
        return saying

    def _say(self, request: int, key: int | None, name: str, mask: bytes = b"") -> Round:
        judge = self._referee.judge(name)
        with self._talk.waiting(name):
            heard = self._talk.say(self._numbers(request, key), mask, judge)
        return self._take(heard)

    def _hear(self, saying: Future[Heard], name: str) -> Round:
        with self._talk.waiting(name):
            heard = saying.result()
        return self._take(heard)

    def _take(self, heard: Heard) -> Round:
        unheard, self._unheard = self._unheard, []
        earlier: list[Exception | None] = []
        for saying in unheard:  # one may end meanwhile: asked once
            if saying.done():
                earlier.append(saying.result().error)
            else:
                self._unheard.append(saying)
        for error in (*earlier, heard.error):
            if error is not None:
                raise error
        self._heard_mask = heard.mask
        return Round.of(heard.numbers)


def _prefix(eager: Sequence[int], ready: set[int]) -> int:
    """How many of the first are ready."""
    return next((i for i, bucket in enumerate(eager) if bucket not in ready), len(eager))


def _hash(*parts: object) -> int:
    """The same in every process, of less than 62 bits."""
    digest = blake2b(digest_size=7)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
        digest.update(b"\0")
    return int.from_bytes(digest.digest(), "big")
