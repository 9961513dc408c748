"""Full checkpoints: one file like DDP's, from any stage and world size to any other."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero.checkpoint.states import METADATA_KEY, RANK_STATES_KEY
from tests.support.cells import slow_but
from tests.support.fitting import arrays, fit, fit_ranks, make_trainer, run_once, settings
from tests.support.models import ConvModule, FrozenModule, GPTModule, MLPModule, UnusedModule
from tests.support.warm import run_ranks

MODELS = {
    "tied gpt": partial(GPTModule, ranks=2, is_tied=True),
    "batch norm": partial(ConvModule, ranks=2),
    "two groups": partial(MLPModule, ranks=2, scheduler="per step"),
    "frozen": partial(FrozenModule, ranks=2),
    "sgd": partial(MLPModule, ranks=2, optimizer="sgd"),
}


def assert_same_tree(ours, reference, path="checkpoint"):
    """Asserts the same keys in order, types, shapes and dtypes; values to 1e-6."""
    if isinstance(reference, dict):
        assert isinstance(ours, dict), path
        # The order of an optimizer's states depends on its first steps and has no meaning.
        is_ordered = not path.endswith("['state']")
        assert (list(ours) if is_ordered else set(ours)) == (
            list(reference) if is_ordered else set(reference)
        ), path
        for key, value in reference.items():
            assert_same_tree(ours[key], value, f"{path}[{key!r}]")
    elif isinstance(reference, (list, tuple)):
        assert type(ours) is type(reference), path
        assert len(ours) == len(reference), path
        for index, value in enumerate(reference):
            assert_same_tree(ours[index], value, f"{path}[{index}]")
    elif isinstance(reference, torch.Tensor):
        assert type(ours) is torch.Tensor, path
        assert ours.dtype == reference.dtype, path
        assert ours.shape == reference.shape, path
        assert ours.device == reference.device, path
        torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-6, msg=path)
    else:
        assert type(ours) is type(reference), path
        assert ours == reference, path


def without_rank_states(checkpoint):
    """The checkpoint without the last two keys, which DDP's has not."""
    *keys, states, note = checkpoint
    assert (states, note) == (RANK_STATES_KEY, METADATA_KEY)
    assert set(checkpoint[METADATA_KEY]) == {"rank_state_bytes"}
    return {key: checkpoint[key] for key in keys}


@pytest.mark.default_cases("two groups-3")
@pytest.mark.shows("full checkpoint, as DDP's")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", slow_but({"tied gpt", "two groups", "frozen"}, MODELS))
def test_the_file_has_what_ddp_writes(model, stage):
    ours = fit_ranks(2, settings(stage), MODELS[model], is_saving=True)
    reference = run_once(2, _saved, "ddp", MODELS[model])
    assert_same_tree(without_rank_states(ours[0].checkpoint), reference[0].checkpoint)


def _saved(rank, world_size, spec, factory):
    return fit(rank, world_size, spec, factory, is_saving=True)


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_never_had_a_gradient_has_no_optimizer_state(stage):
    factory = partial(UnusedModule, ranks=2)
    ours = fit_ranks(2, settings(stage), factory, is_saving=True)
    reference = run_once(2, _saved, "ddp_find_unused_parameters_true", factory)
    assert_same_tree(without_rank_states(ours[0].checkpoint), reference[0].checkpoint)


class EarlySaver(MLPModule):
    """Saves before the first step."""

    def on_train_start(self):
        self.trainer.save_checkpoint("early.ckpt")


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_saving_before_the_first_step_gives_an_empty_optimizer_state(stage):
    ours = run_ranks(2, _save_early, settings(stage), has_group=False)
    reference = run_once(2, _save_early, "ddp")
    assert_same_tree(without_rank_states(ours[0]), reference[0])
    assert ours[0]["optimizer_states"][0]["state"] == {}


def _save_early(rank, world_size, spec):
    seed_everything(7, verbose=False)
    make_trainer(spec).fit(EarlySaver(ranks=world_size))
    return torch.load("early.ckpt", weights_only=True)


