"""Shards of gradients exist from the first reduction until the gradients are zeroed."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig, full_grad
from lightning_zero.layout.stage import State
from tests.support.cells import slow_but
from tests.support.storage import live_storage_bytes
from tests.support.warm import run_ranks

CPU = {"offload_optimizer": "cpu"}
NVME = {"offload_optimizer": {"device": "nvme", "nvme_path": "swap", "max_in_cpu_bytes": 0}}


def _engine(**settings):
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return module, optimizer, Engine(module, optimizers=[optimizer], config=ZeroConfig(**settings))


def _measure(rank, world_size, settings, zero):
    """Bytes of gradients after a backward, a step, zeroing, and the next forward."""
    module, optimizer, engine = _engine(**settings)
    dtype = settings.get("param_dtype", torch.float32)

    def grad_bytes():
        return engine.memory_report().state_bytes(State.GRAD)

    def loss():
        return module(torch.ones(2, 32, dtype=dtype)).square().mean()

    found = []
    for _ in range(2):
        engine.backward(loss())
        found.append(grad_bytes())
        engine.step()
        found.append(grad_bytes())
        kept, values = module[0].weight.grad, module[0].weight.grad.full_tensor()
        if zero == "engine":
            engine.zero_grad()
        else:
            optimizer.zero_grad()
            loss()  # the next forward frees them
        found.append(grad_bytes())
        assert torch.equal(kept.full_tensor(), values)  # a gradient that the user holds stays
    engine.backward(loss())
    before = engine.grad_norm()
    engine.zero_grad(set_to_none=False)
    found.append(grad_bytes())
    engine.backward(loss())
    torch.testing.assert_close(engine.grad_norm(), before)  # added to zeros
    engine.close()
    return found


@pytest.mark.default_cases("settings1-4-optimizer")
@pytest.mark.parametrize("zero", ["engine", "optimizer"])
@pytest.mark.parametrize(
    ("settings", "shard_bytes"),
    [({"stage": 2}, 4), ({"stage": 3}, 4), ({"stage": 3, "param_dtype": torch.bfloat16}, 4)],
)
def test_shards_of_gradients_are_freed_when_gradients_are_zeroed(settings, shard_bytes, zero):
    num_bytes = shard_bytes * 3 * (32 * 32 + 32) // 2
    for found in run_ranks(2, _measure, settings, zero):
        reduced, stepped, zeroed, *again, filled_with_zeros = found
        assert reduced == stepped == filled_with_zeros == pytest.approx(num_bytes, rel=0.05)
        assert zeroed == 0
        assert again == [reduced, stepped, zeroed]


def _accumulate(rank, world_size):
    module, optimizer, engine = _engine(stage=3)
    x = torch.ones(2, 32)
    engine.backward(module(x).sum())
    once = module[1].weight.grad.full_tensor()
    loss = module(x).sum()  # a forward in between frees no gradient that is not zeroed
    loss.register_hook(lambda grad: engine.memory_report() and None)  # nor does a report
    engine.backward(loss)
    assert torch.allclose(module[1].weight.grad.full_tensor(), 2 * once)
    module[0].weight.grad = None  # only one of them
    module(x)
    assert torch.allclose(module[1].weight.grad.full_tensor(), 2 * once)
    engine.close()


def test_gradients_that_are_not_all_zeroed_stay():
    run_ranks(2, _accumulate)


def _zero_on_one_rank(rank, world_size):
    module, _, engine = _engine(stage=2, sharding_group_size=1)
    with engine.no_sync():
        engine.backward(module(torch.full((2, 32), 1.0 + rank)).sum())
    own = module[0].weight.grad.local.clone()
    if rank == 0:
        engine.zero_grad()
    engine.finish_reductions()
    grad = module[0].weight.grad
    is_kept = grad is not None and torch.equal(grad.local, own)
    engine.close()
    return grad is None, is_kept


def test_replicas_of_which_one_zeroed_its_gradients_do_not_wait_for_it():
    assert run_ranks(2, _zero_on_one_rank) == [(True, False), (False, True)]


class _Counting(torch.optim.SGD):
    """Records the live bytes whenever it steps a bucket."""

    live_bytes: list[int] = []

    def step(self, closure=None):
        _Counting.live_bytes.append(live_storage_bytes())
        return super().step(closure)


def _copies(rank, world_size):
    gc.freeze()  # older objects are not searched
    blocks = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
    module = nn.Sequential(nn.Linear(128, 128), blocks)
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    engine = Engine(module, [_Counting(module.parameters(), lr=0.1)], ZeroConfig(stage=3, **dtypes))
    for _ in range(2):
        engine.backward(module(torch.ones(2, 128, dtype=torch.bfloat16)).float().sum())
        _Counting.live_bytes = []
        engine.step()
    engine.close()
    return _Counting.live_bytes


def test_a_step_keeps_copies_of_one_bucket_at_a_time():
    (live_bytes,) = run_ranks(1, _copies)
    first, *others = live_bytes
    assert len(others) > 5
    assert max(others) <= first


def _hold(rank, world_size, settings):
    """Gradients that a user holds keep their values, and later gradients are right."""
    os.makedirs("swap", exist_ok=True)
    module, optimizer, engine = _engine(**settings)
    plain, _, alone = _engine(stage=0)
    alone.close()
    x = torch.ones(2, 32)
    held = []
    for number in range(1, 6):
        with engine.no_sync():
            engine.backward(module(number * x).square().mean())
        engine.backward(module(number * x).square().mean())
        for _ in range(2):
            plain(number * x).square().mean().backward()
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full_grad(p), q.grad)
        if number % 2:
            grad, values = module[1].weight.grad, full_grad(module[1].weight)
            held.append((grad, values))
            if number == 1:
                held.append((grad.detach(), values))
            engine.zero_grad() if number == 1 else optimizer.zero_grad()
            plain.zero_grad()
    del grad
    assert len(held) == 4
    for grad, values in held:
        assert torch.equal(grad.full_tensor() if settings["stage"] else grad, values)
    engine.close()


@pytest.mark.default_cases("settings9")
@pytest.mark.parametrize(
    "settings",
    slow_but(
        ({"stage": 0}, {"stage": 1}, {"stage": 3, **NVME}),
        [
            {"stage": 0},
            *({"stage": stage, **tier} for stage in (1, 2, 3) for tier in ({}, CPU, NVME)),
        ],
    ),
)
def test_a_gradient_that_a_user_holds_keeps_its_values_when_gradients_are_zeroed(settings):
    run_ranks(2, _hold, settings)
