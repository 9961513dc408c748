"""Optimizers of the package schedulefree, which swap what the parameters are by `train` and `eval`,
and other optimizers with methods or closures of their own, against DDP.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from torch import nn
from torch.utils.data import DataLoader

from tests.cells import slow_but
from tests.fitting import assert_same, fit_ranks, fit_reference, settings
from tests.models import Recorder

schedulefree = pytest.importorskip("schedulefree", reason="needs the package schedulefree")

NAMES = ["AdamW", "SGD", "RAdam"]
CASES = slow_but(
    {("AdamW", False, 1), ("AdamW", True, 3)},
    [
        (name, is_closure, stage)
        for name in NAMES
        for is_closure in (False, True)
        for stage in (1, 2, 3)
    ],
)


class ScheduleFreeModule(Recorder):
    """Says `train` and `eval` to its optimizer as the package's examples do."""

    def __init__(self, name, is_closure=False, mode="eval", path=None, **options):
        super().__init__(ranks=2, **options)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.name, self.is_closure, self.mode, self.path = name, is_closure, mode, path

    def part_loss(self, part, rank):
        return nn.functional.mse_loss(self.net(part[0]), part[1])

    def configure_optimizers(self):
        kind = getattr(schedulefree, f"{self.name}ScheduleFree{'Closure' * self.is_closure}")
        return kind(self.parameters(), lr=0.05, weight_decay=0.1)

    def val_dataloader(self):
        return DataLoader(self.dataset(8), batch_size=4)

    def set_mode(self, mode):
        if not self.is_closure:
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


@pytest.mark.parametrize(("name", "is_closure", "stage"), CASES)
def test_a_schedule_free_optimizer_trains_as_under_ddp(name, is_closure, stage):
    factory = partial(ScheduleFreeModule, name, is_closure, num_batches=6)
    options = OPTIONS | ({"gradient_clip_val": None} if is_closure else {})
    ours = fit_ranks(2, settings(stage), factory, options)
    reference = fit_reference(2, factory, options)
    assert_same(ours, reference, rtol=1e-6, atol=1e-6)
    assert ours[0].metrics["val_loss"] == pytest.approx(reference[0].metrics["val_loss"], rel=1e-6)


def _two_fits(folder, first, second, mode):
    """Trains one epoch, saves in `mode`, and goes on: (world size, strategy) of each."""
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


@pytest.mark.parametrize(("first", "second", "mode"), RESUMED)
def test_a_schedule_free_run_is_resumed_from_either_mode(tmp_path, first, second, mode):
    ours = _two_fits(tmp_path / "ours", first, second, mode)
    alone = _two_fits(tmp_path / "alone", (1, "auto"), (1, "auto"), mode)
    mean = np.mean([outcome.losses for outcome in ours], axis=0)
    np.testing.assert_allclose(mean, alone[0].losses, rtol=1e-5)
    for name, value in alone[0].state.items():
        np.testing.assert_allclose(ours[0].state[name], value, rtol=1e-5, atol=1e-6)
