"""A checkpoint with NaN is marked, and does not replace the last one without."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO

from lightning_zero import open_checkpoint
from lightning_zero.cli import main
from tests.support.fitting import DEVICE, make_trainer, settings
from tests.support.models import GPTModule, MLPModule
from tests.support.ranks import run_ranks


class Poison(Callback):
    """NaN in a gradient of rank 1 from step 2 on."""

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step >= 2 and trainer.global_rank == 1:
            loss.register_hook(lambda grad: grad * float("nan"))


def _fit(rank, world_size, stage, checkpoint, saver, policy):
    torch.manual_seed(0)
    module = MLPModule(ranks=world_size, num_batches=4)
    trainer = make_trainer(
        settings(stage, checkpoint=checkpoint, on_nonfinite=policy),
        callbacks=[Poison(), ModelCheckpoint("saved", every_n_train_steps=1, **saver)],
        enable_checkpointing=True,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    texts = [str(one.message) for one in caught]
    if rank:
        return None
    paths = sorted(path.name for path in Path("saved").iterdir())
    marks = {}
    for name in paths:
        opened = open_checkpoint(Path("saved") / name)
        is_finite = all(bool(v.isfinite().all()) for v in opened["state_dict"].values())
        note = opened.get("lightning_zero", {})
        marks[name] = note.get("nonfinite_parameters", []), is_finite
    return marks, texts


@pytest.mark.parametrize(
    ("stage", "checkpoint"), [(1, "full"), pytest.param(3, "sharded", marks=pytest.mark.slow)]
)
def test_the_last_finite_checkpoint_is_kept(stage, checkpoint):
    marks, texts = run_ranks(2, _fit, stage, checkpoint, {}, "warn", has_group=False)[0]
    (finite, (no_names, is_finite)), (last, (names, is_last_finite)) = marks.items()
    assert "step=2" in finite
    assert (no_names, is_finite) == ([], True)
    assert "step=4" in last
    assert not is_last_finite
    assert "net.0.weight" in names
    assert any("is kept: it is the last checkpoint that was saved from finite" in t for t in texts)


def test_an_overwritten_checkpoint_is_moved_aside():
    saver = {"save_top_k": 0, "save_last": True}
    saver = {"filename": "only", "enable_version_counter": False}
    marks, _ = run_ranks(2, _fit, 2, "full", saver, "warn", has_group=False)[0]
    assert {name: is_finite for name, (_, is_finite) in marks.items()} == {
        "only-finite.ckpt": True,
        "only.ckpt": False,
    }


class SetParameters(Callback):
    """Sets all parameters to one of `values` after each step."""

    def __init__(self, values):
        self.values = values

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.fill_(self.values[batch_idx])


class SaveEachStep(Callback):
    """Saves to one path; on rank 1 its name is another one, as with a metric of this rank."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        rank = trainer.global_rank
        trainer.save_checkpoint(f"saved/rank{rank}-{batch_idx}.ckpt" if rank else "saved/only.ckpt")


def _save_each_step(rank, world_size, values, checkpoint, ckpt_path=None, plugins=()):
    torch.manual_seed(0)
    module = MLPModule(ranks=world_size, num_batches=len(values))
    trainer = make_trainer(
        settings(2, checkpoint=checkpoint),
        callbacks=[SetParameters(values), SaveEachStep()],
        max_epochs=2 if ckpt_path else 1,
        plugins=[make() for make in plugins],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, ckpt_path=ckpt_path)
    texts = [str(one.message) for one in caught if "finite" in str(one.message)]
    biases = {
        path.name: float(open_checkpoint(path)["state_dict"]["net.0.bias"][0])
        for path in Path("saved").glob("*.ckpt")
    }
    return biases, texts


NAN = float("nan")


@pytest.mark.parametrize("checkpoint", ["sharded", pytest.param("full", marks=pytest.mark.slow)])
def test_a_checkpoint_is_moved_aside_again_over_an_older_one(checkpoint):
    values = [1.0, NAN, 2.0, NAN]
    biases, texts = run_ranks(2, _save_each_step, values, checkpoint, has_group=False)[0]
    assert biases.pop("only-finite.ckpt") == 2.0
    assert [str(bias) for bias in biases.values()] == ["nan"]
    assert any("only-finite.ckpt is the last finite checkpoint" in text for text in texts)


def _resume(rank, world_size):
    _save_each_step(rank, world_size, [1.0], "full")
    return _save_each_step(rank, world_size, [NAN], "full", ckpt_path="saved/only.ckpt")


def test_the_checkpoint_that_a_run_resumed_from_is_moved_aside():
    biases, _ = run_ranks(2, _resume, has_group=False)[0]
    assert biases["only-finite.ckpt"] == 1.0


def _resume_marked(rank, world_size):
    _save_each_step(rank, world_size, [NAN], "full")
    return _save_each_step(rank, world_size, [NAN], "full", ckpt_path="saved/only.ckpt")


