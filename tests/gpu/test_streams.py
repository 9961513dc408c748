"""Communication runs beside compute: seen in the events of torch.profiler."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import lightning_zero
from tests.gpu.training import build, form_group, optimizer_of, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
COMMUNICATION = ("zero::reduce_scatter", "zero::all_gather")  # ranges of every step but stage 0's


def _trace(rank: int, world_size: int, backend: str, stage: int) -> list[dict[str, Any]]:
    """The events of two training steps after two others."""
    form_group(backend, rank, world_size)
    model = build()
    engine = lightning_zero.Engine(
        model,
        optimizers=[optimizer_of(model)],
        config=lightning_zero.ZeroConfig(stage=stage),
    )
    list(train(engine, model, rank, 2))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        list(train(engine, model, rank, 2))
        torch.cuda.synchronize()
    path = Path(f"trace{rank}.json")  # in the folder of this test's ranks
    profiler.export_chrome_trace(str(path))
    engine.close()
    return [
        event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"
    ]


def _on_gpu(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") in ON_GPU]


def _compute_stream(events: list[dict[str, Any]]) -> int:
    """The stream of most matrix multiplications."""
    streams = collections.Counter(
        event["args"]["stream"] for event in _on_gpu(events) if "gemm" in event["name"].lower()
    )
    assert streams, "no kernel of the trace has gemm in its name"
    return streams.most_common(1)[0][0]


def _launched_in(events: list[dict[str, Any]], prefixes: tuple[str, ...]) -> list[dict[str, Any]]:
    """What runs on the GPU because of a call inside a range with one of these names."""
    ranges = [
        event
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(prefixes)
    ]
    calls = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        for range_ in ranges
        if event["tid"] == range_["tid"]
        and range_["ts"] <= event["ts"] <= range_["ts"] + range_["dur"]
    }
    return [event for event in _on_gpu(events) if event["args"].get("correlation") in calls]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_collectives_run_beside_compute(stage):
    (events,) = run_ranks(1, _trace, "nccl", stage, timeout_s=180, has_group=False)
    names = {event["name"].partition(" ")[0] for event in events}
    assert names.issuperset(COMMUNICATION), sorted(n for n in names if n.startswith("zero::"))
    compute = _compute_stream(events)
    communication = _launched_in(events, COMMUNICATION)
    communication += [event for event in _on_gpu(events) if "nccl" in event["name"].lower()]
    beside = [event for event in communication if event["args"]["stream"] != compute]
    assert beside == communication, {
        event["name"] for event in communication if event not in beside
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranges_carry_the_bucket(stage):
    (events,) = run_ranks(1, _trace, "nccl", stage, timeout_s=180, has_group=False)
    ranges = {event["name"] for event in events if event["name"].startswith("zero::")}
    assert any(len(name.split()) == 2 for name in ranges), sorted(ranges)


class LateSGD(torch.optim.SGD):
    """Its kernels wait in their stream for some 50 ms, and the CPU does not."""

    def step(self, closure=None):
        torch.cuda._sleep(100_000_000)
        return super().step(closure)


def _state_after_a_step(rank: int, world_size: int) -> None:
    form_group("nccl", rank, world_size)
    model = build()
    optimizer = LateSGD(model.parameters(), lr=0.1, momentum=0.9)
    config = lightning_zero.ZeroConfig(stage=2, overlap_step=True)
    engine = lightning_zero.Engine(model, optimizers=[optimizer], config=config)
    list(train(engine, model, rank, 2))
    state = optimizer.state_dict()["state"]
    early = [entry["momentum_buffer"].clone() for entry in state.values()]
    torch.cuda.synchronize()
    for seen, entry in zip(early, state.values(), strict=True):
        assert torch.equal(seen, entry["momentum_buffer"])
    engine.close()


def test_a_state_dict_comes_after_the_kernels_of_a_step_beside_the_forward():
    run_ranks(1, _state_after_a_step, timeout_s=180, has_group=False)
