"""Parameters without elements or dimensions train in every order, group and optimizer."""

from __future__ import annotations

import copy
import random
from functools import partial

import pytest
import torch
from torch import nn, optim

from lightning_zero import Engine, OffloadConfig, ZeroConfig
from tests.support.warm import run_ranks


class StepsInAVector(optim.Optimizer):
    """Momentum whose step counter has one dimension."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("steps", torch.zeros(1))
                    state.setdefault("momentum", torch.zeros_like(p))
                    state["steps"] += 1
                    state["momentum"].mul_(0.9).add_(p.grad)
                    p.sub_(group["lr"] * state["momentum"] / state["steps"].item())


OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": partial(optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "adagrad for-loop": partial(optim.Adagrad, lr=0.1, foreach=False),
    "adam": partial(optim.Adam, lr=0.1, amsgrad=True),
    "rprop": partial(optim.Rprop, lr=0.1),
    "nadam": partial(optim.NAdam, lr=0.1),
    "steps in a vector": partial(StepsInAVector, lr=0.1),
}
SHAPES = {
    "empty": (0, 3),
    "none": (0,),
    "number": (),
    "single": (1,),
    "vector": (3,),
    "weight": (5, 3),
}
CONFIGS = {
    "0": ZeroConfig(stage=0),
    "1": ZeroConfig(stage=1),
    "3": ZeroConfig(stage=3),
    "3 cpu": ZeroConfig(stage=3, offload_optimizer=OffloadConfig("cpu")),
}


class Small(nn.Module):
    """Sums its parameters with weights, in the order in which they were registered."""

    def __init__(self, names):
        super().__init__()
        torch.manual_seed(0)
        values = {name: torch.rand(shape) + 0.5 for name, shape in SHAPES.items()}
        for name in names:
            self.register_parameter(name, nn.Parameter(values[name]))

    def forward(self, x):
        parts = [(p.square() * n).sum() for n, p in enumerate(self.parameters(), 1)]
        return torch.stack(parts).sum() * x.mean()


def _program(draw):
    """Names in the order of the module, and those of every parameter group."""
    names = draw.sample(list(SHAPES), len(SHAPES))
    ends = sorted(draw.sample(range(1, len(names)), draw.randrange(3)))
    members = draw.sample(names, len(names))
    return names, [members[a:b] for a, b in zip([0, *ends], [*ends, len(names)], strict=True)]


def _train(program, make_optimizer, config, state=None, weights=None):
    """Two steps; returns the full weights and the optimizer's full state."""
    names, groups = program
    net = Small(names)
    if weights is not None:
        net.load_state_dict(weights)
    optimizer = make_optimizer([{"params": [getattr(net, n) for n in g]} for g in groups])
    engine = Engine(net, [optimizer], config) if config else None
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    for step in range(2):
        loss = net(torch.full((2,), step + 1.0))
        engine.backward(loss) if engine else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    packed = engine.optimizer_state(optimizer) if engine else optimizer.state_dict()
    packed = copy.deepcopy(packed)
    if engine:
        engine.close()
    return {name: p.detach().clone() for name, p in net.named_parameters()}, packed


def _difference(ours, expected):
    """Describes a difference of two trees of tensors; empty if there is none."""
    if isinstance(expected, dict):
        if ours.keys() != expected.keys():
            return f"keys {sorted(ours)}, expected {sorted(expected)}"
        found = [(key, _difference(ours[key], expected[key])) for key in expected]
        return "; ".join(f"{key}: {why}" for key, why in found if why)
    if not isinstance(expected, torch.Tensor):
        return "" if ours == expected else f"{ours}, expected {expected}"
    if ours.shape != expected.shape:
        return f"shape {tuple(ours.shape)}, expected {tuple(expected.shape)}"
    return "" if torch.allclose(ours, expected, rtol=1e-6, atol=1e-6) else "other values"


def _study(rank, world_size, seeds, optimizers, configs):
    wrong = []
    for seed in seeds:
        program = _program(random.Random(seed))
        for name in optimizers:
            reference, expected = _train(program, OPTIMIZERS[name], None)
            resumed, end = _train(program, OPTIMIZERS[name], None, expected, reference)
            for config in configs:
                what = f"seed {seed}, {name}, {config}, {program}"
                weights, state = _train(program, OPTIMIZERS[name], CONFIGS[config])
                wrong.append((what, _difference(weights, reference)))
                again, last = _train(program, OPTIMIZERS[name], CONFIGS[config], expected, weights)
                wrong.append((what, _difference(again, resumed)))
                if rank == 0:
                    wrong.append((what, _difference(state["state"], expected["state"])))
                    wrong.append((what, _difference(last["state"], end["state"])))
    return [f"{what}: {why}" for what, why in wrong if why]


def test_any_order_and_groups_of_small_parameters_equal_one_process():
    names = ["adagrad for-loop", "nadam", "steps in a vector"]
    for wrong in run_ranks(2, _study, range(1), names, ["1", "3"]):
        assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_many_orders_and_groups_of_small_parameters_equal_one_process(world_size, name):
    for wrong in run_ranks(world_size, _study, range(30), [name], list(CONFIGS), timeout_s=250):
        assert wrong == []
