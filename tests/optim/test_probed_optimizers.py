"""Optimizers with states, in double precision, or with options that change in a run."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig
from tests.support.cells import SHARDED_STAGE
from tests.support.warm import run_ranks

BUILDERS = {
    "fused Adagrad": partial(torch.optim.Adagrad, lr=0.1, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.1),
}


def _step(model, x, optimizer, engine=None):
    losses = [model(part).square().mean() for part in x]
    if engine is not None:
        engine.backward(losses[torch.distributed.get_rank()])
    else:
        (sum(losses) / len(losses)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _train_doubles(rank, world_size, stage):
    for name, build in BUILDERS.items():
        torch.manual_seed(0)
        modules = [nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double() for _ in range(2)]
        modules[1].load_state_dict(modules[0].state_dict())
        optimizers = [build(module[0].parameters()) for module in modules]
        xs = torch.randn(4, world_size, 2, 4, dtype=torch.float64)
        for module, optimizer in zip(modules, optimizers, strict=True):  # states of an earlier run
            module[1].requires_grad_(False)
            _step(module, xs[0], optimizer)
        engine = Engine(modules[0], optimizers[:1], ZeroConfig(stage=stage))
        for number, x in enumerate(xs[1:]):
            if number == 1 and name == "AdamW":  # Adagrad has states for those it was built with
                for module, optimizer in zip(modules, optimizers, strict=True):
                    added = list(module[1].requires_grad_(True).parameters())
                    optimizer.add_param_group({"params": added})
            _step(modules[0], x, optimizers[0], engine)
            _step(modules[1], x, optimizers[1])
        engine.close()
        for one, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_optimizers_of_doubles_with_states_train_and_take_groups_in_a_run(stage):
    run_ranks(2, _train_doubles, stage)


SPARSE = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


def _train_embedding(rank, world_size, stage):
    for name, build in SPARSE.items():
        torch.manual_seed(0)
        ours, reference = (nn.Embedding(20, 4, sparse=True) for _ in range(2))
        reference.load_state_dict(ours.state_dict())
        optimizer, expected = build(ours.parameters()), build(reference.parameters())
        engine = Engine(ours, [optimizer], ZeroConfig(stage=stage))
        for ids in torch.randint(12, (3, world_size, 5)):
            _step(ours, ids, optimizer, engine)
            _step(reference, ids, expected)
        engine.close()
        torch.testing.assert_close(ours.weight, reference.weight, msg=name)


@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_an_embedding_with_sparse_gradients_trains_as_in_one_process(stage):
    run_ranks(2, _train_embedding, stage)


class Decaying(torch.optim.SGD):
    """Decays weights by the norm of each tensor, if weight decay is on.

    It has the name of a class that is known to be elementwise.
    """

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and group["weight_decay"]:
                    p.grad.add_(p / p.norm(), alpha=group["weight_decay"])
        return super().step(closure)


Decaying.__module__, Decaying.__name__ = "timm.optim.sgdw", "SGDW"


class Twice(torch.optim.SGD):
    """Calls its closure twice, if it has one."""

    def step(self, closure=None):
        loss = closure()
        closure()
        super().step()
        return loss


def _change_options(rank, world_size):
    module = nn.Linear(4, 5)
    optimizer = Decaying(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], ZeroConfig(stage=1))
    for number in range(3):
        optimizer.param_groups[0]["momentum"] = 0.5 + 0.1 * number
        engine.backward(module(torch.ones(2, 4)).sum())
        engine.step()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    engine.backward(module(torch.ones(2, 4)).sum())
    with pytest.raises(ValueError, match="SGDW must step full tensors, but weight was sharded"):
        engine.step()


def test_an_option_switched_on_in_a_run_is_probed():
    run_ranks(2, _change_options)


def _call_closure_twice(rank, world_size):
    module = nn.Linear(4, 5)
    optimizer = Twice(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], ZeroConfig(stage=1, assume_elementwise=True))

    def closure():
        loss = module(torch.ones(2, 4)).sum()
        engine.backward(loss)
        return loss

    with pytest.raises(RuntimeError, match="Twice calls its closure more than once in a step"):
        optimizer.step(closure)


def test_a_second_call_of_the_closure_is_an_error():
    run_ranks(2, _call_closure_twice)
