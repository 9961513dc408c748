"""CPU memory for "auto": the free memory of the machine, job or container of this process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_zero.tiers.memory import available_memory_bytes, cgroup_free_bytes

MIB = 2**20


def test_the_smallest_group_around_this_process_counts(tmp_path):
    (tmp_path / "cgroup").write_text("3:cpu:/other\n0::/system/job\n")
    sizes = {"system/job": ("max", 5), "system": (100, 70), ".": (1000, 100)}
    for group, (limit, used) in sizes.items():
        folder = tmp_path / "mount" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 20\n")
    assert list(cgroup_free_bytes(tmp_path / "cgroup", tmp_path / "mount")) == [50, 920]
    assert list(cgroup_free_bytes(tmp_path / "none", tmp_path / "mount")) == []


@pytest.mark.slow
def test_a_process_in_a_limited_group_sees_its_limit():
    mount = Path("/sys/fs/cgroup/memory")
    own = next(
        (
            line.split(":")[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if ":memory:" in line
        ),
        None,
    )
    if own is None or not os.access(mount, os.W_OK):
        pytest.skip("needs a writable memory control group, version 1")
    group = mount / own.lstrip("/") / f"lightning-zero-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(600 * MIB))
        inside = (
            f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid()))\n"
            "from lightning_zero.tiers.memory import available_memory_bytes\n"
            "print(available_memory_bytes())"
        )
        done = subprocess.run(
            [sys.executable, "-c", inside], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert 0 < int(done.stdout) <= 600 * MIB < available_memory_bytes()
    finally:
        group.rmdir()
