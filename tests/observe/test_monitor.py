"""Metrics and windows of ZeroMonitor, without a training."""

import math
import mmap
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.throughput import measure_flops
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision
from torch import nn

from examples.gpt import GPT, GPTConfig
from lightning_zero import ZeroConfig, ZeroStrategy
from lightning_zero.callbacks import ZeroMonitor
from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.mesh import Mesh
from lightning_zero.layout.plan import make_plan
from lightning_zero.layout.stage import State
from lightning_zero.observe.metrics import (
    Sample,
    Throughput,
    aggregate_ranks,
    allocated_and_peak_bytes,
    flops_per_token,
    make_metrics,
    num_tokens,
    peak_flops,
    recorded_kinds,
)
from lightning_zero.observe.windows import MonitorConfig, Windows
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind, Recording, Span

GIB = 1024**3
STATES = {State.PARAM: GIB, State.GRAD: 2 * GIB, State.OPTIM: 3 * GIB}


def plan(stage, world_size, **settings):
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return make_plan(module, ZeroConfig(stage, **settings), world_size=world_size)


def metrics(stage, world_size=2, *, group_size=None, has_device_memory=False, **settings):
    mesh = Mesh.of(0, world_size, group_size)
    planned = plan(stage, mesh.num_shards, **settings)
    return make_metrics(planned, recorded_kinds(planned, mesh, has_device_memory=has_device_memory))


def traffic(stage, *args, **kwargs):
    keys = metrics(stage, *args, **kwargs)
    return {key.split("/")[1].removesuffix("_exposed_s") for key in keys if "exposed" in key}


def test_the_keys_follow_from_the_plan():
    assert traffic(0) == {"all_reduce", "agree"}
    sharded = {"all_gather", "reduce_scatter", "all_reduce", "agree"}
    assert traffic(1) == traffic(2) == traffic(3) == traffic(3, 4, group_size=2) == sharded
    assert traffic(3, 1) == set()
    assert traffic(3, offload_optimizer="cpu", offload_param="cpu") == traffic(3)
    on_device = traffic(3, offload_optimizer="cpu", offload_param="cpu", has_device_memory=True)
    assert on_device == traffic(3) | {"to_device", "to_cpu"}
    assert "zero_prefetch/hits" in metrics(3)
    assert "zero_prefetch/hits" not in metrics(2)
    assert "zero_memory/cpu_optim_gib" not in metrics(2)
    assert "zero_memory/cpu_optim_gib" in metrics(2, offload_optimizer="cpu")


def test_files_have_keys_of_their_own(tmp_path):
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    keys = metrics(3, offload_optimizer=nvme)
    assert {"zero_tier/nvme_read_gb_per_s", "zero_tier/nvme_write_overlapped_s"} <= set(keys)
    assert {"zero_nvme/written_total_gib", "zero_nvme/read_total_gib"} <= set(keys)
    assert "zero_memory/buffers_gib" in keys
    assert "zero_prefetch/read_hits" not in keys
    assert "zero_prefetch/read_hits" in metrics(3, offload_optimizer=nvme, offload_param=nvme)
    assert {"zero_memory/cpu_optim_gib", "zero_memory/nvme_optim_gib"} <= set(keys)


