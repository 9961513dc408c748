"""Hyperparameters that loggers get of a run."""

import json
import shutil

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


BEGIN = """import os, sys
import hydra
os.environ |= {"HUB_SECRET": "t0p-" "s3cret", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
with open(f"arguments-{os.getpid()}", "w") as file:
    file.write(" ".join(sys.argv))
"""


@pytest.mark.default_cases("csv")
@pytest.mark.parametrize("loggers", ["csv", "csv,wandb"])
def test_no_logged_or_saved_file_and_no_command_has_a_secret_of_the_environment(
    fault_server, tmp_path, loggers
):
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "examples" / "hydra_project", folder)
    with (folder / "conf" / "config.yaml").open("a") as file:
        file.write("\nhub: ${oc.env:HUB_SECRET}\nurl: https://me:${hub}@host\n")
    source = (folder / "train.py").read_text()
    (folder / "train.py").write_text(source.replace("import hydra\n", BEGIN, 1))
    words = ["trainer=cpu", "trainer.devices=2", "trainer.max_steps=2", f"logger=[{loggers}]"]
    words += ["hydra.run.dir=run", "+token=${oc.env:HUB_SECRET}", "+decoded='${oc.decode:${hub}}'"]
    command = [folder / "train.py", *words, "trainer.limit_val_batches=1"]
    status, printed = fault_server.run_script(command, folder, num_started=1)
    assert status == 0, printed
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert not [path for path, content in files.items() if b"t0p-s3cret" in content]
    assert len(list(folder.glob("arguments-*"))) == 2  # of both ranks
    patterns = ["run/csv/hparams.yaml", "arguments-*"]
    patterns += ["run/wandb/offline-run-*/*.wandb"] * ("wandb" in loggers)
    for pattern in patterns:
        found = list(folder.glob(pattern))
        assert found, pattern
        assert all(b"${oc.env:HUB_SECRET}" in files[path] for path in found)
    assert list(folder.glob("run/**/*.ckpt"))
