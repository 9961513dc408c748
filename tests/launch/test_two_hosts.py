"""torchrun over two hosts with a slow network between them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_launch import run_script
from tests.slurm.test_training import ROOT, SCRIPT, assert_equal, saved
from tests.support.network import hosts, why_no_hosts
from tests.support.ranks import free_port


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_torchrun_over_two_hosts_and_a_slow_network_trains_as_ddp(tmp_path, strategy):
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(reason)
    with hosts(2, tmp_path, megabits_per_s=50) as (_, machines), contextlib.ExitStack() as stack:
        folder, port = tmp_path / "two", free_port()
        folder.mkdir()
        started = []
        for index, machine in enumerate(machines):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
            torchrun += ["--nnodes=2", f"--node-rank={index}", f"--master-port={port}"]
            torchrun += [f"--master-addr={machines[0].address}"]
            words = [*torchrun, str(SCRIPT), strategy, "1", "2", str(folder)]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0"}
            output = stack.enter_context((tmp_path / f"output-{index}").open("w"))
            started.append(
                subprocess.Popen(
                    machine.command(*words), env=environment, stdout=output, stderr=output
                )
            )
            stack.callback(started[-1].kill)
        for index, process in enumerate(started):
            assert process.wait(120) == 0, (tmp_path / f"output-{index}").read_text()[-3000:]
    (tmp_path / "one").mkdir()
    alone = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()]
    run_script(*alone, SCRIPT, "ddp", 2, 1, tmp_path / "one")
    assert_equal(saved(folder), saved(tmp_path / "one"), rtol=1e-6, atol=1e-6)
    assert isinstance(folder, Path)
