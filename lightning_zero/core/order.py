"""The collective order: which all-gather or reduction comes next, agreed on by all ranks.

[Note: Collective order] Every rank issues the same all-gathers and reductions in the same order.
These are its *events*. No rank decides an event alone. A *pass* is the work between two
boundaries: in training a forward with its backward, otherwise a forward. A pass has a
*key*: its kind, the parameters that train, and the pass before it.

* A pass with a new key is *negotiated*. A rank that needs a unit requests it in a round
  (comm.control). The lowest request of all ranks comes first, and every rank takes part in that
  all-gather. The round also carries how many reductions, in `reduction_order`, every rank is ready
  for; all ranks then issue these. A rank that has ended its pass keeps answering until all have. So
  rounds decide all events of all ranks, and every rank logs the same ones.
* A log that occurs twice in a row becomes the *recorded schedule* of its key, with all-gathers
  moved ahead of the reductions before them (`hoist_all_gathers` in passes.py). A pass with a
  schedule has no rounds: every rank replays the schedule. It issues an event when it needs it, is
  ready for it, or needs a later one.
* A rank that needs a unit which is not in the rest of its schedule issues that rest, with the
  available gradients, and then requests the unit. The other ranks answer in the round at the end of
  their pass. Gradients that come after their reduction are *late*: they are reduced once more,
  after the end. Before its own backward such a rank reduces zeros; what the other ranks contributed
  is kept separate from `.grad`, which users may zero, until the rank enters its backward. A
  schedule that often does not fit is dropped, and the next one needs twice as many equal logs.

Why this does not deadlock:

1. In a pass with a schedule all ranks issue its events in the order of the schedule, and all of
   them before they enter any round that they wait for: the one that ends the pass, one within it
   before a collective of the user's, or one with a request. In a pass without a schedule all ranks
   issue what a round decided before they enter the next round.
2. A rank waits only for the data of events that it has issued itself. So of all ranks that wait for
   data, the one that has issued the fewest events waits for an event that all have issued, which
   completes. A collective of the user's comes after a round that all ranks have entered, so a rank
   that waits in it has issued as many events as all others.
3. A rank waits for a round only when it has issued all events before that round. A rank that has
   not entered the round computes, or waits for data, which arrives by 2.
4. Whether a pass has a schedule follows from its key and from the results of rounds, which are the
   same on all ranks. A key that is predicted from earlier rounds (`RecordedSchedules`) is compared
   in a round that is not awaited, so that desynchronized ranks are detected although some of them
   wait for data. Any other key is compared in a round that is awaited before the first event.

A rank changes what others may still all-gather only when their pass has ended, too: an optimizer
step and a write to `parameter.data` first close an open pass with a round (`close_pass`).

A boundary is a round in which no rank requests a unit any more. Such rounds also carry the
gradients that any rank has touched, stop requests, and hashes of the trainable parameters and of
all calls that the ranks have made; a mismatch of these hashes is an error on all ranks.

Where uneven calls are allowed, ranks leave one after the other (core/lockstep.py). A rank that has
left takes part in the passes of the others in the same way: it issues their schedules, or answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from lightning_zero.comm.rounds import (
    ControlPlane,
    Requests,
    RoundClient,
    Tally,
    Vote,
    called_from,
)
from lightning_zero.core.passes import Pass, RecordedSchedules, hash_of
from lightning_zero.layout.config import ZeroConfig

__all__ = ["Issuer", "CollectiveOrder", "PrefetchUnit", "prefetch"]

_MAX_BOUNDARIES = 8  # between batches, without a round


class Issuer(Protocol):
    """Issues the collectives that the order decides on."""

    def issue_unshard(self, unit: int, *, is_kept: bool) -> None:
        """Issues the all-gather of a unit; `is_kept`: it stays unsharded until its use."""

    def issue_reduction(self, bucket: int) -> None:
        """Issues the reduction of a bucket, with the available gradients."""

    def begin_pass(self) -> None:
        """Calls `CollectiveOrder.begin`: a unit is used, and no pass is open."""


class CollectiveOrder:
    """Decides the next event of this rank. See [Note: Collective order]; passes.py numbers events.

    A request is one integer; the lowest of all ranks comes first:

        0 .. n-1       a unit, in forward, in layout order
        n .. 2n-1      a unit, in backward, in reverse layout order
        2n .. 2n+3     `Requests`

    Args:
        control_plane: Carries the rounds.
        issuer: Issues the events.
        numels: Elements of each unit; 0 for one that is not sharded.
        num_buckets: Number of buckets that are reduced.
        names: Names of the parameters whose `requires_grad` are the flags of a pass.
        prefetch_numel: Elements to unshard before their use. None: one unit; 0: none.

    Attributes:
        requests: Requests that ask for no unit.
        stop_request: Function that returns the stop request of this rank; the lowest of all ranks
            counts.
        allows_uneven_calls: Whether ranks may leave one after the other.
        is_issuing: Whether an event is being issued: some of its collectives are not issued yet.
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
        self._num = len(numels)  # units
        self._backward_event = self._num
        self._has_units = any(numels)  # some units are sharded
        self.requests = Requests(*range(2 * self._num, 2 * self._num + 4))
        num_bytes = 2 * num_buckets + len(names)
        self._rounds = RoundClient(control_plane, self.requests, names, num_bytes)
        self._recorded = RecordedSchedules(list(numels), prefetch_numel)
        self.stop_request: Callable[[], int | None] = lambda: None
        self.allows_uneven_calls = False
        self.restart()

    # ---------------------------------------------------------------- after an exception

    def reset(self) -> None:
        """Drops the open pass and all recorded schedules. Local."""
        self._pass: Pass | None = None
        self._ended: Pass | None = None  # until the result of a boundary is known
        self._rounds.reset()
        self._set_flags(None)
        self._recorded.reset()
        self._num_boundaries = _MAX_BOUNDARIES  # between batches, since the end of a step
        self._has_collectives = False  # of the user's, within a pass
        self.is_issuing = False

    def restart(self) -> None:
        """As `reset`, on all ranks, after they have regrouped. Local."""
        self.reset()
        self._history = 0  # hash of all calls that all ranks have made
        self._rounds.num_writes = 0
        self._received_stop_request: int | None = None

    def flush_schedule(self) -> None:
        """Issues the rest of the schedule. Collective.

        Ranks that follow it reach its end, and then a round, in which they learn whether all ranks
        have failed and can continue together.
        """
        one = self._pass
        if one is not None and one.is_begun and not self.is_issuing:
            self._finish_pass()

    def report_failure(self, error: Exception) -> None:
        """Sends `error` to the other ranks in their next round; they raise it, too.

        The caller raises `error` afterwards.

        Raises:
            RuntimeError: The other ranks cannot be reached.
        """
        self._finish_pass()
        vote = self._vote(-1, None)._replace(failed=self._control_plane.rank)
        self._rounds.report_failure(error, vote)

    # ---------------------------------------------------------------- passes

    @property
    def is_training(self) -> bool:
        return self._pass is not None and self._pass.is_training

    @property
    def _is_synchronized(self) -> bool:
        return self._pass is None and self._ended is None and not self.allows_uneven_calls

    def begin(self, kind: str, flags: Sequence[bool] | None = None) -> None:
        """Begins a pass. Collective.

        Args:
            kind: Kind of the pass, the same on every rank.
            flags: `requires_grad` of the parameters; None: the pass has no backward.
        """
        was_synchronized, is_predicted = self._is_synchronized, False
        self._finish_pass()
        self._set_flags(flags)
        if flags is None:
            key = hash_of(kind)
        else:
            key = hash_of(kind, self._flags_hash, self._recorded.last_log)
            is_predicted = was_synchronized and self._recorded.predict_next_key() == key
            self._recorded.add_key(key)
        one = self._pass = Pass(key, flags is not None, is_begun=False)
        vote = self._vote(self.requests.begin, key)
        one.pending = self._rounds.begin(vote, is_awaited=not is_predicted)
        if is_predicted:
            one.is_begun = True
            one.schedule = self._recorded.schedule_of(key)

    def _set_flags(self, flags: Sequence[bool] | None) -> None:
        self._rounds.flags = bytes(flags or ())
        self._flags_hash = None if flags is None else hash_of(self._rounds.flags)

    def wait_for_begin(self) -> None:
        """Waits until all ranks have begun this pass, unless its key was predicted."""
        if self._pass is not None:
            self._wait_for_begin()

    def _wait_for_begin(self) -> Pass:
        """As `wait_for_begin`, before an event; opens a pass without a key if none is open."""
        one = self._pass
        if one is None:
            one = self._pass = Pass(None)
        if one.is_begun:
            return one
        assert one.pending is not None
        name = "the beginning of a pass"
        tally, _ = self._rounds.wait(one.pending, name)
        while tally.request < self.requests.begin:
            self._execute(tally)
            tally = self._run_round(self.requests.begin, one.key, name)
        self._record(tally)
        one.is_begun = True
        one.log.clear()  # of a pass that failed on this rank first, and on others later
        one.has_logged_backward = False
        if not tally.is_same("key"):
            one.key = None
        if one.is_recorded:
            one.schedule = self._recorded.schedule_of(one.key)
        return one

    def begin_backward(
        self, flags: Sequence[bool], kind: str, reduction_order: Sequence[int]
    ) -> None:
        """Begins a backward, and a new pass if none with these flags is open. Collective.

        Args:
            flags: `requires_grad` of the parameters.
            kind: Kind of the new pass.
            reduction_order: Buckets to reduce, in order, if there is no schedule; the same on every
                rank.
        """
        if not self.is_training or bytes(flags) != self._rounds.flags:
            self.begin(kind, flags)
        one = self._pass
        assert one is not None
        if not one.reduction_order:
            one.reduction_order = list(reduction_order)
        if not self._has_units and one.schedule is None:
            one.schedule, one.is_recorded = tuple(map(self._reduction, reduction_order)), False
        elif not one.in_backward:
            self._advance_past(one, self._backward_event)
        one.in_backward = True

    def finalize_backward(self, mask: Callable[[], bytes], finish: Callable[[], None]) -> bytes:
        """Ends a backward with a boundary; `conclude_backward` follows. Collective.

        Args:
            mask: Returns what this rank has touched; called when all possible events are issued.
            finish: Called while the round is in flight.

        Returns:
            What any rank has touched.
        """
        self._finish_pass()
        vote, name = self._vote(self.requests.done, None), "the end of the backward on all ranks"
        pending = self._rounds.begin(vote, mask(), is_awaited=True)
        finish()
        tally, touched = self._rounds.wait(pending, name)
        while True:
            self._execute(tally)
            if tally.request >= self.requests.done:
                break
            vote = self._vote(self.requests.done, None)
            tally, touched = self._rounds.run_round(vote, name, mask())
        self._received_stop_request, self._num_boundaries = tally.stop_request, 0
        self._result = tally
        return touched

    def conclude_backward(self, *, is_complete: bool) -> None:
        """Records the pass, after `finalize_backward`.

        `is_complete`: all touched gradients had been reduced before; the same on every rank.
        """
        if not is_complete and self._ended is not None and self._ended.schedule is None:
            self._ended.key = None  # its log lacks the reductions that follow
        self._record(self._result, is_incomplete=not is_complete)

    def _finish_pass(self) -> None:
        """Issues the rest of the schedule, at the end of the pass on this rank."""
        if self._pass is None:
            return
        one = self._wait_for_begin()
        self._advance(one.num_scheduled)
        self._ended, self._pass = one, None

    def _record(self, tally: Tally, *, is_incomplete: bool = False) -> None:
        """Records the pass that a boundary has ended, the same on every rank."""
        one, self._ended = self._ended, None
        if one is not None:
            self._recorded.record(one, tally, is_incomplete=is_incomplete)

    # ---------------------------------------------------------------- events

    def _reduction(self, bucket: int) -> int:
        return self._backward_event + 1 + bucket

    def mark_used(self, unit: int, *, may_repeat: bool) -> None:
        """Notes that this rank uses `unit` now, and opens a pass if none is open.

        `may_repeat`: a unit that the pass has used, and that is not in the rest of its schedule,
        begins another pass, as each generated token does.
        """
        if self._pass is None:
            self._issuer.begin_pass()
        if self._pass is None:
            self._pass = Pass(None)  # a pass in which no other rank takes part
        if may_repeat and unit in self._pass.used and unit not in self._pass.upcoming():
            self.begin("another forward of a step")
        self._pass.used.add(unit)

    def request_unshard(self, unit: int, *, is_backward: bool) -> None:
        """Issues the all-gather of a unit that this rank needs now, or answers one round.

        The caller repeats it until the unit is unsharded.
        """
        one = self._wait_for_begin()
        if one.schedule is not None:
            if self._advance_past(one, unit, is_needed=True):
                return
            one.has_deviated = True
            self._advance(one.num_scheduled)
        request = 2 * self._num - 1 - unit if is_backward else unit
        tally = self._run_round(request, None, f"the all-gather of unit {unit}")
        self._execute(tally, is_kept=True)

    def mark_ready(self, bucket: int) -> None:
        """Notes that `bucket` has all its gradients; it is reduced after those before it."""
        one = self._wait_for_begin()
        one.ready.add(bucket)
        self._reduce_ready(one)

    def _reduce_ready(self, one: Pass) -> None:
        """Issues reductions that are next in the schedule and ready."""
        while (event := one.next) is not None and event - self._backward_event - 1 in one.ready:
            self._advance(one.cursor + 1)

    @property
    def next_unit(self) -> int | None:
        """The unit whose all-gather is the next event of the schedule; None: not an all-gather."""
        event = None if self._pass is None else self._pass.next
        return None if event is None or event >= self._backward_event else event

    def prefetch(self) -> None:
        """Issues the all-gather of `next_unit`, which this rank will need."""
        one = self._wait_for_begin()
        self._advance(one.cursor + 1, is_needed=True)
        self._reduce_ready(one)

    def upcoming(self) -> Iterator[int]:
        """Units that the schedule has still to unshard."""
        if self._pass is not None:
            yield from (event for event in self._pass.upcoming() if event < self._backward_event)

    def is_last_of_forward(self, unit: int) -> bool:
        """Whether forward unsharded `unit` last: backward begins with it, so it can stay so."""
        one = self._pass
        if one is None or one.schedule is None or one.in_backward:
            return False
        if one.next != self._backward_event:
            return False
        units = (e for e in reversed(one.schedule[: one.cursor]) if e < self._backward_event)
        return next(units, None) == unit

    def _advance_past(self, one: Pass, event: int, *, is_needed: bool = False) -> bool:
        """Issues the schedule up to `event`, included, if it is still to come."""
        if one.schedule is None or event not in one.upcoming():
            return False
        self._advance(one.schedule.index(event, one.cursor) + 1, is_needed=is_needed)
        return True

    def _advance(self, stop: int, *, is_needed: bool = False) -> None:
        """Issues the schedule up to index `stop`; `is_needed`: its last event is needed now."""
        one = self._wait_for_begin()
        while one.schedule is not None and one.cursor < stop:
            event = one.schedule[one.cursor]
            one.cursor += 1
            is_kept = is_needed and one.cursor == stop
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

    def _execute(self, tally: Tally, *, is_kept: bool = False) -> None:
        """Issues what a round decided: reductions that all are ready for, then the all-gather."""
        one, lowest, num_ready = self._ended or self._pass, tally.request, tally.lowest.num_ready
        is_unit = lowest < self.requests.begin
        if one is not None and one.schedule is None:
            is_backward = (is_unit and lowest >= self._num) or num_ready
            if is_backward and not one.has_logged_backward:
                one.log.append(self._backward_event)  # where all ranks have begun backward
                one.has_logged_backward = True
            while len(one.reduced) < min(num_ready, len(one.reduction_order)):
                self._issue(self._reduction(one.reduction_order[len(one.reduced)]))
        if is_unit:
            unit = lowest if lowest < self._num else 2 * self._num - 1 - lowest
            self._issue(unit, is_kept=is_kept)

    # ---------------------------------------------------------------- boundaries

    def serve_until(self, request: int, name: str) -> None:
        """Takes part in what other ranks request, until no rank is before `request`."""
        call_hash = hash_of(name) if request == self.requests.barrier else None
        self._rounds.current_call = ""
        if call_hash is not None:
            self._rounds.current_call = f"reached {name}, {called_from()}"
        one, rest = self._pass, None
        if one is not None and one.is_training and call_hash is not None:
            rest = Pass(hash_of(one.key or 0, call_hash), is_training=True)  # after the barrier
            rest.in_backward, rest.ready = one.in_backward, one.ready
        self._finish_pass()
        while True:
            tally = self._run_round(request, call_hash, name)
            self._execute(tally)
            if tally.request < self.requests.begin:
                continue
            self._record(tally)
            if tally.request >= request:
                break
            if tally.request == self.requests.begin:  # others begin a pass: follow it
                key = tally.lowest.key if tally.is_same("key") else None
                self._pass = Pass(key, schedule=self._recorded.schedule_of(key))
                self._finish_pass()
        self._rounds.current_call = ""
        if call_hash is not None:
            self._history = hash_of(self._history, call_hash)
        if rest is not None and one is not None:
            rest.schedule = self._recorded.schedule_of(rest.key)
            reduced = one.reduced
            rest.reduction_order = [b for b in one.reduction_order if b not in reduced]
            self._pass = rest
        self._received_stop_request = tally.stop_request

    @property
    def expects_collectives(self) -> bool:
        """Whether to watch for collectives of the user's in this pass; the same on every rank.

        A schedule is trusted if no pass has had one.
        """
        one = self._pass
        if one is None or not self._has_units:
            return False
        return self._has_collectives or not one.is_begun or one.schedule is None

    def barrier_before_collective(self, name: str) -> None:
        """As `barrier`, before a collective of the user's within a pass."""
        self._has_collectives = True
        self.serve_until(self.requests.barrier, name)

    def close_pass(self, name: str) -> None:
        """Runs `barrier` and ends the pass if one is open. Collective.

        Called before collectives that are not part of a pass.
        """
        if self._pass is not None or self._ended is not None:
            self.serve_until(self.requests.barrier, name)
            self._pass = None

    def announce_collective(self, name: str) -> None:
        """As `barrier`, before a collective of all ranks; does not wait if no pass is open."""
        if not self._is_synchronized:
            self.serve_until(self.requests.barrier, name)
            return
        call_hash = hash_of(name)
        self._rounds.current_call = f"reached {name}, {called_from()}"
        self._rounds.begin(self._vote(self.requests.barrier, call_hash), is_awaited=False)
        self._rounds.current_call = ""
        self._history = hash_of(self._history, call_hash)

    def note_write(self, name: str) -> None:
        """As `note`: all ranks write to their shards of parameter `name`. Local."""
        self.note(f"write to {name}")
        self._rounds.num_writes += 1
        self._rounds.last_write = f"wrote to parameter {name}, {called_from()}"

    def note(self, name: str) -> None:
        """Adds the call `name` of all ranks to their history, which rounds compare. Local."""
        self._history = hash_of(self._history, name)

    def pass_boundary(self, name: str) -> int | None:
        """Returns, between two batches, the lowest stop request that the last boundary carried.

        Collective. Runs a round if there has been none for several batches.
        """
        self._num_boundaries += 1
        is_recent = self._is_synchronized and self._num_boundaries <= _MAX_BOUNDARIES
        if self._control_plane.size > 1 and is_recent:
            self.note(name)
        else:
            self.serve_until(self.requests.barrier, name)
            self._num_boundaries = 0
        stop_request, self._received_stop_request = self._received_stop_request, None
        return stop_request

    def barrier(self, name: str) -> int | None:
        """Waits until all ranks have entered call `name`; returns their lowest stop request.

        Collective. Until then this rank serves the requests of the others.
        """
        self.serve_until(self.requests.barrier, name)
        return self._received_stop_request

    # ---------------------------------------------------------------- rounds

    def _vote(self, request: int, key: int | None) -> Vote:
        one = self._ended or self._pass
        num_ready = 0
        if one is not None:
            is_all = one.schedule is not None or request >= self.requests.done
            num_ready = len(one.reduction_order) if is_all else one.num_ready
        is_compared = self.requests.begin <= request <= self.requests.done
        is_compared = is_compared and not self.allows_uneven_calls
        return Vote(
            request,
            key,
            num_ready,
            self._flags_hash if is_compared else None,
            self._history if is_compared else None,
            self.stop_request(),
            has_deviated=one is not None and one.has_deviated,
            has_unused_gathers=one is not None and one.has_unused_gathers,
            allows_uneven_calls=self.allows_uneven_calls,
            failed=self._control_plane.size,
        )

    def _run_round(self, request: int, key: int | None, name: str) -> Tally:
        return self._rounds.run_round(self._vote(request, key), name)[0]


