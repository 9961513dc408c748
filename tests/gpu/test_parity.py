"""Training on a GPU equals training of plain modules on the batches of all ranks."""

from __future__ import annotations

import time

import pytest
import torch

import lightning_zero
from tests.gpu.training import batch, build, form_group, loss_of, optimizer_of, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu

STEPS = 5
GROUPS = [("nccl", 1), ("gloo", 2)]
STAGES = [0, 1, 2, 3]
NVME = {"device": "nvme", "nvme_path": "."}
WAYS = {
    "overlap": {"overlap_step": True},
    "optimizer on the CPU": {"offload_optimizer": "cpu"},
    "all on the CPU": {"offload_optimizer": "cpu", "offload_param": "cpu", "overlap_step": True},
    "parameters on the CPU": {"offload_param": "cpu"},
    "parameters in files": {"offload_param": NVME},
    "all in files": {"offload_optimizer": NVME, "offload_param": NVME},
    "groups": {"sharding_group_size": 1},
}


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


def _compare(rank, world_size, backend, stage, param_dtype, options=None):
    if backend is not None:
        form_group(backend, rank, world_size)
    expected_losses, expected = _reference(world_size)
    model = build()
    optimizer = optimizer_of(model)
    config = lightning_zero.ZeroConfig(stage=stage, param_dtype=param_dtype, **(options or {}))
    engine = lightning_zero.Engine(model, optimizers=[optimizer], config=config)
    losses = torch.stack(list(train(engine, model, rank, STEPS)))
    engine.close()
    if backend is not None:
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


@pytest.mark.parametrize(("backend", "world_size"), [*GROUPS, (None, 1)])
@pytest.mark.parametrize("way", WAYS)
def test_every_tier_and_overlap_equals_one_process(way, backend, world_size):
    arguments = (backend, 3, None, WAYS[way])
    run_ranks(world_size, _compare, *arguments, timeout_s=120, has_group=False)


def _step_full_tensors(rank, world_size, backend):
    form_group(backend, rank, world_size)
    states = []
    for is_sharded in (False, True):
        model = build()
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        optimizer = torch.optim.Muon(matrices, lr=1e-2)
        for parameter in set(model.parameters()).difference(matrices):
            parameter.requires_grad_(False)
        config = lightning_zero.ZeroConfig(stage=3 if is_sharded else 0)
        engine = lightning_zero.Engine(model, optimizers=[optimizer], config=config)
        list(train(engine, model, rank, STEPS))
        engine.close()
        states.append(model.state_dict())
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("backend", "world_size"), GROUPS)
def test_full_tensors_are_stepped_as_in_stage_0(backend, world_size):
    run_ranks(world_size, _step_full_tensors, backend, timeout_s=120, has_group=False)


def _abort_before_backward(rank, world_size):
    form_group("gloo", rank, world_size)
    model = build()
    config = lightning_zero.ZeroConfig(stage=3)
    engine = lightning_zero.Engine(model, optimizers=[optimizer_of(model)], config=config)
    list(train(engine, model, rank, 1))
    loss = loss_of(model, batch(1, rank))
    begin = time.monotonic()
    if rank == 0:
        engine.comm.abort(ValueError("bad sample"))
    else:
        with pytest.raises(RuntimeError, match="bad sample"):
            engine.backward(loss)
    return time.monotonic() - begin


def test_an_abort_ends_what_another_rank_waits_for():
    assert max(run_ranks(2, _abort_before_backward, timeout_s=60, has_group=False)) < 20
