"""Checkpoints with hyperparameters, hooks, or a user's CheckpointIO."""

from __future__ import annotations

import pickle
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

from tests.support.fitting import arrays, make_trainer, settings
from tests.support.models import MLPModule
from tests.support.warm import run_ranks


class RichModule(MLPModule):
    """A module with hyperparameters that need pickle."""

    def __init__(self, options=None, **kwargs):
        super().__init__(**kwargs)
        self.save_hyperparameters("options")


def _rich(rank, world_size, spec):
    options = Namespace(width=Path("x"), names={1, 2})
    trainer = make_trainer(spec)
    trainer.fit(RichModule(options, ranks=2))
    trainer.save_checkpoint("rich.ckpt")
    trainer.strategy.barrier()
    with pytest.raises(pickle.UnpicklingError, match="argparse"):
        make_trainer(spec, max_epochs=2).fit(RichModule(ranks=2), ckpt_path="rich.ckpt")
    module = RichModule(ranks=2)
    trainer = make_trainer(spec, max_epochs=2)
    trainer.fit(module, ckpt_path="rich.ckpt", weights_only=False)
    loaded = RichModule.load_from_checkpoint("rich.ckpt", weights_only=False, ranks=2)
    assert loaded.hparams.options == options
    return trainer.global_step, len(module.losses)


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_training_resumes_from_a_file_with_hyperparameters_of_any_class(stage):
    assert run_ranks(2, _rich, settings(stage), has_group=False) == [(8, 4), (8, 4)]


class RenamedModule(MLPModule):
    """A module whose layers were renamed since; its hook reads, renames, deletes and changes."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = None

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        for name in list(state):
            state[name.replace("old", "net")] = state.pop(name)
        del state["more"]
        self.seen = float(state["net.0.weight"].sum())
        state["net.2.bias"] = state["net.2.bias"] * 2
        assert state["net.0.bias"][3:5].tolist() == state["net.0.bias"].tolist()[3:5]


def _renamed(rank, world_size, spec):
    seed_everything(7, verbose=False)
    trainer = make_trainer(spec, limit_train_batches=1)
    module = MLPModule(ranks=2)
    trainer.fit(module)
    trainer.save_checkpoint("new.ckpt")
    trainer.strategy.barrier()
    if rank == 0:
        checkpoint = torch.load("new.ckpt", weights_only=True)
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.replace("net", "old"): v for name, v in state.items()}
        checkpoint["state_dict"]["more"] = torch.zeros(3)
        torch.save(checkpoint, "old.ckpt")
    trainer.strategy.barrier()
    expected = arrays(module.state_dict())
    expected["net.2.bias"] *= 2
    renamed = RenamedModule(ranks=2)
    make_trainer(spec, limit_val_batches=1).validate(renamed, ckpt_path="old.ckpt", verbose=False)
    for name, value in arrays(renamed.state_dict()).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert renamed.seen == pytest.approx(float(expected["net.0.weight"].sum()), rel=1e-5)


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hooks_read_rename_delete_and_change_what_is_loaded(stage):
    run_ranks(2, _renamed, settings(stage), has_group=False)


class NotedIO(TorchCheckpointIO):
    """A CheckpointIO that records its calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.calls.append(("save", Path(path).name))
        super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path, *args, **kwargs):
        self.calls.append(("load", Path(path).name))
        return super().load_checkpoint(path, *args, **kwargs)


def _custom(rank, world_size, stage, is_async):
    inner = NotedIO()
    io = AsyncCheckpointIO(inner) if is_async else inner
    saver = ModelCheckpoint("saved", filename="one")
    options = {"callbacks": [saver], "enable_checkpointing": True}
    module = MLPModule(ranks=2)
    make_trainer(settings(stage, checkpoint_io=io), **options).fit(module)
    complete = rank > 0 or torch.load("saved/one.ckpt", weights_only=True)["global_step"] == 4
    again = MLPModule(ranks=2)
    other = NotedIO()
    io = AsyncCheckpointIO(other) if is_async else other
    trainer = make_trainer(settings(stage, checkpoint_io=io), max_epochs=2)
    trainer.strategy.barrier()
    trainer.fit(again, ckpt_path="saved/one.ckpt")
    return complete, inner.calls, other.calls, trainer.global_step


@pytest.mark.default_cases("2-False")
@pytest.mark.parametrize(("stage", "is_async"), [(1, True), (2, False), (3, True), (3, False)])
def test_a_custom_checkpoint_io_writes_and_reads(stage, is_async):
    results = run_ranks(2, _custom, stage, is_async, has_group=False)
    for rank, (complete, saved, loaded, global_step) in enumerate(results):
        assert complete
        assert saved == ([("save", "one.ckpt")] if rank == 0 else [])
        assert loaded == [("load", "one.ckpt")]
        assert global_step == 8


class KeepingModule(MLPModule):
    """A module that saves a tensor, and keeps the loaded one."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["kept"] = torch.arange(5.0)

    def on_load_checkpoint(self, checkpoint):
        self.kept = checkpoint["kept"]


def _kept(rank, world_size, spec):
    trainer = make_trainer(spec)
    trainer.fit(KeepingModule(ranks=2))
    trainer.save_checkpoint("one.ckpt")
    trainer.strategy.barrier()
    module = KeepingModule(ranks=2)
    make_trainer(spec, max_epochs=2).fit(module, ckpt_path="one.ckpt")
    trainer.strategy.barrier()
    Path("one.ckpt").write_bytes(b"")  # in place, like a copy to another file system
    return module.kept.tolist()


def test_a_hook_gets_its_own_copy_of_loaded_values():
    assert run_ranks(2, _kept, settings(3), has_group=False) == [[0, 1, 2, 3, 4]] * 2
