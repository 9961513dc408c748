"""Ranks that run different modules, in different orders and numbers, train as one process does."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zero import Engine, ZeroConfig, before_collective, gathered, uneven_calls
from tests.support.cells import slow_but
from tests.support.warm import run_ranks

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


def _worst(engine, net, alone):
    """The largest difference between parameters at the end of a training."""
    with gathered(net):
        pairs = zip(net.parameters(), alone.parameters(), strict=True)
        worst = max((one - other).abs().max().item() for one, other in pairs)
    engine.close()
    return worst


def _train(rank, world_size, mode, seed, options):
    """The largest difference to training in one process on the losses of all ranks."""
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
    return _worst(engine, net, alone)


MODES = ["same", "checkpointed", "repeated", "dropped", "shuffled", "rare", "twice", "late"]
CELLS = [(mode, size, seed) for mode in MODES for size in (2, 3, 4) for seed in range(10)]


@pytest.mark.default_cases("dropped-2-0")
@pytest.mark.parametrize(
    ("mode", "size", "seed"),
    # Late ranks are shuffled, too.
    slow_but([(mode, 2 + (mode == "late"), 0) for mode in MODES if mode != "shuffled"], CELLS),
)
def test_ranks_that_take_different_branches_train_as_one_process(mode, size, seed):
    assert max(run_ranks(size, _train, mode, seed, {})) < 1e-6


OPTIONS = [
    {"overlap_comm": False},
    {"reshard_after_forward": False},
    {"prefetch_bucket_size": 100},
    {"sharding_group_size": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ranks_that_take_different_branches_train_as_one_process_with_other_settings(options):
    size = 4 if "sharding_group_size" in options else 2
    assert max(run_ranks(size, _train, "late", 0, options)) < 1e-6


def _look_between(rank, world_size):
    """Rank 0 takes another branch for the first time; all ranks read parameters before backward."""
    torch.manual_seed(0)
    net = Net()
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.01)], ZeroConfig(stage=3))
    for step in range(6):
        order = [1, 0, 2, 1] if step == 4 and rank == 0 else [0, 1, 2]
        loss = net(torch.ones(1, WIDTH), order).sum()
        with gathered(net):
            pass
        with uneven_calls(net):
            net(torch.ones(1, WIDTH), order)
        engine.backward(loss)
        engine.step()
        engine.zero_grad()
    engine.close()


def test_ranks_can_run_collectives_between_forward_and_backward_after_different_branches():
    run_ranks(2, _look_between)


def _fail_and_go_on(rank, world_size):
    """All ranks fail, each in another block, and continue."""
    torch.manual_seed(0)
    net, alone = Net(), Net()
    alone.load_state_dict(net.state_dict())
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.01)], ZeroConfig(stage=3))
    reference = torch.optim.SGD(alone.parameters(), lr=0.01)
    order = list(range(NUM))
    for step in range(8):
        if step in (4, 5):
            handle = net.blocks[1 + rank].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                net(torch.ones(1, WIDTH), order)
            handle.remove()
        engine.backward(_loss(net, rank, step, [order], False))
        engine.step()
        engine.zero_grad()
        reference.zero_grad()
        sum(_loss(alone, r, step, [order], False) / world_size for r in range(2)).backward()
        reference.step()
    return _worst(engine, net, alone)


def test_ranks_that_all_fail_in_different_blocks_continue():
    assert max(run_ranks(2, _fail_and_go_on)) < 1e-6


def _freeze_between(rank, world_size):
    torch.manual_seed(0)
    net = Net()
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.01)], ZeroConfig(stage=3))
    for step in range(6):
        loss = net(torch.ones(1, WIDTH), range(NUM)).sum()
        net.blocks[1].requires_grad_(step < 5 or rank == 0)
        if step == 5:
            with pytest.raises(RuntimeError, match=r"requires_grad of parameter blocks\.1\.one"):
                engine.backward(loss)
            return
        engine.backward(loss)
        engine.zero_grad()


def test_a_parameter_that_is_frozen_on_one_rank_between_forward_and_backward_is_named():
    run_ranks(2, _freeze_between)


def _freeze_on_all(rank, world_size, stage):
    torch.manual_seed(0)
    net, alone = Net(), Net()
    alone.load_state_dict(net.state_dict())
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.01)], ZeroConfig(stage=stage))
    reference = torch.optim.SGD(alone.parameters(), lr=0.01)
    for step in range(8):
        ours, theirs = (m(torch.ones(1, WIDTH), range(NUM)).sum() for m in (net, alone))
        for module in (net, alone):
            module.blocks[1].requires_grad_(step < 5)
        engine.backward(ours)
        theirs.backward()
        engine.step()
        reference.step()
        engine.zero_grad()
        reference.zero_grad()
    return _worst(engine, net, alone)


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_frozen_on_all_ranks_between_forward_and_backward_is_left_out(stage):
    assert max(run_ranks(2, _freeze_on_all, stage)) < 1e-6


def _look_before_step(rank, world_size, mode, seed):
    """Forwards without backward, with other branches on each rank, right before values change."""
    torch.manual_seed(0)
    net, alone = Net(), Net()
    alone.load_state_dict(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    reference = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
    engine = Engine(net, [optimizer], ZeroConfig(stage=3))
    of_ranks = [random.Random(f"{seed} {r}") for r in range(world_size)]
    worst = 0.0

    def look(step, *, records=False):
        nonlocal worst
        order = _forwards(of_ranks[rank], "dropped", step)[0][0]
        with torch.set_grad_enabled(records):
            one, other = (m(torch.ones(1, WIDTH), order) for m in (net, alone))
        worst = max(worst, (one - other).abs().max().item())

    for step in range(STEPS):
        ways = [_forwards(random.Random(f"{step} {r}"), mode, step) for r in range(world_size)]
        engine.backward(_loss(net, rank, step, *ways[rank]))
        look(step, records=step % 2 > 0)
        if step % 3:
            look(step)
        engine.step()
        engine.zero_grad()
        sum(_loss(alone, r, step, *ways[r]) / world_size for r in range(world_size)).backward()
        reference.step()
        reference.zero_grad()
        look(step)
        for module in (net, alone):
            for parameter in module.parameters():
                if step % 2:
                    parameter.data.mul_(0.9)
                else:
                    parameter.data = parameter.data * 0.9
    return max(worst, _worst(engine, net, alone))


CELLS = [(mode, size, seed) for mode in ("same", "dropped") for size in (2, 3) for seed in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "size", "seed"), slow_but([("same", 2, 0), ("dropped", 2, 0)], CELLS)
)
def test_a_forward_right_before_a_step_or_a_write_sees_the_values_before_it(mode, size, seed):
    assert max(run_ranks(size, _look_before_step, mode, seed)) < 1e-6


class Normed(nn.Module):
    """BatchNorm statistics before branches."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM))

    def forward(self, x, order):
        x = self.norm(x)
        for index in order:
            x = self.blocks[index](x)
        return self.last(x)


