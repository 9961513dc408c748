"""Checkpoints of an engine in a loop written by hand, without Lightning."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_zero import full_state_dict, load_checkpoint, save_checkpoint
from lightning_zero.checkpoint import states
from tests.support import ranks
from tests.support.cells import SHARDED_STAGE
from tests.support.fitting import arrays, make_trainer
from tests.support.loops import LossModule, assert_same_state, batch, build, engine_for
from tests.support.warm import run_ranks


def _train(engine, module, optimizer, rank, steps):
    losses = []
    for step in steps:
        loss = module(batch(rank, step))
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
        engine.zero_grad()
    return losses


def _save(rank, world_size, stage, is_sharded, path, precision=None):
    module, optimizer = build()
    module.to(precision)
    engine = engine_for(module, [optimizer], stage)
    _train(engine, module, optimizer, rank, range(2))
    entries = {"step": 2, "rng": torch.arange(3), "first": [next(module.parameters())]}
    save_checkpoint(engine, path, entries, is_sharded=is_sharded)
    losses = _train(engine, module, optimizer, rank, range(2, 4))
    engine.close()
    return losses, arrays(module.state_dict())


def _resume(rank, world_size, stage, path, precision=None):
    module, optimizer = build()
    module.to(precision)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    engine = engine_for(module, [optimizer], stage)
    rest = load_checkpoint(engine, path)
    assert rest["step"] == 2
    assert torch.equal(rest["rng"], torch.arange(3))
    first = next(iter(full_state_dict(engine, is_on_all_ranks=True).values()))
    assert torch.equal(rest["first"][0], first)
    assert "state_dict" not in rest
    assert "optimizer_states" not in rest
    losses = _train(engine, module, optimizer, rank, range(2, 4))
    engine.close()
    return losses, arrays(module.state_dict())


def assert_equal(ours, expected):
    for (losses, state), (other_losses, other_state) in zip(ours, expected, strict=True):
        assert losses == other_losses
        assert list(state) == list(other_state)
        for name, value in state.items():
            np.testing.assert_array_equal(value, other_state[name], err_msg=name)


@pytest.fixture(scope="module")
def saved_in_stage_3(tmp_path_factory):
    """A sharded checkpoint, and the results of the run that saved it."""
    path = str(tmp_path_factory.mktemp("saved") / "one.ckpt")
    return path, run_ranks(2, _save, 3, True, path)


CASES = [
    (saved, resumed, is_sharded)
    for saved in (1, 3)
    for resumed in (1, 3)
    for is_sharded in (True, False)
]


def test_a_resumed_loop_of_stage_3_is_bit_equal(saved_in_stage_3):
    path, expected = saved_in_stage_3
    assert os.path.isdir(path)
    assert_equal(run_ranks(2, _resume, 3, path), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed", "is_sharded"), CASES)
def test_a_resumed_loop_is_bit_equal(saved, resumed, is_sharded, tmp_path):
    path = str(tmp_path / "one.ckpt")
    expected = run_ranks(2, _save, saved, is_sharded, path)
    assert os.path.isdir(path) == is_sharded
    assert_equal(run_ranks(2, _resume, resumed, path), expected)


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("is_sharded", [True, False])
def test_float32_main_parameters_of_a_16_bit_module_are_kept(is_sharded, tmp_path):
    path = str(tmp_path / "one.ckpt")
    expected = run_ranks(2, _save, 3, is_sharded, path, torch.bfloat16)
    assert_equal(run_ranks(2, _resume, 2, path, torch.bfloat16), expected)


class OfTrainer(LightningModule):
    """The loop's module in a Trainer, with the loop's batches."""

    def __init__(self):
        super().__init__()
        module, self.optimizer = build()
        self.gpt = module.gpt
        self.losses = []

    def training_step(self, one, index):
        loss = LossModule.forward(self, batch(self.global_rank, index + 2))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-5)

    def train_dataloader(self):
        return DataLoader(torch.zeros(4, 1))


def _resume_in_trainer(rank, world_size, stage, path):
    module = OfTrainer()
    trainer = make_trainer({"stage": stage}, devices=world_size, max_epochs=1)
    trainer.fit(module, ckpt_path=path)
    return module.losses, arrays(module.state_dict())


def test_a_trainer_resumes_from_the_checkpoint_of_an_engine(saved_in_stage_3):
    path, expected = saved_in_stage_3
    ours = run_ranks(2, _resume_in_trainer, 2, path, has_group=False)
    for (losses, state), (other_losses, other_state) in zip(ours, expected, strict=True):
        np.testing.assert_allclose(losses, other_losses, rtol=1e-6)
        assert_same_state(state, other_state)


def _load_what_does_not_fit(rank, world_size, path):
    module, optimizer = build()
    engine = engine_for(module, [], 3)
    before = arrays(full_state_dict(engine, is_on_all_ranks=True))
    with pytest.raises(ValueError, match="expected the states of 0 optimizers, got 1"):
        load_checkpoint(engine, path)
    after = full_state_dict(engine, is_on_all_ranks=True)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(engine, path + ".missing")
    with pytest.raises(ValueError, match="'state_dict'"):
        save_checkpoint(engine, path, {"state_dict": 1})


def test_what_does_not_fit_is_refused_on_every_rank(saved_in_stage_3):
    run_ranks(2, _load_what_does_not_fit, saved_in_stage_3[0])


def _save_to_nowhere(rank, world_size):
    module, optimizer = build()
    engine = engine_for(module, [optimizer], 3)
    for is_sharded in (True, False):
        with pytest.raises(OSError):
            save_checkpoint(engine, "/dev/null/one.ckpt", is_sharded=is_sharded)
        _train(engine, module, optimizer, rank, range(1))  # the engine is usable


def test_a_failed_save_raises_on_every_rank():
    run_ranks(2, _save_to_nowhere)


def _save_without_memory(rank, world_size, stage, what):
    module, optimizer = build()
    if what == "main parameters":  # of 4 bytes, beside 2 for the parameter; SGD has no states
        module.bfloat16()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = engine_for(module, [optimizer], stage)
    if what != "main parameters":
        _train(engine, module, optimizer, rank, range(1))
    num_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    states._MIN_CHECKED_BYTES = 1
    free_bytes = num_bytes - 1 if what == "parameters" else num_bytes
    states.available_memory_bytes = lambda: free_bytes if rank == 0 else 2**40
    with pytest.raises(
        RuntimeError, match=rf"the {what} of a full checkpoint take .* on rank 0"
    ) as e:
        save_checkpoint(engine, "full.ckpt")
    assert "is_sharded=True" in str(e.value)
    assert not os.path.exists("full.ckpt")
    save_checkpoint(engine, "sharded.ckpt", is_sharded=True)
    engine.close()


@pytest.mark.parametrize("what", ["parameters", "optimizer states", "main parameters"])
@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_a_full_checkpoint_that_does_not_fit_into_memory_is_an_error_on_all_ranks(stage, what):
    ranks.run_ranks(2, _save_without_memory, stage, what)
