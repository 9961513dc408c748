"""A bit that is flipped in what several ranks hold is found, by name and rank."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig
from lightning_zero.engine.fingerprints import Difference, Key, RankAudit, fingerprint
from lightning_zero.optim.state_view import raw_states
from tests.support.ranks import run_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3)
        self.register_buffer("scale", torch.ones(3))
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x):
        x = self.norm(self.first(x.to(self.first.weight.dtype)).float()).tanh()
        return (self.second(x.to(self.second.weight.dtype)) * self.scale).square().mean()


def flip(tensor, bit=3):
    """Flips one bit of the first element."""
    words = torch.int16 if tensor.element_size() == 2 else torch.int32
    tensor.detach().reshape(-1).view(words)[0] ^= 1 << bit


def owned_slots(engine):
    """Slots of which this rank steps elements: bucket, index, name."""
    for bucket in engine.buckets:
        for index, slot in enumerate(bucket.plan.layout.slots):
            if len(bucket.owned(index)):
                yield bucket, index, slot.name


# Each change returns the name of what it has changed.


def flip_parameter(engine):
    bucket = engine.buckets[0]
    with torch.no_grad():
        flip(bucket.unsharded_params.views[0])
    return bucket.plan.layout.slots[0].name


def flip_shard(engine):
    bucket, index, name = next(owned_slots(engine))
    with torch.no_grad():
        flip(bucket.shards.values(index))
    return name


def flip_state(engine, key="exp_avg"):
    bucket, index, name = next(owned_slots(engine))
    flip(raw_states(engine.optimizers[0])[bucket.parameters[index]][key])
    return name


def change_step(engine):
    bucket, index, name = next(owned_slots(engine))
    raw_states(engine.optimizers[0])[bucket.parameters[index]]["step"].add_(1)
    return name


def change_rate(engine):
    engine.optimizers[0].param_groups[0]["lr"] *= 1 + 1e-12
    return "lr of group 0 of AdamW 0"


def flip_buffer(engine):
    flip(engine.module.scale)
    return "scale"


HSDP = {"sharding_group_size": 2}
CASES = {
    "stage 0 parameter": (3, {"stage": 0}, flip_parameter, "parameter"),
    "stage 1 parameter": (3, {"stage": 1}, flip_parameter, "parameter"),
    "stage 2 parameter": (3, {"stage": 2}, flip_parameter, "parameter"),
    "stage 2 bf16 parameter": (
        3,
        {"stage": 2, "param_dtype": "bfloat16"},
        flip_parameter,
        "parameter",
    ),
    "stage 0 state": (3, {"stage": 0}, flip_state, "exp_avg of"),
    "step counter": (3, {"stage": 0}, change_step, "step of"),
    "learning rate": (3, {"stage": 3}, change_rate, "setting"),
    "buffer": (3, {"stage": 3, "broadcast_buffers": False}, flip_buffer, "buffer"),
    "replica of a shard": (4, {"stage": 3} | HSDP, flip_shard, "shard of parameter"),
    "replica of a main parameter": (
        4,
        {"stage": 2, "param_dtype": "bfloat16"} | HSDP,
        flip_shard,
        "main parameter",
    ),
    "replica of a state": (4, {"stage": 2} | HSDP, flip_state, "exp_avg of"),
    "replica on the CPU tier": (
        4,
        {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"} | HSDP,
        partial(flip_state, key="exp_avg_sq"),
        "exp_avg_sq of",
    ),
}


def _audit(rank, world_size, options, change):
    torch.manual_seed(0)
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    engine = Engine(module, optimizers=[optimizer], config=ZeroConfig(**options))
    audit = RankAudit(engine)
    silent = [audit.run()]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        engine.backward(module(torch.randn(4, 5, generator=generator)))
        engine.step()
        engine.zero_grad()
        silent.append(audit.run())  # BatchNorm's statistics differ by rank
    name = change(engine) if rank == 1 else None
    found = audit.run()
    engine.close()
    return silent, [str(one) for one in found], [one.odd_ranks for one in found], name


@pytest.mark.default_cases("stage 1 parameter", "stage 0 state", "buffer", "replica of a shard")
@pytest.mark.parametrize("case", list(CASES))
def test_a_flipped_bit_is_named(case):
    world_size, options, change, kind = CASES[case]
    results = run_ranks(world_size, _audit, options, change)
    for silent, texts, ranks, _ in results:
        assert silent == [[], [], []]
        assert len(texts) == 1
        assert texts[0].startswith(f"{kind} {results[1][3]}")
        assert "rank 1" in texts[0] or "ranks 1" in texts[0]
        assert 1 in ranks[0]
        if world_size == 3:
            assert "the value of rank 1 is wrong by majority" in texts[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_fingerprint_changes_with_each_bit_and_position(dtype):
    values = torch.arange(600_001).remainder(2).to(dtype)
    first = fingerprint(values)
    assert fingerprint(values.clone()) == first
    flipped = values.clone()
    flipped.view(torch.uint8)[-1] ^= 1
    assert fingerprint(flipped) != first
    swapped = values.clone()
    swapped[[10, 11]] = values[[11, 10]]
    assert fingerprint(swapped) != first
    assert fingerprint(torch.zeros((), dtype=dtype)) == fingerprint(torch.zeros((), dtype=dtype))


def test_a_view_between_two_words_has_the_fingerprint_of_its_values():
    values = torch.arange(9, dtype=torch.bfloat16)
    assert fingerprint(values[1:5]) == fingerprint(values[1:5].clone())


def test_of_many_ranks_the_first_are_named():
    groups = (tuple(r for r in range(16) if r % 3), (0, 3, 6, 9, 12, 15))
    text = str(Difference(Key("parameter", "weight"), groups))
    assert text == (
        "parameter weight: ranks 1, 2, 4 and 7 more and ranks 0, 3, 6 and 3 more differ; "
        "the value of ranks 0, 3, 6 and 3 more is wrong by majority"
    )
