"""The collective order: which all-gather or reduction comes next, agreed on by all ranks.

[Note: Collective order] Every rank issues the same all-gathers and reductions, its *events*, in the
same order. No rank decides an event alone. A *pass* is the work between two boundaries: in training
a forward with its backward, otherwise a forward. Its *key* is its kind and the parameters that
train.

* A pass without a schedule is *negotiated*. A rank that needs a unit requests it in a round
  (comm/rounds.py). The lowest request of all ranks comes first, and every rank issues its
  all-gather. The round also carries how many reductions, in `reduction_order`, every rank is ready
  for; all ranks then issue these. A rank that has ended its pass answers until all have. So rounds
  decide all events, and every rank logs the same ones.
* Its log becomes the *recorded schedule* of its key, with all-gathers moved ahead of reductions
  (`hoist_all_gathers` in passes.py). A log that lacks reductions is not recorded: the ranks did not
  know in advance which gradients there would be. The next pass with this key has no rounds between
  its boundaries: every rank replays the schedule. It issues an event when it needs it, is ready for
  it, or needs a later one.
* A rank that needs a unit which is not in the rest of its schedule issues that rest, with the
  available gradients, and then requests the unit. The other ranks answer at the end of their pass.
  Gradients that come after their reduction are *late*: they are reduced once more, after the end.
  Before its own backward such a rank reduces zeros; what the other ranks contributed is kept
  separate from `.grad`, which users may zero, until the rank enters its backward. A schedule that
  does not match two passes in a row is dropped: a rank requests a unit, gradients are late, or no
  rank uses a unit that all have unsharded. A unit that some ranks use, as an expert, stays in it.

Why this does not deadlock:

1. In a pass with a schedule all ranks issue its events in order, and all of them before they enter
   any round that they wait for. In a pass without one all ranks issue what a round decided before
   they enter the next round.
2. A rank waits only for the data of events that it has issued itself. So of all ranks that wait for
   data, the one that has issued the fewest events waits for an event that all have issued, which
   completes. A collective of the user's comes after a round that all ranks have entered, so a rank
   that waits in it has issued as many events as all others.
3. A rank waits for a round only when it has issued all events before that round. A rank that has
   not entered the round computes, or waits for data, which arrives by 2.
4. Whether a pass has a schedule follows from its key and from the results of rounds, which are the
   same on all ranks. Key and the history of calls are compared in the round that begins the pass.
   A rank waits for this round before its first event, with two conditions under which it need not:
   no other rank can still request units of the pass before, and the last training pass had this key
   and a schedule. So all ranks that do not wait follow the same schedule. A rank with another key
   waits, and the mismatch ends the waits of all ranks with an error.

An average over replicas is no event: it follows its reduction, before the next one is sent.

A rank changes what others may still all-gather only when their pass has ended, too: an optimizer
step and a write to `parameter.data` first close an open pass with a round (`close_pass`).

A boundary is a round in which no rank requests a unit any more. Such rounds also carry the units
that any rank has used, the gradients that any rank has touched, stop requests, and hashes of the
trainable parameters and of all calls that the ranks have made; a mismatch of these hashes is an
error on all ranks.

Where uneven calls are allowed, ranks leave one after the other (core/lockstep.py). A rank that has
left takes part in the passes of the others in the same way: it issues their schedules, or answers.
It has no gradients, so all ranks begin a backward together (`barrier`), or all get an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lightning_zero.comm.control import GlooControlPlane
from lightning_zero.comm.rounds import (
    Request,
    RequestKind,
    RoundClient,
    Tally,
    Vote,
)
from lightning_zero.core.passes import Events, Pass, RecordedSchedules, hash_of

__all__ = ["CollectiveOrder", "Issuer"]

_MAX_BOUNDARIES = 8  # between batches, without a round


class Issuer(Protocol):
    """Issues the collectives that the order decides on."""

    def issue_unshard(self, unit: int, *, is_kept: bool) -> None:
        """Issues the all-gather of a unit; `is_kept`: it stays unsharded until its use."""

    def issue_reduction(self, bucket: int) -> None:
        """Issues the reduction of a bucket, with the available gradients."""


class CollectiveOrder:
    """Decides the next event of this rank. See [Note: Collective order].

    Args:
        control_plane: Carries the rounds.
        issuer: Issues the events.
        numels: Elements of each unit; 0 for one that is not sharded.
        num_buckets: Number of buckets that are reduced.
        names: Names of the parameters whose `requires_grad` are the flags of a pass.
        prefetch_numel: Elements to unshard before their use. None: one unit; 0: none.
        stop_request: Returns this rank's stop request, below 2^62, or None. The lowest of all ranks
            counts.

    Attributes:
        allows_uneven_calls: Whether ranks may leave one after the other.
        current: The open pass; None: none is open.
    """

    def __init__(
        self,
        control_plane: GlooControlPlane,
        issuer: Issuer,
        *,
        numels: Sequence[int],
        num_buckets: int,
        names: Sequence[str] = (),
        prefetch_numel: int | None = None,
        stop_request: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._control_plane = control_plane
        self._issuer = issuer
        self._events = Events(len(numels))
        self._has_units = any(numels)  # some units are sharded
        # Uses of units, flags of the buckets, of the parameters, two of the guard.
        num_bytes = self._events.num_uses + num_buckets + len(names) + 2
        self._rounds = RoundClient(control_plane, names, num_bytes)
        self._recorded = RecordedSchedules(list(numels), prefetch_numel)
        self._stop_request = stop_request
        self.allows_uneven_calls = False
        self._history = 0  # hash of all calls that all ranks have made
        self._received_stop_request: int | None = None
        self.current: Pass | None = None
        self._ended: Pass | None = None  # until the result of a boundary is known
        self._flags_hash: int | None = None
        self._num_boundaries = _MAX_BOUNDARIES  # between batches, since the end of a step

    def allow_uneven_calls(self, is_allowed: bool) -> None:
        """Sets `allows_uneven_calls`; the same on every rank. Local."""
        self.allows_uneven_calls = is_allowed

    # ---------------------------------------------------------------- passes

    @property
    def is_training(self) -> bool:
        """Whether the open pass has a backward."""
        return self.current is not None and self.current.is_training

    @property
    def _is_synchronized(self) -> bool:
        """Whether no rank is in a pass that this rank has ended."""
        return self.current is None and self._ended is None and not self.allows_uneven_calls

    def begin(self, kind: str, flags: Sequence[bool] | None = None) -> Pass:
        """Begins a pass, and returns it. Collective.

        Args:
            kind: Kind of the pass, the same on every rank.
            flags: `requires_grad` of the parameters; None: the pass has no backward.
        """
        is_synchronized = self._is_synchronized
        self._finish_pass()
        self._rounds.set_flags(bytes(flags or ()))
        self._flags_hash = None if flags is None else hash_of(bytes(flags))
        key = hash_of(kind, self._flags_hash)
        is_repeated = is_synchronized and self._recorded.is_repeated(key)
        vote, used = self._vote(Request(RequestKind.BEGIN), key), self._used()
        self.current = begun = Pass(
            self._events,
            key,
            is_training=flags is not None,
            is_uneven=self.allows_uneven_calls,
            schedule=self._recorded.schedule_of(key) if is_repeated else None,
            is_begun=is_repeated,
            pending=self._rounds.begin(vote, kind, used, is_awaited=not is_repeated),
        )
        return begun

    def wait_for_begin(self) -> Pass:
        """Waits until all ranks have begun the open pass, unless it repeats the last one.

        Returns:
            The open pass; a new one without a key if none was open.
        """
        current = self.current
        if current is None:
            current = self.current = Pass(self._events)
        if current.is_begun:
            return current
        assert current.pending is not None
        name = "the beginning of a pass"
        tally = self._rounds.wait(current.pending, name)
        while tally.request.kind < RequestKind.BEGIN:
            self._execute(tally)
            tally = self._run_round(Request(RequestKind.BEGIN), name, current.key)
        self._record(tally)
        key = current.key if tally.is_same("key") else None
        current.begin(key, self._recorded.schedule_of(key))
        return current

    def begin_backward(
        self, flags: Sequence[bool], kind: str, reduction_order: Sequence[int]
    ) -> None:
        """Begins a backward, and a new pass if none with these flags is open. Collective.

        Where uneven calls are allowed, all ranks begin it together.

        Args:
            flags: `requires_grad` of the parameters.
            kind: Kind of the new pass.
            reduction_order: Buckets to reduce, in order, if there is no schedule; the same on every
                rank.
        """
        if self.allows_uneven_calls:
            self.barrier(kind)  # a rank that has left has no gradients: all ranks get an error
        if not self.is_training or bytes(flags) != self._rounds.flags:
            self.begin(kind, flags)
        current = self.current
        assert current is not None
        if self._has_units and not current.in_backward:
            self._advance(current.stop_after(self._events.backward))
        current.begin_backward(reduction_order, has_units=self._has_units)

    def finalize_backward(self, mask: Callable[[], bytes], finish: Callable[[], None]) -> bytes:
        """Ends a backward with a boundary; `conclude_backward` follows. Collective.

        Args:
            mask: Returns what this rank has touched; called when all possible events are issued.
            finish: Called while the round is in flight.

        Returns:
            What any rank has touched.
        """
        self._finish_pass()
        request, name = Request(RequestKind.DONE), "the end of the backward on all ranks"
        sent = self._used() + mask()
        pending = self._rounds.begin(self._vote(request), name, sent, is_awaited=True)
        finish()
        tally = self._rounds.wait(pending, name)
        while tally.request.kind < RequestKind.DONE:
            self._execute(tally)
            sent = self._used() + mask()
            tally = self._rounds.run_round(self._vote(request), name, sent)
        self._execute(tally)
        self._received_stop_request, self._num_boundaries = tally.stop_request, 0
        self._result = tally
        return tally.mask[self._events.num_uses :]

    def conclude_backward(self, *, is_complete: bool) -> None:
        """Records the pass, after `finalize_backward`.

        `is_complete`: all touched gradients had been reduced before, in the order of the next
        backward; the same on every rank.
        """
        self._record(self._result, is_incomplete=not is_complete)

    def _finish_pass(self) -> None:
        """Issues the rest of the schedule, at the end of the pass on this rank."""
        if self.current is not None:
            current = self.wait_for_begin()
            self._advance(len(current.schedule or ()))
            self._ended, self.current = current, None

    def _record(self, tally: Tally, *, is_incomplete: bool = False) -> None:
        """Records the pass that a boundary has ended, the same on every rank."""
        current, self._ended = self._ended, None
        if current is not None:
            self._recorded.record(current, tally, is_incomplete=is_incomplete)

    # ---------------------------------------------------------------- events

    def mark_used(self, unit: int, *, may_repeat: bool) -> None:
        """Notes that this rank uses `unit` now, in an open pass.

        `may_repeat`: a unit that the pass has used, and that is not in the rest of its schedule,
        begins another pass, as each generated token does. Collective then, else local.
        """
        current = self.current
        assert current is not None, "a unit is used outside of a pass"
        is_again = may_repeat and current.used[unit]
        if is_again and current.stop_after(unit) == current.cursor:
            current = self.begin("another forward of a step")
        current.mark_used(unit)

    def request_unshard(self, unit: int, *, is_backward: bool) -> None:
        """Issues the all-gather of a unit that this rank needs now, in the schedule or by a round.

        The round may decide on another unit; the caller repeats it until the unit is unsharded.
        """
        current = self.wait_for_begin()
        if current.schedule is not None:
            if (stop := current.stop_after(unit)) > current.cursor:
                self._advance(stop, is_needed=True)
                return
            current.deviate()
            self._advance(len(current.schedule))
        kind = RequestKind.BACKWARD if is_backward else RequestKind.FORWARD
        tally = self._run_round(Request(kind, unit), f"the all-gather of unit {unit}")
        self._execute(tally, is_kept=True)

    def mark_ready(self, bucket: int) -> None:
        """Notes that `bucket` has all its gradients; it is reduced after those before it."""
        current = self.wait_for_begin()
        current.ready.add(bucket)
        self._advance(current.ready_stop)

    def issue_next_unit(self) -> None:
        """Issues the all-gather of `Pass.next_unit`, which this rank will need."""
        current = self.wait_for_begin()
        self._advance(current.cursor + 1, is_needed=True)
        if current.ready:
            self._advance(current.ready_stop)

    def is_last_of_forward(self, unit: int) -> bool:
        """Whether forward unsharded `unit` last: backward begins with it, so it can stay so."""
        return self.current is not None and self.current.is_last_of_forward(unit)

    def _advance(self, stop: int, *, is_needed: bool = False) -> None:
        """Issues the schedule up to index `stop`; `is_needed`: its last event is needed now."""
        current = self.current
        assert current is not None
        while current.cursor < stop and (event := current.take_next()) is not None:
            self._issue(event, is_kept=is_needed and current.cursor == stop)

    def _issue(self, event: int, *, is_kept: bool = False) -> None:
        """Issues an event, which the pass has logged."""
        if event < self._events.backward:
            self._issuer.issue_unshard(event, is_kept=is_kept)
        elif event > self._events.backward:
            self._issuer.issue_reduction(self._events.bucket(event))

    def _execute(self, tally: Tally, *, is_kept: bool = False) -> None:
        """Issues what a round decided: reductions that all are ready for, then the all-gather."""
        current, request, num_ready = (
            self._ended or self.current,
            tally.request,
            tally.lowest.num_ready,
        )
        is_unit = request.kind < RequestKind.BEGIN
        if current is not None and current.schedule is None:
            if request.kind is RequestKind.BACKWARD or num_ready:
                current.log_backward()
            while (event := current.take_reduction(num_ready)) is not None:
                self._issue(event)
        if is_unit:
            if current is not None:
                current.log.append(request.number)
            self._issue(request.number, is_kept=is_kept)

    # ---------------------------------------------------------------- boundaries

    def serve_until(self, kind: RequestKind, name: str) -> None:
        """Takes part in what other ranks request, until no rank is before request `kind`."""
        is_barrier = kind is RequestKind.BARRIER
        call_hash = hash_of(name) if is_barrier else None
        self._rounds.set_call(name if is_barrier else "")
        current = self.current
        self._finish_pass()
        while True:
            tally = self._run_round(Request(kind), name, call_hash)
            self._execute(tally)
            if tally.request.kind < RequestKind.BEGIN:
                continue
            self._record(tally)
            if tally.request.kind >= kind:
                break
            if tally.request.kind is RequestKind.BEGIN:  # others begin a pass: follow it
                key = tally.lowest.key if tally.is_same("key") else None
                schedule = self._recorded.schedule_of(key)
                self.current = Pass(self._events, key=key, is_uneven=True, schedule=schedule)
                self._finish_pass()
        self._rounds.set_call("")
        self._received_stop_request = tally.stop_request
        if is_barrier:
            self.note(name)
            if current is not None and current.is_training:
                key = None if current.key is None else hash_of(current.key, call_hash)
                self.current = current.rest(key, self._recorded.schedule_of(key))

    def close_pass(self, name: str) -> None:
        """Runs `barrier` and ends the pass if one is open. Collective.

        Called before collectives that are not part of a pass.
        """
        if self.current is not None or self._ended is not None:
            self.barrier(name)
            self.current = None

    def announce_collective(self, name: str) -> None:
        """As `barrier`, before a collective of all ranks; does not wait if no pass is open."""
        if not self._is_synchronized:
            self.barrier(name)
            return
        self._rounds.set_call(name)
        vote = self._vote(Request(RequestKind.BARRIER), hash_of(name))
        self._rounds.begin(vote, name, is_awaited=False)
        self._rounds.set_call("")
        self.note(name)

    def note_write(self, name: str) -> None:
        """As `note`: all ranks write to their shards of parameter `name`. Local."""
        self.note(f"write to {name}")
        self._rounds.note_write(name)

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
            self.barrier(name)
            self._num_boundaries = 0
        stop_request, self._received_stop_request = self._received_stop_request, None
        return stop_request

    def barrier(self, name: str) -> int | None:
        """Waits until all ranks have entered call `name`; returns their lowest stop request.

        Collective. Until then this rank serves the requests of the others.
        """
        self.serve_until(RequestKind.BARRIER, name)
        return self._received_stop_request

    # ---------------------------------------------------------------- rounds

    def _vote(self, request: Request, key: int | None = None) -> Vote:
        current = self._ended or self.current or Pass(self._events)
        is_all = current.schedule is not None or request.kind >= RequestKind.DONE
        is_boundary = RequestKind.BEGIN <= request.kind <= RequestKind.DONE
        is_compared = is_boundary and not self.allows_uneven_calls
        return Vote(
            request.pack(),
            key,
            len(current.reduction_order) if is_all else current.num_ready,
            self._flags_hash if is_compared else None,
            self._history if is_compared else None,
            self._stop_request(),
            current.has_deviated,
            self.allows_uneven_calls,
        )

    def _run_round(self, request: Request, name: str, key: int | None = None) -> Tally:
        is_boundary = request.kind >= RequestKind.BEGIN
        mask = self._used() if is_boundary else b""
        return self._rounds.run_round(self._vote(request, key), name, mask)

    def _used(self) -> bytes:
        """Units that this rank has used in the pass that it has ended: see `Pass.used`."""
        return bytes(self._events.num_uses if self._ended is None else self._ended.used)
