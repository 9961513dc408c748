"""One file of metrics for one job."""

import csv

import pytest

from lightning_zero.observe.loggers import ContinuedCSVLogger


def log(folder, step, **metrics):
    logger = ContinuedCSVLogger(folder, name="csv", version="")
    logger.log_metrics(metrics, step)
    logger.finalize("success")
    with open(folder / "csv" / "metrics.csv", newline="") as file:
        return [(row["step"], row.get("loss"), row.get("lr")) for row in csv.DictReader(file)]


def test_a_requeued_job_appends_to_its_file_also_with_a_new_metric(tmp_path, monkeypatch):
    assert log(tmp_path, 0, loss=1.0) == [("0", "1.0", None)]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert log(tmp_path, 1, loss=0.5) == [("0", "1.0", None), ("1", "0.5", None)]
    rows = [("0", "1.0", ""), ("1", "0.5", ""), ("2", "", "0.1")]
    assert log(tmp_path, 2, lr=0.1) == rows
    assert log(tmp_path / "first", 5, loss=2.0) == [("5", "2.0", None)]


def test_another_job_in_the_same_folder_starts_a_new_file(tmp_path):
    log(tmp_path, 0, loss=1.0)
    with pytest.warns(UserWarning, match="will be deleted"):
        assert log(tmp_path, 1, loss=0.5) == [("1", "0.5", None)]
