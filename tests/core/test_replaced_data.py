"""Ways to give a parameter new values after setup: each takes effect at once, or is an error."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_zero import Engine, OffloadConfig, ZeroConfig, gathered
from tests.support.warm import run_ranks

STAGES = [0, 1, 2, 3]
NAME = "blocks.1.weight"


class Net(nn.Module):
    """In stage 3 each block is a unit that is unsharded for its own forward only."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.write = None  # what the forward does to the net, once

    def forward(self, x):
        if self.write is not None:
            write, self.write = self.write, None
            write(self)
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().sum()


def written(net):
    return net.blocks[1].weight


VALUES = torch.linspace(-1, 1, 144).view(12, 12)


def replace(net):
    written(net).data = VALUES.to(written(net).dtype, copy=True)


def replace_by_transposed(net):
    written(net).data = VALUES.to(written(net).dtype).t()


def scale_and_replace(net):
    written(net).data = written(net).data * 2


def scale(net):
    written(net).data.mul_(2)


def clamp_all(net):
    for parameter in net.parameters():
        parameter.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def copy_values(net):
    written(net).copy_(VALUES)


def initialize(net):
    nn.init.constant_(written(net), 0.25)


def reset(net):
    torch.manual_seed(3)
    net.blocks[1].reset_parameters()


def copy_gathered(net):
    with gathered(net, writeback=True), torch.no_grad():
        written(net).copy_(VALUES)


def replace_gathered(net):
    with gathered(net, writeback=True):
        written(net).data = VALUES.clone()


def copy_without_writeback(net):
    with gathered(net):
        written(net).data.copy_(VALUES)


def replace_without_writeback(net):
    with gathered(net):
        written(net).data = VALUES.clone()


def tie(net):
    net.blocks[1].weight = net.blocks[2].weight


def put_new_parameter(net):
    net.blocks[1].weight = nn.Parameter(VALUES.to(written(net).dtype))


def put_wrong_shape(net):
    written(net).data = torch.zeros(2, 3)


# Refused in stage 3, where this rank has only a shard of the parameter.
IN_STAGE_3 = {0: "taken", 1: "taken", 2: "taken", 3: "refused"}
ALWAYS = dict.fromkeys(STAGES, "taken")
NEVER = dict.fromkeys(STAGES, "refused")
BETWEEN_STEPS = {
    replace: ALWAYS,
    replace_by_transposed: ALWAYS,
    scale_and_replace: ALWAYS,
    scale: ALWAYS,
    clamp_all: ALWAYS,
    copy_values: ALWAYS,
    initialize: ALWAYS,
    reset: IN_STAGE_3,
    copy_gathered: ALWAYS,
    replace_gathered: ALWAYS,
    copy_without_writeback: NEVER,
    replace_without_writeback: NEVER,
    tie: ALWAYS,
    put_new_parameter: NEVER,
    put_wrong_shape: NEVER,
}
IN_FORWARD = {
    replace: ALWAYS,
    scale_and_replace: ALWAYS,
    scale: ALWAYS,
    copy_values: ALWAYS,
    initialize: ALWAYS,
    reset: ALWAYS,
    put_new_parameter: NEVER,
}


