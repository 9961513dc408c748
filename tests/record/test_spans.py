"""A recording measures hidden and exposed time."""

import json

import pytest

from lightning_zero.record.spans import Kind, Recording, Span


def recording(*spans, seconds=10.0):
    return Recording(rank=0, world_size=2, step=3, seconds=seconds, spans=spans)


def test_overlapping_collectives_count_once_and_only_inside_the_window():
    window = recording(
        Span(Kind.ALL_GATHER, "a", -2.0, 1.0, nbytes=100),
        Span(Kind.ALL_GATHER, "b", 0.5, 3.0, nbytes=10**9),
        Span(Kind.ALL_GATHER, "c", 9.0, 12.0, nbytes=10**9),
    )
    assert window.in_flight_s(Kind.ALL_GATHER) == pytest.approx(4.0)
    assert window.nbytes(Kind.ALL_GATHER) == 2 * 10**9
    assert window.gb_per_s(Kind.ALL_GATHER) == pytest.approx(0.5)


def test_what_is_waited_for_is_exposed_and_the_rest_overlapped():
    window = recording(
        Span(Kind.REDUCE_SCATTER, "a", 1.0, 5.0),
        Span(Kind.REDUCE_SCATTER, "a", 4.0, 5.0, is_wait=True),
        Span(Kind.AGREE, "", 4.5, 6.0, is_wait=True),
        Span(Kind.BACKWARD, "", 0.0, 4.0),
    )
    assert window.exposed_s(Kind.REDUCE_SCATTER) == pytest.approx(1.0)
    assert window.overlapped_s(Kind.REDUCE_SCATTER) == pytest.approx(3.0)
    assert window.waited_s == pytest.approx(2.0)
    assert window.in_flight_s(Kind.BACKWARD) == pytest.approx(4.0)


def test_nothing_is_overlapped_while_the_computation_waits_for_something_else():
    window = recording(
        Span(Kind.REDUCE_SCATTER, "a", 1.0, 5.0),
        Span(Kind.AGREE, "round", 2.0, 5.0, is_wait=True),
    )
    assert window.exposed_s(Kind.REDUCE_SCATTER) == 0
    assert window.overlapped_s(Kind.REDUCE_SCATTER) == pytest.approx(1.0)


def test_a_wait_for_its_own_step_is_no_wait_for_other_ranks():
    window = recording(
        Span(Kind.STEP, "a", 0.0, 3.0),
        Span(Kind.STEP, "a", 2.0, 3.0, is_wait=True),
        Span(Kind.AGREE, "", 5.0, 5.5, is_wait=True),
    )
    assert window.exposed_s(Kind.STEP) == pytest.approx(1.0)
    assert window.overlapped_s(Kind.STEP) == pytest.approx(2.0)
    assert window.waited_s == pytest.approx(1.5)
    assert window.waited_for_others_s == pytest.approx(0.5)


def test_a_kind_that_did_not_happen_is_zero():
    assert recording().gb_per_s(Kind.READ) == 0.0
    assert recording().waited_s == 0.0


def test_a_recording_survives_json():
    window = recording(Span(Kind.STEP, "layers.0", 0.25, 0.5), Span(Kind.READ, "x", 1, 2, 4096))
    assert Recording.from_dict(json.loads(json.dumps(window.to_dict()))) == window


def test_other_json_is_refused():
    with pytest.raises(ValueError, match="fields of a recording"):
        Recording.from_dict({"spans": [{"kind": "lunch"}]})
