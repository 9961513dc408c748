"""`lightning-zero sweep`, as a user runs it."""

import json

import pytest

from lightning_zero.cli import main

GIB = 2**30


@pytest.fixture
def sweep(tmp_path):
    """Three jobs, the last of which has failed."""
    for number, stage in ((2, 3), (10, 2), (11, 1)):
        job = tmp_path / str(number)
        (job / ".hydra").mkdir(parents=True)
        (job / ".hydra" / "overrides.yaml").write_text(
            f"- zero=stage{stage}\n- trainer.devices=2\n"
        )
        (job / ".hydra" / "config.yaml").write_text("optimized_metric: val/loss\n")
        if number == 11:
            continue
        report = {
            "stage": stage,
            "world_size": 2,
            "memory": {"largest_rank_bytes": stage * GIB, "peak_bytes": 8 * GIB},
            "speed": {"samples_per_s": None if number == 10 else 12.34},
            "metrics": {"val/loss": 0.5, "val/accuracy": 0.75},
        }
        (job / "zero").mkdir()
        (job / "zero" / "report.json").write_text(json.dumps(report))
    return tmp_path


def test_every_job_has_a_line(sweep, capsys):
    assert main(["sweep", str(sweep)]) == 1
    names, units, *jobs = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (names, units) == (
        ["states", "peak"],
        ["job", "overrides", "stage", "ranks", "GiB", "GiB", "samples/s", "val/loss"],
    )
    words = ["zero=stage3", "trainer.devices=2"]
    assert jobs[0] == ["2", *words, "3", "2", "3", "8", "12.34", "0.5"]
    assert jobs[1] == ["10", "zero=stage2", words[1], "2", "2", "2", "8", "0.5"]
    assert jobs[2] == ["11", "zero=stage1", words[1], "no", "report"]


def test_another_metric_may_be_shown_of_one_job_only(sweep, capsys):
    assert main(["sweep", str(sweep / "2"), "--metric", "val/accuracy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split()[-1] == "0.75"
    assert lines[-2].endswith("val/accuracy")


def test_a_directory_without_jobs_is_an_error(tmp_path, capsys):
    assert main(["sweep", str(tmp_path)]) == 2
    assert "holds no job: expected the directory of a sweep" in capsys.readouterr().err
