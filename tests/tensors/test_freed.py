"""Freed memory as a CUDA device has it: an empty storage, of which torch makes no slice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lightning_zero
from lightning_zero.optim.state import optimizer_state_dict
from lightning_zero.tensors import freed
from tests.support.ranks import run_ranks


def _train_and_close(rank, world_size, param_dtype):
    freed._sentinel = lambda nbytes: None
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(module.parameters())
    config = lightning_zero.ZeroConfig(stage=3, param_dtype=param_dtype)
    engine = lightning_zero.Engine(module, [optimizer], config)
    for _ in range(2):
        engine.backward(module(torch.ones(2, 8, dtype=param_dtype)).float().sum())
        engine.step()
        engine.zero_grad()
    engine.close(keep_optimizer_shards=True)
    states = optimizer_state_dict(optimizer, engine.buckets, is_recipient=True)["state"]
    engine.comm.close()
    return {key: tuple(value["exp_avg"].shape) for key, value in states.items()}


@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
def test_no_slice_of_freed_memory_is_taken(param_dtype):
    shapes = {0: (8, 8), 1: (8,), 2: (8, 8), 3: (8,)}
    assert run_ranks(1, _train_and_close, param_dtype) == [shapes]
