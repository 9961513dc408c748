"""Ranks that run different modules, in different orders and numbers, train as one process does."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zero import Engine, ZeroConfig, gathered
from tests.cells import slow_but
from tests.distributed.ranks import run_ranks

WIDTH, NUM, STEPS = 8, 5, 14


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.two(self.one(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM))

    def forward(self, x, order, *, is_checkpointed=False):
        x = self.first(x)
        for index in order:
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if is_checkpointed else block(x)
        return self.last(x)


def _forwards(rng, mode, step):
    """For one rank and step: the blocks of each forward, and whether they are checkpointed."""
    every = list(range(NUM))
    if mode == "dropped" or (mode == "rare" and rng.random() < 0.2):
        every = [index for index in every if rng.random() < 0.7]
    if mode == "shuffled" or (mode == "late" and step > 6):
        rng.shuffle(every)
    if mode == "repeated":
        every = [0, 1, 1, 2, 0, *every]
    num = 2 if mode == "twice" and rng.random() < 0.3 else 1
    return [every] * num, mode == "checkpointed" and step > 4


def _loss(net, rank, step, forwards, is_checkpointed):
    generator = torch.Generator().manual_seed(100 * step + rank)
    xs = torch.randn(2, 3, WIDTH, generator=generator)
    return sum(
        net(x, order, is_checkpointed=is_checkpointed).square().mean()
        for x, order in zip(xs, forwards, strict=False)
    )


def _train(rank, world_size, mode, seed, options):
    """The largest difference to a training that one process makes of all ranks' losses."""
    torch.manual_seed(0)
    net, alone = Net(), Net()
    alone.load_state_dict(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    reference = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
    engine = Engine(net, [optimizer], ZeroConfig(stage=3, **options))
    of_ranks = [random.Random(f"{seed} {r}") for r in range(world_size)]
    for step in range(STEPS):
        ways = [_forwards(rng, mode, step) for rng in of_ranks]
        loss = _loss(net, rank, step, *ways[rank])
        if step % 2:
            with torch.no_grad():
                net(torch.ones(1, WIDTH), ways[rank][0][0])
        engine.zero_grad(set_to_none=step % 3 > 0)  # between the two, as Lightning does
        engine.backward(loss)
        engine.step()
        reference.zero_grad(set_to_none=step % 3 > 0)
        sum(_loss(alone, r, step, *ways[r]) / world_size for r in range(world_size)).backward()
        reference.step()
    with gathered(net):
        pairs = zip(net.parameters(), alone.parameters(), strict=True)
        worst = max((one - other).abs().max().item() for one, other in pairs)
    engine.close()
    return worst


MODES = ["same", "checkpointed", "repeated", "dropped", "shuffled", "rare", "twice", "late"]
CELLS = [(mode, size, seed) for mode in MODES for size in (2, 3, 4) for seed in range(10)]


@pytest.mark.parametrize(
    ("mode", "size", "seed"),
    slow_but([(mode, 2 + (mode == "late"), 0) for mode in MODES], CELLS),
)
def test_ranks_of_other_branches_train_as_one_process(mode, size, seed):
    assert max(run_ranks(size, _train, mode, seed, {})) < 1e-6


OPTIONS = [
    {"overlap_comm": False},
    {"reshard_after_forward": False},
    {"prefetch_bucket_size": 100},
    {"sharding_group_size": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_so_they_do_with_other_settings(options):
    size = 4 if "sharding_group_size" in options else 2
    assert max(run_ranks(size, _train, "late", 0, options)) < 1e-6
