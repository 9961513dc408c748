"""`lightning-zero comm-bench`: how fast flat tensors travel between ranks.

[Note: Two bandwidths] As in nccl-tests: S bytes are the whole tensor, what an all-gather makes and
a reduce-scatter takes, and t is the time of one collective. The algorithm bandwidth is S/t. The bus
bandwidth is what one rank sends in that time, S (N-1)/N, in an all-reduce twice that: it compares
with the speed of a link whatever N is, and is what a plan calculates with.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from time import perf_counter_ns

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from lightning_zero.cli.rates import check_rates, write_rates
from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.observe.tables import paragraph, table
from lightning_zero.record import streams

__all__ = ["LinkReport", "Timing", "run"]

_DTYPE = torch.float32
_ROUNDS = 3  # of which the median counts
_LEAST, _MOST = 2, 1000  # collectives in a round


@dataclass(frozen=True)
class Timing:
    """One collective of one size. See [Note: Two bandwidths]."""

    collective: str  # "all_gather", "reduce_scatter" or "all_reduce"
    nbytes: int  # of the whole tensor
    num_ranks: int
    seconds: float  # on the slowest rank

    @property
    def algorithm_rate(self) -> float:
        """Bytes per second of the whole tensor."""
        return self.nbytes / self.seconds

    @property
    def bus_rate(self) -> float:
        """Bytes per second that each rank sends."""
        ways = 2 if self.collective == "all_reduce" else 1
        return ways * self.algorithm_rate * (self.num_ranks - 1) / self.num_ranks


@dataclass(frozen=True)
class LinkReport:
    timings: tuple[Timing, ...]  # by size, then by collective
    latencies: dict[str, float]  # by collective, seconds with nearly nothing to send

    @property
    def link_rate(self) -> float:
        """Bytes per second of one rank in each direction, for a plan: of the largest size.

        The slower of gathers and reduce-scatters, of which training is made.
        """
        most = max(timing.nbytes for timing in self.timings)
        return min(
            timing.bus_rate
            for timing in self.timings
            if timing.nbytes == most and timing.collective != "all_reduce"
        )


def _measure_link(
    comm: Communicator, args: argparse.Namespace, say: Callable[[str], None]
) -> LinkReport:
    """Times every collective with every size. Collective: every rank."""
    say("measuring the latency")
    latencies = {timing.collective: timing.seconds for timing in _time_all(comm, 1, args.seconds)}
    timings: list[Timing] = []
    for nbytes in args.sizes:
        say(f"measuring with {nbytes / 2**20:g} MiB")
        timings += _time_all(comm, nbytes, args.seconds)
    return LinkReport(tuple(timings), latencies)


def _time_all(comm: Communicator, nbytes: int, seconds: float) -> Iterator[Timing]:
    """With a whole tensor of at least `nbytes`, as many for each rank."""
    shard_numel = -(-nbytes // (comm.size * _DTYPE.itemsize))
    whole = torch.ones(shard_numel * comm.size, dtype=_DTYPE, device=comm.device)
    shard = torch.empty(shard_numel, dtype=_DTYPE, device=comm.device)
    issues: dict[str, Callable[[], Pending]] = {
        "all_gather": lambda: comm.all_gather(whole),
        "reduce_scatter": lambda: comm.reduce_scatter(whole, shard),
        "all_reduce": lambda: comm.all_reduce(whole),
    }
    for name, issue in issues.items():
        _time(comm, issue, _LEAST)  # connects, and touches memory
        once = _time(comm, issue, _LEAST)
        wanted = min(max(int(seconds / _ROUNDS / once), _LEAST), _MOST)
        count = comm.control.min_ints([wanted])[0]  # the same on every rank
        rounds = [_time(comm, issue, count) for _ in range(_ROUNDS)]
        yield Timing(name, whole.nbytes, comm.size, median(rounds))


def _time(comm: Communicator, issue: Callable[[], Pending], count: int) -> float:
    """Seconds of one of `count` collectives, on the slowest rank."""
    comm.control.min_ints([0])  # all begin together
    _synchronize(comm.device)
    begin = perf_counter_ns()
    for _ in range(count):
        issue().wait()
    _synchronize(comm.device)
    slowest = -comm.control.min_ints([begin - perf_counter_ns()])[0]
    return slowest / count / 1e9


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        streams.synchronize(device)


_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class _Place:
    rank: int
    num_ranks: int
    local_rank: int
    address: str
    port: int


def run(args: argparse.Namespace) -> int:
    """Measures, in ranks that it starts or as one that was started."""
    check_rates(args.rates)
    has_gpu = torch.cuda.is_available() and not args.on_cpu
    place = _launched_place()
    if place is None:
        _start(args, has_gpu)
        return 0
    if place.num_ranks < 2:
        raise ValueError(
            "one rank has no link to measure; start at least two, as with torchrun "
            "--nproc-per-node 2 or srun --ntasks 2."
        )
    if args.devices is not None:
        raise ValueError(
            f"--devices starts ranks, and a launcher has started {place.num_ranks}; leave it out."
        )
    _measure(place, args, has_gpu)
    return 0


def _launched_place() -> _Place | None:
    """The place that torchrun or srun has given this process; None: nobody has."""
    environ = os.environ
    if dist.is_torchelastic_launched():
        rank, num_ranks, local_rank, port = (
            int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        )
        return _Place(rank, num_ranks, local_rank, environ["MASTER_ADDR"], port)
    num_tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if num_tasks > 1:  # else it may be a batch script, outside of srun
        slurm = SLURMEnvironment()
        rank, local_rank = slurm.global_rank(), slurm.local_rank()
        return _Place(rank, num_tasks, local_rank, slurm.main_address, slurm.main_port)
    return None


def _start(args: argparse.Namespace, has_gpu: bool) -> None:
    """Runs ranks of this machine, and stops all when one fails.

    Raises:
        RuntimeError: One did; says which, and how.
    """
    num_gpus = torch.cuda.device_count() if has_gpu else 0
    num_ranks = args.devices or num_gpus or 2
    if has_gpu and not 1 < num_ranks <= num_gpus:
        raise ValueError(
            f"{num_ranks} rank(s) on {num_gpus} GPU(s): expected a GPU for each of at least two; "
            "--on-cpu measures gloo between CPU processes."
        )
    port = find_free_network_port()
    sys.stdout.flush()
    try:
        start_processes(
            _run_child,
            (args, num_ranks, port, has_gpu),
            nprocs=num_ranks,
            # A fork has all of this imported already; CUDA does not outlive one.
            start_method="spawn" if has_gpu else "fork",
        )
    except ProcessRaisedException as error:
        reason = str(error).strip().splitlines()[-1]
        raise RuntimeError(f"rank {error.error_index} failed, and all with it: {reason}") from None
    except ProcessExitedException as error:
        how = error.signal_name or f"exit code {error.exit_code}"
        raise RuntimeError(
            f"rank {error.error_index} ended with {how}; the others have been stopped."
        ) from None


def _run_child(
    rank: int, args: argparse.Namespace, num_ranks: int, port: int, has_gpu: bool
) -> None:
    _measure(_Place(rank, num_ranks, rank, "127.0.0.1", port), args, has_gpu)


def _measure(place: _Place, args: argparse.Namespace, has_gpu: bool) -> None:
    """One rank's part; rank 0 prints."""
    device = torch.device("cpu")
    if has_gpu:
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend, timeout = "nccl" if has_gpu else "gloo", timedelta(seconds=args.timeout)

    def say(line: str) -> None:
        if place.rank == 0:
            print(line, file=sys.stderr, flush=True)

    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{place.address}:{place.port}",
            rank=place.rank,
            world_size=place.num_ranks,
            timeout=timeout,
        )
        comm = Communicator(device, timeout=timeout)
        report = _measure_link(comm, args, say)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise RuntimeError(
            f"rank {place.rank} of {place.num_ranks} waits for the others in vain ({reason}); one "
            f"has died or has not come within {args.timeout:g} s (--timeout), or a network "
            "interface is the wrong one (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
        ) from None
    comm.close()
    dist.destroy_process_group()
    if place.rank == 0:
        _tell(report, f"{backend} on {device.type}, {place.num_ranks} ranks", args)


