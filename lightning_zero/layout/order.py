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
  the reductions in front of them (`hoist_all_gathers` in passes.py). A pass with a plan has no rounds: every
  rank issues the plan, each event when it needs it, or is ready for it, or needs one behind it.
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
   A collective of the user's comes after a round in which all ranks have come to it, so that who
   waits in it has issued as much as all others.
3. A rank waits for a round only when it has issued all events up to that round. Whoever has not
   come to it computes, or waits for data, which comes by 2.
4. Whether a pass has a plan follows from its key and from the results of rounds, which are the same
   on all ranks. A key that does not follow from the rounds before it (`RecordedSchedules`) is compared in a
   round that is waited for before the first event; one that does, in a round that nobody waits for,
   so that ranks which come to different points find it out though some of them wait for data.

What a rank changes that others may gather, it changes when their pass has ended too: an optimizer's
step and a write to `parameter.data` close a pass that is open, by a round (`close_pass`).

A boundary is a round in which nobody asks for a unit any more. Such rounds carry, besides, what any
rank has touched, what a rank wishes (to stop, say) and marks of what is trained and of all that was
done together before: what differs there is an error on all ranks.

In a *loose* context, which ranks leave one after the other (core/lockstep.py), a rank that has
left takes part in the passes of the others, in the same way: it issues their plans, or answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.passes import Pass, RecordedSchedules, hash_of
from lightning_zero.layout.rounds import (
    ControlPlane,
    Requests,
    RoundClient,
    Tally,
    Vote,
    called_from,
)

__all__ = ["Issuer", "CollectiveOrder", "PrefetchUnit", "prefetch"]

_MOST_BOUNDARIES = 8  # between batches, without a round


class Issuer(Protocol):
    """Who does what this decides on."""

    def issue_unshard(self, unit: int, *, is_kept: bool) -> None:
        """Issues the gather of a unit, which stays whole until its use or not."""

    def issue_reduction(self, bucket: int) -> None:
        """Issues the reduction of a bucket, with the gradients that there are."""

    def begin_pass(self) -> None:
        """Calls `CollectiveOrder.begin`: a unit is used, and no pass is open."""


