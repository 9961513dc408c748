"""Copies of parameters between the steps of stage 3: entries of state dicts, dtypes, memory."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig, save_checkpoint
from tests.support.ranks import run_ranks


class Net(nn.Module):
    """A model whose target is averaged by hand, and sharded at other offsets."""

    def __init__(self, *, is_frozen=True):
        super().__init__()
        self.online = nn.Sequential(
            nn.Linear(9, 7), nn.BatchNorm1d(7, affine=False), nn.Linear(7, 5, bias=False)
        )
        self.target = copy.deepcopy(self.online)
        self.scale = nn.Parameter(torch.tensor(1.5))
        for p in self.target.parameters():
            p.requires_grad_(not is_frozen)

    def forward(self, x):
        return ((self.online(x) - self.target(x)) * self.scale).square().mean()


def pairs(net):
    return list(zip(net.target.parameters(), net.online.parameters(), strict=True))


def by_state_dicts(net, saved):
    """timm's ModelEmaV2."""
    with torch.no_grad():
        entries = zip(
            net.target.state_dict().values(), net.online.state_dict().values(), strict=True
        )
        for t, s in entries:
            t.copy_(0.9 * t + 0.1 * s)


# ---------------------------------------------------------------- against one process


def build(config, **options):
    torch.manual_seed(0)
    net = Net(**options)
    reference = copy.deepcopy(net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    theirs = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1)
    return net, reference, theirs, Engine(net, [optimizer], config)


def step(net, reference, theirs, engine, number):
    x = torch.linspace(-1, 1, 36).view(4, 9) * (1 + number)
    engine.backward(net(x))
    engine.step()
    engine.zero_grad()
    reference(x).backward()
    theirs.step()
    theirs.zero_grad()


def full_tensors(value):
    if isinstance(value, dict):
        return {key: full_tensors(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [full_tensors(item) for item in value]
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return np.array(value.detach()) if isinstance(value, torch.Tensor) else value


def difference(ours, expected):
    ours, expected = full_tensors(ours), full_tensors(expected)
    try:
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6, check_dtype=True)
    except (AssertionError, TypeError) as error:
        return str(error)
    return None


# The function, the parameter, and what to do.
REFUSAL = r"(ShardedTensorError: )?'\w+' on p\.data of parameter [\w.]+, which is .*gathered\("


def _refuse(rank, world_size):
    net, reference, theirs, engine = build(ZeroConfig(stage=3))
    before = copy.deepcopy(net.state_dict())
    step(net, reference, theirs, engine, 0)
    kept = net.state_dict()
    kept["online.0.bias"] = kept["online.0.bias"] + 1
    for write in (
        lambda: by_state_dicts(net, {}),
        lambda: net.state_dict()["online.0.weight"].t()[0].zero_(),
        lambda: kept["target.0.bias"].mul_(2),
    ):
        write()
        with pytest.raises(RuntimeError, match=r"entry of state_dict\(\) was changed.*gathered\("):
            net(torch.ones(4, 9))
    net.state_dict()["target.0.bias"].zero_()
    with pytest.raises(RuntimeError, match=r"entry of state_dict\(\) was changed.*gathered\("):
        save_checkpoint(engine, "changed.ckpt")
    kept["target.0.weight"].zero_()
    with pytest.raises(
        RuntimeError, match=r"entry of state_dict\(\) was changed.*target\.0\.weight"
    ):
        engine.close()
    assert difference(dict(net.state_dict()), dict(reference.state_dict())) is None
    assert before.keys() == kept.keys()


def test_writes_to_entries_of_state_dicts_are_errors_and_change_nothing():
    run_ranks(2, _refuse)


# ---------------------------------------------------------------- 16-bit parameters


def _narrow(rank, world_size):
    """A 16-bit module is copied as one, and its main parameters keep what they had beyond that."""
    torch.manual_seed(0)
    net = Net().bfloat16()
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], ZeroConfig(stage=3))
    before = [p.data.clone() for p in net.parameters()]
    state = net.state_dict()
    assert {value.dtype for value in state.values() if value.is_floating_point()} == {
        torch.bfloat16
    }
    assert copy.deepcopy(net.online)[0].weight.dtype is torch.bfloat16
    net.load_state_dict(state)
    for p, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(p.data, old)
    engine.close()


@pytest.mark.slow
def test_looks_and_writes_between_steps_have_the_dtype_of_the_module():
    run_ranks(2, _narrow)


def _stale(rank, world_size):
    net, reference, theirs, engine = build(ZeroConfig(stage=3))
    state = {name: net.state_dict()[name] for name, _ in net.named_parameters()}
    before = copy.deepcopy(state)
    step(net, reference, theirs, engine, 0)
    assert difference(state, before) is None
    net.load_state_dict(state, strict=False)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    weight = net.online[0].weight
    with pytest.raises(RuntimeError, match=r"online\.0\.weight is sharded over 2 ranks"):
        weight.mul_(2)
    for convert in (net.half, net.double):
        with pytest.raises(ValueError, match=r"data set on parameter .* keeps its dtype"):
            convert()
    with pytest.raises(RuntimeError, match=r"no gradient flows through it.*forward_context"):
        weight.sum().backward()
    step(net, reference, theirs, engine, 1)
    engine.close()


def test_state_dicts_keep_their_values_and_gradients_outside_of_steps_are_refused():
    run_ranks(2, _stale)


def _too_large(rank, world_size):
    from lightning_zero.core import lockstep

    lockstep.available_memory_bytes = lambda: 300
    lockstep._MIN_CHECKED_BYTES = 100
    net, _, _, engine = build(ZeroConfig(stage=3))
    for look in (lambda: net.state_dict(), lambda: copy.deepcopy(net), lambda: pickle.dumps(net)):
        with pytest.raises(RuntimeError, match=r"needs \d+ bytes of CPU memory on every rank, and"):
            look()
    engine.backward(net(torch.ones(4, 9)))
    engine.close()


def test_full_values_that_do_not_fit_into_memory_are_refused_with_the_numbers():
    run_ranks(2, _too_large)
