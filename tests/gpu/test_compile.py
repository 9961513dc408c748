"""Blocks that are compiled for a GPU train as plain ones do."""

from __future__ import annotations

import pytest
import torch

import lightning_zero
from tests.gpu.training import batch, build, form_group, loss_of, optimizer_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu


def _train(rank, world_size, stage, param_dtype, backend):
    """Losses of six steps with two lengths of batches."""
    form_group("gloo", rank, world_size)
    model = build()
    config = lightning_zero.ZeroConfig(stage=stage, param_dtype=param_dtype)
    engine = lightning_zero.Engine(model, optimizers=[optimizer_of(model)], config=config)
    for block in model.blocks if backend else ():
        block.compile(backend=backend)
    losses = []
    for index in range(6):
        engine.zero_grad()
        loss = loss_of(model, batch(index, rank, size=2 if index == 3 else 4))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_blocks_have_the_losses_of_plain_ones(stage, param_dtype):
    arguments = (stage, param_dtype)
    expected = run_ranks(2, _train, *arguments, None, has_group=False, timeout_s=100)
    found = run_ranks(2, _train, *arguments, "inductor", has_group=False, timeout_s=250)
    for ours, plain in zip(found, expected, strict=True):
        assert ours == pytest.approx(plain, rel=1e-4 if param_dtype is None else 2e-2)
