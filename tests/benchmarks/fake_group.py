"""Rank 0 of a large group in one process: the bytes of a plan beside those allocated.

torch's `fake` process group stands for all other ranks: its collectives move nothing. The module is
built on the meta device, so that no more is ever made than this rank's shards and what a step
gathers: 7 B parameters on 64 ranks take 4 GB.

    python -m tests.benchmarks.fake_group llama2_7b --ranks 64
    python -m tests.benchmarks.fake_group llama2_7b --ranks 8 --stage 2 --device cuda

On the CPU the peak is that of live storages, on CUDA that of the allocator.
"""

from __future__ import annotations

import argparse
import gc
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero import Engine, ZeroConfig
from lightning_zero.cli.plan import source_from_arguments
from lightning_zero.layout.offload import Tier
from lightning_zero.planner import Choice, EngineRuns, Machine, estimate
from tests.benchmarks.live_peak import peak_of_last_step
from tests.support.storage import live_storage_bytes

__all__ = ["Case", "Compared", "compare", "compare_module"]

_STEPS = 3


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        model: A preset of `lightning-zero plan`.
        num_ranks: World size; this process is rank 0.
        stage: In float32.
        num_tokens: In its one sequence.
        device: "cpu" or "cuda".
        recomputes: `activation_checkpointing`.
    """

    model: str
    num_ranks: int
    stage: int = 3
    num_tokens: int = 8
    device: str = "cpu"
    recomputes: bool | str = False

    @property
    def config(self) -> ZeroConfig:
        return ZeroConfig(stage=self.stage, activation_checkpointing=self.recomputes)


@dataclass(frozen=True)
class Compared:
    """Bytes of rank 0.

    Attributes:
        states: Planned bytes between steps.
        reported: The same by `memory_report`.
        allocated: The same as the storages or the allocator tell.
        peak: Planned, at the most of a step.
        measured_peak: The same as the storages or the allocator tell.
    """

    states: int
    reported: int
    allocated: int
    peak: int
    measured_peak: int


def compare(case: Case) -> Compared:
    """Plans, builds and trains; forms a process group, so it wants a process of its own."""
    args = argparse.Namespace(model=case.model, batch=1, context=case.num_tokens, overrides=())
    source = source_from_arguments(args)
    assert source.step is not None
    return compare_module(case, source.module, source.step)


def compare_module(case: Case, module: nn.Module, step: Callable[[nn.Module], Tensor]) -> Compared:
    """As `compare`, of a module on the meta device and what computes its loss."""
    states, peak = _plan(case, module, step)
    _form_group(case)
    before = _allocated(case)
    for child in module.modules():  # values are not read, and drawing them takes minutes
        child.reset_parameters = partial(_fill, child)
    config, device = case.config, torch.device(case.device)
    engine = Engine(module, config=config, device=device)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    engine.attach(optimizer)
    measured_peak = _train(case, engine, optimizer, step)
    return Compared(
        states,
        engine.memory_report().total_bytes,
        _allocated(case) - before,
        peak,
        measured_peak - before,
    )


def _plan(case: Case, module: nn.Module, step) -> tuple[int, int]:
    """Bytes between steps and at the peak, of a device with NCCL, without NCCL's own memory."""
    choice = Choice("", "", case.config)
    runs = EngineRuns(module, [torch.optim.AdamW(module.parameters())], step)
    # The fake process group has the collectives of a device, on the CPU, too.
    found = estimate(choice, runs, Machine(case.num_ranks, min(case.num_ranks, 8)))
    states = sum(map(found.ranks.most_bytes, Tier))
    return states, states + found.module_buffer_bytes + found.counts.peak.total_bytes


def _form_group(case: Case) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.num_ranks)
    if case.device == "cuda":  # libraries allocate what they keep: a workspace of cuBLAS above all
        nn.Linear(64, 64, device="cuda")(torch.ones(1, 64, device="cuda")).sum().backward()
    gc.collect()
    gc.freeze()


def _fill(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.zero_()


def _allocated(case: Case) -> int:
    gc.collect()
    if case.device == "cpu":
        return live_storage_bytes()
    torch.cuda.synchronize()
    # Not the blocks of the allocator, each of which may be 1 MiB larger than what was asked for.
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def _train(case: Case, engine: Engine, optimizer: torch.optim.Optimizer, step) -> int:
    """The most of the last step."""
    if case.device == "cpu":
        return peak_of_last_step(engine, optimizer, step, _STEPS)
    for _ in range(_STEPS):
        engine.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with torch.device(case.device):  # of the token ids
            loss: Tensor = step(engine.module)
        engine.backward(loss)
        engine.step()
        del loss
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3))
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--recomputes", default="none", choices=("none", "all", "selective"))
    args = parser.parse_args()
    recomputes = {"none": False, "all": True}.get(args.recomputes, args.recomputes)
    begin = perf_counter()
    found = compare(Case(args.model, args.ranks, args.stage, args.tokens, args.device, recomputes))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{args.model:<10} N = {args.ranks:<4} stage {args.stage}  states: planned {found.states}, "
        f"reported {found.reported}, allocated {found.allocated}; peak: planned {found.peak}, "
        f"measured {found.measured_peak}, ratio {found.peak / found.measured_peak:.4f}; "
        f"resident {resident / 2**30:.2f} GiB, {perf_counter() - begin:.0f} s"
    )


if __name__ == "__main__":
    _main()
