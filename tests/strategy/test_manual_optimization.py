"""Manual optimization equals one process with the global batch, where DDP raises."""

from __future__ import annotations

from functools import partial

import pytest
from torch.nn import functional as F

from tests.support.fitting import assert_same, fit_ranks, fit_reference, settings
from tests.support.models import OPTIMIZERS, GANModule, MLPModule


@pytest.mark.slow
@pytest.mark.shows("manual optimization, two optimizers (a GAN)")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_two_toggled_optimizers_and_several_backwards(optimizer, world_size, stage):
    factory = partial(GANModule, ranks=world_size, optimizer=optimizer, num_batches=5)
    ours = fit_ranks(world_size, settings(stage), factory)
    assert_same(ours, fit_reference(1, factory, spec="auto"))
    assert ours[0].global_step == 10


class EverySecondModule(MLPModule):
    """Accumulates two batches by hand, clips, steps, then zeroes."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad()


class ClosureModule(MLPModule):
    """Passes forward and backward as a closure of the step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            loss = self.loss(batch)
            self.losses.append(float(loss.detach()))
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class TwoLossesModule(MLPModule):
    """Two backwards through one graph, and a step of the optimizer that Lightning does not see."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        out = self(x)
        first, second = F.mse_loss(out, y), F.l1_loss(out, y)
        self.manual_backward(first, retain_graph=True)
        self.manual_backward(second)
        optimizer.step()
        self.losses.append(float(first.detach() + second.detach()))


class RareGeneratorModule(GANModule):
    """The generator trains in every second batch only; its gradients do not meet the other's."""

    def training_step(self, batch, batch_idx):
        x, real = batch
        optimizer_g, optimizer_d = self.optimizers()
        fake = self.generator(x[:, :5])
        optimizer_d.zero_grad()
        loss = F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(fake.detach()))
        self.manual_backward(loss.mean())
        optimizer_d.step()
        self.losses.append(float(loss.mean().detach()))
        if batch_idx % 2:
            optimizer_g.zero_grad()
            self.manual_backward(F.softplus(-self.discriminator(fake)).mean())
            optimizer_g.step()


@pytest.mark.default_cases("TwoLossesModule-3")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "module", [EverySecondModule, ClosureModule, TwoLossesModule, RareGeneratorModule]
)
def test_loops_by_hand(module, stage):
    factory = partial(module, ranks=2, num_batches=6)
    ours = fit_ranks(2, settings(stage), factory)
    assert_same(ours, fit_reference(1, factory, spec="auto"))
    assert OPTIMIZERS["adamw"].keywords["lr"] in ours[0].learning_rates
