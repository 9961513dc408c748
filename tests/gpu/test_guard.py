"""Non-finite gradients on a GPU are named, and skipped or refused before the step they are of."""

from __future__ import annotations

import warnings

import pytest
import torch

import lightning_zero
from lightning_zero import NonfiniteGradientError
from lightning_zero.core import guard
from tests.gpu.test_delays import delay_side_streams
from tests.gpu.training import batch, build, form_group, loss_of, optimizer_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu

STEPS, POISONED = 4, 2
TIERS = {"device": {}, "cpu": {"offload_optimizer": "cpu"}}


def _train(rank, world_size, stage, policy, tier, value):
    """Values of a parameter before each step and at the end; the report after each backward."""
    form_group("gloo", rank, world_size)
    delay_side_streams(seed=rank)
    guard._LARGE_NUMEL = 2**15  # that of some parameters
    model = build()
    name, parameter = next((n, p) for n, p in model.named_parameters() if n.startswith("blocks.1."))
    config = lightning_zero.ZeroConfig(stage=stage, on_nonfinite=policy, **tier)
    engine = lightning_zero.Engine(model, optimizers=[optimizer_of(model)], config=config)
    step, norms, reports = 0, [], []

    def poison(grad):
        grad = grad.clone()
        grad.view(-1)[-1] = value
        return grad if rank == 1 and step == POISONED else None

    parameter.register_hook(poison)
    for step in range(STEPS):
        engine.zero_grad()
        norms.append(_norm(model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.backward(loss_of(model, batch(step, rank)))
        reports.append(engine.guard.last_report)
        engine.step()
    norms.append(_norm(model))
    engine.close()
    return name, norms, reports


def _norm(model):
    with lightning_zero.gathered(model):
        return torch.stack([p.detach().double().norm() for p in model.parameters()]).norm().item()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("stage", "tier"), [(0, "device"), *((s, t) for s in (1, 2, 3) for t in TIERS)]
)
def test_a_step_is_skipped_and_the_rank_and_parameter_are_named(stage, tier, value):
    ranks = run_ranks(2, _train, stage, "skip", TIERS[tier], value, has_group=False, timeout_s=120)
    for name, norms, reports in ranks:
        assert reports[:POISONED] == [None] * POISONED
        (found,) = reports[POISONED].found
        assert (found.rank, found.parameter, found.step) == (1, name, POISONED)
        assert norms[POISONED] == norms[POISONED + 1]
        assert len(set(norms)) == STEPS
        assert all(norm == norm for norm in norms)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_warning_comes_one_backward_late_at_most(stage):
    for name, _, reports in run_ranks(
        2, _train, stage, "warn", {}, float("nan"), has_group=False, timeout_s=120
    ):
        first = next(report for report in reports if report is not None)
        assert reports.index(first) in (POISONED, POISONED + 1)
        assert (first.found[0].rank, first.found[0].parameter) == (1, name)


def _stop(rank, world_size, stage):
    with pytest.raises(NonfiniteGradientError, match=r"rank 1, micro-batch 0: blocks\.1"):
        _train(rank, world_size, stage, "stop", {}, float("nan"))


@pytest.mark.parametrize("stage", [1, 3])
def test_stop_raises_on_every_rank(stage):
    run_ranks(2, _stop, stage, has_group=False, timeout_s=120)
