"""A recording of a GPU contains device time, from events on the streams, and host time."""

from __future__ import annotations

import time

import pytest
import torch

import lightning_zero
from lightning_zero.record.spans import Kind
from tests.gpu.training import build, form_group, optimizer_of, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu

SLACK_S = 2e-3  # between an event and the host that reads it


def _record(rank, world_size, backend, stage, offload):
    form_group(backend, rank, 8 if backend == "fake" else world_size)
    model = build()
    config = lightning_zero.ZeroConfig(stage=stage, offload_optimizer=offload)
    engine = lightning_zero.Engine(model, optimizers=[optimizer_of(model)], config=config)
    list(train(engine, model, rank, 2))
    engine.recorder.start()
    list(train(engine, model, rank, 1))
    found = []
    for number in range(2):
        engine.recorder.begin(number)
        began = time.perf_counter()
        list(train(engine, model, rank, 1))
        torch.cuda.synchronize()  # else the last collective may end between two windows
        recording = engine.recorder.end()
        found.append((recording, time.perf_counter() - began))
    padded = sum(bucket.layout.numel for bucket in engine.plan.buckets)
    size = engine.comm.mesh.num_shards
    engine.close()
    return found, padded * 4 * (size - 1) // size


@pytest.mark.parametrize("backend", ["nccl", "fake"])
@pytest.mark.parametrize(("stage", "offload"), [(1, None), (2, "cpu"), (3, None), (3, "cpu")])
def test_spans_of_streams_and_of_the_host_share_one_clock(backend, stage, offload):
    arguments = (backend, stage, offload)
    ((found, reduced),) = run_ranks(1, _record, *arguments, timeout_s=180, has_group=False)
    for recording, seconds in found:
        assert recording.seconds == pytest.approx(seconds, rel=0.2, abs=5 * SLACK_S)
        forward, backward = (
            next(s for s in recording.of(kind) if s.name == "")
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        assert 0 <= forward.start_s < forward.stop_s <= backward.start_s + SLACK_S
        assert backward.stop_s <= recording.seconds + SLACK_S
        assert recording.in_flight_s(Kind.STEP) > 0
        assert recording.nbytes(Kind.REDUCE_SCATTER) == reduced
        for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
            assert any(span.kind is kind and not span.is_wait for span in recording.spans)
            num_waits = sum(span.kind is kind and span.is_wait for span in recording.spans)
            slack_s = (1 + num_waits) * SLACK_S
            assert recording.exposed_s(kind) <= recording.in_flight_s(kind) + slack_s
        assert (recording.nbytes(Kind.TO_CPU) > 0) == (offload == "cpu")
        assert all(span.start_s > -10 * seconds - 1 for span in recording.spans)


def test_the_engine_waits_on_the_device_only_where_a_window_begins_or_ends():
    (is_busy,) = run_ranks(1, _keeps_the_host_free, timeout_s=180, has_group=False)
    assert is_busy


def _keeps_the_host_free(rank, world_size):
    form_group("nccl", rank, world_size)
    model = build()
    config = lightning_zero.ZeroConfig(stage=1)
    engine = lightning_zero.Engine(model, optimizers=[optimizer_of(model)], config=config)
    list(train(engine, model, rank, 2))
    engine.recorder.begin(0)
    torch.cuda._sleep(2 * 10**9)  # cycles: about a second
    engine.backward(model(torch.zeros(1, 8, dtype=torch.long, device="cuda")).sum())
    event = torch.cuda.current_stream().record_event()
    is_busy = not event.query()  # the host has come here long before the device
    engine.recorder.end()
    engine.close()
    return is_busy