@pytest.mark.default_cases("3")
@pytest.mark.shows("ModelCheckpoint")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_load_from_checkpoint_and_every_file_of_model_checkpoint_are_as_under_ddp(stage):
    ours = run_ranks(2, _files, settings(stage), has_group=False)
    reference = run_once(2, _files, "ddp")
    for (files, state), (expected_files, expected) in zip(ours, reference, strict=True):
        assert files == expected_files
        for name, value in expected.items():
            np.testing.assert_allclose(state[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def _files(rank, world_size, spec):
    seed_everything(7, verbose=False)
    saver = ModelCheckpoint("saved", save_last=True, save_top_k=2, monitor="val_loss")
    options = {"callbacks": [saver], "enable_checkpointing": True, "limit_val_batches": 1}
    trainer = make_trainer(spec, max_epochs=3, limit_train_batches=1, **options)
    trainer.fit(MLPModule(ranks=world_size))
    best = MLPModule.load_from_checkpoint(saver.best_model_path, ranks=world_size)
    trainer.strategy.barrier()
    paths = [Path(saver.best_model_path).name, *sorted(map(str, Path().rglob("*.ckpt")))]
    return paths, arrays(best.state_dict())


def _resume(rank, world_size, specs, factory, folder):
    """Trains one epoch with each strategy, resumed from the last checkpoint of the previous one."""
    path = None
    for number, spec in enumerate(specs):
        seed_everything(7 if path is None else 100 + rank, verbose=False)
        module = factory()
        saver = ModelCheckpoint(f"{folder}/{number}", save_last=True)
        trainer = make_trainer(
            spec, max_epochs=number + 1, callbacks=[saver], enable_checkpointing=True
        )
        trainer.fit(module, ckpt_path=path)
        path = f"{folder}/{number}/last.ckpt"
    return arrays(module.state_dict()), torch.load(path, weights_only=True)


def _uninterrupted(rank, world_size, spec, factory, num_epochs):
    seed_everything(7, verbose=False)
    module = factory()
    saver = ModelCheckpoint("reference", save_last=True)
    options = {"callbacks": [saver], "enable_checkpointing": True}
    make_trainer(spec, max_epochs=num_epochs, **options).fit(module)
    return arrays(module.state_dict()), torch.load("reference/last.ckpt", weights_only=True)


STAGE_TO_STAGE = [(1, 3), (3, 1), (2, 3), (3, 0), (0, 2)]
RESUMED = {
    "two groups": partial(MLPModule, ranks=2, scheduler="per step"),
    "tied gpt": partial(GPTModule, ranks=2, is_tied=True),
    "batch norm": partial(ConvModule, ranks=2),
}


@pytest.mark.default_cases("batch norm-1")
@pytest.mark.shows("resuming, bit-equal")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", slow_but({"tied gpt", "batch norm"}, RESUMED))
def test_resuming_from_the_last_checkpoint_is_bit_equal_to_never_stopping(model, stage):
    specs = [settings(stage)] * 2
    ours = run_ranks(2, _resume, specs, RESUMED[model], "saved", has_group=False)
    reference = run_once(2, _uninterrupted, specs[0], RESUMED[model], 2)
    _assert_equal_bits(ours, reference)


def _assert_equal_bits(ours, reference):
    for (state, checkpoint), (expected, other) in zip(ours, reference, strict=True):
        for name, value in expected.items():
            if "running" not in name:  # rank 0 broadcasts it to the others on resuming
                np.testing.assert_array_equal(state[name], value, err_msg=name)
        for index, entry in other["optimizer_states"][0]["state"].items():
            for name, value in entry.items():
                one = checkpoint["optimizer_states"][0]["state"][index][name]
                assert torch.equal(one, value), f"{name} of parameter {index}"
        assert checkpoint["lr_schedulers"] == other["lr_schedulers"]


@pytest.mark.default_cases("two groups-ddp to ours-1")
@pytest.mark.shows("resuming from and under DDP")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("order", ["ours to ddp", "ddp to ours"])
@pytest.mark.parametrize("model", slow_but({"two groups"}, ["two groups", "tied gpt"]))
def test_ddp_resumes_ours_and_ours_resumes_ddps(model, order, stage):
    specs = [settings(stage), "ddp"]
    if order == "ddp to ours":
        specs.reverse()
    _check_resumed(specs, RESUMED[model])


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), STAGE_TO_STAGE)
def test_one_stage_resumes_another(first, second):
    _check_resumed([settings(first), settings(second)], RESUMED["two groups"])


def _check_resumed(specs, factory):
    ours = run_ranks(2, _resume, specs, factory, "saved", has_group=False)
    reference = run_once(2, _uninterrupted, "ddp", factory, len(specs))
    for (state, checkpoint), (expected, other) in zip(ours, reference, strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(state[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
        assert_same_tree(checkpoint["optimizer_states"], other["optimizer_states"])
        assert_same_tree(checkpoint["lr_schedulers"], other["lr_schedulers"])


@pytest.mark.slow
@pytest.mark.shows("resuming on another number of ranks")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_then_one_then_three_train_as_one(stage, tmp_path):
    factory = partial(MLPModule, ranks=6, batch_size=1, scheduler="per step")
    path = None
    for number, world_size in enumerate([2, 1, 3]):
        results = run_ranks(
            world_size,
            _one_more_epoch,
            settings(stage),
            factory,
            number + 1,
            path,
            str(tmp_path / f"{number}.ckpt"),
            has_group=False,
        )
        path = str(tmp_path / f"{number}.ckpt")
    expected, _ = run_once(1, _uninterrupted, "auto", factory, 3)[0]
    for state in results:
        for name, value in expected.items():
            np.testing.assert_allclose(state[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def _one_more_epoch(rank, world_size, spec, factory, max_epochs, path, target):
    seed_everything(7, verbose=False)
    module = factory()
    trainer = make_trainer(spec, max_epochs=max_epochs)
    trainer.fit(module, ckpt_path=path)
    trainer.save_checkpoint(target)
    return arrays(module.state_dict())


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_evaluation_reads_a_checkpoint_without_a_fit(stage):
    ours = run_ranks(2, _validate_from_file, settings(stage), has_group=False)
    reference = run_once(2, _validate_from_file, "ddp")
    for one, other in zip(ours, reference, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def _validate_from_file(rank, world_size, spec):
    seed_everything(7, verbose=False)
    trainer = make_trainer(spec, limit_train_batches=1)
    trainer.fit(ConvModule(ranks=world_size))
    trainer.save_checkpoint("full.ckpt")
    trainer.save_checkpoint("weights.ckpt", weights_only=True)
    assert "optimizer_states" not in torch.load("weights.ckpt", weights_only=True)
    losses = []
    for path in ("full.ckpt", "weights.ckpt"):
        seed_everything(rank, verbose=False)
        fresh = ConvModule(ranks=world_size)
        trainer = make_trainer(spec, limit_val_batches=2)
        losses.append(trainer.validate(fresh, ckpt_path=path, verbose=False)[0]["val_loss"])
    assert losses[0] == losses[1]
    return losses
