"""Groups of ranks in a hand-written loop: bytes stored, bytes sent between groups, other uses."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zero import Engine, ZeroConfig, full_grad, gathered
from lightning_zero.comm.communicator import Communicator
from lightning_zero.layout.stage import State
from tests.support.warm import run_ranks

STAGES = [1, 2, 3]


def make(stage, size=2, **options):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    reference = copy.deepcopy(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    config = ZeroConfig(stage=stage, sharding_group_size=size, **options)
    return Engine(module, [optimizer], config), module, reference


def loss_of(module, seed):
    generator = torch.Generator().manual_seed(seed)
    return module(torch.randn(4, 64, generator=generator)).square().sum()


def mean_grads(reference, losses):
    """Gradients of the sum of `losses`, averaged over all ranks."""
    for loss in losses:
        loss.backward()
    for parameter in reference.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return [parameter.grad for parameter in reference.parameters()]


def assert_grads(module, expected):
    for parameter, grad in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(full_grad(parameter), grad, rtol=1e-5, atol=1e-6)


def _each(rank, world_size, case, arguments):
    return [case(rank, world_size, *given) for given in arguments]


def run_each(case, arguments, world_size=4):
    """`case` with each of `arguments` on the same ranks; the results by case, then by rank."""
    ranks = run_ranks(world_size, _each, case, arguments)
    return list(zip(*ranks, strict=True))


def _bytes(rank, world_size, stage, size):
    engine, module, _ = make(stage, size)
    between = []
    original = Communicator.average_replicas

    def recorded(comm, shard, name=""):
        between.append(shard.numel() * shard.element_size())
        return original(comm, shard, name)

    with mock.patch.object(Communicator, "average_replicas", recorded):
        for seed in range(2):
            with engine.no_sync():
                engine.backward(loss_of(module, 10 * seed + rank))
            engine.backward(loss_of(module, 10 * seed + 5 + rank))
            engine.step()
            if seed == 0:
                engine.zero_grad()
    report = engine.memory_report()
    backends = (engine.comm._backend, engine.comm._replicas)
    ranks = [dist.get_process_group_ranks(one._group) for one in backends if one is not None]
    found = {
        "between": between,
        "rest": {state: report.state_bytes(state) for state in State},
        "ranks": ranks,
        "shards": [bucket.plan.layout.shard_numel * 4 for bucket in engine.buckets],
    }
    engine.close()
    return found


@pytest.mark.slow
def test_states_are_sharded_over_the_group_and_only_shards_are_sent_between_groups():
    p, g, o = State.PARAM, State.GRAD, State.OPTIM
    half = {p: 4 / 2, g: 4 / 2, o: 8 / 2}
    bytes_per_parameter = {
        (3, 2): half,
        (2, 2): half | {p: 4},
        (1, 2): half | {p: 4, g: 4},
        (3, 1): {p: 4, g: 4, o: 8},  # every rank holds everything, as in stage 0
        (3, 4): {p: 1, g: 1, o: 2},
        (3, None): {p: 1, g: 1, o: 2},
        (3, "node"): {p: 1, g: 1, o: 2},
    }
    numel = 3 * (64 * 64 + 64)
    cases = list(bytes_per_parameter)
    for case, ranks in zip(cases, run_each(_bytes, cases), strict=True):
        for rank, found in enumerate(ranks):
            for state, nbytes in bytes_per_parameter[case].items():
                # The optimizer keeps nothing for padding, of which the last rank has most.
                expected = pytest.approx(nbytes * numel, rel=0.05)
                assert found["rest"][state] == expected, (case, state)
            if case[1] == 2:
                first = rank - rank % 2
                assert found["ranks"] == [[first, first + 1], [rank % 2, rank % 2 + 2]]
                # Two steps of two micro-batches, which stage 1 reduces together.
                times = 2 if case[0] == 1 else 4
                assert sorted(found["between"]) == sorted(times * found["shards"])
                assert sum(found["between"]) == pytest.approx(times * 4 * numel / 2, rel=0.02)
            elif case[1] != 1:
                assert not found["between"]


class Shared(nn.Module):
    """One layer used in two reentrant checkpoints: its gradient comes twice in one backward."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, times):
        x = x.requires_grad_()
        for _ in range(times):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.last(x).square().mean()


