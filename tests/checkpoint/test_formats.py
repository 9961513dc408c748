"""Every format of checkpoint, in every stage, through the Trainer."""

from __future__ import annotations

import io
import json
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from safetensors.torch import save_file

import lightning_zero
from lightning_zero.checkpoint.export import plan_export
from tests.support import ranks
from tests.support.deepspeed_format import write_deepspeed
from tests.support.fitting import arrays, make_trainer, run_once, settings
from tests.support.models import GPTModule, MLPModule, Recorder
from tests.support.ranks import RankError
from tests.support.warm import run_ranks

STAGES = [1, 2, 3]
WEIGHTS_ONLY = ["state dict", "safetensors", "index"]
DEEPSPEED = ["deepspeed 1", "deepspeed 2", "deepspeed 3"]
FORMATS = ["lightning", *WEIGHTS_ONLY, *DEEPSPEED]

tied_gpt = partial(GPTModule, ranks=2, is_tied=True, scheduler="per step")


def _one_epoch_then_another(rank, world_size, spec, folder):
    """Saves after one epoch; returns the validation loss and the results of a second epoch."""
    seed_everything(7, verbose=False)
    module = tied_gpt()
    trainer = make_trainer(spec, max_epochs=1)
    trainer.fit(module)
    trainer.save_checkpoint(f"{folder}/one.ckpt")
    trainer.strategy.barrier()
    seed_everything(3, verbose=False)
    validated = make_trainer(spec, limit_val_batches=1.0)
    (metrics,) = validated.validate(tied_gpt(), ckpt_path=f"{folder}/one.ckpt", verbose=False)
    return metrics["val_loss"], _resume(rank, world_size, spec, f"{folder}/one.ckpt")


