"""Clipping and gradient norms see the gradients of all ranks, as under DDP."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_zero import Engine, ZeroConfig
from tests.support.cells import SHARDED_STAGE
from tests.support.fitting import (
    assert_same,
    fit_ranks,
    fit_reference,
    make_trainer,
    run_once,
    settings,
)
from tests.support.models import FrozenModule, GPTModule, MLPModule, TiedModule
from tests.support.warm import run_ranks

STAGES = [1, 2, 3]
MODELS = {
    "two groups": partial(MLPModule, ranks=2, optimizer="sgd"),
    "frozen": partial(FrozenModule, ranks=2, optimizer="sgd"),
    "frozen and not given": partial(FrozenModule, ranks=2, optimizer="sgd", is_given_frozen=False),
    "tied": partial(TiedModule, ranks=2, optimizer="sgd"),
    "tied gpt": partial(GPTModule, ranks=2, is_tied=True, optimizer="sgd"),
}


@pytest.mark.default_cases("frozen and not given-2")
@pytest.mark.shows("gradient clipping by norm")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", list(MODELS))
def test_clipping_by_norm_equals_ddp(model, stage):
    options = {"gradient_clip_val": 0.1}
    ours = fit_ranks(2, settings(stage), MODELS[model], options)
    reference = fit_reference(2, MODELS[model], options)
    assert_same(ours, reference)
    assert _differs(reference, fit_reference(2, MODELS[model]))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_by_norm_over_accumulated_gradients_of_three_ranks_equals_ddp(stage):
    factory = partial(MLPModule, ranks=3, optimizer="sgd")
    options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    ours = fit_ranks(3, settings(stage), factory, options)
    assert_same(ours, fit_reference(3, factory, options))


@pytest.mark.default_cases("two groups-3")
@pytest.mark.shows("gradient clipping by value")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", ["two groups", "tied gpt"])
def test_clipping_by_value_equals_ddp(model, stage):
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ours = fit_ranks(2, settings(stage), MODELS[model], options)
    reference = fit_reference(2, MODELS[model], options)
    assert_same(ours, reference)
    assert _differs(reference, fit_reference(2, MODELS[model]))


class OwnValueModule(MLPModule):
    """Overrides the hook and gives Lightning another value."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, 0.05, "norm")


class TorchNormModule(MLPModule):
    """Overrides the hook and calls torch's own clipping."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class TorchValueModule(MLPModule):
    """Overrides the hook and calls torch's own clipping by value."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)


class OneGroupModule(MLPModule):
    """Clips one of its two parameter groups."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[1]["params"], 0.05)


class NoClippingModule(MLPModule):
    """Overrides the hook and does nothing."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        pass


@pytest.mark.default_cases("OwnValueModule-3")
@pytest.mark.shows("`configure_gradient_clipping`")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "module", [OwnValueModule, TorchNormModule, TorchValueModule, OneGroupModule]
)
def test_an_overridden_hook_is_honoured_as_under_ddp(module, stage):
    factory = partial(module, ranks=2, optimizer="sgd")
    ours = fit_ranks(2, settings(stage), factory)
    assert_same(ours, fit_reference(2, factory))


def test_a_hook_that_does_nothing_keeps_the_trainers_value_from_clipping():
    factory = partial(NoClippingModule, ranks=2, optimizer="sgd")
    ours = fit_ranks(2, settings(3), factory, {"gradient_clip_val": 1e-3})
    assert_same(ours, fit_reference(2, partial(MLPModule, ranks=2, optimizer="sgd")))


class NormModule(GPTModule):
    """Records the norms of its gradients before each step."""

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(grad_norm(self, 2) | grad_norm(self, "inf"))

    def on_fit_start(self):
        self.norms = []


@pytest.mark.default_cases("1-3")
@pytest.mark.shows("`grad_norm` in `on_before_optimizer_step`")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_grad_norm_before_the_step_gives_the_values_of_ddp(world_size, stage):
    ours = run_ranks(world_size, _norms, settings(stage), has_group=False)
    expected = run_once(world_size, _norms, "ddp")[0]
    assert len(expected) == 2
    for norms in ours:
        for step, reference in zip(norms, expected, strict=True):
            assert list(step) == list(reference)
            np.testing.assert_allclose(list(step.values()), list(reference.values()), rtol=2e-6)


def _norms(rank, world_size, spec):
    torch.manual_seed(0)
    module = NormModule(ranks=world_size, is_tied=True)
    make_trainer(spec, accumulate_grad_batches=2).fit(module)
    return [{name: float(value) for name, value in step.items()} for step in module.norms]


def _differs(one, other):
    return any(not np.allclose(one[0].state[n], other[0].state[n], 1e-4) for n in one[0].state)


class Pair(nn.Module):
    """One bucket, of whose used elements the second rank owns none."""

    def __init__(self):
        super().__init__()
        self.used = nn.Parameter(torch.full((1,), 3.0, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(9, dtype=torch.float64))

    def forward(self):
        return self.used.sum() * 2 + 0 * self.unused.detach().sum()


def _norms_of_a_pair(rank, world_size, stage):
    module = Pair()
    engine = Engine(module, [torch.optim.SGD(module.parameters())], ZeroConfig(stage=stage))
    engine.backward(module())
    return float(*engine.grad_norms().values()), float(engine.clip_grad_norm_(1.0))


@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_a_rank_without_gradients_of_its_own_adds_in_the_dtype_of_the_others(stage):
    assert run_ranks(2, _norms_of_a_pair, stage) == [(2.0, 2.0)] * 2


def _norms_with_padding(rank, world_size, stage, order):
    module = nn.Linear(5, 1, bias=False)
    engine = Engine(module, [torch.optim.SGD(module.parameters())], ZeroConfig(stage=stage))
    engine.backward(module(torch.arange(1.0, 6.0)).sum())
    (norm,) = engine.grad_norms(order).values()
    return float(norm), float(engine.clip_grad_norm_(1.0, norm_type=order))


@pytest.mark.parametrize("order", [-1.0, -math.inf])
def test_a_norm_of_negative_order_does_not_count_padding(order):
    expected = float(torch.linalg.vector_norm(torch.arange(1.0, 6.0), order))
    for norms in run_ranks(2, _norms_with_padding, 2, order):
        assert norms == pytest.approx((expected, expected))


def _norms_after_a_nan(rank, world_size, stage):
    torch.manual_seed(0)
    module = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    engine = Engine(module, [optimizer], ZeroConfig(stage=stage, on_nonfinite=None))
    norms = []
    for factor in (1.0, math.nan, 1.0):
        engine.backward(module(torch.full((1, 3), factor)).sum())
        norms.append(engine.clip_grad_norm_(0.5).item())
        optimizer.zero_grad(set_to_none=False)  # the memory of the gradients stays
    engine.close()
    return norms


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_nan_that_was_clipped_and_zeroed_leaves_no_trace(stage):
    for first, after_nan, last in run_ranks(2, _norms_after_a_nan, stage):
        assert math.isnan(after_nan)
        assert last == first
