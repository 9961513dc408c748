"""What a training step launches on a device for each block of a decoder: stage 3 and FSDP2.

    python -m tests.benchmarks.op_counts
    python -m tests.benchmarks.op_counts --model llama2_7b --by-name

No device is needed: tensors are those of the fake device of tests/streams, and this process is rank
0 of 8 on torch's fake group. Each operation that reads or writes values counts as one launch, also
one on many tensors, and so does each collective. Counts are the difference between a decoder of 6
and one of 4 blocks, by the block, in a step that replays the order of all-gathers. The launches of
a system are those of its steps, and those of forward and backward that training the same module in
bfloat16 without it does not make. No kernel of a norm or of attention exists for the fake device,
so that the module's own are those of their parts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils._python_dispatch import _disable_current_modes

from lightning_zero import Engine, ZeroConfig
from lightning_zero.planner import SHAPES, Decoder
from tests.streams import libraries
from tests.streams.clocks import HOST, Clocks, Region

ROOT = Path(__file__).resolve().parents[2]
PLAIN, SYSTEMS = "plain", ("zero3", "zero3-unguarded", "fsdp2")
PHASES = ("forward", "backward", "step")
NUM_RANKS, NUM_STEPS = 8, 4
FEW, MANY = 4, 6  # blocks
COLLECTIVES = ("_allgather_base_", "_reduce_scatter_base_", "allgather_", "reduce_scatter_")
# FSDP2's copy of shards into a part of its last argument.
COPY_IN = "all_gather_copy_in"


@dataclass
class Counts:
    """Counts of one step, or of one block in it. Keys are phase and name.

    Attributes:
        launches: Operations on any stream of the device, with collectives.
        nbytes: Bytes that they read and write.
        on_compute: Those of `nbytes` on the compute stream.
        events: Events recorded on streams, and waits of streams for them, by phase.
    """

    launches: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    on_compute: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)

    def by_block(self, fewer: Counts) -> Counts:
        """Differences from those of a decoder with fewer blocks, by the block."""
        found = Counts()
        for name, counts in vars(found).items():
            mine, others = getattr(self, name), getattr(fewer, name)
            counts.update({key: (mine[key] - others[key]) / (MANY - FEW) for key in mine})
        return found

    def beyond(self, plain: Counts) -> Counts:
        """Those that training without the system has not, but all of the step."""
        found = Counts()
        for name, counts in vars(found).items():
            mine, others = getattr(self, name), getattr(plain, name)
            for key in mine:
                own = mine[key] if _phase(key) == "step" else mine[key] - others[key]
                counts[key] = max(0, own)
        return found

    def num_launches(self, phase: str, *, collectives: bool) -> float:
        """Launches in `phase` that are collectives, or those that are not."""
        return sum(
            number
            for key, number in self.launches.items()
            if _phase(key) == phase and _is_collective(key) is collectives
        )

    def mb(self, nbytes: Counter[str], phase: str) -> float:
        """Million bytes of `nbytes`, one of the counters, in `phase`; without collectives."""
        items = [(k, n) for k, n in nbytes.items() if _phase(k) == phase and not _is_collective(k)]
        return sum(number for _, number in items) / 1e6


def _phase(key: str) -> str:
    return key.partition(" ")[0]


def _is_collective(key: str) -> bool:
    return key.partition(" ")[2] in COLLECTIVES


class Counting(Clocks):
    """Counts what is reported to the clocks, and checks nothing."""

    def __init__(self, place: Callable[[], str]) -> None:
        super().__init__(place)
        self.counts = Counts()
        self.phase = ""

    def use(
        self, stream: int, reads: Iterable[Region], writes: Iterable[Region], what: str
    ) -> None:
        if stream == HOST:
            return
        sizes = [stop - start for _, start, stop in (*reads, *writes)]
        nbytes = 2 * sum(sizes[:-1]) if what == COPY_IN else sum(sizes)
        key = f"{self.phase} {what}"
        self.counts.launches[key] += 1
        self.counts.nbytes[key] += nbytes
        if stream == 0:
            self.counts.on_compute[key] += nbytes

    def record(self, event: int, stream: int) -> None:
        self.counts.events[self.phase] += 1

    def wait(self, stream: int, event: int) -> None:
        self.counts.events[self.phase] += 1


# ------------------------------------------------------------------------ one system


def count(system: str, model: str, num_blocks: int, tokens: int, folder: Path) -> Counts:
    """Counts of the last step of a training; in a new process, with a library preloaded."""
    from tests.streams.fake_cuda import DEVICE, FakeCuda

    cuda = FakeCuda(folder, Counting)
    clocks: Any = cuda.clocks
    with cuda.on(NUM_RANKS):
        with DEVICE:
            module = Decoder(replace(SHAPES[model], num_layers=num_blocks))
            ids = torch.zeros(1, tokens + 1, dtype=torch.long)
        backward, step = _BUILD[system.partition("-")[0]](module, system, DEVICE)
        for _ in range(NUM_STEPS):
            clocks.counts = Counts()
            clocks.phase = "forward"
            logits = module(ids[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits.float(), ids[:, 1:].flatten())
            clocks.phase = "backward"
            backward(loss)
            clocks.phase = "step"
            step()
            clocks.phase = ""
        found: Counts = clocks.counts
    return found


_Parts = tuple[Callable[[Tensor], object], Callable[[], object]]  # backward, and step


def _plain(module: nn.Module, system: str, device: torch.device) -> _Parts:
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()
    return _stepped_by(module)


def _zero(module: nn.Module, system: str, device: torch.device) -> _Parts:
    settings: dict[str, Any] = {"on_nonfinite": None} if "unguarded" in system else {}
    optimizer = AdamW(module.parameters(), fused=True)
    config = ZeroConfig(stage=3, param_dtype=torch.bfloat16, **settings)
    engine = Engine(module, [optimizer], config, device=device)

    def step() -> None:
        engine.step()
        engine.zero_grad()

    return engine.backward, step


def _fsdp2(module: nn.Module, system: str, device: torch.device) -> _Parts:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with _disable_current_modes():  # its ranks are values
        mesh = dist.init_device_mesh(device.type, (NUM_RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert isinstance(module, Decoder)
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return _stepped_by(fully_shard(module, mesh=mesh, mp_policy=policy))


def _stepped_by(module: nn.Module) -> _Parts:
    optimizer = AdamW(module.parameters(), fused=True)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Tensor.backward, step


_BUILD = {PLAIN: _plain, "zero3": _zero, "fsdp2": _fsdp2}


# ------------------------------------------------------------------------ all of them


def counts_by_block(system: str, args: argparse.Namespace, folder: Path) -> Counts:
    """Counts of one block; each of two trainings is a process of its own."""
    found = []
    for num_blocks in (MANY, FEW):
        command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.op_counts"]
        command += ["--model", args.model, "--tokens", str(args.tokens), "--libraries", str(folder)]
        preload = {"LD_PRELOAD": str(folder / "libaccelerator.so"), "OMP_NUM_THREADS": "1"}
        answer = subprocess.run(
            [*command, "--case", system, str(num_blocks)],
            cwd=ROOT,
            env={**os.environ, **preload},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        last = json.loads(answer.stdout.splitlines()[-1])
        found.append(Counts(**{name: Counter(counts) for name, counts in last.items()}))
    return found[0].by_block(found[1])


def main() -> None:
    """Reads the command line, runs, prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="llama3_8b")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--by-name", action="store_true", help="each launch of each system")
    parser.add_argument("--libraries", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        system, num_blocks = args.case
        found = count(system, args.model, int(num_blocks), args.tokens, args.libraries)
        print(json.dumps(vars(found)))
        return
    with tempfile.TemporaryDirectory() as folder:
        built = libraries.build(os.environ.get("CXX", "g++"), Path(folder))
        plain, *others = (counts_by_block(name, args, built) for name in (PLAIN, *SYSTEMS))
    own = [plain.num_launches(phase, collectives=False) for phase in PHASES]
    by_phase = ", ".join(f"{n:.1f} in {phase}" for phase, n in zip(PHASES, own, strict=True))
    print(f"launches of a block's own: {by_phase}")
    extra = {name: of.beyond(plain) for name, of in zip(SYSTEMS, others, strict=True)}
    _print_table(extra)
    for name, counts in extra.items() if args.by_name else ():
        _print_names(name, counts)


def _print_table(extra: Mapping[str, Counts]) -> None:
    columns = ("system", "phase", "launches", "collectives", "events", "MB", "MB on compute")
    row = "{:<18}{:<10}{:>10}{:>13}{:>8}{:>10}{:>15}".format
    print(row(*columns))
    for name, counts in extra.items():
        rows = [
            (
                counts.num_launches(phase, collectives=False),
                counts.num_launches(phase, collectives=True),
                counts.events[phase],
                counts.mb(counts.nbytes, phase),
                counts.mb(counts.on_compute, phase),
            )
            for phase in PHASES
        ]
        rows.append(tuple(map(sum, zip(*rows, strict=True))))
        for phase, numbers in zip((*PHASES, "all"), rows, strict=True):
            print(row(name, phase, *(f"{number:.1f}" for number in numbers)))


def _print_names(system: str, counts: Counts) -> None:
    print(f"\n{system}: launches, MB, MB on compute")
    for key in sorted(counts.launches, key=lambda key: (PHASES.index(_phase(key)), key)):
        if number := counts.launches[key]:
            mb, on_compute = counts.nbytes[key] / 1e6, counts.on_compute[key] / 1e6
            print(f"{number:8.1f}{mb:10.1f}{on_compute:10.1f}  {key}")


if __name__ == "__main__":
    main()
