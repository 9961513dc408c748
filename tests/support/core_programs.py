"""Programs that train in every stage as with one process: uses of parameters and gradients.

A program is a function of a run (core_runs.py). It is called with a run of a plain module and with
a run of an engine, and must see the same values and leave the same ones. The tables are the rows of
docs/limits.md.
"""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn

from tests.support.core_runs import PlainRun, full, pairs

__all__ = ["GRADIENTS", "LOOKS", "SWAPS", "WRITES", "lerp", "momentum"]


# ---------------------------------------------------------------- swaps by reference


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
    """Trains, validates with the average, saves it, and continues from the trained weights."""
    ema = Average(run.net)
    for _ in range(2):
        run.train(), ema.update()
    for _ in range(2):
        ema.apply_shadow()
        run.evaluate(), run.see(run.net.state_dict())
        ema.restore()
        run.train(), ema.update()
    ema.apply_shadow(), ema.restore()
    run.evaluate()


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
    for a, b in zip(run.net.blocks[0].parameters(), run.net.target[2].parameters(), strict=True):
        a.data, b.data = b.data, a.data
    run.train()


def attack(run):
    """FGM: gradients of weights that are moved along their gradient, and then moved back."""
    for _ in range(2):
        run.backward()
        backup = {}
        for n, p in run.net.named_parameters():
            if p.requires_grad:
                backup[n] = p.data.clone()
                p.data.add_(0.1 * p.grad / p.grad.norm())
        run.backward()
        for n, values in backup.items():
            run.net.get_parameter(n).data = values
        run.step()


def attack_by_assignment(run):
    """AWP: as FGM, without in-place writes."""
    for _ in range(2):
        run.backward()
        backup = {n: p.data for n, p in run.net.named_parameters() if p.requires_grad}
        for n in backup:
            p = run.net.get_parameter(n)
            p.data = p.data + 0.1 * p.grad
        run.backward()
        for n, values in backup.items():
            run.net.get_parameter(n).data = values
        run.step()


@torch.no_grad()
def sharpness(run):
    """SAM (Foret et al., 2021): up along the gradient, and down with the gradient found there."""
    trained = [p for p in run.net.parameters() if p.requires_grad]
    for _ in range(2):
        with torch.enable_grad():
            run.backward()
        factor = 0.05 / (torch.stack([p.grad.norm(p=2) for p in trained]).norm() + 1e-12)
        steps = [p.grad * factor.to(p) for p in trained]
        for p, step in zip(trained, steps, strict=True):
            p.add_(step)
        run.optimizer.zero_grad()
        with torch.enable_grad():
            run.backward()
        for p, step in zip(trained, steps, strict=True):
            p.sub_(step)
        run.step()


def assign_in_forward(run):
    """A weight is replaced after its use, and a bias before its use."""

    def swap_used(block):
        block.weight.data = block.weight.data * 1.5

    def swap_unused(block):
        block.bias.data = torch.full((6,), 0.1, dtype=block.bias.dtype)

    run.net.blocks[1].after, run.net.blocks[0].before = swap_used, swap_unused
    run.train()
    run.net.blocks[1].after = run.net.blocks[0].before = None
    run.train()


def clamp_in_forward(run):
    """`weight.data.clamp_()` before the use, as in quantized and spectral layers."""

    def clamp(block):
        block.weight.data.clamp_(-0.1, 0.1)

    def scale(block):
        block.bias.data.mul_(0.5)

    for block in run.net.blocks:
        block.before, block.after = clamp, scale
    run.train(), run.train()
    for block in run.net.blocks:
        block.before = block.after = None
    run.evaluate()


def assign(run):
    """`p.data = x` with values of another parameter, full, transposed, and its own ones."""
    a, b, c = (block.weight for block in run.net.blocks)
    values = torch.linspace(-0.5, 0.5, 36).view(6, 6)
    run.train()
    a.data = (b.data * 1).clone()
    a.data = a.data
    b.data = values.to(b.dtype).t()
    with torch.no_grad():
        c.set_(values.to(c.dtype, copy=True))
    run.train()
    b.data = b.data * 2
    run.train()


def initialize(run):
    run.train()
    nn.init.constant_(run.net.blocks[1].weight, 0.25)
    nn.init.zeros_(run.net.blocks[1].bias)
    nn.init.ones_(run.net.scale)
    run.train()


SWAPS = {
    program.__name__: program
    for program in (
        average, keep_a_backup_over_steps, swap_two, swap_units, attack, attack_by_assignment,
        sharpness, assign_in_forward, clamp_in_forward, assign, initialize,
    )
}  # fmt: skip


# ---------------------------------------------------------------- writes between steps


