"""The first module in which values become non-finite."""

import pytest
import torch
from torch import nn

from lightning_zero.observe.first_nonfinite import FirstNonfinite

INF = float("inf")


class Log(nn.Module):
    def forward(self, x):
        return x.log()


class Root(nn.Module):
    """Its output is zero, where its gradient is NaN."""

    def forward(self, x):
        return (x * 0).sqrt()


class Residual(nn.Module):
    """Two modules with the same input, of which the second computes the NaN."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), inner
        self.last = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x):
        return self.last(self.first(x) + self.second(x))


def origin_of(module, loss_of=torch.sum, x=None):
    torch.manual_seed(0)
    look = FirstNonfinite(module)
    with look.watching():
        loss = loss_of(module(torch.full((3, 4), -0.5) if x is None else x))
        look.look_at_loss(loss)
        loss.backward()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in module.modules())
    return look.origin


def body(inner):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Residual(inner), nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (Log(), "forward, in module 1.second (Log): its output is not finite"),
        (Root(), "backward, in module 1.second (Root): the gradient of its input"),
        (nn.Sequential(nn.Identity(), Root()), "backward, in module 1.second.1 (Root)"),
    ],
)
def test_the_innermost_module_that_computes_it_is_named(inner, expected):
    assert str(origin_of(body(inner))).startswith(expected)


def test_a_parameter_that_is_not_finite_and_one_whose_gradient_is_not_are_named():
    module = body(nn.Identity())
    with torch.no_grad():
        module[1].first.bias[2] = INF
    text = "forward, in module 1.first (Linear): its parameter bias is not finite"
    assert str(origin_of(module)).startswith(text)
    scale = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        scale.weight.fill_(1e-30)
    large = torch.full((3, 4), 3e38)
    origin = origin_of(scale, lambda y: (y * 1e3).sum(), large)
    assert origin.module == "itself (Linear)"
    assert origin.text == "the gradient of its parameter weight is not finite"


def test_what_a_loss_computes_is_outside_of_all_modules():
    module = body(nn.Identity())
    origin = origin_of(module, lambda y: (y.sum() - y.sum()).sqrt() * y.sum())
    assert (origin.phase, origin.module) == ("backward", None)
    origin = origin_of(module, lambda y: (y * 0 - 1).log().sum())
    assert str(origin) == "forward, outside of all modules: the loss is not finite"


def test_nothing_is_found_where_all_values_are_finite():
    module = body(nn.Identity())
    assert origin_of(module) is None
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(torch.full((3, 4), -0.5)).sum().backward()
    assert all(map(torch.equal, grads, (p.grad for p in module.parameters())))


class Attention(nn.Module):
    """Adds a mask with -infinity in front of a softmax."""

    def forward(self, x, mask):
        return torch.softmax(x + mask, dim=-1), mask


def mask_of(num_visible):
    return torch.zeros(4).masked_fill(torch.arange(4) >= num_visible, -INF)


class Mask(nn.Module):
    def forward(self, num_visible):
        return mask_of(num_visible)


class Masked(nn.Module):
    """Its mask leaves `num_visible` elements visible."""

    def __init__(self, num_visible, mask=mask_of, inner=None):
        super().__init__()
        self.num_visible, self.mask = num_visible, mask
        self.first, self.attention = nn.Linear(4, 4), Attention()
        self.last = inner or nn.Identity()

    def forward(self, x):
        return self.last(self.attention(self.first(x), self.mask(self.num_visible))[0])


@pytest.mark.parametrize("mask", [mask_of, Mask()])
def test_masks_of_minus_infinity_are_no_origin(mask):
    assert origin_of(Masked(3, mask)) is None
    origin = origin_of(Masked(3, mask, Root()))
    assert (origin.phase, origin.module) == ("backward", "last (Root)")


def test_a_softmax_of_which_everything_is_masked_is_named():
    text = "forward, in module attention (Attention): its output is not finite"
    assert str(origin_of(Masked(0))) == f"{text}; its inputs have -infinity"
