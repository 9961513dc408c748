"""Checkpoints written by earlier versions load: names that are stored in files do not change.

`old_checkpoints.txt` is a tar.xz archive in base64, written at commit fd221e3 (lightning-zero
0.1.0.dev0, torch 2.13.0): `full.ckpt` and the sharded checkpoint `sharded`, saved by two ranks in
stage 3 with precision "bf16-true" at the end of the first epoch of `LinearModule`.

`old_empty_checkpoint.txt` is such an archive of commit 120b1bb5: the sharded checkpoint `empty` of
`EmptyModule`. Every rank wrote the empty parameter, and the metadata has only one copy of it.
"""

import base64
import io
import json
import shutil
import tarfile
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.checkpoint.dcp_metadata import read_metadata
from lightning_zero.checkpoint.source import find_damage
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.strategy.settings import AutoChoice
from lightning_zero.tensors.composite import flatten_composites, unflatten_composites
from tests.support.fitting import make_trainer, settings
from tests.support.models import MLPModule
from tests.support.warm import run_ranks

ARCHIVES = ("old_checkpoints.txt", "old_empty_checkpoint.txt")


class LinearModule(MLPModule):
    """One linear layer, trained by SGD with momentum."""

    def __init__(self, **options):
        super().__init__(optimizer="sgd", **options)
        self.net = nn.Linear(8, 3)


class EmptyModule(LinearModule):
    """Has a parameter without elements and one without dimensions, too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.empty, self.number = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return super().forward(x) * self.number + self.empty.sum()


class SavingCallback(Callback):
    """Saves at the end of the first epoch."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    for name in ARCHIVES:
        data = io.BytesIO(base64.b64decode(Path(__file__).with_name(name).read_text()))
        with tarfile.open(fileobj=data, mode="r:xz") as archive:
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(folder, **safely)
    return folder


def _train(rank, world_size, folder, kind, num_epochs=2, old_path=None, factory=LinearModule):
    """Trains `num_epochs` epochs in stage 3, and saves after the first and the last one."""
    seed_everything(7, verbose=False)
    module = factory(ranks=2)
    trainer = make_trainer(
        settings(3, checkpoint=kind),
        callbacks=[SavingCallback(f"{folder}/{kind}")],
        precision="bf16-true",
        max_epochs=num_epochs,
    )
    trainer.fit(module, ckpt_path=old_path)
    trainer.save_checkpoint(f"{folder}/end-{kind}")
    assert trainer.global_step == 4 * num_epochs


def _values(path):
    """Weights, masters and momentum of a checkpoint: tensors by name."""
    checkpoint = open_checkpoint(path)
    assert find_damage(path) == []
    (optimizer,) = checkpoint["optimizer_states"]
    entries = optimizer["state"].values()  # by name or number, in the same order
    momentum = {f"momentum {n}": e["momentum_buffer"] for n, e in enumerate(entries)}
    masters = {f"master {n}": m for n, m in checkpoint["lightning_zero_masters"].items()}
    values = {**checkpoint["state_dict"], **masters, **momentum}
    return {name: value.clone().float() for name, value in values.items()}


def test_an_old_full_and_an_old_sharded_checkpoint_hold_the_same_values(old):
    full, sharded = _values(old / "full.ckpt"), _values(old / "sharded")
    assert len(full) == 6
    assert full.keys() == sharded.keys()
    for name, value in full.items():
        assert torch.equal(value, sharded[name]), name


@pytest.mark.parametrize("name", ["full.ckpt", "sharded"])
def test_training_resumes_from_an_old_checkpoint(name, old, tmp_path):
    kind = name.partition(".")[0]
    train = partial(run_ranks, 1, _train, has_group=False)
    train(str(tmp_path / "resumed"), kind, 2, str(old / name))
    train(str(tmp_path / "uninterrupted"), kind)
    resumed = _values(tmp_path / "resumed" / f"end-{kind}")
    reference = _values(tmp_path / "uninterrupted" / f"end-{kind}")
    assert resumed.keys() == reference.keys()
    for key, value in reference.items():  # one rank sums gradients in another order
        torch.testing.assert_close(resumed[key], value, rtol=2e-2, atol=2e-2, msg=key)


def test_training_resumes_from_an_old_checkpoint_with_an_empty_parameter(old, tmp_path):
    assert list(_values(old / "empty")) != []
    train = partial(run_ranks, 2, _train, has_group=False)
    train(str(tmp_path / "resumed"), "sharded", 2, str(old / "empty"), EmptyModule)
    train(str(tmp_path / "uninterrupted"), "sharded", 2, None, EmptyModule)
    resumed = _values(tmp_path / "resumed" / "end-sharded")
    reference = _values(tmp_path / "uninterrupted" / "end-sharded")
    assert resumed.keys() == reference.keys()
    assert {tuple(value.shape) for value in reference.values()} == {(3, 8), (3,), (0, 3), ()}
    for key, value in reference.items():
        assert torch.equal(resumed[key], value), key


def test_a_damaged_item_of_an_old_checkpoint_with_an_empty_parameter_is_found(old, tmp_path):
    items = read_metadata(old / "empty").storage_data
    for name in ("__0_0.distcp", "__1_0.distcp"):
        item = next(i for i in items.values() if i.relative_path == name)
        copy = shutil.copytree(old / "empty", tmp_path / name)
        data = bytearray((copy / name).read_bytes())
        data[data.index(b"torch._utils", item.offset)] ^= 1
        (copy / name).write_bytes(data)
        assert any(name in line for line in find_damage(copy))


def test_what_is_written_has_the_names_of_old_checkpoints(old, tmp_path):
    run_ranks(2, _train, str(tmp_path), "sharded", 1, has_group=False)
    before, now = old / "sharded", tmp_path / "sharded"
    assert sorted(path.name for path in now.iterdir()) == sorted(
        path.name for path in before.iterdir()
    )
    one, other = read_metadata(before), read_metadata(now)
    new = "lightning_zero_rank_states"  # old readers ignore it
    assert [*one.planner_data, new] == list(other.planner_data)
    assert {new} | {i.fqn for i in one.storage_data} == {i.fqn for i in other.storage_data}
    records = [json.loads((path / "save.json").read_text()) for path in (before, now)]
    assert records[0].keys() == records[1].keys()
    assert records[0]["ends_sha256"].keys() == records[1]["ends_sha256"].keys()
    assert records[0]["sha256"].keys() == records[1]["sha256"].keys()
    for rank in range(2):
        start = f"\nlightning_zero: save {records[1]['save']}, file __{rank}_0.distcp\n"
        assert (now / f"__{rank}_0.distcp").read_bytes().endswith(start.encode())
    assert open_checkpoint(before).keys() | {new} == open_checkpoint(now).keys()
    notes = [open_checkpoint(path)["lightning_zero"] for path in (before, now)]
    assert notes[0].keys() == {"version", "stage", "world_size"}
    assert notes[1].keys() == notes[0].keys() | {"rank_state_bytes"}


def test_names_that_only_some_checkpoints_hold_are_unchanged():
    assert set(AutoChoice.as_hyperparameters(AutoChoice(ZeroConfig(stage=2), "why"))) == {
        "zero_stage",
        "zero_offload_optimizer",
        "zero_offload_param",
    }
    # A quantized state, as optimizers of torchao have it.
    value = torch.arange(3.0)
    flat = flatten_composites(TwoTensor(value, value + 1))
    assert flat.keys() == {"a", "b", "__tensor__"}
    assert type(unflatten_composites(flat)) is TwoTensor
