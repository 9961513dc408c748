"""What it costs that ranks agree: rounds of a step, the time they take, and the host's work.

    python tests/benchmarks/rounds.py --units 8 32 --ranks 2 4
    sudo python tests/benchmarks/rounds.py --units 32 --ranks 2 4 8 --delay-ms 20
    python tests/benchmarks/rounds.py --fake 8 64 512 4096

With `--delay-ms` each rank has a network namespace of its own (Linux, as root), and a switch in
this process hands every packet on so much later; waits are then printed in delays, too. With
`--fake` one process is rank 0 of so many ranks, whose collectives do nothing: what is left is the
host's work. The package is taken from PYTHONPATH where that has one, else from this repository.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in the ranks
sys.path.append(str(Path(__file__).resolve().parents[2]))

WARMUP, STEPS = 5, 8
_TUNSETIFF, _IFF_TUN_NO_PI = 0x400454CA, 0x1001


def main() -> None:
    """Reads the command line, runs, prints a line for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--units", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--fake", type=int, nargs="+", default=[], metavar="RANKS")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        print(json.dumps(_measure(**json.loads(args.as_rank))), flush=True)
        return
    for num_ranks in args.fake:
        _tell(args, _start({"world_size": num_ranks, "is_fake": True}, args, args.units[0]))
    for num_ranks in [] if args.fake else args.ranks:
        for units in args.units:
            _tell(args, _run(num_ranks, args, units))


def _tell(args: argparse.Namespace, found: dict[str, Any]) -> None:
    line = f"{found['world_size']:5d} ranks {found['units']:4d} units"
    line += f"  set-up {found['setup_s']:6.2f} s  step {found['step_ms']:8.1f} ms"
    line += (
        f"  rounds {found['rounds']}  waits {found['waits']}  waited {found['waited_ms']:8.2f} ms"
    )
    if args.delay_ms:
        line += f" = {found['waited_ms'] / args.delay_ms:6.1f} delays"
    print(line, flush=True)


def _command(of_rank: dict[str, Any], args: argparse.Namespace, units: int) -> list[str]:
    case = {"stage": args.stage, "units": units, "rank": 0, "host": "127.0.0.1", **of_rank}
    return [sys.executable, __file__, "--as-rank", json.dumps(case)]


