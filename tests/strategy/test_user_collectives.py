"""Collectives of the user in a training step, while ranks use different parameters."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.fitting import assert_same, fit_ranks, fit_reference, settings
from tests.support.models import Recorder


class GatheringModule(Recorder):
    """The loss is one of the outputs of all ranks, as in contrastive learning.

    Rank 1 also uses the weight of one layer outside of its forward, from batch `first_use` on.
    """

    def __init__(self, first_use=0, is_checkpointed=False, **kwargs):
        super().__init__(**kwargs)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))
        self.first_use = first_use
        self.is_checkpointed = is_checkpointed
        self.num_batches_seen = 0

    def gathered(self, x):
        return self.all_gather(self.net(x), sync_grads=True)

    def part_loss(self, part, rank):
        x, y = part
        if self.is_checkpointed:
            z = checkpoint(self.gathered, x, use_reentrant=False)
        else:
            z = self.gathered(x)
        loss = (z - y).square().mean()
        if rank == 1 and self.num_batches_seen >= self.first_use:
            loss = loss + self.net[2].weight.square().sum() * 0.01
        self.num_batches_seen += 1
        return loss


@pytest.mark.default_cases("0-False-3")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("first_use", [0, 4])
def test_an_all_gather_with_gradients_beside_a_parameter_that_one_rank_uses_equals_ddp(
    stage, is_checkpointed, first_use
):
    factory = partial(GatheringModule, first_use, is_checkpointed, ranks=2, num_batches=6)
    ours = fit_ranks(2, settings(stage), factory)
    assert_same(ours, fit_reference(2, factory), rtol=1e-5)
