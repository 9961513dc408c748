"""The callback `Audit`: compares the ranks with each other, and the engine with plain training."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._lightning import pytorch as pl
from lightning_zero._lightning.pytorch import (
    STEP_OUTPUT,
    is_overridden,
    is_param_in_hook_signature,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.engine.fingerprints import (
    AuditError,
    Key,
    RankAudit,
    differs_from_checkpoint,
    fingerprint,
    own_fingerprints,
)
from lightning_zero.health.together import failing_together
from lightning_zero.observe.replica import Replica, copy_of
from lightning_zero.observe.report import zero_strategy
from lightning_zero.strategy.saving import SavingCallback
from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = ["Audit"]

_MAX_LINES = 10


class Audit(SavingCallback):
    """Checks during training that all ranks hold the same values, and that ZeRO changes none.

    Every `every_n_steps` steps, and at the beginning and the end of training, the ranks compare
    fingerprints of everything that more than one of them holds: replicated parameters and optimizer
    states, the shards of all groups of `sharding_group_size`, optimizer settings and step counters,
    learning rate schedules, the loss scaler, buffers. The parameters in each new checkpoint are
    compared with the shards that were saved.

    With `against_data_parallel`, a full copy of the model trains on the same batches in the same
    processes, without an engine, for that number of steps. It needs the memory of plain data
    parallel, so use it on a small version of a model. It needs automatic optimization, one
    optimizer, an `on_nonfinite` other than "skip", a precision other than "16-mixed", "16-true" and
    "bf16-true", and the default `configure_gradient_clipping`.

    Collective: every rank, at each audit.

    Args:
        every_n_steps: int, default 1000. Interval of audits in optimizer steps. 0: none.
        against_data_parallel: int, default 0. Number of first steps that are compared with plain
            data parallel.
        rng: bool, default False. Also compare torch's CPU generator between ranks, for models
            whose ranks must draw the same numbers.
        on_difference: "stop" or "warn", default "stop". Raise an `AuditError` on all ranks, or
            warn.

    Raises:
        AuditError: In training: a difference was found.
        TypeError: The strategy is not a `ZeroStrategy`.
        ValueError: An argument is out of range; or the run cannot be compared with plain data
            parallel.
    """

    def __init__(
        self,
        every_n_steps: int = 1000,
        *,
        against_data_parallel: int = 0,
        rng: bool = False,
        on_difference: str = "stop",
    ) -> None:
        for name, value in (
            ("every_n_steps", every_n_steps),
            ("against_data_parallel", against_data_parallel),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a number of steps, got {value!r}.")
        if on_difference not in ("stop", "warn"):
            raise ValueError(f'on_difference must be "stop" or "warn", got {on_difference!r}.')
        self.every_n_steps = every_n_steps
        self.against_data_parallel = against_data_parallel
        self.rng = rng
        self.on_difference = on_difference
        # While training:
        self._copy: pl.LightningModule | None = None
        self._replica: Replica | None = None
        self._audit: RankAudit | None = None
        self._last_step = 0  # `global_step` after the last step seen
        self._strategy: ZeroStrategy | None = None  # while ranks or checkpoints are compared
        self._num_saves = 0  # the strategy's, when a checkpoint was last compared
        self._held: dict[int, dict[str, int]] = {}  # fingerprints, by number of saves before

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        zero_strategy(trainer, self)
        if stage != "fit" or not self.against_data_parallel:
            return
        if zero_strategy(trainer, self).config.on_nonfinite == "skip":
            raise ValueError(
                'the comparison with plain data parallel does not support on_nonfinite="skip": '
                'plain training skips no step; use on_nonfinite="stop".'
            )
        precision = trainer.precision
        if precision in ("16-mixed", "16-true", "bf16-true"):
            raise ValueError(
                f"the comparison with plain data parallel does not support precision={precision!r}:"
                " plain training scales losses or steps rounded parameters; use '32-true' or "
                "'bf16-mixed'."
            )
        has_iterator = is_param_in_hook_signature(
            pl_module.training_step, "dataloader_iter", explicit=True
        )
        if (
            not pl_module.automatic_optimization
            or is_overridden("configure_gradient_clipping", pl_module)
            or has_iterator
        ):
            raise ValueError(
                "the comparison with plain data parallel needs automatic optimization, the default "
                "configure_gradient_clipping, and a training_step that takes a batch; leave out "
                "against_data_parallel."
            )
        try:
            self._copy = copy_of(pl_module)
        except Exception as error:
            raise ValueError(
                "the comparison with plain data parallel needs a copy of the module "
                "(copy.deepcopy, setup and configure_model), which failed with "
                f"{type(error).__name__}: {error}; make the module copyable, or leave out "
                "against_data_parallel."
            ) from error
        self._copy = zero_strategy(trainer, self).with_synced_layers(self._copy)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = zero_strategy(trainer, self)
        self._last_step, self._num_saves = trainer.global_step, strategy.num_saves
        if self._copy is not None:
            self._replica, self._copy = Replica(self._copy, strategy), None
            strategy.before_training_step.append(self._replica.run_micro_batch)
        if self.every_n_steps:
            self._strategy = strategy
            self._audit = RankAudit(strategy.engine)
            self._compare_ranks(trainer, strategy)

    # ---------------------------------------------------------------- between ranks

    def _compare_ranks(self, trainer: pl.Trainer, strategy: ZeroStrategy) -> None:
        assert self._audit is not None
        differences = self._audit.run(self._values_of(trainer, strategy))
        self._report([str(one) for one in differences], trainer, "ranks hold different values")

    def _values_of(self, trainer: pl.Trainer, strategy: ZeroStrategy) -> dict[Key, int | str]:
        """Values of the Trainer that all ranks have in common."""
        found: dict[Key, int | str] = {Key("Trainer", "global_step"): trainer.global_step}
        for number, config in enumerate(trainer.lr_scheduler_configs):
            schedule = config.scheduler
            for name in ("last_epoch", "_last_lr", "num_bad_epochs"):
                if hasattr(schedule, name):
                    key = Key("scheduler", f"{name} of {type(schedule).__name__} {number}")
                    found[key] = repr(getattr(schedule, name))
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        if scaler is not None:
            found[Key("loss scaler", "state")] = repr(scaler.state_dict())
        if self.rng:
            found[Key("generator", "of the CPU")] = fingerprint(torch.get_rng_state())
        return found

    @override
    def before_saving(self) -> None:
        if self._strategy is not None:
            self._held[self._strategy.num_saves] = own_fingerprints(self._strategy.engine)

    def _compare_checkpoint(self, strategy: ZeroStrategy, trainer: pl.Trainer) -> None:
        """Compares the last checkpoint, if it is new, with the values that were saved."""
        path, num_saves = strategy.last_checkpoint, strategy.num_saves
        held, self._held = self._held.get(num_saves - 1), {}
        if num_saves == self._num_saves or held is None:
            return
        assert path is not None
        self._num_saves = num_saves
        strategy.finish_saving()
        gather = strategy.engine.comm.control.gather_objects
        own: list[str] | None = None  # the file is missing, as on the local disk of another node
        with failing_together(f"read {path}", gather=gather), suppress(FileNotFoundError):
            opened = open_checkpoint(path, weights_only=False)
            state_dict = opened.get("current_model_state", opened["state_dict"])
            own = differs_from_checkpoint(strategy.engine, path, state_dict, held)
        by_rank = gather(own)
        missing = [rank for rank, lines in enumerate(by_rank) if lines is None]
        if missing:
            rank_zero_warn(
                f"audit in step {trainer.global_step}: {path} was not compared with the values "
                f"that were saved: rank {missing[0]} does not find it."
            )
            return
        lines = [line for lines in by_rank for line in lines]
        self._report(lines, trainer, "the checkpoint differs from the values that were saved")

    def _report(self, lines: list[str], trainer: pl.Trainer, what: str) -> None:
        if not lines:
            return
        shown = lines[:_MAX_LINES]
        if len(lines) > _MAX_LINES:
            shown.append(f"and {len(lines) - _MAX_LINES} more")
        text = f"audit in step {trainer.global_step}: {what}:\n  " + "\n  ".join(shown)
        if self.on_difference == "stop":
            raise AuditError(text)
        rank_zero_warn(text)

    # ---------------------------------------------------------------- against data parallel

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.every_n_steps:
            self._compare_checkpoint(zero_strategy(trainer, self), trainer)

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        if self._replica is not None:
            self._replica.compare_loss(loss)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        engine = zero_strategy(trainer, self).engine
        if self._replica is not None and not engine.coordinator.is_accumulating:
            self._replica.compare_gradients()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._replica is not None:
            self._replica.prepare_step()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step, last_step = trainer.global_step, self._last_step
        if step == last_step:
            return
        self._last_step = step
        strategy = zero_strategy(trainer, self)
        if self._replica is not None:
            self._end_replica_step(trainer, strategy, self._replica)
        # Several optimizers may step in one batch.
        if self._audit is not None and step // self.every_n_steps > last_step // self.every_n_steps:
            self._compare_ranks(trainer, strategy)

    def _end_replica_step(
        self, trainer: pl.Trainer, strategy: ZeroStrategy, replica: Replica
    ) -> None:
        """Compares a step between all ranks; ends the comparison after the last one."""
        replica.compare_step()
        found = strategy.engine.comm.control.gather_objects(replica.difference)
        differences = [one for one in found if one is not None]
        self._end_comparison(replica, has_difference=bool(differences))
        self._report(
            [str(one) for one in differences],
            trainer,
            "the engine and plain data parallel compute different values",
        )

    def _end_comparison(self, replica: Replica, *, has_difference: bool) -> None:
        """Ends the comparison with plain data parallel when its steps are over."""
        if has_difference or replica.num_steps >= self.against_data_parallel:
            self._stop_replica(replica)
            if not has_difference:
                rank_zero_info(
                    f"audit: {replica.num_steps} steps equal those of plain data parallel: losses, "
                    "gradients, optimizer states and parameters."
                )

    def _stop_replica(self, replica: Replica) -> None:
        replica.strategy.before_training_step.remove(replica.run_micro_batch)
        self._replica = None

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._audit is not None:
            strategy = zero_strategy(trainer, self)
            self._compare_checkpoint(strategy, trainer)
            self._compare_ranks(trainer, strategy)
        if self._replica is not None:
            rank_zero_warn(
                f"audit: training ended after {self._replica.num_steps} of "
                f"{self.against_data_parallel} steps that were to be compared with plain data "
                "parallel; those are equal."
            )

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._strategy = None  # a checkpoint that is saved from here on is compared no more

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._copy = self._replica = self._audit = self._strategy = None
