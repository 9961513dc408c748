"""The module after fit: kept on every rank if it fits, else saved and dropped."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from lightning_zero import Engine, OffloadConfig, ZeroConfig, ZeroStrategy, load_from_checkpoint
from lightning_zero.engine import optimizers as attached
from lightning_zero.strategy import engine_strategy as after_fit
from tests.support import warm
from tests.support.fitting import arrays, make_trainer, run_once, settings
from tests.support.models import GPTModule
from tests.support.ranks import run_ranks

SAVED = "last-step-4.ckpt"
TEXT = "dropped when training ended"


def _fit(spec, world_size, **options):
    seed_everything(7, verbose=False)
    module = GPTModule(ranks=world_size)
    trainer = make_trainer(spec, limit_val_batches=1.0, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    return module, trainer, [str(w.message) for w in caught if "are dropped" in str(w.message)]


def _refusals(module, trainer):
    """Error texts of uses of the module."""
    texts = []
    weight = module.gpt.head.weight
    for use in (
        weight.sum,
        lambda: weight.data,
        lambda: module.gpt(torch.arange(6)[None]),
        module.state_dict,
        partial(copy.deepcopy, module),
        partial(trainer.save_checkpoint, "late.ckpt"),
        partial(trainer.validate, module, verbose=False),
    ):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            use()
        texts.append(str(raised.value))
    return texts


def _auto(rank, world_size):
    after_fit.available_memory_bytes = lambda: 0 if rank else 2**40  # the least decides
    module, trainer, warned = _fit(settings(3), world_size)
    weight = module.gpt.head.weight
    assert weight.shape == (64, 32)
    refusals = _refusals(module, trainer)
    assert dict(module.named_parameters())["gpt.head.weight"] is weight
    after_fit.available_memory_bytes = lambda: 2**40
    (metrics,) = trainer.validate(module, ckpt_path=SAVED, verbose=False)
    with pytest.raises(RuntimeError, match=f"optimizer states are not available: .*{TEXT}"):
        trainer.save_checkpoint("late.ckpt")
    trainer.save_checkpoint("weights.ckpt", weights_only=True)
    loaded = load_from_checkpoint(GPTModule, SAVED, ranks=world_size)
    return warned, refusals, metrics, arrays(module.state_dict()), arrays(loaded.state_dict())


def _evaluated(rank, world_size):
    after_fit.available_memory_bytes = lambda: 0
    module = GPTModule(ranks=world_size)
    before = copy.deepcopy(arrays(module.state_dict()))
    make_trainer(settings(3), limit_val_batches=1.0).validate(module, verbose=False)
    return before, arrays(module.state_dict())


def test_untrained_weights_are_returned_without_a_checkpoint():
    for before, after in run_ranks(2, _evaluated, has_group=False):
        assert all(np.array_equal(after[name], before[name]) for name in before)


def _full(rank, world_size):
    module, trainer, warned = _fit("ddp", world_size)
    (metrics,) = trainer.validate(module, verbose=False)
    return warned, [], metrics, arrays(module.state_dict()), arrays(module.state_dict())


def test_what_does_not_fit_is_saved_and_left_out_and_comes_back_from_a_checkpoint():
    ours = run_ranks(2, _auto, has_group=False)
    reference = run_once(2, _full)
    for (_, refusals, *found), (_, _, *expected) in zip(ours, reference, strict=True):
        assert all(TEXT in text and "ckpt_path=" in text for text in refusals), refusals
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        for one, other in zip(found[1:], expected[1:], strict=True):
            for name, value in other.items():
                np.testing.assert_allclose(one[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
    assert [len(warned) for warned, *_ in ours] == [1, 0]
    assert "load_from_checkpoint" in ours[0][0][0]


def _false(rank, world_size, stage):
    average = EMAWeightAveraging(decay=0.5)
    checkpoints = ModelCheckpoint(dirpath="checkpoints", save_top_k=-1, every_n_train_steps=2)
    options = {"callbacks": [average, checkpoints], "enable_checkpointing": True}
    after_fit.available_memory_bytes = lambda: 0
    module, trainer, warned = _fit(settings(stage, unshard_after_fit=False), world_size, **options)
    assert not warned
    assert all(TEXT in text for text in _refusals(module, trainer))
    with pytest.raises(RuntimeError, match=TEXT):
        next(average._average_model.parameters()).sum()
    assert not trainer.optimizers[0].state
    # A callback has already saved the last step.
    module, *_ = _fit(
        settings(stage), world_size, callbacks=[checkpoints], enable_checkpointing=True
    )
    assert not Path(SAVED).exists()


class WithStatistics(GPTModule):
    """Has buffers and parameters that training does not use: there is no such kernel for CPUs."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = torch.nn.BatchNorm1d(4)
        self.memory = torch.nn.LSTM(2, 2)


