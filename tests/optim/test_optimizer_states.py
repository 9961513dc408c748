"""Users read, edit, save and load the states of an optimizer between steps."""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict

import pytest
import torch
from torch import nn

from lightning_zero import Engine, OffloadConfig, ZeroConfig
from tests.support.cells import SHARDED_STAGE
from tests.support.warm import run_ranks


class Net(nn.Module):
    """Has a 0-dim parameter, and one with fewer elements than ranks."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * self.scale


def data(step, rank=None):
    """Batch of one rank, or of both ranks."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x[3 * rank : 3 * rank + 3]


class Loop:
    """Trains `Net`: an engine on two ranks, or one process with the batches of both."""

    def __init__(self, optimizer, config=None, rank=None):
        torch.manual_seed(0)
        self.net, self.rank = Net(), rank
        self.optimizer = optimizer(self.net.parameters())
        self.engine = Engine(self.net, [self.optimizer], config) if config else None
        self.step = 0

    def train(self, num_steps=2):
        for _ in range(num_steps):
            loss = self.net(data(self.step, self.rank)).square().mean()
            if self.engine is not None:
                self.engine.backward(loss)
            else:
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def weights(self):
        if self.engine is not None:
            self.engine.close()
        return [parameter.detach() for parameter in self.net.parameters()]


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-3)


def _zero(loop):
    for parameter in loop.net.parameters():
        loop.optimizer.state[parameter]["exp_avg"].zero_()


def _scale(loop):
    for state in loop.optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"] * 4
        state.update(exp_avg=torch.zeros_like(state["exp_avg"]))


def _clear(loop):
    loop.optimizer.state.clear()


def _replace(loop):
    loop.optimizer.state = defaultdict(dict)


def _set_full(loop):
    for parameter in loop.net.parameters():
        shape = loop.optimizer.state[parameter]["exp_avg"].shape
        full = torch.arange(shape.numel(), dtype=torch.float32).view(shape) / 100
        loop.optimizer.state[parameter]["exp_avg"] = full


def _load_back(loop):
    before = copy.deepcopy(loop.optimizer.state_dict())
    loop.train()
    loop.optimizer.load_state_dict(before)


def _norms(loop):
    scale = sum(float(s["exp_avg"].norm()) for s in loop.optimizer.state.values())
    for group in loop.optimizer.param_groups:
        group["lr"] /= 1 + scale


EDITS = [_zero, _scale, _clear, _replace, _set_full, _load_back, _norms]
NVME = OffloadConfig(device="nvme", nvme_path=".")
TIERS = [
    (1, {}),
    pytest.param(3, {}, marks=pytest.mark.slow),
    (3, {"offload_optimizer": NVME}),
    pytest.param(2, {}, marks=pytest.mark.slow),
    pytest.param(2, {"offload_optimizer": OffloadConfig("cpu")}, marks=pytest.mark.slow),
]


def _edit(rank, world_size, stage, options, edits):
    weights = []
    for edit in edits:
        loop = Loop(adam, ZeroConfig(stage=stage, **options), rank)
        loop.train()
        edit(loop)
        loop.train()
        weights.append(loop.weights())
    return weights


@pytest.mark.default_cases("3-options2")
@pytest.mark.parametrize(("stage", "options"), TIERS)
def test_edits_of_states_between_steps_apply_to_the_full_states(stage, options):
    expected = []
    for edit in EDITS:
        alone = Loop(adam)
        alone.train()
        edit(alone)
        alone.train()
        expected.append(alone.weights())
    for found in run_ranks(2, _edit, stage, options, EDITS):
        for edit, ours, theirs in zip(EDITS, found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=edit.__name__)


def _look(rank, world_size, stage):
    alone, loop = Loop(adam), Loop(adam, ZeroConfig(stage=stage), rank)
    states, weight = loop.optimizer.state, loop.net.first.weight
    assert states.get(weight, 1) == states.pop(weight, 1) == 1
    assert not states
    for one in (alone, loop):
        one.train()
    expected, shown = alone.optimizer.state_dict(), loop.optimizer.state_dict()
    assert shown["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        for key, value in state.items():
            own = shown["state"][number][key]
            assert own.shape == value.shape
            full = own.full_tensor() if hasattr(own, "full_tensor") else own
            torch.testing.assert_close(full, value)
    with pytest.raises(RuntimeError, match=r"trainer.save_checkpoint.*engine.optimizer_state"):
        torch.save(shown, io.BytesIO())
    with pytest.raises(RuntimeError, match="cannot be pickled while it is attached"):
        pickle.dumps(loop.optimizer.state)
    saved = loop.engine.optimizer_state(loop.optimizer)
    assert bool(saved) == (rank == 0)
    if rank == 0:
        torch.testing.assert_close(saved["state"], expected["state"])
    with torch.no_grad():
        copied = copy.deepcopy(loop.optimizer.state[loop.net.first.weight])
    assert copied["exp_avg"].shape == (7, 5)


@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_states_are_seen_as_full_tensors_and_saved_as_the_errors_recommend(stage):
    run_ranks(2, _look, stage)


def nadam(parameters):
    """NAdam, which keeps a product of momenta: one number per parameter."""
    return torch.optim.NAdam(parameters, lr=0.05, eps=1e-3)


def asgd(parameters):
    """ASGD, which keeps its own rates: one number per parameter."""
    return torch.optim.ASGD(parameters, lr=0.05, t0=1)


def _load(rank, world_size, stage, options, saved):
    return [_load_one(rank, stage, options, *one) for one in saved]


def _load_one(rank, stage, options, optimizer, state, weights):
    loop = Loop(optimizer, ZeroConfig(stage=stage, **options), rank)
    from lightning_zero import gathered

    with gathered(loop.net, writeback=True), torch.no_grad():
        for parameter, value in zip(loop.net.parameters(), weights, strict=True):
            parameter.copy_(value)
    loop.optimizer.load_state_dict(state)
    loop.step = 2
    loop.train()
    with pytest.raises(ValueError, match="does not fit"):
        loop.optimizer.load_state_dict({**state, "param_groups": [{"params": [0]}]})
    return loop.weights()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "options"), TIERS)
def test_a_state_dict_of_one_process_is_loaded_by_hand(stage, options):
    loops = [Loop(optimizer) for optimizer in (adam, nadam, asgd)]
    saved = []
    for optimizer, loop in zip((adam, nadam, asgd), loops, strict=True):
        loop.train()
        state = copy.deepcopy(loop.optimizer.state_dict())
        saved.append((optimizer, state, copy.deepcopy(loop.weights())))
        loop.train()
    expected = [loop.weights() for loop in loops]
    for found in run_ranks(2, _load, stage, options, saved):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