def test_a_marked_checkpoint_that_is_loaded_is_named():
    biases, texts = run_ranks(2, _resume_marked, has_group=False)[0]
    assert list(biases) == ["only.ckpt"]
    assert any("only.ckpt was saved with non-finite values in net.0.weight" in t for t in texts)


def _report_after_resuming(rank, world_size):
    module = MLPModule(ranks=world_size, num_batches=4)
    trainer = make_trainer(settings(2), max_steps=2)
    trainer.fit(module)
    trainer.save_checkpoint("step-2.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(settings(2), max_epochs=2, max_steps=3, callbacks=[Poison()])
        trainer.fit(MLPModule(ranks=world_size, num_batches=4), ckpt_path="step-2.ckpt")
    return [str(one.message) for one in caught if "non-finite" in str(one.message)]


def test_a_report_after_resuming_has_the_step_of_the_trainer():
    texts, _ = run_ranks(2, _report_after_resuming, has_group=False)
    assert texts[0].startswith("non-finite gradients in step 2, before")


class OwnIO(TorchCheckpointIO):
    """A plugin of the user."""


def test_a_checkpoint_of_another_plugin_is_not_called_kept():
    call = (2, _save_each_step, [1.0, NAN, NAN], "full", None, [OwnIO])
    biases, texts = run_ranks(*call, has_group=False)[0]
    assert list(biases) == ["only.ckpt"]
    assert any("It replaces the last finite checkpoint" in text for text in texts)
    assert not any("is the last finite checkpoint" in text for text in texts)


@pytest.mark.slow
def test_skipped_steps_leave_every_checkpoint_finite():
    marks, _ = run_ranks(2, _fit, 2, "full", {}, "skip", has_group=False)[0]
    assert all(is_finite and not names for names, is_finite in marks.values())


def test_inspect_and_audit_report_a_non_finite_checkpoint(tmp_path, capsys):
    trainer = make_trainer(settings(1), devices=1, max_steps=1, default_root_dir=tmp_path)
    module = partial(MLPModule, num_batches=1)()
    trainer.fit(module)
    good, bad = str(tmp_path / "good.ckpt"), str(tmp_path / "bad.ckpt")
    trainer.save_checkpoint(good)
    saved = torch.load(good, weights_only=True)
    saved["state_dict"]["net.0.bias"][2] = float("inf")
    saved["optimizer_states"][0]["state"][1]["step"] += 1
    saved["lightning_zero"] = {"nonfinite_parameters": ["net.0.bias"]}
    torch.save(saved, bad)
    assert main(["audit", good]) == 0
    assert "are finite and consistent" in capsys.readouterr().out
    assert main(["audit", bad]) == 1
    out = capsys.readouterr().out
    assert "state_dict/net.0.bias: 0 NaN and 1 infinite of 13 elements" in out
    assert "optimizer 0: parameters have different step counts: 1, 2" in out
    assert main(["inspect", bad]) == 0
    assert "saved with NaN or infinity in net.0.bias" in capsys.readouterr().out
    assert main(["inspect", bad, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nonfinite_parameters"] == ["net.0.bias"]
    assert main(["inspect", good]) == 0
    assert "NaN" not in capsys.readouterr().out


def test_audit_reports_a_parameter_that_is_not_its_main_parameter_rounded(tmp_path, capsys):
    options = {"devices": 1, "precision": "bf16-true", "max_steps": 1}
    trainer = make_trainer(settings(1), default_root_dir=tmp_path, **options)
    trainer.fit(MLPModule(num_batches=1))
    path = str(tmp_path / "a.ckpt")
    trainer.save_checkpoint(path)
    assert main(["audit", path]) == 0
    saved = torch.load(path, weights_only=True)
    saved["state_dict"]["net.0.bias"][2] += 1
    torch.save(saved, path)
    assert main(["audit", path]) == 1
    assert "net.0.bias: 1 elements differ from the main parameter" in capsys.readouterr().out


class Overflow(GPTModule):
    """A gradient of float16 overflows in step 1."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 1e30 if self.global_step == 1 else loss


def _scaled(rank, world_size, policy):
    torch.manual_seed(0)
    module = Overflow(ranks=world_size, num_batches=4)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    trainer = make_trainer(
        settings(2, on_nonfinite=policy),
        plugins=[MixedPrecision("16-mixed", DEVICE.type, scaler=scaler)],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    return [str(one.message) for one in caught if "non-finite" in str(one.message)]


def test_the_loss_scaler_decides_and_its_skips_are_named():
    texts, others = run_ranks(2, _scaled, "stop", has_group=False)
    assert texts
    assert not others
    assert any("in step 1, before" in text for text in texts)
    assert all("The loss scaler decides: it skips the step" in text for text in texts)
