"""The engine: a module, its optimizers, and who holds which part of their state.

Usable by itself in a hand-written loop:

    engine = Engine(module, optimizers=[optimizer], config=ZeroConfig(stage=3))
    loss = module(x)
    engine.backward(loss)
    engine.step()
    engine.zero_grad()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.watchdog import Watchdog
from lightning_zero.comm.world import as_timeout, as_wait_report_s
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.hooks import Hooks
from lightning_zero.core.lockstep import Lockstep
from lightning_zero.core.mixed_dtypes import explain_dtype_error
from lightning_zero.core.norm import clip_by_norm, clip_by_value, grad_norms, total_norm
from lightning_zero.core.schedule import Schedule
from lightning_zero.core.step_worker import StepWorker
from lightning_zero.engine.assembly import Assembly, begin_together, open_storage, plan_together
from lightning_zero.engine.counting import count_memory
from lightning_zero.engine.optimizers import AttachedOptimizers, examine
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.recompute import checkpointed
from lightning_zero.tensors.composite import plain_tensors

__all__ = ["Engine"]


class Engine:
    """Shards the state of `module` and `optimizers` over all ranks of the default process group.

    Every rank must make it with the same module, optimizers and settings, which are compared, and
    call its methods in the same order. Parameters keep their identity: the optimizers are kept as
    they are, and their `step()` may be called directly.

    Args:
        module: On the device where it computes, or on the meta device, to be initialised by its
            modules' `reset_parameters`. Rank 0's values are taken.
        optimizers: One or several over parameters of `module`; fresh ones or with state. More can
            be attached later.
        config: Stage and sizes; None: stage 3 with defaults.
        device: Where to compute; parameters move there bucket by bucket, so that the device never
            holds the whole model in stage 3. None: where they are.
        timeout: Of collectives, as a `timedelta` or in seconds; None: the backend's.
        wait_report_s: Seconds of waiting for other ranks after which all tell what they are doing,
            in the output of rank 0; None: never.
        watchdog: Tells of the failures of other ranks; None: one of its own.

    Attributes:
        plan: Units and buckets.
        buckets: The buckets at run time, in layout order.
        schedule: Decides on gathers and reductions.
        lockstep: For loops in which ranks use the module a different number of times.
        optimizers: The attached ones, in that order.
        average_buckets: Of averages of the weights; see `Shadow`.
        worker: Steps buckets beside the next forward.
        recorder: Tells what goes on, one window at a time; off at first.

    Raises:
        ValueError: A module without parameters or on several devices; modules on the meta device
            that cannot initialise themselves; a module that another engine holds; an optimizer over
            foreign parameters, or one that cannot be sharded; groups that do not divide the world;
            ranks with different models, optimizers or settings.
        TypeError: An optimizer that is none, or a timeout that is none.
        RuntimeError: Another rank was given something that cannot be used.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer] = (),
        config: ZeroConfig | None = None,
        *,
        device: torch.device | None = None,
        timeout: timedelta | float | None = None,
        wait_report_s: float | None = 30.0,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.module = module
        self.config = config = config or ZeroConfig()
        open_comm = partial(
            Communicator,
            timeout=as_timeout(timeout),
            watchdog=watchdog,
            report_after_s=as_wait_report_s(wait_report_s),
        )
        beginning = begin_together(module, optimizers, config, device=device, open_comm=open_comm)
        self.device = device = beginning.device
        self.comm = comm = beginning.comm
        examined = beginning.examined
        self.recorder = comm.recorder
        self.plan = plan_together(module, config, comm, examined)
        self.storage = open_storage(config, self.plan, comm)
        self.worker = StepWorker(device)
        self.average_buckets: list[Bucket] = []
        self._syncs = True
        self._is_closed = False
        parts = Assembly(module, self.plan, comm, self.storage, self.worker, self._make_whole)
        self._end_checkpointing = checkpointed(module, beginning.checkpointed)
        try:
            self.buckets = parts.buckets()
            units = parts.units(self.buckets)
            self.schedule = Schedule(module, units, self.buckets, comm, config)
            self._hooks = Hooks(module, self.buckets, self.schedule)
            self.lockstep = Lockstep(self.schedule, self.buckets, comm)
            self.optimizers = AttachedOptimizers(
                self.buckets,
                self.schedule,
                self.storage,
                comm,
                worker=self.worker if config.overlap_step else None,
                examine=partial(examine, module=module, config=config, device=device),
            )
            for optimizer, found in examined:
                self.optimizers.take(optimizer, found)
        except BaseException as error:
            comm.abort(error)  # the others may wait for this rank's next broadcast
            self._end_checkpointing()
            self.worker.close()
            self.storage.close()
            raise

    def _make_whole(self, bucket: Bucket, name: str) -> None:
        self.schedule.use_out_of_turn(bucket, name)

    def attach(self, optimizer: Optimizer) -> None:
        """Makes `optimizer` step this rank's slices from now on. Collective.

        Raises:
            ValueError: It holds foreign parameters, or cannot be sharded, or needs whole tensors
                where the engine was made without it and has cut them; or it differs by rank.
        """
        self.optimizers.attach(optimizer)

    # ---------------------------------------------------------------- the loop

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """`loss.backward(...)`, with gradients averaged over ranks at its end. Collective."""
        with self.backward_context():
            loss.backward(*args, **kwargs)

    def backward_context(self) -> AbstractContextManager[None]:
        """Around a backward that somebody else calls."""
        if self._syncs:
            self.optimizers.read_ahead()
        return self.schedule.backward_context(reduces=self._syncs)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Around code that uses the module without calling it."""
        try:
            with self.schedule.step_context():
                yield
        except Exception as error:
            explain_dtype_error(error, self.module, self.buckets)
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all micro-batches of a step but the last: leaves gradients local where the stage can.

        Stages 2 and 3 reduce every micro-batch, for they keep no whole gradients: to the mean over
        the group where `sharding_group_size` divides the ranks, else over all.
        """
        syncs, self._syncs = self._syncs, False
        self.schedule.is_accumulating = True
        try:
            yield
        finally:
            self._syncs = syncs
            self.schedule.is_accumulating = not syncs

    def finish_reductions(self) -> None:
        """Reduces what micro-batches under `no_sync` left local, or in the group. Collective."""
        self.schedule.reducing.reduce_local()

    def step(self) -> None:
        """Steps every attached optimizer. Collective."""
        self.optimizers.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradients of all parameters; by None, the memory of their shards is freed."""
        for bucket in self.buckets:
            bucket.grads.zero(set_to_none=set_to_none)
            bucket.free_zeroed()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        parameters: Iterable[nn.Parameter] | None = None,
    ) -> Tensor:
        """Clips mean gradients to a total norm, as `torch.nn.utils.clip_grad_norm_`. Collective.

        Args:
            max_norm: Largest norm that is left as it is.
            norm_type: p of the p-norm; may be `math.inf`.
            parameters: Only those; None: all of the module.

        Returns:
            The total norm before clipping, 0-dim.
        """
        self.finish_reductions()
        chosen = None if parameters is None else set(parameters)
        return clip_by_norm(
            self.buckets, self.comm, float(max_norm), parameters=chosen, order=float(norm_type)
        )

    def clip_grad_value_(
        self, clip_value: float, *, parameters: Iterable[nn.Parameter] | None = None
    ) -> None:
        """Clamps every element of the mean gradients to [-clip_value, clip_value]. Collective."""
        self.finish_reductions()
        chosen = None if parameters is None else set(parameters)
        clip_by_value(self.buckets, float(clip_value), parameters=chosen)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Total norm of the mean gradients, 0-dim. Collective."""
        self.finish_reductions()
        return total_norm(self.buckets, self.comm, order=float(norm_type))

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, Tensor]:
        """Norm of the mean gradients of each bucket, 0-dim, by its name. Collective.

        Buckets without a gradient are left out.
        """
        self.finish_reductions()
        return grad_norms(self.buckets, self.comm, order=float(norm_type))

    # ---------------------------------------------------------------- looks from outside

    def memory_report(self) -> MemoryReport:
        """Bytes that this rank holds at this moment, counted from the engine's own buffers."""
        self.worker.drain()
        return count_memory(
            self.buckets, self.optimizers, self.storage, self.comm, self.average_buckets
        )

    # ---------------------------------------------------------------- failures and the end

    def reset(self) -> None:
        """Back to rest after an exception; gradients are dropped. Local."""
        self.worker.drain()
        self.optimizers.reset()
        self.schedule.reset()

    def rally(self, deadline: timedelta, error: BaseException | None = None) -> bool:
        """After an exception: brings the ranks together again, at rest and with fresh groups.

        The other ranks learn of the exception, fail too where they wait for others, and come here.

        Args:
            deadline: How long to wait for them.
            error: The exception of this rank.

        Returns:
            Whether all of them came before the deadline; if not, no collective is possible any
            more.
        """
        self.worker.drain()  # it waits for no rank, and needs the groups that go
        self.optimizers.reset()
        self.lockstep.leave_loop()
        if not self.comm.rally(deadline, error):
            return False
        self.schedule.recover()
        for bucket in self.average_buckets:
            bucket.cancel_gather(is_lost=False)
        return True

    def abandon(self) -> None:
        """Gives up after a failed rally: no hooks, no groups; parameters say that they are lost."""
        self._is_closed = True
        self.worker.drain()
        self.optimizers.detach()
        self._end_checkpointing()
        self._hooks.detach()
        self.schedule.abandon()
        self.worker.close()
        self.storage.close()
        self.comm.close()

    def close(
        self,
        device: torch.device | None = None,
        *,
        keeps_optimizer_shards: bool = False,
        keeps_parameters: bool = True,
    ) -> None:
        """Gives everything back: whole tensors, no hooks. Collective. Closing twice is harmless.

        Args:
            device: Where parameters and optimizer states are to be; None: where they are.
            keeps_optimizer_shards: Leave each rank its part of the optimizer states, from which
                `optimizer_state_dict` can still build the whole. Call `comm.close()` when done.
                States on NVMe or a GPU that would fill more than half of the CPU memory, with the
                module, are dropped instead (`optimizers.check_has_states` then raises).
            keeps_parameters: False: parameters and optimizer states have no values afterwards, and
                a use of them is an error.

        Raises:
            RuntimeError: The last step failed beside the end of training; all is given back then.
            ValueError: Likewise, data of a wrong shape was put in the place of a parameter's.
        """
        if self._is_closed:
            return
        self._is_closed = True
        target = (device or self.device) if keeps_parameters else None
        if self.comm.control.is_open:
            self.lockstep.meet_for("the end of the engine")
        self.worker.drain()
        failure: Exception | None = self.optimizers.find_failure()
        self.optimizers.detach()
        self.optimizers.reset()
        # Before states are dropped, which the compute stream reads meanwhile.
        self.worker.close(plain_tensors([list(o.state.values()) for o in self.optimizers]))
        self._end_checkpointing()
        self._hooks.detach()
        failure = self.schedule.come_to_rest() or failure
        self.optimizers.give_back(target, keeps_shards=keeps_optimizer_shards)
        for bucket in self.buckets:
            bucket.give_back(target)
        self.storage.close()
        if not keeps_optimizer_shards:
            self.comm.close()
        if failure is not None:
            raise failure
