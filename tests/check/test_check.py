"""`lightning-zero check` finds what is wrong, names it, and leaves nothing but its report."""

from __future__ import annotations

import argparse
import contextlib
import errno
import getpass
import json
import multiprocessing.forkserver
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_zero.check import checks, ranks
from lightning_zero.check.ranks import Check, Outcome, redacted
from lightning_zero.cli import check, main
from lightning_zero.cli.options import add_commands
from lightning_zero.engine.engine import Engine
from tests.slurm.cluster import wait_for
from tests.support.pages import ROOT
from tests.support.ranks import _context

REPORT = ["lightning-zero-check.json", "lightning-zero-check.md"]


@pytest.fixture(autouse=True)
def _server_of_all_tests():
    _context()
    multiprocessing.forkserver.ensure_running()


def run(folder, *arguments, of=checks.CHECKS):
    """Status, and what was found by check."""
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    args = parser.parse_args(["check", "--quick", "--out", str(folder), *arguments])
    status = check.run(args, of)
    assert sorted(path.name for path in folder.iterdir()) == REPORT
    found = json.loads((folder / REPORT[0]).read_text())["checks"]
    return status, {line["check"]: line for line in found}


def named(*names):
    return [check for check in checks.CHECKS if check.run.__name__ in names]


def test_two_ranks_agree_with_ddp_and_survive_failures(tmp_path, capsys):
    some = named("versions", "stages", "killed_rank", "raising_rank", "disk", "own_model")
    status, found = run(tmp_path, "--on-cpu", "--ranks", "2", of=some)
    assert status == 0, found
    assert found["versions"]["numbers"]["ranks"] == 2
    assert set(found["stages"]["numbers"]) == {"stage 1", "stage 3"}
    assert "rank 0 stops because rank 1" in found["killed rank"]["text"]
    assert "rank 1 raised ArithmeticError: planted by the check" in found["raising rank"]["text"]
    assert [found[name]["result"] for name in ("disk", "own model")] == ["skipped"] * 2
    printed = capsys.readouterr().out
    assert " 2/6 stages ... ok" in printed
    assert "open an issue" in printed
    page = (tmp_path / REPORT[1]).read_text()
    assert page.startswith("# lightning-zero check\n\nOptions: quick, on_cpu.\n\n```text\ncheck ")
    for text in (page, (tmp_path / REPORT[0]).read_text()):
        assert not {platform.node(), str(Path.home()), str(tmp_path)} & set(text.split())
        assert str(tmp_path) not in text


def sleeps(at):
    """A rank sleeps."""
    if at.rank == 1:
        time.sleep(60)
    torch.distributed.barrier()


def wrong_gradient(at):
    """A rank has a gradient of the wrong size."""
    backward = Engine.backward
    Engine.backward = lambda engine, loss: backward(engine, loss * (1 + at.rank))
    return checks.stages(at)