@torch.no_grad()
def lerp(net, saved):
    for t, s in pairs(net):
        t.lerp_(s, 0.1)


@torch.no_grad()
def momentum(net, saved):
    for t, s in pairs(net):
        t.mul_(0.9).add_(s, alpha=0.1)
        t.add_((1 - 0.9) * s.detach())


def data(net, saved):
    for t, s in pairs(net):
        t.data.mul_(0.9).add_(s.detach().data, alpha=0.1)
        t.data = 0.9 * t.data + (1 - 0.9) * s.data


@torch.no_grad()
def foreach(net, saved):
    targets, sources = zip(*pairs(net), strict=True)
    torch._foreach_mul_(targets, 0.9)
    torch._foreach_add_(targets, sources, alpha=0.1)
    torch._foreach_lerp_(list(net.target.parameters()), list(net.blocks.parameters()), 0.1)


@torch.no_grad()
def copied(net, saved):
    for t, s in pairs(net):
        t.copy_(0.9 * t + 0.1 * s)
        t.data.copy_(s.data * 0.5)


@torch.no_grad()
def operators(net, saved):
    for t, s in pairs(net):
        t *= 0.9
        t += 0.1 * s
        t -= torch.sign(s) * 0.01


@torch.no_grad()
def with_out(net, saved):
    for t, s in pairs(net):
        torch.add(t, s, alpha=0.1, out=t)
        torch.clamp(t, -0.3, 0.3, out=t)


@torch.no_grad()
def from_full(net, saved):
    for t in net.target.parameters():
        t.add_(torch.linspace(-0.1, 0.1, t.numel()).view(t.shape))
        t.copy_(t * torch.full(t.shape, 0.9))
        t.mul_(torch.arange(t.numel()).view(t.shape) % 3 != 1)
        t.masked_fill_(t > 0.3, 0.3)


@torch.no_grad()
def to_full(net, saved):
    """An average outside of the module, full on every rank (timm's, torch_ema)."""
    for n, s in net.named_parameters():
        shadow = saved.setdefault(n, torch.zeros(s.shape))
        shadow.sub_(0.1 * (shadow - s))
        shadow.lerp_(s.float(), 0.1)


@torch.no_grad()
def to_own_dtype(net, saved):
    """An average in the dtype of the parameters, which torch does not promote."""
    for n, s in net.blocks.named_parameters():
        shadow = saved.setdefault(n, torch.zeros(s.shape, dtype=s.dtype))
        shadow.lerp_(s, 0.25)
        torch._foreach_lerp_([shadow], [s.data], 0.25)
        s.lerp_(shadow, 0.5)
        torch._foreach_lerp_([s.data], [shadow], 0.5)
        s.data = torch.lerp(s, shadow, torch.full(s.shape, 0.5, dtype=s.dtype))


@torch.no_grad()
def swapped(net, saved):
    """torch_ema's `store`, `copy_to` and `restore`."""
    kept = [s.clone() for s in net.blocks.parameters()]
    for t, s in pairs(net):
        s.data.copy_(t.data)
    saved["norms"] = [s.norm() for s in net.blocks.parameters()]
    for s, values in zip(net.blocks.parameters(), kept, strict=True):
        s.copy_(values)


def loaded(net, saved):
    net.target.load_state_dict(saved.get("state", net.blocks.state_dict()))
    saved["state"] = copy.deepcopy(net.blocks.state_dict())


def averaged_model(net, saved):
    if "swa" not in saved:
        saved["swa"] = torch.optim.swa_utils.AveragedModel(net.blocks)
    saved["swa"].update_parameters(net.blocks)


def merged(net, saved):
    """peft: merged around a validation, and taken back."""
    weight = net.blocks[0].weight
    delta = torch.outer(torch.linspace(-1, 1, 6), torch.linspace(0, 1, 6)).to(weight.dtype)
    weight.data += delta
    saved["merged"] = weight.detach().sum()
    weight.data -= delta
    weight.data = weight.data + 0.5 * delta


@torch.no_grad()
def clipped(net, saved):
    for p in net.parameters():
        p.clamp_(-0.2, 0.2)


@torch.no_grad()
def normalized(net, saved):
    for p in net.parameters():
        p.data.div_(p.data.norm())
        p.data.mul_(p.data.abs() > 0.01 * p.data.abs().max())
        p.data.copy_(torch.round(p.data / p.data.abs().max() * 127) / 127)


def moved(net, saved):
    net.to("cpu").cpu().requires_grad_(True).target.requires_grad_(False)


def _write_twice(write):
    def program(run):
        saved = {}
        for _ in range(2):
            run.train()
            write(run.net, saved)
        run.see(saved)
        run.train()

    return program