def _resume(rank, world_size, spec, path, **options):
    """Trains a second epoch; returns the module's state, losses, and optimizer state."""
    seed_everything(100 + rank, verbose=False)
    module = tied_gpt()
    trainer = make_trainer(spec, max_epochs=2)
    trainer.fit(module, ckpt_path=path, **options)
    trainer.save_checkpoint("two.ckpt")
    trainer.strategy.barrier()
    saved = torch.load("two.ckpt", weights_only=True)
    return arrays(module.state_dict()), module.losses, saved["optimizer_states"][0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A folder with a checkpoint of DDP in every format, and DDP's results of resuming."""
    folder = tmp_path_factory.mktemp("formats")
    outcome = run_once(2, _one_epoch_then_another, "ddp", str(folder))
    checkpoint = torch.load(folder / "one.ckpt", weights_only=True)
    (folder / "one.ckpt").rename(folder / "lightning")
    state = checkpoint.pop("state_dict")
    torch.save(state, folder / "state dict")
    tied = {name: value for name, value in state.items() if name != "gpt.head.weight"}
    (folder / "safetensors").mkdir()
    save_file(tied, folder / "safetensors" / "model.safetensors")  # it refuses tied weights
    _write_indexed(folder / "index", tied)
    module = tied_gpt()
    module.load_state_dict(state)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    (saved,) = checkpoint.pop("optimizer_states")
    optimizer.load_state_dict(saved)
    for stage in STAGES:
        write_deepspeed(
            folder / f"deepspeed {stage}",
            module,
            optimizer,
            stage=stage,
            world_size=3,
            client_state=checkpoint,
        )
    return folder, outcome


def _write_indexed(folder, state):
    folder.mkdir()
    names = list(state)
    halves = {"model-00001-of-00002.safetensors": names[:5]}
    halves["model-00002-of-00002.safetensors"] = names[5:]
    for file, part in halves.items():
        save_file({name: state[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_evaluation_reads_every_format(reference, stage):
    folder, outcome = reference
    results = run_ranks(2, _evaluate, settings(stage), str(folder), has_group=False)
    for rank, losses in enumerate(results):
        assert losses == {name: pytest.approx(outcome[rank][0], rel=1e-6) for name in FORMATS}


def _evaluate(rank, world_size, spec, folder):
    losses = {}
    for name in FORMATS:
        seed_everything(rank, verbose=False)
        module = tied_gpt()
        trainer = make_trainer(spec, limit_val_batches=1.0)
        path = f"{folder}/{name}"
        (metrics,) = trainer.validate(module, ckpt_path=path, verbose=False)
        losses[name] = metrics["val_loss"]
    return losses


@pytest.mark.slow
@pytest.mark.shows("resuming from DeepSpeed's checkpoints")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_resumed_from_ddp_or_deepspeed_goes_on_to_the_last_digits(reference, stage):
    folder, outcome = reference
    results = run_ranks(2, _resume_each, settings(stage), str(folder), has_group=False)
    for rank, by_name in enumerate(results):
        for name, (state, losses, optimizer) in by_name.items():
            expected = outcome[rank][1]
            np.testing.assert_allclose(losses, expected[1], rtol=1e-6, err_msg=name)
            for key, value in expected[0].items():
                np.testing.assert_allclose(state[key], value, rtol=1e-6, atol=1e-7, err_msg=name)
            for number, entry in expected[2]["state"].items():
                for key, value in entry.items():
                    mine = optimizer["state"][number][key]
                    torch.testing.assert_close(mine, value, rtol=1e-6, atol=1e-7)
            assert optimizer["param_groups"] == expected[2]["param_groups"]


def _resume_each(rank, world_size, spec, folder):
    return {
        name: _resume(rank, world_size, spec, f"{folder}/{name}")
        for name in ("lightning", *DEEPSPEED)
    }


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resuming_from_ddps_file_is_bit_equal_to_resuming_from_ones_own(reference, stage):
    folder, outcome = reference
    own = run_ranks(2, _from_both, settings(stage), str(folder), has_group=False)
    for ((state, losses, _), (expected, expected_losses, _)), _ in zip(own, outcome, strict=True):
        assert losses == expected_losses
        for key, value in expected.items():
            np.testing.assert_array_equal(state[key], value, err_msg=key)


def _from_both(rank, world_size, spec, folder):
    """Resumes from DDP's file, and from our file with the same state."""
    path = f"{folder}/lightning"
    theirs = _resume(rank, world_size, spec, path)
    trainer = make_trainer(spec, max_epochs=1)
    trainer.fit(tied_gpt(), ckpt_path=path)  # ends at once
    trainer.save_checkpoint("ours.ckpt")
    trainer.strategy.barrier()
    return theirs, _resume(rank, world_size, spec, "ours.ckpt")


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fit_from_weights_alone_is_lightnings_key_error_on_all_ranks(reference, stage):
    folder, _ = reference
    for texts in run_ranks(2, _refused, settings(stage), str(folder), has_group=False):
        for name, text in texts.items():
            assert "checkpoint contains only the model" in text, name


def _refused(rank, world_size, spec, folder):
    trainer = make_trainer(spec, max_epochs=1)
    trainer.fit(tied_gpt())
    trainer.save_checkpoint("weights.ckpt", weights_only=True)
    trainer.strategy.barrier()
    paths = {name: f"{folder}/{name}" for name in WEIGHTS_ONLY}
    texts = {}
    for name, path in {**paths, "save_weights_only": "weights.ckpt"}.items():
        with pytest.raises(KeyError) as caught:
            make_trainer(spec, max_epochs=2).fit(tied_gpt(), ckpt_path=path)
        texts[name] = str(caught.value)
    return texts


class StartingModule(GPTModule):
    """Starts from a checkpoint, in the given hook."""

    def __init__(self, path, hook, **kwargs):
        super().__init__(ranks=2, is_tied=True, **kwargs)
        self.path = path
        setattr(self, hook, lambda **_: lightning_zero.load_weights(self, path))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        pytest.param(1, "32-true", marks=pytest.mark.slow),
        (2, "bf16-mixed"),
        pytest.param(3, "32-true", marks=pytest.mark.slow),
        (3, "bf16-mixed"),
    ],
)
def test_a_hook_loads_weights_of_every_format_before_and_during_fit(reference, stage, precision):
    folder, _ = reference
    spec = settings(stage)
    for same in run_ranks(2, _start, spec, str(folder), precision, has_group=False):
        assert same == {(name, hook): True for name in FORMATS for hook in HOOKS}


HOOKS = ["setup", "on_fit_start", "on_train_start"]


def _start(rank, world_size, spec, folder, precision):
    """Whether the loaded values are unchanged after a step with learning rate 0."""
    expected = torch.load(f"{folder}/state dict", weights_only=True)
    same = {}
    for name in FORMATS:
        for hook in HOOKS:
            seed_everything(rank, verbose=False)
            module = StartingModule(f"{folder}/{name}", hook)
            make_trainer(spec, limit_train_batches=1, precision=precision).fit(module)
            state = module.state_dict()
            same[name, hook] = all(torch.equal(state[k], v) for k, v in expected.items())
    return same


class MomentsModule(GPTModule):
    """Starts from a checkpoint of DeepSpeed without a Trainer's entries."""

    def __init__(self, path):
        super().__init__(ranks=2, is_tied=True)
        self.path = path

    def setup(self, stage):
        lightning_zero.load_weights(self, self.path)

    def on_train_start(self):
        opened = lightning_zero.open_checkpoint(self.path)
        self.trainer.strategy.load_optimizer_state_dict(opened)
        self.trainer.save_checkpoint("started.ckpt")


def _start_with_moments(rank, world_size, spec, path):
    make_trainer(spec).fit(MomentsModule(path))
    return torch.load("started.ckpt", weights_only=True)


def test_weights_and_moments_of_deepspeed_start_a_new_training(reference):
    folder, _ = reference
    path = str(folder / "deepspeed 2")
    for started in run_ranks(2, _start_with_moments, settings(3), path, has_group=False):
        expected = torch.load(folder / "lightning", weights_only=True)
        for name, value in expected["state_dict"].items():
            assert torch.equal(started["state_dict"][name], value)
        (mine,), (theirs,) = started["optimizer_states"], expected["optimizer_states"]
        for number, entry in theirs["state"].items():
            for key, value in entry.items():
                assert torch.equal(mine["state"][number][key], value)


@pytest.mark.parametrize("name", FORMATS)
def test_load_from_checkpoint_reads_every_format_with_hyperparameters_as_arguments(reference, name):
    folder, _ = reference
    path = folder / name
    if name == "state dict":
        pytest.skip("a file without hyperparameters is left to Lightning, which refuses it")
    if name == "lightning":
        path = str(path)
    # safetensors store one name of tied weights; torch's strict loading requires both.
    strict = name not in ("safetensors", "index")
    module = lightning_zero.load_from_checkpoint(
        GPTModule, path, strict=strict, ranks=2, is_tied=True
    )
    expected = torch.load(folder / "state dict", weights_only=True)
    for key, value in module.state_dict().items():
        assert torch.equal(value, expected[key]), key
        assert type(value) is torch.Tensor


class SavedModule(Recorder):
    """Saves its hyperparameters."""

    def __init__(self, width=4):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 3)


class ExtraModule(Recorder):
    """Has an extra state that is not a tensor."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.extra = {"n": 0}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_load_from_checkpoint_moves_tensors_and_nothing_else(tmp_path):
    module = ExtraModule()
    module.extra = {"n": 3}
    checkpoint = {"state_dict": module.state_dict(), "pytorch-lightning_version": "2.6.1"}
    plan_export(checkpoint, "dcp").write(tmp_path / "a.ckpt", lambda nbytes: None)
    loaded = lightning_zero.load_from_checkpoint(
        ExtraModule, tmp_path / "a.ckpt", map_location="cpu"
    )
    assert loaded.extra == {"n": 3}
    assert torch.equal(loaded.layer.weight, module.layer.weight)


def test_load_from_checkpoint_finds_the_hyperparameters_in_a_directory(tmp_path):
    module = SavedModule(width=6)
    optimizer = torch.optim.AdamW(module.parameters())
    module.layer(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state = {"hyper_parameters": dict(module.hparams), "pytorch-lightning_version": "2.6.1"}
    write_deepspeed(tmp_path, module, optimizer, stage=3, world_size=2, client_state=state)
    loaded = lightning_zero.load_from_checkpoint(SavedModule, tmp_path)
    assert loaded.hparams.width == 6
    assert torch.equal(loaded.layer.weight, module.layer.weight)
    on_cpu = lightning_zero.load_from_checkpoint(SavedModule, tmp_path, map_location="cpu")
    assert torch.equal(on_cpu.layer.weight, module.layer.weight)


class OwnLoadingModule(SavedModule):
    """Has nested hyperparameters in checkpoints, which only its own loading understands."""

    num_calls = 0

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path, map_location=None, strict=True, **kwargs):
        OwnLoadingModule.num_calls += 1
        checkpoint = torch.load(checkpoint_path, map_location, weights_only=True)
        checkpoint["hyper_parameters"] = checkpoint["hyper_parameters"]["sizes"]
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        buffer.seek(0)
        return super().load_from_checkpoint(buffer, map_location, strict=strict, **kwargs)


class InheritedLoadingModule(OwnLoadingModule):
    pass


def test_load_from_checkpoint_calls_the_one_of_the_class_for_every_format(tmp_path):
    module = InheritedLoadingModule(width=6)
    optimizer = torch.optim.AdamW(module.parameters())
    module.layer(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    saved = {"hyper_parameters": {"sizes": {"width": 6}}, "pytorch-lightning_version": "2.6.1"}
    checkpoint = saved | {
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
    }
    for form in ("ckpt", "dcp"):
        plan_export(checkpoint, form).write(tmp_path / form, lambda nbytes: None)
    folder = tmp_path / "deepspeed"
    folder.mkdir()
    write_deepspeed(folder, module, optimizer, stage=3, world_size=2, client_state=saved)
    for form in ("ckpt", "dcp", "deepspeed"):
        for options in ({}, {"strict": False, "map_location": "cpu"}):
            OwnLoadingModule.num_calls = 0
            loaded = lightning_zero.load_from_checkpoint(
                InheritedLoadingModule, tmp_path / form, **options
            )
            assert OwnLoadingModule.num_calls == 1
            assert loaded.hparams.width == 6
            assert torch.equal(loaded.layer.weight, module.layer.weight), form


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_that_one_rank_cannot_open_is_an_error_on_every_rank(stage):
    with pytest.raises(RankError) as caught:
        ranks.run_ranks(2, _open_missing, settings(stage), has_group=False)
    text = str(caught.value)
    assert "FileNotFoundError: Checkpoint file not found" in text
    assert "rank 1 could not open one.ckpt: FileNotFoundError" in text


def _open_missing(rank, world_size, spec):
    trainer = make_trainer(spec)
    trainer.fit(MLPModule(ranks=2))
    trainer.save_checkpoint("one.ckpt")
    trainer.strategy.barrier()
    if rank == 1:
        # Simulates a node without the shared file system.
        import lightning_zero.checkpoint.source as checkpoints

        checkpoints.open_checkpoint = partial(_open_missing_path, checkpoints.open_checkpoint)
    make_trainer(spec).validate(MLPModule(ranks=2), ckpt_path="one.ckpt")


def _open_missing_path(open_checkpoint, path, **options):
    return open_checkpoint(f"missing/{path}", **options)
