"""Gradient accumulation: the loss, the number of steps, and when gradients are reduced."""

from __future__ import annotations

from functools import partial

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.profiler import ProfilerActivity, profile

from tests.support.fitting import (
    assert_same,
    fit_ranks,
    fit_reference,
    make_trainer,
    settings,
)
from tests.support.models import GPTModule, MLPModule
from tests.support.warm import run_ranks

STAGES = [0, 1, 2, 3]


@pytest.mark.default_cases("2")
@pytest.mark.shows("gradient accumulation")
@pytest.mark.parametrize("stage", STAGES)
def test_six_batches_accumulated_by_four_are_two_steps_equal_to_ddp(stage):
    factory = partial(GPTModule, ranks=2, num_batches=6)
    options = {"accumulate_grad_batches": 4}
    ours = fit_ranks(2, settings(stage), factory, options)
    assert_same(ours, fit_reference(2, factory, options))
    assert ours[0].global_step == 2


@pytest.mark.default_cases("1")
@pytest.mark.shows("GradientAccumulationScheduler")
@pytest.mark.parametrize("stage", range(4))
def test_an_accumulation_that_changes_between_epochs_equals_ddp(stage):
    factory = partial(MLPModule, ranks=2, num_batches=5)
    options = {"max_epochs": 4, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 3, 3: 2})]}
    ours = fit_ranks(2, settings(stage), factory, options)
    reference = fit_ranks(2, "ddp", factory, options)
    assert_same(ours, reference)
    assert ours[0].global_step == 5 + 2 + 2 + 3


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_accumulation_over_the_end_of_the_epoch_and_validation_equals_ddp(stage):
    factory = partial(MLPModule, ranks=2, num_batches=5)
    options = {
        "accumulate_grad_batches": 3,
        "max_epochs": 2,
        "val_check_interval": 2,
        "limit_val_batches": 1,
    }
    ours = fit_ranks(2, settings(stage), factory, options)
    reference = fit_reference(2, factory, options)
    assert_same(ours, reference)
    assert ours[0].metrics["val_loss"] == pytest.approx(reference[0].metrics["val_loss"], rel=1e-6)


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("stage", [0, 1])
def test_no_gradient_is_reduced_before_the_last_micro_batch(stage):
    for counts in run_ranks(2, _count_messages, settings(stage), has_group=False):
        assert [count > 0 for count in counts] == [False, False, True] * 2, counts


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_sharded_gradients_are_reduced_in_every_micro_batch(stage):
    for counts in run_ranks(2, _count_messages, settings(stage), has_group=False):
        assert all(count > 0 for count in counts), counts


def _count_messages(rank, world_size, spec):
    counter = MessageCounter()
    trainer = make_trainer(spec, accumulate_grad_batches=3, callbacks=[counter])
    trainer.fit(GPTModule(ranks=2, num_batches=6))
    return counter.counts


class MessageCounter(Callback):
    """Counts the collectives between the hooks around each backward."""

    def __init__(self):
        self.counts = []

    def on_before_backward(self, trainer, pl_module, loss):
        self.profile = profile(activities=[ProfilerActivity.CPU])
        self.profile.__enter__()

    def on_after_backward(self, trainer, pl_module):
        self.profile.__exit__(None, None, None)
        names = [event.name for event in self.profile.events()]
        self.counts.append(sum(name.startswith(("gloo:", "c10d::")) for name in names))
