"""What ranks do differently before an optimizer's step."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig
from tests.support.ranks import run_ranks


def _train(engine, module, rank):
    for step in range(3):
        engine.backward(module(torch.ones(2, 8)).sum())
        if rank == 1 and step == 1:
            module[1].zero_grad()
        engine.step()
        engine.zero_grad()


def _drop_a_gradient(rank, world_size, stage):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], ZeroConfig(stage=stage, reduce_bucket_size=72))
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        _train(engine, module, rank)
    return str(raised.value), time.monotonic() - start


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_that_one_rank_alone_drops_before_a_step_are_an_error_on_all_ranks(stage):
    for text, seconds in run_ranks(2, _drop_a_gradient, stage):
        assert "p.grad = None" in text
        assert seconds < 10