def test_each_key_has_its_number_in_its_unit():
    recording = Recording(
        rank=0,
        world_size=2,
        step=3,
        seconds=2.0,
        spans=(
            Span(Kind.FORWARD, "", 0.0, 0.5),
            Span(Kind.BACKWARD, "", 0.5, 1.5),
            Span(Kind.ALL_GATHER, "a", 0.0, 1.0, nbytes=GIB // 2),
            Span(Kind.ALL_GATHER, "a", 0.75, 1.0, is_wait=True),
            Span(Kind.STEP, "", 1.5, 1.75),
        ),
        hits=5,
        misses=1,
    )
    sample = Sample(recording, MemoryReport(0, 2, {"device": STATES}, {}), 4 * GIB, 5 * GIB)
    values = {key: metric(sample) for key, metric in metrics(3).items()}
    assert {key: value for key, value in values.items() if value} == pytest.approx(
        {
            "zero_memory/device_param_gib": 1,
            "zero_memory/device_grad_gib": 2,
            "zero_memory/device_optim_gib": 3,
            "zero_memory/allocated_gib": 4,
            "zero_memory/peak_gib": 5,
            "zero_time/step_s": 2.0,
            "zero_time/forward_s": 0.5,
            "zero_time/backward_s": 1.0,
            "zero_time/optimizer_s": 0.25,
            "zero_comm/all_gather_s": 1.0,
            "zero_comm/all_gather_overlapped_s": 0.75,
            "zero_comm/all_gather_exposed_s": 0.25,
            "zero_comm/all_gather_gib": 0.5,
            "zero_comm/all_gather_gb_per_s": 2**29 / 1e9,
            "zero_prefetch/hits": 5,
            "zero_prefetch/misses": 1,
            "zero_wait/total_s": 0.25,
            "zero_wait/for_others_s": 0.25,
        }
    )


@pytest.mark.parametrize("has_spread", [False, True])
def test_several_ranks_have_mean_and_max_or_also_min_and_max_rank(has_spread):
    keys = ["zero_time/step_s", "zero_wait/for_others_s", "zero_comm/agree_exposed_s"]
    everyone = [[1.0, 0.5, 0.4], [4.0, 0.1, 0.1], [1.0, 0.9, 0.7]]
    logged, means = aggregate_ranks(keys, everyone, has_spread=has_spread)
    spread = {
        "zero_time/step_s/min": 1.0,
        "zero_time/step_s/max_rank": 1,
        "zero_wait/for_others_s/min": 0.1,
        "zero_wait/for_others_s/max_rank": 2,
        "zero_comm/agree_exposed_s/min": 0.1,
        "zero_comm/agree_exposed_s/max_rank": 2,
    }
    assert logged == pytest.approx(
        {
            "zero_time/step_s/mean": 2.0,
            "zero_time/step_s/max": 4.0,
            "zero_wait/for_others_s/mean": 0.5,
            "zero_wait/for_others_s/max": 0.9,
            "zero_comm/agree_exposed_s/mean": 0.4,
            "zero_comm/agree_exposed_s/max": 0.7,
            "zero_straggler/rank": 1,
            "zero_straggler/skew_s": 0.6,
            **(spread if has_spread else {}),
        }
    )
    assert means == pytest.approx(
        {
            "zero_time/step_s": 2.0,
            "zero_wait/for_others_s": 0.5,
            "zero_comm/agree_exposed_s": 0.1,  # more is skew
            "zero_straggler/rank": 1,
            "zero_straggler/skew_s": 0.6,
        }
    )


def test_one_rank_has_plain_keys():
    logged, means = aggregate_ranks(["zero_wait/total_s"], [[0.5]], has_spread=True)
    assert logged == means == {"zero_wait/total_s": 0.5}


# ---------------------------------------------------------------- when


class Loop:
    """Calls a `Windows` as a training would, and keeps the windows it returns."""

    def __init__(self, *, every=0, traces=(), start=0, stride=1, micro_batches=1):
        self.recorder = Recorder()
        self.batches = self.steps = start
        self.stride, self.micro_batches = stride, micro_batches
        self.recorded, self.traced, self.on, self.aligned, self.logged = [], [], [], [], []
        self.written = []
        self.windows = Windows(
            self.recorder,
            MonitorConfig(every, traces),
            progress=(start, start),
            align=lambda: self.aligned.append(self.steps),
        )

    def step(self, *, evaluates=False):
        for index in range(self.micro_batches):
            self._take(self.windows.before_batch(self.batches, self.steps))
            if self.recorder.is_on and (not self.on or self.on[-1] != self.steps):
                self.on.append(self.steps)
            is_last = index == self.micro_batches - 1
            self.windows.after_batch(self.batches, self.steps + self.stride * is_last)
            if evaluates:
                self.windows.close()
        self.steps += self.stride
        self.batches += 1

    def run(self, num_steps):
        for _ in range(num_steps):
            self.step()
        self._take(self.windows.take())
        return self

    def _take(self, window):
        if window is not None:
            self.recorded.append(window.recording.step)
            self.logged.append(window.num_batches)
            self.written.append(window.recording.nbytes(Kind.WRITE))
            self.traced += [window.recording.step] * window.is_traced


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_is_recorded_where_lightning_logs_and_the_recorder_is_on_one_step_before(
    micro_batches,
):
    loop = Loop(every=4, micro_batches=micro_batches).run(9)
    assert loop.recorded == [3, 7]
    assert loop.on == [2, 3, 6, 7]
    assert not loop.traced


def test_every_step_can_be_recorded_and_none():
    assert Loop(every=1).run(3).recorded == [0, 1, 2]
    silent = Loop().run(3)
    assert silent.recorded == silent.on == []


def test_traced_steps_are_recorded_once_and_aligned():
    loop = Loop(every=4, traces=[5, 0, 5]).run(9)
    assert loop.recorded == [0, 3, 5, 7]
    assert loop.traced == loop.aligned == [0, 5]


def test_a_resumed_fit_continues_counting_and_does_not_trace_past_steps():
    loop = Loop(every=4, traces=[2, 12], start=10).run(6)
    assert loop.recorded == [11, 12, 15]
    assert loop.traced == [12]
    assert Loop(traces=[20], start=10).run(3).windows.traces == [20]


def test_several_optimizer_steps_in_a_batch_are_one_window():
    loop = Loop(every=2, traces=[5], stride=2).run(4)
    assert loop.recorded == [2, 4, 6]  # of optimizer steps
    assert loop.logged == [1, 2, 3]
    assert loop.traced == [4]


def test_an_evaluation_within_a_step_drops_it_and_the_next_one_is_recorded():
    loop = Loop(every=4, micro_batches=2).run(3)
    loop.step(evaluates=True)
    assert not loop.recorder.is_on
    assert loop.run(6).recorded == [4, 7]


def test_a_step_is_recorded_until_the_next_one_begins_or_something_else_does():
    loop = Loop(every=1)
    for evaluates in (False, True, False):
        loop.step(evaluates=evaluates)
        for _ in range(2):  # the rest of the step
            loop.recorder.span(Kind.WRITE, "", GIB).end()
    loop.run(0)
    assert loop.recorded == [0, 1, 2]
    assert loop.written == [2 * GIB, 0, 2 * GIB]


# ---------------------------------------------------------------- how fast


def test_the_clock_counts_neither_the_first_step_nor_evaluation(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Throughput(nn.Linear(2, 3))
    for batch in range(6):
        clock.before_batch()
        now[0] += 10.0 if batch < 2 else 1.0
        clock.after_batch([torch.zeros(3, 2), torch.zeros(3)], has_stepped=batch % 2 == 1)
        now[0] += 0.5  # the next batch is loaded
        if batch == 3:
            clock.pause()
            now[0] += 100.0
    warm = clock.warm
    assert (warm.steps, warm.batches, warm.samples) == (2, 4, 12)
    assert warm.seconds == pytest.approx(4 * 1.0 + 3 * 0.5)
    assert math.isnan(warm.tokens)
    clock.after_batch(object(), has_stepped=True)
    assert math.isnan(clock.warm.samples)


def test_a_lap_has_all_since_the_one_before_with_the_first_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    module = nn.Linear(2, 3)
    clock = Throughput(module)
    for _ in range(2):
        for _ in range(3):
            clock.before_batch()
            now[0] += 2.0
            clock.after_batch(torch.zeros(4, 8, dtype=torch.long), has_stepped=True)
        now[0] += 1.0  # until the device is idle
        assert clock.lap() == (3, 3, 12, 96, 96 * 6 * 9, 7.0)
    module.flops_per_batch = 1000  # the attribute that Lightning's ThroughputMonitor reads
    clock.after_batch(torch.zeros(4, 8), has_stepped=True)
    assert clock.lap().flops == 1000
    for wrong in ("1e12", -1, lambda: 1000):
        module.flops_per_batch = wrong
        with pytest.raises(ValueError, match="flops_per_batch of Linear must be a number of at"):
            clock.after_batch(torch.zeros(4, 8), has_stepped=True)


def test_tokens_are_integers_by_sample_and_position():
    ids, images, classes = (
        torch.zeros(4, 8, dtype=torch.long),
        torch.zeros(4, 3, 2, 2),
        torch.ones(4),
    )
    assert num_tokens(ids) == num_tokens([ids, ids]) == num_tokens({"ids": ids}) == 32
    assert num_tokens({"labels": classes, "input_ids": ids}) == 32
    for batch in ([images, classes], classes.long(), {"images": images, "ids": ids}, object()):
        assert math.isnan(num_tokens(batch))


def test_a_token_has_six_operations_for_each_parameter_that_multiplies_it_and_is_trained():
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    module = nn.Sequential(embedding, nn.Linear(4, 4, bias=False), head)
    assert flops_per_token(module) == 6 * (16 + 40)
    module[1].requires_grad_(False)
    assert flops_per_token(module) == 4 * 16 + 6 * 40
    head.weight = embedding.weight
    assert flops_per_token(module) == 4 * 16 + 6 * 40
    module[1].weight.quant_state = SimpleNamespace(shape=torch.Size([8, 4]))  # bitsandbytes' 4 bits
    assert flops_per_token(module) == 4 * 32 + 6 * 40


def test_torch_counts_what_the_parameters_cost_a_token_and_what_attention_adds():
    config = GPTConfig(context=32, width=128, num_layers=2, num_heads=2)
    with torch.device("meta"):
        module, ids = GPT(config), torch.zeros(4, 32, dtype=torch.long)
    counted = measure_flops(module, lambda: module(ids), torch.Tensor.sum) / ids.numel()
    assert counted == pytest.approx(flops_per_token(module) + 12 * 2 * 128 * 32, rel=0.02)


def test_the_peak_is_that_of_the_dtype_in_lightnings_table(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    devices = [torch.device("cuda", 0)]
    assert peak_flops(ZeroStrategy(param_dtype="bf16", parallel_devices=devices)) == 312e12
    double = ZeroStrategy(precision_plugin=DoublePrecision(), parallel_devices=devices)
    assert peak_flops(double) == 9.7e12
    autocast = MixedPrecision("bf16-mixed", "cpu")
    mixed = ZeroStrategy(param_dtype="fp32", precision_plugin=autocast, parallel_devices=devices)
    assert peak_flops(mixed) == 312e12
    assert math.isnan(peak_flops(ZeroStrategy(parallel_devices=[torch.device("cpu")])))


# ---------------------------------------------------------------- the rest


def test_resident_memory_is_that_of_the_process():
    now, peak = allocated_and_peak_bytes(torch.device("cpu"))
    with mmap.mmap(-1, 64 * 2**20) as fresh:  # malloc may hand out pages that are resident
        fresh.write(b"x" * len(fresh))
        later, peak_later = allocated_and_peak_bytes(torch.device("cpu"))
    assert later - now > 0.9 * 64 * 2**20
    assert peak_later >= max(later, peak)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"every_n_steps": -1}, ValueError, "every_n_steps must not be negative, got -1"),
        ({"every_n_steps": 2.5}, TypeError, "every_n_steps must be an integer, got 2.5"),
        ({"every_n_steps": True}, TypeError, "every_n_steps must be an integer, got True"),
        ({"trace_steps": 3}, TypeError, "trace_steps must be a list of integers, got 3"),
        ({"trace_steps": "3"}, TypeError, "each of trace_steps must be an integer, got '3'"),
        ({"trace_steps": [-3]}, ValueError, "each of trace_steps must not be negative"),
        ({"report": 1}, TypeError, "report must be True or False, got 1"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error, text):
    with pytest.raises(error, match=text):
        ZeroMonitor(**arguments)
