"""Between two batches of training: ranks that differ, fail or are told to stop."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.distributed.ranks import RankError, run_ranks
from tests.fitting import make_trainer, settings
from tests.models import MLPModule

STAGES = [0, 1, 2, 3]


class UnevenModule(MLPModule):
    """Rank 1 has one batch more."""

    def train_dataloader(self):
        batches = list(super().train_dataloader())
        return batches[: 2 + self.global_rank]


def _fit_uneven(rank, world_size, stage, logs):
    module = UnevenModule(ranks=world_size)
    if logs:
        module.on_train_epoch_end = lambda: module.log("mean", float(rank), sync_dist=True)
    make_trainer(settings(stage), max_epochs=2, use_distributed_sampler=False).fit(module)


@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_uneven_batches_are_an_error_on_all_ranks_at_once(stage, logs):
    start = time.monotonic()
    with pytest.raises(RankError) as raised:
        run_ranks(2, _fit_uneven, stage, logs, has_group=False)
    text = str(raised.value)
    assert text.count("RuntimeError: one rank is about to train on a batch, and another") >= 2, text
    assert time.monotonic() - start < 30


class Peeking(Callback):
    """Rank 0 alone looks what the module says."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero:
            with torch.no_grad():
                pl_module(batch[0])


def _fit_peeking(rank, world_size):
    make_trainer(settings(3), callbacks=[Peeking()]).fit(MLPModule(ranks=world_size))


def test_a_forward_of_one_rank_alone_between_batches_is_an_error_on_all():
    with pytest.raises(RankError) as raised:
        run_ranks(2, _fit_peeking, has_group=False)
    assert str(raised.value).count("let all run every forward in stage 3") >= 2


class RaisesAfterBatch(Callback):
    """On rank 1, where Lightning's next collective is the one between batches."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 1:
            raise ArithmeticError("out of luck")


def _fit_and_raise(rank, world_size, stage):
    callbacks = [RaisesAfterBatch(), OnExceptionCheckpoint("saved")]
    trainer = make_trainer(settings(stage), callbacks=callbacks, enable_checkpointing=True)
    try:
        trainer.fit(MLPModule(ranks=world_size))
    except Exception as error:
        return f"{type(error).__name__}: {error}", os.path.exists("saved/on_exception.ckpt")
    return None


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_fails_between_batches_is_not_waited_for(stage):
    start = time.monotonic()
    other, failed = run_ranks(2, _fit_and_raise, stage, has_group=False)
    assert other[0].startswith("PeerAbortedError: rank 0 stops because rank 1 raised")
    assert failed[0] == "ArithmeticError: out of luck"
    assert other[1], "saved by all ranks, which have come together"
    assert time.monotonic() - start < 20


class Terminated(Callback):
    """SIGTERM finds rank 1 alone, in its second batch."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch_idx)
        if trainer.global_rank == 1 and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _fit_until_sigterm(rank, world_size, stage):
    callback = Terminated()
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(settings(stage), callbacks=[callback], max_epochs=2)
    with pytest.raises((SIGTERMException, RuntimeError)) as raised:
        trainer.fit(MLPModule(ranks=world_size))
    assert signal.getsignal(signal.SIGTERM) == before
    names = set(vars(trainer.fit_loop.epoch_loop)) | set(vars(trainer._signal_connector))
    assert not names & {"_broadcast_sigterm_tensor", "_sigterm_notifier_fn"}
    return type(raised.value).__name__, callback.batches


@pytest.mark.parametrize("stage", [1, 3])
def test_sigterm_on_one_rank_ends_the_training_of_all(stage):
    start = time.monotonic()
    first, second = run_ranks(2, _fit_until_sigterm, stage, has_group=False)
    assert first[1] == second[1] == [0, 1]
    assert second[0] == "SIGTERMException"
    assert time.monotonic() - start < 20
