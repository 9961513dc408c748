"""Activations in CPU memory under every stage: bit-equal, and parameters never go along."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from lightning_zero import offload_activations
from tests.support.fitting import fit, settings
from tests.support.hugging_face import HuggingFaceModule
from tests.support.loops import batch, build, engine_for
from tests.support.models import GPTModule
from tests.support.warm import run_ranks

CHECKPOINTING = [None, "reentrant", "non-reentrant", "non-reentrant in the block"]


class OffloadedGPT(GPTModule):
    """Offloads in all of `training_step`, or around each block."""

    def __init__(self, place, **kwargs):
        super().__init__(**kwargs)
        self.place = place
        self.offload = offload_activations(min_bytes=1)
        if place == "blocks":
            for block in self.gpt.blocks:
                block.forward = self.offloaded(block.forward)

    def offloaded(self, forward):
        def inside(*args):
            with self.offload:
                return forward(*args)

        return inside

    def training_step(self, batch, batch_idx):
        step = super().training_step
        if self.place == "step":
            step = self.offloaded(step)
        return step(batch, batch_idx)


CASES = [(kind, place) for kind in CHECKPOINTING for place in ("step", "blocks")]
FEW = [(None, "blocks"), ("reentrant", "step"), ("non-reentrant", "step")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "stages", "cases"),
    [
        ("32-true", [3], FEW),
        pytest.param("32-true", [0, 1, 2, 3], CASES, marks=pytest.mark.slow),
        pytest.param("bf16-mixed", [0, 1, 2, 3], CASES, marks=pytest.mark.slow),
    ],
)
def test_an_offloaded_run_is_bit_equal(precision, stages, cases):
    for outcomes in run_ranks(2, _train, precision, stages, cases, has_group=False, timeout_s=200):
        for (stage, case), (ours, plain) in outcomes.items():
            assert ours.losses == plain.losses, (stage, case)
            for name, value in plain.state.items():
                assert np.array_equal(ours.state[name], value), (stage, case, name)


def _train(rank, world_size, precision, stages, cases):
    outcomes = {}
    for stage in stages:
        for kind, place in cases:
            train = partial(fit, rank, world_size, settings(stage))
            modules = []

            def factory(place, kind=kind, modules=modules):
                modules.append(OffloadedGPT(place, checkpointing=kind, ranks=2, num_batches=3))
                return modules[-1]

            outcomes[stage, (kind, place)] = [
                train(partial(factory, where), {"precision": precision}) for where in (place, None)
            ]
            offloaded, plain = (module.offload.nbytes for module in modules)
            assert offloaded > plain == 0
    return outcomes


@pytest.mark.shows("`offload_activations`")
def test_no_parameter_goes_along_in_any_stage():
    for counts in run_ranks(2, _count, has_group=True):
        assert counts[0] > 0
        assert len(set(counts)) == 1


def _count(rank, world_size):
    """Bytes that one forward offloads: without an engine, and in stages 0 to 3."""
    counts = []
    for stage in (None, 0, 1, 2, 3):
        module, _ = build()
        engine = None if stage is None else engine_for(module, [], stage)
        context = offload_activations(min_bytes=1)
        with context:
            loss = module(batch(rank, 0))
        counts.append(context.nbytes)
        if engine is not None:
            engine.backward(loss)
            engine.close()
    return counts


class OffloadedLlama(HuggingFaceModule):
    def training_step(self, batch, batch_idx):
        with offload_activations(min_bytes=64):
            return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora on llama", "checkpointed llama", "mixtral", "gpt2"])
def test_a_hugging_face_model_trains_with_it_to_the_same_bits(kind):
    for ours, plain in run_ranks(2, _train_llama, kind, has_group=False, timeout_s=150):
        assert ours.losses == plain.losses
        for name, value in plain.state.items():
            assert np.array_equal(ours.state[name], value), name


def _train_llama(rank, world_size, kind):
    return [
        fit(rank, world_size, settings(3), partial(module, kind, ranks=2, num_batches=3))
        for module in (OffloadedLlama, HuggingFaceModule)
    ]
