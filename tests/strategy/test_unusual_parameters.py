"""Frozen, tied, unused and odd parameters, used in unusual places, by unusual optimizers."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from tests.support.fitting import assert_same, fit, fit_ranks, fit_reference, settings
from tests.support.models import (
    CHECKPOINTING,
    BranchModule,
    FrozenModule,
    GPTModule,
    L2Module,
    MethodModule,
    MLPModule,
    OddModule,
    OutsideModule,
    TiedModule,
    TorchLayersModule,
    UnusedModule,
)
from tests.support.warm import run_ranks

MODULES = {
    "frozen": FrozenModule,
    "frozen and not given": partial(FrozenModule, is_given_frozen=False),
    "tied": TiedModule,
    "tied gpt": partial(GPTModule, is_tied=True),
    "unused": UnusedModule,
    "branch by rank": BranchModule,
    "method of a block": MethodModule,
    "layers of torch": TorchLayersModule,
    "odd shapes and dtypes": OddModule,
}


@pytest.mark.default_cases("odd shapes and dtypes-2-1")
@pytest.mark.shows("frozen, tied, unused parameters; branches that differ by rank")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("module", "world_size"), [("odd shapes and dtypes", 2), *((module, 3) for module in MODULES)]
)
def test_unusual_modules_equal_one_process_with_the_global_batch(module, world_size, stage):
    factory = partial(MODULES[module], ranks=world_size, num_batches=6)
    options = {"accumulate_grad_batches": 2}
    ours = fit_ranks(world_size, settings(stage), factory, options)
    assert_same(ours, fit_reference(1, factory, options, spec="auto"))


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_layer_unused_in_a_step_is_not_stepped_nor_decayed(stage):
    factory = partial(UnusedModule, ranks=2, num_batches=1)
    before = fit_reference(1, partial(UnusedModule, ranks=1, num_batches=0), spec="auto")
    for outcome in fit_ranks(2, settings(stage), factory):
        for name in ("never.weight", "sometimes.weight"):
            np.testing.assert_array_equal(outcome.state[name], before[0].state[name])
        assert not np.array_equal(outcome.state["last.weight"], before[0].state["last.weight"])


OUTSIDE = {
    "root and from outside": (OutsideModule, r"\bw\b|inner\.(weight|bias)"),
    "penalty over all": (L2Module, r"net\.[02]\.(weight|bias)"),
}


@pytest.mark.default_cases("penalty over all-3")
@pytest.mark.shows("parameters used outside their module's forward")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("module", list(OUTSIDE))
def test_use_outside_of_a_forward_gives_the_right_gradient_or_an_error_with_the_name(module, stage):
    cls, names = OUTSIDE[module]
    factory = partial(cls, ranks=2, num_batches=5)
    (first, second) = run_ranks(2, fit_or_error, settings(stage), factory, has_group=False)
    if isinstance(first, str):
        assert re.search(names, first), first
        assert re.search(names, second), second
    else:
        assert_same([first, second], fit_reference(1, factory, spec="auto"))


def fit_or_error(rank, world_size, spec, factory):
    """The outcome, or the text of the error that a user would see."""
    try:
        return fit(rank, world_size, spec, factory)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
@pytest.mark.shows("activation checkpointing")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("checkpointing", list(CHECKPOINTING))
def test_activation_checkpointing_equals_none(checkpointing, stage):
    factory = partial(GPTModule, ranks=2, num_batches=6, checkpointing=checkpointing)
    options = {"accumulate_grad_batches": 2}
    ours = fit_ranks(2, settings(stage), factory, options)
    plain = partial(GPTModule, ranks=2, num_batches=6)
    assert_same(ours, fit_reference(2, plain, options))


class Thaw(Callback):
    """Unfreezes the first layer and freezes the last before the third batch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            pl_module.net[0].requires_grad_(True)
            pl_module.net[4].requires_grad_(False)


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_freezing_and_unfreezing_between_steps_equals_one_process(stage):
    factory = partial(FrozenModule, ranks=2, num_batches=5)
    options = {"callbacks": [Thaw()]}
    ours = fit_ranks(2, settings(stage), factory, options)
    reference = fit_ranks(1, "auto", factory, options)
    assert_same(ours, reference)


class Normalized(torch.optim.Optimizer):
    """Optimizer of a user: the update of each tensor has norm lr, similar to LAMB and LARS."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / (p.grad.norm() + 1e-6), alpha=-group["lr"])
        return loss


class SignMomentum(Normalized):
    """Elementwise optimizer of a user (Lion)."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_((0.9 * momentum + 0.1 * p.grad).tanh(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 0.01)
        return loss


class OptimizerModule(MLPModule):
    """Matrices only, for Muon, with any optimizer."""

    def __init__(self, build, **kwargs):
        super().__init__(**kwargs)
        self.build = build
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 13, bias=False), torch.nn.Tanh(), torch.nn.Linear(13, 3, bias=False)
        )

    def configure_optimizers(self):
        return self.build(self.parameters())


ELEMENTWISE = {
    "NAdam": partial(torch.optim.NAdam, eps=1e-5),
    "RAdam": partial(torch.optim.RAdam, eps=1e-5),
    "Adamax": partial(torch.optim.Adamax, eps=1e-5),
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Adam amsgrad": partial(torch.optim.Adam, eps=1e-5, amsgrad=True),
    "AdamW fused": partial(torch.optim.AdamW, eps=1e-5, fused=True),
    "AdamW foreach": partial(torch.optim.AdamW, eps=1e-5, foreach=True),
    "SGD nesterov maximize": partial(
        torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True
    ),
    "a user's": SignMomentum,
}
FULL_TENSOR_OPTIMIZERS = {
    "Muon": partial(torch.optim.Muon, lr=1e-2),
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": torch.optim.LBFGS,
    "Normalized": Normalized,
}


@pytest.mark.slow
@pytest.mark.shows("elementwise optimizers")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", list(ELEMENTWISE))
def test_elementwise_optimizers_equal_ddp(optimizer, stage):
    factory = partial(OptimizerModule, ELEMENTWISE[optimizer], ranks=2, num_batches=5)
    ours = fit_ranks(2, settings(stage), factory)
    assert_same(ours, fit_reference(2, factory))


@pytest.mark.default_cases("LBFGS-3")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", list(FULL_TENSOR_OPTIMIZERS))
def test_full_tensor_optimizers_are_exact_or_refused_by_name_before_training(optimizer, stage):
    factory = partial(OptimizerModule, FULL_TENSOR_OPTIMIZERS[optimizer], ranks=2, num_batches=5)
    results = run_ranks(2, fit_or_refusal, settings(stage), factory, has_group=False)
    if isinstance(results[0], tuple):
        for text, num_losses in results:
            assert optimizer in text
            assert num_losses == 0, "refused after training had begun"
    else:
        assert_same(results, fit_reference(2, factory))


def fit_or_refusal(rank, world_size, spec, factory):
    """The outcome, or the text of the error and the number of training steps before it."""
    built = []

    def build():
        built.append(factory())
        return built[0]

    try:
        return fit(rank, world_size, spec, build)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}", len(built[0].losses)
