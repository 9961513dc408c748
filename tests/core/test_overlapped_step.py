"""With `overlap_step`, the forward begins before all buckets are stepped."""

from __future__ import annotations

import threading

import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig
from tests.support.ranks import run_ranks

_BEGAN = threading.Event()  # the forward of the first block


class Net(nn.Module):
    """Blocks of equal layers, whose biases are replicated, and a buffer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
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


def _train(rank, world_size):
    torch.manual_seed(0)
    net = Net()
    weights, biases = ([getattr(b, name) for b in net.blocks] for name in ("weight", "bias"))
    optimizers = [WaitingSGD(weights, lr=0.1), torch.optim.SGD(biases, lr=0.1)]
    config = ZeroConfig(stage=3, overlap_step=True, param_persistence_threshold=10)
    engine = Engine(net, optimizers, config)
    for _ in range(3):
        engine.backward(net(torch.ones(2, 8)))
        WaitingSGD.calls = 0
        _BEGAN.clear()
        engine.step()
        engine.zero_grad()
    net(torch.ones(2, 8))
    engine.close()
    return WaitingSGD.were_in_time


def test_copied_buffers_and_replicated_parameters_do_not_wait_for_steps_of_sharded_ones():
    assert run_ranks(2, _train) == [[True] * 3] * 2
