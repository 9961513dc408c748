"""Programs that assign `parameter.data` and keep its old tensor train as with a plain module."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from lightning_zero import Engine, OffloadConfig, ZeroConfig, gathered
from tests.support.ranks import run_ranks


class Block(nn.Linear):
    def __init__(self):
        super().__init__(12, 12)
        # Called before and after the forward's use of the parameters.
        self.before = self.after = lambda block: None

    def forward(self, x):
        self.before(self)
        x = super().forward(x)
        self.after(self)
        return x


class Net(nn.Module):
    """In stage 3 each block is a unit that is unsharded for its own forward only."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().sum()


class Average:
    """The most common average of weights: it swaps tensors and never copies them."""

    def __init__(self, net):
        self.net = net
        self.shadow = {n: p.data.clone() for n, p in net.named_parameters()}
        self.backup = {}

    def update(self):
        for n, p in self.net.named_parameters():
            self.shadow[n] = (0.1 * p.data + 0.9 * self.shadow[n]).clone()

    def apply_shadow(self):
        for n, p in self.net.named_parameters():
            self.backup[n] = p.data
            p.data = self.shadow[n]

    def restore(self):
        for n, p in self.net.named_parameters():
            p.data = self.backup[n]
        self.backup = {}


def average(run):
    """Trains, validates with the average, and continues from the trained weights."""
    ema = Average(run.net)
    for _ in range(2):
        run.train(), ema.update()
    for _ in range(2):
        ema.apply_shadow()
        run.evaluate()
        ema.restore()
        run.train(), ema.update()
    ema.apply_shadow(), ema.restore()
    run.evaluate()


def save_the_average(run):
    ema = Average(run.net)
    run.train(), ema.update()
    ema.apply_shadow()
    run.save()
    ema.restore()
    run.train()


def keep_a_backup_over_steps(run):
    """The swapped-out weights keep their values while others are trained."""
    run.train()
    backup = {n: p.data for n, p in run.net.named_parameters()}
    for p in run.net.parameters():
        p.data = p.data * 0.5
    run.train(), run.train()
    for n, p in run.net.named_parameters():
        p.data = backup[n]
    run.train()


def swap_two(run):
    a, _, b = (block.weight for block in run.net.blocks)
    a.data, b.data = b.data, a.data
    run.train()
    a.data, b.data = b.data, a.data
    a.data, b.data = b.data, a.data
    run.train()


def swap_units(run):
    for a, b in zip(run.net.blocks[0].parameters(), run.net.blocks[2].parameters(), strict=True):
        a.data, b.data = b.data, a.data
    run.train()


def attack(run):
    """FGM: gradients of weights that are moved along their gradient, and then moved back."""
    for _ in range(2):
        run.backward()
        backup = {}
        for n, p in run.net.named_parameters():
            backup[n] = p.data.clone()
            p.data.add_(0.1 * p.grad / p.grad.norm())
        run.backward()
        for n, p in run.net.named_parameters():
            p.data = backup[n]
        run.step()


def attack_by_assignment(run):
    """AWP: as FGM, without in-place writes."""
    for _ in range(2):
        run.backward()
        backup = {n: p.data for n, p in run.net.named_parameters()}
        for p in run.net.parameters():
            p.data = p.data + 0.1 * p.grad
        run.backward()
        for n, p in run.net.named_parameters():
            p.data = backup[n]
        run.step()


def fail_while_swapped(run):
    ema = Average(run.net)
    run.train(), ema.update()
    ema.apply_shadow()
    run.fail()
    ema.restore()
    run.train()


def nothing(block):
    pass


def swap_in_forward(run):
    """A weight is replaced between its use and its backward, and a bias before its use."""

    def swap_used(block):
        block.weight.data = block.weight.data * 1.5

    def swap_unused(block):
        block.bias.data = torch.full((12,), 0.1, dtype=block.bias.dtype)

    run.net.blocks[1].after, run.net.blocks[0].before = swap_used, swap_unused
    run.train()
    run.net.blocks[1].after = run.net.blocks[0].before = nothing
    run.train()


def clamp_in_forward(run):
    """`weight.data.clamp_()` before and after the use, as in quantized and spectral layers."""

    def clamp(block):
        block.weight.data.clamp_(-0.1, 0.1)

    def scale(block):
        block.bias.data.mul_(0.5)

    for block in run.net.blocks:
        block.before, block.after = clamp, scale
    run.train(), run.train()
    for block in run.net.blocks:
        block.before = block.after = nothing
    run.evaluate()


