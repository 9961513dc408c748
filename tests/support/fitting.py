"""Trains a module under any strategy, the same way, and returns the outcome.

With LIGHTNING_ZERO_TEST_DEVICE=cuda in the environment all ranks train on one GPU.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from tests.support.warm import run_ranks

__all__ = [
    "Outcome",
    "Spec",
    "arrays",
    "assert_same",
    "fit",
    "fit_ranks",
    "fit_reference",
    "make_strategy",
    "make_trainer",
    "run_once",
    "settings",
]

Spec = str | Mapping[str, Any]  # a registered name, or the settings of a ZeroStrategy


@dataclass
class Outcome:
    """What one rank saw.

    Attributes:
        losses: Loss of every training step, in order.
        state: The module's own `state_dict()` after fit.
        checkpoint: What `Trainer.save_checkpoint` wrote when training ended; None unless asked for.
        metrics: `Trainer.callback_metrics` after fit.
        global_step: `Trainer.global_step` after fit.
        learning_rates: Learning rate of every parameter group when training ended.
    """

    losses: list[float]
    state: dict[str, np.ndarray[Any, Any]]
    checkpoint: dict[str, Any] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    global_step: int = 0
    learning_rates: list[float] = field(default_factory=list)


# "cuda": all ranks of these Trainers share one GPU, over gloo; NCCL allows one rank per GPU.
DEVICE = torch.device(os.environ.get("LIGHTNING_ZERO_TEST_DEVICE", "cpu"))


def make_strategy(spec: Spec) -> Any:
    """A registered name as it is, settings as a ZeroStrategy."""
    from lightning_zero import ZeroStrategy

    if DEVICE.type == "cuda":
        return _on_one_gpu(spec)
    return spec if isinstance(spec, str) else ZeroStrategy(**spec)


def _on_one_gpu(spec: Spec) -> Any:
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_zero import ZeroStrategy

    kind, options = ZeroStrategy, dict(spec) if not isinstance(spec, str) else {}
    if isinstance(spec, str):
        if spec not in StrategyRegistry:
            return spec
        kind, options = (StrategyRegistry[spec][key] for key in ("strategy", "init_params"))
    devices = [torch.device("cuda", 0)] * int(os.environ.get("WORLD_SIZE", "1"))
    shared = {"parallel_devices": devices, "process_group_backend": "gloo"}
    return kind(**{**shared, **options})


def make_trainer(spec: Spec, **options: Any) -> Trainer:
    """A quiet CPU Trainer of one epoch over the ranks that the environment promises."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("WORLD_SIZE", "1")),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    given = {"strategy": make_strategy(spec), **defaults, **options}
    if DEVICE.type == "cuda":
        _compute_exactly()
        given["accelerator"] = "gpu"
        given["devices"] = 1 if given["strategy"] == "auto" else "auto"
    return Trainer(**given)


def _compute_exactly() -> None:
    """Lets a GPU give the same sums in every run, in fp32."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    warnings.filterwarnings("ignore", ".*deterministic.*")


def fit(
    rank: int,
    world_size: int,
    spec: Spec,
    factory: Callable[[], LightningModule],
    options: Mapping[str, Any] | None = None,
    is_saving: bool = False,
    ckpt_path: str | None = None,
) -> Outcome:
    """One fit on this rank; for `run_ranks(..., has_group=False)`.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        spec: The strategy.
        factory: Builds the module, from the same seed on every rank.
        options: Arguments of the Trainer.
        is_saving: Save a checkpoint when training ends, and return what is in it.
        ckpt_path: A checkpoint to resume from.
    """
    seed_everything(7, verbose=False)
    module = factory()
    witness = Witness(is_saving)
    options = dict(options or {})
    options["callbacks"] = [*options.get("callbacks", []), witness]
    trainer = make_trainer(spec, **options)
    trainer.fit(module, ckpt_path=ckpt_path)
    return Outcome(
        losses=list(module.losses),
        state=arrays(module.state_dict()),
        checkpoint=witness.checkpoint,
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        global_step=trainer.global_step,
        learning_rates=witness.learning_rates,
    )


class Witness(Callback):
    """Sees what is gone after teardown: the learning rates, and a checkpoint."""

    def __init__(self, is_saving: bool) -> None:
        self.is_saving = is_saving
        self.checkpoint: dict[str, Any] | None = None
        self.learning_rates: list[float] = []

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.learning_rates = [
            float(group["lr"])
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
        ]
        if self.is_saving:
            trainer.save_checkpoint("witness.ckpt")
            self.checkpoint = torch.load("witness.ckpt", weights_only=True)


def arrays(state: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Tensors as arrays; bfloat16, which numpy lacks, as float32."""
    return {
        name: (value.float() if value.dtype is torch.bfloat16 else value)
        .detach()
        .cpu()
        .numpy()
        .copy()
        for name, value in state.items()
    }


