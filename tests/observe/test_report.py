"""The report at the end of a job."""

import json
import math
import re

import pytest

from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.stage import State
from lightning_zero.observe.metrics import Speed
from lightning_zero.observe.report import JobReport, TransferStats
from lightning_zero.record.spans import Kind

GIB = 1024**3
STATES = {State.PARAM: GIB, State.GRAD: 2 * GIB, State.OPTIM: 3 * GIB}


def report(**changes):
    transfers = [
        TransferStats("all_gather", 0.02, 0.015, 0.005, 0.25),
        TransferStats("agree", 0.0, 0.0, 0.001, 0.0),
    ]
    fields = {
        "description": {"stage": 3, "versions": {"torch": "2.13"}},
        "metrics": {"val/loss": 0.5, "val/accuracy": math.nan},
        "peak_bytes": [4.0 * GIB, 5.0 * GIB],
        "world_size": 2,
        "num_steps": 11,
        "memory": [MemoryReport(rank, 2, {"device": STATES}, STATES) for rank in range(2)],
        "speed": Speed.from_counts(
            [[10, 20, 40, 640, 2e12, 5.0], [10, 20, 60, 960, 3e12, 4.0]], 2e12
        ),
        "num_recorded": 3,
        "step_s": 0.1,
        "waited_s": 0.005,
        "skew_s": 0.002,
        "straggler": (1, 2),
        "transfers": transfers,
        "is_on_cpu": False,
    }
    return JobReport(**fields | changes)


def test_the_report_has_throughput_and_overlapped_communication():
    text = report().text()
    speed = "2.00 steps/s, 4.00 batches/s, 20.0 samples/s, 320 tokens/s, 0.5 TFLOPS per device, "
    assert f"2 rank(s): {speed}25.0% MFU (over 10 steps" in " ".join(text.split())
    assert "mean of 3 recorded steps of 100.0 ms" in text
    assert "communication: one recorded step of 100.0 ms" in report(num_recorded=1).text()
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "all_gather 15.00 15.0% 5.00 5.0% 256.00 13.4" in rows
    assert "agree 0.00 0.0% 1.00 1.0%" in rows
    assert "total 5.00 5.0%" in rows
    assert "rank 1 is the straggler in 2 of 3 steps: the others waited 2.00 ms (2.0%)" in rows
    assert len([row for row in rows if re.match(r"rank \d \d", row)]) == 2


def test_no_rank_is_a_straggler_where_ranks_hardly_wait():
    text = report(skew_s=0.001).text()
    assert "no straggler: ranks waited 1.00 ms (1.0%) for the last one" in text
    assert "for the last one, which changes" in report(straggler=(0, 1)).text()
    always = report(straggler=(0, 3), skew_s=0.05).text()
    assert "rank 0 is the straggler: the others waited 50.00 ms (50.0%)" in always


def test_rates_of_collectives_on_cpu_are_lower_bounds():
    transfers = [
        TransferStats("all_gather", 0.02, 0.015, 0.005, 0.25),
        TransferStats("nvme_read", 0.1, 0.1, 0.0, 0.25),
    ]
    text = report(is_on_cpu=True, transfers=transfers).text()
    assert "256.00  >= 13.4" in text
    assert ">= 2.68" not in text
    assert "on CPU the end of a collective is only seen" in text
    assert "on CPU" not in report().text()


def test_unknown_values_are_left_out_of_the_report():
    unknown = report(speed=Speed.from_counts([[10, 20, *[math.nan] * 3, 5.0]]), num_recorded=0)
    assert "2.00 steps/s, 4.00 batches/s (over" in unknown.text()
    assert "no steps recorded after the first one" in unknown.text()
    assert "throughput" not in report(speed=Speed.from_counts([[0.0] * 6])).text()


def test_the_report_is_written_as_json(tmp_path):
    paths = report(speed=Speed.from_counts([[0.0] * 6])).write(tmp_path / "zero")
    written, memory = (json.loads(path.read_text()) for path in paths)
    assert written["transfers"]["all_gather"]["gb_per_s"] == pytest.approx(
        0.25 * 2**30 / 1e9 / 0.02
    )
    assert written["speed"] == {
        "num_steps": 0,
        "steps_per_s": None,
        "batches_per_s": None,
        "samples_per_s": None,
        "tokens_per_s": None,
        "tflops_per_device": None,
        "mfu": None,
    }
    assert memory[1]["tiers"]["device"] == {
        "parameters": GIB,
        "gradients": 2 * GIB,
        "optimizer": 3 * GIB,
    }


def test_what_was_not_measured_is_null_in_the_report(tmp_path):
    unknown = {"step_s": math.nan, "waited_s": math.nan, "skew_s": math.nan, "straggler": None}
    kinds = [TransferStats.from_means(kind, {}) for kind in (Kind.ALL_GATHER, Kind.AGREE)]
    made = report(num_recorded=0, transfers=kinds, **unknown)
    written = json.loads(made.write(tmp_path)[0].read_text())
    assert {written[name] for name in unknown} == {None}
    assert set(written["transfers"]["all_gather"].values()) == {"all_gather", None}
    assert written["metrics"] == {"val/loss": 0.5, "val/accuracy": None}
    assert written["stage"] == 3
    assert written["memory"] == {
        "largest_rank_bytes": 6 * GIB, "data_parallel_bytes": 6 * GIB, "peak_bytes": 5 * GIB
    }  # fmt: skip
    alone = TransferStats.from_means(Kind.AGREE, {"zero_comm/agree_exposed_s": 0.001})
    assert (alone.exposed_s, math.isnan(alone.gib), math.isnan(alone.gb_per_s)) == (
        0.001,
        True,
        True,
    )
    rows = [" ".join(line.split()) for line in report(transfers=[alone]).text().splitlines()]
    assert "agree 1.00 1.0%" in rows
