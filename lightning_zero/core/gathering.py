"""Gathers before use: which unit all ranks make whole next, and what is asked for ahead.

Ranks that train other parameters would reduce other buckets. So a mark of every `requires_grad`
travels with the agreements of a backward; where it has none, with one of its own, which is waited
for before the first reduction.

A request is one integer, of which the lowest of all ranks goes first:

    0 .. n-1       a unit, in forward by its place in the layout
    n .. 2n-1      a unit, in backward from the end of the layout on
    2n             `_waiting`: for a reduction that other ranks have not issued
    2n+1 .. 2n+3   `together`, `done`, `left`: for no unit any more

Why there are rounds at all is told in [Note: Same order on every rank] in schedule.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lightning_zero.comm.control import Control, Round, topic_of
from lightning_zero.comm.watchdog import RanksApartError
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.unit import Unit, UseOrder
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.record.recorder import Recorder

__all__ = ["Gathering", "Trainable", "Trained"]

Trainable = tuple[bool, ...]  # `requires_grad` of every parameter, in layout order


class Trained:
    """What is trainable on this rank, compared with the others by every agreement.

    Attributes:
        flags: In the last backward that has begun.
    """

    def __init__(self, buckets: Sequence[Bucket], control: Control) -> None:
        self.flags: Trainable = ()
        self._buckets = list(buckets)
        self._control = control
        self._mark: int | None = None  # of the flags, while they must be the same on all ranks
        self._under_way: Callable[[], Round] | None = None  # an agreement for the mark alone

    def look(self) -> None:
        """A backward begins."""
        with torch._C.DisableTorchFunctionSubclass():  # guarded ones would take their time
            flags = [p.requires_grad for bucket in self._buckets for p in bucket.parameters]
        self.flags = tuple(flags)

    def compare(self, request: int | None) -> None:
        """From now on, until `stop`, agreements compare.

        Args:
            request: Of an agreement that begins at once; None: others will come.
        """
        self._mark = hash(self.flags) >> 3
        if request is not None:
            self._under_way = self._control.begin_agreement(request, 0, self._mark)

    def agree(
        self,
        request: int,
        num_issued: int,
        *,
        name: str,
        topic: int | None = None,
        wish: int | None = None,
    ) -> Round:
        """See `Control.agree`.

        Raises:
            RuntimeError: Ranks train different parameters.
        """
        agreed = self._control.agree(
            request, num_issued, self._mark, topic=topic, wish=wish, name=name
        )
        self._check(agreed)
        return agreed

    def abort(self, error: Exception) -> None:
        """Tells the other ranks that this one is not where they are. Local."""
        self._control.watchdog.abort(error)

    def begin(self, request: int, name: str) -> Callable[[], Round]:
        """Begins an agreement that compares nothing; what it returns waits for the others."""
        return self._control.begin_agreement(request, name=name)

    def finish(self) -> None:
        """Waits for the agreement that `compare` has begun, if any; raises as `agree`."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._check(under_way())

    def stop(self) -> None:
        """Ranks need not be alike any more. Local."""
        self._mark = self._under_way = None

    def _check(self, agreed: Round) -> None:
        if agreed.is_alike:
            return
        everybody = self._control.gather_objects(self.flags if self._mark is not None else None)
        names = [slot.name for bucket in self._buckets for slot in bucket.plan.layout.slots]
        for name, *flags in zip(names, *(trained for trained in everybody if trained), strict=True):
            if len(set(flags)) > 1:
                raise RuntimeError(
                    f"requires_grad of parameter {name} differs by rank: {flags}, in the order of "
                    "ranks; freeze and unfreeze the same parameters on all ranks, between the same "
                    "two steps."
                )


_MOST_IN_VAIN = 10  # rounds that bring no rank further; each wait begins with one or two


