"""A micro-batch with non-finite gradients is computed again, and its first module is named."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lightning_zero import NonfiniteGradientError
from lightning_zero.callbacks import NonfiniteTrace
from tests.support.fitting import arrays, make_trainer, settings
from tests.support.models import MLPModule
from tests.support.ranks import run_ranks


class NegativeLog(nn.Module):
    """-infinity for the marked sample."""

    def forward(self, x):
        return torch.where(x[:, :1] > 1e3, torch.full_like(x, -torch.inf), x)


class InfiniteBackward(nn.Module):
    """Finite values; the derivative of the root is infinite at 0, for the marked sample."""

    def forward(self, x):
        is_marked = (x[:, 0] > 1e3).any()
        return x + torch.where(is_marked, 0 * x.sum(), 1 + x.square().sum()).sqrt()


class Module(MLPModule):
    """Sample 5, which is one of rank 1, is very large; dropout needs the random numbers."""

    def __init__(self, middle, **kwargs):
        super().__init__(**kwargs)
        self.net = nn.Sequential(
            nn.Linear(8, 8), nn.Dropout(0.1), nn.Identity(), middle(), nn.Linear(8, 3)
        )
        with torch.no_grad():
            self.net[0].weight.copy_(torch.eye(8))

    def dataset(self, num_samples):
        data = super().dataset(num_samples)
        data.tensors[0][5] = 1e6
        return data

    def groups(self):
        return self.parameters()


def _trace(rank, world_size, stage, middle, policy, traces):
    torch.manual_seed(0)
    module = Module(middle, ranks=world_size, num_batches=4)
    trace = NonfiniteTrace("traces")
    callbacks = [trace] if traces else []
    trainer = make_trainer(
        settings(stage, on_nonfinite=policy), callbacks=callbacks, accumulate_grad_batches=2
    )
    error = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.fit(module)
        except NonfiniteGradientError as caught:
            error = str(caught)
    saved = {path.name: torch.load(path, weights_only=False) for path in Path("traces").glob("*")}
    return trace.found, error, saved, arrays(module.state_dict())


@pytest.mark.parametrize("policy", ["stop", "skip", pytest.param("warn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_first_module_with_a_non_finite_output_is_named(stage, policy):
    ranks = run_ranks(2, _trace, stage, NegativeLog, policy, True, has_group=False)
    for found, error, saved, _ in ranks:
        assert len(found) == 1
        assert "trace of micro-batch 1 in step 0" in found[0]
        assert "rank 1: net.3 (NegativeLog) turns finite inputs into a non-finite" in found[0]
        assert bool(error) == (policy == "stop")
        (name,) = saved
        assert name == "step0_rank1.pt"
        assert name in found[0]
        assert saved[name]["batch"][0].max() == 1e6
    if policy != "stop":  # the trace changes nothing
        without = run_ranks(2, _trace, stage, NegativeLog, policy, False, has_group=False)
        for (*_, state), (*_, other) in zip(ranks, without, strict=True):
            for key, value in state.items():
                np.testing.assert_array_equal(value, other[key], err_msg=key)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_module_with_a_non_finite_backward_is_named(stage):
    ranks = run_ranks(2, _trace, stage, InfiniteBackward, "stop", True, has_group=False)
    for found, *_ in ranks:
        assert "the forward is finite; the backward of net.3 makes it non-finite" in found[0]


def test_it_needs_the_guard():
    trainer = make_trainer(settings(1, on_nonfinite=None), callbacks=[NonfiniteTrace()], devices=1)
    with pytest.raises(ValueError, match="on_nonfinite=None"):
        trainer.fit(partial(Module, nn.Identity)())
    with pytest.raises(ValueError, match="max_traces"):
        NonfiniteTrace(max_traces=0)
