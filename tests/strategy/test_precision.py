"""Precision: names, masters in float32, and the loss scaler."""

from __future__ import annotations

import re
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import nn

from lightning_zero import Engine, ZeroConfig
from lightning_zero.checkpoint.states import METADATA_KEY, RANK_STATES_KEY
from tests.support.cells import SHARDED_STAGE
from tests.support.fitting import (
    DEVICE,
    assert_same,
    fit,
    fit_ranks,
    fit_reference,
    make_trainer,
    run_once,
    settings,
)
from tests.support.models import ConvModule, GPTModule, MLPModule, Recorder
from tests.support.notes import text_of_error
from tests.support.warm import run_ranks

STAGES = [1, 2, 3]
REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("32-true", "32-true"),
        (32, "32-true"),
        ("bf16-mixed", "bf16-mixed"),
        ("bf16", "bf16-mixed"),
        ("bf16-true", "bf16-true"),
        ("16-true", "16-true"),
    ],
)
def test_each_precision_string_gives_a_plugin_of_ours_with_that_name(given, name, stage):
    plugin = make_trainer(settings(stage), devices=2, precision=given).precision_plugin
    assert type(plugin).__module__.startswith("lightning_zero")
    assert isinstance(plugin, Precision)
    assert plugin.precision == name


def test_fp16_mixed_on_cpu_becomes_bf16_with_a_warning():
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
        trainer = make_trainer(settings(3), devices=2, precision="16-mixed")
    assert trainer.precision == "bf16-mixed"
    assert type(trainer.precision_plugin).__module__.startswith("lightning_zero")


class OwnPrecision(Precision):
    """A precision plugin of a user."""

    precision = "32-true"

    def forward_context(self):
        return torch.autocast("cpu", enabled=False)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (Precision, "32-true"),
        (partial(HalfPrecision, "bf16-true"), "bf16-true"),
        (partial(MixedPrecision, "bf16-mixed", "cpu"), "bf16-mixed"),
        (DoublePrecision, "64-true"),
        (OwnPrecision, "32-true"),
    ],
)
def test_a_users_plugin_is_accepted_or_refused_with_its_name(build, name):
    plugin = build()
    try:
        trainer = make_trainer(settings(3), devices=2, plugins=[plugin])
    except REFUSALS as error:
        assert type(plugin).__name__ in str(error) or name in str(error)  # noqa: PT017
    else:
        assert trainer.precision == name


@pytest.mark.default_cases("GPTModule-1")
@pytest.mark.shows("precision bf16-mixed")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", [GPTModule, ConvModule])
def test_bf16_mixed_equals_ddp_in_bf16_mixed(model, stage):
    factory = partial(model, ranks=2, num_batches=6, optimizer="sgd")
    options = {"precision": "bf16-mixed", "accumulate_grad_batches": 2}
    ours = fit_ranks(2, settings(stage), factory, options)
    assert_same(ours, fit_reference(2, factory, options), rtol=1e-3, atol=1e-3)


class Residual(nn.Module):
    """Float features through a norm, a layer and a sum."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class ResidualModule(Recorder):
    """A residual MLP on features in float32."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = nn.Sequential(*(Residual() for _ in range(3)))
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 3)

    def part_loss(self, part, rank):
        x, y = part
        return (self.head(self.norm(self.blocks(x))) - y).square().mean()


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_residual_mlp_with_norms_trains_in_bf16_mixed_as_under_ddp(stage):
    factory = partial(ResidualModule, ranks=2, num_batches=8, optimizer="adam")
    options = {"precision": "bf16-mixed"}
    ours = fit_ranks(2, settings(stage), factory, options)
    assert_same(ours, fit_reference(2, factory, options), rtol=1e-3, atol=1e-3)
    assert min(ours[0].losses) < ours[0].losses[0]