class CollectiveOrder:
    """The events of this rank. See [Note: Who waits for whom], and passes.py for what they are.

    A request is one integer, of which the lowest of all ranks goes first:

        0 .. n-1       a unit, in forward by its place in the layout
        n .. 2n-1      a unit, in backward from the end of the layout on
        2n .. 2n+3     `Requests`

    Args:
        control_plane: Between the ranks.
        issuer: Does what is decided.
        numels: Elements of each unit; 0 for one that is not gathered.
        num_buckets: That are reduced.
        names: Of the parameters, whose `requires_grad` are the flags of a pass.
        prefetch_numel: Elements to gather ahead of use; None: one unit; 0: none.

    Attributes:
        requests: Those that ask for no unit.
        stop_request: Tells what this rank wishes; the lowest counts.
        allows_uneven_calls: Ranks may leave one after the other.
        is_issuing: This rank takes part in an event that it has not issued in full.
    """

    def __init__(
        self,
        control_plane: ControlPlane,
        issuer: Issuer,
        *,
        numels: Sequence[int],
        num_buckets: int,
        names: Sequence[str] = (),
        prefetch_numel: int | None = None,
    ) -> None:
        self._control_plane = control_plane
        self._issuer = issuer
        self._num = self._backward_event = len(
            numels
        )  # units; the event at which a backward begins
        self._gathers = any(numels)
        self.requests = Requests(*range(2 * self._num, 2 * self._num + 4))
        self._rounds = RoundClient(
            control_plane, self.requests, names, 2 * num_buckets + len(names)
        )
        self._recorded = RecordedSchedules(list(numels), prefetch_numel)
        self.stop_request: Callable[[], int | None] = lambda: None
        self.allows_uneven_calls = False
        self.restart()

    # ---------------------------------------------------------------- after an exception

    def reset(self) -> None:
        """Nothing is under way, and nothing known. Local."""
        self._pass: Pass | None = None
        self._ended: Pass | None = None  # until a boundary has been heard
        self._rounds.reset()
        self._set_flags(None)
        self._recorded.reset()
        self._num_boundaries = _MOST_BOUNDARIES  # between batches, since a step's end
        self._has_collectives = False  # of the user's, inside of a pass
        self.is_issuing = False

    def restart(self) -> None:
        """As `reset`, on all ranks, which have come together anew. Local."""
        self.reset()
        self._history = 0  # a hash of what was done together
        self._rounds.num_writes = 0
        self._received_stop_request: int | None = None

    def flush_schedule(self) -> None:
        """Issues what is left of the plan. Collective.

        Ranks that follow it come to its end, and to a round: there they find out whether all have
        failed, and go on together.
        """
        one = self._pass
        if one is not None and one.is_begun and not self.is_issuing:
            self._finish_pass()

    def report_failure(self, error: Exception) -> None:
        """Tells the other ranks, in their next round, why this one fails; they raise it too.

        The caller raises `error` afterwards.

        Raises:
            RuntimeError: They cannot be told.
        """
        self._finish_pass()
        self._rounds.report_failure(
            error, self._vote(-1, None)._replace(failed=self._control_plane.rank)
        )

    # ---------------------------------------------------------------- passes

    @property
    def is_training(self) -> bool:
        return self._pass is not None and self._pass.is_training

    @property
    def _is_synchronized(self) -> bool:
        return self._pass is None and self._ended is None and not self.allows_uneven_calls

    def begin(self, kind: str, flags: Sequence[bool] | None = None) -> None:
        """A pass of a `kind`, the same on every rank; `flags`: what is trained. Collective."""
        is_settled, is_predicted = self._is_synchronized, False
        self._finish_pass()
        self._set_flags(flags)
        if flags is None:
            key = hash_of(kind)
        else:
            key = hash_of(kind, self._flags_mark, self._recorded.last_log)
            is_predicted = is_settled and self._recorded.predict_next_key() == key
            self._recorded.add_key(key)
        one = self._pass = Pass(key, flags is not None, is_begun=False)
        said = self._vote(self.requests.begin, key)
        one.saying = self._rounds.begin(said, is_awaited=not is_predicted)
        if is_predicted:
            one.is_begun = True
            one.schedule = self._recorded.schedule_of(key)

    def _set_flags(self, flags: Sequence[bool] | None) -> None:
        self._rounds.flags = bytes(flags or ())
        self._flags_mark = None if flags is None else hash_of(self._rounds.flags)

    def wait_for_begin(self) -> None:
        """Waits until all ranks have begun this pass, where that is not foretold."""
        if self._pass is not None:
            self._wait_for_begin()

    def _wait_for_begin(self) -> Pass:
        """Before an event: all ranks have begun the same pass, where that is not foretold."""
        one = self._pass
        if one is None:
            one = self._pass = Pass(None)
        if one.is_begun:
            return one
        assert one.saying is not None
        name = "the beginning of a pass"
        heard, _ = self._rounds.wait(one.saying, name)
        while heard.request < self.requests.begin:
            self._execute(heard)
            heard = self._run_round(self.requests.begin, one.key, name)
        self._record(heard)
        one.is_begun = True
        one.log.clear()  # of a pass that has failed on this rank, and on others later
        one.has_logged_backward = False
        if not heard.is_same("key"):
            one.key = None
        if one.is_recorded:
            one.schedule = self._recorded.schedule_of(one.key)
        return one

    def begin_backward(self, flags: Sequence[bool], kind: str, eager: Sequence[int]) -> None:
        """Backward begins: that of another pass, if none with these flags is open. Collective.

        `eager` are the buckets that will be reduced, in this order, if there is no plan: the same
        on every rank.
        """
        if not self.is_training or bytes(flags) != self._rounds.flags:
            self.begin(kind, flags)
        one = self._pass
        assert one is not None
        if not one.eager:
            one.eager = list(eager)
        if not self._gathers and one.schedule is None:
            one.schedule, one.is_recorded = tuple(map(self._reduction, eager)), False
        elif not one.in_backward:
            self._advance_past(one, self._backward_event)
        one.in_backward = True

    def finalize_backward(self, mask: Callable[[], bytes], finish: Callable[[], None]) -> bytes:
        """Backward has ended: the boundary. Collective. `conclude_backward` follows.

        Args:
            mask: Tells what this rank has touched, when it has issued all it can.
            finish: Is called while the round is under way.

        Returns:
            What any rank has touched.
        """
        self._finish_pass()
        said, name = self._vote(self.requests.done, None), "the end of the backward on all ranks"
        saying = self._rounds.begin(said, mask(), is_awaited=True)
        finish()
        heard, touched = self._rounds.wait(saying, name)
        while True:
            self._execute(heard)
            if heard.request >= self.requests.done:
                break
            said = self._vote(self.requests.done, None)
            heard, touched = self._rounds.run_round(said, name, mask())
        self._received_stop_request, self._num_boundaries = heard.stop_request, 0
        self._result = heard
        return touched

    def conclude_backward(self, *, is_complete: bool) -> None:
        """After `finalize_backward`: all that was touched had been reduced before it, the same on every rank."""
        if not is_complete and self._ended is not None and self._ended.schedule is None:
            self._ended.key = None  # its log lacks what comes now
        self._record(self._result, is_incomplete=not is_complete)

    def _finish_pass(self) -> None:
        """This rank has ended its pass: issues what is left of the plan."""
        if self._pass is None:
            return
        one = self._wait_for_begin()
        self._advance(one.num_scheduled)
        self._ended, self._pass = one, None

    def _record(self, heard: Tally, *, is_incomplete: bool = False) -> None:
        """At a boundary: from the pass that it has ended, the same on every rank."""
        one, self._ended = self._ended, None
        if one is not None:
            self._recorded.record(one, heard, is_incomplete=is_incomplete)

    # ---------------------------------------------------------------- events

    def _reduction(self, bucket: int) -> int:
        return self._backward_event + 1 + bucket

    def mark_used(self, unit: int, *, may_repeat: bool) -> None:
        """This rank uses `unit` now.

        `may_repeat`: if the pass has used it already and will not again, another one begins, as
        with each token that is generated.
        """
        if self._pass is None:
            self._issuer.begin_pass()
        if self._pass is None:
            self._pass = Pass(None)  # nothing that another rank could have part in
        if may_repeat and unit in self._pass.used and unit not in self._pass.upcoming():
            self.begin("another forward of a step")
        self._pass.used.add(unit)

    def request_unshard(self, unit: int, *, is_backward: bool) -> None:
        """Issues the gather of a unit that this rank needs now, or answers others once.

        Call it until the unit is whole.
        """
        one = self._wait_for_begin()
        if one.schedule is not None:
            if self._advance_past(one, unit, is_wanted=True):
                return
            one.has_deviated = True
            self._advance(one.num_scheduled)
        request = 2 * self._num - 1 - unit if is_backward else unit
        self._execute(self._run_round(request, None, f"the gather of unit {unit}"), is_kept=True)

    def mark_ready(self, bucket: int) -> None:
        """All gradients of `bucket` are there: it is reduced when those before it are."""
        one = self._wait_for_begin()
        one.ready.add(bucket)
        self._reduce_ready(one)

    def _reduce_ready(self, one: Pass) -> None:
        """Issues reductions that are next in the plan and ready."""
        while (event := one.next) is not None and event - self._backward_event - 1 in one.ready:
            self._advance(one.cursor + 1)

    @property
    def next_unit(self) -> int | None:
        """The unit whose gather is the next event of the plan."""
        event = None if self._pass is None else self._pass.next
        return None if event is None or event >= self._backward_event else event

    def prefetch(self) -> None:
        """Issues the gather of `next_unit`, which this rank will need."""
        one = self._wait_for_begin()
        self._advance(one.cursor + 1, is_wanted=True)
        self._reduce_ready(one)

    def upcoming(self) -> Iterator[int]:
        """Units that the plan will gather."""
        if self._pass is not None:
            yield from (event for event in self._pass.upcoming() if event < self._backward_event)

    def is_last_of_forward(self, unit: int) -> bool:
        """Backward begins with the unit that forward has gathered last: it may stay whole."""
        one = self._pass
        if (
            one is None
            or one.schedule is None
            or one.in_backward
            or one.next != self._backward_event
        ):
            return False
        gathers = (e for e in reversed(one.schedule[: one.cursor]) if e < self._backward_event)
        return next(gathers, None) == unit

    def _advance_past(self, one: Pass, event: int, *, is_wanted: bool = False) -> bool:
        """Issues the plan up to `event`, if that is in its rest."""
        if one.schedule is None or event not in one.upcoming():
            return False
        self._advance(one.schedule.index(event, one.cursor) + 1, is_wanted=is_wanted)
        return True

    def _advance(self, stop: int, *, is_wanted: bool = False) -> None:
        """Issues events of the plan up to `stop`; the last one may be the unit that is wanted."""
        one = self._wait_for_begin()
        while one.schedule is not None and one.cursor < stop:
            event = one.schedule[one.cursor]
            one.cursor += 1
            is_kept = is_wanted and one.cursor == stop
            if event < self._backward_event:
                one.has_unused_gathers |= not is_kept
            elif event > self._backward_event and event - self._backward_event - 1 not in one.ready:
                one.has_deviated = True
            self._issue(event, is_kept=is_kept)

    def _issue(self, event: int, *, is_kept: bool = False) -> None:
        one = self._ended or self._pass
        if one is not None:
            one.record(event)
        self.is_issuing = True
        if event < self._backward_event:
            self._issuer.issue_unshard(event, is_kept=is_kept)
        elif event > self._backward_event:
            if one is not None:
                one.reduced.append(event - self._backward_event - 1)
            self._issuer.issue_reduction(event - self._backward_event - 1)
        self.is_issuing = False

    def _execute(self, heard: Tally, *, is_kept: bool = False) -> None:
        """Issues what a round has told: reductions that all are ready for, then the gather."""
        one, lowest, num_ready = self._ended or self._pass, heard.request, heard.lowest.num_ready
        is_unit = lowest < self.requests.begin
        if one is not None and one.schedule is None:
            is_backward = (is_unit and lowest >= self._num) or num_ready
            if is_backward and not one.has_logged_backward:
                one.log.append(self._backward_event)  # where all ranks have turned
                one.has_logged_backward = True
            while len(one.reduced) < min(num_ready, len(one.eager)):
                self._issue(self._reduction(one.eager[len(one.reduced)]))
        if is_unit:
            unit = lowest if lowest < self._num else 2 * self._num - 1 - lowest
            self._issue(unit, is_kept=is_kept)

    # ---------------------------------------------------------------- boundaries

    def serve_until(self, request: int, name: str) -> None:
        """Takes part in what other ranks still ask for, until none is behind `request`."""
        topic = hash_of(name) if request == self.requests.barrier else None
        self._rounds.current_call = "" if topic is None else f"come to {name}, {called_from()}"
        one, kept = self._pass, None
        if one is not None and one.is_training and topic is not None:
            kept = Pass(hash_of(one.key or 0, topic), is_training=True)  # goes on behind it
            kept.in_backward, kept.ready = one.in_backward, one.ready
        self._finish_pass()
        while True:
            heard = self._run_round(request, topic, name)
            self._execute(heard)
            if heard.request < self.requests.begin:
                continue
            self._record(heard)
            if heard.request >= request:
                break
            if heard.request == self.requests.begin:  # others begin a pass: it is followed
                key = heard.lowest.key if heard.is_same("key") else None
                self._pass = Pass(key, schedule=self._recorded.schedule_of(key))
                self._finish_pass()
        self._rounds.current_call = ""
        if topic is not None:
            self._history = hash_of(self._history, topic)
        if kept is not None and one is not None:
            kept.schedule = self._recorded.schedule_of(kept.key)
            kept.eager = [bucket for bucket in one.eager if bucket not in one.reduced]
            self._pass = kept
        self._received_stop_request = heard.stop_request

    @property
    def expects_collectives(self) -> bool:
        """Whether collectives of the user's are looked for in this pass: the same on every rank.

        Where all ranks have been alike before, and no pass has had any, the plan is trusted.
        """
        one = self._pass
        if one is None or not self._gathers:
            return False
        return self._has_collectives or not one.is_begun or one.schedule is None

    def barrier_before_collective(self, name: str) -> None:
        """`barrier` a collective of the user's inside of a pass."""
        self._has_collectives = True
        self.serve_until(self.requests.barrier, name)

    def close_pass(self, name: str) -> None:
        """`serve_until` if a pass is open: before collectives that are no part of it. Collective."""
        if self._pass is not None or self._ended is not None:
            self.serve_until(self.requests.barrier, name)
            self._pass = None

    def announce_collective(self, name: str) -> None:
        """Before a collective that all ranks come to: `serve_until`, which nobody waits for if need be."""
        if not self._is_synchronized:
            self.serve_until(self.requests.barrier, name)
            return
        topic = hash_of(name)
        self._rounds.current_call = f"come to {name}, {called_from()}"
        self._rounds.begin(self._vote(self.requests.barrier, topic), is_awaited=False)
        self._rounds.current_call = ""
        self._history = hash_of(self._history, topic)

    def note_write(self, name: str) -> None:
        """All ranks write to their parts of parameter `name` here; see `note`. Local."""
        self.note(f"write to {name}")
        self._rounds.num_writes += 1
        self._rounds.last_write = f"written to parameter {name}, {called_from()}"

    def note(self, name: str) -> None:
        """All ranks come to `name` here; found out at the next round if not. Local."""
        self._history = hash_of(self._history, name)

    def pass_boundary(self, name: str) -> int | None:
        """Between two batches: the lowest wish of any rank, as the last boundary has told it.

        Collective. Holds a round of its own where there has been none for long.
        """
        self._num_boundaries += 1
        if (
            self._control_plane.size > 1
            and self._is_synchronized
            and self._num_boundaries <= _MOST_BOUNDARIES
        ):
            self.note(name)
        else:
            self.serve_until(self.requests.barrier, name)
            self._num_boundaries = 0
        stop_request, self._received_stop_request = self._received_stop_request, None
        return stop_request

    def barrier(self, name: str) -> int | None:
        """`serve_until` before something that all ranks do together: the lowest wish of any rank."""
        self.serve_until(self.requests.barrier, name)
        return self._received_stop_request

    # ---------------------------------------------------------------- rounds

    def _vote(self, request: int, key: int | None) -> Vote:
        one = self._ended or self._pass
        ready = 0
        if one is not None:
            is_all = one.schedule is not None or request >= self.requests.done
            ready = len(one.eager) if is_all else one.num_ready
        compares = (
            not self.allows_uneven_calls and self.requests.begin <= request <= self.requests.done
        )
        return Vote(
            request,
            key,
            ready,
            self._flags_mark if compares else None,
            self._history if compares else None,
            self.stop_request(),
            has_deviated=one is not None and one.has_deviated,
            has_unused_gathers=one is not None and one.has_unused_gathers,
            allows_uneven_calls=self.allows_uneven_calls,
            failed=self._control_plane.size,
        )

    def _run_round(self, request: int, key: int | None, name: str) -> Tally:
        return self._rounds.run_round(self._vote(request, key), name)[0]


class PrefetchUnit(Protocol):
    """What is gathered and released together."""

    numel: int  # of all its buckets that rest as shards, padding included
    stays_unsharded: bool  # stays whole until the end of the step, as the root does


def prefetch(
    order: CollectiveOrder,
    units: Sequence[PrefetchUnit],
    whole: Collection[PrefetchUnit],
    config: ZeroConfig,
    prefetch_numel: int,
) -> None:
    """Gathers what comes next in the plan, as far as the settings allow; for engine and planner.

    Args:
        order: Decides what comes next.
        units: By number.
        whole: Those that are whole or on their way.
        config: Of the engine.
        prefetch_numel: Elements that have been gathered ahead of their use.
    """
    if not config.overlap_comm:
        return
    budget, limit = config.prefetch_bucket_size, config.max_live_parameters
    while (index := order.next_unit) is not None:
        unit = units[index]
        prefetch_numel += unit.numel
        if unit in whole:
            return  # it may be in use, and be used once more
        if budget is None and len([one for one in whole if not one.stays_unsharded]) > 1:
            return  # one, where there is none yet
        if budget is not None and prefetch_numel > budget:
            return
        if limit is not None and sum([one.numel for one in whole]) + unit.numel > limit:
            return
        order.prefetch()
