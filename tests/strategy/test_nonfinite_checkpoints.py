"""Saving with NaN warns; steps are named after resuming and with a loss scaler."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision

from lightning_zero.cli import main
from tests.support.fitting import DEVICE, make_trainer, settings
from tests.support.models import GPTModule, MLPModule
from tests.support.warm import run_ranks


class SaveLast(Callback):
    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint("saved.ckpt")


class Poison(Callback):
    """NaN in a gradient of rank 1 from step 2 on."""

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step >= 2 and trainer.global_rank == 1:
            loss.register_hook(lambda grad: grad * float("nan"))


def _fit(rank, world_size, stage, checkpoint, policy):
    torch.manual_seed(0)
    module = MLPModule(ranks=world_size, num_batches=4)
    trainer = make_trainer(
        settings(stage, checkpoint=checkpoint, on_nonfinite=policy),
        callbacks=[Poison(), SaveLast()],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("stage", "checkpoint"), [(1, "full"), pytest.param(3, "sharded", marks=pytest.mark.slow)]
)
def test_a_checkpoint_with_nan_is_warned_of(stage, checkpoint):
    text = "saved.ckpt is saved with non-finite values in net.0.weight and 3 other parameters."
    for policy, is_warned in (("warn", True), ("skip", False), (None, False)):
        texts, others = run_ranks(2, _fit, stage, checkpoint, policy, has_group=False)
        assert any(text in warned for warned in texts) == is_warned
        assert not any("is saved with" in warned for warned in others)


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


def test_inspect_reports_a_non_finite_checkpoint(tmp_path, capsys):
    trainer = make_trainer(settings(1), devices=1, max_steps=1, default_root_dir=tmp_path)
    module = MLPModule(num_batches=1)
    trainer.fit(module)
    good, bad = str(tmp_path / "good.ckpt"), str(tmp_path / "bad.ckpt")
    trainer.save_checkpoint(good)
    saved = torch.load(good, weights_only=True)
    saved["lightning_zero"] = {"nonfinite_parameters": ["net.0.bias"]}
    torch.save(saved, bad)
    assert main(["inspect", bad]) == 0
    assert "saved with NaN or infinity in net.0.bias" in capsys.readouterr().out
    assert main(["inspect", bad, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nonfinite_parameters"] == ["net.0.bias"]
    assert main(["inspect", good]) == 0
    assert "NaN" not in capsys.readouterr().out


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
