"""The engine's settings: as given, or chosen for the run where `stage="auto"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_zero.comm.world import failing_together
from lightning_zero.engine.facts import config_facts
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.strategy.auto import (
    AUTO,
    AutoChoice,
    Room,
    auto_base,
    choose,
    measure_room,
    refuse_what_cannot,
)
from lightning_zero.strategy.precision import ZeroPrecision

__all__ = ["Place", "Settings"]


@dataclass(frozen=True)
class Place:
    """Where a run computes.

    Attributes:
        device: Of this rank.
        num_ranks: Of the world.
        ranks_per_node: Of this machine.
    """

    device: torch.device
    num_ranks: int
    ranks_per_node: int

    @property
    def shape(self) -> dict[str, Any]:
        """As the planner asks for it."""
        return {
            "num_ranks": self.num_ranks,
            "ranks_per_node": self.ranks_per_node,
            "is_apart": self.device.type != "cpu",
        }


class Settings:
    """What a strategy was told, and what has come of it.

    Args:
        given: Arguments of `ZeroConfig` among others; `stage` may be "auto".
        checks_memory: Refuse a fit whose model states alone are more than all the memory there is.

    Attributes:
        config: To train with; where the stage is "auto", a stand-in until `decide`.
        choice: What "auto" has come to; None else, and before.

    Raises:
        ValueError: A setting out of range, or one that has no meaning in this stage.
        TypeError: A setting of the wrong type.
    """

    def __init__(self, given: Mapping[str, Any], *, checks_memory: bool) -> None:
        self._is_auto = given["stage"] == AUTO
        own = {field.name: given[field.name] for field in fields(ZeroConfig)}
        stage = own.pop("stage")
        self._given = auto_base(own) if self._is_auto else ZeroConfig(stage, **own)
        if not isinstance(checks_memory, bool):
            raise TypeError(f"check_memory must be True or False, got {checks_memory!r}.")
        self._checks_memory = checks_memory
        self.config = self._given
        self.choice: AutoChoice | None = None

    def facts(self) -> dict[str, str]:
        """What was given, to be compared between ranks; see `alike.config_facts`."""
        fields = config_facts(self._given)
        if self._is_auto:
            fields["stage"] = AUTO
        return {**fields, "check_memory": str(self._checks_memory)}

    def decide(
        self,
        trainer: Trainer,
        optimizers: Sequence[Optimizer],
        place: Place,
        precision: ZeroPrecision | None,
    ) -> ZeroConfig:
        """The settings of one run: nothing in them is left to be found out. Collective.

        Args:
            trainer: Of the run, with its module.
            optimizers: Of the module, in fit.
            place: Where it runs.
            precision: The Trainer's.

        Raises:
            ValueError: The model states cannot fit.
        """
        group_size = self._given.group_size(local_world_size=place.ranks_per_node)
        config = self._given.replace(
            sharding_group_size=group_size, param_dtype=self._param_dtype(precision)
        )
        if precision is not None and precision.is_autocast:
            config = config.under_autocast()
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        is_checked = is_fitting and self._checks_memory
        if not (self._is_auto or is_checked):
            return config
        room = measure_room(place.device, place.ranks_per_node, config)
        if self._is_auto:
            self.choice = self._choose(trainer, optimizers, config, room, place)
            config = self.config = self.choice.config
        if is_checked:
            module = trainer.lightning_module
            with failing_together("begin"):  # models are not compared yet
                refuse_what_cannot(module, optimizers, config, room, **place.shape)
        return config

    def _param_dtype(self, precision: ZeroPrecision | None) -> torch.dtype | None:
        chosen = self._given.param_dtype or (precision.param_dtype if precision else None)
        assert not isinstance(chosen, str)
        if self._given.kept and (chosen is None or chosen.itemsize >= torch.float32.itemsize):
            rank_zero_warn(
                "keep_float32 has no effect: no parameter is cast, as precision='32-true' and "
                "'bf16-true', or param_dtype='float32', have it."
            )
        return chosen

    def _choose(
        self,
        trainer: Trainer,
        optimizers: Sequence[Optimizer],
        base: ZeroConfig,
        room: Room,
        place: Place,
    ) -> AutoChoice:
        choice = choose(
            trainer.lightning_module,
            optimizers,
            base,
            room,
            **place.shape,
            num_micro_batches=trainer.accumulate_grad_batches,
        )
        rank_zero_info(f'stage="auto": {choice.reason}')
        if trainer.state.fn == TrainerFn.FITTING:
            for logger in trainer.loggers:
                logger.log_hyperparams(choice.as_hyperparameters())
        return choice
