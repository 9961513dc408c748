"""The parameters of one bucket as their module has them: sharded, in flight or unsharded.

[Note: Phases of a bucket]

    phase        parameter.data                         class
    SHARDED      unreadable                             guarded  idle if params are sharded
    UNSHARDING   unreadable                             guarded
    UNSHARDED    n-D view of the unsharded parameters   plain    in use; idle otherwise

A bucket is idle between its uses. Between `install_views` and `uninstall_views` the parameters are
plain and point at those views, in every phase.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.comm.backends import Source
from lightning_zero.comm.communicator import Pending
from lightning_zero.core.shards import Shards
from lightning_zero.core.step_worker import OverlappedStep
from lightning_zero.core.writes import UserWrites
from lightning_zero.tensors.buffer import FlatBuffer
from lightning_zero.tensors.freed import unreadable
from lightning_zero.tensors.guarded import guard, set_plain_data

__all__ = ["Params", "Phase"]

# Active transforms of torch.func, the innermost last; None if there are none.
_active_transforms: Callable[[], list[Any] | None] = torch._C._functorch.get_interpreter_stack


class Phase(Enum):
    """Tensors that the parameters of a bucket point at. See [Note: Phases of a bucket]."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class Params:
    """Unshards and reshards the parameters of one bucket.

    Args:
        parameters: The module's own parameter objects, by slot.
        unsharded: Their flat buffer, which holds memory while they are unsharded.
        shards: Stores of this rank's shards.
        writes: Writes by the user.
        step: Step of a worker, which every use waits for.
        on_unsharded_change: Called with `is_unsharded` when it changes.

    Attributes:
        unsharded: Flat buffer of the unsharded parameters.
        are_sharded: Whether parameters are sharded when idle.
        phase: Tensors that the parameters point at.
        is_unsharded: Whether all elements are unsharded, or their all-gather is in flight.
        num_pins: Number of contexts that hold the bucket; it is not freed while positive.
        has_views_installed: Whether the user may write to the views of `install_views`.
        is_saved_for_backward: Whether a graph that backward has not traversed may hold views of
            the unsharded parameters.
    """

    phase = Phase.UNSHARDED
    is_unsharded = True
    num_pins = 0
    has_views_installed = False
    is_saved_for_backward = False
    _pending: Pending | None = None  # all-gather in flight

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        unsharded: FlatBuffer,
        shards: Shards,
        writes: UserWrites,
        step: OverlappedStep,
        on_unsharded_change: Callable[[bool], None] | None,
    ) -> None:
        plan = shards.plan
        self.unsharded = unsharded
        self.are_sharded = plan.stage.shards_params
        self._parameters, self._shards, self._writes = parameters, shards, writes
        self._step = step
        shapes = {slot.name: slot.shape for slot in plan.layout.slots}
        self._unreadable = unreadable(shapes, plan.dtype, unsharded.tensor.device)  # by slot
        self._on_unsharded_change = on_unsharded_change
        if on_unsharded_change is not None:
            on_unsharded_change(True)

    def _set_phase(self, phase: Phase) -> None:
        self.phase = phase
        is_unsharded = phase is not Phase.SHARDED
        if self._on_unsharded_change is not None and is_unsharded != self.is_unsharded:
            self._on_unsharded_change(is_unsharded)
        self.is_unsharded = is_unsharded

    # ---------------------------------------------------------------- unshard

    def read_ahead(self) -> bool:
        """Starts to read a shard from its file; False if there was no buffer for it."""
        reader = self._shards.reader
        if reader is None or self.is_unsharded or self._step.is_running:
            return True
        return reader.begin()

    def check_outside_transform(self) -> None:
        """Raises inside a transform of torch.func that differentiates."""
        transforms = _active_transforms()
        if transforms is None:
            return
        kinds = torch._C._functorch.TransformType
        if any(transform.key() in (kinds.Grad, kinds.Jvp) for transform in transforms):
            raise RuntimeError(
                "a transform of torch.func (grad, vjp, jvp, jacrev or similar) uses parameter "
                f"{self._first_name}, or one of the same bucket, which is sharded; "
                "run the transform inside `with lightning_zero.gathered(module):`."
            )

    @property
    def _first_name(self) -> str:
        return self._shards.plan.layout.slots[0].name

    def unshard(self) -> None:
        """Issues the all-gather of the parameters. Collective, also if they are unsharded already.

        A rank on which they are unsharded sends its shard again to those on which they are not.
        After a failed step it sends the values that there are, and `wait_for_unshard` raises: other
        ranks wait for the all-gather. Raises inside a differentiating transform of torch.func: its
        functions must not write to memory, and the parameters given to it would be slices.
        """
        if self.is_unsharded:
            self.wait_for_unshard()
            self._issue().wait()
            return
        if self._step.is_running:
            self._step.finish()
        self.check_outside_transform()
        self.unsharded.allocate()
        self._pending = self.all_gather()
        self.mark_in_flight()

    def all_gather(self) -> Pending:
        """Issues the all-gather of this rank's shard, from where it is stored."""
        return self._issue(self._shards.all_gather_source())

    def _issue(self, source: Source | None = None) -> Pending:
        """Issues an all-gather of `source`; None: of this rank's part of the unsharded buffer."""
        shards = self._shards
        return shards.comm.all_gather(self.unsharded.tensor, shards.plan.name, source=source)

    def publish(self) -> None:
        """Issues the all-gather of replicated parameters, of which this rank has stepped a part."""
        self._pending = self._issue()

    def mark_in_flight(self) -> None:
        """Guards the parameters until an all-gather, which is issued now or later."""
        if self.phase is not Phase.SHARDED:  # else they are guarded already
            self.hide()
        self._set_phase(Phase.UNSHARDING)

    def wait_for_unshard(self) -> None:
        """Waits for an all-gather in flight; the parameters are unsharded and plain."""
        if self._step.is_running:
            self._step.wait()
        if self.phase is not Phase.UNSHARDING:
            return
        if self._pending is None:
            raise RuntimeError(
                f"parameter {self._first_name} is used within the step of its optimizer, which "
                "steps copies of the parameters, or after one that was interrupted; load a "
                "checkpoint into a new module."
            )
        self._pending.wait()
        self._pending = None
        self._set_phase(Phase.UNSHARDED)
        if not self.has_views_installed:
            set_plain_data(self._parameters, self.unsharded.views)
            self._writes.watch()

    def set_saved_for_backward(self, is_saved: bool) -> None:
        """Sets `is_saved_for_backward`: a graph is built, or backward has traversed the graphs."""
        self.is_saved_for_backward = is_saved

    # ---------------------------------------------------------------- reshard

    def reshard(self) -> None:
        """Frees the unsharded parameters, if parameters are sharded when idle. Local.

        Does nothing inside a transform of torch.func, which differentiates without our hooks; the
        end of the step reshards then.
        """
        if not self.are_sharded or self.phase is Phase.SHARDED or self.num_pins:
            return
        if _active_transforms() is not None:
            return
        self.wait_for_unshard()
        self.sync_writes()
        self.enter_idle_phase()

    def try_to_reshard(self) -> Exception | None:
        """As `reshard`, also if the user has set data of a wrong shape; returns the first error."""
        errors: list[Exception] = []
        # data that a reshard refused is dropped, so the next attempt succeeds
        for _ in range(len(self._parameters) + 1):
            try:
                self.reshard()
            except ValueError as error:
                errors.append(error)
                continue
            except Exception as error:
                errors.append(error)
            break
        return errors[0] if errors else None

    def discard_unsharded(self) -> None:
        """As `reshard`, without syncing writes."""
        if self.are_sharded and self.is_unsharded and not self.num_pins:
            self.wait_for_unshard()
            self.enter_idle_phase()

    def drop_in_flight(self) -> None:
        """Drops an all-gather in flight, whose group is gone. Local."""
        self._pending = None
        if self.phase is Phase.UNSHARDING:
            self.enter_idle_phase()

    def enter_idle_phase(self) -> None:
        """Hides the values of the parameters, or, if replicated, points at the unsharded buffer."""
        self._set_phase(Phase.SHARDED if self.are_sharded else Phase.UNSHARDED)
        self.restore_data_pointers()
        if self.are_sharded:
            self.unsharded.free()

    def hide(self) -> None:
        """Guards the parameters, and lets C++ find no values in them. Installed views stay."""
        if not self.has_views_installed:
            set_plain_data(self._parameters, self._unreadable)
            guard(self._parameters)

    def hide_replicated(self) -> None:
        """As `hide` while tiers/state_offload.py keeps the memory of replicated parameters free.

        Sharded parameters are guarded anyway.
        """
        if not self.are_sharded:
            self.hide()

    def show_replicated(self) -> None:
        """Undoes `hide_replicated`, once the memory has its values again."""
        if not self.are_sharded:
            self.restore_data_pointers()

    def restore_data_pointers(self) -> None:
        """Points the parameters at the tensors of the current phase again. Installed views stay."""
        if self.phase is Phase.SHARDED:
            self.hide()
        elif not self.has_views_installed:
            set_plain_data(self._parameters, self.unsharded.views)

    # ---------------------------------------------------------------- use between steps

    def pin(self) -> None:
        """Keeps the parameters unsharded until `unpin`."""
        self.num_pins += 1

    def unpin(self) -> None:
        self.num_pins -= 1

    def install_views(self, views: Sequence[Tensor]) -> None:
        """Points the parameters at `views`, by slot, plain, until `uninstall_views`.

        Not while other views are installed.
        """
        assert not self.has_views_installed
        self.wait_for_unshard()
        self.pin()
        self.has_views_installed = True
        set_plain_data(self._parameters, views)
        self._writes.watch()

    def uninstall_views(self) -> None:
        """Points the parameters at the tensors of their phase again."""
        self.unpin()
        self.has_views_installed = False
        self.restore_data_pointers()
        if self.phase is Phase.UNSHARDED:
            self._writes.watch()

    def sync_writes(self, *, reads_all: bool = True) -> None:
        """Syncs the user's writes to unsharded parameters, and replaced `.data`, into the masters.

        Torch's pruning, for example, writes by `parameter.data = other`. Not while a context holds
        the bucket: it reports writes, or keeps them, when it ends.

        Args:
            reads_all: Compare all values of replicated parameters, too: some writes have no trace.

        Raises:
            ValueError: Replaced data has another shape or dtype; the parameter then has its own
                again.
        """
        if self.num_pins or self.phase is not Phase.UNSHARDED:
            return
        self._writes.sync(reads_all=reads_all)