@pytest.mark.slow
def test_a_run_in_bf16_mixed_goes_on_from_its_checkpoint_bit_by_bit():
    factory = partial(ResidualModule, ranks=2, optimizer="adam")
    options = {"precision": "bf16-mixed"}
    first = fit_ranks(2, settings(3), factory, options, is_saving=True)[0].checkpoint
    resumed = run_ranks(2, _resume, factory, {**options, "max_epochs": 2}, first, has_group=False)
    straight = fit_ranks(2, settings(1), factory, {**options, "max_epochs": 2})
    for one, other in zip(resumed, straight, strict=True):
        assert one.losses == other.losses[4:]
        for name, value in one.state.items():
            np.testing.assert_array_equal(value, other.state[name], err_msg=name)


def _resume(rank, world_size, factory, options, checkpoint):
    torch.save(checkpoint, f"resume-{rank}.ckpt")
    path = f"resume-{rank}.ckpt"
    return fit(rank, world_size, settings(1), factory, options, ckpt_path=path)


class LooksModule(ResidualModule):
    """Runs its layers without gradients first, inside the same step.

    With `caches`, autocast keeps its casts of float32 weights between both, as Lightning's plugin
    did before 2.6 and does again after it (Lightning-AI/pytorch-lightning#21616).
    """

    def __init__(self, *, caches: bool, looks: bool = True, **kwargs):
        super().__init__(**kwargs)
        self.caches, self.looks = caches, looks

    def part_loss(self, part, rank):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=self.caches):
            for context in (torch.no_grad, torch.inference_mode) if self.looks else ():
                with context():
                    super().part_loss(part, rank)
            return super().part_loss(part, rank)


@pytest.mark.default_cases("True-3")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("caches", [False, True])
def test_a_forward_without_gradients_in_a_step_of_bf16_mixed_changes_no_gradient(caches, stage):
    factory = partial(LooksModule, caches=caches, ranks=2, optimizer="adam")
    spec, options = settings(stage, keep_float32="head"), {"precision": "bf16-mixed"}
    with_looks = fit_ranks(2, spec, factory, options)
    without = fit_ranks(2, spec, partial(factory, looks=False), options)
    assert_same(with_looks, without, rtol=0, atol=0)
    start = factory().state_dict()
    assert all(not np.array_equal(v, start[k]) for k, v in with_looks[0].state.items())


class Graph(nn.Module):
    """Sums the embeddings of adjacent nodes with an operation that autocast does not cast."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        nodes = torch.zeros(len(x), dtype=torch.long, device=x.device)
        summed = x.new_zeros(5, 8).index_add_(0, nodes, self.embedding(nodes))
        return x + self.layer(summed)[nodes]


class GraphModule(Recorder):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.graph, self.head = Graph(), nn.Linear(8, 3)

    def part_loss(self, part, rank):
        return (self.head(self.graph(part[0])) - part[1]).square().mean()


GRAPH = partial(GraphModule, ranks=2, optimizer="sgd")


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_dtype_error_names_module_parameter_and_the_setting(stage):
    options = {"precision": "bf16-mixed"}
    for text in run_ranks(2, _text_of_fit, settings(stage), GRAPH, options, has_group=False):
        assert "index_add_(): self (Float) and source (BFloat16)" in text
        assert "module graph (Graph), where these parameters are bfloat16" in text
        assert "keep_float32=['graph.embedding.weight']" in text


def _text_of_fit(*args):
    return text_of_error(RuntimeError, fit, *args)


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_what_keep_float32_names_runs_as_under_ddp(stage):
    options = {"precision": "bf16-mixed"}
    spec = settings(stage, keep_float32="graph.embedding")
    ours = fit_ranks(2, spec, GRAPH, options)
    assert_same(ours, fit_reference(2, GRAPH, options), rtol=1e-2, atol=1e-2)


def test_errors_of_a_plain_call_are_explained_where_they_are_of_dtypes():
    assert run_ranks(1, _texts_of_a_plain_call) == [None]


def _texts_of_a_plain_call(rank, world_size):
    own = Graph()
    engine = Engine(own, config=ZeroConfig(stage=1, param_dtype="bf16"))
    with torch.autocast("cpu", torch.bfloat16):
        text = text_of_error(RuntimeError, own, torch.ones(2, 8))
        assert re.search(r"the module \(Graph\).*'embedding.weight'", text)
        text = text_of_error(TypeError, own, None)
        assert "no len" in text
        assert "keep_float32" not in text
    engine.close()


@pytest.mark.parametrize(
    ("stage", "option"), [(3, {"keep_float32": "net.0"}), (0, {"assume_elementwise": True})]
)
def test_a_setting_without_effect_warns(stage, option):
    (name,) = option
    spec = settings(stage, **option)
    assert run_ranks(1, _warnings_of_a_fit, spec, name, has_group=False)[0] == 1


def _warnings_of_a_fit(rank, world_size, spec, name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(rank, world_size, spec, partial(MLPModule, num_batches=1))
    return sum(f"{name} has no effect" in str(w.message) for w in caught)


class SmallStepModule(Recorder):
    """Every gradient is 1, every step 1e-4: in bfloat16, 1 - 1e-4 is 1."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.layer = nn.Linear(8, 3)
        nn.init.ones_(self.layer.weight)
        nn.init.ones_(self.layer.bias)

    def part_loss(self, part, rank):
        return self.layer.weight.sum() + self.layer(part[0]).sum() * 0 + self.layer.bias.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


