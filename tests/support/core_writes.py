"""Ways in which users write to a parameter, and moments at which they do: programs of core_runs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["UNCOUNTED", "WRITES_BY_MOMENT"]


def in_place(p):
    with torch.no_grad():
        p.mul_(0.5)


def by_data(p):
    p.data.mul_(0.5)


def by_detached(p):
    p.detach().mul_(0.5)


def by_foreach(p):
    torch._foreach_mul_([p.data], 0.5)


def by_initialization(p):
    nn.init.constant_(p, 0.25)


def by_kept_data(p):
    kept = p.data
    kept.norm()
    kept.clamp_(-0.1, 0.1)


def by_assignment(p):
    p.data = p.data * 0.5


def by_transposed(p):
    p.data.t().mul_(0.5)


def by_broadcast(p):
    p.data.mul_(0.5 + dist.get_rank())
    dist.broadcast(p.data, 0)


def by_all_reduce(p):
    dist.all_reduce(p.data, op=dist.ReduceOp.SUM)


@torch.no_grad()
def by_all_reduce_of_parameter(p):
    dist.all_reduce(p, op=dist.ReduceOp.SUM)


@torch.no_grad()
def by_all_gather(p):
    half = torch.full_like(p, 0.5)
    dist.all_gather([p, *(torch.empty_like(half) for _ in range(dist.get_world_size() - 1))], half)


@torch.no_grad()
def by_scatter(p):
    half = torch.full_like(p, 0.5)
    dist.broadcast(half, 0)
    dist.scatter(p, [half] * dist.get_world_size() if dist.get_rank() == 0 else None, 0)


def by_array(p):
    bits = p.data.view(torch.uint16 if p.element_size() == 2 else torch.uint32)
    bits.numpy()[:] ^= 1 << (8 * p.element_size() - 1)  # the sign


def by_row(p):
    p[0].data.zero_()


def by_all_reduce_of_it(p):
    dist.all_reduce(p.detach(), op=dist.ReduceOp.SUM)


@torch.library.custom_op("zero_core::halve", mutates_args=("x",))
def halve(x: torch.Tensor) -> None:
    x.mul_(0.5)


def by_custom_operator(p):
    halve(p.data)


ELEMENTWISE_WAYS = [
    in_place, by_data, by_detached, by_foreach, by_initialization, by_kept_data, by_assignment,
]  # fmt: skip
# The last one marks the memory for good: all writes to it are found from then on.
OTHER_WAYS = [
    by_transposed, by_broadcast, by_all_reduce, by_all_reduce_of_it, by_all_reduce_of_parameter,
    by_all_gather, by_scatter, by_custom_operator, by_array,
]  # fmt: skip


def before_use(way):
    """A write in the forward of the module, before the use."""

    def program(run):
        for block in run.net.blocks:
            block.before = lambda block: way(block.weight)
        run.train()
        for block in run.net.blocks:
            block.before = None
        run.train()

    return program


def after_use(way):
    """A write in the forward of the module, after the use; autograd has kept the parameter."""

    def program(run):
        run.net.blocks[1].after = lambda block: way(block.weight)
        run.train()
        run.net.blocks[1].after = None
        run.train()

    return program


def before_backward(way):
    """A write between the forward and its backward."""

    def program(run):
        loss = run.loss()
        way(run.net.blocks[1].weight)
        run.call_backward(loss)
        run.step()
        run.train()

    return program


def between_steps(way):
    def program(run):
        run.train()
        for block in run.net.blocks:
            way(block.weight)
        run.train()

    return program


def _by_way(moment, ways):
    return {f"{way.__name__}, {moment.__name__}": moment(way) for way in ways}


WRITES_BY_MOMENT = {
    "written before use": _by_way(before_use, ELEMENTWISE_WAYS + OTHER_WAYS),
    "written after use": _by_way(after_use, ELEMENTWISE_WAYS + OTHER_WAYS),
    "written between steps": _by_way(between_steps, ELEMENTWISE_WAYS),
    "written between steps in other ways": _by_way(between_steps, [by_row, *OTHER_WAYS]),
    "set before backward": _by_way(before_backward, [by_assignment]),
}
# Version counters do not know of these, or they belong to the new data: torch goes on.
_UNCOUNTED_WAYS = [
    by_all_reduce, by_all_reduce_of_it, by_all_reduce_of_parameter, by_scatter, by_array,
    by_assignment,
]  # fmt: skip
UNCOUNTED = {f"{way.__name__}, after_use" for way in _UNCOUNTED_WAYS}