WRITES = {
    write.__name__: _write_twice(write)
    for write in (
        lerp, momentum, data, foreach, copied, operators, with_out, from_full, to_full,
        to_own_dtype, swapped, loaded, averaged_model, merged, clipped, normalized, moved,
    )
}  # fmt: skip


# ---------------------------------------------------------------- looks between steps


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@torch.no_grad()
def part_called(net):
    net.eval()
    result = net.blocks[0](torch.ones(2, 6, dtype=net.scale.dtype))
    net.train()
    return result


# Functions of a tensor `t`, such as `p.data` or `p.grad`, and of a parameter `p`.
REDUCTIONS = {
    "norms": lambda t, p: [t.norm(), t.data.norm(2), t.norm(p=1), t.flatten().norm(dim=0)],
    "norms of linalg": lambda t, p: [torch.linalg.norm(t), torch.linalg.vector_norm(t, torch.inf)],
    "sums": lambda t, p: [t.sum(), t.view(-1).sum(0), t.double().sum(), t.mean(), (t > 0).sum()],
    "sum, kept": lambda t, p: t.sum(dim=tuple(range(t.dim())), keepdim=True),
    "extremes": lambda t, p: [t.max(), t.min(), t.abs().amax(), torch.amin(t)],
    "any, all": lambda t, p: [(t > 0).any(), (t > -100).all(), torch.isfinite(t).all()],
    "items": lambda t, p: [t.norm().item(), t.mean().item(), bool((t != t).any())],
    "equal": lambda t, p: [torch.equal(t, t.clone()), torch.equal(t, t + 1), torch.equal(t, p)],
    "cosine": lambda t, p: [
        (t * p).sum() / (t.norm() * (2 * t).norm()),
        torch.cosine_similarity(t.flatten(), p.detach().to(t.dtype).flatten(), dim=0),
    ],
    "norms by foreach": lambda t, p: torch._foreach_norm([t, 2 * t]),
    "shape": lambda t, p: [list(t.shape), t.numel(), t.dim(), t.stride(), t.element_size() > 0],
}
ELEMENTWISE = {
    "operators": lambda t, p: [2 * t, t - 1, -t, t / 3, 1 / (t + 9), abs(t), t**2, 2**t],
    "comparisons": lambda t, p: [t != 0, t > 0, t == t, ~(t < 0), (t > 0) & (t < 1)],
    "with a parameter": lambda t, p: [t * p, p * t, torch.addcmul(t, p, p), (p - 0.1 * t).square()],
    "with full tensors": lambda t, p: [
        t * (torch.arange(t.numel()).view(t.shape) % 3),
        torch.where(torch.ones(t.shape) > 0, t, 0.0),
        torch.max(t, torch.zeros(t.shape, dtype=t.dtype)),
    ],
    "functions": lambda t, p: [t.sign(), t.clamp(-0.1, 0.1), t.exp(), torch.maximum(t, 2 * t)],
    "dtypes": lambda t, p: [t.double(), t.bfloat16(), t.to(torch.float64), t.half().float()],
    "like": lambda t, p: [torch.zeros_like(t), torch.ones_like(t), torch.full_like(t, 2.0)],
    "copies": lambda t, p: [t.clone(), t.detach(), copy.deepcopy(t), t.contiguous(), t.cpu()],
    "shapes": lambda t, p: [t.view(-1), t.flatten(), t.view(1, -1), t.reshape(1, -1)],
    "foreach": lambda t, p: [
        *torch._foreach_mul([t, t + 1], 3.0),
        *torch._foreach_add([t, t], [p, p]),
        *torch._foreach_mul([t, t + 1], torch.tensor(2.0)),
    ],
}
COPIES = {
    "state dict": lambda n: n.state_dict(),
    "state dict of a part": lambda n: n.blocks[2].state_dict(prefix="x."),
    "state dict, cloned": lambda n: {k: v.clone().half() for k, v in n.state_dict().items()},
    "state dict, saved": lambda n: saved_and_loaded(n.state_dict()),
    "state dict, copied": lambda n: copy.deepcopy(n.state_dict()),
    "parameters, saved": lambda n: saved_and_loaded(list(n.parameters())),
    "parameters, pickled": lambda n: pickle.loads(pickle.dumps(list(n.blocks.parameters()))),
    "a parameter, copied": lambda n: copy.deepcopy(n.blocks[0].weight),
    "data, saved": lambda n: saved_and_loaded([p.data for p in n.parameters()]),
    "module, copied": lambda n: copy.deepcopy(n),
    "module, saved": lambda n: saved_and_loaded(n),
    "part, pickled": lambda n: pickle.loads(pickle.dumps(n.target)),
    "module, called": lambda n: copy.deepcopy(n).float().eval()(torch.ones(3, 6)),
    "part, called": part_called,
}


