"""Time of a training step, and memory, of this package and its peers in one run on gloo ranks.

    python tests/benchmarks/step_time.py
    python tests/benchmarks/step_time.py --systems ddp zero3 fsdp2 --rounds 40 --precision bf16

All systems live in the same processes and take one step each in turn, in an order that rotates by
one every round, so that other load on the machine affects all of them equally. The time of a step
is that of the slowest rank; the ratio is of medians over the same rounds. Losses are printed: they
must agree, because a system that does not train is easily fast. Memory is measured in fresh
processes, one pair for each system, after the timing.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in the ranks

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from examples.gpt import GPT, GPTConfig
from tests.benchmarks.report import (
    BATCH,
    PHASES,
    SIZES,
    Result,
    Run,
    memory_line,
    record,
    table,
    title,
)
from tests.benchmarks.resident import peak_bytes, reset_peak, resident_bytes
from tests.benchmarks.systems import ADAMW, SYSTEMS, System
from tests.support.storage import live_storage_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    """Reads the command line, runs, prints the table."""
    run, path = _parse()
    results = {name: Result() for name in run.systems}
    for name, (times, loss) in _launch(_time_systems, run).items():
        results[name].times, results[name].loss = times, loss
    print(title(run))
    print(table(run, results), flush=True)
    for name in run.systems if run.has_memory else ():
        results[name].bytes = _launch(_measure_memory, run, name)
        print(memory_line(name, results[name].bytes), flush=True)
    if path is not None:
        path.write_text(json.dumps(record(run, results), indent=1) + "\n")


def _parse() -> tuple[Run, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    by_default = [name for name in SYSTEMS if not name.endswith("-unguarded")]
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=by_default)
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds (default 30)")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before them (default 3)")
    parser.add_argument("--steps-per-turn", type=int, default=1, help="steps in a row (default 1)")
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks (default 2)")
    parser.add_argument("--size", choices=SIZES, default="25m")
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    args = parser.parse_args()
    for name in args.systems:
        if isinstance(SYSTEMS[name], str):
            print(f"{name}: {SYSTEMS[name]}")
    systems = [name for name in args.systems if not isinstance(SYSTEMS[name], str)]
    if not systems:
        parser.error("none of these systems can run here")
    run = Run(
        systems=systems,
        rounds=args.rounds,
        warmup=args.warmup,
        steps_per_turn=args.steps_per_turn,
        ranks=args.ranks,
        size=args.size,
        precision=args.precision,
        has_memory=not args.no_memory,
    )
    return run, args.json


def _launch(fn: Any, run: Run, *args: Any) -> Any:
    """Calls `fn(rank, run, *args)` on fresh ranks and returns what rank 0 returned."""
    with tempfile.TemporaryDirectory(prefix="step-time-") as folder:
        run = Run(**{**asdict(run), "store": folder})
        mp.spawn(_rank_main, args=(fn, run, args), nprocs=run.ranks)
        return json.loads((Path(folder) / "result.json").read_text())


def _rank_main(rank: int, fn: Any, run: Run, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # peers call collectives by their old names
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{run.store}/store", rank=rank, world_size=run.ranks
    )
    result = fn(rank, run, *args)
    if rank == 0:
        (Path(run.store) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the threads of groups that a system made and kept would abort a normal exit


def _time_systems(rank: int, run: Run) -> dict[str, tuple[dict[str, list[float]], float]]:
    systems = {name: _build(name, run) for name in run.systems}
    names = list(systems)
    laps: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for index in range(-run.warmup, run.rounds):
        if index == 0:
            gc.collect()
            gc.freeze()  # else every collection walks the objects of all systems
        start = index % len(names)
        for name in names[start:] + names[:start]:
            times, losses[name] = _turn(systems[name], run, index * run.steps_per_turn)
            if index >= 0:
                laps[name].append(times)
    everyone: list[Any] = [None] * run.ranks
    dist.all_gather_object(everyone, (laps, losses))
    for system in systems.values():
        system.close()
    return {name: _merge(name, everyone) for name in names}


def _build(name: str, run: Run) -> System:
    maker = SYSTEMS[name]
    assert not isinstance(maker, str)
    torch.manual_seed(0)
    system = maker()
    system.build(GPT(SIZES[run.size]), DTYPES[run.precision])
    return system


def _turn(system: System, run: Run, index: int) -> tuple[dict[str, float], float]:
    """One system's turn: ms of each of `PHASES`, and the loss."""
    batches = [_batch(run, index + i) for i in range(run.steps_per_turn)]
    times = dict.fromkeys(PHASES, 0.0)
    dist.barrier()
    start_cpu = time.process_time()
    start = last = time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal last
        now = time.perf_counter()
        times[phase] += 1e3 * (now - last) / run.steps_per_turn
        last = now

    for ids, targets in batches:
        loss = system.step(ids, targets, lap)
    system.settle()
    lap("update")
    times["cpu"] = 1e3 * (time.process_time() - start_cpu) / run.steps_per_turn
    times["step"] = 1e3 * (last - start) / run.steps_per_turn
    return times, loss.item()


def _batch(run: Run, index: int) -> tuple[Tensor, Tensor]:
    config = SIZES[run.size]
    generator = torch.Generator().manual_seed(1 + (index + 10**6) * run.ranks + dist.get_rank())
    shape = (BATCH, config.context + 1)
    tokens = torch.randint(config.vocab_size, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _merge(name: str, everyone: list[Any]) -> tuple[dict[str, list[float]], float]:
    """Result over all ranks: the slowest for a step, the mean for a phase, the mean loss."""
    by_rank = [laps[name] for laps, _ in everyone]
    rounds = list(zip(*by_rank, strict=True))
    times = {
        phase: [
            (max if phase == "step" else statistics.fmean)(t[phase] for t in one) for one in rounds
        ]
        for phase in PHASES
    }
    return times, statistics.fmean(losses[name] for _, losses in everyone)


def _measure_memory(rank: int, run: Run, name: str) -> dict[str, int]:
    """Bytes above a process that has trained a model of a few KB: code, arenas, gloo's buffers."""
    _train_something_small()
    reset_peak()
    storage, resident = live_storage_bytes(), resident_bytes()
    system = _build(name, run)
    for index in range(2):
        _turn(system, run, index)
    gc.collect()
    reset_peak()
    for index in range(3):
        _turn(system, run, index)
    peak = peak_bytes()
    gc.collect()
    reset_peak()
    result = {
        "storage": live_storage_bytes() - storage,
        "resident": resident_bytes() - resident,
        "peak": peak - resident,
    }
    dist.barrier()
    system.close()
    return result


def _train_something_small() -> None:
    model = GPT(GPTConfig(width=32, num_layers=1, num_heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for _ in range(2):
        model(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    del model, optimizer, parameter
    gc.collect()


if __name__ == "__main__":
    main()
