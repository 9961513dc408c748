"""Resuming from "last" or "newest"."""

import os
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_zero.checkpoint.atomic import temporary_path
from tests.support.fitting import make_trainer, settings
from tests.support.models import MLPModule
from tests.support.warm import run_ranks


class Starting(Callback):
    step = None

    def on_train_start(self, trainer, pl_module):
        self.step = trainer.global_step


def _fit(rank, form, dirpath, ckpt_path, max_epochs):
    starting = Starting()
    callbacks = [ModelCheckpoint(dirpath, save_last=True), starting]
    options = {"callbacks": callbacks, "enable_checkpointing": True, "max_epochs": max_epochs}
    trainer = make_trainer(settings(1, checkpoint=form), **options)
    trainer.fit(MLPModule(ranks=2), ckpt_path=ckpt_path)
    trainer.strategy.barrier()
    return starting.step


def _go_on_after_a_kill(rank, world_size, form, dirpath, asked):
    """A killed save has moved `last.ckpt` aside."""
    assert _fit(rank, form, dirpath, asked, 1) == 0  # no checkpoint yet: starts from scratch
    folder = Path(dirpath or "checkpoints")
    if rank == 0:
        last = folder / "last.ckpt"
        os.rename(last, temporary_path(last, "replaced"))
        if asked == "newest":
            for path in folder.glob("epoch*"):
                os.rename(path, f"moved-{path.name}")
        temporary_path(last, "removed").mkdir()
    starts = _fit(rank, form, dirpath, asked, 2)
    if asked == "newest":
        saver = ModelCheckpoint(dirpath)
        trainer = make_trainer(settings(1), callbacks=[saver], enable_checkpointing=True)
        trainer.validate(MLPModule(ranks=2), ckpt_path="newest", verbose=False)
    return starts, [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.default_cases("sharded-None-newest")
@pytest.mark.parametrize(
    ("form", "dirpath", "asked"),
    [("sharded", "saved", "last"), ("sharded", None, "newest"), ("full", None, "last")],
)
def test_a_job_that_was_killed_while_it_replaced_its_last_checkpoint_goes_on(form, dirpath, asked):
    results = run_ranks(2, _go_on_after_a_kill, form, dirpath, asked, has_group=False)
    assert results == [(4, [])] * 2


def test_what_is_evaluated_must_be_there():
    run_ranks(1, _validate_nothing, has_group=False)


def _validate_nothing(rank, world_size):
    options = {"callbacks": [ModelCheckpoint("empty")], "enable_checkpointing": True}
    with pytest.raises(FileNotFoundError, match="there is no complete checkpoint in"):
        make_trainer(settings(1), **options).validate(MLPModule(ranks=1), ckpt_path="newest")


def _begin_with_an_error(rank, world_size):
    if rank == 0:
        Path("saved").mkdir()
        Path("saved", "last.ckpt").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises((OSError, ValueError, RuntimeError)) as caught:
        _fit(rank, "full", "saved", "last", 1)
    return str(caught.value)


@pytest.mark.slow
def test_a_last_checkpoint_that_is_damaged_is_an_error_that_names_it():
    for text in run_ranks(2, _begin_with_an_error, has_group=False):
        assert "last.ckpt" in text
