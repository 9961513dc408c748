"""The engine in a loop written by hand, without Lightning, against DDP in the same loop."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_zero
from lightning_zero import Engine, ZeroConfig
from tests.support import ranks
from tests.support.fitting import arrays
from tests.support.loops import assert_same_state, batch, build, engine_for
from tests.support.warm import run_ranks

STAGES = [0, 1, 2, 3]


def _train_ddp(rank, world_size, accumulation, clip, norm_type=2.0):
    module, optimizer = build()
    ddp = DistributedDataParallel(module)
    losses, norms = [], []
    for step in range(3 * accumulation):
        is_last = (step + 1) % accumulation == 0
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            loss = ddp(batch(rank, step))
            (loss / accumulation).backward()
        losses.append(loss.item())
        if is_last:
            if clip is not None:
                norm = nn.utils.clip_grad_norm_(module.parameters(), clip, norm_type)
                norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, arrays(module.state_dict())


def _train_engine(rank, world_size, stage, accumulation, clip, norm_type=2.0, **options):
    module, optimizer = build()
    engine = engine_for(module, [optimizer], stage, **options)
    losses, norms = [], []
    for step in range(3 * accumulation):
        is_last = (step + 1) % accumulation == 0
        with contextlib.nullcontext() if is_last else engine.no_sync():
            loss = module(batch(rank, step))
            engine.backward(loss / accumulation)
        losses.append(loss.item())
        if is_last:
            if clip is not None:
                norms.append(float(engine.clip_grad_norm_(clip, norm_type=norm_type)))
            engine.step()
            engine.zero_grad()
    engine.close()
    return losses, norms, arrays(module.state_dict())


@cache
def reference(world_size, accumulation=1, clip=None, norm_type=2.0):
    return run_ranks(world_size, _train_ddp, accumulation, clip, norm_type)


def assert_same(ours, expected):
    for (losses, norms, state), (ddp_losses, ddp_norms, ddp_state) in zip(
        ours, expected, strict=True
    ):
        np.testing.assert_allclose(losses, ddp_losses, rtol=1e-6)
        np.testing.assert_allclose(norms, ddp_norms, rtol=2e-6)
        assert_same_state(state, ddp_state)


@pytest.mark.default_cases("1-1-1")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 3), (3, 1), (4, 3)])
def test_the_loop_equals_ddp(world_size, accumulation, stage):
    ours = run_ranks(world_size, _train_engine, stage, accumulation, None)
    assert_same(ours, reference(world_size, accumulation))


def _train_nested(rank, world_size):
    nested = ["GPT", "Block", "*.qkv", "*.norm_2"]
    return _train_engine(rank, world_size, 3, 2, None, unit_classes=nested)


def test_units_may_be_inside_of_each_other():
    assert_same(run_ranks(2, _train_nested), reference(2, 2))


@pytest.mark.default_cases("2.0-3")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_gives_the_norm_and_the_result_of_ddp(norm_type, stage):
    ours = run_ranks(2, _train_engine, stage, 2, 0.05, norm_type)
    assert_same(ours, reference(2, 2, 0.05, norm_type))


def _train_by(rank, world_size, stage, way):
    """Three steps in which the user calls the optimizer, not the engine."""
    module, optimizer = build()
    engine = engine_for(module, [optimizer], stage)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    losses = []
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = module(batch(rank, step))
            engine.backward(loss)
            losses.append(loss.item())
            return loss

        if way == "closure":
            returned = optimizer.step(closure)
            assert returned.item() == losses[-1]
        else:
            closure()
            optimizer.step()
        if way == "zeros":
            optimizer.zero_grad(set_to_none=False)
        scheduler.step()
        module.eval()
        with torch.no_grad():
            module(batch(rank, 77))
        module.train()
    engine.close()
    return losses, [], arrays(module.state_dict())


@pytest.mark.default_cases("closure-1")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("way", ["direct", "closure", "zeros"])
def test_the_users_own_call_of_the_optimizer_equals_ddp(way, stage):
    assert_same(run_ranks(2, _train_by, stage, way), reference(2))


def _two_optimizers(rank, world_size, stage):
    module, _ = build()
    inner = list(module.gpt.blocks.parameters())
    ids = {id(p) for p in inner}
    outer = [p for p in module.parameters() if id(p) not in ids]
    optimizers = [
        torch.optim.AdamW(inner, lr=1e-3, eps=1e-5),
        torch.optim.SGD(outer, lr=0.1, momentum=0.9),
    ]
    if stage is None:
        ddp = DistributedDataParallel(module)
        for step in range(3):
            ddp(batch(rank, step)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    else:
        engine = engine_for(module, optimizers, stage)
        for step in range(3):
            engine.backward(module(batch(rank, step)))
            engine.step()
            engine.zero_grad()
        engine.close()
    return arrays(module.state_dict())


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", range(4))
def test_two_optimizers_equal_ddp(stage):
    ours = run_ranks(2, _two_optimizers, stage)
    for state, expected in zip(ours, run_ranks(2, _two_optimizers, None), strict=True):
        assert_same_state(state, expected)


def _identity(rank, world_size, stage):
    module, optimizer = build()
    before = list(module.parameters())
    engine = engine_for(module, [optimizer], stage)
    for step in range(2):
        engine.backward(module(batch(rank, step)))
        engine.step()
        engine.zero_grad()
        assert all(p is q for p, q in zip(module.parameters(), before, strict=True))
        given = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(p is q for p, q in zip(given, before, strict=True))
        assert all(p in optimizer.state for p in before)
    engine.close()
    assert all(p is q for p, q in zip(module.parameters(), before, strict=True))


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", range(4))
def test_parameters_are_the_same_objects_from_first_to_last(stage):
    run_ranks(2, _identity, stage)


def _gathered(rank, world_size, stage):
    import lightning_zero

    module, optimizer = build()
    expected, _ = build()
    shapes = {name: p.shape for name, p in expected.named_parameters()}
    engine = engine_for(module, [optimizer], stage)
    with lightning_zero.gathered(module):
        for name, p in module.named_parameters():
            assert p.shape == shapes[name], name
            assert torch.equal(p, expected.get_parameter(name)), name
    with torch.no_grad(), lightning_zero.gathered(module.gpt.blocks[1], writeback=True):
        for p in module.gpt.blocks[1].parameters():
            p.fill_(0.25)
    chosen = [module.gpt.head.weight, module.gpt.norm.bias]
    with torch.no_grad(), lightning_zero.gathered(chosen, writeback=True):
        for p in chosen:
            p.mul_(3)
    loss = module(batch(0, 0))
    with torch.no_grad():
        for p in expected.gpt.blocks[1].parameters():
            p.fill_(0.25)
        expected.gpt.head.weight.mul_(3)
    torch.testing.assert_close(loss, expected(batch(0, 0)), rtol=1e-6, atol=1e-6)
    engine.close()
    assert_same_state(arrays(module.state_dict()), arrays(expected.state_dict()))


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", range(4))
def test_unsharded_parameters_are_full_and_written_back_on_request(stage):
    run_ranks(2, _gathered, stage)


def _gathered_between_steps(rank, world_size, stage):
    import lightning_zero

    module, optimizer = build()
    engine = engine_for(module, [optimizer], stage)
    losses = []
    for step in range(3):
        loss = module(batch(rank, step))
        engine.backward(loss)
        losses.append(loss.item())
        with lightning_zero.gathered(module):
            assert all(p.ndim > 0 for p in module.parameters())
        engine.step()
        engine.zero_grad()
        with torch.no_grad(), lightning_zero.gathered(module, writeback=True):
            module.gpt.norm.bias.add_(0.0)
    engine.close()
    return losses, [], arrays(module.state_dict())


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", range(4))
def test_unsharding_between_backward_and_step_changes_nothing(stage):
    assert_same(run_ranks(2, _gathered_between_steps, stage), reference(2))


def _full_grads(rank, world_size, stage):
    module, optimizer = build()
    if stage is None:
        ddp = DistributedDataParallel(module)
        ddp(batch(rank, 0)).backward()
        return {name: p.grad.numpy() for name, p in module.named_parameters()}
    from lightning_zero import full_grad

    engine = engine_for(module, [optimizer], stage)
    engine.backward(module(batch(rank, 0)))
    grads = {name: full_grad(p).clone().numpy() for name, p in module.named_parameters()}
    engine.close()
    return grads


@pytest.mark.default_cases("2-1")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [2, 3])
def test_full_grad_is_ddps_gradient_on_every_rank(world_size, stage):
    expected = run_ranks(world_size, _full_grads, None)[0]
    for grads in run_ranks(world_size, _full_grads, stage):
        assert list(grads) == list(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(grads[name], value, rtol=2e-6, atol=1e-7, err_msg=name)


def _report(rank, world_size, stage):
    from lightning_zero.layout.stage import State

    module, optimizer = build(width=64)
    numel = sum(p.numel() for p in module.parameters())
    engine = engine_for(module, [optimizer], stage)
    engine.backward(module(batch(rank, 0)))
    engine.step()
    report = engine.memory_report()
    device = [report.tiers["device"][state] / numel for state in State]
    data_parallel = [report.data_parallel[state] / numel for state in State]
    assert list(report.tiers) == ["device"]
    assert report.total_bytes == sum(report.tiers["device"].values())
    assert report.data_parallel_bytes == sum(report.data_parallel.values())
    engine.close()
    return device, data_parallel


@pytest.mark.default_cases("1-0")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_memory_report_gives_the_bytes_of_the_stage(world_size, stage):
    n = world_size
    param, grad, optim = 4, 4, 8  # bytes per parameter: fp32, fp32, two moments in fp32
    expected = [
        param / n if stage == 3 else param,
        grad / n if stage >= 2 else grad,
        optim / n if stage >= 1 else optim,
    ]
    for device, data_parallel in run_ranks(world_size, _report, stage):
        assert device == pytest.approx(expected, rel=0.03)
        assert data_parallel == pytest.approx([param, grad, optim], rel=0.03)


def _close(rank, world_size, stage):
    module, optimizer = build()
    engine = engine_for(module, [optimizer], stage)
    for step in range(2):
        engine.backward(module(batch(rank, step)))
        engine.step()
        engine.zero_grad()
    engine.close()
    engine.close()
    for p in module.parameters():
        assert type(p) is nn.Parameter
        assert optimizer.state[p]["exp_avg"].shape == p.shape
        assert optimizer.state[p]["exp_avg_sq"].shape == p.shape
    optimizer.zero_grad()
    loss = module(batch(0, 2))  # plain torch, the same batch on every rank: no communication
    loss.backward()
    optimizer.step()
    return [loss.item()], [], arrays(module.state_dict())


def _close_ddp(rank, world_size):
    module, optimizer = build()
    ddp = DistributedDataParallel(module)
    for step in range(2):
        ddp(batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = module(batch(0, 2))
    loss.backward()
    optimizer.step()
    return [loss.item()], [], arrays(module.state_dict())


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", range(4))
def test_after_close_module_and_optimizer_go_on_in_plain_torch(stage):
    assert_same(run_ranks(2, _close, stage), run_ranks(2, _close_ddp))


class Unlucky(nn.Module):
    """Raises in the forward or the backward on request."""

    def __init__(self):
        super().__init__()
        self.place = None

    def forward(self, x):
        if self.place == "forward":
            raise torch.OutOfMemoryError("out of luck")
        if self.place == "backward" and x.requires_grad:
            x = x.clone()
            x.register_hook(self.fail)
        return x

    def fail(self, grad):
        raise torch.OutOfMemoryError("out of luck")


def _go_on_after_exception(rank, world_size, stage, place):
    module, optimizer = build()
    unlucky = Unlucky()
    inner = module.gpt.blocks[1]
    inner.register_forward_hook(lambda block, args, output: unlucky(output))
    engine = engine_for(module, [optimizer], stage)
    losses, reports = [], []
    for step in range(3):
        if step:
            unlucky.place = place
            with pytest.raises(torch.OutOfMemoryError, match="out of luck"):
                engine.backward(module(batch(rank, 50)))
            unlucky.place = None
            engine.zero_grad()
            reports.append(engine.memory_report().total_bytes)
        loss = module(batch(rank, step))
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
        engine.zero_grad()
        reports.append(engine.memory_report().total_bytes)
    engine.close()
    assert len(set(reports[::2])) == len(set(reports[1::2])) == 1, reports
    assert reports[1] <= reports[0]  # no gradient is left
    return losses, [], arrays(module.state_dict())


@pytest.mark.default_cases("forward-1")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_after_an_exception_nothing_stays_unsharded_and_training_goes_on_as_ddp(place, stage):
    assert_same(run_ranks(2, _go_on_after_exception, stage, place), reference(2))


class Counting(torch.optim.SGD):
    """Steps all parameters in one call, because it counts its steps."""

    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        super().step(closure)


def _go_on_after_an_interrupted_step(rank, world_size, stage):
    module, _ = build()
    expected, _ = build()
    optimizer, plain = Counting(module.parameters(), lr=0.1), Counting(expected.parameters(), 0.1)
    engine = engine_for(module, [optimizer], stage)

    def train(step):
        engine.backward(module(batch(0, step)))
        engine.step()

    train(0)
    engine.zero_grad()

    def interrupted(*_):
        raise MemoryError("before the call of the optimizer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_zero.optim.clone.copy_of", interrupted)
        with pytest.raises(MemoryError):
            train(1)
    engine.zero_grad()
    copied = copy.deepcopy(module)
    train(2)
    engine.close()
    for step in (0, 2):
        plain.zero_grad()
        expected(batch(0, step)).backward()
        assert step == 0 or all(map(torch.equal, copied.parameters(), expected.parameters()))
        plain.step()
    assert_same_state(arrays(module.state_dict()), arrays(expected.state_dict()))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_that_ends_before_the_optimizer_is_called_changes_nothing(stage):
    run_ranks(2, _go_on_after_an_interrupted_step, stage)


def _go_on_inside(rank, world_size, stage):
    module, optimizer = build()
    unlucky = Unlucky()
    module.gpt.blocks[1].register_forward_hook(lambda block, args, output: unlucky(output))
    engine = engine_for(module, [optimizer], stage)

    def fails(call):
        unlucky.place = "forward"
        with pytest.raises(torch.OutOfMemoryError, match="out of luck"):
            call()
        unlucky.place = None

    loss = module(batch(rank, 0))
    fails(lambda: module(batch(rank, 50)))
    engine.backward(loss)  # the graph of a forward before the exception
    with engine.no_sync():
        fails(lambda: engine.backward(module(batch(rank, 50))))
    dropped = pytest.warns(UserWarning, match="the gradients of this step so far were dropped")
    with dropped if rank == 0 else contextlib.nullcontext():
        module(batch(rank, 50))
    losses = []
    for step in range(3):
        if step == 1:
            with lightning_zero.uneven_calls(module):
                fails(lambda: module(batch(rank, 50)))
                for _ in range(rank):
                    module(batch(rank, 0))
        loss = module(batch(rank, step))
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
        engine.zero_grad()
    engine.close()
    return losses, [], arrays(module.state_dict())


@pytest.mark.parametrize("stage", [1, 3])
def test_after_an_exception_earlier_graphs_and_contexts_go_on_and_dropped_gradients_warn(stage):
    assert_same(run_ranks(2, _go_on_inside, stage), reference(2))


def _without_group(rank, world_size):
    module, optimizer = build()
    with pytest.raises(RuntimeError, match="process group"):
        engine_for(module, [optimizer], 3)


def test_ranks_without_a_process_group_are_an_error():
    ranks.run_ranks(2, _without_group, has_group=False)


class Chunked(nn.Module):
    """A module whose caller runs the head, chunk by chunk."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.body(x)