def _left_out_with_statistics(rank, world_size):
    module = WithStatistics(ranks=world_size)
    weight = module.norm.weight
    spec = settings(3, unshard_after_fit=False)
    make_trainer(spec, sync_batchnorm=True, limit_train_batches=0).fit(module)
    assert not isinstance(module.norm, torch.nn.SyncBatchNorm)
    assert module.norm.weight is weight
    for use in (weight.sum, module.memory.weight_ih_l0.sum):
        with pytest.raises(RuntimeError, match=TEXT):
            use()
    assert module.norm.running_var.sum() == 4


def test_modules_become_their_own_kind_again_also_where_values_are_left_out():
    warm.run_ranks(2, _left_out_with_statistics, has_group=False)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_nothing_is_kept_on_request(stage):
    run_ranks(2, _false, stage, has_group=False)


def _states(rank, world_size, folder):
    kept = []
    for share in (0.5, 1.5):  # share of the module that fits beside the states
        net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        nbytes = sum(p.nbytes for p in net.parameters())
        offload = OffloadConfig("nvme", nvme_path=folder)
        config = ZeroConfig(stage=3, offload_optimizer=offload)
        engine = Engine(net, [torch.optim.Adam(net.parameters())], config)
        engine.backward(net(torch.ones(2, 64)).sum())
        engine.step()
        budget = int(2 * nbytes / world_size + share * nbytes)
        attached.available_memory_bytes = lambda: 2 * attached.local_world_size() * budget  # noqa: B023
        engine.close(torch.device("cpu"), keep_optimizer_shards=True)
        engine.comm.close()
        kept.append(bool(engine.optimizers[0].state))
        if not kept[-1]:
            with pytest.raises(RuntimeError, match="with the module"):
                engine.optimizers.check_has_states()
    return kept


def test_states_in_files_are_kept_where_they_fit_beside_the_module(tmp_path):
    assert run_ranks(2, _states, str(tmp_path)) == [[False, True]] * 2


@pytest.mark.parametrize("value", ["yes", None, 1])
def test_other_choices_are_refused(value):
    with pytest.raises(ValueError, match="unshard_after_fit must be True, False or"):
        ZeroStrategy(unshard_after_fit=value)


def _pickle_trainer(rank, world_size, spec):
    module, trainer, _ = _fit(spec, world_size)
    file = io.BytesIO()
    torch.save(trainer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    copied = loaded.lightning_module
    for one, other in zip(module.parameters(), copied.parameters(), strict=True):
        assert torch.equal(one, other)
    assert loaded.optimizers[0].param_groups[0]["params"][0] is next(copied.parameters())
    with pytest.raises(RuntimeError, match=r"the Trainer was pickled.*weights_only=True"):
        loaded.save_checkpoint("late.ckpt")
    loaded.save_checkpoint("weights.ckpt", weights_only=True)
    assert loaded.validate(copied, verbose=False) == trainer.validate(module, verbose=False)
    loaded.fit_loop.max_epochs = 2
    loaded.fit(copied)
    loaded.save_checkpoint("all.ckpt")
    again = GPTModule.load_from_checkpoint("all.ckpt", ranks=world_size)
    trainer.save_checkpoint("mine.ckpt")  # the pickled Trainer can still be used
    return arrays(copied.state_dict()), arrays(again.state_dict())


@pytest.mark.default_cases("stage 1")
@pytest.mark.parametrize(
    "spec",
    [settings(1), settings(3, checkpoint="sharded", async_save=True)],
    ids=["stage 1", "stage 3, sharded"],
)
def test_a_trainer_is_pickled_after_fit_and_its_copy_goes_on(spec):
    for trained, loaded in warm.run_ranks(2, _pickle_trainer, spec, has_group=False):
        for name, value in trained.items():
            np.testing.assert_array_equal(loaded[name], value, err_msg=name)


class PickledInside(GPTModule):
    """A callback that pickles the Trainer during a run."""

    def on_train_start(self):
        for copies in (pickle.dumps, copy.deepcopy):
            with pytest.raises(RuntimeError, match="be pickled or copied while the Trainer runs"):
                copies(self.trainer.strategy)


def _pickle_inside(rank, world_size):
    make_trainer(settings(3)).fit(PickledInside(ranks=world_size))


def test_a_strategy_in_a_run_is_not_pickled():
    warm.run_ranks(2, _pickle_inside, has_group=False)


def test_no_thread_of_a_fit_on_one_device_outlives_it():
    before = set(threading.enumerate())
    for spec in (settings(3), settings(1, overlap_step=True)):
        _fit(spec, 1)
        assert set(threading.enumerate()) == before
    with pytest.raises(ValueError, match="an earlier Trainer of this script"):
        make_trainer(settings(3), devices=2).fit(GPTModule(ranks=2))