def full_disk(at):
    """The disk is full."""

    def allocate(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.posix_fallocate = allocate
    return checks.disk(at)


def test_planted_faults_are_found_and_named(tmp_path):
    planted = [Check(sleeps, 3.0), Check(wrong_gradient), Check(full_disk)]
    arguments = ("--on-cpu", "--ranks", "2", "--nvme-path", str(tmp_path))
    status, found = run(tmp_path, *arguments, of=planted)
    assert status == 1
    assert {line["result"] for line in found.values()} == {"failed"}
    text = found["sleeps"]["text"]
    assert "rank 1 did not return in 3 s: sleeps, test_check.py:" in text
    assert re.search(r"rank 0 did not return in 3 s: \w+ in sleeps, test_check.py:", text), text
    assert "stage 1: " in found["wrong gradient"]["text"]
    assert "of the largest change" in found["wrong gradient"]["text"]
    assert "rank 0, 1 raised" in found["wrong gradient"]["text"]
    assert "No space left on device" in found["full disk"]["text"]
    assert str(tmp_path) not in found["full disk"]["text"]


def test_a_rank_that_should_have_ended_but_did_not_is_a_failure():
    fine = [Outcome("ok", "as it should be"), Outcome("ok", "trained on")]
    found = ranks._judge(Check(checks.killed_rank, loses="was killed"), fine)
    assert found.result == "failed"
    assert "rank 1 should have ended with was killed" in found.text


class NoParameters(torch.nn.Module):
    """Has nothing to train."""

    def forward(self, x):
        return x


class Exits(torch.nn.Module):
    """Ends the process that builds it."""

    def __init__(self):
        super().__init__()
        sys.exit(3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--module", f"{__name__}:NoParameters"], "NoParameters has no parameters that are"),
        (
            ["--module", f"{__name__}:Exits"],
            "Exits cannot be built on the meta device, where tenso",
        ),
        (["--out", __file__], "--out must be a folder, got the file "),
        (["--on-cpu", "--ranks", "100000"], "--ranks must be at most "),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--input", "8x8", *arguments]) == 2
    assert text in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_does_not_start_leaves_its_own_error():
    run, _store = ranks.join_ranks(2, on_cpu=True)
    with pytest.raises(Exception, match="pickle"):
        ranks.run_check(run, Check(lambda at: ("", {})), "1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"on {platform.node()} at 10.0.0.7:29500", "on NAME at ADDRESS"),
        (f"OSError: '{Path.home()}/runs/x.ckpt' of {getpass.getuser()}", "OSError: 'PATH' of NAME"),
        ("1.5 GB/s in stage 1/3, torch 2.13.0+cpu", "1.5 GB/s in stage 1/3, torch 2.13.0+cpu"),
    ],
)
def test_a_report_names_no_host_user_or_path(text, expected):
    assert redacted(text) == expected


def command(*arguments, launcher=(), folder):
    words = [*launcher, "-m", "lightning_zero", "check", "--on-cpu", "--out", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return [*words, *arguments], {
        "env": env,
        "cwd": folder,
        "text": True,
        "start_new_session": True,
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("launcher", "arguments"),
    [
        ((sys.executable,), ("--ranks", "2")),
        ((sys.executable,), ("--ranks", "4", "--quick")),
        ((sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"), ("--quick",)),
        ((sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"), ("--quick",)),
    ],
)
def test_all_checks_pass_on_this_machine(launcher, arguments, tmp_path):
    words, options = command(
        "--nvme-path",
        str(tmp_path),
        "--config",
        "tiny",
        "--context",
        "16",
        *arguments,
        launcher=launcher,
        folder=tmp_path,
    )
    done = subprocess.run(words, capture_output=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == REPORT
    found = json.loads((tmp_path / REPORT[0]).read_text())["checks"]
    assert {line["result"] for line in found} == {"ok"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_process_is_left_when_the_command_is_ended(number, tmp_path):
    words, options = command("--ranks", "2", launcher=(sys.executable,), folder=tmp_path)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **options)
    for line in process.stdout:
        if "stages" in line:
            break
    process.send_signal(number)
    assert process.wait(20) in (-number, 128 + number)
    process.stdout.close()
    wait_for(lambda: not processes_of_session(process.pid), 20)
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


DIES = """
import multiprocessing, os, signal
from lightning_zero.check.ranks import Check, Rank, Run, _main
at = Rank(0, 0, 1, "1", Check(print), Run(1, {0: 0}, 1, False, ("127.0.0.1", 1)))
multiprocessing.get_context("forkserver").Process(target=_main, args=(at,)).start()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_child_whose_parent_dies_before_it_finds_the_store_ends(tmp_path):
    _, options = command(folder=tmp_path)
    process = subprocess.Popen([sys.executable, "-c", DIES], **options)
    assert process.wait(60) == -signal.SIGKILL
    wait_for(lambda: not processes_of_session(process.pid), 30)


def processes_of_session(leader):
    """Ids of processes of the session that `leader` began."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(path.name))
    return found
