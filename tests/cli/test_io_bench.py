"""`lightning-zero io-bench`: output, errors and cleanup."""

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from lightning_zero.cli import main
from lightning_zero.cli.io_bench import DiskRates, DiskReport, TierSettings, as_text

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from lightning_zero.cli import main
sys.exit(main())
"""


def io_bench(*arguments):
    return main(["io-bench", *map(str, arguments)])


QUICK = ["--size", "256MiB", "--seconds", "0.03"]


def test_it_prints_rates_and_settings_to_use(tmp_path, capsys):
    assert io_bench(tmp_path, *QUICK, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file_bytes"] == 256 * 2**20
    assert min(found["tier_gb_per_s"].values()) > 0
    assert found["settings"]["buffer_size"] * 4 == found["settings"]["buffer_bytes"]
    assert found["settings"]["buffer_count"] >= 2
    assert len(found["sweep"]) >= 12
    assert not list(tmp_path.iterdir())


def test_it_prints_a_table(tmp_path):
    settings, rates = TierSettings(buffer_count=3), DiskRates(1.5e9, 2e9, 2.5e9)
    printed = as_text(DiskReport(tmp_path, "ext4", True, 2**30, settings, (), rates))
    assert "tier  1.50   2.00   2.50" in printed
    assert "buffer_count=3, buffer_size=16777216 (3 x 64 MiB of CPU memory)" in printed


def test_it_refuses_to_fill_the_disk(mounted, capsys):
    disk = mounted("-t", "tmpfs", "-o", "size=272m", "tmpfs")
    assert io_bench(disk, *QUICK) == 2
    said = capsys.readouterr().err
    assert f"268435456 bytes would fill {disk}" in said
    assert not list(disk.iterdir())


def test_an_invalid_size_is_refused(tmp_path, capsys):
    assert io_bench(tmp_path, "--size", "1MiB") == 2
    assert "at least 268435456 bytes, got 1048576" in capsys.readouterr().err
    for option, value, text in (
        ("--size", "four", "a size such as 24GiB, 500MB or 1000B, got 'four'"),
        ("--seconds", "nan", "a number of seconds above 0, got 'nan'"),
        ("--seconds", "0", "a number of seconds above 0, got '0'"),
    ):
        with pytest.raises(SystemExit) as ended:
            io_bench(tmp_path, option, value)
        assert ended.value.code == 2
        assert text in capsys.readouterr().err


def test_a_missing_folder_is_an_error_that_names_it(tmp_path, capsys):
    assert io_bench(tmp_path / "no", *QUICK) == 2
    assert f"does not exist; is the disk mounted? Make the directory first: '{tmp_path}/no'" in (
        capsys.readouterr().err
    )


@pytest.mark.slow
def test_the_file_is_removed_when_it_is_stopped(tmp_path):
    benches = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        path = tmp_path / number.name
        path.mkdir()
        command = [sys.executable, "-c", SCRIPT, "io-bench", str(path), "--size", "256MiB"]
        benches[number] = subprocess.Popen(
            command,
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
            preexec_fn=partial(signal.signal, number, signal.SIG_DFL),
        )
    try:
        for number, bench in benches.items():
            while not list((tmp_path / number.name).glob("*/*io-bench")):
                assert bench.poll() is None
                time.sleep(0.05)
            bench.send_signal(number)
        for number, bench in benches.items():
            assert bench.wait(timeout=60) != 0
            assert not list((tmp_path / number.name).iterdir())
    finally:
        for bench in benches.values():
            bench.kill()
