"""When `checkpoint="auto"` is sharded."""

import logging

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

from lightning_zero.strategy.saving import Saving
from tests.support.fitting import make_trainer, run_once
from tests.support.models import MLPModule

SIZES = {"below": (2**31 - 1, False), "at": (2**31, True)}


def module_of(numel):
    """Half of the parameters are tied, as embedding and head; they count once."""
    module = nn.Module()
    module.first = nn.Parameter(torch.empty(numel - 2**30, device="meta"))
    module.second = module.tied = nn.Parameter(torch.empty(2**20, 2**10, device="meta"))
    return module


@pytest.mark.parametrize(("numel", "is_sharded"), SIZES.values(), ids=SIZES)
def test_auto_is_sharded_from_two_to_the_31_parameters_on(numel, is_sharded):
    module = module_of(numel)
    saving = Saving("auto", is_async=False)
    assert saving.is_sharded(module, None) == is_sharded
    assert not saving.is_sharded(module, AsyncCheckpointIO())  # which is not used for shards
    assert Saving("sharded", is_async=False).is_sharded(module, None)
    assert not Saving("full", is_async=False).is_sharded(module, None)


def _reports(rank, world_size):
    """How often a fit, and a validation after it, report that checkpoints are directories."""
    found = []

    class Handler(logging.Handler):
        def emit(self, record):
            found.append("checkpoints are sharded directories" in record.getMessage())

    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(Handler())
    module, counts = MLPModule(ranks=1), []
    for run in ("fit", "validate"):
        trainer = make_trainer({"stage": 2, "offload_optimizer": "cpu"})
        logger.setLevel(logging.INFO)
        getattr(trainer, run)(module)
        counts.append(sum(found))
        found.clear()
    return counts


def test_only_a_fit_reports_that_checkpoints_are_directories():
    assert run_once(1, _reports)[0] == [1, 0]
