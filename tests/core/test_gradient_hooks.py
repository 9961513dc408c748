"""Hooks that run after a gradient has been accumulated, registered before and after the engine."""

import pytest
import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig, full_grad
from tests.support.warm import run_ranks


def _replace(parameter):
    parameter.grad = parameter.grad * 3


def _edit(parameter):
    parameter.grad.mul_(3)


def _drop(parameter):
    parameter.grad = None


HOOKS = {"replace": _replace, "edit": _edit, "drop": _drop}


def _module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def _batch(step, rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def _gradients(rank, world_size, stage, is_before):
    found = {}
    for name, hook in HOOKS.items():
        module = _module()
        chosen = [module[0].weight, module[2].bias]
        if is_before:
            [parameter.register_post_accumulate_grad_hook(hook) for parameter in chosen]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine = Engine(module, [optimizer], ZeroConfig(stage=stage, reduce_bucket_size=30))
        if not is_before:
            [parameter.register_post_accumulate_grad_hook(hook) for parameter in chosen]
        for step in range(3):
            if step == 2:  # two micro-batches
                with engine.no_sync():
                    engine.backward(module(_batch(3, rank)).square().sum())
            engine.backward(module(_batch(step, rank)).square().sum())
            grads = [full_grad(parameter) for parameter in module.parameters()]
            found[name, step] = [None if one is None else one.clone() for one in grads]
            engine.zero_grad()
        engine.close()
    return found


@pytest.mark.default_cases("False-3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("is_before", [True, False])
def test_what_a_hook_makes_of_a_gradient_is_averaged(stage, is_before):
    found, _ = run_ranks(2, _gradients, stage, is_before)
    for (name, step), grads in found.items():
        first, module = _module(), _module()
        for rank in range(2):
            (module(_batch(step, rank)).square().sum() / 2).backward()
            (first(_batch(3, rank)).square().sum() / 2).backward()
        for (own, parameter), grad in zip(module.named_parameters(), grads, strict=True):
            is_chosen = own in ("0.weight", "2.bias")
            if is_chosen and name == "drop":
                assert grad is None, (name, step, own)
            else:
                expected = parameter.grad * (3 if is_chosen else 1)
                if step == 2:
                    times = 3 if is_chosen else 1
                    # In stages 0 and 1 a hook sees the sum of both, of which the first was changed.
                    times *= times if stage < 2 else 1
                    expected = expected + first.get_parameter(own).grad * times
                torch.testing.assert_close(grad, expected, msg=f"{name}, step {step}, {own}")
