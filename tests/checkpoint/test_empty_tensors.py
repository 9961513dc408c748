"""Parameters, buffers and states without elements or dimensions are in every form of checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, seed_everything
from safetensors.torch import load_file
from torch import nn

from lightning_zero import open_checkpoint
from lightning_zero.checkpoint.source import find_damage
from lightning_zero.cli import main
from tests.support.fitting import make_trainer, settings
from tests.support.models import Recorder
from tests.support.warm import run_ranks


class EmptyModule(Recorder):
    """A layer, with parameters and buffers that have no elements, no dimensions or one element."""

    def __init__(self, **options):
        super().__init__(**options)
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.layer = nn.Linear(8, 3)
        self.number = nn.Parameter(torch.tensor(1.5))
        self.flat = nn.Parameter(torch.ones(0))
        self.single = nn.Parameter(torch.ones(1, 1))
        self.inner = nn.Parameter(torch.ones(4, 0, 2))
        self.frozen = nn.Parameter(torch.ones(3, 0), requires_grad=False)
        self.register_buffer("empty_buffer", torch.ones(2, 0))
        self.register_buffer("count", torch.tensor(7))

    def part_loss(self, part, rank):
        x, y = part
        nothing = self.empty.sum() + self.flat.sum() + self.inner.sum()
        return F.mse_loss(self.layer(x) * self.number + self.single + nothing, y)


class _Saving(Callback):
    """Saves in the middle of a fit, and at its end."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer.save_checkpoint(f"{self.path}-middle")

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(str(self.path))


def _train(rank, world_size, spec, path, source=None, num_epochs=1, options=None):
    seed_everything(7 if source is None else 50, verbose=False)
    module = EmptyModule(ranks=6, optimizer="adamw")
    trainer = make_trainer(spec, callbacks=[_Saving(path)], max_epochs=num_epochs, **options or {})
    trainer.fit(module, ckpt_path=source)


def _leaves(tree, name=""):
    """Tensors of a checkpoint's weights and states, by path."""
    if isinstance(tree, dict):
        return {
            k: v for key, each in tree.items() for k, v in _leaves(each, f"{name}/{key}").items()
        }
    if isinstance(tree, (list, tuple)):
        return _leaves(dict(enumerate(tree)), name)
    return {name: tree.clone()} if isinstance(tree, torch.Tensor) else {}


def _weights(path):
    checkpoint = open_checkpoint(path)
    assert find_damage(path) == []
    states = [list(state["state"].values()) for state in checkpoint["optimizer_states"]]
    leaves = _leaves({"weights": checkpoint["state_dict"], "states": states})
    assert {tuple(v.shape) for v in leaves.values()} >= {(0, 3), (), (0,), (1, 1), (4, 0, 2)}
    return leaves


# Format, stage and number of ranks of the save that the next line resumes.
CHAIN = [
    ("sharded", 1, 2, {}),
    ("sharded", 3, 3, {"async_save": True}),
    ("full", 3, 2, {}),
    ("sharded", 2, 1, {}),
    ("sharded", 0, 2, {"async_save": True}),
    ("sharded", 3, 2, {}),
    ("full", 1, 2, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("length", [4, len(CHAIN)])
def test_runs_resume_from_every_form_with_other_stages_and_world_sizes(tmp_path, precision, length):
    options, source = {"precision": precision}, None
    for epoch, (form, stage, world_size, more) in enumerate(CHAIN[:length], 1):
        path = tmp_path / str(epoch)
        spec = settings(stage, checkpoint=form, **more)
        arguments = (spec, path, source, epoch, options)
        run_ranks(world_size, _train, *arguments, has_group=False)
        _weights(f"{path}-middle")
        source = str(path)
    ours = _weights(source)
    # Optimizers of a bfloat16 module step float32 parameters here, but not in one process.
    spec = "auto" if precision == "32-true" else settings(1)
    run_ranks(1, _train, spec, tmp_path / "reference", None, epoch, options, has_group=False)
    reference = _weights(str(tmp_path / "reference"))
    assert ours.keys() == reference.keys()
    tolerance = 1e-6 if precision == "32-true" else 2e-2
    for name, value in reference.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_an_item_of_another_save_is_found_in_every_file(tmp_path):
    path = tmp_path / "a"
    run_ranks(2, _train, settings(3, checkpoint="sharded"), path, has_group=False)
    record = json.loads((path / "save.json").read_text())
    for name, digest in record["ends_sha256"].items():
        changed = {**record, "ends_sha256": {**record["ends_sha256"], name: digest[::-1]}}
        (path / "save.json").write_text(json.dumps(changed))
        assert f"{name} has items that differ from save.json" in find_damage(path)


@pytest.mark.default_cases("sharded")
@pytest.mark.parametrize("form", ["sharded", "full"])
def test_every_export_of_every_form_has_the_values(tmp_path, form):
    spec, path = settings(1, checkpoint=form), tmp_path / form
    run_ranks(2, _train, spec, path, has_group=False)
    expected = _weights(str(path))
    for out, kind in (("e.ckpt", "ckpt"), ("e-dcp", "dcp"), ("e.safetensors", "safetensors")):
        target = str(tmp_path / f"{form}-{out}")
        assert main(["export", str(path), target, "--format", kind]) == 0
        if kind != "safetensors":
            exported = _weights(target)
        else:
            assert find_damage(target) == []
            exported = {f"/weights/{name}": v for name, v in load_file(target).items()}
        assert exported.keys() == {n for n in expected if kind != "safetensors" or "/w" in n}
        assert all(torch.equal(value, expected[name]) for name, value in exported.items())
