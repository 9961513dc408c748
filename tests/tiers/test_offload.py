"""Offloaded runs are bit-equal to the same runs on the device, for every placement of states."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from lightning_zero import Engine, OffloadConfig, ZeroConfig
from lightning_zero.tiers.storage import Storage
from tests.support import ranks
from tests.support.cells import SHARDED_STAGE
from tests.support.warm import run_ranks

WIDTH = 192
SMALL = {"buffer_count": 3, "buffer_size": 2**16}


def nvme(**options):
    return OffloadConfig("nvme", nvme_path="swap", **SMALL, **options)


def three_tiers(**options):
    # Each tier gets some of the buckets of `Net` at either world size.
    return OffloadConfig(
        "auto", nvme_path="swap", max_in_device_bytes=500_000, max_in_cpu_bytes=900_000, **SMALL
    )


CASES = {
    "optimizer cpu": {"offload_optimizer": "cpu"},
    "optimizer nvme": {"offload_optimizer": nvme()},
    "optimizer and gradients nvme": {"offload_optimizer": nvme(max_in_cpu_bytes=0)},
    "half of the optimizer nvme": {"offload_optimizer": nvme(ratio=0.5)},
    "optimizer auto": {"offload_optimizer": three_tiers()},
}
CASES_OF_STAGE_3 = {
    "parameters cpu": {"offload_param": "cpu"},
    "parameters nvme": {"offload_param": nvme()},
    "all cpu": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "all nvme": {"offload_param": nvme(), "offload_optimizer": nvme(max_in_cpu_bytes=0)},
    "parameters nvme, optimizer cpu": {"offload_param": nvme(), "offload_optimizer": "cpu"},
    "all auto": {"offload_param": three_tiers(), "offload_optimizer": three_tiers()},
}


def cases(stage):
    return {**CASES, **(CASES_OF_STAGE_3 if stage == 3 else {})}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(8, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.exit = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.exit(self.blocks(self.entry(x.to(self.entry.weight.dtype)))).float()


def make(config, make_optimizers=None, dtype=torch.float32):
    torch.manual_seed(3)
    net = Net().to(dtype)
    if make_optimizers is None:
        optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)]
    else:
        optimizers = make_optimizers(net)
    return net, optimizers, Engine(net, optimizers, config)


def batch(rank, number):
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(4, 8, generator=generator)


def loss_of(net, x):
    return (net(x) - x.sum(dim=1, keepdim=True)).square().mean()


def train(rank, net, engine, *, micro_batches=1, clip=None, num_steps=4, first=0):
    losses = []
    for step in range(first, first + num_steps):
        for micro in range(micro_batches):
            loss = loss_of(net, batch(rank, step * micro_batches + micro)) / micro_batches
            losses.append(loss.item())
            if micro < micro_batches - 1:
                with engine.no_sync():
                    engine.backward(loss)
            else:
                engine.backward(loss)
        if clip is not None:
            engine.clip_grad_norm_(clip)
        engine.step()
        engine.zero_grad()
    return losses


def state_of(net, optimizers, engine):
    """Full parameters and optimizer states; closes the engine."""
    engine.close()
    states = [
        {key: value.clone() for key, value in optimizer.state[parameter].items()}
        for optimizer in optimizers
        for parameter in net.parameters()
        if parameter in optimizer.state
    ]
    return [p.detach().clone() for p in net.parameters()], states


def assert_bit_equal(one, other, name):
    for a, b in zip(one[0], other[0], strict=True):
        assert torch.equal(a, b), name
    assert len(one[1]) == len(other[1]), name
    for a, b in zip(one[1], other[1], strict=True):
        assert a.keys() == b.keys(), name
        for key in a:
            assert torch.equal(a[key], b[key]), (name, key)


def run(rank, config, make_optimizers=None, dtype=torch.float32, **options):
    net, optimizers, engine = make(config, make_optimizers, dtype)
    losses = train(rank, net, engine, **options)
    return losses, *state_of(net, optimizers, engine)


def _compare(rank, world_size, stage, micro_batches, clip, num_steps, **extra):
    os.makedirs("swap", exist_ok=True)
    options = {"micro_batches": micro_batches, "clip": clip, "num_steps": num_steps}
    base = {"stage": stage, "reduce_bucket_size": 2**17, **extra}
    losses, *expected = run(rank, ZeroConfig(**base), **options)
    assert losses[0] != losses[-1]
    is_short = num_steps < 10
    for number, (name, offload) in enumerate(cases(stage).items()):
        for overlaps in [number % 2 == 0] if is_short else [False, True]:
            config = ZeroConfig(**base, **offload, overlap_step=overlaps)
            found_losses, *found = run(rank, config, **options)
            assert found_losses == losses, (name, overlaps)
            assert_bit_equal(expected, found, (name, overlaps))


@pytest.mark.default_cases("1-1-None-3")
@pytest.mark.shows("offload to CPU memory and NVMe, bit-equal")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("world_size", "micro_batches", "clip"), [(1, 1, None), (2, 3, 0.1)])
def test_an_offloaded_run_is_bit_equal(stage, world_size, micro_batches, clip):
    run_ranks(world_size, _compare, stage, micro_batches, clip, 4, timeout_s=240)


@pytest.mark.slow
@pytest.mark.parametrize("stage", SHARDED_STAGE)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_ten_offloaded_steps_are_bit_equal(stage, world_size, micro_batches, clip):
    run_ranks(world_size, _compare, stage, micro_batches, clip, 10, timeout_s=280)


def _compare_bf16(rank, world_size, stage):
    _compare(rank, world_size, stage, 2, 0.1, 4, param_dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_with_offloaded_16_bit_parameters_and_masters_too(stage):
    run_ranks(2, _compare_bf16, stage, timeout_s=240)


def _compare_separate_memory(rank, world_size, stage, dtype):
    # As on a device whose memory is not the CPU's, as far as a machine without one can show it.
    make_storage = Storage.__init__

    def init_with_device_memory(self, *args, **kwargs):
        make_storage(self, *args, **kwargs)
        self.has_device_memory = True

    Storage.__init__ = init_with_device_memory
    _compare(rank, world_size, stage, 2, 0.1, 4, param_dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (1, torch.bfloat16),
        (2, None),
        (3, torch.bfloat16),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, None), (2, torch.bfloat16), (3, None))
        ),
    ],
)
def test_where_cpu_memory_is_not_the_devices_too(stage, dtype):
    ranks.run_ranks(2, _compare_separate_memory, stage, dtype, timeout_s=240)
