"""What is gathered and released together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_zero.core.bucket import Bucket
from lightning_zero.layout.plan import UnitPlan

__all__ = ["Call", "Unit"]


class Call:
    """One forward of a unit.

    Attributes:
        is_done: Backward has left it.
    """

    def __init__(self) -> None:
        self.is_done = False


class Unit:
    """Buckets that are gathered before a module's forward and released after it.

    Attributes:
        index: Position in the layout; the root is 0.
        module: Whose forward uses the parameters; None for the root.
        buckets: The buckets whose parameters rest as shards.
        is_held: Stays whole until the end of the step: the root, and what is used out of turn.
        num_awaited: Forwards whose inputs, when their gradients come, tell that backward is done.
        calls: The forwards under way.
        entered: The forwards that backward has entered and, as far as can be told, not left.
    """

    is_whole: bool  # all elements are at hand or on their way

    def __init__(self, plan: UnitPlan, index: int, buckets: Sequence[Bucket]) -> None:
        self.name = plan.name
        self.index = index
        self.buckets = [bucket for bucket in buckets if bucket.is_gathered_before_use]
        self.numel = sum(bucket.plan.layout.numel for bucket in self.buckets)
        self.is_held = index == 0
        self.num_awaited = 0
        self.calls: list[Call] = []
        self.entered: set[Call] = set()
        self.module: nn.Module | None = None
        self._num_whole = sum(bucket.is_whole for bucket in self.buckets)
        self.is_whole = self._num_whole == len(self.buckets)
        self._whole_units: set[Unit] = set()
        for bucket in self.buckets:
            bucket.tell(self._count)

    def join(self, whole_units: set[Unit]) -> None:
        """Keeps `whole_units` right as to this one, if it has buckets."""
        self._whole_units = whole_units
        if self.is_whole and self.buckets:
            whole_units.add(self)

    def _count(self, is_whole: bool) -> None:
        self._num_whole += 1 if is_whole else -1
        self.is_whole = self._num_whole == len(self.buckets)
        change = self._whole_units.add if self.is_whole else self._whole_units.discard
        change(self)

    @property
    def has_all_grads(self) -> bool:
        """Every parameter is trainable and has its gradient: nothing in backward needs the unit."""
        return all(
            bucket.grads.has_all and all(p.requires_grad for p in bucket.parameters)
            for bucket in self.buckets
        )

    def owns(self, tensor: Tensor) -> bool:
        """`tensor` is a view of whole parameters, which are freed on release."""
        return any(bucket.owns(tensor) for bucket in self.buckets)

    def gather(self) -> None:
        """Issues the gathers."""
        for bucket in self.buckets:
            bucket.gather()

    def finish_gather(self) -> None:
        """Waits for them."""
        for bucket in self.buckets:
            bucket.finish_gather()

    def release(self) -> None:
        """Frees the whole parameters."""
        for bucket in self.buckets:
            bucket.release()
