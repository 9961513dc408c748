"""Recordings of training steps on two ranks match the stage."""

from __future__ import annotations

import os
import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_zero import Engine, OffloadConfig, ZeroConfig, full_grad
from lightning_zero.record.spans import Kind, Recording
from tests.support import ranks
from tests.support.warm import run_ranks

RANKS, WIDTH, LAYERS = 2, 64, 4
LAYER = WIDTH * WIDTH + WIDTH  # elements, a multiple of the ranks
EACH = {"reduce_bucket_size": LAYER}  # one bucket per layer
PAUSE_S = 0.3


def make(width=WIDTH, **options):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    return module, Engine(module, [optimizer], ZeroConfig(**options))


def step(rank, module, engine, number, *, width=WIDTH, rows=8, pause_s=0.0):
    generator = torch.Generator().manual_seed(10 * number + rank)
    loss = module(torch.randn(rows, width, generator=generator)).square().mean()
    time.sleep(pause_s * rank)
    engine.backward(loss)
    engine.step()
    engine.zero_grad()
    return loss.item()


def window(rank, module, engine, number, **options):
    engine.recorder.begin(number)
    step(rank, module, engine, number, **options)
    return engine.recorder.end()


def windows(rank, options, num=2, **of_step):
    """Recordings of steps after the first two."""
    module, engine = make(**options)
    step(rank, module, engine, 0)
    engine.recorder.start()
    step(rank, module, engine, 1)
    recordings = [window(rank, module, engine, 2 + i, **of_step) for i in range(num)]
    engine.close()
    return recordings


CASES = {
    "stage 0": {"stage": 0, **EACH},
    "stage 1": {"stage": 1, **EACH},
    "stage 2": {"stage": 2, **EACH},
    "stage 3": {"stage": 3},
    "stage 3, no prefetch": {"stage": 3, "prefetch_bucket_size": 0},
    "stage 3, kept": {"stage": 3, "reshard_after_forward": False},
    "replicas": {"stage": 2, "sharding_group_size": 1, **EACH},
}


def _record(rank, world_size):
    found = {name: windows(rank, options) for name, options in CASES.items()}
    found["straggler"] = windows(rank, CASES["stage 3"], num=1, pause_s=PAUSE_S)
    alone = {**CASES["stage 2"], "overlap_comm": False}
    found["no overlap"] = windows(rank, alone, num=1, pause_s=PAUSE_S)
    return {name: [r.to_dict() for r in recordings] for name, recordings in found.items()}


@pytest.fixture(scope="module")
def recorded():
    """Windows by case and rank."""
    ranks = run_ranks(RANKS, _record)
    return {
        name: [[Recording.from_dict(values) for values in each[name]] for each in ranks]
        for name in ranks[0]
    }


def begun(recording, kind):
    return [
        s
        for s in recording.spans
        if s.kind is kind and not s.is_wait and 0 <= s.start_s < recording.seconds
    ]


# By case, how many all-gathers, reduce-scatters and all-reduces of a layer a step has.
SENT = {
    "stage 0": (0, 0, LAYERS),
    "stage 1": (LAYERS, LAYERS, 0),
    "stage 2": (LAYERS, LAYERS, 0),
    "stage 3": (2 * LAYERS - 1, LAYERS, 0),  # backward begins with the last layer, still unsharded
    "stage 3, no prefetch": (2 * LAYERS - 1, LAYERS, 0),
    "stage 3, kept": (LAYERS, LAYERS, 0),
}


@pytest.mark.parametrize("case", list(SENT))
def test_spans_and_bytes_of_a_step_are_those_of_the_stage(recorded, case):
    half = LAYER * 4 * (RANKS - 1) // RANKS
    gathers, reductions, averages = SENT[case]
    for rank, found in enumerate(recorded[case]):
        for number, recording in enumerate(found):
            assert (recording.rank, recording.world_size) == (rank, RANKS)
            assert recording.step == 2 + number
            assert len(begun(recording, Kind.ALL_GATHER)) == gathers
            assert len(begun(recording, Kind.REDUCE_SCATTER)) == reductions
            assert len(begun(recording, Kind.ALL_REDUCE)) == averages
            assert recording.nbytes(Kind.ALL_GATHER) == gathers * half
            assert recording.nbytes(Kind.REDUCE_SCATTER) == reductions * half
            assert recording.nbytes(Kind.ALL_REDUCE) == averages * 2 * half


def test_all_reduces_over_replicas_are_counted_separately(recorded):
    for recording in (r for found in recorded["replicas"] for r in found):
        assert recording.nbytes(Kind.ALL_REDUCE) == LAYERS * 2 * LAYER * 4 * (RANKS - 1) // RANKS
        assert recording.nbytes(Kind.REDUCE_SCATTER) == recording.nbytes(Kind.ALL_GATHER) == 0


