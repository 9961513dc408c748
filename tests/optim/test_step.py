"""What one rank alone does differently around an optimizer's step, and catches."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig
from tests.support.ranks import run_ranks

STEP = 2  # in which rank 1 differs


class Network(nn.Sequential):
    """Four layers; the third one fails in its forward on request."""

    def __init__(self):
        super().__init__(*(nn.Linear(8, 8) for _ in range(4)))
        self[2].register_forward_hook(self.fail)
        self.fails = False

    def fail(self, *_):
        if self.fails:
            raise ArithmeticError("out of luck")


class FailingSGD(torch.optim.SGD):
    """Fails in a call on request, after one good call."""

    calls_left = None

    def step(self, closure=None):
        if FailingSGD.calls_left == 0:
            FailingSGD.calls_left = None
            raise ArithmeticError("out of luck")
        if FailingSGD.calls_left is not None:
            FailingSGD.calls_left -= 1
        return super().step(closure)


def drop_gradients(module):
    module[1].zero_grad()


def fail_in_step(module):
    FailingSGD.calls_left = 1


def _train(rank, world_size, options, act):
    """Errors of this rank, by step, and the time until it stopped."""
    torch.manual_seed(0)
    module, errors, start = Network(), {}, time.monotonic()
    optimizer = FailingSGD(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], ZeroConfig(reduce_bucket_size=72, **options))
    for step in range(5):
        is_odd = rank == 1 and step == STEP
        try:
            module.fails = is_odd and act is None
            engine.backward(module(torch.ones(2, 8)).sum())
            if is_odd and act is not None:
                act(module)
            engine.step()
            engine.zero_grad()
        except Exception as error:
            errors[step] = f"{type(error).__name__}: {error}"
            if "out of luck" not in str(error):
                break
        module.fails = False
    return errors, time.monotonic() - start


CASES = [
    pytest.param({"stage": 0}, drop_gradients, marks=pytest.mark.slow),
    *(({"stage": stage}, drop_gradients) for stage in (1, 3)),
    *(pytest.param({"stage": stage}, None, marks=pytest.mark.slow) for stage in (0, 2)),
    *(({"stage": stage}, None) for stage in (1, 3)),
    *(({"stage": stage}, fail_in_step) for stage in (1, 3)),
    *(({"stage": stage, "overlap_step": True}, fail_in_step) for stage in (1, 3)),
]


@pytest.mark.parametrize(("options", "act"), CASES)
def test_what_one_rank_alone_drops_or_catches_is_an_error_on_all_ranks_at_once(options, act):
    for errors, seconds in run_ranks(2, _train, options, act):
        assert "DesynchronizedError: this rank reached" in list(errors.values())[-1]
        assert seconds < 10
