"""Spellings of a checkpoint's path."""

from pathlib import Path

import pytest
import torch

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.checkpoint.source import find_damage
from lightning_zero.checkpoint.storage import local_path


def test_every_spelling_of_a_path_is_the_same_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    torch.save({"x": torch.ones(2)}, tmp_path / "a.ckpt")
    names = ["a.ckpt", "~/a.ckpt", f"file://{tmp_path}/a.ckpt", tmp_path / "a.ckpt", Path("a.ckpt")]
    for name in names:
        assert local_path(name) == tmp_path / "a.ckpt"
        assert open_checkpoint(name)["state_dict"]["x"].tolist() == [1, 1]
        assert find_damage(name) == []


def test_a_url_of_another_file_system_is_an_error():
    with pytest.raises(ValueError, match="expected a path on a local or mounted"):
        local_path("s3://bucket/a.ckpt")
