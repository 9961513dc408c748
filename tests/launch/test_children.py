"""Rank 0 waits for the ranks that it has started, and reports that only after a while."""

import subprocess
import sys

import pytest

from lightning_zero.launch import children
from lightning_zero.launch.children import Children, ProcessSnapshot


@pytest.mark.parametrize(("report_s", "is_reported"), [(0.05, True), (30.0, False)])
def test_a_wait_at_exit_is_reported_if_it_is_long(report_s, is_reported, monkeypatch, capsys):
    assert children._REPORT_S == 30
    monkeypatch.setattr(children, "_REPORT_S", report_s)
    snapshot = ProcessSnapshot({}, 1, sys.excepthook)
    started = Children("a job", first_rank=1, before=snapshot)
    started.processes.append(
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
    )
    started._wait_for_children()
    text = "lightning_zero: rank 0 finished; waiting for other ranks: rank 1 is still running.\n"
    assert capsys.readouterr().err == (text if is_reported else "")
