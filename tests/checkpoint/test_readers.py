"""torch's tools and Lightning's FSDP2 read our directories, and we read theirs."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_zero.checkpoint import open_checkpoint
from tests.support.fitting import make_strategy, make_trainer, run_once, settings
from tests.support.models import GPTModule
from tests.support.ranks import run_ranks


class FullyShardedGPT(GPTModule):
    """The same module under FSDP2."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        if not isinstance(next(self.parameters()), DTensor):
            for block in self.gpt.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.gpt, mesh=mesh)


class SavingAtEnd(Callback):
    """Saves when training ends."""

    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def _train(rank, world_size, kind, max_epochs, source, target):
    """Trains, and returns the losses of the last epoch."""
    seed_everything(7 if source is None else 8, verbose=False)
    if kind == "fsdp2":
        model, strategy = FullyShardedGPT, ModelParallelStrategy(world_size, 1)
    else:
        model, strategy = GPTModule, make_strategy(settings(kind, checkpoint="sharded"))
    module = model(ranks=world_size, scheduler="per step")
    callbacks = [SavingAtEnd(target)] if target else []
    trainer = make_trainer("auto", max_epochs=max_epochs, callbacks=callbacks, strategy=strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, ckpt_path=source)
    return module.losses[-module.num_batches :]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("ours") / "a.ckpt")
    run_ranks(2, _train, 3, 1, None, path, has_group=False)
    return path


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("theirs") / "a.ckpt")
    run_ranks(2, _train, "fsdp2", 1, None, path, has_group=False)
    return path


@pytest.mark.slow
def test_torchs_converter_reads_ours(ours, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(ours, tmp_path / "full.pt")
    full = torch.load(tmp_path / "full.pt", weights_only=False)
    opened = open_checkpoint(ours)
    assert set(full) == {"state_dict", "optimizer_0", "lightning_zero_rank_states"}
    assert list(full["state_dict"]) == list(opened["state_dict"])
    for name, value in opened["state_dict"].items():
        assert torch.equal(full["state_dict"][name], value.clone())
    (state,) = opened["optimizer_states"]
    assert full["optimizer_0"]["param_groups"] == state["param_groups"]
    for name, entry in state["state"].items():
        for key, value in entry.items():
            assert torch.equal(full["optimizer_0"]["state"][name][key], value.clone())


@pytest.mark.slow
def test_fsdp2_resumes_ours_and_trains_on_as_we_do(ours):
    losses = run_ranks(2, _train, "fsdp2", 2, ours, None, has_group=False)
    _assert_uninterrupted(losses)


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_we_resume_fsdp2_and_train_on_as_it_does(stage, theirs):
    losses = run_ranks(2, _train, stage, 2, theirs, None, has_group=False)
    _assert_uninterrupted(losses)


def test_both_write_the_same_names_shapes_and_dtypes(ours, theirs):
    one, other = open_checkpoint(ours), open_checkpoint(theirs)
    del one["lightning_zero"], one["lightning_zero_rank_states"]
    assert set(one) == set(other)
    assert _shapes(one["state_dict"]) == _shapes(other["state_dict"])
    (state,), (other_state,) = one["optimizer_states"], other["optimizer_states"]
    assert state["param_groups"] == other_state["param_groups"]
    for name, entry in other_state["state"].items():
        assert _shapes(state["state"][name]) == _shapes(entry)


def _shapes(tensors):
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}


def _assert_uninterrupted(losses):
    expected = run_once(2, _train, 3, 2, None, None)
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-6)
