"""Overlapping spans of a lane are in different rows, and there are no more rows than needed."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.observe.recordings import lanes_of, pack
from lightning_zero.record.spans import Kind, Recording, Span

TIMES = st.integers(0, 30)
SPANS = st.lists(
    st.builds(
        lambda kind, start, length, is_wait: Span(
            kind, "x", start / 10, (start + length) / 10, is_wait=is_wait
        ),
        st.sampled_from(Kind),
        TIMES,
        TIMES,
        st.booleans(),
    ),
    max_size=20,
)


def overlap(a, b):
    return a.start_s < b.stop_s and b.start_s < a.stop_s


def contains(a, b):
    return a.start_s <= b.start_s and b.stop_s <= a.stop_s


def pairs(row):
    return [(a, b) for place, a in enumerate(row) for b in row[place + 1 :]]


@given(SPANS)
def test_every_span_is_in_one_row_and_spans_of_a_row_only_nest(spans):
    lanes = lanes_of(Recording(0, 1, 0, 3.0, tuple(spans)))
    placed = [span for rows in lanes.values() for row in rows for span in row]
    assert sorted(map(str, placed)) == sorted(map(str, spans))
    for name, rows in lanes.items():
        for a, b in (pair for row in rows for pair in pairs(row)):
            nests = name in ("compute", "step") and (contains(a, b) or contains(b, a))
            assert nests or not overlap(a, b), name


@given(SPANS)
def test_there_are_no_more_rows_than_spans_at_one_time(spans):
    rows = pack(spans)
    times = {span.start_s for span in spans}
    at_once = [sum(s.start_s <= t < s.stop_s or s.start_s == t for s in spans) for t in times]
    assert len(rows) <= max(at_once, default=0)


def test_lanes_come_in_one_order_with_the_waits_last():
    spans = (
        Span(Kind.WRITE, "a", 0, 1, 8),
        Span(Kind.ALL_GATHER, "a", 0, 1, is_wait=True),
        Span(Kind.ALL_REDUCE, "a", 0, 1, 8),
        Span(Kind.REDUCE_SCATTER, "b", 1, 2, 8),
        Span(Kind.TO_CPU, "a", 0, 1, 8),
        Span(Kind.FORWARD, "", 0, 1),
    )
    lanes = lanes_of(Recording(0, 1, 0, 3.0, spans))
    assert list(lanes) == ["compute", "reduce", "copies", "files", "waits"]
    assert [len(rows) for rows in lanes.values()] == [1, 1, 1, 1, 1]
