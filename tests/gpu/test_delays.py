"""Delays before every copy and collective on the side streams of a GPU change no value."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch

import lightning_zero
from lightning_zero.record import streams
from tests.gpu.test_parity import GROUPS, STEPS, WAYS
from tests.gpu.training import build, form_group, optimizer_of, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu

_MAX_CYCLES = 2_000_000  # about a millisecond
CASES = {
    **{f"stage {stage}": {"stage": stage} for stage in (1, 2, 3)},
    **{way: {"stage": 3, **options} for way, options in WAYS.items()},
    "overlap of stage 1": {"stage": 1, "overlap_step": True},
}


def delay_side_streams(seed: int) -> None:
    """From now on, what is queued on a side stream starts late, by another time each time."""
    delays, on = random.Random(seed), streams.on

    @contextmanager
    def late(stream):
        with on(stream):
            if stream is not None:
                torch.cuda._sleep(delays.randrange(_MAX_CYCLES))
            yield

    streams.on = late


def _train(rank, world_size, backend, config):
    if not torch.distributed.is_initialized():
        form_group(backend, rank, world_size)
    model = build()
    engine = lightning_zero.Engine(
        model, optimizers=[optimizer_of(model)], config=lightning_zero.ZeroConfig(**config)
    )
    losses = torch.stack(list(train(engine, model, rank, STEPS)))
    engine.close()
    return {"losses": losses, **model.state_dict()}


def _compare(rank, world_size, backend, config):
    expected = _train(rank, world_size, backend, config)
    delay_side_streams(seed=rank)
    found = _train(rank, world_size, backend, config)
    differing = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    assert not differing


@pytest.mark.parametrize(("backend", "world_size"), GROUPS)
@pytest.mark.parametrize("case", CASES)
def test_delays_on_side_streams_change_no_bit(case, backend, world_size):
    run_ranks(world_size, _compare, backend, CASES[case], timeout_s=120, has_group=False)
