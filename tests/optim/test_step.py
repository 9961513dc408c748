"""What one rank alone does differently around an optimizer's step, and catches."""

from __future__ import annotations

import contextlib
import re
import time

import pytest
import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig
from tests.support.desync import assert_desynchronized
from tests.support.ranks import run_ranks
from tests.support.waits import Pace

STEP = 2  # in which rank 1 differs
BEGIN = "a forward and its backward"


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


class Normalized(torch.optim.SGD):
    """Steps with gradients of norm 1: it needs full tensors."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad / parameter.grad.norm())


def drop_gradients(module):
    module[1].zero_grad()


def fail_in_step(module):
    FailingSGD.calls_left = 1


def _train(rank, world_size, options, act):
    """Errors of this rank, by step, and the time until it stopped."""
    Pace()
    torch.manual_seed(0)
    module, errors, start = Network(), {}, time.monotonic()
    optimizer = FailingSGD(module.parameters(), lr=0.1)
    options = {"reduce_bucket_size": 72, "assume_elementwise": ["FailingSGD"], **options}
    engine = Engine(module, [optimizer], ZeroConfig(**options))
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
    first, second = run_ranks(2, _train, options, act)
    if act is drop_gradients:
        assert_desynchronized(list(first[0].values())[-1], BEGIN)
        assert_desynchronized(list(second[0].values())[-1], BEGIN)
    else:
        _assert_alone(list(first[0].values())[-1], list(second[0].values())[-1])
    assert max(first[1], second[1]) < 10


def _assert_alone(first, second):
    """Errors of both ranks, of which the second has caught an exception alone."""
    raised = r"rank 1 raised \w+Error: (the optimizer step of .* failed: )?(out of luck|handled)"
    assert re.match(f"PeerFailedError: rank 0 stops because {raised}", first), first
    alone = "but rank 0 did not raise an error of its own in a step, and ranks go on after an"
    assert re.match(f"PeerFailedError: {raised}, {alone}.*; the ranks cannot", second), second


def _caught_in_a_micro_batch(engine, module, x, is_odd):
    module.fails = is_odd
    with contextlib.suppress(ArithmeticError), engine.no_sync():
        engine.backward(module(x).sum())
    module.fails = False
    engine.backward(module(x).sum())
    engine.step()


def _reset_after_the_handler(engine, module, x, is_odd):
    loss = module(x).sum()
    if is_odd:
        engine.end_run(ArithmeticError("handled"))
        return
    engine.backward(loss)
    engine.step()


def _left_out(engine, module, x, is_odd):
    engine.backward(module(x).sum())
    if not is_odd:
        engine.step()


def _run_steps(rank, world_size, stage, step, make_optimizer):
    Pace()
    torch.manual_seed(0)
    module, start = Network(), time.monotonic()
    engine = Engine(module, [make_optimizer(module.parameters())], ZeroConfig(stage=stage))
    text = ""
    try:
        for number in range(5):
            step(engine, module, torch.ones(2, 8), rank == 1 and number == STEP)
            engine.zero_grad()
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - start


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def _full_tensor_optimizer(parameters):
    return Normalized(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("stage", "step", "make_optimizer"),
    [
        (1, _caught_in_a_micro_batch, _sgd),
        (1, _reset_after_the_handler, _sgd),
        (3, _left_out, _full_tensor_optimizer),
    ],
)
def test_what_one_rank_alone_leaves_out_is_an_error_on_all_ranks(stage, step, make_optimizer):
    (first, first_s), (second, second_s) = run_ranks(2, _run_steps, stage, step, make_optimizer)
    if step is _left_out:
        assert_desynchronized(first, None, "0 reached Normalized.step()")
        assert_desynchronized(second, BEGIN, "0 reached Normalized.step()")
    else:
        _assert_alone(first, second)
    assert max(first_s, second_s) < 10
