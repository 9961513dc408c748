"""Runs of a program with a plain module and with an engine, and what differs between them."""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import Engine, gathered

__all__ = ["Net", "PlainRun", "ZeroRun", "compared", "difference", "full", "pairs"]


class Layer(nn.Linear):
    """A layer that calls `before` and `after` around the use of its parameters."""

    before = after = None

    def forward(self, x):
        if self.before is not None:
            self.before(self)
        x = super().forward(x)
        if self.after is not None:
            self.after(self)
        return x


class Net(nn.Module):
    """A model whose target is averaged by hand, and sharded at other offsets."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.target = copy.deepcopy(self.blocks).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        y = self.norm(x)
        for block, frozen in zip(self.blocks, self.target, strict=True):
            x, y = block(x).tanh(), frozen(y).tanh()
        return ((x - y) * self.scale).square().mean()


# ---------------------------------------------------------------- runs


class PlainRun:
    """Runs a program with a plain module.

    Attributes:
        net: The module.
        optimizer: Its optimizer.
        dtype: Dtype of the inputs.
        seen: Values that the program has seen.
    """

    def __init__(self, net, dtype=torch.float32):
        self.net, self.dtype = net, dtype
        trainable = [p for p in net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
        self.begin()

    def begin(self):
        self.seen, self._number = [], 0

    def loss(self):
        self._number += 1
        x = torch.linspace(-1, 1, 24).view(4, 6).cos() * self._number
        return self.net(x.to(self.dtype))

    def backward(self):
        loss = self.loss()
        self.see(loss)
        self.call_backward(loss)

    def call_backward(self, loss):
        loss.backward()

    def clip(self, norm):
        return torch.nn.utils.clip_grad_norm_(self.net.parameters(), norm)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self):
        self.backward()
        self.step()

    def evaluate(self):
        with torch.no_grad():
            self.see(self.loss())

    def see(self, value):
        self.seen.append(full(value))

    def end(self):
        """Values of the module at the end, after those that the program has seen."""
        return [*self.seen, full(self.net.state_dict())]


class ZeroRun(PlainRun):
    """Runs a program with an engine."""

    def __init__(self, net, config):
        super().__init__(net, config.param_dtype or torch.float32)
        self.engine = Engine(net, [self.optimizer], config)

    def begin_at(self, start):
        """Begins a program with the values of `start`, a plain module."""
        self.begin()
        self.optimizer.zero_grad()
        self.optimizer.state.clear()
        with gathered(self.net, writeback=True):
            self.net.load_state_dict(start.state_dict())

    def call_backward(self, loss):
        self.engine.backward(loss)

    def clip(self, norm):
        return self.engine.clip_grad_norm_(norm)

    def end(self):
        with gathered(self.net):
            return super().end()


def full(value):
    """`value` with full, plain copies of its tensors."""
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [full(item) for item in value]
    if isinstance(value, nn.Module):
        return full(value.state_dict())
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value).clone()


def difference(ours, expected, dtype=torch.float32):
    """Text about the first difference of two results; None if they are equal."""
    options = {"rtol": 1e-5, "atol": 1e-6}
    if dtype is not torch.float32:
        options = {"rtol": 5e-2, "atol": 2e-2, "check_dtype": False}
    try:
        torch.testing.assert_close(ours, expected, **options)
    except (AssertionError, TypeError, ValueError) as error:
        return str(error)
    return None


def compared(config, programs, start=None):
    """By name of a program, what is wrong with it. Collective: every rank."""
    torch.manual_seed(0)
    start, run, wrong = start or Net(), None, {}
    dtype = config.param_dtype or torch.float32
    for name, program in programs.items():
        run = run or ZeroRun(copy.deepcopy(start), config)
        found = _outcome(run, start, program, dtype)
        founds = [None] * dist.get_world_size()
        dist.all_gather_object(founds, found)
        if any(founds):
            wrong[name] = founds[dist.get_rank()]
            with suppress(Exception):
                run.engine.close()
            run = None
    if run is not None:
        run.engine.close()
    return wrong


def _outcome(run, start, program, dtype):
    plain = PlainRun(copy.deepcopy(start))
    try:
        program(plain)
        expected = plain.end()
    except RuntimeError as error:
        expected = f"torch raises {error}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run.begin_at(start)
            program(run)
            return difference(run.end(), expected, dtype)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for module in (*run.net.blocks, *run.net.target):
            module.before = module.after = None


def pairs(net):
    """Parameters of the target with those of the blocks."""
    return list(zip(net.target.parameters(), net.blocks.parameters(), strict=True))
