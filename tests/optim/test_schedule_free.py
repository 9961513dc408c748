"""Optimizers of the package schedulefree, which swap what the parameters are by `train` and `eval`,
and other optimizers with methods or closures of their own, against DDP.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero import Engine, OffloadConfig, ZeroConfig
from lightning_zero.optim.probe import probe
from tests.support.cells import SHARDED_STAGE, slow_but
from tests.support.fitting import assert_same, fit_ranks, fit_reference, settings
from tests.support.models import Recorder
from tests.support.ranks import RankError
from tests.support.warm import run_ranks

schedulefree = pytest.importorskip("schedulefree", reason="needs the package schedulefree")

CASES = slow_but(
    {("AdamW", 1), ("SGD", 3)},
    [(name, stage) for name in ("AdamW", "SGD", "RAdam") for stage in (1, 2, 3)],
)


class ScheduleFreeModule(Recorder):
    """Calls `train` and `eval` of its optimizer like the examples of the package."""

    def __init__(self, name, mode="eval", path=None, **options):
        super().__init__(ranks=2, **options)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.name, self.mode, self.path = name, mode, path

    def part_loss(self, part, rank):
        return nn.functional.mse_loss(self.net(part[0]), part[1])

    def configure_optimizers(self):
        kind = getattr(schedulefree, f"{self.name}ScheduleFree")
        return kind(self.parameters(), lr=0.05, weight_decay=0.1)

    def val_dataloader(self):
        return DataLoader(self.dataset(8), batch_size=4)

    def set_mode(self, mode):
        getattr(self.optimizers(), mode)()

    def on_train_epoch_start(self):
        self.set_mode("train")

    def on_validation_epoch_start(self):
        self.set_mode("eval")

    def on_validation_epoch_end(self):
        self.set_mode("train")

    def on_train_end(self):
        self.set_mode(self.mode)
        if self.path is not None:
            self.trainer.save_checkpoint(self.path)


OPTIONS = {
    "max_epochs": 3,
    "limit_val_batches": 2,
    "val_check_interval": 2,
    "gradient_clip_val": 1.0,
    "accumulate_grad_batches": 2,
}


@pytest.mark.default_cases("SGD-3")
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_a_schedule_free_optimizer_trains_as_under_ddp(name, stage):
    factory = partial(ScheduleFreeModule, name, num_batches=6)
    ours = fit_ranks(2, settings(stage), factory, OPTIONS)
    reference = fit_reference(2, factory, OPTIONS)
    assert_same(ours, reference, rtol=1e-6, atol=1e-6)
    assert ours[0].metrics["val_loss"] == pytest.approx(reference[0].metrics["val_loss"], rel=1e-6)


def test_one_that_evaluates_its_closure_between_changes_is_refused():
    optimizer = schedulefree.SGDScheduleFreeClosure(nn.Linear(5, 3).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"SGDScheduleFreeClosure cannot .* needs a closure"):
        probe(optimizer, torch.device("cpu"))


@pytest.mark.parametrize("stage", slow_but({2}, (1, 2, 3)))
def test_a_schedule_free_optimizer_swaps_masters_of_mixed_precision(stage):
    factory = partial(ScheduleFreeModule, "AdamW", num_batches=4)
    options = {"max_epochs": 2, "limit_val_batches": 2, "precision": "bf16-mixed"}
    ours = fit_ranks(2, settings(stage), factory, options)
    assert_same(ours, fit_reference(2, factory, options))


def _two_fits(folder, first, second, mode):
    """Trains one epoch, saves in `mode`, and resumes: (world size, strategy) of each."""
    path = str(folder / "one.ckpt")
    ranks, spec = first
    factory = partial(ScheduleFreeModule, "AdamW", mode=mode, path=path)
    fit_ranks(ranks, spec, factory, {"max_epochs": 1})
    ranks, spec = second
    factory = partial(ScheduleFreeModule, "AdamW")
    return fit_ranks(ranks, spec, factory, {"max_epochs": 2}, ckpt_path=path)


RESUMED = [
    ((2, settings(3)), (1, settings(1)), "eval"),
    ((1, settings(1)), (2, settings(3, checkpoint="sharded")), "train"),
    pytest.param((2, settings(2)), (2, "ddp"), "eval", marks=pytest.mark.slow),
    pytest.param((2, "ddp"), (2, settings(2)), "train", marks=pytest.mark.slow),
    pytest.param(
        (2, settings(3, checkpoint="sharded")), (2, settings(1)), "train", marks=pytest.mark.slow
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "mode"), RESUMED)
def test_a_schedule_free_run_is_resumed_from_either_mode(tmp_path, first, second, mode):
    ours = _two_fits(tmp_path / "ours", first, second, mode)
    alone = _two_fits(tmp_path / "alone", (1, "auto"), (1, "auto"), mode)
    mean = np.mean([outcome.losses for outcome in ours], axis=0)
    np.testing.assert_allclose(mean, alone[0].losses, rtol=1e-5)
    for name, value in alone[0].state.items():
        np.testing.assert_allclose(ours[0].state[name], value, rtol=1e-5, atol=1e-6)


class Methods(torch.optim.SGD):
    """SGD with further methods; `train` and `eval` are those of schedule-free optimizers."""

    @torch.no_grad()
    def eval(self, factor):
        """Elementwise; counts its calls; returns the number of parameters."""
        for group in self.param_groups:
            group["num_calls"] = group.get("num_calls", 0) + 1
            for p in group["params"]:
                p.data = p.data * factor
                self.state[p]["momentum_buffer"].mul_(factor)
        return sum(len(group["params"]) for group in self.param_groups)

    def train(self, rank):
        """Fails."""
        raise KeyError("of this rank")

    @torch.no_grad()
    def normalize(self):
        """Uses full tensors and gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                p.div_(1 + p.norm() + p.grad.norm())
                self.state[p]["momentum_buffer"].div_(2)


