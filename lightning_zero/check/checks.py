"""The checks, in the order of `CHECKS`. Every rank calls each in a process and group of its own.

A check returns what it found, and numbers; or it raises, and the report has rank, error and line.
"""

from __future__ import annotations

import os
import platform
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero._lightning import chosen
from lightning_zero._version import __version__
from lightning_zero.check.ranks import Check, Found, Rank, Skipped, form_group
from lightning_zero.check.systems import (
    DDP,
    FSDP2,
    Experts,
    Loss,
    Zero,
    as_loss,
    decoder,
    materialized,
    micro_batches,
)
from lightning_zero.checkpoint import load_checkpoint, save_checkpoint
from lightning_zero.comm.fake import fake_world
from lightning_zero.health.world import leave_world
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.stage import STAGES
from lightning_zero.planner import Choice, Decoder, DecoderShape, EngineRuns, Machine, estimate
from lightning_zero.record import streams
from lightning_zero.tiers.memory import aligned_empty
from lightning_zero.tiers.nvme import NvmeStore

__all__ = ["CHECKS"]

_EXACT, _16_BIT = 1e-3, 0.1  # limits of a difference, relative to the largest change of a weight
_CAUSE = "planted by the check"
_MIB = 2**20


def versions(at: Rank) -> Found:
    """Versions, and what the ranks run on."""
    name = torch.cuda.get_device_name(at.device) if at.of.on_cuda else "CPU"
    everyone = _gather(at, (platform.node(), name))
    nodes, names = (sorted(set(found)) for found in zip(*everyone, strict=True))
    numbers: dict[str, Any] = {"ranks": at.size, "nodes": len(nodes), "devices": ", ".join(names)}
    numbers |= {"CPU cores": os.cpu_count(), "python": platform.python_version()}
    numbers |= {"torch": torch.__version__, "lightning": version(chosen().value)}
    if at.of.on_cuda:
        numbers["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    numbers["lightning_zero"] = __version__
    return ", ".join(f"{name} {value}" for name, value in numbers.items()), numbers


def _gather(at: Rank, value: Any) -> list[Any]:
    everyone: list[Any] = [None] * at.size
    dist.all_gather_object(everyone, value)
    return everyone


def _need_two_ranks(at: Rank) -> None:
    if at.size < 2:
        raise Skipped("needs two ranks")


# ---------------------------------------------------------------- values, against DDP


def stages(at: Rank) -> Found:
    """Every stage against DDP in float32, with accumulation and clipping."""
    return _compare(at, _in_stages(at), _EXACT)


def precisions(at: Rank) -> Found:
    """Every stage with 16-bit parameters against DDP in float32."""
    ways = _in_stages(at, " in bfloat16", param_dtype="bfloat16")
    if not at.of.is_quick:
        ways |= _in_stages(at, " in float16", param_dtype="float16")
    return _compare(at, ways, _16_BIT)


def tiers(at: Rank) -> Found:
    """Every offload, and steps that overlap the next forward, against DDP."""
    nvme = {"device": "nvme", "nvme_path": at.of.nvme_path or str(at.of.shared)}
    cpu: dict[str, Any] = {"offload_optimizer": "cpu"}
    files: dict[str, Any] = {"offload_optimizer": nvme, "offload_param": nvme}
    ways = {
        "stage 1, optimizer on the CPU": {"stage": 1, **cpu},
        "all on the CPU, overlapped": {"offload_param": "cpu", "overlap_step": True, **cpu},
        "all in files": files,
    }
    if not at.of.is_quick:
        ways["stage 2, optimizer on the CPU"] = {"stage": 2, **cpu}
        ways["optimizer in files"] = {"offload_optimizer": nvme}
        ways["overlapped"] = {"overlap_step": True}
    return _compare(at, ways, _EXACT)


def own_model(at: Rank) -> Found:
    """Three steps of your model, in every stage against DDP."""
    if at.of.make_model is None:
        raise Skipped("no --config or --module")
    make_model = at.of.make_model
    module, loss = make_model()
    numel = sum(parameter.numel() for parameter in module.parameters())
    free = torch.cuda.mem_get_info()[0] if at.of.on_cuda else 0
    if at.of.on_cuda and 20 * numel > min(_gather(at, free)):
        raise Skipped(f"DDP, to compare with, needs {20 * numel / 2**30:.0f} GiB per rank")

    def seeded(number: int, model: nn.Module) -> Tensor:
        torch.manual_seed(1000 * number + at.rank)  # dropout
        with at.device:
            return loss(model) * (1 + at.rank + 0.1 * number)  # the inputs are always the same

    text, numbers = _compare(
        at,
        {f"stage {stage}": {"stage": stage} for stage in STAGES},
        _EXACT,
        lambda: materialized(make_model()[0], at.device),
        lambda step: [partial(seeded, 2 * step), partial(seeded, 2 * step + 1)],
    )
    return f"{numel:,} parameters, {text}", {"parameters": numel, **numbers}


def branches(at: Rank) -> Found:
    """Ranks that use different parts of a module, against DDP."""
    _need_two_ranks(at)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Experts().to(at.device)

    def losses(step: int) -> list[Loss]:
        x = torch.full((4, 32), 1.0 + step + at.rank, device=at.device)
        return [lambda model: model(x, (step + at.rank) % 2)]

    return _compare(at, _in_stages(at), _EXACT, make, losses)


def _in_stages(at: Rank, suffix: str = "", **settings: Any) -> dict[str, dict[str, Any]]:
    stages = (1, 3) if at.of.is_quick else STAGES
    return {f"stage {stage}{suffix}": {"stage": stage, **settings} for stage in stages}


def _compare(
    at: Rank,
    ways: Mapping[str, Mapping[str, Any]],
    limit: float,
    make: Callable[[], nn.Module] | None = None,
    losses: Callable[[int], Sequence[Loss]] | None = None,
) -> Found:
    """Trains by DDP and in each way; raises an AssertionError if weights differ."""
    make, losses = make or partial(decoder, at), losses or partial(micro_batches, at)
    before = _weights(make())
    expected = _train(DDP(at, make()), losses)
    _, change = _farthest(before, expected)
    numbers, wrong = {}, []
    for way, settings in ways.items():
        name, far = _farthest(_train(Zero(at, make(), **settings), losses), expected)
        numbers[way] = far / change
        if not numbers[way] <= limit:
            wrong.append(f"{way}: {name} is off by {numbers[way]:.2g} of the largest change")
    if wrong:
        raise AssertionError("; ".join(wrong))
    return f"{len(ways)} ways, largest difference {max(numbers.values()):.0e}", numbers


def _train(
    system: DDP, losses: Callable[[int], Sequence[Loss]], steps: Sequence[int] = (0, 1, 2)
) -> dict[str, Tensor]:
    for step in steps:
        system.step(losses(step))
    system.close()
    return _weights(system.module)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {n: v.detach().clone() for n, v in module.state_dict().items() if v.is_floating_point()}


def _farthest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[str, float]:
    """Name and distance of the weight that is farthest; NaN is farther than all."""
    far = {n: float((found[n] - value).abs().max()) for n, value in expected.items()}
    return max(far.items(), key=lambda item: (item[1] != item[1], item[1]))


# ---------------------------------------------------------------- failures, and checkpoints


def killed_rank(at: Rank) -> Found:
    """A rank is killed in a step: all others end, and name it."""
    return _lose(at, "")


def raising_rank(at: Rank) -> Found:
    """A rank raises in a step: all others end, and name it with its error."""
    return _lose(at, _CAUSE)


def _lose(at: Rank, cause: str) -> Found:
    """Trains until the last rank raises `cause`, or is killed if that is empty."""
    _need_two_ranks(at)
    system, last = Zero(at, decoder(at), stage=3), at.size - 1
    try:
        for step in range(1000):
            began = time.monotonic()
            if at.rank == last and step == 2:
                if not cause:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ArithmeticError(cause)
            system.step(micro_batches(at, step))
    except ArithmeticError as error:
        system.engine.end_run(error)
        raise
    except RuntimeError as error:
        seconds, text = time.monotonic() - began, " ".join(str(error).split())
        if at.of.on_cuda:
            streams.synchronize()  # hangs unless NCCL was aborted
        if f"rank {last}" not in text or cause not in text:
            raise AssertionError(f"no word of rank {last} and its cause in: {text}") from error
        if seconds > 10:
            raise AssertionError(f"ended only after {seconds:.0f} s: {text}") from error
        return f"after {seconds:.1f} s: {text[:150]}", {"seconds": seconds}
    raise AssertionError(f"trains on without rank {last}")


def checkpoint(at: Rank) -> Found:
    """A checkpoint of all ranks, resumed by DDP and on half of the ranks."""
    if not all(_gather(at, at.of.shared.is_dir())):
        raise Skipped("the nodes do not share the folder --out")
    full, shards = at.of.shared / "full", at.of.shared / "shards"
    steps, found = (2, 3), {}
    system = Zero(at, decoder(at), stage=3)
    for step in (0, 1):
        system.step(micro_batches(at, step))
    save_checkpoint(system.engine, full)
    save_checkpoint(system.engine, shards, is_sharded=True)
    expected = _train(system, partial(micro_batches, at), steps)
    ddp, saved = DDP(at, decoder(at)), torch.load(full, map_location=at.device)
    ddp.module.load_state_dict(saved["state_dict"])
    ddp.optimizer.load_state_dict(saved["optimizer_states"][0])
    found["DDP"] = _train(ddp, partial(micro_batches, at), steps)
    leave_world()
    half = replace(at, size=max(1, at.size // 2), key=f"{at.key}/half")
    if half.rank < half.size:
        form_group(half)
        for stage in (1, 3):
            system = Zero(half, decoder(half), stage=stage)
            load_checkpoint(system.engine, shards)
            found[f"stage {stage}"] = _train(system, partial(micro_batches, half), steps)
    numbers = {way: _farthest(weights, expected)[1] for way, weights in found.items()}
    if wrong := [f"{way} is off by {far:.1e}" for way, far in numbers.items() if not far < 1e-4]:
        raise AssertionError(f"two steps after the checkpoint {', '.join(wrong)}")
    return f"{at.size} to {half.size} ranks, difference {max(numbers.values()):.0e}", numbers


# ---------------------------------------------------------------- memory and time


def _shape(at: Rank) -> DecoderShape:
    return DecoderShape(1024, 8, 16, 32000) if at.of.on_cuda else DecoderShape(128, 4, 4, 512)


def bytes_per_rank(at: Rank) -> Found:
    """Bytes of a rank's model states in stages 1, 2 and 3 against the plan, and its peak."""
    shape, numbers = _shape(at), {}
    loss = as_loss(at, 0, slice(None), 2, 65, vocab_size=shape.vocab_size)
    for stage in (1, 2, 3):
        system = Zero(at, decoder(at, shape), stage=stage)
        for _ in range(3):
            system.step([loss])
        peak = torch.cuda.max_memory_allocated() if at.of.on_cuda else 0
        own = system.engine.memory_report().total_bytes, peak
        system.close()
        states, peak = map(max, zip(*_gather(at, own), strict=True))
        numbers[f"stage {stage}"] = {"states": states, "peak": peak}
    leave_world()  # the planner makes a group of its own
    machine = Machine(at.size, at.of.num_local, has_device_memory=at.of.on_cuda)
    for stage in (1, 2, 3) if at.rank == 0 else ():
        with torch.device("meta"):
            module = Decoder(shape)
        runs = EngineRuns(module, [torch.optim.AdamW(module.parameters())], loss)
        plan = estimate(Choice("", "", ZeroConfig(stage=stage)), runs, machine)
        planned = sum(sum(tier.values()) for tier in plan.tiers.values())
        found = numbers[f"stage {stage}"]
        found |= {"planned states": planned, "planned peak": plan.device_bytes}
        if abs(found["states"] - planned) > 0.01 * planned:
            raise AssertionError(f"stage {stage} has {found['states']} bytes, the plan {planned}")
    held = ", ".join(f"{found['states'] / _MIB:.1f}" for found in numbers.values())
    return f"{held} MiB, as planned", numbers


def time_of_a_step(at: Rank) -> Found:
    """A step of DDP, FSDP2 and each stage, in turn: the median, of the slowest rank."""
    return _times(at, _shape(at), ["DDP", "FSDP2", "stage 1", "stage 2", "stage 3"])


def simulated_group(at: Rank) -> Found:
    """A step of FSDP2 and stage 3 as rank 0 of 8, without communication."""
    leave_world()
    if at.rank > 0:
        return "", {}
    blocks_of_7b = DecoderShape(4096, 8, 32, 32000, hidden=11008, is_gated=True)
    with fake_world(0, 8):
        shape = blocks_of_7b if at.of.on_cuda else _shape(at)
        return _times(replace(at, size=8), shape, ["FSDP2", "stage 3"])


def _times(at: Rank, shape: DecoderShape, names: Sequence[str]) -> Found:
    """The systems take turns; on a GPU in bfloat16."""
    num_rounds, dtype = 3 if at.of.is_quick else 15, "bfloat16" if at.of.on_cuda else None
    makers: dict[str, Callable[..., DDP]] = {"DDP": DDP, "FSDP2": FSDP2}
    makers |= {f"stage {s}": partial(Zero, stage=s, param_dtype=dtype) for s in (1, 2, 3)}
    systems = [makers[name](at, decoder(at, shape)) for name in names]
    next_token = as_loss(at, at.rank, slice(None), 4, 129, vocab_size=shape.vocab_size)

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast(at.device.type, torch.bfloat16, enabled=at.of.on_cuda):
            return next_token(model)

    times = torch.empty(num_rounds + 2, len(systems), device=at.device)
    for number in range(num_rounds + 2):  # two rounds warm up
        for index in range(len(systems)):
            turn = (number + index) % len(systems)
            times[number, turn] = _timed(at, partial(systems[turn].step, [loss]))
    dist.all_reduce(times, dist.ReduceOp.MAX)
    medians = dict(zip(names, map(statistics.median, times[2:].T.tolist()), strict=True))
    text = ", ".join(f"{name} {1000 * median:.1f}" for name, median in medians.items())
    return f"{text} ms, {shape.num_layers} layers of width {shape.width}", medians


def bandwidth(at: Rank) -> Found:
    """All-gather and reduce-scatter at three sizes."""
    _need_two_ranks(at)
    numbers: dict[str, Any] = {}
    for nbytes in (2**22, 2**26, 2**30) if at.of.on_cuda else (2**20, 2**23, 2**25):
        part = torch.ones(nbytes // 4 // at.size, device=at.device)
        full = torch.empty(part.numel() * at.size, device=at.device)
        for name, call in (
            ("all-gather", partial(dist.all_gather_into_tensor, full, part)),
            ("reduce-scatter", partial(dist.reduce_scatter_tensor, part, full)),
        ):
            seconds = min(_timed(at, call) for _ in range(5))
            rate = part.numel() * 4 * (at.size - 1) / seconds / 1e9
            numbers[f"{name} of {nbytes / _MIB:g} MiB"] = rate
    return ", ".join(f"{name} {rate:.2f}" for name, rate in numbers.items()) + " GB/s", numbers


def _timed(at: Rank, call: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    call()
    if at.of.on_cuda:
        streams.synchronize()
    return time.perf_counter() - began


def disk(at: Rank) -> Found:
    """The disk of --nvme-path, written and read by all ranks at once, as by offload."""
    if at.of.nvme_path is None:
        raise Skipped("no --nvme-path")
    nbytes, value = (64 if at.of.is_quick else 512) * _MIB, at.rank % 100 + 1
    buffer = aligned_empty(nbytes, pin=False).fill_(value)
    store = NvmeStore(at.of.nvme_path, rank=at.rank)
    file = store.create("check", nbytes)
    written = _timed(at, lambda: file.write(0, buffer).wait())
    buffer.zero_()
    read = _timed(at, lambda: file.read(0, buffer).wait())
    store.close()
    if not bool((buffer == value).all()):
        raise AssertionError("the bytes that were read are not those that were written")
    rates = {"write": nbytes / written / 1e9, "read": nbytes / read / 1e9}
    text = ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items())
    return f"{text} per rank{'' if store.is_direct else ', through the page cache'}", rates


CHECKS = [Check(run) for run in (versions, stages, precisions, tiers, own_model, branches)]
CHECKS += [Check(killed_rank, loses="was killed by SIGKILL"), Check(raising_rank, loses=_CAUSE)]
CHECKS += [Check(run) for run in (checkpoint, bytes_per_rank, time_of_a_step, simulated_group)]
CHECKS += [Check(run) for run in (bandwidth, disk)]
