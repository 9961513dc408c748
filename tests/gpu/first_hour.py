"""What a first hour on one GPU should tell, in pieces of at most nine minutes: tests/gpu/run.sh.

    python -m tests.gpu.first_hour overhead --out outputs/gpu
    python -m tests.gpu.first_hour page --out outputs/gpu

Each case is a process of its own, so that one that runs out of memory ends no other, and leaves a
line in OUT/PIECE.jsonl: what was asked for, and what was measured or what went wrong. `page` makes
a page for tests/benchmarks/ of all lines. With `--dry` cases are tiny and run on the CPU: they
show that the script works, and nothing else.

    memory    rank 0 of N on torch's fake group: bytes between steps and at the peak, and the plan's
    overhead  rank 0 of 8 on the fake group, whose collectives move nothing: what an engine costs a
              device beside the model, for stage 3 and FSDP2, eager and compiled
    offload   one GPU that holds all: no offload, CPU, NVMe, and other packages where installed
    largest   how many layers train with all states in CPU memory: as many as card and host hold
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

import lightning_zero
from lightning_zero import Engine, ZeroConfig
from lightning_zero.planner import SHAPES, Decoder, DecoderShape
from tests.benchmarks import fake_group

ROOT = Path(__file__).resolve().parents[2]
PIECES = ("memory", "overhead", "offload", "largest")
MODELS = {
    **SHAPES,
    "llama2_70b_1": replace(SHAPES["llama2_70b"], num_layers=1),
    "1.1b": DecoderShape(2048, 22, 32, 32000, num_kv_heads=4, hidden=5632, is_gated=True),
    "tiny": DecoderShape(64, 2, 4, 256, hidden=128, is_gated=True),
}
_ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
_LINE = "measured: "
_ONE_RANK = {  # else DeepSpeed asks MPI
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29541",
}


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        piece: One of `PIECES`.
        system: "zeroS", "fsdp2", "torchao" or "deepspeed", and behind a dash "compiled",
            "unguarded", or the tier of the optimizer and "overlap".
        model: One of `MODELS`.
        num_ranks: World size; this process is rank 0. 1: without a process group.
        num_layers: Instead of the model's own; 0: those.
        tokens: In the one sequence of a step.
        steps: Measured, after two.
        device: "cuda" or "cpu".
    """

    piece: str
    system: str
    model: str
    num_ranks: int = 1
    num_layers: int = 0
    tokens: int = 2048
    steps: int = 8
    device: str = "cuda"

    @property
    def shape(self) -> DecoderShape:
        """Shape of the model."""
        shape = MODELS[self.model]
        return replace(shape, num_layers=self.num_layers) if self.num_layers else shape


def cases(piece: str, *, is_dry: bool) -> Iterator[Case]:
    """What a piece measures, the most telling first: time may run out."""
    of = partial(Case, piece)
    if is_dry:
        of = partial(of, model="tiny", tokens=16, steps=2, device="cpu")
        if piece == "offload":
            yield from (of("zero3-cpu"), of("zero3-nvme-overlap"))
        else:
            yield of("zero3", num_ranks=2)
        if piece == "overhead":
            yield of("fsdp2", num_ranks=2)
        return
    if piece == "memory":
        for model in ("llama2_7b", "llama2_70b_1", "1.1b"):
            for num_ranks in (8, 64):
                for stage in (3, 2, 1):
                    yield of(f"zero{stage}", model=model, num_ranks=num_ranks, tokens=8)
    elif piece == "overhead":
        for system in ("zero3", "fsdp2", "zero3-unguarded", "zero3-compiled", "fsdp2-compiled"):
            yield of(system, model="llama3_8b", num_ranks=8)
        yield of("zero2", model="1.1b", num_ranks=8)
    elif piece == "offload":
        tiers = ("none", "cpu", "cpu-overlap", "nvme", "nvme-overlap")
        yield from (of(f"zero3-{tier}", model="1.1b") for tier in tiers)
        yield from (of(system, model="1.1b") for system in ("torchao", "deepspeed"))
        yield from (
            of(f"zero3-{tier}", model="llama2_7b", steps=2) for tier in ("all", "all-overlap")
        )


# ------------------------------------------------------------------------ one case


