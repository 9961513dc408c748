"""Steps during the next forward: no rank reads a half-done step, and none is lost."""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest
import torch

from lightning_zero import Engine, OffloadConfig, ZeroConfig, gathered
from lightning_zero.core.params import Phase
from lightning_zero.optim import chunks
from tests.support.warm import run_ranks
from tests.tiers.test_offload import Net, batch, loss_of

PAUSE_S = 0.06


class SlowSGD(torch.optim.SGD):
    """Takes its time for every call, as a large step does, once `build` is done with trying it."""

    fails = False
    pause_s = 0.0
    num_calls = 0

    def step(self, closure=None):
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            time.sleep(self.pause_s)
            SlowSGD.num_calls += 1
            if self.fails:
                raise OSError("no space left for this step")
        return super().step(closure)


def build(stage, *, overlap_step=True, pause_s=PAUSE_S, **options):
    torch.manual_seed(3)
    net = Net()
    optimizer = SlowSGD(net.parameters(), lr=1e-2, momentum=0.9)
    options = {"reduce_bucket_size": 2**17, "assume_elementwise": ["SlowSGD"]} | options
    config = ZeroConfig(stage=stage, overlap_step=overlap_step, **options)
    SlowSGD.pause_s = 0.0
    engine = Engine(net, [optimizer], config)
    SlowSGD.pause_s, SlowSGD.num_calls = pause_s if overlap_step else 0.0, 0
    return net, optimizer, engine


def backward(rank, net, engine, number=0):
    engine.zero_grad()
    engine.backward(loss_of(net, batch(rank, number)))


def parameters_after(rank, stage, disturb, *, overlap_step, **options):
    net, optimizer, engine = build(stage, overlap_step=overlap_step, **options)
    for number in range(3):
        backward(rank, net, engine, number)
        engine.step()
        disturb(net, optimizer, engine)
    engine.close()
    return [p.detach().clone() for p in net.parameters()]


def _step_returns(rank, world_size, stage):
    net, optimizer, engine = build(stage)
    backward(rank, net, engine)
    start = time.monotonic()
    engine.step()
    assert time.monotonic() - start < PAUSE_S
    assert len(engine.buckets) > 3
    loss_of(net, batch(rank, 1))
    assert time.monotonic() - start > PAUSE_S * len(engine.buckets) * 0.9
    engine.close()


@pytest.mark.default_cases("3")
@pytest.mark.shows("`overlap_step=True`")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_step_returns_while_it_runs_and_the_forward_waits_for_it(stage):
    run_ranks(2, _step_returns, stage)


def _gathers_run_during_forward(rank, world_size):
    net, optimizer, engine = build(2, overlap_step=False)
    backward(rank, net, engine)
    engine.step()
    assert {bucket.params.phase for bucket in engine.buckets} == {Phase.UNSHARDING}
    engine.close()


def test_without_it_gathers_overlap_the_next_forward():
    run_ranks(2, _gathers_run_during_forward)


def zero_in_place(net, optimizer, engine):
    optimizer.zero_grad(set_to_none=False)


def clamp_data(net, optimizer, engine):
    for parameter in net.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def look(net, optimizer, engine):
    optimizer.state_dict()
    with gathered(net):
        sum(float(p.sum()) for p in net.parameters())
    engine.memory_report()


def _disturb(rank, world_size, stage, disturb, options):
    expected = parameters_after(rank, stage, disturb, overlap_step=False, **options)
    found = parameters_after(rank, stage, disturb, overlap_step=True, **options)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "disturb"),
    [
        (2, zero_in_place),
        (3, zero_in_place),
        (3, clamp_data),
        (2, look),
        pytest.param(2, clamp_data, marks=pytest.mark.slow),
        pytest.param(3, look, marks=pytest.mark.slow),
    ],
)
def test_what_others_do_between_steps_comes_after_the_step(stage, disturb):
    run_ranks(2, _disturb, stage, disturb, {})


