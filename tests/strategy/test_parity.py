"""In fp32 every stage trains as plain data parallel does, to the last digits."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from lightning.pytorch import seed_everything

from tests.support.cells import slow_but
from tests.support.fitting import (
    arrays,
    assert_same,
    fit_ranks,
    fit_reference,
    make_trainer,
    run_once,
    settings,
)
from tests.support.models import OPTIMIZERS, SCHEDULERS, ConvModule, GPTModule, MLPModule
from tests.support.warm import run_ranks

STAGES = [0, 1, 2, 3]
MODELS = {"gpt": GPTModule, "conv": ConvModule}


@pytest.mark.default_cases("gpt-2-4-1", "conv-3-1-3")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("model", "world_size", "accumulation"),
    slow_but(
        {("gpt", 2, 4), ("conv", 3, 1)},
        [
            ("gpt", 2, 4),
            ("conv", 3, 1),
            ("gpt", 1, 1),
            ("gpt", 4, 1),
            ("conv", 1, 4),
            ("conv", 2, 4),
        ],
    ),
)
def test_losses_and_parameters_equal_ddp(model, world_size, accumulation, stage):
    factory = partial(MODELS[model], ranks=world_size, num_batches=3 * accumulation)
    options = {"accumulate_grad_batches": accumulation}
    ours = fit_ranks(world_size, settings(stage), factory, options)
    assert_same(ours, fit_reference(world_size, factory, options))


@pytest.mark.default_cases("rmsprop-3")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_each_elementwise_optimizer_with_two_groups_equals_ddp(optimizer, stage):
    factory = partial(MLPModule, ranks=2, optimizer=optimizer)
    ours = fit_ranks(2, settings(stage), factory)
    assert_same(ours, fit_reference(2, factory))


@pytest.mark.default_cases("per step-3")
@pytest.mark.shows("learning rate schedulers")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("scheduler", list(SCHEDULERS))
def test_each_scheduler_equals_ddp(scheduler, stage):
    factory = partial(MLPModule, ranks=2, scheduler=scheduler)
    options = {"max_epochs": 3}
    ours = fit_ranks(2, settings(stage), factory, options)
    reference = fit_reference(2, factory, options)
    assert_same(ours, reference)
    assert reference[0].learning_rates[0] != OPTIMIZERS["adamw"].keywords["lr"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"reduce_bucket_size": 500}, id="small reduce buckets"),
        pytest.param({"reduce_bucket_size": 1}, id="one parameter per bucket"),
        pytest.param({"reduce_bucket_size": 10**9}, id="one bucket"),
        pytest.param({"overlap_comm": False}, id="no overlap"),
        pytest.param({"prefetch_bucket_size": 0}, id="no prefetch"),
        pytest.param({"prefetch_bucket_size": 10**9}, id="prefetch all"),
        pytest.param({"param_persistence_threshold": 100}, id="small parameters unsharded"),
        pytest.param({"param_persistence_threshold": 10**9}, id="all parameters unsharded"),
        pytest.param({"reshard_after_forward": False}, id="no reshard after forward"),
        pytest.param({"reduce_dtype": "float64"}, id="fp64 reduction"),
    ],
)
def test_no_setting_of_stage_3_changes_the_result(options):
    factory = partial(GPTModule, ranks=2, num_batches=6)
    trainer = {"accumulate_grad_batches": 2}
    ours = fit_ranks(2, settings(3, **options), factory, trainer)
    assert_same(ours, fit_reference(2, factory, trainer))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"reduce_bucket_size": 500}, id="small reduce buckets"),
        pytest.param({"allgather_bucket_size": 500}, id="small gather buckets"),
        pytest.param({"overlap_comm": False}, id="no overlap"),
    ],
)
def test_no_setting_of_stages_1_and_2_changes_the_result(options, stage):
    factory = partial(GPTModule, ranks=2, num_batches=6)
    trainer = {"accumulate_grad_batches": 2}
    ours = fit_ranks(2, settings(stage, **options), factory, trainer)
    assert_same(ours, fit_reference(2, factory, trainer))


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", range(4))
def test_ranks_that_start_with_different_weights_take_those_of_rank_0(stage):
    factory = partial(ConvModule, ranks=2)
    ours = run_ranks(2, _fit_from_own_seed, settings(stage), factory, has_group=False)
    expected = run_once(2, _fit_from_own_seed, "ddp", factory)
    for name, value in expected[0].items():
        np.testing.assert_allclose(ours[0][name], value, rtol=1e-6, atol=1e-6, err_msg=name)
        if "running" not in name:
            np.testing.assert_array_equal(ours[0][name], ours[1][name], err_msg=name)


def _fit_from_own_seed(rank, world_size, spec, factory):
    seed_everything(rank, verbose=False)
    module = factory()
    make_trainer(spec).fit(module)
    return arrays(module.state_dict())
