"""Events of one step in each stage: which collectives a bucket has, and when."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig
from lightning_zero.comm.communicator import Communicator
from tests.support.ranks import run_ranks

FORWARD, BACKWARD, STEP = "forward", "backward", "step"


class Recorder:
    """Records the collectives of the data plane and the moments between them."""

    def __init__(self):
        self.events = []
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            self._wrap(name)

    def _wrap(self, name):
        original = getattr(Communicator, name)

        def recorded(comm, *args, **kwargs):
            self.events.append(f"{name} {args[-1]}")
            return original(comm, *args, **kwargs)

        setattr(Communicator, name, recorded)


class FromLastToFirst(nn.Sequential):
    """Uses its members in the opposite order of their registration."""

    def forward(self, x):
        for member in reversed(self):
            x = member(x)
        return x


def _one_step(recorder, stage, settings, container):
    torch.manual_seed(0)
    module = container(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], ZeroConfig(stage=stage, **settings))
    for _ in range(3):  # the order of the first two is that of the third
        recorder.events = [FORWARD]
        loss = module(torch.ones(2, 8)).sum()
        recorder.events.append(BACKWARD)
        engine.backward(loss)
        recorder.events.append(STEP)
        engine.step()
        engine.zero_grad()
    found = recorder.events
    engine.close()
    return found


SMALL = {"reduce_bucket_size": 100}  # a bucket for each layer, named root[0] to root[2]
CASES = {
    **{f"stage {stage}": (stage, SMALL, nn.Sequential) for stage in (0, 1, 2)},
    "from last to first": (2, SMALL, FromLastToFirst),
    "stage 3": (3, {}, nn.Sequential),
    "no prefetch": (3, {"prefetch_bucket_size": 0}, nn.Sequential),
    "no reshard": (3, {"reshard_after_forward": False}, nn.Sequential),
    "persistent": (3, {"param_persistence_threshold": 10**6}, nn.Sequential),
}


def _each_case(rank, world_size):
    recorder = Recorder()
    return {name: _one_step(recorder, *case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def events():
    """Events of a step, by case; the same on both ranks."""
    first, second = run_ranks(2, _each_case)
    assert first == second
    return first


def test_stage_0_reduces_unsharded_gradients_from_the_last_bucket_on(events):
    assert events["stage 0"] == [
        FORWARD,
        BACKWARD,
        *(f"all_reduce root[{i}]" for i in (2, 1, 0)),
        STEP,
    ]


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_reduce_in_backward_and_all_gather_in_the_step(stage, events):
    assert events[f"stage {stage}"] == [
        FORWARD,
        BACKWARD,
        *(f"reduce_scatter root[{i}]" for i in (2, 1, 0)),
        STEP,
        *(f"all_gather root[{i}]" for i in (0, 1, 2)),
    ]


def test_buckets_step_in_the_order_in_which_the_next_forward_needs_them(events):
    assert events["from last to first"] == [
        FORWARD,
        BACKWARD,
        *(f"reduce_scatter root[{i}]" for i in (0, 1, 2)),
        STEP,
        *(f"all_gather root[{i}]" for i in (2, 1, 0)),
    ]


def test_stage_3_unshards_before_each_use_and_keeps_the_last_unit(events):
    assert events["no prefetch"] == [
        FORWARD,
        *(f"all_gather {i}" for i in (0, 1, 2)),
        BACKWARD,
        "reduce_scatter 2",
        "all_gather 1",
        "reduce_scatter 1",
        "all_gather 0",
        "reduce_scatter 0",
        STEP,
    ]


def test_stage_3_without_resharding_unshards_once(events):
    assert events["no reshard"] == [
        FORWARD,
        *(f"all_gather {i}" for i in (0, 1, 2)),
        BACKWARD,
        *(f"reduce_scatter {i}" for i in (2, 1, 0)),
        STEP,
    ]


def test_stage_3_all_gathers_persistent_parameters_after_the_step(events):
    assert events["persistent"] == [
        FORWARD,
        BACKWARD,
        "reduce_scatter root/persistent",
        STEP,
        "all_gather root/persistent",
    ]


def test_prefetch_unshards_the_next_unit_before_the_one_in_use_is_reduced(events):
    prefetched, without = events["stage 3"], events["no prefetch"]
    assert sorted(prefetched) == sorted(without)
    backward = prefetched[prefetched.index(BACKWARD) :]
    assert backward.index("all_gather 1") < backward.index("reduce_scatter 2")
