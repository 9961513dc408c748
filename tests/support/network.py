"""Hosts on one machine: network namespaces on a bridge, each with an address and a name."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Host", "hosts", "why_no_hosts"]


_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """Host in a network namespace of this machine.

    Attributes:
        name: Name of the namespace, and the host name that its processes see.
        address: IPv4 address.
        hosts_file: File with the names of all hosts, for `/etc/hosts`.
    """

    name: str
    address: str
    hosts_file: Path

    def command(self, *words: str) -> list[str]:
        """Returns a command that runs `words` on this host, as the process that is started."""
        # Not `ip netns exec`, which remounts /sys and so hides the cgroups from slurmd.
        script = f'hostname {self.name}; mount --bind "{self.hosts_file}" /etc/hosts; exec "$@"'
        enter = ["nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", script, "sh", *words]


def why_no_hosts() -> str | None:
    """Returns the reason why this machine cannot have such hosts; None if it can."""
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install iproute2 util-linux)"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    probe = f"zp{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if done.returncode != 0:
        return f"needs network namespaces: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


@contextlib.contextmanager
def hosts(num_hosts: int, folder: Path, *, megabits_per_s: int | None = None) -> Iterator[Host]:
    """Makes the hosts, yields them, and removes them with all processes on them.

    Args:
        num_hosts: Number of hosts.
        folder: Folder of the file with their names.
        megabits_per_s: Bandwidth in each direction; None: not limited.

    Yields:
        A tuple: the address of this machine on the bridge, and the hosts.
    """
    pid, number = os.getpid(), next(_numbers)  # several networks may be up at a time
    tag, subnet = f"{pid}{number}", f"10.{100 + (pid // 250 + 37 * number) % 100}.{pid % 250}"
    bridge = f"zb{tag}"
    file = folder / "hosts"
    made = [Host(f"z{tag}n{i}", f"{subnet}.{10 + i}", file) for i in range(num_hosts)]
    lines = [f"{host.address} {host.name}" for host in made]
    file.write_text(Path("/etc/hosts").read_text() + "\n" + "\n".join(lines) + "\n")
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for host in made:
            _connect(host, bridge, megabits_per_s)
        yield f"{subnet}.1", made
    finally:
        for host in made:
            _remove(host)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _connect(host: Host, bridge: str, megabits_per_s: int | None) -> None:
    outer = f"v{host.name}"
    _ip("netns", "add", host.name)
    _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _ip("link", "set", outer, "master", bridge, "up")
    _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", host.name, "link", "set", "eth0", "up")
    _ip("-n", host.name, "link", "set", "lo", "up")
    if megabits_per_s is not None:
        limit = f"root tbf rate {megabits_per_s}mbit burst 256kb latency 50ms".split()
        subprocess.run(["tc", "qdisc", "add", "dev", outer, *limit], check=True)
        inside = ["tc", "-n", host.name, "qdisc", "add", "dev", "eth0", *limit]
        subprocess.run(inside, check=True)


def _remove(host: Host) -> None:
    listed = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True)
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "link", "del", f"v{host.name}"], capture_output=True)
    subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
