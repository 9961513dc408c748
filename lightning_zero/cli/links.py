"""How fast flat tensors travel between ranks: the engine's own collectives, timed.

[Note: Two bandwidths] As in nccl-tests: S bytes are the whole tensor, what an all-gather makes and
a reduce-scatter takes, and t is the time of one collective. The algorithm bandwidth is S/t. The bus
bandwidth is what one rank sends in that time, S (N-1)/N, in an all-reduce twice that: it compares
with the speed of a link whatever N is, and is what a plan calculates with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

import torch

from lightning_zero.comm.communicator import Communicator, Pending

__all__ = ["COLLECTIVES", "LinkReport", "Timing", "measure_link"]

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
        _run(comm, issues[name], _LEAST)  # connects, and touches memory
        once = _run(comm, issues[name], _LEAST)
        wanted = min(max(int(seconds / _ROUNDS / once), _LEAST), _MOST)
        count = comm.control.min_ints([wanted])[0]  # the same on every rank
        rounds = [_run(comm, issues[name], count) for _ in range(_ROUNDS)]
        yield Timing(name, nbytes, comm.size, median(rounds))


def _run(comm: Communicator, issue: Callable[[], Pending], count: int) -> float:
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
        torch.cuda.synchronize(device)