def _call_between(rank, world_size, stage, between):
    """Losses, results of a call between forward and backward, and the statistics."""
    torch.manual_seed(0)
    net = module = Normed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = None
    if stage is None:
        module = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    else:
        engine = Engine(net, [optimizer], ZeroConfig(stage=stage))
    rng, generator = random.Random(rank), torch.Generator().manual_seed(rank)
    losses = []

    def call():
        order = _forwards(rng, "dropped", 0)[0][0]
        return module(torch.randn(6, WIDTH, generator=generator), order)

    for step in range(4):
        loss = call().square().mean()
        net.train(between != "eval")
        with torch.no_grad():
            losses += [float(call().square().mean()) for _ in range(1 + step % 2)]
        net.train()
        if engine is None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(loss)
            engine.step()
            engine.zero_grad()
        losses.append(float(loss.detach()))
    return losses, net.norm.running_mean.tolist()


BETWEEN = ["train", "eval"]
CELLS = [(size, stage, between) for size in (2, 3) for stage in (1, 2, 3) for between in BETWEEN]


@pytest.mark.parametrize(
    ("size", "stage", "between"), slow_but([(2, 1, "train"), (2, 3, "eval")], CELLS)
)
def test_a_call_between_forward_and_backward_copies_buffers_as_under_ddp(size, stage, between):
    ours = run_ranks(size, _call_between, stage, between)
    for (losses, buffers), (expected, others) in zip(
        ours, run_ranks(size, _call_between, None, between), strict=True
    ):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert buffers == pytest.approx(others, rel=1e-5)


class Counting(nn.Module):
    """Experts that depend on data, and counts of their use over all ranks."""

    def __init__(self, call):
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(NUM))
        self.register_buffer("load", torch.zeros(NUM))
        self.call = call

    def forward(self, x, order):
        load = torch.zeros(NUM)
        for index in order:
            x = self.experts[index](x)
            load[index] += 1
        self.call(self, x, load)
        self.load += load
        return x


def _all_reduce(module, x, load):
    dist.all_reduce(load)


def _barrier(module, x, load):
    before_collective(module)
    dist.barrier()
    dist.all_reduce(load)


def _in_backward(module, x, load):
    def count(gradient):
        before_collective(module)
        dist.all_reduce(load.clone())

    x.register_hook(count)


class Counted(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.layers = nn.ModuleList([Counting(call), Counting(call)])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x, orders):
        for layer, order in zip(self.layers, orders, strict=True):
            x = layer(x, order)
        return self.last(x)


def _train_counting(rank, world_size, stage, call, mode):
    torch.manual_seed(0)
    net = module = Counted(call)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    engine = None
    if stage is None:
        module = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    else:
        engine = Engine(net, [optimizer], ZeroConfig(stage=stage))
    rng, losses = random.Random(rank), []
    for step in range(10):
        kind = "dropped" if mode == "dropped" or step > 5 else "same"
        orders = [_forwards(rng, kind, step)[0][0] for _ in range(2)]
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = module(x, orders).square().mean()
        losses.append(float(loss.detach()))
        if engine is None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(loss)
            engine.step()
            engine.zero_grad()
    return losses, net.layers[1].load.tolist()


CELLS = [
    (size, stage, call, mode)
    for size in (2, 3)
    for stage in (1, 2, 3)
    for call in (_all_reduce, _barrier, _in_backward)
    for mode in ("dropped", "late")
]
SHOWN = [(2, 3, _all_reduce, "late"), (2, 3, _in_backward, "dropped")]


@pytest.mark.parametrize(("size", "stage", "call", "mode"), slow_but(SHOWN, CELLS))
def test_a_user_collective_after_different_units_on_each_rank_equals_ddp(size, stage, call, mode):
    ours = run_ranks(size, _train_counting, stage, call, mode)
    expected = run_ranks(size, _train_counting, None, call, mode)
    for (losses, load), (others, counts) in zip(ours, expected, strict=True):
        assert losses == pytest.approx(others, rel=1e-5)
        assert load == counts
