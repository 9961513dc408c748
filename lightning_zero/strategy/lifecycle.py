"""What a strategy holds of its engines over a run, and what each rank gets when it has ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerState, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint import load_masters, narrow_masters
from lightning_zero.comm.watchdog import Watchdog
from lightning_zero.core.bucket import Bucket
from lightning_zero.core.building import Building
from lightning_zero.engine.counting import held_bytes, whole_bytes
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.strategy.averages import Averages
from lightning_zero.tensors.meta import forget_left_out
from lightning_zero.tiers.memory import available_memory_bytes, local_world_size

__all__ = [
    "RALLY_DEADLINE",
    "EngineLife",
    "WholeAfterFit",
    "check_whole_after_fit",
    "keeps_whole",
    "run_state",
    "save_unsaved",
]

WholeAfterFit = bool | Literal["auto"]

_GIB = 2**30


def check_whole_after_fit(value: object) -> None:
    """Raises a ValueError where `value` is no choice."""
    if not isinstance(value, bool) and value != "auto":
        raise ValueError(f'whole_after_fit must be True, False or "auto", got {value!r}.')


def keeps_whole(choice: bool | str, engine: Engine, *, num_averages: int = 0) -> bool:
    """Whether each rank gets the module, and averages of it, whole in CPU memory. Collective.

    By "auto": where that takes at most half of what is free for each rank of a node, on all nodes.
    Warns, once, where it does not.

    Args:
        choice: True, False or "auto".
        engine: Holds the module.
        num_averages: Averages of it that callbacks hold.
    """
    if isinstance(choice, bool):
        return choice
    needed = (1 + num_averages) * sum(whole_bytes(bucket) for bucket in engine.buckets)
    needed -= sum(held_bytes(bucket) for bucket in engine.buckets)
    if engine.comm.rank == 0:
        needed += sum(_masters_bytes(bucket) for bucket in engine.buckets)
    room = available_memory_bytes() // (2 * local_world_size())
    fits = bool(engine.comm.control.min_ints([room - needed])[0] >= 0)
    if not fits:
        rank_zero_warn(
            f'whole_after_fit="auto": each of {local_world_size()} rank(s) of a node would hold '
            f"{needed / _GIB:.3g} GiB more with the whole module, and less than twice that is free "
            "for each: its parameters are left out. Load them from a checkpoint, by "
            "Model.load_from_checkpoint(path) or ckpt_path=path; whole_after_fit=True keeps them."
        )
    return fits


def _masters_bytes(bucket: Bucket) -> int:
    """Of masters that a late checkpoint needs beside narrow parameters; rank 0 keeps them."""
    dtype = bucket.plan.master_dtype
    is_narrow = any(own.itemsize < dtype.itemsize for own in bucket.own_dtypes)
    return bucket.plan.layout.numel * dtype.itemsize if is_narrow else 0


def save_unsaved(trainer: Trainer) -> None:
    """Saves what would be lost with the parameters, unless a callback has just done so. Collective.

    To `last-step-N.ckpt` in the Trainer's `default_root_dir`.
    """
    callbacks: list[Any] = list(trainer.checkpoint_callbacks)
    saved = [getattr(callback, "_last_global_step_saved", None) for callback in callbacks]
    if trainer.global_step in (0, *saved) or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    path = Path(trainer.default_root_dir) / f"last-step-{trainer.global_step}.ckpt"
    rank_zero_warn(f"no checkpoint has the last step, so it is saved to {path}.")
    trainer.save_checkpoint(path)


RALLY_DEADLINE = timedelta(seconds=60)


class EngineLife:
    """One engine after the other.

        before      parameters that are in parts since `configure_model` has made them, and masters
                    of a checkpoint that was opened
        meanwhile   the engine, and the averages of callbacks
        after       the closed engine with its optimizers' shards, and masters on rank 0: from them
                    a late save can still build whole states

    Args:
        timeout: Of collectives; None: the backend's.
        whole_after_fit: Leave every rank the whole module; "auto": after a fit, where it has room;
            after other runs always.

    Raises:
        ValueError: No such choice.

    Attributes:
        current: The engine, meanwhile.
        last_masters: By name, after a run with a 16-bit module; on rank 0.
    """

    def __init__(self, timeout: timedelta | None, whole_after_fit: WholeAfterFit) -> None:
        check_whole_after_fit(whole_after_fit)
        self._whole_after_fit = whole_after_fit
        self._keeps_whole: bool | None = None  # once that is decided for this run
        self.current: Engine | None = None
        self.last_masters: dict[str, Tensor] = {}
        self._timeout = timeout
        self._last: Engine | None = None
        self._averages: Averages | None = None  # as long as `current`
        self._building: Building | None = None
        self._masters_to_load: Mapping[str, Tensor] = {}
        self._has_rallied: bool | None = None  # after an exception: all ranks came together again
        self._watchdog: Watchdog | None = None

    def renewed(self) -> EngineLife:
        """Another, with the same settings, that has had no run but knows the last masters."""
        other = EngineLife(self._timeout, self._whole_after_fit)
        other.last_masters = self.last_masters
        return other

    @property
    def engine(self) -> Engine:
        """The engine, meanwhile.

        Raises:
            RuntimeError: At another time.
        """
        if self.current is None:
            raise RuntimeError(
                "the engine exists only while the Trainer runs: use it in hooks and callbacks "
                "between setup and teardown."
            )
        return self.current

    @property
    def owner(self) -> Engine | None:
        """Who has the optimizers' shards: the engine, or the closed one."""
        return self.current or self._last

    # ---------------------------------------------------------------- before

    def start(self, watchdog: Watchdog | None) -> None:
        """A run begins: a failure of the one before is over.

        Args:
            watchdog: Of the run.
        """
        self._watchdog = watchdog
        self._has_rallied = self._keeps_whole = None

    @contextmanager
    def watching(self, device: torch.device) -> Iterator[None]:
        """Around `configure_model`: what it makes is sharded as it is made. Collective."""
        self._building = Building(device, self._timeout, watchdog=self._watchdog)
        with self._building.watching():
            yield

    @contextmanager
    def taking_over(self) -> Iterator[None]:
        """Around the set-up that takes over what `watching` has seen, if anything. Collective."""
        building = self._building
        if building is None:
            yield
            return
        try:
            with building.cutting():
                yield
        except BaseException:
            building.abort()
            raise
        finally:
            self._building = None
        building.close()

    def make_room(self) -> None:
        """Before the next engine: all is in parts that will be, and the last one goes. Collective.

        Raises:
            ValueError: Ranks have built different values.
        """
        if self._building is not None:
            self._building.settle()
        if self._last is not None:
            self._last.comm.close()
            self._last = None
        self.last_masters = {}

    # ---------------------------------------------------------------- meanwhile

    def begin(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        config: ZeroConfig,
        device: torch.device,
    ) -> None:
        """Makes the engine; see its arguments there. Collective."""
        self.current = Engine(
            module,
            optimizers,
            config,
            device=device,
            timeout=self._timeout,
            watchdog=self._watchdog,
        )
        forget_left_out(module)
        self.load_masters(self._masters_to_load)
        self._masters_to_load = {}

    def adopt_averages(
        self, callbacks: Iterable[Callback], state_dict: Callable[[nn.Module, str], dict[str, Any]]
    ) -> None:
        """Shards the averages of `callbacks` too; see `Averages`. Collective."""
        self._averages = Averages(self.engine, callbacks, state_dict)

    def load_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Into the engine, or the next one if there is none yet."""
        if self.current is None:
            self._masters_to_load = masters
        else:
            load_masters(self.current, masters)

    def meets(self, name: str, *, everyone: bool) -> bool:
        """Before a collective on WORLD, of every rank or of some: whether it is possible.

        Args:
            name: Of the collective: the same on every rank.
            everyone: All ranks take part.

        Raises:
            RuntimeError: Another rank has failed, or is elsewhere, and will not come to it.
        """
        if self.is_lost or not self.is_together():
            return False
        if self.current is not None:
            lockstep = self.current.lockstep
            (lockstep.meet_for if everyone else lockstep.meet_in_loop)(name)
        return True

    # ---------------------------------------------------------------- failure and the end

    @property
    def is_lost(self) -> bool:
        """The ranks have not come together after an exception, and will not."""
        return self._has_rallied is False

    def hurry(self) -> None:
        """All is saved and time is short: nothing is gathered at the end."""
        self._has_rallied = False

    def is_together(self) -> bool:
        """Whether collectives are possible. After an exception the ranks first rally, once.

        The failing rank tells the others, which fail at their next agreement; those that come here
        within the deadline go on with fresh process groups, at rest.
        """
        if self.current is None:
            return self._watchdog is None or self._watchdog.verdict is None
        if run_state(self.current.module).status != TrainerStatus.INTERRUPTED:
            return True
        if self._has_rallied is None:
            deadline = min(self._timeout or RALLY_DEADLINE, RALLY_DEADLINE)
            self._has_rallied = self.current.rally(deadline, sys.exc_info()[1])
        return self._has_rallied

    def end(self, device: torch.device) -> None:
        """Gives the module back, on `device`, where the ranks are together, else what there is."""
        if self.current is not None:
            if self.is_together():
                self._close(self.current, device)
            else:
                self.current.abandon()
                if self._averages is not None:
                    self._averages.let_go()
            self.current = self._averages = None
        self._masters_to_load = {}
        if self._building is not None:
            self._building.abort()  # what came before set-up has failed
            self._building = None

    def _close(self, engine: Engine, device: torch.device) -> None:
        is_whole = self._is_kept_whole()
        if self._averages is not None:
            self._averages.give_back(device if is_whole else None)
        self.last_masters = narrow_masters(engine) if is_whole else {}
        engine.close(device, keeps_optimizer_shards=True, keeps_parameters=is_whole)
        if is_whole:
            self._last = engine
        else:
            engine.comm.close()

    def _is_kept_whole(self) -> bool:
        """Whether every rank gets the module when this run has ended. Collective."""
        if self._keeps_whole is None:
            # A rank may have a batch or a forward more.
            self.engine.lockstep.meet_for("the end of the run")
            # Only what a fit leaves is saved before it goes.
            is_free = self._whole_after_fit == "auto" and not self._was_fitting()
            self._keeps_whole = is_free or keeps_whole(
                self._whole_after_fit, self.engine, num_averages=len(self._averages or ())
            )
        return self._keeps_whole

    def _was_fitting(self) -> bool:
        return run_state(self.engine.module).fn == TrainerFn.FITTING

    def loses_weights(self) -> bool:
        """Whether this run was a fit whose result nobody will hold, unasked. Collective."""
        if self.current is None or self._whole_after_fit != "auto":
            return False
        return self._was_fitting() and not self._is_kept_whole()


def run_state(module: nn.Module | None) -> TrainerState:
    """Of the Trainer of a `LightningModule`; without one, that of a Trainer which does nothing."""
    trainer = module._trainer if isinstance(module, LightningModule) else None
    return TrainerState() if trainer is None else trainer.state
