"""Traces in the format of Perfetto and chrome://tracing."""

import json
from collections import defaultdict

import pytest

from lightning_zero.observe.recordings import CPU_TIMING_NOTE, chrome_trace
from lightning_zero.record.spans import Kind, Recording, Span
from tests.support.recordings import NBYTES, made_ranks, made_step


def complete(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def named(trace, what):
    found = [e for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == what]
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in found}


def test_every_span_is_one_complete_event_with_what_viewers_need():
    recordings = made_ranks(2)
    trace = json.loads(json.dumps(chrome_trace(recordings)))
    events = complete(trace)
    assert len(events) == sum(len(recording.spans) + 1 for recording in recordings)
    for event in events:
        assert set(event) >= {"name", "cat", "ts", "dur", "pid", "tid", "args"}
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    assert trace["otherData"] == {"step": 10, "world_size": 2, "note": CPU_TIMING_NOTE}


def test_ranks_are_processes_and_lanes_are_threads():
    trace = chrome_trace(made_ranks(2))
    assert set(named(trace, "process_name").values()) == {"rank 0", "rank 1"}
    threads = named(trace, "thread_name")
    of_rank_0 = [name for (pid, _), name in threads.items() if pid == 0]
    assert of_rank_0[:3] == ["window", "compute", "step"]
    assert {"all_gather", "reduce", "agree", "waits"} <= set(of_rank_0)
    assert {(event["pid"], event["tid"]) for event in complete(trace)} == set(threads)


@pytest.mark.parametrize("overlaps", [True, False])
def test_events_of_one_thread_nest_to_the_nanosecond(overlaps):
    by_thread = defaultdict(list)
    for event in complete(chrome_trace(made_ranks(3, overlaps=overlaps, num_units=40))):
        start = round(event["ts"] * 1000)
        by_thread[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1000)))
    for events in by_thread.values():
        open_ends = []
        for start, stop in sorted(events, key=lambda e: (e[0], -e[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or stop <= open_ends[-1]
            open_ends.append(stop)


def test_events_have_bytes_rates_and_waits():
    events = complete(chrome_trace([made_step()]))
    (gather,) = [e for e in events if e["name"] == "all_gather model.layers.1"][:1]
    assert gather["args"]["bytes"] == NBYTES
    assert gather["args"]["bucket"] == "model.layers.1"
    seconds = gather["dur"] / 1e6
    assert gather["args"]["gb_per_s"] == pytest.approx(NBYTES / 1e9 / seconds, rel=1e-3)
    waits = [e for e in events if e["cat"] == "wait"]
    assert len(waits) == sum(span.is_wait for span in made_step().spans)
    assert waits[0]["name"] == "wait for all_gather model.layers.0"
    assert waits[0]["cname"] == "terrible"


def test_spans_before_the_window_are_shown_and_time_begins_there():
    spans = (Span(Kind.ALL_GATHER, "a", -0.5, 0.25, 8), Span(Kind.FORWARD, "", 0.0, 1.0))
    events = complete(chrome_trace([Recording(0, 1, 3, 1.0, spans)]))
    times = {event["cat"]: (event["ts"], event["dur"]) for event in events}
    assert times["all_gather"] == (0.0, 750_000.0)
    assert times["window"] == times["forward"] == (500_000.0, 1_000_000.0)


def test_ranks_share_one_clock():
    ranks = [
        Recording(0, 2, 3, 1.0),
        Recording(1, 2, 3, 1.0, (Span(Kind.ALL_GATHER, "a", -0.25, 0),)),
    ]
    windows = {e["pid"]: e["ts"] for e in complete(chrome_trace(ranks)) if e["cat"] == "window"}
    assert windows == {0: 250_000.0, 1: 250_000.0}


def test_a_step_without_spans_is_a_window_alone():
    events = complete(chrome_trace([Recording(0, 1, 3, 1.0)]))
    assert [(event["cat"], event["ts"], event["dur"]) for event in events] == [
        ("window", 0.0, 1_000_000.0)
    ]


def test_mistakes_are_errors():
    with pytest.raises(ValueError, match="of at least one rank, got none"):
        chrome_trace([])
