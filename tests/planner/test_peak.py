"""The peak of a plan is that of training on gloo ranks, to the byte.

Both are counted by the same meter. On the ranks every operator runs, and tensors are sent.
"""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_zero import Engine, ZeroConfig
from lightning_zero.planner import Choice, EngineRuns, Machine, estimate
from lightning_zero.planner.engine_run import _Meter
from lightning_zero.planner.shapes_only import ShapesOnly
from lightning_zero.record.spans import Kind
from tests.support.planned import MODELS, OFFLOADS, loss_of
from tests.support.ranks import run_ranks

WIDTH = 128
BF16 = {"param_dtype": "bf16", "keep_float32": "autocast"}
# The last one has two buckets of one name in each unit.
SMALL = [
    ("llama", 3, "cpu", {}, 1),
    ("conv", 2, "nvme optimizer", {}, 1),
    ("gpt", 3, "none", BF16, 2),
]
OF_STAGE = {
    0: ["none"],
    1: ["none", "nvme optimizer"],
    2: ["none", "cpu optimizer", "nvme gradients"],
    3: ["none", "cpu", "nvme", "nvme gradients"],
}


def cases(name):
    """A model in every stage: with offloads, in float32 and bfloat16, with two micro-batches."""
    for stage, offloads in OF_STAGE.items():
        for offload in offloads:
            for settings in ({}, BF16):
                yield from ((name, stage, offload, settings, number) for number in (1, 2))


def config_of(stage, offload, settings):
    return ZeroConfig(stage=stage, reduce_bucket_size=50_000, **OFFLOADS[offload], **settings)


class CountsOnly(ShapesOnly):
    """Runs every operator."""

    def _run(self, func, operator, args, kwargs):
        return func(*args, **kwargs)


class Trained(EngineRuns):
    """Steps of a module on this rank's group, with the loop of a plan."""

    def measure(self, config):
        """Bytes beyond those between steps at the peak of the third step, and bytes sent in it."""
        meter = _Meter()
        with CountsOnly({}, meter.look):
            module = self.module()
            trained = [p for p in module.parameters() if p.requires_grad]
            engine = Engine(module, torch.optim.AdamW(trained), config)
            for _ in range(2):
                self._accumulate(engine, self._step, meter)
                engine.step()
            gc.collect()
            meter.watch(engine.buckets)
            engine.recorder.begin(2)
            self._accumulate(engine, self._step, meter)
            meter.end()
            engine.step()
            recording = engine.recorder.end()
            engine.close()
        kinds = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
        sent = [s for s in recording.spans if s.kind in kinds and not s.is_wait and s.start_s >= 0]
        return meter.peak().total_bytes, sum(span.nbytes for span in sent)


def _train(rank, world_size, cases):
    Path("swap").mkdir(exist_ok=True)
    found = []
    for name, stage, offload, settings, num_micro_batches in cases:
        trained = Trained(
            partial(MODELS[name].build, WIDTH),
            [],
            partial(loss_of, batch=MODELS[name].batch()),
            num_micro_batches=num_micro_batches,
            autocast=torch.bfloat16 if settings else None,
        )
        found.append(trained.measure(config_of(stage, offload, settings)))
    return found


def planned(name, stage, offload, settings, num_micro_batches, world_size):
    with torch.device("meta"):
        module = MODELS[name].build(WIDTH)
    optimizers = [torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])]
    runs = EngineRuns(
        module,
        optimizers,
        partial(loss_of, batch=MODELS[name].batch()),
        num_micro_batches=num_micro_batches,
        autocast=torch.bfloat16 if settings else None,
    )
    machine = Machine(world_size, world_size, has_device_memory=False)
    return estimate(Choice("", "", config_of(stage, offload, settings)), runs, machine)


def check(cases, world_size):
    cases = list(cases)
    counted = run_ranks(world_size, _train, cases, timeout_s=900)[0]
    for case, (peak, sent) in zip(cases, counted, strict=True):
        found = planned(*case, world_size)
        assert (found.counts.peak.total_bytes, found.sent_bytes) == (peak, sent), case


def test_the_peak_of_a_step_is_that_of_training():
    check(SMALL, 2)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", list(MODELS))
def test_the_peak_is_that_of_training_for_every_model_stage_and_offload(name, world_size):
    check(cases(name), world_size)