def _answers(run, table, *arguments):
    """By title, what each look gives, or the text of its error."""
    found = {}
    for title, look in table.items():
        try:
            found[title] = full(look(*arguments))
        except Exception as error:
            if type(run) is PlainRun:
                raise
            found[title] = f"{type(error).__name__}: {error}"
    return found


def look_at_parameters(run):
    """At parameters and their data, also together with a parameter that has other shards."""
    run.train()
    with torch.no_grad():
        for t, s in pairs(run.net)[:2]:
            run.see(_answers(run, REDUCTIONS | ELEMENTWISE, s, t))
            run.see(_answers(run, REDUCTIONS | ELEMENTWISE, s.data, t.detach()))
        run.see(_answers(run, REDUCTIONS | ELEMENTWISE, run.net.scale, run.net.scale.data))
    run.train()


def look_at_gradients(run):
    run.backward()
    with torch.no_grad():
        for p in (*run.net.blocks[1].parameters(), run.net.scale):
            run.see(_answers(run, REDUCTIONS | ELEMENTWISE, p.grad, p))
    run.step()


def copy_all(run):
    run.train()
    run.see(_answers(run, COPIES, run.net))
    run.train()


LOOKS = {program.__name__: program for program in (look_at_parameters, look_at_gradients, copy_all)}


# ---------------------------------------------------------------- gradients before a step


@torch.no_grad()
def decay(p):
    p.grad.add_(p, alpha=0.1)


def decay_in_autograds_sight(p):
    p.grad.add_(p, alpha=0.1)
    p.grad.mul_(p)


def set_in_autograds_sight(p):
    p.grad = (p.grad * 0.5 + p * p.grad).detach()


def decay_data(p):
    p.grad.data.add_(p.data, alpha=0.1)


def _mask(t):
    return (torch.arange(t.numel()).view(t.shape) % 3 == 1).to(t.dtype)


def mask_out(p):
    p.grad.mul_(_mask(p.grad))


def scale(p):
    p.grad = p.grad * 3


def scale_data(p):
    p.grad.data = p.grad.data * 3


def clip_each(p):
    p.grad.mul_(torch.clamp(0.1 / (p.grad.norm() + 1e-6), max=1.0))


def normalize(p):
    p.grad /= p.grad.norm() + 1e-6


def set_full(p):
    p.grad = _mask(p)


def set_expanded(p):
    p.grad = torch.ones((), dtype=p.dtype).expand(p.shape)


def set_sparse(p):
    p.grad = torch.where(p.grad.abs() > 0.5 * p.grad.abs().max(), p.grad, 0.0)


def set_none(p):
    p.grad = None


def zero(p):
    p.grad.zero_()


def copy_in(p):
    p.grad.copy_(_mask(p))


def fill_by_foreach(p):
    torch._foreach_mul_([p.grad], 0.5)
    torch._foreach_add_([p.grad], [p.data.to(p.grad.dtype)])


def _change(change):
    def program(run):
        for number in range(2):
            run.backward()
            for p in run.net.parameters():
                if p.requires_grad:
                    change(p)
                    if type(run) is PlainRun and p.grad is not None:
                        p.grad = p.grad.detach().clone()
            if number and change is not set_none:
                run.see(run.clip(0.5))
            run.step()

    return program


def keep_over_zero_grad(run):
    run.backward()
    kept = [p.grad for p in run.net.blocks.parameters()]
    run.step()
    run.train()
    run.see([grad * 2 for grad in kept])


def set_without_a_backward(run):
    for p in run.net.parameters():
        if p.requires_grad:
            p.grad = _mask(p)
    run.step()
    run.train()


def clip_by_torch(run):
    run.backward()
    run.see(torch.nn.utils.clip_grad_norm_(run.net.parameters(), 0.1))
    run.step()
    run.backward()
    torch.nn.utils.clip_grad_value_(run.net.parameters(), 0.01)
    run.step()


def zero_states(run):
    run.train()
    for p in run.net.blocks[1].parameters():
        run.optimizer.state[p]["momentum_buffer"].zero_()
    run.train()


GRADIENTS = {
    **{
        change.__name__: _change(change)
        for change in (
            decay, decay_in_autograds_sight, set_in_autograds_sight, decay_data, mask_out, scale,
            scale_data, clip_each, normalize, set_full, set_expanded, set_sparse, set_none, zero,
            copy_in, fill_by_foreach,
        )
    },
    "keep_over_zero_grad": keep_over_zero_grad,
    "set_without_a_backward": set_without_a_backward,
    "clip_by_torch": clip_by_torch,
    "zero_states": zero_states,
}  # fmt: skip