def _late(rank, world_size, stage):
    torch.manual_seed(0)
    module = Shared()
    reference = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    config = ZeroConfig(stage=stage, sharding_group_size=2, reduce_bucket_size=64 * 65)
    engine = Engine(module, [optimizer], config)
    x = torch.full((2, 64), rank + 1.0)
    times = 3 if rank == 2 else 1
    for _ in range(2):
        engine.zero_grad()
        engine.backward(module(x.clone(), times))
    assert_grads(module, mean_grads(reference, [reference(x.clone(), times)]))
    engine.backward(module(x.clone(), times))  # added to the mean
    for parameter, grad in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full_grad(parameter), 2 * grad.grad, rtol=1e-5, atol=1e-6)
    engine.close()


def test_a_gradient_that_comes_twice_on_one_rank_is_averaged_over_all():
    run_each(_late, [(stage,) for stage in STAGES])


def _by_the_way(rank, world_size, stage, options):
    engine, module, reference = make(stage, **options)
    with engine.no_sync():
        engine.backward(loss_of(module, rank))
        engine.backward(loss_of(module, 10 + rank))
    engine.finish_reductions()
    expected = mean_grads(reference, [loss_of(reference, rank), loss_of(reference, 10 + rank)])
    assert_grads(module, expected)
    norm = torch.stack([grad.norm() for grad in expected]).norm()
    torch.testing.assert_close(engine.grad_norm(), norm)
    for parameter, grad in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.norm().to(norm), grad.norm())
        torch.testing.assert_close(parameter.grad.sum().to(norm), grad.sum(), rtol=1e-4, atol=1e-4)
        assert parameter.grad.abs().max() == pytest.approx(float(grad.abs().max()), rel=1e-5)
    # A mean over all ranks stays what it is when a part of the ranks' is added and averaged.
    with engine.no_sync():
        engine.backward(module[0](torch.ones(1, 64)).sum() * (rank + 1))
    engine.backward(module[0](torch.ones(1, 64)).sum())
    assert_grads(module[1:], expected[2:])
    added = torch.full((64,), 2.5 + 1)
    torch.testing.assert_close(full_grad(module[0].bias), expected[1] + added)
    # What is zeroed is not averaged.
    with gathered(module):
        before = [parameter.detach().clone() for parameter in module.parameters()]
    engine.zero_grad()
    with engine.no_sync():
        engine.backward(loss_of(module, rank))
    engine.zero_grad()
    engine.step()
    with gathered(module):
        for parameter, value in zip(module.parameters(), before, strict=True):
            assert torch.equal(parameter, value)
    # rank 0's values reach every shard of every group
    with gathered(module, writeback=True):
        for parameter in module.parameters() if rank == 0 else ():
            parameter.data.fill_(7.0)
    with gathered(module):
        assert all((parameter == 7).all() for parameter in module.parameters())
    engine.close()


@pytest.mark.parametrize("are_few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_means_norms_and_zeroed_gradients_are_those_of_all_ranks(tmp_path, are_few):
    in_files = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu_bytes": 0}
    cases = [(stage, {"offload_optimizer": in_files}) for stage in ((3,) if are_few else (1, 3))]
    cases += [(stage, {}) for stage in ((1,) if are_few else STAGES)]
    run_each(_by_the_way, [*cases, (2, {"overlap_comm": False})])


def _scale(rank, world_size, stage):
    engine, module, _ = make(stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    engine.backward(scaler.scale(loss_of(module, rank)))
    if rank == 3:
        part = next(p.grad.local for p in module.parameters() if p.grad.local.numel())
        part[:1].fill_(torch.inf)
    scaler.step(engine.optimizers[0])
    scaler.update()
    return scaler.get_scale()


def test_an_infinity_on_one_rank_makes_all_groups_leave_out_the_step():
    assert run_each(_scale, [(1,), (3,)]) == [(2.0,) * 4] * 2


def _refused(rank, world_size, *sizes):
    size = sizes[rank]
    with pytest.raises(ValueError, match=r"sharding_group_size (must divide|is 1 on)") as error:
        make(3, size)
    return str(error.value)


def test_groups_that_do_not_fit_are_refused_on_every_rank():
    for texts in run_each(_refused, [(2, 2, 2), (1, 3, 3)], world_size=3):
        assert len(set(texts)) == 1
