"""Exceptions: the original one is raised, no rank hangs, and the next run works."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tests.support import warm
from tests.support.cells import SHARDED_STAGE, slow_but
from tests.support.fitting import arrays, make_trainer, run_once, settings
from tests.support.models import GPTModule, MLPModule
from tests.support.ranks import RankError, run_ranks
from tests.support.waits import Pace


class NoneModule(MLPModule):
    """Skips its second batch, on the ranks from `first_rank` on."""

    first_rank = 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 and self.global_rank >= self.first_rank else loss


class NoneOnRank1Module(NoneModule):
    first_rank = 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_training_step_that_returns_none_is_lightnings_error_on_all_ranks(stage):
    start = time.monotonic()
    with pytest.raises(RankError, match="by returning None in distributed training") as raised:
        run_ranks(2, _fit, settings(stage), NoneModule, has_group=False)
    text = str(raised.value)
    assert text.count("RuntimeError: Skipping the `training_step` by returning None") >= 2, text
    assert time.monotonic() - start < 30


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_training_step_that_returns_none_on_one_rank_does_not_hang_the_other(stage):
    with pytest.raises(RankError, match="by returning None in distributed training") as raised:
        run_ranks(2, _fit, settings(stage), NoneOnRank1Module, has_group=False)
    assert "did not return" not in str(raised.value)


def _fit(rank, world_size, spec, factory, **options):
    Pace()
    make_trainer(spec, **options).fit(factory(ranks=world_size))


class FailingModule(GPTModule):
    """Raises at a given place and time.

    Args:
        at_batch: Number of the training step, over all epochs; None for never.
        on_ranks: Ranks that fail.
        place: "step", "forward" (of the second block), "backward" or "optimizer".
        error: What to raise.
        **kwargs: Options of `GPTModule`.
    """

    def __init__(self, at_batch, on_ranks=(0, 1), place="step", error=ArithmeticError, **kwargs):
        super().__init__(**kwargs)
        self.at_batch = at_batch
        self.on_ranks = on_ranks
        self.place = place
        self.error = error
        self.gpt.blocks[1].register_forward_hook(partial(_in_block, owner=self))

    def maybe_raise(self, place):
        if (
            place == self.place
            and self.training
            and len(self.losses) == self.at_batch
            and self.global_rank in self.on_ranks
        ):
            self.at_batch = None
            raise self.error("out of luck")

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.maybe_raise("step")
        if self.place != "optimizer":
            self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: self.maybe_raise("optimizer"))
        return optimizer


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, owner):
        ctx.owner = owner
        ctx.batch = len(owner.losses)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.owner.at_batch == ctx.batch and ctx.owner.place == "backward":
            ctx.owner.at_batch = None
            raise ctx.owner.error("out of luck")
        return grad, None


def _in_block(block, args, output, *, owner):
    owner.maybe_raise("forward")
    return _RaiseInBackward.apply(output, owner)


@pytest.mark.default_cases("step-1")
@pytest.mark.parametrize(
    ("place", "stage"),
    slow_but(
        {("step", 1), ("forward", 3)},
        [("step", 0), ("step", 1), ("step", 2), ("step", 3), ("forward", 3)],
    ),
)
def test_an_exception_on_one_rank_surfaces_although_a_checkpoint_is_asked_for(place, stage):
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2: Traceback") as raised:
        run_ranks(
            2,
            _fit_with_checkpoint,
            settings(stage, timeout=timedelta(seconds=5)),
            place,
            has_group=False,
        )
    assert "ArithmeticError: out of luck" in str(raised.value)
    assert time.monotonic() - start < 30


def _saving():
    return {"callbacks": [OnExceptionCheckpoint("saved")], "enable_checkpointing": True}


def _fit_with_checkpoint(rank, world_size, spec, place):
    factory = partial(FailingModule, at_batch=1, on_ranks=(1,), place=place)
    _fit(rank, world_size, spec, factory, **_saving())


@pytest.mark.default_cases("step-3")
@pytest.mark.shows("OnExceptionCheckpoint")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("place", ["step", "forward"])
def test_an_exception_on_all_ranks_is_saved_and_resumed_from_as_under_ddp(place, stage):
    ours = warm.run_ranks(2, _fail_and_resume, settings(stage), place, has_group=False)
    reference = run_once(2, _fail_and_resume, "ddp", place)
    for (step, state), (expected_step, expected) in zip(ours, reference, strict=True):
        assert step == expected_step
        for name, value in expected.items():
            np.testing.assert_allclose(state[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def _fail_and_resume(rank, world_size, spec, place):
    seed_everything(7, verbose=False)
    module = FailingModule(at_batch=2, place=place, ranks=world_size)
    with pytest.raises(ArithmeticError, match="out of luck"):
        make_trainer(spec, **_saving()).fit(module)
    assert Path("saved/on_exception.ckpt").is_file()
    seed_everything(rank, verbose=False)
    resumed = GPTModule(ranks=world_size)
    trainer = make_trainer(spec, max_epochs=2)
    trainer.fit(resumed, ckpt_path="saved/on_exception.ckpt")
    return trainer.global_step, arrays(resumed.state_dict())


@pytest.mark.default_cases("forward-3")
@pytest.mark.shows("validate and fit after an exception")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("place", ["step", "forward", "backward", "optimizer"])
def test_after_an_exception_validate_and_fit_work_as_under_ddp(place, stage):
    ours = warm.run_ranks(2, _fail_and_go_on, settings(stage), place, has_group=False)
    reference = run_once(2, _fail_and_go_on, "ddp", place)
    for (val_loss, state), (expected_loss, expected) in zip(ours, reference, strict=True):
        assert val_loss == pytest.approx(expected_loss, rel=1e-6)
        for name, value in expected.items():
            np.testing.assert_allclose(state[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def _fail_and_go_on(rank, world_size, spec, place):
    seed_everything(7, verbose=False)
    at_batch = 0 if place == "optimizer" else 2
    module = FailingModule(
        at_batch=at_batch, place=place, error=torch.OutOfMemoryError, ranks=world_size
    )
    shapes = [p.shape for p in module.parameters()]
    trainer = make_trainer(spec, limit_val_batches=1.0)
    with pytest.raises(torch.OutOfMemoryError, match="out of luck"):
        trainer.fit(module)
    assert [p.shape for p in module.parameters()] == shapes
    val_loss = trainer.validate(module, verbose=False)[0]["val_loss"]
    make_trainer(spec).fit(module)
    return val_loss, arrays(module.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_rank_that_hangs_is_an_error_on_the_other_after_the_timeout(stage):
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0 of 2: Traceback") as raised:
        run_ranks(
            2,
            _hang_in_step,
            settings(stage, timeout=timedelta(seconds=3)),
            has_group=False,
        )
    assert "imed out" in str(raised.value) or "imeout" in str(raised.value)
    assert time.monotonic() - start < 25


class SleepingModule(MLPModule):
    """Rank 1 sleeps in its second batch."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            time.sleep(1000)
        return super().training_step(batch, batch_idx)


