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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from time import perf_counter_ns
from typing import Any

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

__all__ = ["COLLECTIVES", "LinkReport", "Timing", "measure_link", "run"]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
_DTYPE = torch.float32
_ROUNDS = 3  # of which the median counts
_LEAST, _MOST = 2, 1000  # collectives in a round


@dataclass(frozen=True)
class Timing:
    """One collective of one size. See [Note: Two bandwidths].

    Attributes:
        collective: One of `COLLECTIVES`.
        nbytes: Of the whole tensor.
        num_ranks: That take part.
        seconds: Of one collective, on the slowest rank.
    """

    collective: str
    nbytes: int
    num_ranks: int
    seconds: float

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
    """What `measure_link` found.

    Attributes:
        timings: By size, then by collective.
        latencies: By collective, seconds with nearly nothing to send.
    """

    timings: tuple[Timing, ...]
    latencies: dict[str, float]

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


def measure_link(
    comm: Communicator,
    *,
    sizes: Sequence[int],
    seconds: float = 0.3,
    say: Callable[[str], None] = lambda _: None,
) -> LinkReport:
    """Times every collective with every size. Collective: every rank.

    Args:
        comm: Of all ranks.
        sizes: Bytes of whole tensors, made even for the ranks.
        seconds: That each measurement takes.
        say: Told what is measured.
    """
    say("measuring the latency")
    least = _tensor_bytes(comm, 1)
    latencies = {timing.collective: timing.seconds for timing in _time_all(comm, least, seconds)}
    timings: list[Timing] = []
    for nbytes in sizes:
        say(f"measuring with {nbytes / 2**20:g} MiB")
        timings += _time_all(comm, _tensor_bytes(comm, nbytes), seconds)
    return LinkReport(tuple(timings), latencies)


def _tensor_bytes(comm: Communicator, nbytes: int) -> int:
    """At least so many bytes, as many for each rank."""
    each = comm.size * _DTYPE.itemsize
    return -(-nbytes // each) * each


def _time_all(comm: Communicator, nbytes: int, seconds: float) -> Iterator[Timing]:
    whole = torch.ones(nbytes // _DTYPE.itemsize, dtype=_DTYPE, device=comm.device)
    shard = torch.empty(whole.numel() // comm.size, dtype=_DTYPE, device=comm.device)
    issues: dict[str, Callable[[], Pending]] = {
        "all_gather": lambda: comm.all_gather(whole),
        "reduce_scatter": lambda: comm.reduce_scatter(whole, shard),
        "all_reduce": lambda: comm.all_reduce(whole),
    }
    for name in COLLECTIVES:
        _time(comm, issues[name], _LEAST)  # connects, and touches memory
        once = _time(comm, issues[name], _LEAST)
        wanted = min(max(int(seconds / _ROUNDS / once), _LEAST), _MOST)
        count = comm.control.min_ints([wanted])[0]  # the same on every rank
        rounds = [_time(comm, issues[name], count) for _ in range(_ROUNDS)]
        yield Timing(name, nbytes, comm.size, median(rounds))


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
    """This rank among all."""

    rank: int
    num_ranks: int
    local_rank: int
    address: str
    port: int


def run(args: argparse.Namespace) -> int:
    """Measures, in ranks that it starts or as one that was started.

    Returns:
        0.
    """
    check_rates(args.rates)
    has_gpu = torch.cuda.is_available() and not args.on_cpu
    place = _launched_place()
    if place is None:
        _start(args, has_gpu)
        return 0
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
        return _checked(_Place(rank, num_ranks, local_rank, environ["MASTER_ADDR"], port))
    num_tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if num_tasks > 1:  # else it may be a batch script, outside of srun
        slurm = SLURMEnvironment()
        rank, local_rank = slurm.global_rank(), slurm.local_rank()
        return _checked(_Place(rank, num_tasks, local_rank, slurm.main_address, slurm.main_port))
    return None


def _checked(place: _Place) -> _Place:
    if place.num_ranks < 2:
        raise ValueError(
            "one rank has no link to measure; start at least two, as with torchrun "
            "--nproc-per-node 2 or srun --ntasks 2."
        )
    return place


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
        report = measure_link(comm, sizes=args.sizes, seconds=args.seconds, say=say)
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
    if args.rates is not None:
        write_rates(args.rates, {"link_gb_per_s": rate})
    if args.json:
        print(json.dumps({"ranks": title, **_as_dict(report), "link_gb_per_s": rate}, indent=2))
        return
    for_plan = f"--link-gb-per-s {rate:g}"
    if args.rates is not None:
        for_plan += f", or --rates {args.rates}"
    print(f"{_as_text(report, title)}\nlightning-zero plan: {for_plan}")


def _as_dict(report: LinkReport) -> dict[str, Any]:
    return {
        "timings": [
            {
                **vars(timing),
                "algorithm_gib_per_s": timing.algorithm_rate / _GIB,
                "bus_gib_per_s": timing.bus_rate / _GIB,
            }
            for timing in report.timings
        ],
        "latency_seconds": report.latencies,
    }


def _as_text(report: LinkReport, title: str) -> str:
    latencies = ", ".join(f"{name} {1e6 * s:.0f} us" for name, s in report.latencies.items())
    return "\n".join(
        [
            title,
            table([_HEADER, *map(_row, report.timings)]),
            f"latency: {latencies}",
            paragraph(
                "As in nccl-tests: MiB of the whole tensor, algorithm bandwidth these over time, "
                "bus bandwidth what each of N ranks sends: (N-1)/N of them, in an all_reduce "
                "2 (N-1)/N."
            ),
        ]
    )


_HEADER = ["collective", "MiB", "us", "algorithm GiB/s", "bus GiB/s"]


def _row(timing: Timing) -> list[str]:
    return [
        timing.collective,
        f"{timing.nbytes / _MIB:.2f}",
        f"{1e6 * timing.seconds:.0f}",
        f"{timing.algorithm_rate / _GIB:.2f}",
        f"{timing.bus_rate / _GIB:.2f}",
    ]
