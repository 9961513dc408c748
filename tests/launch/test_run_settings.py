"""Hyperparameters that loggers get of a run."""

import json
import os
import shutil
import subprocess
import sys

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_zero import ZeroStrategy
from lightning_zero.launch.trainer import RunSettings, num_parameters, strategy_settings
from tests.support.pages import ROOT


class Noted(CSVLogger):
    def __init__(self, folder):
        super().__init__(folder)
        self.logged = []

    def log_hyperparams(self, params):
        self.logged.append(dict(params))


@pytest.mark.parametrize("loop", ["fit", "validate", "test", "predict"])
def test_every_logger_gets_settings_strategy_and_size_once(tmp_path, loop):
    loggers = [Noted(tmp_path / "a"), Noted(tmp_path / "b")]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=1, limit_val_batches=1, limit_test_batches=1,
        limit_predict_batches=1, logger=loggers, enable_checkpointing=False,
        callbacks=[RunSettings({"seed": 3, "data": {"size": 1}})],
    )  # fmt: skip
    module = BoringModel()
    getattr(trainer, loop)(module)
    trainer.validate(module)
    size = {"total": 66, "trainable": 66, "non_trainable": 0}
    expected = {
        "seed": 3,
        "data": {"size": 1},
        **{f"model/params/{name}": numel for name, numel in size.items()},
        "strategy": {"name": "SingleDeviceStrategy"},
    }
    for logger in loggers:
        assert [logged for logged in logger.logged if "seed" in logged] == [expected]


def test_frozen_parameters_are_counted_separately():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False).requires_grad_(False))
    assert list(num_parameters(module).values()) == [28, 20, 8]


def test_settings_of_the_strategy_are_plain_values():
    strategy = ZeroStrategy(
        stage=3, offload_optimizer="cpu", unit_classes=[nn.Linear, "Block"], reduce_dtype="bf16"
    )
    logged = strategy_settings(strategy)
    assert json.loads(json.dumps(logged)) == logged
    assert (logged["name"], logged["stage"]) == ("ZeroStrategy", 3)
    assert logged["offload_optimizer"]["device"] == "cpu"
    assert logged["unit_classes"] == ["Linear", "Block"]
    assert logged["reduce_dtype"] == str(torch.bfloat16)


def test_no_logged_or_saved_file_and_no_command_has_a_secret_of_the_environment(tmp_path):
    shutil.copytree(ROOT / "examples" / "hydra_project", tmp_path / "project")
    with (tmp_path / "project" / "conf" / "config.yaml").open("a") as file:
        file.write("\nhub: ${oc.env:HUB_SECRET}\nurl: https://me:${hub}@host\n")
    watched = tmp_path / "project" / "project.py"
    arguments = f"{tmp_path}/arguments-{{os.getpid()}}"
    seen = f"import os, sys\nopen(f'{arguments}', 'w').write(' '.join(sys.orig_argv))\n"
    watched.write_text(watched.read_text() + seen)
    words = ["trainer=cpu", "trainer.devices=2", "trainer.max_steps=2", "logger=[csv,wandb]"]
    words += ["hydra.run.dir=run", "+token=${oc.env:HUB_SECRET}", "+decoded='${oc.decode:${hub}}'"]
    done = subprocess.run(
        [sys.executable, "train.py", *words, "trainer.limit_val_batches=1"],
        cwd=tmp_path / "project",
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "HUB_SECRET": "t0p-s3cret"}
        | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert not [path for path, content in files.items() if b"t0p-s3cret" in content]
    assert "t0p-s3cret" not in done.stdout + done.stderr
    assert len(list(tmp_path.glob("arguments-*"))) == 2  # the command lines of both ranks
    for pattern in ("run/csv/hparams.yaml", "run/wandb/offline-run-*/*.wandb", "arguments-*"):
        for path in [*tmp_path.glob(f"project/{pattern}"), *tmp_path.glob(pattern)]:
            assert b"${oc.env:HUB_SECRET}" in files[path]
    assert list(tmp_path.glob("project/run/**/*.ckpt"))