STEPS = partial(SmallStepModule, ranks=2, num_batches=200)


@pytest.mark.slow
@pytest.mark.shows("precision bf16-true, with float32 masters")
@pytest.mark.parametrize("stage", [*(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2)), 3])
def test_bf16_true_keeps_small_steps_that_plain_bf16_loses(stage):
    options = {"precision": "bf16-true"}
    plain = fit_reference(2, STEPS, options)
    assert (plain[0].state["layer.weight"] == 1).all()
    for outcome in fit_ranks(2, settings(stage), STEPS, options):
        np.testing.assert_allclose(outcome.state["layer.weight"], 0.98, atol=0.002)


class KeepingModule(Recorder):
    """A module that names parts to keep in float32, as models of transformers do."""

    _keep_in_fp32_modules_strict = ("first",)
    _keep_in_fp32_modules = ("last",)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.middle = nn.Linear(8, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)
        nn.init.constant_(self.first.weight, 1 / 3)  # not representable in 16 bits

    def part_loss(self, part, rank):
        assert float(self.first.weight.detach().max()) == pytest.approx(1 / 3, rel=1e-6)
        x = part[0]
        for layer, dtype in ((self.first, torch.float32), *self.expected):
            assert layer.weight.dtype is dtype, layer
            x = layer(x.to(dtype))
        return x.sum() * 0

    @property
    def expected(self):
        """Dtypes of the other layers."""
        own = torch.bfloat16 if self.trainer.precision == "bf16-true" else torch.float16
        last = torch.float32 if own is torch.float16 else own
        return (self.middle, own), (self.last, last)


@pytest.mark.parametrize("stage", SHARDED_STAGE)
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_what_a_model_of_transformers_keeps_in_float32_stays_so(precision, stage):
    factory = partial(KeepingModule, ranks=1, num_batches=1)
    for outcome in fit_ranks(1, settings(stage), factory, {"precision": precision}):
        assert outcome.state["first.weight"].dtype == np.float32


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2)), 3])
def test_bf16_mixed_loses_no_small_step_and_ends_in_fp32(stage):
    for outcome in fit_ranks(2, settings(stage), STEPS, {"precision": "bf16-mixed"}):
        assert outcome.state["layer.weight"].dtype == np.float32
        np.testing.assert_allclose(outcome.state["layer.weight"], 0.98, rtol=1e-5)


@pytest.mark.default_cases("2")
@pytest.mark.parametrize("stage", STAGES)
def test_the_state_dict_in_bf16_true_is_bf16_as_under_ddp(stage):
    for dtypes in run_ranks(2, _dtypes_after_fit, settings(stage), has_group=False):
        assert set(dtypes) == {torch.bfloat16}


def _dtypes_after_fit(rank, world_size, spec):
    module = MLPModule(ranks=world_size)
    make_trainer(spec, precision="bf16-true").fit(module)
    return [value.dtype for value in module.state_dict().values()]