def _chunked_loss(module, x, backward, no_sync):
    hidden = module(x)
    leaf = hidden.detach().requires_grad_()
    with no_sync():
        for chunk in leaf.chunk(3):
            backward(module.head(chunk).square().mean())
    backward(hidden, leaf.grad)


def _use_parts(rank, world_size, stage):
    from lightning_zero import full_grad
    from lightning_zero.tensors.guarded import BetweenStepsError

    torch.manual_seed(0)
    module = Chunked()
    reference = copy.deepcopy(module)
    engine = engine_for(module, torch.optim.SGD(module.parameters(), lr=0.1), stage)
    x = torch.randn(6, 8)
    if stage == 3:
        with pytest.raises(BetweenStepsError, match=r"head.*with engine\.forward_context\(\):"):
            _chunked_loss(module, x, engine.backward, engine.no_sync)
        engine.zero_grad()
    for _ in range(2):
        with engine.forward_context():
            _chunked_loss(module, x, engine.backward, engine.no_sync)
        _chunked_loss(reference, x, torch.Tensor.backward, contextlib.nullcontext)
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full_grad(ours), theirs.grad)
            theirs.grad = None
        engine.zero_grad()
    engine.close()
    parts = nn.ModuleDict({"in": nn.Linear(4, 4), "act": nn.Tanh(), "out": nn.Bilinear(4, 4, 2)})
    engine = engine_for(parts, torch.optim.SGD(parts.parameters(), lr=0.1), stage)
    if stage == 3:
        with pytest.raises(BetweenStepsError, match=r"To compute with it.*part of the module"):
            parts["in"](torch.ones(1, 4))
        with pytest.raises(BetweenStepsError, match=r"To read or change it.*zero\.gathered"):
            parts["in"].weight * torch.ones(4)
        with pytest.raises(RuntimeError, match=r"'norm'.*in\.weight.*engine\.forward_context\(\)"):
            parts["in"].weight.norm().backward()
    for _ in range(2):
        with engine.forward_context():
            hidden = parts["act"](parts["in"](torch.ones(1, 4)))
            loss = parts["out"](hidden, hidden).sum()
        engine.backward(loss)
        engine.step()
        engine.zero_grad()
    engine.close()


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_parts_of_the_module_are_called_within_forward_context(stage):
    run_ranks(2, _use_parts, stage)


