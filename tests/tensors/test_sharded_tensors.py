"""Operations on sharded `p.grad` and `p.data` act on the full tensor, or raise a clear error."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig, full_grad, gathered
from lightning_zero.comm.communicator import Communicator
from lightning_zero.tensors.sharded import ShardedTensor
from tests.support.cells import SHARDED_STAGE
from tests.support.warm import run_ranks

WORLD_SIZE = 3  # one rank has an empty shard of the second weight


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 7), nn.Linear(7, 2, bias=False)])
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return (x * self.scale).square().sum()


def inputs(rank, step=0):
    return torch.linspace(-1, 1, 36).view(4, 9) * (1 + rank + step)


def build(stage, **options):
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, reference, optimizer, Engine(net, [optimizer], ZeroConfig(stage=stage, **options))


def backward(net, reference, engine, rank, world_size, step=0):
    """Computes the same gradients on both."""
    engine.backward(net(inputs(rank, step)))
    mean = sum(reference(inputs(other, step)) for other in range(world_size)) / world_size
    mean.backward()


def full(value):
    if isinstance(value, (list, tuple)):
        return [full(item) for item in value]
    return value.full_tensor() if isinstance(value, ShardedTensor) else value


def same(ours, expected):
    if isinstance(expected, (list, tuple)):
        return all(same(a, b) for a, b in zip(ours, expected, strict=True))
    if not isinstance(expected, torch.Tensor):
        return type(ours) is type(expected) and ours == pytest.approx(expected)
    has_same_type = ours.shape == expected.shape and ours.dtype == expected.dtype
    return has_same_type and torch.allclose(ours, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def _mixed(rank, world_size, stage):
    """16-bit parameters: sharded data are the main parameters, in full precision."""
    net, reference, _, engine = build(stage, param_dtype=torch.bfloat16)
    engine.backward(net(inputs(rank).bfloat16()))
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        expected = full_grad(p)
        assert p.grad.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(p.grad.norm(), expected.norm())
        with torch.no_grad():
            product = full(p.grad * p)
        torch.testing.assert_close(product, expected * q, rtol=1e-2, atol=1e-3)
        if stage == 3:
            torch.testing.assert_close(p.data.norm(), q.data.norm())
    engine.close()


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_of_16_bit_parameters_equal_the_full_gradients(stage):
    run_ranks(2, _mixed, stage)


def _gather(rank, world_size, stage):
    net, reference, _, engine = build(stage)
    backward(net, reference, engine, rank, world_size)
    sent, all_gather = [], Communicator.all_gather

    def counted(comm, buffer, *args, **kwargs):
        sent.append(buffer.nbytes)
        return all_gather(comm, buffer, *args, **kwargs)

    with mock.patch.object(Communicator, "all_gather", counted):
        engine.comm.sum_over_shards_ = engine.comm.max_ = None  # fails if it is called
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-6)
            assert torch.equal(full_grad(p), p.grad.full_tensor())
            extra = [num_bytes - q.nbytes for num_bytes in sent]
            assert all(0 <= num_bytes < 4 * world_size for num_bytes in extra), (q.shape, sent)
            sent.clear()
    engine.close()


@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_a_full_tensor_is_one_all_gather_of_its_own_elements(stage):
    run_ranks(WORLD_SIZE, _gather, stage)


def _set_wrong(rank, world_size, stage):
    net, reference, _, engine = build(stage)
    backward(net, reference, engine, rank, world_size)
    weight, before = net.layers[0].weight, full_grad(net.layers[0].weight)
    for wrong in (torch.ones(3), weight.grad.flatten()):
        with pytest.raises((ValueError, RuntimeError), match=r"layers\.0\.weight|of size"):
            weight.grad = wrong
    assert torch.equal(full_grad(weight), before)
    engine.step()
    engine.close()


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_gradient_of_another_shape_is_refused_where_it_is_set(stage):
    run_ranks(2, _set_wrong, stage)


def _differentiate(rank, world_size, stage):
    net, reference, _, engine = build(stage)
    backward(net, reference, engine, rank, world_size)
    weight = net.layers[0].weight
    penalty = (weight.grad * weight).sum()
    torch.testing.assert_close(
        penalty.detach(),
        (reference.layers[0].weight.grad * reference.layers[0].weight).sum().detach(),
    )
    with pytest.raises(
        RuntimeError, match=r"'sum' on p\.grad of parameter layers\.0\.weight.*no gr"
    ):
        penalty.backward()
    assert not weight.grad.detach().norm().requires_grad
    engine.zero_grad()
    backward(net, reference, engine, rank, world_size)
    assert not weight.grad.norm().requires_grad
    engine.close()


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_through_a_sharded_gradient_is_an_error(stage):
    run_ranks(2, _differentiate, stage)


def _set_a_part(rank, world_size, stage):
    net, _, _, engine = build(stage)
    engine.backward(net(inputs(rank)))
    weight = net.layers[0].weight
    weight.data = weight.data - 0.1 * weight.grad
    with gathered(net):
        set_once = weight.detach().clone()
    weight.data = weight.data + (0.1 * weight.grad).full_tensor()
    weight.data.add_(weight.grad, alpha=-0.1)
    engine.zero_grad()
    engine.backward(net(inputs(rank)))
    engine.close()
    torch.testing.assert_close(weight.detach(), set_once)


@pytest.mark.parametrize("stage", [1, 2])
def test_data_computed_from_a_gradient_may_be_set_or_written(stage):
    run_ranks(2, _set_a_part, stage)
