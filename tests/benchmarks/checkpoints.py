"""Time to save and to load a checkpoint, beside other systems, and how long training is blocked.

    python tests/benchmarks/checkpoints.py
    python tests/benchmarks/checkpoints.py --size 25m --rounds 5 --folder /mnt/disk

A GPT and the moments of Adam, on gloo ranks of one machine. All systems live in the same processes
and save and load once each in turn, in an order that rotates by one every round. A time is that of
the slowest rank. What was saved is synced and leaves the page cache before it is loaded. `disk` is
as many bytes by rank 0 alone, without a format; `torch` is rank 0 alone, with a full model.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in the ranks

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from examples.gpt import GPT
from tests.benchmarks.checkpoint_systems import SYSTEMS, Sharded, ShardedAsync
from tests.benchmarks.report import SIZES

GB = 1e9


@dataclass(frozen=True)
class Run:
    """From the command line."""

    systems: list[str]
    rounds: int
    ranks: int
    size: str
    folder: str

    @property
    def nbytes(self) -> int:
        """Bytes of weights and moments in fp32."""
        with torch.device("meta"):
            return 12 * sum(p.numel() for p in GPT(SIZES[self.size]).parameters())


def main() -> None:
    """Reads the command line, runs, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="85m")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--json", type=Path, help="also write all times to this file")
    args = parser.parse_args()
    run = Run(args.systems, args.rounds, args.ranks, args.size, args.folder)
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=args.folder) as folder:
        run = Run(**{**asdict(run), "folder": folder})
        mp.spawn(_rank_main, args=(run,), nprocs=run.ranks)
        found = json.loads((Path(folder) / "result.json").read_text())
    print(_report(run, found))
    if args.json:
        args.json.write_text(json.dumps({"run": asdict(run), **found}, indent=1) + "\n")


def _rank_main(rank: int, run: Run) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{run.folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=run.ranks)
    result = {"times": _time_systems(run), "stall": _time_stall(run)}
    if rank == 0:
        (Path(run.folder) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # threads of the groups would abort a normal exit


# ---------------------------------------------------------------------------------- save and load


def _time_systems(run: Run) -> dict[str, dict[str, list[float]]]:
    systems = {name: _build(SYSTEMS[name], run) for name in run.systems}
    names = list(systems)
    times: dict[str, dict[str, list[float]]] = {n: {"save": [], "load": []} for n in names}
    for index in range(-1, run.rounds):  # one round to warm up
        start = index % len(names)
        for name in names[start:] + names[:start]:
            path = Path(run.folder) / name
            save = _timed(lambda n=name, p=path: systems[n].save(p))
            _forget(path)
            load = _timed(lambda n=name, p=path: systems[n].load(p))
            _remove(path)
            if index >= 0:
                times[name]["save"].append(save)
                times[name]["load"].append(load)
    return times


def _build(maker: Callable[..., Any], run: Run) -> Any:
    torch.manual_seed(0)
    return maker(GPT(SIZES[run.size]), run.nbytes)


def _timed(act: Callable[[], None]) -> float:
    """Seconds on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    act()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def _forget(path: Path) -> None:
    """Takes what was synced out of the page cache."""
    for file in [path] if path.is_file() else path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    dist.barrier()


def _remove(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
    dist.barrier()


# ------------------------------------------------------------------------------------- the stall


def _time_stall(run: Run) -> dict[str, list[float]]:
    """Seconds for which training stands still, by kind of save; and of a step meanwhile."""
    found: dict[str, list[float]] = {k: [] for k in ("sync", "async", "step", "step during async")}
    systems = {"sync": _build(Sharded, run), "async": _build(ShardedAsync, run)}
    for index in range(-1, run.rounds):
        for name, system in systems.items():
            path = Path(run.folder) / name
            stall = _timed(lambda s=system, p=path: s.begin(p))
            steps = [_timed(system.step) for _ in range(3)]
            system.saving.finish()
            _remove(path)
            if index >= 0:
                found[name].append(stall)
                key = "step" if name == "sync" else "step during async"
                found[key].append(steps[0])  # the first: the save may be done before the others
    return found


# ------------------------------------------------------------------------------------ the report


def _report(run: Run, found: dict[str, Any]) -> str:
    lines = [
        f"{run.nbytes / GB:.2f} GB of weights and moments in fp32, {run.ranks} ranks, "
        f"{run.rounds} rounds after 1, torch {torch.__version__}",
        "GB/s: medians and quartiles; a load begins with a cold page cache.",
        f"{'system':<16}{'save':>7}{'quartiles':>14}{'load':>9}{'quartiles':>14}",
    ]
    for name, times in found["times"].items():
        cells = ""
        for kind, width in (("save", 7), ("load", 9)):
            speeds = [run.nbytes / GB / seconds for seconds in times[kind]]
            cells += f"{statistics.median(speeds):>{width}.2f}{_quartiles(speeds):>14}"
        lines.append(f"{name:<16}{cells}")
    lines.append("Seconds that training stands still for a sharded save, and of a step:")
    for name, seconds in found["stall"].items():
        lines.append(f"{name:<18}{statistics.median(seconds):>7.3f}{_quartiles(seconds, 3):>18}")
    return "\n".join(lines)


def _quartiles(values: list[float], digits: int = 2) -> str:
    if len(values) < 2:
        return ""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{low:.{digits}f} - {high:.{digits}f}"


if __name__ == "__main__":
    main()
