"""Uses of parameters after other ranks were lost, and their shards with them: `Engine.abort`."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import Engine, ZeroConfig, gathered
from tests.support.ranks import run_ranks


def _gather(module, writeback):
    with gathered(module, writeback=writeback):
        pass


def _assign(parameter):
    parameter.data = torch.zeros(4, 4)


# What a user may do with a module and its first weight.
USES = {
    "forward": lambda module, weight: module(torch.ones(1, 4)),
    "operator": lambda module, weight: weight + 1,
    "detached norm": lambda module, weight: weight.detach().norm(),
    "write": lambda module, weight: nn.init.zeros_(weight),
    "data": lambda module, weight: weight.data,
    "assigned data": lambda module, weight: _assign(weight),
    "copy": lambda module, weight: copy.deepcopy(weight),
    "state_dict": lambda module, weight: module.state_dict(),
    "gathered": lambda module, weight: _gather(module, writeback=False),
    "gathered for writing": lambda module, weight: _gather(module, writeback=True),
}


class _SGD(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            raise ArithmeticError


def _errors(module):
    """The error of each use."""
    errors = {}
    for name, use in USES.items():
        try:
            use(module, module[0].weight)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def _train_and_lose_ranks(rank, world_size, stage, options, fails):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = _SGD(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], ZeroConfig(stage=stage, **options))
    engine.backward(module(torch.ones(1, 4)).sum())
    optimizer.fails = fails
    with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
        engine.step()
    dist.barrier()  # all ranks have issued their all-gathers
    engine.abort()
    errors = _errors(module)
    engine.reset()  # parameters stay as they are
    return errors, _errors(module)


CASES = {
    "step": ({}, False),
    "overlapped step": ({"overlap_step": True}, False),
    "failed step": ({}, True),
}


@pytest.mark.default_cases("1-step", "3-step", "1-failed step")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:after an exception")
def test_every_use_of_a_parameter_is_an_error_with_the_cause(stage, case):
    for before_reset, after_reset in run_ranks(2, _train_and_lose_ranks, stage, *CASES[case]):
        assert before_reset.keys() == after_reset.keys() == USES.keys()
        for error in (*before_reset.values(), *after_reset.values()):
            assert error.startswith("RuntimeError: parameter 0.weight is lost with the rest of")
