"""The subclass of docs/concepts/subclassing.md, with process groups of its own."""

from __future__ import annotations

import re

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from tests.support.fitting import arrays, make_trainer
from tests.support.pages import PAGES
from tests.support.warm import run_ranks

NUM_TOKENS = {0: 4, 1: 2, 2: 6, 3: 2}  # by rank


def documented(name):
    """A class of the page."""
    blocks = re.findall(r"```python\n(.*?)```", PAGES["docs/concepts/subclassing.md"], re.DOTALL)
    (block,) = [block for block in blocks if f"class {name}" in block]
    namespace = {}
    exec(block, namespace)
    return namespace[name]


class Tokens(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        generator = torch.Generator().manual_seed(self.global_rank)
        x = torch.randn(NUM_TOKENS[self.global_rank], 3, generator=generator)
        return {"loss": self.net(x).square().mean(), "num_tokens": torch.tensor(float(len(x)))}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(range(4), batch_size=1)


def _fit(rank, world_size):
    strategy = documented("TokenMeans")(stage=3)
    trainer = make_trainer("auto", strategy=strategy)
    module = Tokens()
    for _ in range(2):  # runs
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(module)
    return arrays(module.state_dict())


@pytest.mark.shows("a subclass of `ZeroStrategy` with process groups of its own", stages=(3,))
def test_a_subclass_averages_inside_groups_of_its_own():
    ours = run_ranks(4, _fit, has_group=False)[0]
    net, generators = Tokens().net, [torch.Generator().manual_seed(rank) for rank in range(4)]
    data = [
        torch.randn(NUM_TOKENS[rank], 3, generator=generator)
        for rank, generator in enumerate(generators)
    ]
    for _ in range(2):
        groups = [torch.cat([data[0], data[2]]), torch.cat([data[1], data[3]])]
        loss = sum(net(x).square().mean() for x in groups) / 2
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
    for name, value in net.state_dict().items():
        torch.testing.assert_close(torch.tensor(ours[f"net.{name}"]), value)