def _hang_in_step(rank, world_size, spec):
    assert not dist.is_initialized()
    _fit(rank, world_size, spec, SleepingModule)


class RefusedError(Exception):
    """An exception of the user's own code, on all ranks."""


class LateLayer(torch.nn.Linear):
    sleep_s = 0.0

    def forward(self, x):
        time.sleep(self.sleep_s)
        return super().forward(x)


class RefusingModule(MLPModule):
    """Raises on all ranks in its fifth batch, on rank 1 somewhat later."""

    def __init__(self, **options):
        super().__init__(**options)
        layers = [LateLayer(8, 8) for _ in range(3)]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        refuses = len(self.losses) == 4
        LateLayer.sleep_s = 0.2 * (refuses and self.global_rank)
        loss = super().training_step(batch, batch_idx)
        if refuses:
            raise RefusedError
        return loss


def _refuse(rank, world_size, spec):
    module = RefusingModule(ranks=world_size, num_batches=6)
    with pytest.raises(RefusedError):
        make_trainer(spec).fit(module)
    make_trainer(spec).fit(module)
    return len(module.losses)


@pytest.mark.slow
@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_an_exception_of_all_ranks_is_raised_on_each_and_the_next_fit_works(stage):
    assert run_ranks(2, _refuse, settings(stage), has_group=False) == [11, 11]