class UsesAgain(nn.Module):
    """Calls blocks repeatedly on their own outputs; `order` has their indices."""

    def __init__(self, order):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.order = order

    def forward(self, x):
        for index in self.order:
            x = self.blocks[index](x)
        return x.square().mean()


def _use_again(rank, world_size, order, leaf_wants_grad):
    torch.manual_seed(0)
    module = UsesAgain(order)
    reference = copy.deepcopy(module)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, reference)]
    engine = Engine(module, optimizers[:1], ZeroConfig(stage=3, prefetch_bucket_size=0))
    for _ in range(2):
        x = torch.ones(4, 8) * (rank + 1)
        engine.backward(module(x.requires_grad_(leaf_wants_grad)))
        engine.step()
        engine.zero_grad()
        for other in range(world_size):
            (reference(torch.ones(4, 8) * (other + 1)) / world_size).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    engine.close()
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.default_cases("order1-True")
@pytest.mark.parametrize("leaf_wants_grad", [False, True])
@pytest.mark.parametrize("order", [(0, 0, 1, 2), (0, 1, 1, 2), (2, 0, 0, 0), (0, 1, 2, 2, 0)])
def test_a_block_that_takes_its_own_output_learns_as_in_one_process(order, leaf_wants_grad):
    run_ranks(2, _use_again, order, leaf_wants_grad)