@pytest.mark.default_cases("2")
@pytest.mark.shows("precision 64-true")
@pytest.mark.parametrize("stage", STAGES)
def test_64_true_equals_ddp_or_is_refused_by_name(stage):
    factory = partial(MLPModule, ranks=2)
    options = {"precision": "64-true"}
    results = run_ranks(2, _fit_or_text, settings(stage), factory, options, has_group=False)
    if isinstance(results[0], str):
        assert all("64-true" in text for text in results)
    else:
        assert_same(results, fit_reference(2, factory, options), rtol=1e-12, atol=1e-12)


def _fit_or_text(rank, world_size, spec, factory, options):
    try:
        return fit(rank, world_size, spec, factory, options)
    except REFUSALS as error:
        return str(error)


class OverflowModule(MLPModule):
    """The loss of the second rank overflows in the second batch."""

    num_calls = 0

    def part_loss(self, part, rank):
        loss = super().part_loss(part, rank)
        self.num_calls += 1
        is_bad = rank == 1 and self.num_calls == 2
        return loss * float("inf") if is_bad else loss

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not np.isfinite(self.losses[-1]):
            self.losses[-1] = -1.0
        return loss


class ScaleRecorder(Callback):
    """Records the scale after each batch."""

    def __init__(self):
        self.scales = []

    def on_train_batch_end(self, trainer, *args):
        self.scales.append(trainer.scaler.get_scale())


OVERFLOW = partial(OverflowModule, ranks=2, optimizer="sgd")


@pytest.mark.default_cases("2")
@pytest.mark.shows("precision 16-mixed: the loss scaler")
@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_rank_skips_the_step_on_both_and_halves_the_scale(stage):
    results = run_ranks(2, _fit_with_scaler, settings(stage), None, has_group=False)
    reference = run_once(2, _fit_with_scaler, "ddp", None)
    for scales, outcome in results:
        assert scales == [1024.0, 512.0, 512.0, 512.0]
        assert len(outcome.losses) == 4
    assert_same([r[1] for r in results], [r[1] for r in reference], rtol=1e-3, atol=1e-3)


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", STAGES)
def test_the_scaler_is_in_the_checkpoint_and_comes_back(stage):
    results = run_ranks(2, _fit_with_scaler, settings(stage), None, has_group=False)
    reference = run_once(2, _fit_with_scaler, "ddp", None)
    checkpoint, expected = results[0][1].checkpoint, reference[0][1].checkpoint
    assert checkpoint.keys() - expected.keys() == {RANK_STATES_KEY, METADATA_KEY}
    assert checkpoint["MixedPrecision"] == expected["MixedPrecision"]
    resumed = run_ranks(2, _fit_with_scaler, settings(stage), checkpoint, has_group=False)
    for scales, _ in resumed:
        assert scales == [512.0] * 4


@pytest.mark.default_cases("2")
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_unscaled_before_they_are_clipped(stage):
    results = run_ranks(2, _fit_with_scaler, settings(stage), None, 0.1, has_group=False)
    reference = run_once(2, _fit_with_scaler, "ddp", None, 0.1)
    assert_same([r[1] for r in results], [r[1] for r in reference], rtol=1e-3, atol=1e-3)


def _fit_with_scaler(rank, world_size, spec, checkpoint, clip=None):
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    recorder = ScaleRecorder()
    options = {
        "plugins": [MixedPrecision("16-mixed", DEVICE.type, scaler=scaler)],
        "callbacks": [recorder],
        "max_epochs": 1 if checkpoint is None else 2,
        "gradient_clip_val": clip,
    }
    path = None
    factory = OVERFLOW
    if checkpoint is not None:
        path = f"resume-{rank}.ckpt"
        torch.save(checkpoint, path)
        factory = partial(MLPModule, ranks=2, optimizer="sgd")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = fit(rank, world_size, spec, factory, options, is_saving=True, ckpt_path=path)
    return recorder.scales, outcome
