"""`torch.equal` of sharded parameters."""

import pytest
import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig
from tests.support.warm import run_ranks


@torch.no_grad()
def _go_on(rank, module):
    """Rank 0 compares; the other rank continues with its next forward."""
    if rank == 0:
        torch.equal(module[0].weight, module[1].weight)
    else:
        module(torch.ones(2, 8))


def _compare(rank, world_size, is_alone):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    with torch.no_grad():
        module[1].weight.copy_(module[0].weight)
    engine = Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], ZeroConfig(stage=3))
    answers = []
    if is_alone:
        with pytest.raises(RuntimeError, match="; not every rank did"):
            _go_on(rank, module)
    else:
        pairs = ((0, 1), (0, 2))
        answers = [torch.equal(module[i].weight, module[j].weight) for i, j in pairs]
        engine.close()
    return answers


def test_all_ranks_together_are_answered():
    assert run_ranks(2, _compare, False) == [[True, False]] * 2


def test_one_rank_alone_is_an_error_on_all_not_a_hang():
    run_ranks(2, _compare, True, timeout_s=40)