def measure(case: Case, out: Path) -> dict[str, Any]:
    """Numbers of one case, by name; bytes, milliseconds and tokens per second. In a new process."""
    if case.piece == "memory":
        of_rank = fake_group.Case(
            case.model, case.num_ranks, int(case.system[-1]), case.tokens, case.device
        )

        def loss(model: nn.Module) -> Tensor:
            return _loss(model, torch.zeros(1, case.tokens + 1, dtype=torch.long))

        return asdict(fake_group.compare_module(of_rank, _module(case), loss))
    if case.num_ranks > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.num_ranks)
    step = _SYSTEMS[case.system.partition("-")[0]](case)
    ids = torch.randint(case.shape.vocab_size, (1, case.tokens + 1), device=case.device)
    for _ in range(2):
        step(ids)
    _synchronize(case)
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    host_s, begin_s = 0.0, time.perf_counter()
    for _ in range(case.steps):
        began_s = time.perf_counter()
        step(ids)
        host_s += time.perf_counter() - began_s
    _synchronize(case)
    step_s = (time.perf_counter() - begin_s) / case.steps
    peak = torch.cuda.max_memory_allocated() if case.device == "cuda" else 0
    if case.piece == "overhead":
        _profile(partial(step, ids), case, out)
    return {
        "step_ms": 1000 * step_s,
        "host_ms": 1000 * host_s / case.steps,
        "tokens_per_s": case.tokens / step_s,
        "peak_bytes": peak,
        "host_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def _synchronize(case: Case) -> None:
    if case.device == "cuda":
        torch.cuda.synchronize()


def _profile(step: Callable[[], object], case: Case, out: Path) -> None:
    """Where the time of one step goes, into a text file."""
    with torch.profiler.profile() as profile:
        step()
        _synchronize(case)
    kind = "self_device_time_total" if case.device == "cuda" else "self_cpu_time_total"
    table = profile.key_averages().table(sort_by=kind, row_limit=40)
    (out / f"profile-{case.model}-{case.system}.txt").write_text(table)


def _module(case: Case) -> Decoder:
    """On the meta device; its values are drawn on the device when it gets memory."""
    with torch.device("meta"):
        module = Decoder(case.shape)
    for child in module.modules():
        child.reset_parameters = partial(_draw, child)
    return module


def _draw(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.normal_(std=0.02)


def _loss(module: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    logits = module(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def _zero(case: Case) -> Callable[[Tensor], object]:
    name, *ways = case.system.split("-")
    settings: dict[str, Any] = {"overlap_step": "overlap" in ways}
    if "unguarded" in ways:
        settings["on_nonfinite"] = None
    if "cpu" in ways:
        settings["offload_optimizer"] = "cpu"
    if "nvme" in ways:
        folder = Path(os.environ.get("LIGHTNING_ZERO_NVME_PATH", ROOT / "outputs" / "nvme"))
        folder.mkdir(parents=True, exist_ok=True)
        settings["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder)}
    if "all" in ways:
        settings |= {"offload_optimizer": "cpu", "offload_param": "cpu"}
    config = ZeroConfig(stage=int(name[-1]), param_dtype=torch.bfloat16, **settings)
    module = _module(case)
    engine = Engine(module, config=config, device=torch.device(case.device))
    engine.attach(AdamW(module.parameters(), **_ADAMW, fused=True))
    if "compiled" in ways:
        for block in module.blocks:
            block.compile()

    def step(ids: Tensor) -> None:
        engine.zero_grad()
        engine.backward(_loss(module, ids))  # its parameters are bfloat16
        engine.step()

    return step


def _fsdp2(case: Case) -> Callable[[Tensor], object]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = _module(case)
    mesh = dist.init_device_mesh(case.device, (case.num_ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in module.blocks:
        if "compiled" in case.system:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    module.to_empty(device=case.device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.to_local().normal_(std=0.02)
    return _plainly(module, AdamW(module.parameters(), **_ADAMW, fused=True))


def _torchao(case: Case) -> Callable[[Tensor], object]:
    from torchao.optim import CPUOffloadOptimizer

    module = _module(case).to_empty(device=case.device)
    for child in module.modules():
        _draw(child)
    optimizer = CPUOffloadOptimizer(module.parameters(), AdamW, **_ADAMW, fused=True)
    return _plainly(module, optimizer, torch.bfloat16)


def _plainly(
    module: nn.Module, optimizer: Any, dtype: torch.dtype | None = None
) -> Callable[[Tensor], object]:
    def step(ids: Tensor) -> None:
        with torch.autocast(ids.device.type, dtype, enabled=dtype is not None):
            loss = _loss(module, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _deepspeed(case: Case) -> Callable[[Tensor], object]:
    for name, value in _ONE_RANK.items():
        os.environ.setdefault(name, value)
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    module = _module(case).to_empty(device=case.device)
    for child in module.modules():
        _draw(child)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=DeepSpeedCPUAdam(module.parameters(), **_ADAMW),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
        },
    )

    def step(ids: Tensor) -> None:
        engine.backward(_loss(engine, ids))
        engine.step()

    return step


_SYSTEMS: dict[str, Callable[[Case], Callable[[Tensor], object]]] = {
    **dict.fromkeys(("zero1", "zero2", "zero3"), _zero),
    "fsdp2": _fsdp2,
    "torchao": _torchao,
    "deepspeed": _deepspeed,
}


# ------------------------------------------------------------------------ pieces


def run_piece(piece: str, out: Path, budget_s: float, *, is_dry: bool) -> None:
    """Runs the cases of a piece while there is time, and writes a line for each."""
    end_s = time.monotonic() + budget_s
    lines = out / f"{piece}.jsonl"
    lines.unlink(missing_ok=True)
    if piece == "largest":
        _find_largest(out, end_s, is_dry=is_dry)
        return
    for case in cases(piece, is_dry=is_dry):
        _run(case, out, end_s)


def _find_largest(out: Path, end_s: float, *, is_dry: bool) -> None:
    """Doubles the layers until they do not train, then halves the distance."""
    most = 4 if is_dry else 1024
    model, device = ("tiny", "cpu") if is_dry else ("llama2_7b", "cuda")
    fits, fails, tried = 0, most + 1, 2 if is_dry else 8
    while tried > fits and time.monotonic() < end_s:
        case = Case("largest", "zero3-all", model, 1, tried, 512, 1, device)
        found = _run(case, out, end_s)
        if "error" not in found:
            fits = tried
        elif "emory" in found["error"] or "-9" in found["error"]:  # the system's own way
            fails = tried
        else:
            return  # it has no result about memory
        tried = min(2 * fits, most) if fails > most else (fits + fails) // 2


def _run(case: Case, out: Path, end_s: float) -> dict[str, Any]:
    """One case in a process of its own; what it measured, or `error`."""
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        found: dict[str, Any] = {"error": "no time was left for it"}
    else:
        command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "case"]
        command += ["--out", str(out), "--case", json.dumps(asdict(case))]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=left_s, check=False
            )
            found = _result(done)
        except subprocess.TimeoutExpired:
            found = {"error": f"it took more than the {left_s:.0f} s that were left"}
    print(case, found, flush=True)
    with (out / f"{case.piece}.jsonl").open("a") as lines:
        lines.write(json.dumps({**asdict(case), **found}) + "\n")
    return found


def _result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    for line in done.stdout.splitlines():
        if line.startswith(_LINE):
            measured: dict[str, Any] = json.loads(line.removeprefix(_LINE))
            return measured
    last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    return {"error": last[:300]}


# ------------------------------------------------------------------------ page


def page(out: Path) -> str:
    """All lines as a page of text."""
    today = time.strftime("%Y-%m-%d")
    has_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if has_gpu else f"no GPU, {platform.machine()}: a dry run"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    parts = [
        f"# One GPU, {today}\n",
        f"What: `tests/gpu/run.sh` at commit {commit or 'unknown'}. Where: {device}, torch "
        f"{torch.__version__}, lightning_zero {lightning_zero.__version__}, Python "
        f"{platform.python_version()}.\n",
    ]
    for piece in PIECES:
        if (lines := out / f"{piece}.jsonl").exists():
            rows = [json.loads(line) for line in lines.read_text().splitlines()]
            parts.append(f"## {piece.capitalize()}\n\n```text\n{_table(rows)}\n```\n")
    return "\n".join(parts)


def _table(rows: list[dict[str, Any]]) -> str:
    asked = ("system", "model", "num_ranks", "num_layers", "tokens")
    listed = list(dict.fromkeys(key for row in rows for key in row if key not in _CASE_KEYS))
    table = [[*asked, *listed]]
    table += [[_cell(row.get(key, "")) for key in table[0]] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


_CASE_KEYS = set(Case.__dataclass_fields__)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("piece", choices=(*PIECES, "page", "case"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=520.0)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.piece == "case":
        print(_LINE + json.dumps(measure(Case(**args.case), args.out)), flush=True)
    elif args.piece == "page":
        (args.out / f"{time.strftime('%Y-%m-%d')}-gpu.md").write_text(page(args.out))
    else:
        run_piece(args.piece, args.out, args.budget_s, is_dry=args.dry)


if __name__ == "__main__":
    _main()