class Gathering:
    """The units of one engine, whole and released in one order on every rank.

    Args:
        units: The root first.
        trained: Takes part in every agreement.
        recorder: Is told whether prefetches came in time.
        config: How far to ask ahead.

    Attributes:
        units: The root first.
        is_needed: Some rest as shards.
        is_mid_round: Ranks have agreed on a gather that this one has not issued yet.
        num_issued: Reductions that this rank has issued in this backward; each round tells it.
    """

    def __init__(
        self, units: Sequence[Unit], trained: Trained, recorder: Recorder, config: ZeroConfig
    ) -> None:
        self.units = list(units)
        self.is_needed = any(unit.buckets for unit in units)
        self.is_mid_round = False
        self.num_issued = 0
        self._num_issued_by_all = 0  # as far as the last round told
        self._num_in_vain = 0  # rounds since anything has come of one
        self._has_met = False  # this backward has had a round
        self._trained = trained
        self._recorder = recorder
        self._config = config
        self._forward, self._backward = UseOrder(), UseOrder()
        self._order = self._forward
        self._passing: Callable[[], Round] | None = None
        self._unclaimed: set[Unit] = set()  # gathered because another rank asked, or ahead of use
        self._whole: set[Unit] = set()
        for unit in units:
            unit.join(self._whole)
        self._reads_files = any(b.shards.reader is not None for u in units for b in u.buckets)

    # ---------------------------------------------------------------- passes

    def begin_forward(self) -> None:
        """A forward begins, after which the next one is expected to be alike."""
        self._order = self._forward
        self._order.begin()

    def begin_backward(self) -> None:
        """Likewise a backward."""
        self._order = self._backward
        self._order.begin()
        self.num_issued = self._num_issued_by_all = 0
        self._has_met = False

    def end_backward(self) -> None:
        """Nothing stays whole. Local."""
        self.forget()
        self.release_all()

    def forget(self) -> None:
        """What was under way has ended, or never will. Local."""
        self._order = self._forward
        self._passing = None
        self._unclaimed.clear()
        self.num_issued = 0
        self.is_mid_round = False
        for unit in self.units:
            unit.num_awaited = 0
            unit.entered.clear()

    @property
    def is_at_end_of_forward(self) -> bool:
        """Backward begins with the unit that forward asked for last."""
        return self._forward.is_at_end

    # ---------------------------------------------------------------- whole units

    def unshard_held(self) -> None:
        """Makes those whole that stay so throughout a step."""
        for unit in self.units:
            if unit.is_held:
                self.unshard(unit)

    def unshard(self, unit: Unit) -> None:
        """Makes `unit` whole, then asks ahead for what followed it last time."""
        if not unit.buckets:
            return
        self._order.record(unit, may_repeat=not torch.is_grad_enabled())
        self._drop_unclaimed(unit)
        if unit in self._unclaimed or not unit.is_whole:
            self._recorder.count(is_hit=unit.is_whole)
        while not unit.is_whole:
            self._gather_next(unit)
        self._unclaimed.discard(unit)
        unit.finish_gather()
        self.prefetch()

    def prefetch(self) -> None:
        """Asks for what comes next, as far as the settings allow."""
        self._gather_ahead()
        self._read_ahead()

    def _gather_ahead(self) -> None:
        if not self._config.overlap_comm:
            return
        budget = self._config.prefetch_bucket_size
        if budget is None:
            unit = self._order.following
            if unit is not None and self._num_whole() < 2:
                self._gather_if_room(unit)
            return
        ahead = 0
        for unit in self._order.upcoming():
            ahead += unit.numel
            if ahead > budget or not self._gather_if_room(unit):
                return

    def _gather_if_room(self, unit: Unit) -> bool:
        """Makes `unit` whole, or returns False: there would be too many elements."""
        if unit.is_whole:
            return True
        limit = self._config.max_live_parameters
        if limit is not None and sum(u.numel for u in self._whole) + unit.numel > limit:
            return False
        self._gather_next(unit)
        return True

    def _read_ahead(self) -> None:
        """Begins to read shards that rest in files, as far ahead as there are buffers."""
        if not self._reads_files:
            return
        for unit in self._order.upcoming():
            if not all(bucket.read_ahead() for bucket in unit.buckets):
                return

    def _num_whole(self) -> int:
        """Units that are whole for their own use, not for the whole step."""
        return len([unit for unit in self._whole if not unit.is_held])

    def _drop_unclaimed(self, wanted: Unit | None) -> None:
        """Frees what was gathered for other ranks, or ahead in vain."""
        following = self._order.following
        for unit in [u for u in self._unclaimed if u is not wanted and u is not following]:
            self._unclaimed.discard(unit)
            unit.release()

    def release_all(self) -> None:
        """Frees whole parameters, also those that were gathered for other ranks. Local."""
        self._unclaimed.clear()
        for unit in self.units:
            unit.release()

    # ---------------------------------------------------------------- rounds

    @property
    def _waiting(self) -> int:
        """The request of a rank that waits for a reduction: no unit, but not done."""
        return 2 * len(self.units)

    @property
    def together(self) -> int:
        """The request of a rank that wants something which all ranks do together."""
        return 2 * len(self.units) + 1

    @property
    def done(self) -> int:
        """The request of a rank that has ended its step, or its backward."""
        return 2 * len(self.units) + 2

    @property
    def left(self) -> int:
        """The request of a rank that has left a lockstep loop of steps."""
        return 2 * len(self.units) + 3

    def _gather_next(self, wanted: Unit) -> None:
        """One round in which this rank asks for `wanted`."""
        # Backward comes after forward, and walks the layout from its end.
        last = 2 * len(self.units) - 1
        is_backward = self._order is self._backward
        request = last - wanted.index if is_backward else wanted.index
        self._round(request, f"the gather of {wanted.name}")

    def _round(
        self, request: int, name: str, *, topic: int | None = None, wish: int | None = None
    ) -> Round:
        """Every rank gathers the unit that the lowest request names.

        Args:
            request: Of this rank.
            name: What it waits for, to be read by people.
            topic: See `Control.agree`.
            wish: Likewise.
        """
        agreed = self._trained.agree(request, self.num_issued, name=name, topic=topic, wish=wish)
        count, lowest = len(self.units), agreed.lowest
        is_waiting = lowest == self._waiting and agreed.fewest == self._num_issued_by_all
        self._num_in_vain = self._num_in_vain + 1 if is_waiting else 0
        self._num_issued_by_all = agreed.fewest
        self._has_met = True
        if lowest < 2 * count:
            unit = self.units[lowest if lowest < count else 2 * count - 1 - lowest]
            if not unit.is_whole:
                self._unclaimed.add(unit)
            self.is_mid_round = True
            unit.gather()
            self.is_mid_round = False
        elif self._num_in_vain > _MOST_IN_VAIN:
            raise self._give_up(name if request == self.together else None)
        elif lowest == self.together and (lowest < agreed.highest or not agreed.is_same_topic):
            raise self._give_up(name)
        return agreed

    def _give_up(self, name: str | None) -> RuntimeError:
        """The other ranks are elsewhere, and may wait for this one: they are told.

        Args:
            name: Of what this rank has come to; None: it waits in its backward.
        """
        error = _waits_in_vain() if name is None else _is_alone(name)
        self._trained.abort(error)
        return error

    def meet(self, request: int, name: str = "the end of the pass on all ranks") -> None:
        """Takes part in what other ranks still ask for, until none asks for less than `request`.

        Raises:
            RuntimeError: A rank wants a collective that others will not take part in.
        """
        while self._round(request, name).lowest < request:
            self._drop_unclaimed(None)

    def meet_for(self, name: str, wish: int | None = None) -> int | None:
        """As `meet`, before something that all ranks do together: the lowest wish of any rank.

        Args:
            name: What that is: the same on every rank.
            wish: Of this rank, if it has one; of less than 62 bits.

        Raises:
            RuntimeError: Another rank has come to something else.
        """
        topic = topic_of(name)
        while True:
            agreed = self._round(self.together, name, topic=topic, wish=wish)
            if agreed.lowest == self.together:
                return agreed.wish
            self._drop_unclaimed(None)

    def pass_by(self, name: str) -> None:
        """Tells ranks that wait for this one elsewhere that it comes to something else.

        Where units are gathered before use, the next forward does. Waits for nobody. Collective.
        """
        if not self.is_needed:
            self.finish_passing()
            self._passing = self._trained.begin(self.done, name)

    def finish_passing(self) -> None:
        """Waits until all ranks have passed by, as they long have."""
        passing, self._passing = self._passing, None
        if passing is not None and (agreed := passing()).lowest < agreed.highest:
            raise self._give_up("a step of the optimizer")

    def meet_and_release(self) -> None:
        """After a forward without backward: nothing stays whole. Collective."""
        if self.is_needed:
            self.meet(self.done)
            self.release_all()

    def meet_once(self) -> None:
        """Before a reduction: ranks that train different parameters must have found it out.

        A round of this rank's own is enough: in it are the marks of all that reduce in this
        backward, which none of them can have left.
        """
        if self.is_needed and not self._has_met:
            self._round(self._waiting, "a comparison of what is trained")
            self._drop_unclaimed(None)

    def wait_until_issued(self) -> None:
        """Takes part until every rank has issued the reductions that this one has."""
        while self._num_issued_by_all < self.num_issued:
            self._round(self._waiting, "a reduction that all ranks issue")
            self._drop_unclaimed(None)


def _waits_in_vain() -> RanksApartError:
    return RanksApartError(
        "a rank waits in its backward for gradients that another does not reduce: run equally many "
        "backwards on every rank, and the same collectives in each."
    )


def _is_alone(name: str) -> RanksApartError:
    return RanksApartError(
        f"this rank has come to {name}, and another rank to something else: it has fewer or more "
        "batches, runs a forward or backward more, or makes other calls (trainer.log_dir, "
        "self.all_gather, self.log(..., sync_dist=True), p.grad.norm() of sharded gradients). "
        "Give all ranks equally many batches, as Lightning's own sampler does, and let all make "
        "the same calls in the same order: not `if rank == 0`; or, for forwards without gradients, "
        "enter `with lightning_zero.lockstep(module)` on every rank."
    )
