"""Activations that leave the GPU: the same bits, less memory, copies beside compute."""

from __future__ import annotations

import pytest
import torch

import lightning_zero
from examples.gpt import GPTConfig
from tests.gpu.training import batch, build, form_group, loss_of, optimizer_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu

LARGE = GPTConfig(vocab_size=512, context=256, width=512, num_layers=8, num_heads=8)


def _train(rank, world_size, stage, offloads):
    """Losses, and the peak of memory above that before a forward."""
    form_group("gloo", rank, world_size)
    model = build(LARGE)
    config = lightning_zero.ZeroConfig(stage=stage)
    engine = lightning_zero.Engine(model, optimizers=[optimizer_of(model)], config=config)
    context = lightning_zero.offload_activations(min_bytes=2**16)
    losses, peak = [], 0
    for index in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ids = batch(index, rank, LARGE, size=8)
        if offloads:
            with context:
                loss = loss_of(model, ids)
        else:
            loss = loss_of(model, ids)
        engine.backward(loss)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        engine.step()
        engine.zero_grad()
        losses.append(float(loss.detach()))
    engine.close()
    return losses, peak, context.nbytes


@pytest.mark.parametrize("stage", [1, 3])
def test_an_offloaded_run_has_the_same_losses_and_a_lower_peak(stage):
    for rank_ours, rank_plain in zip(
        run_ranks(2, _train, stage, True, has_group=False, timeout_s=200),
        run_ranks(2, _train, stage, False, has_group=False, timeout_s=200),
        strict=True,
    ):
        losses, peak, nbytes = rank_ours
        assert losses == rank_plain[0]
        assert nbytes > 0
        assert peak < 0.8 * rank_plain[1]