def test_every_wait_for_a_collective_lies_within_it(recorded):
    for recording in (r for case in recorded.values() for found in case for r in found):
        for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE):
            flights = [s for s in recording.spans if s.kind is kind and not s.is_wait]
            for wait in (s for s in recording.spans if s.kind is kind and s.is_wait):
                assert any(
                    f.name == wait.name and f.start_s <= wait.start_s and wait.stop_s <= f.stop_s
                    for f in flights
                ), wait


@pytest.mark.parametrize("case", ["stage 1", "stage 2"])
def test_all_gathers_after_the_step_are_waited_for_in_the_next_window(recorded, case):
    for first, second in recorded[case]:
        assert len(list(second.of(Kind.ALL_GATHER, is_wait=True))) == LAYERS
        across = [s for s in second.spans if s.kind is Kind.ALL_GATHER and s.start_s < 0]
        unended = [
            s for s in first.spans if s.kind is Kind.ALL_GATHER and s.stop_s == first.seconds
        ]
        assert {s.name for s in across if not s.is_wait} == {s.name for s in unended}


def test_prefetched_units_count_as_hits(recorded):
    for found in recorded["stage 3"]:
        for recording in found:
            # The first layer is unsharded when it is needed; no all-gather follows the last use.
            assert recording.hits + recording.misses == 2 * LAYERS - 1
            assert recording.misses == 1
    for recording in (r for found in recorded["stage 3, kept"] for r in found):
        assert (recording.hits, recording.misses) == (LAYERS - 1, 1)
    for recording in (r for found in recorded["stage 3, no prefetch"] for r in found):
        assert (recording.hits, recording.misses) == (0, 2 * LAYERS - 1)
    for recording in (r for found in recorded["stage 2"] for r in found):
        assert (recording.hits, recording.misses) == (0, 0)


def test_layers_compute_one_after_another_within_forward_and_backward(recorded):
    for recording in (r for found in recorded["stage 3"] for r in found):
        for kind, order in ((Kind.FORWARD, 1), (Kind.BACKWARD, -1)):
            entire, *layers = sorted(recording.of(kind), key=lambda s: (s.name != "", s.start_s))
            assert [s.name for s in layers] == [str(i) for i in range(LAYERS)][::order]
            assert entire.name == ""
            assert all(a.stop_s <= b.start_s for a, b in pairwise(layers))
            assert entire.start_s <= layers[0].start_s
            assert layers[-1].stop_s <= entire.stop_s


def test_a_straggler_waits_for_no_rank(recorded):
    (prompt,), (slow,) = recorded["straggler"]
    assert prompt.waited_s > slow.waited_s + 0.5 * PAUSE_S


def test_without_overlap_nothing_is_hidden(recorded):
    (prompt,), _ = recorded["no overlap"]
    assert prompt.waited_s > 0.5 * PAUSE_S  # for the slower rank
    assert prompt.overlapped_s(Kind.REDUCE_SCATTER) < 0.5 * PAUSE_S
    waits = list(prompt.of(Kind.REDUCE_SCATTER, is_wait=True))
    reductions = list(prompt.of(Kind.REDUCE_SCATTER))
    assert [(s.name, s.stop_s) for s in reductions] == [(s.name, s.stop_s) for s in waits]
    assert all(a.stop_s <= b.start_s for a, b in pairwise(reductions))


def _cover(rank, world_size):
    options = {"stage": 2, "reduce_bucket_size": 512 * 512}
    module, engine = make(512, **options)
    found = []
    for number in range(12):  # other processes may slow some of them down
        recording = window(rank, module, engine, number, width=512, rows=128)
        kinds = [recording.of(kind) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.STEP)]
        computed = sum(span.seconds for kind in kinds for span in kind)
        found.append(computed / recording.seconds)  # including waits
    engine.close()
    return max(found)


def test_forward_backward_and_step_cover_the_step():
    for covered in run_ranks(RANKS, _cover):
        assert 0.8 < covered <= 1


def _train(rank, options, *, is_recorded):
    module, engine = make(**options)
    losses = []
    for number in range(3):
        if is_recorded:
            engine.recorder.begin(number)
        losses.append(step(rank, module, engine, number))
        if is_recorded:
            engine.recorder.end()
    engine.close()
    return losses, [p.detach().clone() for p in module.parameters()]


def _files(rank):
    os.makedirs("swap", exist_ok=True)
    nvme = OffloadConfig("nvme", nvme_path="swap", buffer_count=3, buffer_size=2**16)
    on_disk = OffloadConfig(
        "nvme", nvme_path="swap", buffer_count=3, buffer_size=2**16, max_in_cpu_bytes=0
    )
    module, engine = make(stage=3, offload_param=nvme, offload_optimizer=on_disk)
    step(rank, module, engine, 0)
    step(rank, module, engine, 1)
    found = []
    for number in (2, 3):
        engine.storage.pipeline.drain()
        before = engine.memory_report()
        engine.recorder.begin(number)
        step(rank, module, engine, number)
        engine.storage.pipeline.drain()
        recording, after = engine.recorder.end(), engine.memory_report()
        assert recording.nbytes(Kind.READ) == after.nvme_read_bytes - before.nvme_read_bytes > 0
        written = after.nvme_written_bytes - before.nvme_written_bytes
        assert recording.nbytes(Kind.WRITE) == written > 0
        assert recording.exposed_s(Kind.READ) > 0
        assert recording.exposed_s(Kind.WRITE) > 0
        # Every all-gather needs a shard from a file; the next ones of the trace are prefetched.
        assert recording.read_hits + recording.read_misses == 2 * LAYERS - 1
        assert recording.read_hits > 0
        found.append(recording)
    engine.close()


