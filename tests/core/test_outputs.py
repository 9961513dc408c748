"""Modules change the outputs and inputs of their units in place before backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_zero import Engine, ZeroConfig
from tests.support.cells import slow_but
from tests.support.warm import run_ranks

WIDTH = 8
Way = Callable[[nn.ModuleList, Tensor], Tensor]


class Uses(nn.Module):
    """Two linear layers, each a unit, with a use of the outputs between them."""

    def __init__(self, way: Way, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layer() for _ in range(2))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.blocks, x).square().mean()


def between(change: Callable[[Tensor], Tensor]) -> Way:
    return lambda blocks, x: blocks[1](change(blocks[0](x)))


def sliced(x: Tensor) -> Tensor:
    x[:, 0] = x[:, 1] * 2
    return x


def sliced_again(x: Tensor) -> Tensor:
    x[:, 1:].transpose(0, 1)[0].mul_(3)
    x.view(-1)[::2].add_(1)
    return x


def added(x: Tensor) -> Tensor:
    x += x.detach().sin()
    return x


IN_PLACE = [
    *(
        nn.ReLU(True),
        nn.ELU(inplace=True),
        nn.SiLU(True),
        nn.LeakyReLU(inplace=True),
        nn.CELU(1, True),
    ),
    *(nn.Hardtanh(inplace=True), nn.SELU(True), nn.Mish(True), nn.Hardswish(True), nn.ReLU6(True)),
    *(nn.Threshold(0.1, 0, True), nn.Hardsigmoid(True), nn.RReLU(inplace=True).eval()),
    nn.Dropout(0.0, inplace=True),
    *(torch.sigmoid_, Tensor.exp_, Tensor.tanh_, lambda x: x.clamp_(-1, 1)),
    *(added, sliced, sliced_again, lambda x: x.div_(x.detach().norm(dim=-1, keepdim=True) + 1)),
    lambda x: x.transpose(1, 2).sin_()[:, 1:].mul_(2).mean(1)[..., None].expand_as(x),
    lambda x: F.relu_(x.view(-1)[: x.shape[0] * 3 * WIDTH]).view_as(x),
]


class Begins(nn.Module):
    """A layer that writes to its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.relu_())


class Writes(nn.Module):
    """A layer that returns nothing and writes its result into its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, into: Tensor) -> None:
        into[:, 1:] = self.linear(x).tanh()[:, 1:]


def through_memory(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    memory = torch.zeros_like(x)
    blocks[0](x, memory)
    blocks[1](memory.clone(), memory)
    return memory


@dataclass
class Result:
    hidden: Tensor
    parts: list[Tensor]


class Returns(nn.Module):
    """A layer that returns views in a container."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: Tensor) -> object:
        y = self.linear(x)
        if self.kind is Result:
            return Result(y[:, :1], [y[:, 1:]])
        if self.kind is dict:
            return {"hidden": y[:, :1], "parts": [y[:, 1:]]}
        return y[:, :1], [y[:, 1:]]


def joined(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        y = block(x)
        if isinstance(y, Result):
            y = y.hidden, y.parts
        one, (other,) = y.values() if isinstance(y, dict) else y
        one.mul_(2)
        other.add_(1).div_(3)
        x = torch.cat([one, other], 1)
    return x


def checkpointed(use_reentrant: bool) -> Way:
    def way(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in blocks:
            x = checkpoint(lambda x, block=block: block(x).relu_(), x, use_reentrant=use_reentrant)
            x = x.view(-1, WIDTH).tanh().view(x.shape)
        return x

    return way


def hooked(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    y = blocks[0](x)
    y.register_hook(lambda g: g * 2)
    y.relu_()
    y.register_hook(lambda g: g + 1)
    return blocks[1](y)


def twice(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    y = blocks[0](x).tanh_()
    return blocks[1](y) + blocks[1](blocks[0](y).sin_())


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


WAYS: list[tuple[Way, Callable[[], nn.Module]]] = [
    *((between(change), linear) for change in IN_PLACE),
    (between(lambda x: x), Begins),
    (through_memory, Writes),
    *((joined, lambda kind=kind: Returns(kind)) for kind in (tuple, dict, Result)),
    (checkpointed(False), linear),
    (checkpointed(True), linear),
    (hooked, linear),
    (twice, linear),
]


class Together(nn.Module):
    """All of `WAYS`, each with its own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(Uses(way, layer) for way, layer in WAYS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([way(x.clone()) for way in self.ways]).sum()


def _train(rank: int, world_size: int, stage: int) -> None:
    warnings.filterwarnings("ignore", ".*may contain tensors")
    torch.manual_seed(0)
    module = Together()
    plain = copy.deepcopy(module)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    units = {"unit_classes": ["ways.*.blocks.*"]} if stage == 3 else {}
    engine = Engine(module, [sgd], ZeroConfig(stage=stage, **units))
    for step in range(3):
        x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(step))
        loss, expected = module(x), plain(x)
        torch.testing.assert_close(loss, expected)
        again = step == 1
        for _ in range(1 + again):
            engine.backward(loss, retain_graph=again)
            expected.backward(retain_graph=again)
        engine.step()
        engine.zero_grad()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    engine.close()
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("stage", slow_but((3,), (1, 2, 3)))
def test_in_place_changes_of_unit_inputs_and_outputs_train_as_in_plain_torch(stage):
    run_ranks(2, _train, stage)


def _units_left_unsharded(rank: int, world_size: int) -> list[str]:
    module = Uses(between(lambda x: x), Begins)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(module, [sgd], ZeroConfig(stage=3))
    x = torch.ones(2, 3, WIDTH, requires_grad=True)
    loss = module(x * 2)
    seen: list[str] = []
    x.register_hook(
        lambda _: seen.extend(u.name for u in engine.coordinator.units[1:] if u.is_unsharded)
    )
    for _ in range(2):
        engine.backward(loss, retain_graph=True)
    engine.close()
    return seen


def test_a_unit_that_writes_to_its_input_is_resharded_after_each_backward():
    assert run_ranks(1, _units_left_unsharded) == [[]]