class PrefetchUnit(Protocol):
    """Part of a unit that `prefetch` uses."""

    numel: int  # of all its sharded buckets, padding included
    stays_unsharded: bool  # until the end of the step, as the root does


def prefetch(
    order: CollectiveOrder,
    units: Sequence[PrefetchUnit],
    unsharded: Collection[PrefetchUnit],
    config: ZeroConfig,
    num_prefetched: int,
) -> None:
    """Unshards the next units of the schedule, as far as the settings allow.

    The engine and the planner share these rules.

    Args:
        order: Decides which unit comes next.
        units: All units, by number.
        unsharded: Units that are unsharded, or whose all-gather is in flight.
        config: Settings of the engine.
        num_prefetched: Elements that have been unsharded before their use.
    """
    if not config.overlap_comm:
        return
    budget, limit = config.prefetch_bucket_size, config.max_live_parameters
    while (index := order.next_unit) is not None:
        unit = units[index]
        num_prefetched += unit.numel
        if unit in unsharded:
            return  # it may be in use, and be used once more
        if budget is None and len([one for one in unsharded if not one.stays_unsharded]) > 1:
            return  # at most one is prefetched
        if budget is not None and num_prefetched > budget:
            return
        if limit is not None and sum([one.numel for one in unsharded]) + unit.numel > limit:
            return
        order.prefetch()
