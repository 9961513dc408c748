"""Checkpoints of Fabric: of any stage, and to and from the Trainer and DDP."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from tests.fabric.test_fabric import Discriminator, Generator, launch
from tests.support.cells import slow_but
from tests.support.fitting import arrays, make_trainer, run_once
from tests.support.loops import LossModule, assert_same_state, batch, build
from tests.support.warm import run_ranks


def make(spec, world_size):
    """A launched Fabric with "ddp", or a stage and a kind of checkpoint."""
    from lightning_zero.fabric import ZeroStrategy

    strategy = spec if spec == "ddp" else ZeroStrategy(spec[0], checkpoint=spec[1])
    return launch(strategy, world_size)


def _steps(fabric, model, optimizer, rank, steps):
    losses = []
    for step in steps:
        loss = model(batch(rank, step))
        fabric.backward(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _save(rank, world_size, spec, path):
    fabric = make(spec, world_size)
    model, optimizer = fabric.setup(*build())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    _steps(fabric, model, optimizer, rank, range(2))
    scheduler.step()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 2}
    fabric.save(path, state)
    losses = _steps(fabric, model, optimizer, rank, range(2, 4))
    return losses, arrays(model.state_dict())


def _load(rank, world_size, spec, path):
    fabric = make(spec, world_size)
    module, optimizer = build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    model, optimizer = fabric.setup(module, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    fabric.load(path, state)
    assert state["step"] == 2
    assert scheduler.last_epoch == 1
    losses = _steps(fabric, model, optimizer, rank, range(2, 4))
    return losses, arrays(model.state_dict())


FULL, SHARDED = "full", "sharded"
PAIRS = [
    ((3, SHARDED), (1, FULL)),
    ((2, FULL), (3, FULL)),
    ((3, FULL), "ddp"),
    ("ddp", (3, FULL)),
    ((1, SHARDED), (3, SHARDED)),
]


@pytest.mark.default_cases("saved1-loaded1", "ddp-loaded3")
@pytest.mark.shows("Fabric: checkpoints of other stages and of DDP, and back")
@pytest.mark.parametrize(("saved", "loaded"), slow_but(PAIRS[:4], PAIRS))
def test_training_goes_on_in_another_stage_or_with_ddp(saved, loaded, tmp_path):
    path = str(tmp_path / "one.ckpt")
    expected = run_ranks(2, _save, saved, path, has_group=False)
    assert os.path.isdir(path) == (saved[1] == SHARDED)
    ours = run_ranks(2, _load, loaded, path, has_group=False)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-6)
        assert_same_state(one[1], other[1])


class OfTrainer(LightningModule):
    """The same model, in a Trainer."""

    def __init__(self, first_step):
        super().__init__()
        self.gpt = build()[0].gpt
        self.first_step = first_step
        self.losses = []

    def training_step(self, one, index):
        loss = LossModule.forward(self, batch(self.global_rank, self.first_step + index))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-5)

    def train_dataloader(self):
        return DataLoader(torch.zeros(2 * self.trainer.world_size, 1))


def _trainer(rank, world_size, kind, first_step, load, save):
    module = OfTrainer(first_step)
    trainer = make_trainer({"stage": 2, "checkpoint": kind}, devices=world_size)
    trainer.fit(module, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.losses, arrays(module.state_dict())


def _fabric(rank, world_size, kind, first_step, load, save):
    fabric = make((3, kind), world_size)
    model, optimizer = fabric.setup(*build())
    if load is not None:
        fabric.load(load, {"model": model, "optimizer": optimizer})
    losses = _steps(fabric, model, optimizer, rank, range(first_step, first_step + 2))
    if save is not None:
        fabric.save(save, {"model": model, "optimizer": optimizer})
    return losses, arrays(model.state_dict())


@pytest.mark.shows("Fabric: checkpoints of the Trainer, and back", stages=(3,))
@pytest.mark.default_cases("Trainer to Fabric-full", "Fabric to Trainer-sharded")
@pytest.mark.parametrize("kind", [FULL, SHARDED])
@pytest.mark.parametrize("order", ["Trainer to Fabric", "Fabric to Trainer"])
def test_checkpoints_go_from_the_trainer_to_fabric_and_back(order, kind, tmp_path):
    first, second = (_trainer, _fabric) if order == "Trainer to Fabric" else (_fabric, _trainer)
    path = str(tmp_path / "one.ckpt")
    run_ranks(2, first, kind, 0, None, path, has_group=False)
    ours = run_ranks(2, second, kind, 2, path, None, has_group=False)
    expected = run_once(2, _uninterrupted)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-6)
        assert_same_state(one[1], other[1])


def _uninterrupted(rank, world_size):
    fabric = make("ddp", world_size)
    model, optimizer = fabric.setup(*build())
    losses = _steps(fabric, model, optimizer, rank, range(4))
    return losses[2:], arrays(model.state_dict())


def _two_modules(rank, world_size, kind, path):
    from lightning_zero import open_checkpoint

    fabric = make((3, kind), world_size)

    def new(seed):
        torch.manual_seed(seed)
        modules = Generator(), Discriminator()
        pairs = [fabric.setup(m, torch.optim.Adam(m.parameters(), lr=0.1)) for m in modules]
        (g, optimizer_g), (d, optimizer_d) = pairs
        for model, optimizer, width in ((g, optimizer_g, 4), (d, optimizer_d, 8)):
            fabric.backward(model(torch.ones(3, width) * (rank + seed)).sum())
            optimizer.step()
            optimizer.zero_grad()
        return {"g": g, "d": d, "optimizer_g": optimizer_g, "optimizer_d": optimizer_d}

    first, second = new(1), new(2)
    fabric.save(path, {**first, "epoch": 7}, filter={"d": lambda name, value: "bias" not in name})
    with pytest.raises(ValueError, match=r"2 modules \(g, d\)"):
        open_checkpoint(path)
    before = arrays(second["d"].state_dict())
    remainder = fabric.load(path, second, strict=False)
    assert remainder == {"epoch": 7}
    ours, expected = arrays(second["g"].state_dict()), arrays(first["g"].state_dict())
    if rank == 0:  # each rank has statistics of BatchNorm of its own, and rank 0's are saved
        assert_same_state(ours, expected)
    for name, value in arrays(second["d"].state_dict()).items():
        source = before if "bias" in name else arrays(first["d"].state_dict())
        np.testing.assert_array_equal(value, source[name], err_msg=name)
    for key in ("optimizer_g", "optimizer_d"):
        ours, theirs = first[key].state_dict(), second[key].state_dict()
        if rank == 0:
            assert ours["state"].keys() == theirs["state"].keys()
            for number, entry in ours["state"].items():
                assert torch.equal(entry["exp_avg"], theirs["state"][number]["exp_avg"])
    with pytest.raises(KeyError, match="missing"):
        fabric.load(path, {"missing": 1})
    raw = path + ".pt"
    if rank == 0:
        torch.save(Discriminator().state_dict(), raw)
    fabric.barrier()
    fabric.load_raw(raw, second["d"])
    expected = torch.load(raw)
    assert_same_state(arrays(second["d"].state_dict()), arrays(expected))


@pytest.mark.default_cases("sharded")
@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_one_checkpoint_has_the_states_of_several_engines(kind, tmp_path):
    run_ranks(2, _two_modules, kind, str(tmp_path / "one.ckpt"), has_group=False)


def _other_states(rank, world_size, kind, path):
    fabric = make((3, kind), world_size)
    module, optimizer = build()
    model, optimizer = fabric.setup(module, optimizer)
    _steps(fabric, model, optimizer, rank, range(1))
    objects = [("model", model), ("optimizer", optimizer)]
    in_another_order = dict(objects[::-1] if rank else objects)
    fabric.save(path, in_another_order)
    before = arrays(model.state_dict())
    _steps(fabric, model, optimizer, rank, range(1, 2))
    fabric.load(path, in_another_order)
    assert_same_state(arrays(model.state_dict()), before)
    for call in (fabric.save, fabric.load):
        with pytest.raises(ValueError, match=r"rank 1: 'model' \(module of engine 0\)\n"):
            call(path, dict(objects[:1] if rank else objects))


@pytest.mark.default_cases("full")
@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_ranks_may_name_the_objects_of_a_checkpoint_in_another_order_but_not_others(kind, tmp_path):
    run_ranks(2, _other_states, kind, str(tmp_path / "one.ckpt"), has_group=False)


def _tensors(rank, world_size, kind, path):
    fabric = make((3, kind), world_size)
    model, optimizer = fabric.setup(*build())
    other = fabric.setup_module(torch.nn.Linear(3, 3))
    weight = model.module.gpt.blocks[0].up.weight
    some = [weight.data, other.module.weight]
    values = {"weight": weight, "some": some, "state": model.state_dict()}
    full = weight.data.full_tensor()
    fabric.save(path, {"model": model, **values})
    for loaded in (fabric.load(path), values):
        assert torch.equal(loaded["weight"].detach() + 0, full)
    fabric.save(path + "2", {"values": values})
    for saved in (path, path + "2"):
        loaded = fabric.load(saved)
        loaded = loaded.get("values", loaded)
        assert torch.equal(loaded["some"][0], full)
        assert torch.equal(loaded["some"][1], other.state_dict()["weight"])
        assert torch.equal(loaded["state"]["gpt.blocks.0.up.weight"], full)
    for one in (model, optimizer):
        with pytest.raises(ValueError, match="was set up inside of 'all'"):
            fabric.save(path, {"all": [one]})
    with pytest.raises((ValueError, RuntimeError), match="was set up inside of 'one'"):
        fabric.save(path, {"model": model, "one": [model] if rank else [1]})


@pytest.mark.default_cases("full")
@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_values_in_a_checkpoint_may_have_sharded_tensors(kind, tmp_path):
    run_ranks(2, _tensors, kind, str(tmp_path / "one.ckpt"), has_group=False)
