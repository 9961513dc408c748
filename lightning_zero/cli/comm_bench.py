"""`lightning-zero comm-bench`: bandwidth of collectives on flat tensors.

[Note: Two bandwidths] As in nccl-tests, S is the size in bytes of the unsharded tensor (the output
of an all-gather, the input of a reduce-scatter), and t is the time of one collective. The algorithm
bandwidth is S/t. The bus bandwidth is the number of bytes that one rank sends, divided by t: S
(N-1)/N bytes, and twice as many in an all-reduce. It is comparable with the bandwidth of a link for
any N, and `lightning-zero plan` uses it.
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
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from lightning_zero._lightning.fabric import SLURMEnvironment, find_free_network_port
from lightning_zero.cli.rates import check_rates, write_rates
from lightning_zero.comm.communicator import Communicator, Pending
from lightning_zero.observe.tables import paragraph, table
from lightning_zero.record import streams

__all__ = ["LinkReport", "Timing", "run"]

_DTYPE = torch.float32
_REPEATS = 3  # the result is their median
_MIN_COUNT, _MAX_COUNT = 2, 1000  # collectives in a repeat


@dataclass(frozen=True)
class Timing:
    """Time of one collective of one size. See [Note: Two bandwidths]."""

    collective: str  # "all_gather", "reduce_scatter" or "all_reduce"
    nbytes: int  # of the unsharded tensor
    num_ranks: int
    seconds: float  # of one collective, on the slowest rank

    @property
    def algorithm_rate(self) -> float:
        """Algorithm bandwidth in bytes per second."""
        return self.nbytes / self.seconds

    @property
    def bus_rate(self) -> float:
        """Bus bandwidth in bytes per second."""
        factor = 2 if self.collective == "all_reduce" else 1
        return factor * self.algorithm_rate * (self.num_ranks - 1) / self.num_ranks


@dataclass(frozen=True)
class LinkReport:
    """Timings of all sizes and collectives."""

    timings: tuple[Timing, ...]  # by size, then by collective
    latencies: dict[str, float]  # seconds of the smallest tensors, by collective

    @property
    def link_rate(self) -> float:
        """Bus bandwidth of one rank at the largest size, in bytes per second, for a plan.

        The slower of all-gather and reduce-scatter counts.
        """
        max_nbytes = max(timing.nbytes for timing in self.timings)
        return min(
            timing.bus_rate
            for timing in self.timings
            if timing.nbytes == max_nbytes and timing.collective != "all_reduce"
        )


def _measure_link(
    comm: Communicator, args: argparse.Namespace, log: Callable[[str], None]
) -> LinkReport:
    """Times every collective with every size. Collective: every rank."""
    log("measuring the latency")
    latencies = {timing.collective: timing.seconds for timing in _time_all(comm, 1, args.seconds)}
    timings: list[Timing] = []
    for nbytes in args.sizes:
        log(f"measuring with {nbytes / 2**20:g} MiB")
        timings += _time_all(comm, nbytes, args.seconds)
    return LinkReport(tuple(timings), latencies)


def _time_all(comm: Communicator, nbytes: int, seconds: float) -> Iterator[Timing]:
    """Times every collective on a tensor of at least `nbytes`. Collective: every rank."""
    shard_numel = -(-nbytes // (comm.size * _DTYPE.itemsize))
    full = torch.ones(shard_numel * comm.size, dtype=_DTYPE, device=comm.device)
    shard = torch.empty(shard_numel, dtype=_DTYPE, device=comm.device)
    issues: dict[str, Callable[[], Pending]] = {
        "all_gather": lambda: comm.all_gather(full),
        "reduce_scatter": lambda: comm.reduce_scatter(full, shard),
        "all_reduce": lambda: comm.all_reduce(full),
    }
    for name, issue in issues.items():
        _time(comm, issue, _MIN_COUNT)  # warm-up: connections and memory
        once = _time(comm, issue, _MIN_COUNT)
        wanted = min(max(int(seconds / _REPEATS / once), _MIN_COUNT), _MAX_COUNT)
        count = comm.control.min_ints([wanted])[0]  # the same on every rank
        repeats = [_time(comm, issue, count) for _ in range(_REPEATS)]
        yield Timing(name, full.nbytes, comm.size, median(repeats))


def _time(comm: Communicator, issue: Callable[[], Pending], count: int) -> float:
    """Mean seconds of `count` collectives, on the slowest rank. Collective: every rank."""
    comm.control.min_ints([0])  # a barrier, so that all ranks start together
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


_MIB, _GB = 2**20, 1e9


@dataclass(frozen=True)
class _Rendezvous:
    """Rank of this process, and the address at which all ranks meet."""

    rank: int
    num_ranks: int
    local_rank: int
    address: str
    port: int


def run(args: argparse.Namespace) -> int:
    """Measures: in ranks that it starts, or as one rank of a launcher."""
    check_rates(args.rates)
    has_gpu = torch.cuda.is_available() and not args.on_cpu
    rendezvous = _launched_rendezvous()
    if rendezvous is None:
        _start(args, has_gpu)
        return 0
    if rendezvous.num_ranks < 2:
        raise ValueError(
            "expected at least two ranks, got one; start them with torchrun --nproc-per-node 2 or "
            "srun --ntasks 2."
        )
    if args.devices is not None:
        raise ValueError(
            f"--devices starts ranks, but a launcher has already started {rendezvous.num_ranks}; "
            "remove --devices."
        )
    _measure(rendezvous, args, has_gpu)
    return 0


def _launched_rendezvous() -> _Rendezvous | None:
    """Rendezvous of torchrun or srun; None: no launcher has started this process."""
    environ = os.environ
    if dist.is_torchelastic_launched():
        rank, num_ranks, local_rank, port = (
            int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        )
        return _Rendezvous(rank, num_ranks, local_rank, environ["MASTER_ADDR"], port)
    num_tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if num_tasks > 1:  # otherwise this may be a batch script, outside of srun
        slurm = SLURMEnvironment()
        rank, local_rank = slurm.global_rank(), slurm.local_rank()
        return _Rendezvous(rank, num_tasks, local_rank, slurm.main_address, slurm.main_port)
    return None


def _start(args: argparse.Namespace, has_gpu: bool) -> None:
    """Starts ranks on this node, and stops all when one fails.

    Raises:
        ValueError: There is no GPU for each of at least two ranks.
        RuntimeError: A rank failed.
    """
    num_gpus = torch.cuda.device_count() if has_gpu else 0
    num_ranks = args.devices or num_gpus or 2
    if has_gpu and not 1 < num_ranks <= num_gpus:
        raise ValueError(
            f"expected at least two ranks with a GPU each, got {num_ranks} rank(s) and {num_gpus} "
            "GPU(s); --on-cpu measures gloo between CPU processes."
        )
    port = find_free_network_port()
    sys.stdout.flush()
    try:
        start_processes(
            _run_child,
            (args, num_ranks, port, has_gpu),
            nprocs=num_ranks,
            # A fork skips the imports, but CUDA does not work in a forked process.
            start_method="spawn" if has_gpu else "fork",
        )
    except ProcessRaisedException as error:
        reason = str(error).strip().splitlines()[-1]
        raise RuntimeError(f"rank {error.error_index} failed: {reason}") from None
    except ProcessExitedException as error:
        how = error.signal_name or f"exit code {error.exit_code}"
        raise RuntimeError(
            f"rank {error.error_index} exited with {how}; the other ranks were stopped."
        ) from None


def _run_child(
    rank: int, args: argparse.Namespace, num_ranks: int, port: int, has_gpu: bool
) -> None:
    _measure(_Rendezvous(rank, num_ranks, rank, "127.0.0.1", port), args, has_gpu)


def _measure(rendezvous: _Rendezvous, args: argparse.Namespace, has_gpu: bool) -> None:
    """Measures on one rank; rank 0 prints."""
    device = torch.device("cpu")
    if has_gpu:
        device = torch.device("cuda", rendezvous.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend, timeout = "nccl" if has_gpu else "gloo", timedelta(seconds=args.timeout)

    def log(line: str) -> None:
        if rendezvous.rank == 0:
            print(line, file=sys.stderr, flush=True)

    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{rendezvous.address}:{rendezvous.port}",
            rank=rendezvous.rank,
            world_size=rendezvous.num_ranks,
            timeout=timeout,
        )
        comm = Communicator(device, timeout=timeout)
        report = _measure_link(comm, args, log)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise RuntimeError(
            f"rank {rendezvous.rank} of {rendezvous.num_ranks} timed out waiting for the others "
            f"({reason}): a rank died or did not start within {args.timeout:g} s (--timeout), or "
            "the network interface is wrong (set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME)."
        ) from None
    comm.close()
    dist.destroy_process_group()
    if rendezvous.rank == 0:
        _print_report(report, f"{backend} on {device.type}, {rendezvous.num_ranks} ranks", args)


def _print_report(report: LinkReport, title: str, args: argparse.Namespace) -> None:
    rate = round(report.link_rate / 1e9, 3)
    for_plan = f"--link-gb-per-s {rate:g}"
    if args.rates is not None:
        write_rates(args.rates, {"link_gb_per_s": rate})
        for_plan += f", or --rates {args.rates}"
    if args.json:
        timings = [
            {
                **vars(timing),
                "algorithm_gb_per_s": timing.algorithm_rate / _GB,
                "bus_gb_per_s": timing.bus_rate / _GB,
            }
            for timing in report.timings
        ]
        values = {"ranks": title, "timings": timings, "latency_seconds": report.latencies}
        print(json.dumps({**values, "link_gb_per_s": rate}, indent=2))
        return
    header = ["collective", "MiB", "us", "algorithm GB/s", "bus GB/s"]
    rows = [
        [
            timing.collective,
            f"{timing.nbytes / _MIB:.2f}",
            f"{1e6 * timing.seconds:.0f}",
            f"{timing.algorithm_rate / _GB:.2f}",
            f"{timing.bus_rate / _GB:.2f}",
        ]
        for timing in report.timings
    ]
    latencies = ", ".join(f"{name} {1e6 * s:.0f} us" for name, s in report.latencies.items())
    legend = paragraph(
        "As in nccl-tests: MiB is the size of the unsharded tensor; algorithm GB/s is this size "
        "divided by the time; bus GB/s is what each of N ranks sends: (N-1)/N of the algorithm "
        "bandwidth, and 2 (N-1)/N in an all_reduce."
    )
    print(title, table([header, *rows]), f"latency: {latencies}", legend, sep="\n")
    print(f"lightning-zero plan: {for_plan}")
