"""Transforms of torch.func and forward-mode differentiation of a sharded module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

from lightning_zero import Engine, ZeroConfig, full_grad, gathered
from tests.support.warm import run_ranks


class Net(nn.Module):
    """In stage 3 each block is a unit that is unsharded for its own forward only."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


def parameters(net):
    return dict(net.named_parameters())


def loss_of(net):
    return lambda values, x: functional_call(net, values, (x,)).square().sum()


def gradients_by_sample(net):
    return vmap(grad(loss_of(net)), in_dims=(None, 0))(parameters(net), torch.ones(3, 4))


def gradients_by_sample_of_detached(net):
    values = {name: p.detach() for name, p in net.named_parameters()}
    return vmap(grad(loss_of(net)), in_dims=(None, 0))(values, torch.ones(3, 4))


def gradients(net):
    return grad(loss_of(net))(parameters(net), torch.ones(4))


def product_by_inputs(net):
    return jvp(net, (torch.ones(2, 4),), (torch.ones(2, 4),))


def product_by_parameters(net):
    tangents = {name: torch.ones(p.shape) for name, p in net.named_parameters()}
    call = lambda values: functional_call(net, values, (torch.ones(2, 4),))  # noqa: E731
    return jvp(call, (parameters(net),), (tangents,))


def forward_mode(net):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2, 4), torch.ones(2, 4))
        return forward_ad.unpack_dual(net(dual)).tangent


def backward_jacobian(net):
    return jacrev(net)(torch.ones(4))


def forward_jacobian(net):
    return jacfwd(net)(torch.ones(4))


def mapped(net):
    return vmap(net)(torch.ones(3, 4))


TRANSFORMS = [
    gradients_by_sample,
    gradients_by_sample_of_detached,
    gradients,
    product_by_inputs,
    product_by_parameters,
    forward_mode,
    backward_jacobian,
    forward_jacobian,
    mapped,
]


def _transform(rank, world_size, stage):
    """By transform and place: whether it is right, or the text of the error."""
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net)
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], ZeroConfig(stage=stage))
    found = {}
    places = {
        "gathered": lambda: gathered(net),
        "step": engine.forward_context,
    }
    for _ in range(2):  # what ranks have agreed on makes no difference
        engine.backward(net(torch.ones(2, 4)).sum())
        engine.zero_grad()
    for transform in TRANSFORMS:
        expected = transform(reference)
        for place, context in places.items():
            try:
                with context():
                    torch.testing.assert_close(transform(net), expected)
                found[transform.__name__, place] = "right"
            except RuntimeError as error:
                found[transform.__name__, place] = str(error)
    for model, backward in ((net, engine.backward), (reference, torch.Tensor.backward)):
        backward(vmap(model)(torch.ones(3, 4)).square().sum())
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full_grad(p), q.grad)
    params = [bucket.params for bucket in engine.buckets]
    assert not any(own.is_unsharded for own in params if own.are_sharded)
    engine.step()
    engine.close()
    return found


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_transforms_are_right_when_gathered_and_never_wrong_or_without_a_word(stage):
    for found in run_ranks(2, _transform, stage):
        for (name, place), outcome in found.items():
            if stage == 3 and place == "step" and outcome != "right":
                assert "lightning_zero.gathered" in outcome, (name, outcome)
                assert ".weight" in outcome, (name, outcome)
            else:
                assert outcome == "right", (name, place, outcome)


def _hold(rank, world_size, values):
    net = Net()
    net.register_parameter("odd", nn.Parameter(values(), requires_grad=False))
    with pytest.raises(ValueError, match=r"parameter odd has (layout|dtype).*register_buffer"):
        Engine(net, [torch.optim.SGD(net.blocks.parameters(), lr=0.1)], ZeroConfig(stage=3))
    net = Net()
    net.register_buffer("odd", values())
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], ZeroConfig(stage=3))
    engine.backward(net(torch.ones(2, 4)).sum())
    engine.step()
    engine.close()


def float8():
    return torch.ones(4, 4).to(torch.float8_e4m3fn)


def sparse():
    return torch.eye(4).to_sparse()


def compressed():
    return torch.eye(4).to_sparse_csr()


@pytest.mark.default_cases("float8", "compressed")
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("values", [float8, sparse, compressed])
def test_parameters_that_no_flat_buffer_can_hold_are_refused_by_name_and_may_be_buffers(values):
    run_ranks(2, _hold, values)
