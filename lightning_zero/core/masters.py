"""The masters of one bucket, as others than its own step see them: read, loaded, shown, stepped.

A shadow (shadow.py) answers the same questions, so that `gathered`, `torch.equal` and checkpoints
need not know which of the two they look at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.guarded import unguard
from lightning_zero.tensors.lazy import StoredTensor
from lightning_zero.tiers import Home

if TYPE_CHECKING:
    from lightning_zero.core.bucket import Bucket

__all__ = ["Masters"]


class Masters:
    """All elements of one bucket in full precision, this rank's or whole.

    Where there is no master, these are the parameters themselves.

    Args:
        bucket: Has its shards.

    Attributes:
        plan: Of the bucket.
        is_shown: The parameters point at what `show` was given, to be written to.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.is_shown = False
        self.plan = bucket.plan
        self._bucket = bucket
        self._shards = bucket.shards
        self._stepped: Tensor | None = None  # 1-D, own part, master dtype; inside a step

    # ---------------------------------------------------------------- this rank's elements

    def exact(self) -> Tensor:
        """The elements that this rank steps, in the fullest precision there is: 1-D. Local.

        A view of memory, a copy of a file.
        """
        home = self._home()
        return home.fetch(0, home.numel)

    def exact_parts(self) -> list[Tensor]:
        """By slot, the elements `owned(index)` in full precision: 1-D, to be read before a step.

        Views of memory, or StoredTensors where the shard rests in a file. Local, but for a gather
        under way, which is waited for.
        """
        home = self._home()
        parts = [self._shards.own_range(index) for index in range(len(self._bucket.parameters))]
        return [home.look(part.start, part.stop) for part in parts]

    def _home(self) -> Home:
        self._bucket.wait_for_all_steps()
        self._bucket.finish_gather()
        self._bucket.absorb_changes()
        return self._shards.exact

    def load(self, read: Callable[[int, range], Tensor | None]) -> None:
        """Takes new values for masters and parameters, each rank its own elements. Collective.

        Args:
            read: Given a slot and the elements `owned` of it, returns those, in any floating dtype,
                or None to leave the slot as it is. The same slots on every rank.
        """
        exact = self.exact()
        with torch.no_grad():
            for index, part in enumerate(self._shards.cut(exact)):
                values = read(index, self._bucket.owned(index))
                if values is not None:
                    part.copy_(values.reshape(-1))
            self.store(exact)

    def store(self, exact: Tensor) -> None:
        """Takes what has become of `exact()`; parameters follow, whole ones too. Collective."""
        bucket = self._bucket
        bucket.wait_for_sent()
        bucket.prints = None
        with torch.no_grad():
            self._shards.store_exact(exact)
            bucket.release()  # ranks may differ in what a forward has left whole
            if bucket.is_whole and not bucket.steps_whole:
                bucket.send_shard().wait()

    # ---------------------------------------------------------------- whole

    def exact_views(self) -> list[Tensor]:
        """By slot, all elements in full precision, n-D, to be read at once. Collective."""
        bucket = self._bucket
        bucket.finish_gather()
        bucket.absorb_changes()
        is_exact = self._shards.master is None or not self._shards.has_own_master
        if is_exact and bucket.is_whole:
            return bucket.whole.views
        return self.gather_whole().views

    def gather_whole(self) -> FlatBuffer:
        """A new buffer with all elements in full precision, on every rank. Collective; waits."""
        return self.gather_parts(self.exact())

    def gather_parts(self, part: Tensor) -> FlatBuffer:
        """A new buffer from every rank's `part`: 1-D and laid out as the master. Collective."""
        bucket = self._bucket
        bucket.wait_for_all_steps()  # their gathers and this one must have one order on all ranks
        with torch.no_grad():
            exact = FlatBuffer(self.plan.layout, part.dtype, bucket.device)
            if bucket.steps_whole:
                exact.tensor.copy_(part)
            else:
                exact.shard(bucket.comm.mesh.shard_rank).copy_(part)
                bucket.gather_in_place(exact.tensor).wait()
        return exact

    def join_state(self, slices: Sequence[Tensor | None]) -> list[Tensor]:
        """By slot, whole n-D optimizer states from every rank's slices. Collective.

        The inverse of slicing.

        Args:
            slices: By slot, 1-D as `slice_state` made them; None counts as zeros.
        """
        bucket, layout = self._bucket, self.plan.layout
        dtype = next((part.dtype for part in slices if part is not None), self.plan.master_dtype)
        own = layout.numel if bucket.steps_whole else len(layout.shard(bucket.comm.mesh.shard_rank))
        joined = torch.zeros(own, dtype=dtype, device=bucket.device)
        for target, part in zip(self._shards.cut(joined), slices, strict=True):
            if part is not None:
                target.copy_(part.reshape(-1))
        return self.gather_parts(joined).views

    def accept(self, exact: FlatBuffer, from_rank: int = 0) -> None:
        """Takes one rank's values of `exact` into all masters and parameters. Collective."""
        bucket = self._bucket
        bucket.prints = None
        bucket.comm.broadcast_(exact.tensor, from_rank)
        with torch.no_grad():
            own = exact.tensor if bucket.steps_whole else exact.shard(bucket.comm.mesh.shard_rank)
            bucket.wait_for_sent()
            self._shards.store_exact(own)
            if bucket.whole.is_allocated:
                bucket.whole.tensor.copy_(exact.tensor)
        self._shards.mark_written()

    # ---------------------------------------------------------------- shown

    def show(self, views: Sequence[Tensor]) -> None:
        """Points the parameters at `views`, by slot, plain, until `hide`."""
        self._bucket.finish_gather()
        self._bucket.pins += 1
        self.is_shown = True
        for parameter, view in zip(self._bucket.parameters, views, strict=True):
            unguard(parameter)
            parameter.data = view

    def show_own(self) -> Tensor:
        """Points the parameters at this rank's elements in full precision, 1-D, until `hide`.

        Returns:
            `exact()`, of which those are parts. Where they are written to, `store` must follow.
        """
        exact = self.exact()
        self._bucket.wait_for_sent()
        self.show(self._shards.cut(exact))
        return exact

    def hide(self) -> None:
        """Points the parameters back to where they were before `show`."""
        self._bucket.pins -= 1
        self.is_shown = False
        self._bucket.point_back()

    # ---------------------------------------------------------------- stepped all at once

    def enter_step(self, *, has_grads: bool = True) -> None:
        """Points parameters at their masters and `.grad` at their reduced gradients, if wanted.

        For optimizers that step all slices in one call: a master that rests in a file is in memory
        until `leave_step`.
        """
        bucket = self._bucket
        bucket.finish_gather()
        bucket.absorb_changes()
        bucket.prints = None
        grads: list[Tensor | None] = [None] * len(bucket.parameters)
        if has_grads:
            grads = bucket.grads.fetch_all(self.plan.master_dtype)
        bucket.wait_for_sent()
        master = self._shards.stepped()
        self._stepped = master.fetch(0, master.numel)
        bucket.point_at_masters(self._shards.cut(self._stepped))
        for index, (parameter, grad) in enumerate(zip(bucket.parameters, grads, strict=True)):
            if grad is not None and self._shards.is_stepped(index):
                grad = grad.read() if isinstance(grad, StoredTensor) else grad
                parameter.grad = grad.to(self._stepped.device).view(parameter.data.shape)

    def leave_step(self, *, is_changed: bool) -> None:
        """Points everything back, casts changed masters to parameters and issues their gather."""
        bucket = self._bucket
        for parameter in bucket.parameters:
            parameter.grad = None
        if is_changed and self._stepped is not None:
            self._shards.store_exact(self._stepped)
        self._stepped = None
        bucket.point_at_rest()
        bucket.grads.show()
        if is_changed and self.plan.stage.gathers_after_step:
            bucket.mark_in_flight()
            bucket.end_step()
