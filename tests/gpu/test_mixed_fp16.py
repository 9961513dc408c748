"""`precision="16-mixed"` in a Trainer: losses are scaled, and follow those of a single device."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

import lightning_zero
from tests.gpu.training import DEVICE, SMALL, batch, build, loss_of, optimizer_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu

STEPS = 5


class Module(pl.LightningModule):
    """The small GPT; keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build(SMALL)
        self.losses: list[float] = []

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.model, ids)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.model)


def _fit(strategy, rank: int) -> tuple[list[float], float]:
    """Losses by step, and the loss scale at the end."""
    trainer = pl.Trainer(
        accelerator="gpu",
        strategy=strategy,
        precision="16-mixed",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Module()
    batches = [batch(index, rank).cpu() for index in range(STEPS)]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.losses, trainer.precision_plugin.scaler.get_scale()


def _fit_alone(rank, world_size):
    return _fit(pl.strategies.SingleDeviceStrategy(DEVICE), rank)


def _fit_sharded(rank, world_size, stage, backend, tier=None):
    strategy = lightning_zero.ZeroStrategy(
        stage=stage,
        parallel_devices=[DEVICE] * world_size,
        process_group_backend=backend,
        offload_optimizer=tier,
    )
    return _fit(strategy, rank)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nccl_at_world_size_1_follows_a_single_device(stage):
    ((expected, expected_scale),) = run_ranks(1, _fit_alone, timeout_s=120, has_group=False)
    ((losses, scale),) = run_ranks(1, _fit_sharded, stage, "nccl", timeout_s=120, has_group=False)
    assert losses == pytest.approx(expected, rel=1e-2)
    assert scale == expected_scale


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_on_the_cpu_follows_a_single_device(stage):
    ((expected, expected_scale),) = run_ranks(1, _fit_alone, timeout_s=120, has_group=False)
    arguments = (stage, "nccl", "cpu")
    ((losses, scale),) = run_ranks(1, _fit_sharded, *arguments, timeout_s=120, has_group=False)
    assert losses == pytest.approx(expected, rel=1e-2)
    assert scale == expected_scale


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_gloo_ranks_on_one_gpu_follow_stage_0(stage):
    expected = run_ranks(2, _fit_sharded, 0, "gloo", timeout_s=120, has_group=False)
    results = run_ranks(2, _fit_sharded, stage, "gloo", timeout_s=120, has_group=False)
    for (losses, scale), (expected_losses, expected_scale) in zip(results, expected, strict=True):
        assert losses == pytest.approx(expected_losses, rel=1e-2)
        assert scale == expected_scale
