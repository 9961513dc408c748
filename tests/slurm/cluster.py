"""A real SLURM of a few nodes on this machine: munged, slurmctld, and a slurmd on each host."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.support.fault_matrix import SLOWDOWN
from tests.support.network import Host, hosts, why_no_hosts
from tests.support.ranks import free_port

__all__ = ["PACKAGES", "Cluster", "cluster", "why_no_slurm"]

PACKAGES = "slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins"
CPUS_PER_NODE = 2
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")

_CONF = """\
ClusterName=lightningzero
SlurmctldHost={controller}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_interval=1,requeue_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=10
InactiveLimit=0
MinJobAge=3600
SlurmdParameters=config_overrides
"""
_NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr={address} Port={port} CPUs={cpus} Boards=1 "
    "SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN\n"
)
_PARTITIONS = """\
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_no_slurm() -> str | None:
    """Reason why this machine cannot run a cluster; None if it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install {PACKAGES})"
    return why_no_hosts()


class Cluster:
    """Commands and jobs.

    Args:
        folder: Configuration and logs.
        nodes: Names.
    """

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.folder = folder
        self.nodes = list(nodes)
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PYTEST_"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def run(
        self, *words: str, check: bool = True, timeout_s: float = 20.0, cwd: Path | None = None
    ) -> str:
        """Runs a SLURM command and returns its output."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=timeout_s, cwd=cwd
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def submit(self, script: str, *options: str, cwd: Path, **variables: str) -> str:
        """Submits a batch script and returns its job id. Output is in `cwd/JOB.out`."""
        path = cwd / f"script-{secrets.token_hex(4)}.sbatch"
        path.write_text(script)
        exports = ["ALL", *(f"{name}={value}" for name, value in variables.items())]
        return self.run(
            *("sbatch", "--parsable", f"--chdir={cwd}", f"--output={cwd}/%j.out"),
            *("--open-mode=append", f"--export={','.join(exports)}", *options, str(path)),
        ).partition(";")[0]

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`, such as JobState."""
        shown = self.run("scontrol", "show", "job", "-o", job)
        found = re.search(rf"\b{name}=(\S*)", shown)
        assert found, shown
        return found[1]

    def wait(self, job: str, timeout_s: float, states: Sequence[str] = ("COMPLETED",)) -> None:
        """Waits until the job has ended in one of `states`."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL")
        state = wait_for(
            lambda: (s := self.field(job, "JobState")) in ended and s,
            timeout_s,
            lambda: f"job {job} is {self.field(job, 'JobState')}\n{self.output(job)}",
        )
        assert state in states, f"job {job} is {state}\n{self.output(job)}"

    def output(self, job: str) -> str:
        """Output of the job."""
        path = Path(self.field(job, "StdOut"))
        return path.read_text(errors="replace") if path.exists() else ""


def wait_for(
    condition: Callable[[], object], timeout_s: float, explain: Callable[[], str] = str
) -> object:
    """Polls until `condition` holds; returns its value. `timeout_s`: on a machine that is idle."""
    deadline = time.monotonic() + timeout_s * SLOWDOWN
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {explain()}"
        time.sleep(0.2)
    return value


@contextlib.contextmanager
def cluster(folder: Path, num_nodes: int = 2) -> Iterator[Cluster]:
    """Starts a cluster, and stops it with all its processes, by pid.

    Args:
        folder: Empty, and below nothing that others can write to; munged insists on it.
        num_nodes: How many.
    """
    with contextlib.ExitStack() as stack:
        address, nodes = stack.enter_context(hosts(num_nodes, folder))
        _write_conf(folder, address, nodes)
        made = Cluster(folder, [node.name for node in nodes])
        start = _Starter(stack, made.environment, folder)
        munge = folder / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o400)
        files = [("socket", "socket"), ("key-file", "key"), ("pid-file", "pid"), ("seed-file", "s")]
        files += [("log-file", "log")]
        start("munged", "--force", "--foreground", *(f"--{o}={munge}/{f}" for o, f in files))
        wait_for((munge / "socket").exists, 10)
        start("slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf"))
        for node in nodes:
            words = ["slurmd", "-D", "-c", "-N", node.name, "-f", str(folder / "slurm.conf")]
            start(*node.command(*words), name=f"slurmd.{node.name}")
        wait_for(lambda: _num_idle(made) == num_nodes, 30, lambda: _logs(folder))
        stack.callback(_cancel_all, made)
        yield made


class _Starter:
    """Starts daemons, each to be stopped by its pid when the stack unwinds."""

    def __init__(
        self, stack: contextlib.ExitStack, environment: dict[str, str], folder: Path
    ) -> None:
        self.stack, self.environment, self.folder = stack, environment, folder

    def __call__(self, *words: str, name: str | None = None) -> None:
        output = self.stack.enter_context(
            (self.folder / f"{name or words[0]}.out").open("wb", buffering=0)
        )
        daemon = subprocess.Popen(
            words, env=self.environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
        self.stack.callback(_stop, daemon)


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _write_conf(folder: Path, address: str, nodes: Sequence[Host]) -> None:
    controller = os.uname().nodename
    lines = _CONF.format(controller=controller, address=address, port=free_port(), folder=folder)
    port = free_port()
    for node in nodes:
        lines += _NODE.format(name=node.name, address=node.address, port=port, cpus=CPUS_PER_NODE)
        (folder / f"spool.{node.name}").mkdir()
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(lines + _PARTITIONS)


def _num_idle(made: Cluster) -> int:
    counts = made.run("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D", check=False).split()
    return sum(map(int, counts))


def _cancel_all(made: Cluster) -> None:
    made.run("scancel", "--user=root", "--signal=KILL", check=False)
    made.run("scancel", "--user=root", check=False)
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not made.run("squeue", "-h", check=False), 15)


def _logs(folder: Path) -> str:
    files = [*folder.glob("*.log"), *folder.glob("*.out")]
    return "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in files)
