"""Groups of ranks that hold all shards each: the values of data parallel, on 2 x 2 ranks."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tests.strategy.test_failures import FailingModule
from tests.support.fitting import (
    arrays,
    assert_same,
    fit,
    fit_ranks,
    fit_reference,
    make_trainer,
    settings,
)
from tests.support.models import BranchModule, ConvModule, GPTModule
from tests.support.warm import run_ranks

STAGES = [1, 2, 3]
ACCUMULATING = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
GPT = partial(GPTModule, ranks=4, num_batches=5)
BRANCHES = partial(BranchModule, ranks=4)
MIXED = {"precision": "bf16-mixed"}


def grouped(stage, size=2, **options):
    return settings(stage, sharding_group_size=size, **options)


def fit_each(cases, **options):
    """Several fits of the same ranks, by case: (spec, factory, options of the Trainer)."""
    ranks = run_ranks(4, _fit_each, cases, options, has_group=False, timeout_s=150)
    return list(zip(*ranks, strict=True))


def _fit_each(rank, world_size, cases, options):
    return [fit(rank, world_size, *case, **options) for case in cases]


def assert_equal_bits(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.shows("`sharding_group_size`, 2 x 2 ranks")
def test_2_x_2_equals_ddp_in_every_stage_with_accumulation_clipping_and_offload():
    specs = [
        "ddp",
        *(grouped(stage) for stage in STAGES),
        grouped(2, offload_optimizer="cpu", checkpoint="full"),
    ]
    results = fit_each([(spec, GPT, ACCUMULATING) for spec in specs], is_saving=True)
    reference, *grouped_ones = results
    saved = reference[0].checkpoint
    for ours in grouped_ones:
        assert_same(ours, reference)
        for outcome in ours[1:]:  # replicas do not diverge
            assert_equal_bits(ours[0].state, outcome.state)
        for name, value in ours[0].checkpoint["state_dict"].items():
            np.testing.assert_allclose(value, saved["state_dict"][name], rtol=1e-6, atol=1e-6)
        for number, entry in ours[0].checkpoint["optimizer_states"][0]["state"].items():
            expected = saved["optimizer_states"][0]["state"][number]["exp_avg"]
            np.testing.assert_allclose(entry["exp_avg"], expected, rtol=1e-5, atol=1e-6)
    *_, on_device, _, offloaded = results
    assert_equal_bits(on_device[0].state, offloaded[0].state)


@pytest.mark.slow
def test_ranks_of_one_group_may_take_other_branches_than_the_rest():
    ours, mixed, reference = fit_each(
        [
            (grouped(3, prefetch_bucket_size=0), BRANCHES),
            (grouped(3), GPT, ACCUMULATING | MIXED),
            (settings(3), GPT, ACCUMULATING | MIXED),
        ]
    )
    assert_same(ours, fit_ranks(1, "auto", BRANCHES))
    for one, other in zip(mixed, reference, strict=True):
        np.testing.assert_allclose(one.losses, other.losses, rtol=1e-2)


def _fail_and_go_on(rank, world_size, stage, on_ranks):
    module = FailingModule(at_batch=2, on_ranks=on_ranks, place="forward", ranks=world_size)
    callbacks = {"callbacks": [OnExceptionCheckpoint("saved")], "enable_checkpointing": True}
    trainer = make_trainer(grouped(stage), **callbacks, **ACCUMULATING)
    with pytest.raises(ArithmeticError if rank in on_ranks else RuntimeError):
        trainer.fit(module)
    resumed = GPTModule(ranks=world_size)
    trainer = make_trainer(grouped(stage), max_epochs=2)
    trainer.fit(resumed, ckpt_path="saved/on_exception.ckpt")
    return trainer.global_step, arrays(resumed.state_dict())


@pytest.mark.slow
def test_after_one_rank_has_failed_all_come_together_and_save():
    results = run_ranks(4, _fail_and_go_on, 3, (3,), has_group=False, timeout_s=90)
    for step, state in results:
        assert step == results[0][0] > 1
        assert_equal_bits(results[0][1], state)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("world_size", "size"), [(4, 1), (4, 2), (4, 4), (3, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("model", [GPTModule, ConvModule])
def test_groups_of_every_size_equal_ddp(model, world_size, size, accumulation, stage):
    factory = partial(model, ranks=world_size, num_batches=3 * accumulation)
    options = {"accumulate_grad_batches": accumulation}
    ours = fit_ranks(world_size, grouped(stage, size), factory, options)
    assert_same(ours, fit_reference(world_size, factory, options))
    if model is GPTModule:  # statistics of BatchNorm are each rank's own
        for outcome in ours[1:]:
            assert_equal_bits(ours[0].state, outcome.state)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"reduce_bucket_size": 500}, id="small buckets"),
        pytest.param({"overlap_comm": False}, id="no overlap"),
        pytest.param({"offload_optimizer": "cpu", "overlap_step": True}, id="steps beside"),
        pytest.param({"reduce_dtype": "float64"}, id="fp64 reduction"),
    ],
)
def test_no_setting_changes_the_result_of_2_x_2(options, stage):
    ours = fit_ranks(4, grouped(stage, **options), GPT, ACCUMULATING)
    assert_same(ours, fit_reference(4, GPT, ACCUMULATING))