def _start(of_rank: dict[str, Any], args: argparse.Namespace, units: int) -> dict[str, Any]:
    done = subprocess.run(_command(of_rank, args, units), stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _run(num_ranks: int, args: argparse.Namespace, units: int) -> dict[str, Any]:
    """All ranks, on this machine's network or on one with a delay: what rank 0 has found."""
    network = _Network(num_ranks, args.delay_ms / 1e3) if args.delay_ms else None
    with tempfile.TemporaryFile("w+") as output:
        try:
            processes = []
            for rank in reversed(range(num_ranks)):
                of_rank = {"rank": rank, "world_size": num_ranks}
                if network is not None:
                    of_rank["host"] = network.address(0)
                command = _command(of_rank, args, units)
                if network is not None:
                    command = [*network.inside(rank), *command]
                out = subprocess.DEVNULL if rank else output
                processes.append(subprocess.Popen(command, stdout=out))
            while any(process.poll() is None for process in processes):
                network.carry() if network is not None else time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
            if network is not None:
                network.close()
        output.seek(0)
        found: dict[str, Any] = json.loads(output.read())
    return found


class _Network:
    """Namespaces with a tunnel each, and a switch that hands packets on after a delay."""

    def __init__(self, size: int, delay_s: float) -> None:
        self._delay_s = delay_s
        self._name = f"lz{os.getpid()}"
        self._tunnels: list[int] = []
        self._packets: list[tuple[float, int, int, bytes]] = []  # when, number, to whom, what
        self._number = 0
        libc = ctypes.CDLL(None, use_errno=True)
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        for rank in range(size):
            subprocess.run(["ip", "netns", "add", self._space(rank)], check=True)
            space = os.open(f"/run/netns/{self._space(rank)}", os.O_RDONLY)
            assert libc.setns(space, 0) == 0, "namespaces need root"
            tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH", b"eth0", _IFF_TUN_NO_PI))
            assert libc.setns(home, 0) == 0
            self._tunnels.append(tunnel)
            inside = ["ip", "-n", self._space(rank)]
            subprocess.run([*inside, "addr", "add", f"{self.address(rank)}/24", "dev", "eth0"])
            for device in ("eth0", "lo"):
                subprocess.run([*inside, "link", "set", device, "up"], check=True)

    def _space(self, rank: int) -> str:
        return f"{self._name}-{rank}"

    def address(self, rank: int) -> str:
        """Result of one rank."""
        return f"10.88.7.{10 + rank}"

    def inside(self, rank: int) -> list[str]:
        """What comes before a command, to run it there."""
        space = f"--net=/run/netns/{self._space(rank)}"
        return ["env", "GLOO_SOCKET_IFNAME=eth0", "nsenter", space]

    def carry(self) -> None:
        """Hands on what is due, and takes what has come."""
        while self._packets and self._packets[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(self._packets)
            with suppress(OSError):  # its queue is full: TCP sends it again
                os.write(self._tunnels[target], packet)
        due_s = self._packets[0][0] - time.monotonic() if self._packets else 0.2
        for tunnel in select.select(self._tunnels, [], [], max(0.0, min(due_s, 0.2)))[0]:
            try:
                while packet := os.read(tunnel, 70_000):
                    target = packet[19] - 10  # the last byte of the IPv4 address
                    if packet[0] >> 4 == 4 and 0 <= target < len(self._tunnels):
                        due = time.monotonic() + self._delay_s
                        heapq.heappush(self._packets, (due, self._number, target, packet))
                        self._number += 1
            except BlockingIOError:
                pass

    def close(self) -> None:
        """Removes the namespaces."""
        for rank, tunnel in enumerate(self._tunnels):
            os.close(tunnel)
            subprocess.run(["ip", "netns", "del", self._space(rank)], check=False)


def _measure(
    *, rank: int, world_size: int, units: int, stage: int, host: str, is_fake: bool = False
) -> dict[str, Any]:
    """One rank: set-up, and the median step."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from lightning_zero import Engine, ZeroConfig
    from lightning_zero.record.spans import Kind

    torch.set_num_threads(1)
    if is_fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    else:
        store = dist.TCPStore(host, 29_817, world_size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.layer(x).relu()

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Sequential(*(Block() for _ in range(units))))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    start = time.perf_counter()
    engine = Engine(module, [optimizer], ZeroConfig(stage=stage))
    setup_s = time.perf_counter() - start
    control: Any = engine.comm.control
    x = torch.randn(4, 64)
    step_ms, waited_ms, num_waits, num_rounds = [], [], 0, 0
    engine.recorder.start()
    for number in range(WARMUP + STEPS):
        engine.recorder.begin(number)
        begun = getattr(control, "num_rounds", 0)
        start = time.perf_counter()
        engine.backward(module(x).square().mean())
        engine.step()
        engine.zero_grad()
        if number >= WARMUP:
            step_ms.append(1e3 * (time.perf_counter() - start))
            waits = [s for s in engine.recorder.end().spans if s.kind is Kind.AGREE and s.is_wait]
            waited_ms.append(1e3 * sum(wait.stop_s - wait.start_s for wait in waits))
            num_waits, num_rounds = len(waits), getattr(control, "num_rounds", 0) - begun
        else:
            engine.recorder.end()
    if not is_fake:
        dist.barrier()
    return {
        "world_size": world_size,
        "units": units,
        "setup_s": setup_s,
        "step_ms": statistics.median(step_ms),
        "waited_ms": statistics.median(waited_ms),
        "waits": num_waits,
        "rounds": num_rounds,
    }


if __name__ == "__main__":
    main()
