"""With `overlap_step`, the forward begins before all buckets are stepped."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig
from tests.support.warm import run_ranks

_BEGAN = threading.Event()  # the forward of the first block


class Net(nn.Module):
    """Blocks of equal layers, and a buffer."""

    def __init__(self, *, bias=True):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=bias) for _ in range(4))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x) * self.scale
            if number == 0:
                _BEGAN.set()
        return x.square().mean()


class WaitingSGD(torch.optim.SGD):
    """Steps its last bucket once the forward has begun."""

    calls, were_in_time = 0, []

    def step(self, closure=None):
        if threading.current_thread().name.startswith("zero-step"):
            WaitingSGD.calls += 1
            if WaitingSGD.calls == 4:
                WaitingSGD.were_in_time.append(_BEGAN.wait(10))
        return super().step(closure)


def _train(rank, world_size, stage):
    torch.manual_seed(0)
    net = Net(bias=stage == 3)
    optimizers = [WaitingSGD([block.weight for block in net.blocks], lr=0.1)]
    options = {"reduce_bucket_size": 64}  # one block in each
    if stage == 3:
        optimizers.append(torch.optim.SGD([block.bias for block in net.blocks], lr=0.1))
        options = {"param_persistence_threshold": 10}  # biases are replicated
    options["assume_elementwise"] = ["WaitingSGD"]
    engine = Engine(net, optimizers, ZeroConfig(stage=stage, overlap_step=True, **options))
    WaitingSGD.were_in_time = []
    for _ in range(3):
        engine.backward(net(torch.ones(2, 8)))
        WaitingSGD.calls = 0
        _BEGAN.clear()
        engine.step()
        engine.zero_grad()
    net(torch.ones(2, 8))
    engine.close()
    return WaitingSGD.were_in_time


@pytest.mark.parametrize("stage", [1, 3])
def test_copied_buffers_and_replicated_parameters_do_not_wait_for_all_steps(stage):
    assert run_ranks(2, _train, stage) == [[True] * 3] * 2