def _steps_beside(rank):
    module, engine = make(stage=2, overlap_step=True, **EACH)
    step(rank, module, engine, 0)
    engine.recorder.start()
    step(rank, module, engine, 1)
    engine.recorder.begin(2)
    step(rank, module, engine, 2)
    recording = engine.recorder.end()
    names = {bucket.plan.name for bucket in engine.buckets}
    assert {s.name for s in recording.of(Kind.STEP, is_wait=True)} == names
    engine.close()


def _goes_on(rank):
    """Returns a recording after an exception in the middle of a backward."""
    module, engine = make(stage=3)
    step(rank, module, engine, 0)
    engine.recorder.begin(1)
    handle = module[1].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(rank, module, engine, 1)
    handle.remove()
    engine.zero_grad()
    engine.recorder.end()
    step(rank, module, engine, 2)
    step(rank, module, engine, 3)  # as the step before: later steps replay the recorded schedule
    engine.recorder.begin(4)
    step(rank, module, engine, 4)
    recording = engine.recorder.end()
    assert [len(begun(recording, k)) for k in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)] == [7, 4]
    entire = [s.kind for s in recording.spans if s.name == "" and s.kind.is_compute]
    assert entire == [Kind.FORWARD, Kind.BACKWARD]
    assert all(span.stop_s <= recording.seconds for span in recording.spans)
    engine.close()


def _norms(rank, stage, **options):
    module, engine = make(stage=stage, **options)
    module[1].requires_grad_(False)
    generator = torch.Generator().manual_seed(rank)
    loss = module(torch.randn(8, WIDTH, generator=generator)).square().mean()
    engine.backward(loss)
    norms = engine.grad_norms()
    for order in (2.0, float("inf")):
        norms = engine.grad_norms(order)
        for bucket in engine.buckets:
            grads = [full_grad(p) for p in bucket.parameters if p.grad is not None]
            if not grads:
                assert bucket.plan.name not in norms
                continue
            flat = torch.cat([grad.flatten() for grad in grads]).float()
            expected = torch.linalg.vector_norm(flat, order)
            torch.testing.assert_close(norms[bucket.plan.name], expected.cpu())
        total = torch.linalg.vector_norm(torch.stack(list(norms.values())), order)
        torch.testing.assert_close(total, engine.grad_norm(order))
    # One element of the last rank's shard.
    engine.buckets[0].grads.main.apply_(lambda part: part[-1:].fill_(torch.nan) if rank else None)
    assert engine.grad_norm(float("inf")).isnan()
    assert engine.grad_norms(float("inf"))[engine.buckets[0].plan.name].isnan()
    engine.close()


def _various(rank, world_size):
    for options in (CASES["stage 1"], CASES["stage 3"]):
        one, other = (_train(rank, options, is_recorded=is_on) for is_on in (False, True))
        assert one[0] == other[0]
        assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    _files(rank)
    _steps_beside(rank)
    _goes_on(rank)


def test_recording_changes_no_value_counts_files_and_goes_on_after_an_exception():
    run_ranks(RANKS, _various)


def _all_norms(rank, world_size):
    for stage in range(4):
        _norms(rank, stage, **EACH)
    _norms(rank, 2, sharding_group_size=1, **EACH)
    os.makedirs("swap", exist_ok=True)
    files = OffloadConfig("nvme", nvme_path="swap", buffer_size=2**16, max_in_cpu_bytes=0)
    _norms(rank, 3, offload_optimizer=files)


def test_the_norm_of_each_bucket_is_that_of_its_unsharded_mean_gradient():
    run_ranks(RANKS, _all_norms)


def _fake(rank, world_size):
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    module, engine = make(stage=3)
    for number in range(2):
        step(rank, module, engine, number)
    recording = window(rank, module, engine, 2)
    padded = sum(bucket.layout.numel for bucket in engine.plan.buckets)
    engine.close()
    assert recording.nbytes(Kind.REDUCE_SCATTER) == padded * 4 * 7 // 8
    assert len(begun(recording, Kind.ALL_GATHER)) == 2 * LAYERS - 1
    assert recording.overlapped_s(Kind.REDUCE_SCATTER) > 0  # it ends as soon as it is issued


def test_one_process_that_simulates_eight_ranks_records_too():
    ranks.run_ranks(1, _fake, has_group=False)
