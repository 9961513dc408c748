"""Rounds between real ranks, and how many of them a step has."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import Engine, OffloadConfig, ZeroConfig, uneven_calls
from lightning_zero.comm.control import Rounds
from lightning_zero.record.spans import Kind
from tests.support.warm import run_ranks


def _run_rounds(rank, world_size):
    rounds = Rounds(dist.new_group(backend="gloo"), rank=rank, size=world_size)
    rounds.reserve(world_size)
    mask = bytes(rank + 1 if place == rank else 0 for place in range(world_size))
    same = random.Random(0)  # on every rank
    for number in range(60):
        sent = [same.randrange(100) - 50 for _ in range(world_size)]
        expected = ([min(sent), -max(sent)], bytes(range(1, world_size + 1)))
        if number % 3:
            result = rounds.run_round([sent[rank], -sent[rank]], mask)
        else:  # the rank continues meanwhile, sometimes to the next round
            begun = rounds.begin([sent[rank], -sent[rank]], mask)
            if same.random() < 0.5:
                rounds.run_round([0])
            result = begun.result()
        assert (result.numbers, result.mask) == expected
    rounds.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_ranks_receive_the_lowest_number_and_every_bit(world_size):
    run_ranks(world_size, _run_rounds)


def _judge(rank, world_size):
    rounds = Rounds(dist.new_group(backend="gloo"), rank=rank, size=world_size)
    rounds.reserve(8)

    def check(result):
        others = rounds.run_round([], b"%d" % rank).mask  # one more round, in the same thread
        return ValueError(f"{result.numbers} {others[:1]!r} {threading.current_thread().name}")

    found = [rounds.begin([rank], check=check).result(), rounds.run_round([rank], check=check)]
    assert [str(result.error) for result in found] == [
        "[0] b'2' zero-rounds",
        "[0] b'2' MainThread",
    ]
    rounds.close()


def test_a_round_check_may_run_further_rounds():
    run_ranks(3, _judge)


class Blocks(nn.Module):
    def __init__(self, num):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(num))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).relu()
        return x.square().mean()


OPTIONS = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "no overlap": {"overlap_comm": False},
    "offload": {"offload_optimizer": OffloadConfig("cpu")},
    "groups": {"sharding_group_size": 1},
}


def _count(rank, world_size, stage, num, options, num_micro_batches):
    torch.manual_seed(0)
    module = Blocks(num)
    optimizer = torch.optim.AdamW(module.parameters())
    engine = Engine(module, [optimizer], ZeroConfig(stage=stage, **OPTIONS[options]))
    counts = []
    for _ in range(8):
        engine.recorder.begin(0)
        before = engine.comm.control.num_rounds
        for _ in range(num_micro_batches - 1):
            with engine.no_sync():
                engine.backward(module(torch.randn(2, 4)))
        engine.backward(module(torch.randn(2, 4)))
        engine.step()
        engine.zero_grad()
        counts.append(engine.comm.control.num_rounds - before)
        waits = {span.name for span in engine.recorder.end().of(Kind.AGREE, is_wait=True)}
    with torch.no_grad():
        for _ in range(3):
            before = engine.comm.control.num_rounds
            module(torch.randn(2, 4))
            evaluation = engine.comm.control.num_rounds - before
    engine.close()
    return counts[-1], waits, evaluation


CELLS = [
    (0, 8, "plain", 1),
    (1, 8, "plain", 2),
    pytest.param(1, 8, "plain", 4, marks=pytest.mark.slow),
    (2, 8, "offload", 1),
    pytest.param(2, 32, "offload", 1, marks=pytest.mark.slow),
    (3, 32, "plain", 1),
    pytest.param(3, 128, "plain", 1, marks=pytest.mark.slow),
    (3, 8, "plain", 2),
    pytest.param(3, 8, "plain", 4, marks=pytest.mark.slow),
    (3, 8, "kept", 1),
    (3, 8, "no overlap", 1),
    (3, 8, "groups", 2),
    pytest.param(3, 8, "groups", 4, marks=pytest.mark.slow),
    (3, 8, "offload", 1),
]


@pytest.mark.default_cases("3-8-plain-2")
@pytest.mark.parametrize(("stage", "num", "options", "num_micro_batches"), CELLS)
def test_a_micro_batch_has_two_rounds_of_which_one_is_waited_for(
    stage, num, options, num_micro_batches
):
    for count, waits, evaluation in run_ranks(2, _count, stage, num, options, num_micro_batches):
        assert count <= 2 * num_micro_batches
        assert waits == {"the end of the backward on all ranks"}
        assert evaluation <= 1


def _fall_behind(rank, world_size):
    """Rank 1 is late: rank 0 continues until it needs data, and waits for no round."""
    torch.manual_seed(0)
    module = Blocks(8)
    engine = Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], ZeroConfig(stage=1))
    for _ in range(3):
        engine.backward(module(torch.randn(2, 4)))
        engine.step()
        engine.zero_grad()
    if rank == 1:
        time.sleep(1.0)
    start = time.monotonic()
    with torch.no_grad():
        module(torch.randn(2, 4))
    seconds = time.monotonic() - start
    engine.close()
    return seconds


def test_a_forward_without_all_gathers_waits_for_no_rank():
    early, _ = run_ranks(2, _fall_behind)
    assert early < 0.5


def _generate(rank, world_size):
    """Rank 1 generates two more tokens."""
    torch.manual_seed(0)
    module = Blocks(8)
    engine = Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], ZeroConfig(stage=3))
    for _ in range(4):
        before = engine.comm.control.num_rounds
        with uneven_calls(module):
            for _ in range(6 + 2 * rank):
                module(torch.randn(2, 4))
        count = engine.comm.control.num_rounds - before
    engine.close()
    return count


def test_generation_has_a_round_for_each_token():
    for count in run_ranks(2, _generate):
        assert count <= 8 + 2  # the tokens of the longer one, the beginning and the end