def settings(stage: int, **options: Any) -> dict[str, Any]:
    """Settings of a ZeroStrategy."""
    return {"stage": stage, **options}


def fit_ranks(
    world_size: int,
    spec: Spec,
    factory: Callable[[], LightningModule],
    options: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    **rest: Any,
) -> list[Outcome]:
    """`fit` on every rank."""
    __tracebackhide__ = True
    return run_ranks(
        world_size, _fit_with, spec, factory, options, rest, has_group=False, timeout_s=timeout_s
    )


def _fit_with(
    rank: int, world_size: int, spec: Spec, factory: Any, options: Any, rest: dict[str, Any]
) -> Outcome:
    return fit(rank, world_size, spec, factory, options, **rest)


class _Key:
    """A cache key for arguments that have no hash: their text."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.text = repr(parts)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.text == other.text


def fit_reference(
    world_size: int,
    factory: Callable[[], LightningModule],
    options: Mapping[str, Any] | None = None,
    spec: Spec = "ddp",
) -> list[Outcome]:
    """The reference for `fit_ranks`, computed once for all stages: DDP, or one process ("auto").

    One process has the global batch: `factory` must promise the number of ranks.
    """
    return run_once(world_size, _fit_with, spec, factory, options, {})


def run_once(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`run_ranks` without a group; the same arguments run in one test session only once."""
    return _run_once(_Key(world_size, fn, args))


@cache
def _run_once(key: _Key) -> list[Any]:
    world_size, fn, args = key.parts
    return run_ranks(world_size, fn, *args, has_group=False)


def assert_same(
    ours: Sequence[Outcome],
    reference: Sequence[Outcome],
    *,
    rtol: float = 1e-6,
    atol: float = 1e-6,
) -> None:
    """Losses of each rank and full parameters on every rank equal the reference's.

    A reference of one process has the mean of the ranks' losses.
    """
    __tracebackhide__ = True
    assert ours[0].losses, "nothing was trained"
    if len(reference) == len(ours):
        for rank, (one, other) in enumerate(zip(ours, reference, strict=True)):
            np.testing.assert_allclose(
                one.losses, other.losses, rtol=rtol, atol=atol, err_msg=f"losses of rank {rank}"
            )
    else:
        mean = np.mean([outcome.losses for outcome in ours], axis=0)
        np.testing.assert_allclose(
            mean, reference[0].losses, rtol=rtol, atol=atol, err_msg="losses"
        )
    for rank, outcome in enumerate(ours):
        expected = reference[rank if len(reference) == len(ours) else 0].state
        assert list(outcome.state) == list(expected)
        for name, value in outcome.state.items():
            assert value.dtype == expected[name].dtype, name
            assert value.shape == expected[name].shape, name
            np.testing.assert_allclose(
                value, expected[name], rtol=rtol, atol=atol, err_msg=f"{name} on rank {rank}"
            )
    assert {outcome.global_step for outcome in ours} == {reference[0].global_step}
    assert ours[0].learning_rates == reference[0].learning_rates
