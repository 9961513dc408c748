"""Hyperparameters that loggers get of a run."""

import json

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf
from torch import nn

from lightning_zero import ZeroStrategy
from lightning_zero.launch.hydra import masked
from lightning_zero.launch.trainer import RunSettings, num_parameters, strategy_settings


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


def test_secrets_are_masked_in_what_loggers_are_given(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "t0p-s3cret")
    monkeypatch.setenv("DATA_FOLDER", "/data")
    config = OmegaConf.create(
        {
            "logger": {"wandb": {"api_key": "abc123", "project": "p"}},
            "url": "https://user:${logger.wandb.api_key}@host",
            "hub": "${oc.env:MY_TOKEN}",
            "copies": ["${hub}", 3],
            "folder": "${oc.env:DATA_FOLDER}/x",
            "other": "/data",
            "num_tokens": 5,
            "tokenizer": "bytes",
            "password": None,
            "secret": {"name": "inner", "retries": 3},
        }
    )
    assert masked(config) == {
        "logger": {"wandb": {"api_key": "***", "project": "p"}},
        "url": "https://user:***@host",
        "hub": "***",
        "copies": ["***", 3],
        "folder": "***",
        "other": "/data",
        "num_tokens": 5,
        "tokenizer": "bytes",
        "password": None,
        "secret": {"name": "***", "retries": 3},
    }


def test_secrets_are_masked_behind_references_and_as_numbers(monkeypatch):
    monkeypatch.setenv("DATABASE", "db://me:pw@host")
    monkeypatch.setenv("NUMBER", "7")
    config = OmegaConf.create(
        {
            "url": "${oc.env:DATABASE}",
            "spaced": "${ oc.env : DATABASE}",
            "by_name": "${url}",
            "inside": "${url}/table",
            "block": {"urls": ["${url}", "literal"]},
            "again": "${block}",
            "decoded": "${oc.decode:${oc.env:NUMBER}}",
            "password": 12345,
            "apiKey": "abcdefgh",
            "text": "see abcdefgh",
            "sort_key": "loss",
            "monitor": "loss",
            "pad_token": 0,
            "is_secret": True,
        }
    )
    shown = masked(config)
    assert shown == {
        "url": "***",
        "spaced": "***",
        "by_name": "***",
        "inside": "***/table",
        "block": {"urls": ["***", "literal"]},
        "again": {"urls": ["***", "literal"]},
        "decoded": "***",
        "password": "***",
        "apiKey": "***",
        "text": "see ***",
        "sort_key": "***",
        "monitor": "loss",
        "pad_token": 0,
        "is_secret": True,
    }
