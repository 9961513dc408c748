"""The boundary between batches: ranks that differ, fail or get SIGTERM."""

from __future__ import annotations

import os
import signal
import time
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

import lightning_zero
from tests.support.desync import assert_desynchronized
from tests.support.fitting import make_trainer, settings
from tests.support.models import MLPModule
from tests.support.ranks import run_ranks
from tests.support.waits import Pace

# What ranks reach that have batches left, and that have none, or that log.
NEXT_EPOCH, ENDED_BATCHES = "batch 0 of epoch 0", "a sum over ranks of int64[]"
MEAN = "a mean over ranks of float32[]"
TIMED_OUT = (
    "DesynchronizedError: a rank waits in its backward for gradients that another does not reduce"
)
ABORTED = "PeerFailedError: "


def _outcome(trainer, module):
    """The exception that ended the fit, as text."""
    try:
        trainer.fit(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    except SystemExit as error:
        return f"{type(error).__name__}: {error.code}"
    return "trained"


@cache
def _start_server():
    """Imports torch and Lightning in the process of which ranks are forks."""
    run_ranks(1, _nothing, has_group=False)


def _nothing(rank, world_size):
    """Ends at once."""


def _errors(world_size, fn, *args):
    """Errors of all ranks, raised long before any timeout."""
    _start_server()
    start = time.monotonic()
    errors = run_ranks(world_size, fn, *args, has_group=False)
    assert time.monotonic() - start < 20
    return errors


class UnevenModule(MLPModule):
    """Each rank has one batch more than the rank before it."""

    def train_dataloader(self):
        return list(super().train_dataloader())[: 2 + self.global_rank]


def _fit_uneven(rank, world_size, stage, logs):
    module = UnevenModule(ranks=world_size)
    if logs:
        module.on_train_epoch_end = lambda: module.log("mean", float(rank), sync_dist=True)
    return _outcome(make_trainer(settings(stage), max_epochs=2), module)


@pytest.mark.default_cases("1-True")
@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_uneven_batches_are_an_error_on_all_ranks_at_once(stage, logs):
    first, second = _errors(2, _fit_uneven, stage, logs)
    assert_desynchronized(first, None, f"0 reached {NEXT_EPOCH}")
    assert_desynchronized(second, ENDED_BATCHES, f"0 reached {NEXT_EPOCH}")


@pytest.mark.slow
def test_three_uneven_ranks_all_end_with_an_error():
    for rank, error in enumerate(_errors(3, _fit_uneven, 3, False)):
        if not error.startswith(ABORTED):
            reached = ENDED_BATCHES if rank else None
            assert_desynchronized(error, reached, f"0 reached {NEXT_EPOCH}")


class ManualModule(MLPModule):
    """Rank 1 skips a backward, as after a NaN loss."""

    def __init__(self, logs, **kwargs):
        super().__init__(**kwargs)
        self.automatic_optimization = False
        self.logs = logs

    def training_step(self, batch, batch_idx):
        if batch_idx != 1 or self.global_rank == 0:
            self.manual_backward(self.part_loss(batch, self.global_rank))
        if self.logs:
            self.log("x", 1.0, on_step=True, sync_dist=True)


def _fit_manually(rank, world_size, stage, logs):
    return _outcome(make_trainer(settings(stage)), ManualModule(logs, ranks=world_size))


@pytest.mark.default_cases("1-True")
@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_of_one_rank_alone_is_an_error_on_all(stage, logs):
    others, alone = _errors(2, _fit_manually, stage, logs)
    reached = "a backward" if stage == 1 else "the end of the backward on all ranks"
    if logs:
        assert_desynchronized(others, reached, f"1 reached {MEAN}")
        assert_desynchronized(alone, None, f"1 reached {MEAN}")
        return
    for error in (others, alone):
        if not error.startswith((TIMED_OUT, ABORTED)):
            call = None if stage == 1 else "1 reached batch 2 of epoch 0"
            is_other = stage == 1 or error is others
            assert_desynchronized(error, reached if is_other else None, call)


class Alone(Callback):
    """Only rank 0 calls a collective."""

    def __init__(self, what):
        self.what = what

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero:
            with torch.no_grad():
                self.what(trainer, pl_module, batch)


def _look(trainer, module, batch):
    module(batch[0])


def _log_dir(trainer, module, batch):
    return trainer.log_dir


def _gathered(trainer, module, batch):
    with lightning_zero.gathered(module):
        pass


def _save(trainer, module, batch):
    trainer.save_checkpoint("alone.ckpt")


def _module_state(trainer, module, batch):
    trainer.strategy.lightning_module_state_dict()


CALLS = {
    _look: "a forward",
    _log_dir: "an object of rank 0",
    _gathered: "lightning_zero.gathered(...)",
    _save: "the state of the module, for a checkpoint",
    _module_state: "the state of the module, for a checkpoint",
}


def _fit_alone(rank, world_size, what, stage=3):
    trainer = make_trainer(settings(stage), callbacks=[Alone(what)])
    return _outcome(trainer, MLPModule(ranks=world_size))


@pytest.mark.default_cases("_log_dir", "_module_state")
@pytest.mark.parametrize("what", CALLS)
def test_what_one_rank_does_alone_between_batches_is_an_error_on_all(what):
    _assert_both_name_the_call(what, 3)


def test_a_checkpoint_that_one_rank_saves_alone_is_an_error_on_all_in_stage_1():
    _assert_both_name_the_call(_save, 1)


def _assert_both_name_the_call(what, stage):
    alone, other = _errors(2, _fit_alone, what, stage)
    call = None if what is _look else f"0 reached {CALLS[what]}"  # a forward is no call by itself
    assert_desynchronized(alone, CALLS[what] if call is None else None, call)
    assert_desynchronized(other, "a forward and its backward", call)


class WithinPairs(Callback):
    """Collectives of some ranks, in a group of the user's own."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            self.group = dist.new_group([0, 1], backend="gloo")
        if trainer.global_rank < 2:
            got = pl_module.all_gather(torch.tensor(trainer.global_rank), group=self.group)
            assert got.tolist() == [0, 1]


def _fit_with_pairs(rank, world_size):
    trainer = make_trainer(settings(2), callbacks=[WithinPairs()])
    return _outcome(trainer, MLPModule(ranks=world_size))


def test_a_collective_of_some_ranks_needs_no_others():
    assert _errors(3, _fit_with_pairs) == ["trained"] * 3


class RaisesAfterBatch(Callback):
    """Raises on rank 1 while the others continue with the next batch."""

    def __init__(self, error):
        self.error = error

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 1:
            raise self.error("out of luck")


def _fit_and_raise(rank, world_size, stage, error):
    Pace()
    outcomes = []
    for name in ("first", "second"):  # the second fit uses the groups of the first
        callbacks = [RaisesAfterBatch(error), OnExceptionCheckpoint(name)]
        trainer = make_trainer(settings(stage), callbacks=callbacks, enable_checkpointing=True)
        outcome = _outcome(trainer, MLPModule(ranks=world_size))
        outcomes.append((outcome, os.path.exists(f"{name}/on_exception.ckpt")))
    return outcomes


@pytest.mark.default_cases("3-KeyboardInterrupt")
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("stage", range(4))
def test_a_rank_that_fails_between_batches_is_not_waited_for(stage, error):
    others, failed = _errors(2, _fit_and_raise, stage, error)
    end = "SystemExit: 1" if error is KeyboardInterrupt else "ArithmeticError: out of luck"
    for outcome, is_saved in others:
        assert outcome.startswith(f"{ABORTED}rank 0 stops because rank 1 raised")
        assert not is_saved, "only if all ranks have raised an error of their own"
    assert [outcome for outcome, _ in failed] == [end, end]


class Terminated(Callback):
    """Sends SIGTERM to some ranks, once."""

    def __init__(self, ranks, hook, at_batch):
        self.ranks = ranks
        self.num_batches = 0
        setattr(self, hook, partial(self.receive, at_batch))

    def receive(self, at_batch, trainer, pl_module, *args):
        self.num_batches += 1
        if trainer.global_rank in self.ranks and self.num_batches == at_batch + 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _fit_until_sigterm(rank, world_size, stage, ranks, hook, at_batch):
    callback = Terminated(ranks, hook, at_batch)
    before = signal.getsignal(signal.SIGTERM)
    options = {"limit_val_batches": 3} if "validation" in hook else {}
    trainer = make_trainer(settings(stage), callbacks=[callback], max_epochs=3, **options)
    outcome = _outcome(trainer, MLPModule(ranks=world_size))
    assert signal.getsignal(signal.SIGTERM) == before
    names = set(vars(trainer.fit_loop.epoch_loop)) | set(vars(trainer._signal_connector))
    assert not names & {"_broadcast_sigterm_tensor", "_sigterm_notifier_fn"}
    return outcome, trainer.global_step


BATCHES = 4  # per epoch


@pytest.mark.default_cases("1-1-ranks1")
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
@pytest.mark.parametrize("at_batch", [1, BATCHES - 1])
@pytest.mark.parametrize("stage", [1, 3])
def test_sigterm_on_any_rank_ends_the_training_of_all_before_the_same_batch(stage, at_batch, ranks):
    hook = "on_train_batch_start"
    results = _errors(2, _fit_until_sigterm, stage, ranks, hook, at_batch)
    assert results == [("SIGTERMException: 143", at_batch + 1)] * 2


@pytest.mark.slow
def test_sigterm_in_a_validation_ends_all_ranks():
    first, second = _errors(2, _fit_until_sigterm, 3, [1], "on_validation_batch_start", 0)
    assert first[0].startswith((ABORTED, "SIGTERMException: 143"))
    assert second[0] == "SIGTERMException: 143"


def _fit_alone_until_sigterm(rank, world_size):
    return _fit_until_sigterm(rank, world_size, 2, [0], "on_train_batch_start", 1)


def test_sigterm_ends_the_training_of_one_process():
    assert _errors(1, _fit_alone_until_sigterm) == [("SIGTERMException: 143", 2)]
    assert SIGTERMException().code is None, "Lightning's own would say that all is done"
