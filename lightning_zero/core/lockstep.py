"""Loops in which ranks call the module a different number of times.

[Note: Lockstep] In stage 3 every forward is collective. A rank that needs fewer forwards than the
others (its samples end earlier, or it has fewer batches) leaves the loop early. Until all ranks
have left, it takes part in the all-gathers of the others: see [Note: Collective order] in
core/order.py. There are two kinds of loop: `uneven_calls`, one step in which the module is called
any number of times, for generation; and a loop of steps (`begin_loop`, `end_loop`), for evaluation.

Another collective, such as a broadcast of the strategy, could pair with a control-plane round of a
rank that is still in such a loop, in another batch, or past the last one. Collectives of the
strategy therefore come after `barrier`: every rank must enter it with the same name, or all fail.
The next round then compares the ranks' hashes of all batches so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.rounds import RequestKind
from lightning_zero.core.coordinator import StepCoordinator, TrainingState
from lightning_zero.core.order import CollectiveOrder
from lightning_zero.tiers.memory import available_memory_bytes, local_world_size

__all__ = ["Lockstep"]

_MIN_CHECKED_BYTES = 1 << 24


class Lockstep:
    """Loops of one engine in which ranks advance together. See [Note: Lockstep].

    Attributes:
        is_in_loop: Whether the engine is between `begin_loop` and `end_loop`.
        gather_objects: `GlooControlPlane.gather_objects`; collective, outside of a loop.
    """

    def __init__(self, coordinator: StepCoordinator, comm: Communicator) -> None:
        self.is_in_loop = False
        self._coordinator = coordinator
        self._comm = comm
        self.gather_objects = comm.control.gather_objects
        self._depth = 0  # nested `uneven_step`

    def ensure_run(self) -> None:
        """As `StepCoordinator.ensure_run`."""
        self._coordinator.ensure_run()

    @property
    def order(self) -> CollectiveOrder:
        """The collective order of all ranks."""
        return self._coordinator.order

    @contextmanager
    def uneven_step(self) -> Iterator[None]:
        """Context of one step without gradients, with any number of forwards. Collective."""
        coordinator = self._coordinator
        coordinator.ensure_run()
        if coordinator.training_state is TrainingState.BACKWARD:
            raise RuntimeError(
                "uneven_calls() was entered during a backward; enter it before the backward."
            )
        if not self.order.allows_uneven_calls:
            self.order.close_pass("uneven_calls()")
        self._depth += 1
        self._update_order()
        try:
            coordinator.open()
            yield
            self.order.serve_until(RequestKind.DONE, "the end of uneven_calls on all ranks")
        except BaseException as error:
            self._depth -= 1
            coordinator.end_run(error)
            raise
        self._depth -= 1
        self._update_order()
        coordinator.close()

    def check_cpu_memory(self, call: str, num_bytes: int) -> None:
        """Raises on every rank if some rank lacks CPU memory for `call`. Collective.

        Args:
            call: The call that needs the memory, the same on every rank.
            num_bytes: CPU memory that each rank will allocate; less than 16 MiB is not checked.
        """
        if num_bytes < _MIN_CHECKED_BYTES:
            return
        self.barrier(call)
        free_bytes = self._comm.control.min_ints([available_memory_bytes() // local_world_size()])[
            0
        ]
        if num_bytes > free_bytes:
            raise RuntimeError(
                f"{call} needs {num_bytes} bytes of CPU memory on every rank, and {free_bytes} are "
                f"free for each of {local_world_size()} rank(s) of a node; load fewer tensors "
                "at a time, or use trainer.save_checkpoint()."
            )

    def _update_order(self) -> None:
        """Allows uneven calls if this engine is in a loop or step of them."""
        self.order.allow_uneven_calls(self.is_in_loop or self._depth > 0)

    def set_stop_request(self, stop_request: Callable[[], int | None]) -> None:
        """As `StepCoordinator.set_stop_request`."""
        self._coordinator.set_stop_request(stop_request)

    def begin_loop(self) -> None:
        """Begins a loop with any number of steps on each rank. Collective."""
        self._coordinator.compare_assigned()
        self._coordinator.prepare()
        self.is_in_loop = True
        self._update_order()

    def end_loop(self) -> None:
        """Ends the loop; serves the other ranks until all have ended theirs. Collective."""
        if self.is_in_loop:
            self.order.serve_until(RequestKind.LEFT, "the end of the loop on all ranks")
            self._coordinator.step.reshard_all()
            self.is_in_loop = False
            self._update_order()

    def begin_run(self) -> None:
        """Begins a run outside of loops; `uneven_calls` around it stays. Local."""
        self.is_in_loop = False
        self._update_order()

    def before_write(self) -> None:
        """Closes an open pass before this rank writes to its shard of a parameter.

        Other ranks may still all-gather that shard. Collective if this rank has ended a forward
        whose pass is still open; else local.
        """
        self._coordinator.ensure_run()
        if not self._coordinator.is_in_step:
            self.order.close_pass("a write to parameter.data")

    def barrier(self, name: str) -> None:
        """Waits until all ranks have entered call `name`, and serves them until then. Collective.

        Raises:
            DesynchronizedError: Another rank has reached a different call.
        """
        self.order.barrier(name)

    def barrier_in_loop(self, name: str) -> None:
        """As `barrier`, but only inside a loop, which another rank may have left."""
        if self.is_in_loop or self._depth:
            self.barrier(name)
