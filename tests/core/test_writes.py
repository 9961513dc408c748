"""Writes to parameters are kept, or are an error: in `gathered`, and beside other calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig, full_grad, gathered
from lightning_zero.core.params import Phase
from lightning_zero.core.writes import replaced
from tests.support.loops import batch, build, engine_for
from tests.support.warm import run_ranks


@pytest.mark.parametrize(
    "other",
    [
        lambda data: data.clone(),
        lambda data: data.view(torch.int32),  # the same elements of the same memory
        lambda data: data.double(),
    ],
)
def test_data_that_is_not_the_view_is_detected_whatever_its_dtype(other):
    views = list(torch.zeros(2, 3))
    parameters = [nn.Parameter(view, requires_grad=False) for view in views]
    assert replaced(parameters, views) == []
    parameters[1].data = other(views[1])
    assert replaced(parameters, views) == [1]


def _row(net):
    net.weight[0].data.fill_(9.0)


def _written_inside(net, write, then):
    with gathered(net):
        with torch.no_grad():
            write(net)
        then(net)


def _nested(net):
    with gathered(net):
        pass


def _forward(net):
    with torch.no_grad():
        net(torch.ones(2, 5, dtype=net.weight.dtype))


def _write(rank, world_size, stage, dtype):
    torch.manual_seed(0)
    net = nn.Linear(5, 4).to(dtype)
    config = ZeroConfig(stage=stage)
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.0)], config)
    ways = {"fill_": lambda net: net.weight.fill_(7.0)}
    if stage == 3 or dtype is torch.bfloat16:
        ways["row"] = _row  # else its memory is that of the main parameters
    for write in ways.values():
        for then in (lambda net: None, _nested, _forward):
            with pytest.raises(RuntimeError, match=r"weight was changed inside .*gathered"):
                _written_inside(net, write, then)
            with gathered(net, writeback=True):
                net.weight.data = torch.ones(4, 5, dtype=net.weight.dtype)
    with gathered(net, writeback=True), torch.no_grad():
        for value in net.state_dict().values():
            value.fill_(3.0)
    net.bias.data = torch.full((4,), 4.0, dtype=dtype)
    engine.offload_states("parameters")
    engine.reload_states()
    with gathered(net):
        found = [float(p.float().min()) for p in net.parameters()]
    net(torch.ones(2, 5, dtype=dtype)).sum().item()  # its graph is gone
    net.bias.data = torch.full((4,), 5.0, dtype=dtype)
    engine.close()
    return [*found, float(net.bias.float().min())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_write_inside_gathered_is_an_error_or_kept_whatever_else_happens_there(stage, dtype):
    assert run_ranks(2, _write, stage, dtype) == [[3.0, 4.0, 5.0]] * 2


def _use_inside(rank, world_size, stage):
    module, optimizer = build()
    engine = engine_for(module, [optimizer], stage)
    ids, weight = batch(0, 0), module.gpt.blocks[0].up.weight
    reference, _ = build()
    with torch.no_grad():
        reference.gpt.blocks[0].up.weight.mul_(2.0)
    expected = reference(ids)
    expected.backward()
    with gathered(module, writeback=True):
        with torch.no_grad():
            weight.mul_(2.0)
        loss = module(ids)
        torch.testing.assert_close(loss, expected)
        engine.backward(loss)
        with pytest.raises(RuntimeError, match=r"steps inside .*writeback=True"):
            engine.step()
    found = full_grad(weight)
    torch.testing.assert_close(found, reference.gpt.blocks[0].up.weight.grad)
    assert not any(bucket.params.num_pins for bucket in engine.buckets)
    assert all(b.params.phase is Phase.SHARDED for b in engine.buckets if b.params.are_sharded)
    with gathered(module):
        torch.testing.assert_close(weight.detach(), reference.gpt.blocks[0].up.weight.detach())
    engine.step()
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_forward_inside_a_context_uses_what_was_written_there_and_a_step_is_refused(stage):
    run_ranks(2, _use_inside, stage)


def _infer_between(rank, world_size):
    (module, optimizer), (reference, _) = build(), build()
    engine = engine_for(module, [optimizer], 3)
    with engine.no_sync():
        engine.backward(module(batch(0, 0)))
    loss = module(batch(0, 1))
    with torch.inference_mode():
        module(batch(0, 2))
    engine.backward(loss)
    for step in (0, 1):
        reference(batch(0, step)).backward()
    for parameter, expected in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full_grad(parameter), expected.grad)


def test_inference_mode_between_a_forward_and_its_backward_changes_no_gradient():
    run_ranks(2, _infer_between)


def _fail_inside(rank, world_size, stage):
    module, optimizer = build()
    engine = engine_for(module, [optimizer], stage)
    ids, weight = batch(0, 0), module.gpt.blocks[0].up.weight
    engine.backward(module(ids))
    engine.step()
    with gathered(module):
        expected = 2.0 * weight.detach()

    def fail(*_):
        raise ArithmeticError("of a block")

    with gathered(module, writeback=True):
        with torch.no_grad():
            weight.mul_(2.0)
        hook = module.gpt.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            module(ids)
        hook.remove()
        engine.backward(module(ids))  # begins another run
    engine.step()
    engine.zero_grad()
    assert not any(bucket.params.num_pins for bucket in engine.buckets)
    with gathered(module):
        torch.testing.assert_close(weight.detach(), expected, rtol=0.0, atol=2e-3)  # a step of 1e-3


@pytest.mark.parametrize("stage", [1, 3])
def test_what_was_written_outlives_a_forward_inside_the_context_that_raises(stage):
    run_ranks(2, _fail_inside, stage)
