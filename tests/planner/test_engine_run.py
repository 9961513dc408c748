"""The engine on shapes alone: few blocks stand for many, and values are not needed."""

import resource
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_zero import ZeroConfig
from lightning_zero.layout.offload import Tier
from lightning_zero.planner import Choice, Decoder, DecoderShape, EngineRuns, Machine, estimate
from lightning_zero.planner.engine_run import RankOfGroup, find_repeated_blocks
from lightning_zero.planner.shapes_only import ShapesOnly
from tests.support.planned import MODELS, OFFLOADS, loss_of
from tests.support.warm import run_ranks


def a_decoder(num_layers, width=32, is_gated=False):
    with torch.device("meta"):
        return Decoder(DecoderShape(width, num_layers, 4, 67, 8, is_gated=is_gated))


class AllBlocks(EngineRuns):
    def _run_few(self, config, of):
        return None


class FewBlocks(EngineRuns):
    def _run(self, config, of, few):
        assert few is not None, "all blocks are run"
        return super()._run(config, of, few)


OF_GPT = partial(loss_of, batch=MODELS["gpt"].batch())


def counts_of(kind, module, config, *, on_cpu=False, size=2, step=OF_GPT, **settings):
    optimizers = [torch.optim.AdamW(module.parameters())]
    runs = kind(module, optimizers, step, **settings)
    machine = Machine(size, size, has_device_memory=not on_cpu)
    return estimate(Choice("", "", config), runs, machine).counts


BF16 = {"param_dtype": "bf16", "keep_float32": "autocast"}
CONFIGS = {
    "plain": {},
    "bf16": BF16,
    "checkpointed": {"activation_checkpointing": True},
    "cpu": OFFLOADS["cpu"],
    "two prefetched": {"prefetch_bucket_size": 30_000},
    "kept": {"reshard_after_forward": False},
}


@pytest.mark.default_cases("plain-False", "bf16-True")
@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_four_blocks_stand_for_eight_to_the_byte(name, on_cpu):
    settings = {"autocast": torch.bfloat16} if name == "bf16" else {}
    config = ZeroConfig(stage=3, **CONFIGS[name])
    few, every = (
        counts_of(kind, a_decoder(8), config, on_cpu=on_cpu, **settings)
        for kind in (FewBlocks, AllBlocks)
    )
    assert few.peak.total_bytes == every.peak.total_bytes
    assert replace(few, peak=every.peak) == every


@pytest.mark.default_cases("0-1", "2-2")
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_four_blocks_stand_for_eight_in_stages_that_replicate_parameters(stage, micro_batches):
    config = ZeroConfig(stage=stage, reduce_bucket_size=2000)
    settings = {"num_micro_batches": micro_batches, "on_cpu": True}
    few, every = (
        counts_of(kind, a_decoder(8), config, **settings) for kind in (FewBlocks, AllBlocks)
    )
    assert few.peak.total_bytes == pytest.approx(every.peak.total_bytes, rel=0.01)
    # Padding of buckets that several blocks share is that of the blocks that are run.
    assert few.sent == pytest.approx(every.sent, rel=0.01)
    for state, nbytes in every.held[Tier.DEVICE].items():
        assert few.held[Tier.DEVICE][state] == pytest.approx(nbytes, rel=0.01)


def test_blocks_that_differ_are_all_run():
    module = a_decoder(9)
    module.blocks[5].up = nn.Linear(32, 7, device="meta")
    assert find_repeated_blocks(module) is None

    class Growing(Decoder):
        """Every call saves more activations than the one before."""

        def forward(self, ids):
            x, kept = self.tokens(ids), []
            for block in self.blocks:
                x = block(x)
                kept.append(x)
                x = x + torch.stack(kept).exp().sum(0)
            return self.head(x)

    with torch.device("meta"):
        module = Growing(DecoderShape(32, 9, 4, 67))
    config = ZeroConfig(stage=3)
    with pytest.raises(AssertionError, match="all blocks are run"):
        counts_of(FewBlocks, module, config)
    assert counts_of(EngineRuns, module, config) == counts_of(AllBlocks, module, config)


def test_the_module_and_the_random_numbers_are_left_as_they_were():
    module = MODELS["conv"].build().eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    optimizers = [torch.optim.AdamW(module.parameters())]
    runs = EngineRuns(module, optimizers, partial(loss_of, batch=MODELS["conv"].batch()))
    runs.count(ZeroConfig(stage=3), RankOfGroup(0, 2, True))
    assert not any(child.training for child in module.modules())
    assert all(value.equal(module.state_dict()[name]) for name, value in before.items())
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in module.parameters())
    assert torch.get_rng_state().equal(state)
    assert not torch.distributed.is_initialized()


def test_a_step_that_cannot_run_is_refused_with_a_reason():
    def step(module):
        raise IndexError("no such token")

    with pytest.raises(ValueError, match=r"Decoder cannot run on shapes alone \(IndexError: no su"):
        counts_of(EngineRuns, a_decoder(2), ZeroConfig(stage=3), step=step)


def test_memory_is_reserved_and_never_written():
    width = 2**13  # 3 GB for each layer in float32
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = counts_of(EngineRuns, a_decoder(3, width), ZeroConfig(stage=3), size=64)
    assert counts.peak.unsharded_bytes > 2 * 12 * width**2 * 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


def test_results_that_may_be_indices_are_zeros_and_never_written():
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident_bytes()
    with ShapesOnly({}, lambda live_bytes: None):
        values = torch.empty(2**28)
        mask = values != values
    assert resident_bytes() - before < mask.nbytes / 4
    assert not mask[-1]


def _peak_beside_a_group(rank, world_size):
    with pytest.raises(ValueError, match="a process group exists"):
        counts_of(EngineRuns, a_decoder(2), ZeroConfig(stage=3))
    return True


def test_a_process_with_a_group_of_its_own_is_refused():
    assert run_ranks(1, _peak_beside_a_group) == [True]


@pytest.mark.default_cases("settings0")
@pytest.mark.parametrize(
    "settings", [{}, {"reshard_after_forward": False}, {"overlap_comm": False}]
)
def test_without_a_step_all_but_the_activations_are_counted(settings):
    config = ZeroConfig(stage=3, **settings)
    module = a_decoder(5, 64)
    without = counts_of(EngineRuns, module, config, on_cpu=True, step=None)
    counted = counts_of(EngineRuns, module, config, on_cpu=True)
    assert replace(without, peak=counted.peak) == counted
    assert without.peak.unsharded_bytes == counted.peak.unsharded_bytes
    # The small activations are counted only there.
    assert 0.75 * counted.peak.total_bytes <= without.peak.total_bytes < counted.peak.total_bytes


def test_recompute_changes_the_peak_alone():
    module, offload = a_decoder(5), OFFLOADS["cpu"]
    plain, selective, recomputed = (
        counts_of(EngineRuns, module, ZeroConfig(3, activation_checkpointing=recomputes, **offload))
        for recomputes in (False, "selective", True)
    )
    activations = [found.peak.activation_bytes for found in (recomputed, selective, plain)]
    assert activations == sorted(set(activations))
    assert replace(recomputed, peak=plain.peak) == replace(selective, peak=plain.peak) == plain
