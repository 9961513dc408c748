"""Allocated bytes of each stage, of real groups on one GPU and of rank 0 of large groups."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import cache

import pytest
import torch

import lightning_zero
from examples.gpt import GPT, GPTConfig
from tests.engine.test_memory import (
    BYTES_PER_PARAMETER,
    DTYPES,
    TOLERANCE,
    two_units_and,
)
from tests.gpu.training import batch, build, form_group, loss_of, optimizer_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu

# 84 M parameters: a shard at N = 64 is large beside the rounding to 512 bytes per tensor.
MODEL = GPTConfig(vocab_size=4096, context=8, width=1024, num_layers=6, num_heads=16)
TINY = GPTConfig(vocab_size=64, context=8, width=64, num_layers=1, num_heads=2)
with torch.device("meta"):
    SHAPES = GPT(MODEL)
NUMEL = sum(p.numel() for p in SHAPES.parameters())
UNIT_NUMEL = sum(p.numel() for p in SHAPES.blocks[0].parameters())

# Backend, size of the group, processes that exist.
GROUPS = [("nccl", 1, 1), ("gloo", 2, 2), ("fake", 8, 1), ("fake", 64, 1)]


@dataclass(frozen=True)
class Measured:
    """Bytes on one rank above what it had before the model was built."""

    rest: int
    peak: int
    report: int


@cache
def _measure(stage: int, precision: str, backend: str, size: int, processes: int) -> list[Measured]:
    return run_ranks(
        processes, _train, stage, precision, backend, size, timeout_s=180, has_group=False
    )


def _train(rank, world_size, stage, precision, backend, size):
    form_group(backend, rank, size)
    _step_plainly(DTYPES[precision].get("param_dtype"))
    before = _allocated()
    model = build(MODEL)
    optimizer = optimizer_of(model)
    config = lightning_zero.ZeroConfig(
        stage=stage, reduce_bucket_size=UNIT_NUMEL, **DTYPES[precision]
    )
    engine = lightning_zero.Engine(model, optimizers=[optimizer], config=config)
    for index in range(3):
        if index == 1:  # the first step creates the optimizer's state
            torch.cuda.reset_peak_memory_stats()
        engine.zero_grad()
        loss = loss_of(model, batch(index, rank, MODEL, size=1))
        engine.backward(loss)
        engine.step()
        del loss
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return Measured(
        rest=_allocated() - before,
        peak=peak - before,
        report=engine.memory_report().total_bytes,
    )


def _step_plainly(dtype: torch.dtype | None) -> None:
    """Lets the libraries allocate what they keep, a workspace of cuBLAS above all."""
    model = build(TINY).to(dtype or torch.float32)
    loss_of(model, batch(0, 0, TINY, size=1)).backward()


def _allocated() -> int:
    torch.cuda.synchronize()
    gc.collect()
    # Not the blocks of the allocator, each of which may be 1 MiB larger than what was asked for.
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize(("backend", "size", "processes"), GROUPS)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
class TestModelStates:
    def test_have_the_bytes_of_the_stage(self, stage, precision, backend, size, processes):
        expected = NUMEL * BYTES_PER_PARAMETER[precision, stage](size)
        for measured in _measure(stage, precision, backend, size, processes):
            assert measured.rest == pytest.approx(expected, rel=TOLERANCE)
            assert measured.report == pytest.approx(expected, rel=TOLERANCE)

    def test_peak_at_two_units_and_two_buckets_above_rest(
        self, stage, precision, backend, size, processes
    ):
        extra = two_units_and(2, SHAPES, precision, backend, size)
        activations = UNIT_NUMEL  # bytes: generous for 8 tokens
        for measured in _measure(stage, precision, backend, size, processes):
            assert measured.peak <= (1 + TOLERANCE) * measured.rest + extra + activations
