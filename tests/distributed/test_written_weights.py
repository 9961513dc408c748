"""Weights that somebody writes between steps are trained on and saved, also beside masters."""

from __future__ import annotations

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks.batch_size_finder import BatchSizeFinder
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.distributed.ranks import run_ranks
from tests.fitting import arrays, make_trainer, settings
from tests.models import MLPModule


class Clamp(pl.Callback):
    """The weight clipping of a Wasserstein GAN."""

    def on_train_batch_end(self, trainer, module, *args):
        for parameter in module.parameters():
            parameter.data.clamp_(-0.05, 0.05)


class LoadOnce(pl.Callback):
    """Pretrained weights, loaded in a hook."""

    def on_train_start(self, trainer, module):
        module.load_state_dict(
            {k: torch.full_like(v, 0.25) for k, v in module.state_dict().items()}
        )


CALLBACKS = {
    "clamp": Clamp,
    "load": LoadOnce,
}


def _fit_with(rank, world_size, spec, callback, precision):
    pl.seed_everything(0, verbose=False)
    module = MLPModule(ranks=world_size)
    make_trainer(spec, callbacks=[callback()], precision=precision, max_epochs=3).fit(module)
    return arrays(module.state_dict())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("callback", list(CALLBACKS))
def test_weights_that_a_callback_writes_are_kept_as_under_ddp(callback, stage, precision):
    expected = run_ranks(2, _fit_with, "ddp", CALLBACKS[callback], precision, has_group=False)
    ours = run_ranks(2, _fit_with, settings(stage), CALLBACKS[callback], precision, has_group=False)
    tolerance = 1e-6 if precision == "32-true" else 2e-2
    for name, value in expected[0].items():
        np.testing.assert_allclose(ours[0][name], value, atol=tolerance, rtol=tolerance)
        np.testing.assert_array_equal(ours[0][name], ours[1][name])


def _find_batch_size(rank, world_size, stage):
    trainer = make_trainer(
        settings(stage), callbacks=[BatchSizeFinder(max_trials=2, steps_per_trial=1)], max_epochs=1
    )

    class Sized(BoringModel):
        batch_size = 2

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.ones(64, 32), batch_size=self.batch_size)

        def val_dataloader(self):
            return []

    module = Sized()
    trainer.fit(module)
    return module.batch_size


def _find_batch_sizes(rank, world_size):
    return [_find_batch_size(rank, world_size, stage) for stage in (1, 2, 3)]


@pytest.mark.shows("BatchSizeFinder")
def test_the_batch_size_finder_works_on_one_device():
    (found,) = run_ranks(1, _find_batch_sizes, has_group=False)
    assert min(found) > 2
