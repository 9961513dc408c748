"""Ranks with the same samples: gradients are summed inside a group, and averaged over groups."""

from __future__ import annotations

import os

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero
from tests.support.fitting import assert_same, fit, make_trainer, settings
from tests.support.warm import run_ranks

WIDTH, LENGTH = 6, 4


def samples():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(16, LENGTH, WIDTH, generator=generator))


class Context(nn.Module):
    """Each position sees the mean of all positions; with a group, each rank has some of them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x, group=None):
        """This rank's part of the loss of the full sequences `x`."""
        own = x if group is None else x.chunk(group.size, dim=1)[group.rank]
        hidden = self.up(own).tanh()
        total = hidden.sum(dim=1, keepdim=True)
        if group is not None and group.size > 1:
            total = all_reduce(total, group=group.process_group)
        return self.down(hidden + total / x.shape[1]).square().sum() / x.numel()


class ContextModule(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = Context(), []

    def training_step(self, batch, batch_idx):
        strategy = self.trainer.strategy
        if not isinstance(strategy, lightning_zero.ZeroStrategy):
            loss = self.net(batch[0])
            self.losses.append(float(loss))
            return loss
        group = strategy.batch_group
        loss = self.net(batch[0], group)
        total = strategy.reduce(loss.detach().clone(), group.process_group, "sum")
        self.losses.append(float(total))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def train_dataloader(self):
        os.environ["PL_SEED_WORKERS"] = "1"  # as by `seed_everything(workers=True)`
        return DataLoader(samples(), batch_size=2, shuffle=True)

    def on_train_end(self):
        seeded_by = self.trainer.train_dataloader.worker_init_fn.keywords["rank"]
        self.trainer.callback_metrics["seed of workers"] = torch.tensor(float(seeded_by))


@pytest.mark.shows("`batch_group_size`")
@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_groups_of_two_ranks_equal_two_ranks(stage):
    options = {"gradient_clip_val": 0.1}
    spec = settings(stage, batch_group_size=2)
    ours = run_ranks(4, fit, spec, ContextModule, options, has_group=False)
    plain = run_ranks(2, fit, "ddp", ContextModule, options, has_group=False)
    for rank, outcome in enumerate(ours):
        assert_same([outcome], [plain[rank // 2]])
        assert outcome.metrics["seed of workers"] == rank // 2


def _fabric(rank, world_size, size):
    strategy = lightning_zero.fabric.ZeroStrategy(2, batch_group_size=size)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    module = Context()
    module, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(samples(), batch_size=4))
    for (x,) in loader:
        fabric.backward(module(x, fabric.strategy.batch_group))
        optimizer.step()
        optimizer.zero_grad()
    values = [p.detach().clone() for p in module.module.parameters()]
    return len(loader), [value.numpy() for value in values]


def test_fabric_sums_inside_a_group():
    ((length, ours), _), ((full, plain),) = (
        run_ranks(size, _fabric, size, has_group=False) for size in (2, 1)
    )
    assert length == full == 4
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other))


def _differ(rank, world_size):
    spec = settings(2, batch_group_size=rank + 1)
    with pytest.raises(ValueError, match="batch_group_size"):
        make_trainer(spec).fit(ContextModule())


def test_sizes_that_differ_between_ranks_are_an_error_on_all_ranks():
    run_ranks(2, _differ, has_group=False, timeout_s=20)


def test_sizes_that_form_no_groups_are_refused():
    with pytest.raises(TypeError, match="batch_group_size must be a number of ranks, got True"):
        lightning_zero.ZeroStrategy(batch_group_size=True)
    with pytest.raises(ValueError, match="batch_group_size must be at least 1, got 0"):
        lightning_zero.ZeroStrategy(batch_group_size=0)
    with pytest.raises(ValueError, match=r"got 3 with 4 rank\(s\); use 1 or 2 or 4"):
        make_trainer(settings(2, batch_group_size=3), devices=4).fit(ContextModule())
    strategy = lightning_zero.ZeroStrategy(batch_group_size=2)
    with pytest.raises(RuntimeError, match="use it from the hook setup on"):
        strategy.batch_group  # noqa: B018