class _Nothing(nn.Module):
    """Keeps its result, and returns None."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        self.loss = x.square().mean()


def _penalise(rank, world_size, stage):
    torch.manual_seed(0)
    module, x = _Nothing(), torch.randn(2, 4)
    plain = copy.deepcopy(module)
    engine = engine_for(module, [torch.optim.SGD(module.parameters(), lr=0.1)], stage)

    def loss_of(module):
        try:
            raise ArithmeticError
        except ArithmeticError:  # an error that the module expects
            module(x)
        loss = module.loss
        with torch.no_grad():
            module(2 * x)
        return loss + 0.1 * sum(p.square().sum() for p in module.parameters())

    for _ in range(3):
        loss_of(plain).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        engine.backward(loss_of(module))
        engine.step()
        engine.zero_grad()
    engine.close()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_forward_without_gradients_comes_between_one_with_and_its_loss(stage):
    run_ranks(2, _penalise, stage)


class _Marker:
    """An object that lives as long as its node of the graph."""


class _Marked(torch.autograd.Function):
    markers: list[weakref.ref[_Marker]] = []

    @staticmethod
    def forward(ctx, x):
        ctx.marker = _Marker()
        _Marked.markers.append(weakref.ref(ctx.marker))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("stage", [1, 3])
def test_no_graph_outlives_its_loss_until_the_collector_comes(stage):
    _Marked.markers = []
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    engine = engine_for(module, [torch.optim.SGD(module.parameters(), lr=0.1)], stage)
    gc.disable()
    try:
        for _ in range(3):
            engine.backward(module(_Marked.apply(torch.ones(2, 4, requires_grad=True))).sum())
            engine.step()
            engine.zero_grad()
        assert [marker() for marker in _Marked.markers] == [None] * 3
    finally:
        gc.enable()
        engine.close()
