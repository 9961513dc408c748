"""Training on a GPU equals training of plain modules on the batches of all ranks."""

from __future__ import annotations

import pytest
import torch

import lightning_zero
from tests.distributed.ranks import run_ranks
from tests.gpu.training import batch, build, form_group, loss_of, optimizer_of, train

pytestmark = pytest.mark.gpu

STEPS = 5
GROUPS = [("nccl", 1), ("gloo", 2)]
STAGES = [0, 1, 2, 3]


def _reference(world_size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses by step and final parameters of one process that sees the batches of all ranks."""
    model = build()
    optimizer = optimizer_of(model)
    losses = []
    for index in range(STEPS):
        optimizer.zero_grad()
        loss = sum(loss_of(model, batch(index, rank)) for rank in range(world_size)) / world_size
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), model.state_dict()


def _compare(rank, world_size, backend, stage, param_dtype):
    form_group(backend, rank, world_size)
    expected_losses, expected = _reference(world_size)
    model = build()
    optimizer = optimizer_of(model)
    config = lightning_zero.ZeroConfig(stage=stage, param_dtype=param_dtype)
    engine = lightning_zero.Engine(model, optimizers=[optimizer], config=config)
    losses = torch.stack(list(train(engine, model, rank, STEPS)))
    engine.close()
    torch.distributed.all_reduce(losses)
    losses /= world_size
    if param_dtype is None:
        torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(model.state_dict(), expected, rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(losses, expected_losses, rtol=1e-2, atol=0)
        assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(("backend", "world_size"), GROUPS)
@pytest.mark.parametrize("stage", STAGES)
def test_fp32_equals_one_process(stage, backend, world_size):
    run_ranks(world_size, _compare, backend, stage, None, timeout_s=120, has_group=False)


@pytest.mark.parametrize(("backend", "world_size"), GROUPS)
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_follows_fp32(stage, backend, world_size):
    run_ranks(world_size, _compare, backend, stage, torch.bfloat16, timeout_s=120, has_group=False)
