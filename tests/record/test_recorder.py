"""A recorder splits spans into windows, and keeps nothing while it is off."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zero import Engine, ZeroConfig
from lightning_zero.record.recorder import Recorder
from lightning_zero.record.spans import Kind


def test_nothing_is_kept_while_it_is_off():
    recorder = Recorder()
    with recorder.span(Kind.STEP, "before"):
        recorder.begin_layer(Kind.FORWARD, "layer")
        recorder.count_prefetch(is_hit=True)
    assert recorder.mark() is None
    assert not recorder.is_on
    recorder.begin(0)
    assert recorder.is_on
    recording = recorder.end()
    assert recording.spans == ()
    assert recording.hits == 0
    assert not recorder.is_on
    recorder.span(Kind.STEP, "between").end()
    assert not recorder._finished


def test_after_start_it_stays_on_and_a_window_drops_spans_that_ended_before_it():
    recorder = Recorder()
    recorder.start()
    for number in range(2):
        for _ in range(100):
            recorder.span(Kind.STEP, "before").end()
        under_way = recorder.span(Kind.STEP, "under way")
        recorder.begin(number)
        assert not recorder._finished
        under_way.end()
        assert [span.name for span in recorder.end().spans] == ["under way"]
        assert recorder.is_on


def test_a_window_must_begin_before_it_ends():
    recorder = Recorder()
    recorder.start()
    with pytest.raises(RuntimeError, match="call begin"):
        recorder.end()
    recorder.begin(0)
    recorder.stop()
    with pytest.raises(RuntimeError, match="call begin"):
        recorder.end()


def test_a_span_has_its_times_bytes_and_names():
    recorder = Recorder(rank=1, world_size=4)
    recorder.begin(7)
    with recorder.span(Kind.READ, "bucket", 4096):
        time.sleep(0.02)
    with recorder.span(Kind.READ, "bucket", is_wait=True):
        time.sleep(0.01)
    recording = recorder.end()
    assert (recording.rank, recording.world_size, recording.step) == (1, 4, 7)
    read, waited = recording.spans
    assert (read.kind, read.name, read.nbytes, read.is_wait) == (Kind.READ, "bucket", 4096, False)
    assert 0 <= read.start_s < read.stop_s <= waited.start_s < waited.stop_s <= recording.seconds
    assert read.seconds >= 0.02
    assert recording.exposed_s(Kind.READ) == pytest.approx(waited.seconds)


def test_a_span_in_flight_at_the_end_is_in_both_windows_and_its_bytes_in_the_first():
    recorder = Recorder()
    recorder.start()
    recorder.span(Kind.WRITE, "over before").end()
    across = recorder.span(Kind.WRITE, "across", 100)
    recorder.begin(0)
    later = recorder.span(Kind.WRITE, "later", 1)
    first = recorder.end()
    recorder.begin(1)
    later.end()
    across.end()
    second = recorder.end()
    recorder.begin(2)
    third = recorder.end()
    assert [span.name for span in first.spans] == ["across", "later"]
    assert all(span.stop_s == first.seconds for span in first.spans)
    assert {span.name for span in second.spans} == {"across", "later"}
    assert all(span.start_s < 0 < span.stop_s for span in second.spans)
    assert third.spans == ()
    assert [window.nbytes(Kind.WRITE) for window in (first, second, third)] == [1, 0, 0]


def test_stop_drops_what_was_kept():
    recorder = Recorder()
    recorder.begin(0)
    under_way = recorder.span(Kind.WRITE, "under way")
    recorder.span(Kind.WRITE, "over").end()
    recorder.stop()
    under_way.end()
    recorder.begin(1)
    assert recorder.end().spans == ()


def test_threads_record_side_by_side_and_waits_of_background_threads_do_not_count():
    recorder = Recorder()
    recorder.begin(0)

    def work():
        for _ in range(500):
            with recorder.span(Kind.WRITE, nbytes=1), recorder.span(Kind.WRITE, is_wait=True):
                pass

    threads = [threading.Thread(target=work, name=name) for name in ("any", "zero-step_0")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recording = recorder.end()
    assert recording.nbytes(Kind.WRITE) == 1000
    assert sum(span.is_wait for span in recording.spans) == 500


def test_in_backward_a_layer_ends_the_previous_one_and_a_phase_ends_all():
    recorder = Recorder()
    recorder.begin(0)
    recorder.begin_phase(Kind.FORWARD)
    recorder.begin_layer(Kind.FORWARD, "outer")
    recorder.begin_layer(Kind.FORWARD, "inner")
    recorder.end_layer(Kind.FORWARD, "inner")
    recorder.end_layer(Kind.FORWARD, "outer")
    recorder.begin_phase(Kind.BACKWARD)
    recorder.begin_layer(Kind.BACKWARD, "outer")
    recorder.begin_layer(Kind.BACKWARD, "inner")
    recorder.begin_phase(None)
    spans = {(span.kind, span.name): span for span in recorder.end().spans}
    assert len(spans) == 6
    forward, backward = spans[Kind.FORWARD, ""], spans[Kind.BACKWARD, ""]
    assert forward.stop_s <= backward.start_s
    inner, outer = spans[Kind.FORWARD, "inner"], spans[Kind.FORWARD, "outer"]
    assert forward.start_s <= outer.start_s <= inner.start_s
    assert inner.stop_s <= outer.stop_s <= forward.stop_s
    before, after = spans[Kind.BACKWARD, "outer"], spans[Kind.BACKWARD, "inner"]
    assert before.stop_s <= after.start_s
    assert after.stop_s <= backward.stop_s


@pytest.mark.parametrize("stage", [0, 3])
def test_one_process_records_its_computation(stage):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.AdamW(module.parameters())
    engine = Engine(module, [optimizer], ZeroConfig(stage=stage))
    for step in range(2):
        engine.recorder.begin(step)
        engine.backward(module(torch.ones(8, 64)).sum())
        engine.step()
        engine.zero_grad()
        recording = engine.recorder.end()
    passes = [s for s in recording.spans if s.name == "" and s.kind.is_compute]
    assert [span.kind for span in passes] == [Kind.FORWARD, Kind.BACKWARD]
    assert {span.name for span in recording.of(Kind.STEP)} == {b.plan.name for b in engine.buckets}
    assert recording.waited_s < recording.seconds
    engine.close()


def test_an_optimizer_that_steps_all_in_one_call_has_one_span():
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], ZeroConfig(stage=3, assume_elementwise=True))
    engine.recorder.begin(0)
    engine.backward(module(torch.ones(2, 8)).sum())
    engine.step()
    steps = list(engine.recorder.end().of(Kind.STEP))
    assert [span.name for span in steps] == ["SGD"]
    engine.close()


def test_a_backward_inside_a_forward_interrupts_it():
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], ZeroConfig(stage=3))
    engine.recorder.begin(0)
    with engine.forward_context():  # as in manual optimization
        for _ in range(2):
            engine.backward(module(torch.ones(2, 8)).sum())
            engine.step()
            engine.zero_grad()
    recording = engine.recorder.end()
    passes = [s for s in recording.spans if s.name == "" and s.kind.is_compute]
    assert [s.kind for s in passes] == [*[Kind.FORWARD, Kind.BACKWARD] * 2, Kind.FORWARD]
    assert all(a.stop_s <= b.start_s for a, b in pairwise(passes))
    engine.close()


class Checkpointed(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_a_forward_that_backward_repeats_is_one_inside_backward():
    module = Checkpointed(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], ZeroConfig(stage=3))
    engine.recorder.begin(0)
    engine.backward(module(torch.ones(2, 8, requires_grad=True)).sum())
    recording = engine.recorder.end()
    backward = next(s for s in recording.of(Kind.BACKWARD) if s.name == "")
    repeated = [s.name for s in recording.of(Kind.FORWARD) if s.start_s > backward.start_s]
    assert repeated == ["2", "1", "0"]
    engine.close()