def _train(rank, world_size, stage, param_dtype):
    """By moment and way: the outcome, and whether the values are those of one process."""
    torch.manual_seed(0)
    net = Net()
    start, weight = copy.deepcopy(net), written(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    engine = Engine(net, [optimizer], ZeroConfig(stage=stage, param_dtype=param_dtype))
    found = {}
    for is_inside, writes in ((False, BETWEEN_STEPS), (True, IN_FORWARD)):
        for write in writes:
            try:
                _steps(net, optimizer, write, is_inside, param_dtype, engine)
                found[is_inside, write.__name__] = _compared(net, start, write, is_inside)
            except (RuntimeError, ValueError) as error:
                found[is_inside, write.__name__] = "refused", NAME in str(error)
            net.blocks[1].weight = weight
            engine.end_run(RuntimeError())
            optimizer.state.clear()
            with gathered(net, writeback=True):
                net.load_state_dict(start.state_dict())
    engine.close()
    return found


def _steps(net, optimizer, write, is_inside, dtype=torch.float32, engine=None):
    """Runs three steps; calls `write` before the second one, or in its forward."""
    x = torch.linspace(-1, 1, 24, dtype=dtype).view(2, 12)
    for step in range(3):
        if step == 1 and is_inside:
            net.write = write
        elif step == 1:
            write(net)
        loss = net(x)
        loss.backward() if engine is None else engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def _compared(net, start, write, is_inside):
    expected = copy.deepcopy(start)
    reference = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    _steps(expected, reference, write, is_inside)
    with gathered(net):
        tolerance = 1e-6 if written(net).dtype == torch.float32 else 3e-2
        pairs = zip(net.parameters(), expected.parameters(), strict=True)
        return "taken", all(torch.allclose(a.float(), b, atol=tolerance) for a, b in pairs)


def _clip(rank, world_size, stage, param_dtype):
    """Clips weights inside the step's context, as Wasserstein GANs do; reads them on one rank."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = Engine(net, [optimizer], ZeroConfig(stage=stage, param_dtype=param_dtype))
    x = torch.ones(2, 12, dtype=param_dtype)
    used = []
    for block in net.blocks:
        block.register_forward_hook(lambda m, *_: used.append(m.weight.detach().abs().max().item()))
    for _ in range(2):
        with engine.forward_context():
            loss = net(x)
            if rank == 0:
                net.blocks[0].weight.data.abs()
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                written(net).data.abs()
            for parameter in net.parameters():
                parameter.data.clamp_(-0.01, 0.01)
        params = [bucket.params for bucket in engine.buckets]
        held = sum(own.is_unsharded for own in params if own.are_sharded)
    del used[:-3]
    with gathered(net):
        largest = max(p.abs().max().item() for p in net.parameters())
    engine.close()
    return held, max(used), largest


@pytest.mark.default_cases("2-param_dtype1")
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_clipped_after_the_step_stay_clipped_and_a_look_on_one_rank_reshards_everything(
    stage, param_dtype
):
    for held, used, largest in run_ranks(2, _clip, stage, param_dtype):
        assert held == 0
        assert used == largest == pytest.approx(0.01, rel=1e-2)


def _look_and_write(rank, world_size, folder):
    torch.manual_seed(0)
    net = Net().bfloat16()
    offload = OffloadConfig("nvme", nvme_path=folder)
    config = ZeroConfig(stage=3, offload_param=offload, offload_optimizer="cpu")
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], config)
    x = torch.ones(2, 12, dtype=torch.bfloat16)
    for parameter in net.parameters():
        parameter.data.norm()
    before = engine.storage.bytes_written
    engine.backward(net(x))
    assert engine.storage.bytes_written == before
    engine.step()
    for bucket in engine.buckets:
        bucket.params.read_ahead()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.data.fill_(0.5)
    used = []
    for block in net.blocks:
        block.register_forward_hook(lambda m, *_: used.append(m.weight.detach().float().unique()))
    net(x)
    engine.close()
    return torch.cat(used).tolist()


def test_a_look_writes_no_file_and_a_write_reaches_the_next_forward(tmp_path):
    assert run_ranks(2, _look_and_write, str(tmp_path)) == [[0.5] * 3] * 2


def _refuse(rank, world_size):
    torch.manual_seed(0)
    net = Net()
    before = copy.deepcopy(net.state_dict())
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.0)], ZeroConfig(stage=3))
    for write in (copy_values, copy_without_writeback, replace_without_writeback):
        for context in (nullcontext, engine.forward_context):
            with context(), pytest.raises(RuntimeError, match="is dropped"):  # noqa: SIM117
                with gathered(net):
                    write(net)
            with gathered(net):
                assert all(torch.equal(v, before[name]) for name, v in net.state_dict().items())
    engine.backward(net(torch.ones(2, 12)))
    engine.step()
    engine.close()
    return all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_changes_that_gathered_refuses_do_not_count():
    assert run_ranks(2, _refuse) == [True, True]


def _put_on_one_rank(rank, world_size, stage):
    torch.manual_seed(0)
    net = Net()
    before = copy.deepcopy(net.state_dict())
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.0)], ZeroConfig(stage=stage))
    expected = (
        (ValueError, "keeps its shape")
        if rank == 1
        else (RuntimeError, "rank 1 could not take the new values")
    )
    with pytest.raises(expected[0], match=expected[1]), gathered(net, writeback=True):
        put_wrong_shape(net) if rank == 1 else replace(net)
    engine.close()
    return [torch.equal(value, before[name]) for name, value in net.state_dict().items()]


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [2, 3])
def test_wrong_data_in_gathered_on_one_rank_is_an_error_on_all(stage):
    assert all(map(all, run_ranks(2, _put_on_one_rank, stage)))


def _fail(rank, world_size):
    """Raises in a forward that has assigned data of a wrong shape to two parameters."""
    torch.manual_seed(0)
    net = Net()
    before = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    config = ZeroConfig(stage=3, reshard_after_forward=False)
    engine = Engine(net, [optimizer], config)

    def fail():
        net(torch.ones(2, 12))
        for block in net.blocks[:2]:
            block.weight.data = torch.zeros(3)
        raise KeyError

    with pytest.raises(KeyError), engine.forward_context():
        fail()
    with pytest.warns(UserWarning, match="keeps its shape"):
        engine.ensure_run()
    assert not any(bucket.params.is_unsharded for bucket in engine.buckets)
    for _ in range(2):
        engine.backward(net(torch.ones(2, 12)))
        engine.step()
    engine.close()
    return all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_step_that_fails_with_data_of_a_wrong_shape_leaves_the_engine_idle():
    assert run_ranks(2, _fail) == [True, True]


FAST = [*((stage, torch.float32) for stage in STAGES), (3, torch.bfloat16)]
SLOW = [pytest.param(stage, torch.bfloat16, marks=pytest.mark.slow) for stage in (0, 1, 2)]


@pytest.mark.default_cases("3-param_dtype4")
@pytest.mark.parametrize(("stage", "param_dtype"), [*FAST, *SLOW])
def test_new_values_count_at_once_or_are_an_error_that_names_the_parameter(stage, param_dtype):
    for found in run_ranks(2, _train, stage, param_dtype):
        for (is_inside, name), (outcome, is_right) in found.items():
            assert outcome == _expected(is_inside, name)[stage], (is_inside, name)
            assert is_right, (is_inside, name)


def _expected(is_inside, name):
    table = IN_FORWARD if is_inside else BETWEEN_STEPS
    return next(outcome for write, outcome in table.items() if write.__name__ == name)
