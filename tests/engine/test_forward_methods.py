"""Methods of a module that run as forwards: `Engine.register_forward_method`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.cells import ANY_STAGE
from tests.support.fitting import arrays
from tests.support.loops import assert_same_state, engine_for
from tests.support.warm import run_ranks


class Layer(nn.Module):
    """A repeated block, a unit of stage 3, with a method besides its forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(x))

    def project(self, x):
        return self.linear(x) * 2


class Policy(nn.Module):
    """A module whose training calls `evaluate_actions`, as in reinforcement learning."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def evaluate_actions(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.layers[0].project(x)).square().mean()

    def forward(self, x):
        return self.evaluate_actions(x)


def build():
    torch.manual_seed(0)
    policy = Policy()
    return policy, torch.optim.AdamW(policy.parameters(), lr=1e-2, eps=1e-5)


def batch(rank, step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def _train_ddp(rank, world_size):
    policy, optimizer = build()
    ddp = DistributedDataParallel(policy)
    losses = []
    for step in range(4):
        loss = ddp(batch(rank, step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, arrays(policy.state_dict())


def _train_engine(rank, world_size, stage):
    policy, optimizer = build()
    engine = engine_for(policy, [optimizer], stage)
    engine.register_forward_method(policy, "evaluate_actions")
    engine.register_forward_method(policy.layers[0], "project")
    engine.register_forward_method(policy.layers[0], "project")  # twice is harmless
    losses = []
    for step in range(4):
        loss = policy.evaluate_actions(batch(rank, step))
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
        engine.zero_grad()
    with torch.no_grad():
        policy.layers[0].project(batch(rank, 0))  # without the root
    copied = copy.deepcopy(policy)
    assert "evaluate_actions" not in vars(copied)
    assert "project" not in vars(pickle.loads(pickle.dumps(policy)).layers[0])
    assert "evaluate_actions" in vars(policy)
    engine.close()
    assert "evaluate_actions" not in vars(policy)
    assert "project" not in vars(policy.layers[0])
    return losses, arrays(policy.state_dict())


@pytest.mark.default_cases("3")
@pytest.mark.shows("`Engine.register_forward_method`")
@pytest.mark.parametrize("stage", ANY_STAGE)
def test_a_registered_method_trains_as_the_forward_of_ddp(stage):
    expected = run_ranks(2, _train_ddp)
    for (losses, state), (ddp_losses, ddp_state) in zip(
        run_ranks(2, _train_engine, stage), expected, strict=True
    ):
        assert losses == pytest.approx(ddp_losses, rel=1e-6)
        assert_same_state(state, ddp_state)


def _fail_and_go_on(rank, world_size):
    policy, optimizer = build()
    engine = engine_for(policy, [optimizer], 3)
    engine.register_forward_method(policy.layers[0], "project")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        policy.layers[0].project(torch.zeros(1, 3))
    engine.backward(policy(batch(rank, 0)))
    engine.step()
    engine.close()


def test_the_engine_is_usable_after_an_exception_in_a_registered_method():
    run_ranks(2, _fail_and_go_on)


def _misuse(rank, world_size):
    policy, optimizer = build()
    engine = engine_for(policy, [optimizer], 3)
    with pytest.raises(ValueError, match="not a part of Policy"):
        engine.register_forward_method(Layer(), "project")
    with pytest.raises(ValueError, match="runs as a forward already"):
        engine.register_forward_method(policy, "forward")
    with pytest.raises(TypeError, match="training of Policy must be a method, got bool"):
        engine.register_forward_method(policy, "training")
    with pytest.raises(AttributeError, match="generate"):
        engine.register_forward_method(policy, "generate")


def test_what_cannot_be_registered_is_refused():
    run_ranks(1, _misuse)
