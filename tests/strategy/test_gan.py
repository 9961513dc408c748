"""A GAN as people train them equals one process with the global batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import TensorDataset

from tests.support.fitting import assert_same, fit_ranks, fit_reference, settings
from tests.support.models import Recorder

STAGES = [1, pytest.param(2, marks=pytest.mark.slow), 3]
WIDTH = 6


class UpBlock(nn.Module):
    """Twice the height and width."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return self.conv(F.interpolate(F.leaky_relu(self.norm(x), 0.2), scale_factor=2))


class DownBlock(nn.Module):
    """Half the height and width; Lipschitz by a spectral norm, which keeps buffers."""

    def __init__(self):
        super().__init__()
        self.conv = spectral_norm(nn.Conv2d(WIDTH, WIDTH, 3, padding=1))
        self.skip = spectral_norm(nn.Conv2d(WIDTH, WIDTH, 1))

    def forward(self, x):
        return F.avg_pool2d(self.skip(x) + F.leaky_relu(self.conv(x), 0.2), 2)


class ImageGANModule(Recorder):
    """Convolutional, non-saturating loss, a gradient penalty in every second discriminator step.

    The discriminator takes two steps for each of the generator, each with several backwards; both
    are clipped, each by its own norm.
    """

    def __init__(self, **kwargs):
        super().__init__(batch_size=4, **kwargs)
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(5, 4 * WIDTH),
            nn.Unflatten(1, (WIDTH, 2, 2)),
            *(UpBlock() for _ in range(2)),
            nn.Conv2d(WIDTH, 3, 1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, WIDTH, 1), *(DownBlock() for _ in range(2)), nn.Flatten(), nn.LazyLinear(1)
        )
        with torch.no_grad():
            self.discriminator(torch.zeros(1, 3, 8, 8))

    def dataset(self, num_samples):
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(num_samples, 3, 8, 8, generator=generator).tanh()
        return TensorDataset(images, torch.randn(num_samples, 5, generator=generator))

    def configure_optimizers(self):
        adam = partial(torch.optim.Adam, betas=(0.0, 0.99), eps=1e-5)
        return [
            adam(self.generator.parameters(), lr=1e-3),
            adam(self.discriminator.parameters(), lr=2e-3),
        ]

    def training_step(self, batch, batch_idx):
        images, noise = batch
        optimizer_g, optimizer_d = self.optimizers()
        self.step_discriminator(optimizer_d, images, noise, is_penalized=batch_idx % 2 == 0)
        if batch_idx % 2:
            with self.toggled_optimizer(optimizer_g):
                loss = F.softplus(-self.discriminator(self.generator(noise))).mean()
                self.step(optimizer_g, [loss], 0.5)

    def step_discriminator(self, optimizer, images, noise, *, is_penalized):
        with self.toggled_optimizer(optimizer):
            fake = self.generator(noise).detach()
            losses = [
                F.softplus(-self.discriminator(images)).mean(),
                F.softplus(self.discriminator(fake)).mean(),
            ]
            if is_penalized:
                images = images.clone().requires_grad_()
                scores = self.discriminator(images).sum()
                (slope,) = torch.autograd.grad(scores, images, create_graph=True)
                losses.append(5.0 * slope.square().sum(dim=(1, 2, 3)).mean())
            self.step(optimizer, losses, 0.1)

    def step(self, optimizer, losses, clip):
        optimizer.zero_grad()
        for loss in losses:
            self.manual_backward(loss)
        self.clip_gradients(optimizer, clip, "norm")
        optimizer.step()
        self.losses.append(float(sum(loss.detach() for loss in losses)))


@pytest.mark.default_cases("1")
@pytest.mark.shows("manual optimization, two optimizers (a GAN)")
@pytest.mark.parametrize("stage", STAGES)
def test_a_gan_with_a_gradient_penalty_equals_one_process(stage):
    factory = partial(ImageGANModule, ranks=2, num_batches=6)
    ours = fit_ranks(2, settings(stage), factory)
    assert len(ours[0].losses) == 9
    assert_same(ours, fit_reference(1, factory, spec="auto"), rtol=5e-6, atol=5e-6)
