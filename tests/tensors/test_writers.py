"""Collectives into lists of shards, and functions that give a tensor another memory or shape."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import Engine, ZeroConfig, gathered
from tests.support.warm import run_ranks

SIZE = 4  # the weight is a square, so that it can be transposed in place


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE))
        self.bias = nn.Parameter(torch.ones(SIZE))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias).square().mean()


def like(t):
    return torch.full((SIZE, SIZE), dist.get_rank() + 1.0)


# Torch looks for no subclasses in lists of lists, nor in lists beside a tensor. Called by one rank.
LISTS = {
    "all_gather": lambda t: dist.all_gather([t], like(t)),
    "all_gather_coalesced": lambda t: dist.all_gather_coalesced([[t]], [like(t)]),
    "gather": lambda t: dist.gather(like(t), [t]),
    "scatter": lambda t: dist.scatter(like(t), [t]),
    "reduce_scatter": lambda t: dist.reduce_scatter(like(t), [t]),
    "all_to_all": lambda t: dist.all_to_all([like(t)], [t]),
}


# ---------------------------------------------------------------- another memory


def swap(t):
    torch.utils.swap_tensors(t, nn.Parameter(torch.ones(SIZE, SIZE)))


def assign(t):
    t.data = torch.ones(SIZE, SIZE)


REPOINTING = {
    "data": assign,
    "set_": lambda t: t.set_(torch.ones(SIZE, SIZE)),
    "set_ from a storage": lambda t: t.set_(
        torch.ones(SIZE, SIZE).untyped_storage(), 0, (SIZE, SIZE), (SIZE, 1)
    ),
    "set_ to nothing": lambda t: t.set_(),
    "set_ of another shape": lambda t: t.set_(torch.ones(3)),
    "resize_": lambda t: t.resize_(2 * SIZE, SIZE),
    "resize_ to its size": lambda t: t.resize_(SIZE, SIZE),
    "resize_as_": lambda t: t.resize_as_(torch.ones(2)),
    "t_": lambda t: t.t_(),
    "transpose_": lambda t: t.transpose_(0, 1),
    "swapaxes_": lambda t: t.swapaxes_(0, 1),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "squeeze_": lambda t: t.squeeze_(),
    "as_strided_": lambda t: t.as_strided_((SIZE,), (1,)),
    "storage resized": lambda t: t.untyped_storage().resize_(1024),
    "swap_tensors": swap,
}

TENSORS = {
    "p": lambda p: p,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.detach().clone(),
    "zeros": torch.zeros_like,
    "grad": lambda p: p.grad,
}


def full(value):
    if isinstance(value, (list, tuple)):
        return [full(each) for each in value]
    if not isinstance(value, Tensor):
        return None
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value).clone()


def same(ours, expected):
    if isinstance(ours, list):
        return len(ours) == len(expected) and all(map(same, ours, expected))
    if not isinstance(ours, Tensor):
        return ours is expected or type(ours) is type(expected)
    return ours.shape == expected.shape and torch.allclose(ours, expected, atol=1e-6)


def called(write, tensor, net):
    """The tensor, the result of `write` or None, and the text of its error or None."""
    given, result, error = tensor(net.weight), None, None
    torch.manual_seed(0)
    try:
        result = write(given)
    except Exception as refused:
        error = f"{type(refused).__name__}: {refused}"
    return given, result, error


VALUES = Net().weight.detach().clone()


def _list(rank, world_size, stage):
    net = Net()
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], ZeroConfig(stage=stage))
    found = {}
    for name, tensor in TENSORS.items():
        for title, write in LISTS.items():
            reference = Net()
            reference(torch.ones(2, SIZE)).backward()
            engine.zero_grad()
            engine.backward(net(torch.ones(2, SIZE)))
            with torch.no_grad():
                theirs, *_ = called(write, tensor, reference)
                ours, _, error = called(write, tensor, net)
            is_right = error is not None or same(full(ours), full(theirs))
            found[name, title] = "refused" if error else "equal" if is_right else str(full(ours))
            with gathered(net, writeback=True), torch.no_grad():
                net.weight.copy_(VALUES)
    return found


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_list_in_which_torch_does_not_look_for_shards_does_not_crash_a_collective(stage):
    """No rank gets wrong values: it has the right ones, or an error."""
    (found,) = run_ranks(1, _list, stage)
    assert set(found.values()) <= {"equal", "refused"}, found


def _repoint(rank, world_size, stage):
    found = {}
    for name in ("p", "data", "detach", "clone", "grad"):
        for title, write in REPOINTING.items():
            found[name, title] = repointed(write, TENSORS[name], stage)
    return found


def repointed(write, tensor, stage):
    """Outcome of two steps after `write`: "equal", "refused", or what is wrong."""
    x = torch.linspace(-1, 1, 8).view(2, SIZE)
    reference = Net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    torch_error = trained(
        write, tensor, reference, lambda: reference(x).backward(), optimizer.step,
        optimizer.zero_grad,
    )  # fmt: skip
    net = Net()
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], ZeroConfig(stage=stage))
    error = trained(
        write, tensor, net, lambda: engine.backward(net(x)), engine.step, engine.zero_grad
    )
    if error is not None:
        is_clear = "weight" in error and ("gathered(" in error or "full_grad(" in error)
        if write is REPOINTING["swap_tensors"]:  # torch's own error, before it swaps
            is_clear |= error.startswith("RuntimeError: Cannot swap t1 because it has weakref")
        return "refused" if is_clear or torch_error is not None else f"unclear: {error}"
    if torch_error is not None:
        return f"torch raises {torch_error}"
    with gathered(net):
        values = net.weight.detach().clone()
    engine.close()  # the last values are those that a user gets
    is_right = same(values, reference.weight) and same(net.weight, reference.weight)
    return "equal" if is_right else f"{values}, expected {reference.weight}"


def trained(write, tensor, net, backward, step, zero_grad):
    """Writes before the first of two steps, and after the last; returns the text of an error."""
    try:
        for is_last in (False, False, True):
            backward()
            with torch.no_grad():
                write(tensor(net.weight))
            if not is_last:
                step()
                zero_grad()
    except Exception as refused:
        return f"{type(refused).__name__}: {refused}"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_tensor_gets_another_memory_as_in_torch_or_by_one_error(stage):
    for found in run_ranks(2, _repoint, stage):
        assert set(found.values()) <= {"equal", "refused"}, found
        assert {found["p", title] for title in ("data", "set_")} == {"equal"}
        assert found["p", "swap_tensors"] == "refused"
