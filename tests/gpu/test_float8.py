"""Float8 layers on a GPU train as those in bfloat16 do, with any number of rows."""

from __future__ import annotations

import pytest
import torch

import lightning_zero
from tests.gpu.training import DEVICE, batch, build, form_group, loss_of, optimizer_of
from tests.support.ranks import run_ranks

pytest.importorskip("torchao", reason="needs torchao")
from torchao.float8 import Float8LinearConfig

pytestmark = pytest.mark.gpu


def _train(rank, world_size, stage, is_float8):
    """Losses of four steps on 4 x 31 tokens, which are no multiple of 16."""
    form_group("gloo", rank, world_size)
    model = build()
    if is_float8:
        config = Float8LinearConfig(pad_inner_dim=True)
        lightning_zero.Float8Precision(config).convert_module(model)
    config = lightning_zero.ZeroConfig(
        stage=stage, param_dtype=torch.bfloat16, keep_float32="autocast"
    )
    engine = lightning_zero.Engine(model, optimizers=[optimizer_of(model)], config=config)
    losses = []
    for index in range(4):
        engine.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = loss_of(model, batch(index, rank)[:, :-1])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_float8_layers_have_the_losses_of_bfloat16(stage):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with float8")
    expected = run_ranks(2, _train, stage, False, has_group=False, timeout_s=100)
    found = run_ranks(2, _train, stage, True, has_group=False, timeout_s=100)
    for ours, plain in zip(found, expected, strict=True):
        assert ours != plain
        assert ours == pytest.approx(plain, rel=3e-2)
