"""Loops in which ranks use the module a different number of times.

[Note: Lockstep] In stage 3 every forward is collective. A rank that needs fewer of them than the
others (its samples end earlier, it has fewer batches) leaves the loop early and then takes part in
what the others still gather until all have left: see [Note: Collective order] in
layout/order.py. Two kinds of loop exist: `uneven_calls`, one step in which the module is called any
number of times, for generation; and a loop of steps (`begin_loop`, `end_loop`), for evaluation.
A collective of another kind could pair with a round of a rank that is elsewhere, in such a loop,
in another batch or behind the last: those of the strategy come after `barrier`, to which every
rank must come with the same name of it, or all fail; batches are compared with the next round.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.watchdog import DesynchronizedError
from lightning_zero.core.bucket import Bucket, bucket_of
from lightning_zero.core.schedule import Schedule, TrainingState
from lightning_zero.tensors.guarded import has_placement, placement_of
from lightning_zero.tiers.memory import available_memory_bytes, local_world_size

__all__ = ["Lockstep", "before_collective", "lockstep", "uneven_calls"]

_MUCH_BYTES = 1 << 24


@contextmanager
def uneven_calls(module: nn.Module) -> Iterator[None]:
    """Inside, ranks may call `module` or its parts a different number of times, also never.

    For generation, sampling and the like: no gradients are recorded. A rank that leaves early goes
    on serving the others until all have left. An exception on one rank ends the context on every
    rank. Collective: every rank enters and leaves it, equally often.

    Args:
        module: The trained module or a part of it. One that no engine holds needs nothing.

    Raises:
        RuntimeError: In the middle of a backward.
        PeerFailedError: Another rank failed inside; the text tells how.
    """
    found: dict[Lockstep, None] = {}
    for parameter in module.parameters():
        if has_placement(parameter):
            found[bucket_of(placement_of(parameter)).lockstep] = None
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for one in found:
            stack.enter_context(one.uneven_step())
        yield


def before_collective(module: nn.Module) -> None:
    """Brings all ranks together before a collective of your own, in which all take part.

    Where ranks use different parts of `module` before a collective in the same forward or backward,
    as experts that depend on data, stage 3 must let them end what they gather first. In a forward,
    collectives of `torch.distributed` on tensors over the default group are seen without this call,
    unless parts of the module are compiled; a barrier, another group, or a collective in backward
    needs it. Collective: every rank.

    Args:
        module: The trained module or a part of it. One that no engine holds needs nothing.

    Raises:
        RuntimeError: Another rank has come to something else.
    """
    for parameter in module.parameters():
        if has_placement(parameter):
            bucket_of(placement_of(parameter)).lockstep.barrier("before_collective()")
            return


def lockstep(module: nn.Module) -> AbstractContextManager[None]:
    """The former name of `uneven_calls`. Deprecated."""
    warnings.warn(
        "lightning_zero.lockstep(module) is called uneven_calls(module) now.",
        FutureWarning,
        stacklevel=2,
    )
    return uneven_calls(module)


class Lockstep:
    """The loops of one engine. See [Note: Lockstep]."""

    def __init__(self, schedule: Schedule, buckets: Sequence[Bucket], comm: Communicator) -> None:
        self.is_in_loop = False  # between `begin_loop` and `end_loop`
        self._schedule = schedule
        self._order = order = schedule.order
        self._comm = comm
        self.barrier, self.pass_boundary = (
            order.barrier,
            order.pass_boundary,
        )  # see `CollectiveOrder`
        self.note = order.note
        self.note_write = order.note_write
        self.gather_objects = comm.control.gather_objects  # collective, outside of a loop
        self._depth = 0  # nested `uneven_step`
        self._told: BaseException | None = None  # the other ranks know of it
        comm.before_collective = self._order.announce_collective
        for bucket in buckets:
            bucket.lockstep = self

    @contextmanager
    def uneven_step(self) -> Iterator[None]:
        """One step without gradients, of as many forwards as each rank likes. Collective."""
        schedule = self._schedule
        if schedule.training_state is TrainingState.BACKWARD:
            raise RuntimeError(
                "uneven_calls() was entered in the middle of a backward; do so before."
            )
        if not self._order.allows_uneven_calls:
            self._order.close_pass("uneven_calls()")
        self._depth += 1
        self._update_order()
        try:
            schedule.open()
            yield
            self._order.serve_until(
                self._order.requests.done, "the end of uneven_calls on all ranks"
            )
        except BaseException as error:
            self._tell(error)
            schedule.reset()
            raise
        finally:
            self._depth -= 1
            self._update_order()
        self._told = None
        schedule.close()

    def check_cpu_memory(self, call: str, num_bytes: int) -> None:
        """Raises, alike on every rank, where some cannot hold so much more. Collective.

        Args:
            call: What needs it, the same on every rank.
            num_bytes: CPU memory that each rank will hold. The little needs no asking.
        """
        if num_bytes < _MUCH_BYTES:
            return
        self.barrier(call)
        room = self._comm.control.min_ints([available_memory_bytes() // local_world_size()])[0]
        if num_bytes > room:
            raise RuntimeError(
                f"{call} needs {num_bytes} bytes of CPU memory on every rank, and {room} are free "
                f"for each of {local_world_size()} rank(s) of a node; take less at a time, or use "
                "trainer.save_checkpoint()."
            )

    def _update_order(self) -> None:
        """Ranks may leave one after the other."""
        self._order.allows_uneven_calls = self.is_in_loop or self._depth > 0

    def _tell(self, error: BaseException) -> None:
        """Lets the other ranks fail too, once."""
        if error is self._told:
            return
        self._told = error
        if isinstance(error, DesynchronizedError):
            return  # they know more
        if isinstance(error, Exception) and not self._order.is_issuing:
            try:
                self._order.report_failure(error)
            except DesynchronizedError:
                return
            except Exception as failure:  # they cannot be told: they find this rank gone
                self._comm.abort(failure)
        else:
            self._comm.abort(error)  # others may wait for data of this rank, which goes away

    def begin_loop(self) -> None:
        """Before a loop of steps, of which each rank takes as many as it likes. Collective."""
        self._schedule.compare_assigned()
        self._schedule.prepare()
        self.is_in_loop = True
        self._update_order()

    def end_loop(self) -> None:
        """Serves the other ranks until all have ended their loop. Collective."""
        if self.is_in_loop:
            self._order.serve_until(self._order.requests.left, "the end of the loop on all ranks")
            self._schedule.unsharder.reshard_all()
            self.exit_loop()

    def exit_loop(self) -> None:
        """The loop is over, or has failed. Local."""
        self.is_in_loop = False
        self._update_order()

    def before_write(self) -> None:
        """Before a rank changes its elements of a parameter, which others may still gather.

        Collective where a forward has ended on this rank and its pass has not; else local.
        """
        if not self._schedule.is_in_step:
            self._order.close_pass("a write to parameter.data")

    def barrier_in_loop(self, name: str) -> None:
        """As `barrier`, but only inside a loop, where another rank may have left it."""
        if self.is_in_loop or self._depth:
            self.barrier(name)

    def set_stop_request(self, stop_request: Callable[[], int | None]) -> None:
        """From now on `stop_request` tells what this rank wishes, of less than 62 bits, if anything."""
        self._order.stop_request = stop_request
