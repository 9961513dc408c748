"""Plots of jobs of all sizes are written, and matplotlib's settings are not changed."""

import dataclasses

import matplotlib
import pytest

from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.stage import State
from lightning_zero.observe import plots as timeline
from lightning_zero.observe.plots import Scale, lay_out_rank, plot_memory, plot_timeline
from lightning_zero.record.spans import Kind, Recording, Span
from tests.support.recordings import made_ranks, made_step

MIB = 2**20
DATA_PARALLEL = {State.PARAM: 4 * MIB, State.GRAD: 4 * MIB, State.OPTIM: 8 * MIB}


def size_of(path):
    """Width and height in pixels."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


@pytest.mark.default_cases("recordings1-18", "recordings2-1")
@pytest.mark.parametrize(
    ("recordings", "num_lanes"),
    [
        (made_ranks(2, num_units=40), 12),
        (made_ranks(8), 18),  # of three ranks
        ([Recording(0, 1, 0, 0.0)], 1),
    ],
)
def test_a_timeline_is_as_high_as_its_lanes(recordings, num_lanes, tmp_path):
    before = dict(matplotlib.rcParams)
    plot_timeline(recordings, tmp_path / "a.png")
    width, height = size_of(tmp_path / "a.png")
    assert width == 1500
    assert 30 * num_lanes <= height <= 60 * num_lanes + 250
    assert dict(matplotlib.rcParams) == before


def block(recording, inches=14.0):
    return lay_out_rank(recording, 0.0, Scale(0.0, recording.seconds, inches / recording.seconds))


def test_names_are_written_where_they_fit():
    texts = {bar.text for bar in block(made_step(num_units=4)).bars}
    assert "model.layers.0" in texts
    texts = {
        bar.text for bar in block(made_step(num_units=10)).bars if bar.span.kind is Kind.BACKWARD
    }
    assert "layers.7" in texts
    assert not any("model" in text for text in texts)
    for num_units in (20, 400):  # never "7" alone, which has no meaning
        texts = {bar.text for bar in block(made_step(num_units=num_units)).bars}
        assert not any(text[:1].isdigit() for text in texts)


def test_waits_are_drawn_on_the_lane_that_waits():
    spans = (
        Span(Kind.FORWARD, "", 0.0, 1.0),
        Span(Kind.STEP, "a", 1.0, 2.0),
        Span(Kind.ALL_GATHER, "a", 0.2, 0.4, is_wait=True),
        Span(Kind.READ, "a", 1.2, 1.4, is_wait=True),
    )
    drawn = block(Recording(0, 1, 0, 2.0, spans))
    top = {lane.name: lane.top for lane in drawn.lanes}
    waits = {bar.span.kind: bar.top for bar in drawn.bars if bar.span.is_wait}
    assert waits == {Kind.ALL_GATHER: top["compute"], Kind.READ: top["step"]}
    assert [(w.start_s, w.stop_s) for w in drawn.waits] == [(0.2, 0.4), (1.2, 1.4)]


def test_names_are_written_beside_waits():
    spans = (
        Span(Kind.FORWARD, "", 0.0, 1.0),
        Span(Kind.ALL_GATHER, "a", 0.3, 0.6, is_wait=True),
        Span(Kind.STEP, "a", 0.3, 0.6, is_wait=True),
    )
    forward, *waits = block(Recording(0, 1, 0, 1.0, spans)).bars
    assert (forward.text, forward.text_s) == ("forward", 0.8)
    assert [wait.text for wait in waits] == ["all_gather", "step"]


def test_a_wait_of_forward_during_an_overlapped_step_is_on_the_compute_lane():
    spans = (
        Span(Kind.FORWARD, "", 0.0, 1.0),
        Span(Kind.STEP, "a", 0.0, 0.8),
        Span(Kind.STEP, "a", 0.3, 0.6, is_wait=True),
    )
    drawn = block(Recording(0, 1, 0, 1.0, spans))
    assert [bar.top for bar in drawn.bars if bar.span.is_wait] == [drawn.lanes[0].top]


def test_a_module_is_drawn_behind_its_units():
    drawn = block(made_step())
    outer = [bar for bar in drawn.bars if bar.is_outer]
    assert [bar.span.kind for bar in outer] == [Kind.FORWARD, Kind.BACKWARD]


def test_kinds_with_waits_alone_have_no_colour_in_the_legend():
    spans = (
        Span(Kind.FORWARD, "", 0.0, 1.0),
        Span(Kind.ALL_GATHER, "a", 0.1, 0.4, 8),
        Span(Kind.AGREE, "norm", 0.5, 0.6, is_wait=True),
    )
    assert list(timeline.legend_entries([Recording(0, 1, 0, 1.0, spans)])) == [
        (Kind.FORWARD, "forward: 1000.0 ms (100%)"),
        (Kind.ALL_GATHER, "all_gather: 300.0 ms (30%) overlapped, 0.0 ms (0%) exposed"),
        (None, "agree: 100.0 ms (10%) exposed"),
        (None, "compute waits: 100.0 ms (10%) in total"),
    ]


def reports(world_size, tiers=("device",)):
    share = {state: n // world_size for state, n in DATA_PARALLEL.items()}
    by_tier = {tier: {s: n // len(tiers) for s, n in share.items()} for tier in tiers}
    return [MemoryReport(rank, world_size, by_tier, DATA_PARALLEL) for rank in range(world_size)]


def test_a_bar_for_each_rank_and_one_of_data_parallel(tmp_path):
    heights = []
    for world_size in (2, 4, 16, 64):
        plot_memory(reports(world_size, ("device", "cpu")), tmp_path / "a.png")
        width, height = size_of(tmp_path / "a.png")
        assert width == 900
        heights.append(height)
    more = [height - heights[0] for height in heights]
    assert more == [0, 60, 420, 0]  # of 64 ranks only those with fewest and most bytes


def test_replicas_are_ranks_too(tmp_path):
    hybrid = [*reports(2), *reports(2)]  # the same shards twice
    plot_memory(hybrid, tmp_path / "a.svg")
    assert "each of 4 ranks" in (tmp_path / "a.svg").read_text()


def test_mistakes_are_errors(tmp_path):
    with pytest.raises(ValueError, match="report of at least one rank"):
        plot_memory([], tmp_path / "a.png")
    with pytest.raises(ValueError, match="recording of at least one rank"):
        plot_timeline([], tmp_path / "a.png")
    with pytest.raises(ValueError, match="Format 'docx' is not supported"):
        plot_timeline([made_step()], tmp_path / "a.docx")
    with pytest.raises(FileNotFoundError):
        plot_timeline([dataclasses.replace(made_step())], tmp_path / "no" / "a.png")
