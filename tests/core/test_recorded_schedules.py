"""Which passes are recorded, and when a recorded schedule is dropped: all-gathers and rounds."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import Engine, ZeroConfig, before_collective
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.rounds import RequestKind
from tests.core.test_branches import WIDTH, Block
from tests.core.test_order import NUM_UNITS, Rank, World
from tests.support import ranks
from tests.support.desync import assert_desynchronized
from tests.support.warm import run_ranks

REPLAYED = 2  # rounds of a pass that follows a schedule: its beginning and its end


class Net(nn.Module):
    """Blocks, used in any order, and a last layer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x, order, *, has_collective=False):
        for index in order:
            x = self.blocks[index](x)
        if has_collective:
            before_collective(self)
            dist.all_reduce(x.detach().clone())
        return self.last(x)


def _train(rank, world_size, orders_of_ranks):
    """By step: the number of rounds, and the units that are all-gathered."""
    net = Net()
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.01)], ZeroConfig(stage=3))
    original, gathered, steps = Communicator.all_gather, [], []

    def all_gather(comm, *args, **kwargs):
        gathered.append(args[-1])
        return original(comm, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "all_gather", all_gather)
        for order in orders_of_ranks[rank]:
            before = engine.comm.control.num_rounds
            gathered.clear()
            engine.backward(net(torch.ones(2, WIDTH), order).sum())
            engine.step()
            engine.zero_grad()
            steps.append((engine.comm.control.num_rounds - before, set(gathered)))
    engine.close()
    return steps


def _run(*orders_of_ranks):
    first, *others = run_ranks(len(orders_of_ranks), _train, orders_of_ranks)
    assert all(steps == first for steps in others)
    return first


def test_a_unit_that_no_rank_uses_any_more_is_no_longer_all_gathered():
    every, fewer = [0, 1, 2, 3, 4], [0, 1, 3, 4]
    steps = _run(*[[every] * 4 + [fewer] * 5] * 2)
    assert [("blocks.2" in units) for _, units in steps] == [True] * 6 + [False] * 3
    assert steps[-1][0] == REPLAYED


@pytest.mark.slow
def test_the_schedule_of_units_that_only_some_ranks_use_is_kept():
    every = [0, 1, 2, 3, 4]
    steps = _run([every] * 3 + [[0, 1, 2, 3]] * 5, [every] * 3 + [[0, 1, 2, 4]] * 5)
    assert [num_rounds for num_rounds, _ in steps[3:]] == [REPLAYED] * 5


def test_training_passes_that_only_some_ranks_make_do_not_count_as_the_last_one():
    world = World(2, random.Random(0))
    awaited = []

    def program(rank):
        one = Rank(world, rank)
        for _ in range(3):
            one.step(range(NUM_UNITS))
            one.change()
        one.order.allow_uneven_calls(True)
        for _ in range(2 * rank):  # with gradients, as forces need them; rank 0 serves rank 1
            one.order.begin("a forward and its backward", [True])
            for unit in range(3):
                one.use(unit)
                one.unsharded.discard(unit)
            one.unsharded.clear()
        one.order.serve_until(RequestKind.LEFT, "the end of the loop")
        one.order.allow_uneven_calls(False)
        for _ in range(3):
            before = one.control_plane.num_awaited
            one.step(range(NUM_UNITS))
            one.change()
            awaited.append(one.control_plane.num_awaited - before)

    world.run(program)
    assert awaited[-2:] == [0, 0]


def _run_collectives(rank, world_size, steps):
    net = Net()
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.01)], ZeroConfig(stage=3))
    for orders, has_collective in steps:
        loss = net(torch.ones(2, WIDTH), orders[rank], has_collective=has_collective).sum()
        engine.backward(loss)
        engine.step()
        engine.zero_grad()
    engine.close()


SAME, OTHER = ([0, 1], [0, 1]), ([0, 1], [0, 1, 2])


@pytest.mark.parametrize(
    "steps",
    [
        [(SAME, False), (SAME, False), (OTHER, True)],
        [*[(SAME, False)] * 3, (SAME, True), (OTHER, False), (OTHER, True)],
    ],
    ids=["in pass 3", "later"],
)
def test_a_collective_that_is_not_in_the_first_pass_does_not_deadlock(steps):
    run_ranks(2, _run_collectives, steps, timeout_s=30)


def _announce(rank, world_size):
    net = Net()
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.01)], ZeroConfig(stage=3))
    order = engine.coordinator.order
    order.announce_collective("a norm" if rank else "a sum")
    with pytest.raises(RuntimeError) as raised:
        order.barrier("the end")
    text = f"DesynchronizedError: {raised.value}"
    assert_desynchronized(text, "a norm" if rank else None, "0 reached a sum")


def test_a_mismatch_in_a_round_that_is_not_awaited_names_the_call():
    ranks.run_ranks(2, _announce)
