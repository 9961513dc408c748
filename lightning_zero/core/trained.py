"""What is trainable in a backward: the same on all ranks, or an error on all of them.

Ranks that train other parameters would reduce other buckets. So a mark of every `requires_grad`
travels with the agreements of a backward; where it has none, with one of its own, which is waited
for before the first reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lightning_zero.comm.control import Control, Round
from lightning_zero.core.bucket import Bucket

__all__ = ["Trainable", "Trained"]

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
            flags = (p.requires_grad for bucket in self._buckets for p in bucket.parameters)
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
