"""Finding the newest complete checkpoint in a folder."""

import os
import pickle

import pytest
import torch

import lightning_zero
from lightning_zero.checkpoint.dcp_writer import ShardedSave
from lightning_zero.checkpoint.torch_file import write_torch_file
from lightning_zero.comm.control import Channel


def content(step, **others):
    state = {"weight": torch.full((50,), float(step))}
    return {"global_step": step, "state_dict": state, "lr_schedulers": [], **others}


def save_full(path, step, **others):
    write_torch_file(content(step, **others), path)


def save_sharded(path, step):
    ShardedSave.prepare(content(step), path, {}, Channel(0, 1, None)).run()


def test_the_highest_step_counts_and_of_one_step_the_time(tmp_path):
    assert lightning_zero.newest_checkpoint(tmp_path / "none") is None
    assert lightning_zero.newest_checkpoint(tmp_path) is None
    save_full(tmp_path / "step=9.ckpt", 9)
    save_sharded(tmp_path / "step=10.ckpt", 10)
    save_full(tmp_path / "last.ckpt", 10)
    save_full(tmp_path / "later.ckpt", 8)
    os.utime(tmp_path / "last.ckpt", (0, 0))
    assert lightning_zero.newest_checkpoint(tmp_path) == tmp_path / "step=10.ckpt"
    os.utime(tmp_path / "step=10.ckpt" / ".metadata", (-1, -1))
    assert lightning_zero.newest_checkpoint(f"file://{tmp_path}") == tmp_path / "last.ckpt"


def test_what_is_incomplete_or_weights_alone_is_left_out(tmp_path):
    save_full(tmp_path / "good.ckpt", 1)
    save_full(tmp_path / "truncated.ckpt", 2)
    os.truncate(tmp_path / "truncated.ckpt", 900)
    save_sharded(tmp_path / "truncated", 3)
    os.truncate(tmp_path / "truncated" / "__0_0.distcp", 900)
    weights = content(4)
    del weights["lr_schedulers"]
    torch.save(weights, tmp_path / "weights.ckpt")
    torch.save(weights["state_dict"], tmp_path / "weights.pt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "link.ckpt").symlink_to("nothing")
    with pytest.warns(UserWarning, match="is ignored because it is not complete") as warned:
        assert lightning_zero.newest_checkpoint(tmp_path) == tmp_path / "good.ckpt"
    named = {str(tmp_path / "truncated.ckpt"), str(tmp_path / "truncated")}
    assert {str(one.message).split(" is ignored")[0] for one in warned} == named


def test_a_checkpoint_renamed_by_a_killed_save_counts(tmp_path):
    save_full(tmp_path / "a.ckpt", 1)
    save_sharded(tmp_path / "b.ckpt", 2)
    os.rename(tmp_path / "b.ckpt", tmp_path / ".b.ckpt.zero-replaced")
    assert lightning_zero.newest_checkpoint(tmp_path) == tmp_path / "b.ckpt"


def test_a_checkpoint_with_refused_classes_is_an_error_and_not_passed_over(tmp_path):
    save_full(tmp_path / "a.ckpt", 1)
    save_full(tmp_path / "b.ckpt", 2, hyper_parameters=ValueError("of a class"))
    with pytest.raises(pickle.UnpicklingError):
        lightning_zero.newest_checkpoint(tmp_path)
    newest = lightning_zero.newest_checkpoint(tmp_path, weights_only=False)
    assert newest == tmp_path / "b.ckpt"
