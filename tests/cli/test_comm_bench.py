"""`lightning-zero comm-bench`, on real gloo ranks, and the file of rates that a plan reads."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lightning_zero.cli import main
from lightning_zero.cli.comm_bench import LinkReport, Timing
from lightning_zero.cli.rates import read_rates, write_rates
from tests.support.ranks import RankError, elastic_environment, run_ranks

BENCH = ["comm-bench", "--on-cpu"]
QUICK = ["--sizes", "64KiB", "256KiB", "--seconds", "0.01"]
SMALL = ["plan", "--model", "tiny", "--context", "32", "--ranks", "2", "--on-cpu", "--json"]
SMALL += ["--optimizer", "adafactor"]  # planned faster
LOG = Path("../rank0.log")  # from the folder of the ranks


def _alone(rank, world_size, arguments, is_killing=False):
    """Runs without a launcher; returns status, output, content of the rates file, and seconds."""
    for name in elastic_environment(rank, world_size, 1):
        del os.environ[name]
    write_rates(Path("rates.json"), {"io_gb_per_s": 1.5})
    if is_killing:
        threading.Thread(target=_kill_the_second_child, daemon=True).start()
    begin = time.monotonic()
    status = main([*BENCH, "--rates", "rates.json", *arguments])
    seconds = time.monotonic() - begin
    return status, LOG.read_text(), Path("rates.json").read_text(), seconds


def _kill_the_second_child():
    while "measuring" not in LOG.read_text():
        time.sleep(0.05)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)


def test_it_starts_ranks_measures_them_and_writes_rates_that_plan_reads(tmp_path, capsys):
    ((status, printed, rates, _),) = run_ranks(
        1, _alone, ["--devices", "2", "--json", *QUICK], has_group=False
    )
    assert status == 0, printed
    found = json.loads(printed[printed.index("{") :])
    assert found["ranks"] == "gloo on cpu, 2 ranks"
    assert [(t["collective"], t["nbytes"]) for t in found["timings"]] == [
        (collective, size * 1024)
        for size in (64, 256)
        for collective in ("all_gather", "reduce_scatter", "all_reduce")
    ]
    assert all(0 < seconds < 5 for seconds in found["latency_seconds"].values())
    path, rate = tmp_path / "rates.json", found["link_gb_per_s"]
    path.write_text(rates)
    assert read_rates(path) == {"io_gb_per_s": 1.5, "link_gb_per_s": rate}
    for more in (["--rates", str(path)], ["--link-gb-per-s", str(rate)]):
        assert main([*SMALL, *more]) == 0
        choice = json.loads(capsys.readouterr().out)["choices"][0]  # transfers between ranks only
        expected = choice["step_bytes"]["wire"] / rate / 1e9
        assert choice["transfer_seconds"][1] == pytest.approx(expected)


def test_bandwidths_are_those_of_nccl_tests():
    gather, reduced, summed = (
        Timing(name, 8 * 2**30, 4, 2.0) for name in ("all_gather", "reduce_scatter", "all_reduce")
    )
    assert gather.algorithm_rate == summed.algorithm_rate == 4 * 2**30
    assert gather.bus_rate == reduced.bus_rate == 3 * 2**30
    assert summed.bus_rate == 6 * 2**30
    slower, small = Timing("reduce_scatter", 8 * 2**30, 4, 3.0), Timing("all_gather", 2**10, 4, 1.0)
    assert LinkReport((small, gather, slower, summed), {}).link_rate == 2 * 2**30


def test_a_rank_that_dies_stops_the_others_and_is_reported():
    ((status, printed, _, seconds),) = run_ranks(
        1, _alone, ["--devices", "2", "--seconds", "300"], True, has_group=False
    )
    assert status == 2
    assert "rank 1 exited with SIGKILL" in printed or "timed out waiting for the others" in printed
    assert seconds < 40


def _launched(rank, world_size, num_ranks, is_dying):
    """Runs as under torchrun with `num_ranks` ranks; returns status and output."""
    os.environ["WORLD_SIZE"] = str(num_ranks)
    if is_dying and rank == 1:
        threading.Timer(1.0, lambda: os._exit(1)).start()
    more = ["--seconds", "300"] if is_dying else ["--timeout", "5", *QUICK]
    return main([*BENCH, *more]), LOG.read_text()


def test_ranks_that_a_launcher_has_started_measure_together():
    statuses = run_ranks(2, _launched, 2, False, has_group=False)
    assert [status for status, _ in statuses] == [0, 0]
    printed = statuses[0][1]
    assert "lightning-zero plan: --link-gb-per-s" in printed
    assert printed.count("all_reduce") == 4  # two sizes, the latency, the legend


def test_a_dead_or_missing_rank_is_reported_under_a_launcher():
    ((status, printed),) = run_ranks(1, _launched, 2, False, has_group=False)
    assert status == 2
    assert "rank 0 of 2 timed out waiting for the others" in printed
    assert "within 5 s (--timeout)" in printed
    with pytest.raises(RankError, match="rank 0 of 2 timed out waiting for the others"):
        run_ranks(2, _launched, 2, True, has_group=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--devices", "1"], "expected at least 2 ranks, got '1'"),
        (["--devices", "two"], "expected at least 2 ranks, got 'two'"),
        (["--sizes", "much"], "expected a size such as 24GiB, 500MB or 1000B, got 'much'"),
        (["--seconds", "0"], "expected a number of seconds above 0, got '0'"),
        (["--timeout", "inf"], "expected a number of seconds above 0, got 'inf'"),
    ],
)
def test_bad_input_is_an_error_with_status_2(arguments, text, capsys):
    with pytest.raises(SystemExit) as left:
        main(["comm-bench", *arguments])
    assert left.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_ranks", "arguments", "text"),
    [
        (1, [], "expected at least two ranks, got one"),
        (2, ["--devices", "2"], "--devices starts ranks, but a launcher has already started 2"),
    ],
)
def test_the_ranks_of_a_launcher_are_validated(num_ranks, arguments, text, monkeypatch, capsys):
    for name, value in elastic_environment(0, num_ranks, 1).items():
        monkeypatch.setenv(name, value)
    assert main(["comm-bench", "--on-cpu", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("link: 3", "is not JSON"),
        ("[]", "expected an object with link_gb_per_s, cpu_link_gb_per_s, io_gb_per_s, memory_gb"),
        ('{"link": 3}', "got {'link': 3}"),
        ('{"link_gb_per_s": "fast"}', "must be GB per second such as 25, got 'fast'"),
        ('{"io_gb_per_s": -1}', "must be GB per second such as 25, got -1"),
    ],
)
def test_an_invalid_file_of_rates_is_refused_before_the_measurement(
    content, text, tmp_path, capsys
):
    path = tmp_path / "rates.json"
    path.write_text(content)
    for command in (SMALL, BENCH, ["io-bench", str(tmp_path)]):
        assert main([*command, "--rates", str(path)]) == 2
        assert text in capsys.readouterr().err
    assert path.read_text() == content


def test_a_missing_file_of_rates_is_named(tmp_path, capsys):
    assert main([*SMALL, "--rates", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
