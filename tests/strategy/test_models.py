"""Models of transformers and peft, with random weights: training, resuming, generating."""

from __future__ import annotations

import traceback
import warnings
from functools import cache, partial

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

import lightning_zero
from tests.support.fitting import fit, settings
from tests.support.hugging_face import MODELS, MORE_MODELS, HuggingFaceModule, llama
from tests.support.loops import engine_for
from tests.support.warm import run_ranks

slow = pytest.mark.slow
STAGES = [pytest.param(1, marks=slow), pytest.param(2, marks=slow), 3]
BY_DEFAULT = ("lora on llama",)
# This kind of checkpointing is refused by DDP.
REFERENCES = {"reentrant llama": "llama"}
NUM_STEPS = 5


class UnitWitness(Callback):
    """Number of blocks that are unsharded at once, in forward and in backward."""

    def __init__(self):
        self.num_units = 0
        self.most = 0
        self.after_backward = 0

    def on_train_start(self, trainer, pl_module):
        coordinator = getattr(getattr(trainer.strategy, "engine", None), "coordinator", None)
        if coordinator is None:
            return
        self.units = [unit for unit in coordinator.units[1:] if unit.buckets]
        self.num_units = len(self.units)
        for unit in self.units:
            unit.module.register_forward_hook(self.count)
            for parameter in unit.module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self.count)

    def count(self, *_):
        self.most = max(self.most, sum(unit.is_unsharded for unit in self.units))

    def on_after_backward(self, trainer, pl_module):
        if self.num_units:
            self.after_backward += sum(unit.is_unsharded for unit in self.units)


@cache
def _train_ranks(kinds, stages):
    """By rank, and by (kind, stage or "ddp"); in one call, for the import takes seconds."""
    return run_ranks(2, _train_all, kinds, stages, has_group=False, timeout_s=240)


def _train_all(rank, world_size, kinds, stages):
    outcomes = {}
    for kind in kinds:
        for stage in stages:
            try:
                outcomes[kind, stage] = _train(rank, world_size, kind, stage)
            except Exception:
                outcomes[kind, stage] = traceback.format_exc()
    return outcomes


def _train(rank, world_size, kind, stage):
    """Two epochs, the second one resumed where the strategy is ours."""
    factory = partial(HuggingFaceModule, kind, ranks=world_size, num_batches=NUM_STEPS)
    train = partial(fit, rank, world_size)
    if stage == "ddp":
        return train("ddp_find_unused_parameters_true", factory, {"max_epochs": 2})
    witness, spec = UnitWitness(), settings(stage)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*stay unsharded throughout each step.*")
        first = train(spec, factory, {"callbacks": [witness]}, is_saving=True)
        resumed = train(spec, factory, {"max_epochs": 2}, ckpt_path="witness.ckpt")
    return first, resumed, (witness.num_units, witness.most, witness.after_backward)


def _check(kind, ours, reference):
    """Both by rank; an error is its text."""
    for one, expected in zip(ours, reference, strict=True):
        assert not isinstance(one, str), one
        assert not isinstance(expected, str), expected
        first, resumed, _ = one
        assert len(first.losses) == len(resumed.losses) == NUM_STEPS
        np.testing.assert_allclose(first.losses + resumed.losses, expected.losses, rtol=2e-6)
        assert list(first.checkpoint["state_dict"]) == list(resumed.state) == list(expected.state)
        for name, value in expected.state.items():
            np.testing.assert_allclose(
                resumed.state[name], value, rtol=1e-5, atol=1e-6, err_msg=name
            )


@pytest.mark.slow
@pytest.mark.shows("models of transformers and peft (LoRA)")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_hugging_face_model_trains_and_resumes_as_under_ddp(kind, stage):
    kinds = BY_DEFAULT if kind in BY_DEFAULT else tuple(k for k in MODELS if k not in BY_DEFAULT)
    trained = _train_ranks(kinds, ("ddp", 3))
    reference = [of_rank[kind, "ddp"] for of_rank in trained]
    if stage != 3:
        trained = _train_ranks(kinds, (stage,))
    ours = [of_rank[kind, stage] for of_rank in trained]
    _check(kind, ours, reference)
    if stage == 3:
        assert [blocks for *_, blocks in ours] == [(4, 2, 0)] * 2  # the one in use, and the next


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MORE_MODELS))
def test_an_unusual_hugging_face_model_trains_and_resumes_as_under_ddp(kind):
    trained = _train_ranks(("llama", *MORE_MODELS), ("ddp", 3))
    reference = REFERENCES.get(kind, kind)
    _check(kind, [rank[kind, 3] for rank in trained], [rank[reference, "ddp"] for rank in trained])


@pytest.mark.slow
def test_hugging_face_generate_ends_at_different_tokens_on_different_ranks():
    for ours, single in run_ranks(2, _generate):
        assert ours == single


def _generate(rank, world_size):
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = llama()
    plain = llama()
    plain.load_state_dict(model.state_dict())
    engine = engine_for(model, [torch.optim.AdamW(model.parameters())], 3)
    ids = torch.arange(3, 9).view(2, 3) + 7 * rank
    end = int(plain.generate(ids[:1], max_new_tokens=3, do_sample=False)[0, -1])
    texts = []
    for one in (model, plain):
        torch.manual_seed(rank)
        texts.append([])
        with lightning_zero.uneven_calls(one):
            for kwargs in (
                {"max_new_tokens": 3 + 4 * rank, "eos_token_id": end if rank else None},
                {"max_new_tokens": 4 - 2 * rank, "do_sample": True},
                {"max_new_tokens": 3 + rank, "num_beams": 3, "use_cache": bool(rank)},
            ):
                texts[-1].append(one.generate(ids, **kwargs).tolist())
    loss = model(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    engine.close()
    return texts


def _train_narrow(rank, world_size, precision):
    factory = partial(HuggingFaceModule, "llama", ranks=world_size, num_batches=2 * NUM_STEPS)
    options = {"precision": precision}
    specs = ["ddp", settings(2), settings(3)]
    return [fit(rank, world_size, spec, factory, options).losses for spec in specs]


@slow
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_a_hugging_face_model_in_bfloat16_trains_as_under_ddp(precision):
    ranks = run_ranks(2, _train_narrow, precision, has_group=False, timeout_s=240)
    for expected, stage_2, stage_3 in ranks:
        assert len(expected) == 2 * NUM_STEPS
        np.testing.assert_allclose(stage_2, expected, rtol=1e-2)
        np.testing.assert_allclose(stage_3, stage_2, rtol=1e-3)