def _in_fewer_calls(rank, world_size, stage, overlap_step):
    expected = parameters_after(rank, stage, look, overlap_step=overlap_step)
    num_separate = SlowSGD.num_calls
    numel = sum(p.numel() for p in Net().parameters())
    with mock.patch.dict(chunks.MAX_NUMEL_PER_CALL, cpu=numel // world_size // 2):
        found = parameters_after(rank, stage, look, overlap_step=overlap_step)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    assert 3 < SlowSGD.num_calls < num_separate


@pytest.mark.default_cases("3-False")
@pytest.mark.parametrize(("stage", "overlap_step"), [(1, True), (3, False)])
def test_small_buckets_that_are_stepped_in_one_call_get_the_same_values(stage, overlap_step):
    run_ranks(2, _in_fewer_calls, stage, overlap_step)


@pytest.mark.slow
def test_small_unsharded_parameters_are_gathered_in_one_order_on_all_ranks():
    run_ranks(2, _disturb, 3, look, {"param_persistence_threshold": 1000})


def _fails(rank, world_size, stage, ends):
    net, optimizer, engine = build(stage)
    backward(rank, net, engine)
    SlowSGD.fails = True
    engine.step()
    use = engine.close if ends else lambda: loss_of(net, batch(rank, 1))
    with pytest.raises(RuntimeError, match=r"step of .* failed: no space left for this step"):
        use()
    SlowSGD.fails = False
    if not ends:
        backward(rank, net, engine)
        engine.step()
        engine.close()


@pytest.mark.filterwarnings("ignore:after an exception")
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_failed_step_is_raised_at_the_next_forward_or_at_the_end(stage, ends):
    run_ranks(2, _fails, stage, ends)


def _handed_over_in_part(rank, world_size):
    net, optimizer, engine = build(3)
    backward(rank, net, engine)
    bucket = engine.buckets[-1]

    def fail(stepping=None):
        raise MemoryError("while it is handed over")

    bucket.begin_step = fail
    with pytest.raises(MemoryError):
        engine.step()
    del bucket.begin_step
    with pytest.warns(UserWarning, match="may have been stepped"):
        engine.ensure_run()
    backward(rank, net, engine)
    engine.step()
    engine.close()


def test_an_exception_while_a_step_is_handed_over_hangs_no_rank():
    run_ranks(1, _handed_over_in_part)


def _in_files(rank, world_size, change):
    os.makedirs("swap", exist_ok=True)
    swap = OffloadConfig("nvme", nvme_path="swap", max_in_cpu_bytes=0)
    runs = []
    for options in ({}, {"offload_optimizer": swap, "offload_param": swap}):
        net, optimizer, engine = build(3, overlap_step=False, **options)
        for number in range(2):
            backward(rank, net, engine, number)
            change(net, optimizer, engine)
            engine.step()
        engine.close()
        runs.append([p.detach().clone() for p in net.parameters()])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


def scale_in_place(net, optimizer, engine):
    for parameter in net.parameters():
        parameter.grad.mul_(0.5)
    torch._foreach_mul_([parameter.grad for parameter in net.parameters()], 0.5)


def clip_by_torch(net, optimizer, engine):
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def unscale(net, optimizer, engine):
    found_inf, inverse = torch.zeros(1), torch.full((1,), 0.25)
    grads = [parameter.grad for parameter in net.parameters()]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)
    assert found_inf.item() == 0


@pytest.mark.default_cases("unscale")
@pytest.mark.parametrize("change", [scale_in_place, clip_by_torch, unscale, zero_in_place])
def test_gradients_in_files_are_changed_in_place_as_others_are(change):
    run_ranks(2, _in_files, change)


def _change_late(rank, world_size, stage):
    for change in (clip_late, clip_values_late, set_late):
        runs = []
        for overlaps in (False, True):
            net, optimizer, engine = build(stage, overlap_step=overlaps, pause_s=PAUSE_S / 2)
            for number in range(2):
                backward(rank, net, engine, number)
                engine.step()
                change(net, engine)
            engine.step()
            engine.close()
            runs.append([p.detach().clone() for p in net.parameters()])
        assert all(map(torch.equal, *runs)), change.__name__


def clip_late(net, engine):
    engine.clip_grad_norm_(1e-3)


def clip_values_late(net, engine):
    engine.clip_grad_value_(1e-3)


def set_late(net, engine):
    for parameter in net.parameters():
        parameter.grad = torch.full(parameter.shape, 2.0)
    engine.grad_norm()


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_that_are_changed_after_a_step_do_not_reach_it(stage):
    run_ranks(2, _change_late, stage)


def _data_in_files(rank, world_size):
    os.makedirs("swap", exist_ok=True)
    swap = OffloadConfig("nvme", nvme_path="swap")
    net, _, engine = build(3, overlap_step=False, offload_param=swap)
    for parameter in net.parameters():
        parameter.data.clamp_(-0.1, 0.1)
    engine.close()
    return max(parameter.abs().max().item() for parameter in net.parameters())


def test_what_is_written_to_the_data_of_parameters_in_files_counts():
    assert run_ranks(2, _data_in_files) == [pytest.approx(0.1)] * 2