def replace_by_parameter(run):
    a, b = run.net.blocks[0].weight, run.net.blocks[1].weight
    a.data = (b.data * 1).clone()
    a.data = a.data
    run.train()


PROGRAMS = [
    average,
    save_the_average,
    keep_a_backup_over_steps,
    swap_two,
    swap_units,
    attack,
    attack_by_assignment,
    fail_while_swapped,
    swap_in_forward,
    clamp_in_forward,
    replace_by_parameter,
]


class Plain:
    """Runs a program on a plain module; `seen` records its results."""

    def __init__(self, net, dtype=torch.float32):
        self.net = net
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3)
        self.x = torch.linspace(-1, 1, 24, dtype=dtype).view(2, 12)
        self.seen = []

    def backward(self):
        loss = self.net(self.x)
        self.seen.append(loss.item())
        loss.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self):
        self.backward()
        self.step()

    def evaluate(self):
        with torch.no_grad():
            self.seen.append(self.net(self.x).item())

    def save(self):
        self.seen += [p.detach().float().sum().item() for p in self.net.parameters()]

    def fail(self):
        pass


class Sharded(Plain):
    def __init__(self, net, dtype, config):
        super().__init__(net, dtype)
        self.engine = Engine(net, [self.optimizer], config)

    def backward(self):
        loss = self.net(self.x)
        self.seen.append(loss.item())
        self.engine.backward(loss)

    def save(self):
        with gathered(self.net):
            super().save()

    def fail(self):
        def fail(*args):
            raise KeyError

        handle = self.net.blocks[1].register_forward_hook(fail)
        with pytest.raises(KeyError):
            self.net(self.x)
        self.engine.reset()
        handle.remove()


def _run(rank, world_size, config, param_dtype, names):
    torch.manual_seed(0)
    start = Net()
    found = {}
    for program in PROGRAMS:
        if names is not None and program.__name__ not in names:
            continue
        plain = Plain(copy.deepcopy(start))
        program(plain)
        ours = Sharded(copy.deepcopy(start), param_dtype, config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            program(ours)
        ours.engine.close()
        plain.save(), Plain.save(ours)
        found[program.__name__] = plain.seen, ours.seen
    return found


FLOAT, HALF, SLOW = torch.float32, torch.bfloat16, pytest.mark.slow
CONFIGS = [
    *(pytest.param(ZeroConfig(stage=s), FLOAT, id=f"stage{s}") for s in (0, 1, 3)),
    pytest.param(ZeroConfig(stage=2), FLOAT, id="stage2", marks=SLOW),
    pytest.param(ZeroConfig(stage=3, reduce_bucket_size=20), FLOAT, id="buckets", marks=SLOW),
    pytest.param(ZeroConfig(stage=1, param_dtype=HALF), HALF, id="stage1-bf16", marks=SLOW),
    pytest.param(ZeroConfig(stage=3, param_dtype=HALF), HALF, id="stage3-bf16"),
    pytest.param(ZeroConfig(stage=1, offload_optimizer="cpu"), FLOAT, id="stage1-cpu", marks=SLOW),
    pytest.param(ZeroConfig(stage=3, offload_optimizer="cpu"), FLOAT, id="stage3-cpu", marks=SLOW),
]


def _assert_equal(found, tolerance):
    for results in found:
        for name, (plain, ours) in results.items():
            assert ours == pytest.approx(plain, rel=tolerance, abs=tolerance), name


@pytest.mark.default_cases("stage3-bf16")
@pytest.mark.parametrize(("config", "param_dtype"), CONFIGS)
def test_programs_that_assign_data_and_keep_the_old_values_train_as_a_plain_module(
    config, param_dtype
):
    found = run_ranks(2, _run, config, param_dtype, None)
    _assert_equal(found, 1e-5 if param_dtype == torch.float32 else 5e-2)


@pytest.mark.slow
def test_swaps_of_parameters_in_files_train_as_a_plain_module(tmp_path):
    offload = OffloadConfig("nvme", nvme_path=str(tmp_path))
    config = ZeroConfig(stage=3, offload_param=offload, offload_optimizer=offload)
    _assert_equal(run_ranks(2, _run, config, torch.float32, None), 1e-5)