def _train_with_methods(engine_of, rank):
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    optimizer = Methods(net.parameters(), lr=0.1, momentum=0.9)
    engine = engine_of(net, optimizer)
    x = torch.arange(20.0).view(4, 5) / 20
    for _ in range(3):
        loss = net(x if rank is None else x[2 * rank : 2 * rank + 2]).square().mean()
        loss.backward() if engine is None else engine.backward(loss)
        optimizer.step()
        optimizer.normalize()
        optimizer.zero_grad()
        assert optimizer.eval(factor=0.5) == 2
    assert optimizer.param_groups[0]["num_calls"] == 3
    return net, optimizer, engine


def _methods(rank, world_size, stage, options):
    net, optimizer, engine = _train_with_methods(
        lambda net, optimizer: Engine(net, [optimizer], ZeroConfig(stage=stage, **options)), rank
    )
    with pytest.raises(KeyError, match="of this rank"):
        optimizer.train(1)
    optimizer.eval(1.0)
    engine.close()
    assert "eval" not in vars(optimizer)
    return [parameter.detach() for parameter in net.parameters()]


TIERS = [
    (1, {}),
    (3, {"offload_optimizer": OffloadConfig(device="nvme", nvme_path=".")}),
    pytest.param(2, {"offload_optimizer": OffloadConfig("cpu")}, marks=pytest.mark.slow),
    pytest.param(3, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("stage", "options"), TIERS)
def test_methods_of_an_optimizer_act_on_full_parameters(stage, options):
    alone, _, _ = _train_with_methods(lambda net, optimizer: None, None)
    for found in run_ranks(2, _methods, stage, options):
        torch.testing.assert_close(found, list(alone.parameters()), rtol=1e-6, atol=1e-7)


def _call_alone(rank, world_size, stage):
    net = nn.Linear(5, 3)
    optimizer = Methods(net.parameters(), lr=0.1, momentum=0.9)
    engine = Engine(net, [optimizer], ZeroConfig(stage=stage))
    engine.backward(net(torch.ones(2, 5)).sum())
    optimizer.step()
    if rank == 0:
        optimizer.eval(0.5)
    engine.optimizer_state(optimizer)


@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_a_method_that_one_rank_calls_alone_is_an_error_that_names_it(stage):
    with pytest.raises(RankError, match=r"Methods.eval\(\)"):
        run_ranks(2, _call_alone, stage)
