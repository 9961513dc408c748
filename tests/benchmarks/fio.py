"""What `fio` finds on the same file, the measure that people know."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess

from lightning_zero.cli.io_bench import DiskRates
from lightning_zero.tiers.nvme import NvmeFile

__all__ = ["fio_rates"]

_MIB = 2**20


def fio_rates(
    file: NvmeFile, *, block_bytes: int, num_threads: int, is_direct: bool, seconds: float
) -> DiskRates | None:
    """Rates by `fio` of direct reads, writes and both on `file`; None where it is not installed.

    What `file` held is lost.

    Raises:
        OSError: fio failed.
    """
    if shutil.which("fio") is None:
        return None
    options = {
        "filename": file.path,
        "allow_file_create": 0,
        "direct": int(is_direct),
        "ioengine": "psync",
        "bs": block_bytes,
        "time_based": 1,
        "runtime": f"{max(100, round(1e3 * seconds))}ms",
        "output-format": "json",
    }
    return DiskRates(
        _fio(options, "read", file.nbytes, num_threads),
        _fio(options, "write", file.nbytes, num_threads),
        _fio(options, "rw", file.nbytes, 2 * num_threads),  # each thread reads and writes by turns
    )


def _fio(options: dict[str, object], way: str, nbytes: int, num_threads: int) -> float:
    """Bytes per second; every thread works on its own part of the file."""
    part = nbytes // num_threads // _MIB * _MIB
    parts = {"rw": way, "numjobs": num_threads, "size": part, "offset_increment": part}
    words = [f"--{name}={value}" for name, value in (options | parts).items()]
    command = ["fio", "--name=io-bench", *words, "--thread", "--group_reporting"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip() or done.stdout.strip()
        raise OSError(f"{shlex.join(command)} failed: {reason}")
    (group,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return float(group["read"]["bw_bytes"] + group["write"]["bw_bytes"])