def _tell(report: LinkReport, title: str, args: argparse.Namespace) -> None:
    rate = round(report.link_rate / 1e9, 3)
    for_plan = f"--link-gb-per-s {rate:g}"
    if args.rates is not None:
        write_rates(args.rates, {"link_gb_per_s": rate})
        for_plan += f", or --rates {args.rates}"
    if args.json:
        timings = [
            {
                **vars(timing),
                "algorithm_gib_per_s": timing.algorithm_rate / _GIB,
                "bus_gib_per_s": timing.bus_rate / _GIB,
            }
            for timing in report.timings
        ]
        found = {"ranks": title, "timings": timings, "latency_seconds": report.latencies}
        print(json.dumps({**found, "link_gb_per_s": rate}, indent=2))
        return
    header = ["collective", "MiB", "us", "algorithm GiB/s", "bus GiB/s"]
    rows = [
        [
            timing.collective,
            f"{timing.nbytes / _MIB:.2f}",
            f"{1e6 * timing.seconds:.0f}",
            f"{timing.algorithm_rate / _GIB:.2f}",
            f"{timing.bus_rate / _GIB:.2f}",
        ]
        for timing in report.timings
    ]
    latencies = ", ".join(f"{name} {1e6 * s:.0f} us" for name, s in report.latencies.items())
    legend = paragraph(
        "As in nccl-tests: MiB of the whole tensor, algorithm bandwidth these over time, bus "
        "bandwidth what each of N ranks sends: (N-1)/N of them, in an all_reduce 2 (N-1)/N."
    )
    print(title, table([header, *rows]), f"latency: {latencies}", legend, sep="\n")
    print(f"lightning-zero plan: {for_plan}")
