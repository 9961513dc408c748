"""The file of a full checkpoint: its writer, and errors on all ranks."""

import errno
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from lightning_zero import ZeroStrategy
from lightning_zero.strategy.saving import ZeroCheckpointIO
from tests.support.fitting import (
    Outcome,
    arrays,
    assert_same,
    fit_reference,
    make_trainer,
    settings,
)
from tests.support.full_disk import mounted_tmpfs
from tests.support.models import MLPModule
from tests.support.warm import run_ranks


@pytest.fixture
def small_disk(tmp_path):
    yield from mounted_tmpfs(tmp_path / "disk", 2**18)


class SavingModule(MLPModule):
    """Saves after every batch, and continues if that fails."""

    def __init__(self, path, **options):
        super().__init__(**options)
        self.path = path
        self.errors = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        try:
            self.trainer.save_checkpoint(self.path)
        except Exception as error:
            self.errors.append(error)


def _train(rank, world_size, stage, path):
    seed_everything(7, verbose=False)
    module = SavingModule(path, ranks=world_size)
    trainer = make_trainer(settings(stage))
    trainer.fit(module)
    return Outcome(module.losses, arrays(module.state_dict()), None, {}, trainer.global_step), [
        (type(e).__name__, getattr(e, "errno", None), str(e)) for e in module.errors
    ]


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_full_disk_is_an_error_on_all_ranks_and_training_goes_on(stage, small_disk):
    path = small_disk / "last.ckpt"
    path.write_bytes(b"the one before")
    (small_disk / "other").write_bytes(bytes(2**18 - 3 * 4096))
    results = run_ranks(2, _train, stage, str(path), has_group=False)
    for _, errors in results:
        assert errors
        for name, number, text in errors:
            assert name == "OSError"
            assert number == errno.ENOSPC
            assert "last.ckpt was not written: it needs" in text
    assert "rank 0 could not save" in results[1][1][0][2]
    assert path.read_bytes() == b"the one before"
    assert sorted(os.listdir(small_disk)) == ["last.ckpt", "other"]
    reference = fit_reference(2, partial(MLPModule, ranks=2))
    for (outcome, _), other in zip(results, reference, strict=True):
        outcome.learning_rates = other.learning_rates
    assert_same([outcome for outcome, _ in results], reference)


def test_what_cannot_be_pickled_is_an_error_on_all_ranks():
    results = run_ranks(2, _save_a_lambda, has_group=False)
    assert ["Error" in text for text in results] == [True, True]
    assert "rank 0 could not save" in results[1]


class LambdaModule(MLPModule):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["f"] = lambda: 0


def _save_a_lambda(rank, world_size):
    trainer = make_trainer(settings(2))
    module = LambdaModule(ranks=world_size)
    trainer.fit(module)
    with pytest.raises(Exception) as caught:
        trainer.save_checkpoint("x.ckpt")
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_damaged_file_is_refused_on_all_ranks_and_the_record_is_named(tmp_path):
    path = str(tmp_path / "a.ckpt")
    run_ranks(2, _save_and_damage, path, has_group=False)
    results = run_ranks(2, _resume_damaged, path, has_group=False)
    for text in results:
        assert "a.ckpt is damaged: record archive/data/" in text


def _save_and_damage(rank, world_size, path):
    seed_everything(7, verbose=False)
    module = MLPModule(ranks=world_size)
    trainer = make_trainer(settings(3))
    trainer.fit(module)
    trainer.save_checkpoint(path)
    if rank == 0:
        data = bytearray(Path(path).read_bytes())
        weight = next(iter(module.state_dict().values()))
        data[data.index(weight.numpy().tobytes()) + 5] ^= 1
        Path(path).write_bytes(data)


def _resume_damaged(rank, world_size, path):
    trainer = make_trainer(settings(3), max_epochs=2)
    with pytest.raises(ValueError, match="damaged") as caught:
        trainer.fit(MLPModule(ranks=world_size), ckpt_path=path)
    return str(caught.value)


def test_the_file_is_ours_unless_the_user_gave_a_checkpoint_io():
    assert type(ZeroStrategy().checkpoint_io) is ZeroCheckpointIO
    theirs = TorchCheckpointIO()
    assert ZeroStrategy(checkpoint_io=theirs).checkpoint_io is theirs
    wrapped = AsyncCheckpointIO()
    assert ZeroStrategy(checkpoint_io=wrapped).checkpoint_io is wrapped
    assert type(wrapped.checkpoint_io) is ZeroCheckpointIO


def test_links_directories_and_new_folders_are_as_a_user_expects(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    io = ZeroCheckpointIO()
    tree = {"state_dict": {"x": torch.ones(2)}}
    (tmp_path / "best.ckpt").write_bytes(b"best")
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    for path in (tmp_path / "last.ckpt", "~/a/b/c.ckpt", f"file://{tmp_path}/d.ckpt"):
        io.save_checkpoint(tree, path)
        assert torch.equal(io.load_checkpoint(path)["state_dict"]["x"], torch.ones(2))
    assert (tmp_path / "best.ckpt").read_bytes() == b"best"
    assert (tmp_path / "a" / "b" / "c.ckpt").is_file()
    with pytest.raises(FileNotFoundError, match=r"none\.ckpt"):
        io.load_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint(tree, tmp_path / "x.ckpt", storage_options={})
    io.save_checkpoint(tree, "memory://x.ckpt")
    assert torch.equal(io.load_checkpoint("memory://x.ckpt")["state_dict"]["x"], torch.ones(2))
