"""Bytes by tier, found by walking live storages and files, and as the kernel counts them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from lightning_zero import Engine, OffloadConfig, ZeroConfig
from lightning_zero.layout.stage import State
from tests.support.models import SquareBlocks
from tests.support.storage import anonymous_bytes, live_storage_bytes, return_freed_memory
from tests.support.warm import run_ranks

BLOCK_NUMEL = SquareBlocks.WIDTH**2
BUFFERS = {"buffer_count": 3, "buffer_size": 2**18}
POOL_BYTES = 3 * 4 * 2**18


def nvme(**options):
    return OffloadConfig("nvme", nvme_path="swap", **BUFFERS, **options)


def step(net, engine):
    loss = net(torch.ones(2, SquareBlocks.WIDTH)).square().mean()
    engine.backward(loss)
    engine.clip_grad_norm_(1.0)
    engine.step()


TIERS = {
    "optimizer nvme": (2, {"offload_optimizer": nvme()}),
    "optimizer and gradients nvme": (3, {"offload_optimizer": nvme(max_in_cpu_bytes=0)}),
    "all nvme": (
        3,
        {"offload_optimizer": nvme(max_in_cpu_bytes=0), "offload_param": nvme()},
    ),
    "half on nvme, parameters in cpu memory": (
        3,
        {"offload_optimizer": nvme(ratio=0.5), "offload_param": "cpu"},
    ),
}


def _walk(rank, world_size, stage, offload):
    Path("swap").mkdir(exist_ok=True)
    gc.collect()
    before = live_storage_bytes()
    net = SquareBlocks(4)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    engine = Engine(net, [optimizer], ZeroConfig(stage=stage, reduce_bucket_size=1, **offload))
    for _ in range(2):
        engine.zero_grad()
        step(net, engine)
    gc.collect()
    report = engine.memory_report()
    in_files = sum(report.tiers.get("nvme", {}).values())
    in_memory = report.total_bytes - in_files
    buffers = engine.storage.buffer_bytes
    files = [p for p in Path("swap").glob(f"*.rank{rank}.*/*") if p.name != ".lock"]
    return {
        "walked": live_storage_bytes() - before - buffers,
        "in memory": in_memory,
        "buffers": buffers,
        "in files": in_files,
        "of files": sum(p.stat().st_size - 4096 for p in files),  # but for the guard page
        "optimizer": report.state_bytes(State.OPTIM),
        "all": report.total_bytes,
    }


@pytest.mark.default_cases("all nvme-1")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", list(TIERS))
def test_the_report_by_tier_is_what_memory_and_files_hold(name, world_size):
    stage, offload = TIERS[name]
    numel = 4 * BLOCK_NUMEL
    for found in run_ranks(world_size, _walk, stage, offload):
        assert found["in memory"] == pytest.approx(found["walked"], rel=0.01, abs=2**14)
        assert found["in files"] == found["of files"]
        assert found["optimizer"] == pytest.approx(8 * numel / world_size, rel=0.01)
        param = 4 * numel if stage == 2 else 4 * numel / world_size
        assert found["all"] == pytest.approx(param + 12 * numel / world_size, rel=0.01)
        assert found["buffers"] <= 2 * POOL_BYTES


def _train_large(rank, world_size, num_blocks):
    Path("swap").mkdir(exist_ok=True)
    return_freed_memory()
    warm = Engine(
        net := SquareBlocks(1), [torch.optim.AdamW(net.parameters())], ZeroConfig(stage=3)
    )
    step(net, warm)  # pages of code, threads and arenas
    warm.close()
    del net, warm
    gc.collect()
    before = anonymous_bytes()
    net = SquareBlocks(num_blocks)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    config = ZeroConfig(stage=3, offload_optimizer=nvme(max_in_cpu_bytes=0), offload_param=nvme())
    engine = Engine(net, [optimizer], config)
    most = 0

    # The most at any moment of training: whenever a block ends its forward or has its gradient.
    def look(*_):
        nonlocal most
        most = max(most, anonymous_bytes() - before)

    for block in net.blocks:
        block.register_forward_hook(look)
        block.weight.register_post_accumulate_grad_hook(look)
    optimizer.register_step_post_hook(look)
    for _ in range(2):
        step(net, engine)
        engine.zero_grad()
    in_files = sum(engine.memory_report().tiers["nvme"].values())
    numbers = (most, in_files, engine.storage.buffer_bytes)
    # `close` would bring it all back into memory.
    engine.storage.close()
    return numbers


def _check_large(num_blocks, timeout_s):
    ((most, in_files, buffers),) = run_ranks(1, _train_large, num_blocks, timeout_s=timeout_s)
    state = 16 * num_blocks * BLOCK_NUMEL
    assert in_files == pytest.approx(state, rel=0.01)
    assert buffers <= 2 * POOL_BYTES
    assert most < 0.2 * state, f"{most} of {state} bytes"


@pytest.mark.slow
def test_a_model_of_30_m_parameters_trains_in_less_than_a_fifth_of_its_state():
    _check_large(30, 60)


@pytest.mark.slow
def test_a_model_of_200_m_parameters_trains_in_less_than_a_fifth_of_its_state():
    _check_large(200, 250)
