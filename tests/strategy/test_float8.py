"""Linear layers in float8 (torchao, emulated on the CPU) train as under DDP, in every stage."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.nn.utils import prune

from lightning_zero import Engine, Float8Precision, ZeroConfig, load_from_checkpoint
from lightning_zero.planner import EngineRuns
from lightning_zero.planner.engine_run import RankOfGroup
from tests.support.fitting import (
    arrays,
    assert_same,
    fit,
    fit_ranks,
    fit_reference,
    make_trainer,
    run_once,
    settings,
)
from tests.support.models import GPTModule
from tests.support.planned import MODELS, loss_of
from tests.support.warm import run_ranks

pytest.importorskip("torchao", reason="needs torchao")
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

EMULATED = partial(Float8LinearConfig, emulate=True)


class Float8GPT(GPTModule):
    """Converts its own layers."""

    def configure_model(self):
        if not isinstance(self.gpt.head, Float8Linear):
            convert_to_float8_training(self.gpt, config=EMULATED())


def plugin(**options):
    return {"plugins": [Float8Precision(EMULATED(), **options)]}


@pytest.mark.default_cases("3")
@pytest.mark.shows("torchao's float8 linear layers")
@pytest.mark.parametrize("stage", range(4))
def test_float8_layers_train_as_under_ddp(stage):
    factory = partial(Float8GPT, ranks=2, num_batches=3)
    reference = fit_reference(2, factory)
    assert_same(fit_ranks(2, settings(stage), factory), reference)
    plain = fit_reference(2, partial(GPTModule, ranks=2, num_batches=3))
    assert reference[0].losses != plain[0].losses


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", range(4))
def test_the_plugin_trains_as_a_module_that_converts_itself(stage):
    factory = partial(GPTModule, ranks=2, num_batches=3)
    ours = fit_ranks(2, settings(stage), factory, plugin())
    own = partial(Float8GPT, ranks=2, num_batches=3)
    assert_same(ours, fit_ranks(2, settings(stage), own, {"precision": "bf16-mixed"}))


@pytest.mark.slow
def test_the_plugin_also_works_under_ddp():
    factory = partial(GPTModule, ranks=2, num_batches=3)
    options = {**plugin(), "gradient_clip_val": 0.5}
    ours = fit_ranks(2, settings(3), factory, options)
    reference = fit_reference(2, factory, options)
    # On a CPU torchao takes no notice of autocast, so DDP's matrices are in float32.
    assert_same(ours, reference, rtol=1e-2, atol=1e-2)
    options = {"precision": "bf16-mixed", "gradient_clip_val": 0.5}
    assert_same(reference, fit_reference(2, partial(Float8GPT, ranks=2, num_batches=3), options))


class MetaGPT(GPTModule):
    """On the meta device until training starts."""

    def configure_model(self):
        self.gpt = self.gpt.to("meta")
        torch.manual_seed(1)


def test_layers_on_the_meta_device_get_the_values_of_plain_ones():
    factory = partial(MetaGPT, ranks=1, num_batches=1, optimizer="sgd")
    ours = fit_ranks(1, settings(3), factory, plugin())
    plain = fit_ranks(1, settings(3), factory, {"precision": "bf16-mixed"})
    assert_same(ours, plain, rtol=2e-2, atol=2e-3)
    assert ours[0].losses != plain[0].losses


@pytest.mark.parametrize("strategy", ["zero3", "auto"])
def test_autocast_is_that_of_the_trainers_device(monkeypatch, strategy):
    with monkeypatch.context() as context:
        context.setattr(torch.cuda, "is_available", lambda: True)
        precision = Float8Precision(EMULATED())
    trainer = make_trainer(strategy, devices=1, plugins=precision)
    trainer.fit(GPTModule(num_batches=1))
    assert trainer.precision_plugin.device == "cpu"


def _prune(rank, world_size, spec):
    callbacks = [ModelPruning("l1_unstructured", amount=0.3, parameter_names=["weight"])]
    options = {**plugin(), "callbacks": callbacks, "max_epochs": 2}
    return fit(rank, world_size, spec, partial(GPTModule, ranks=2, num_batches=2), options)


@pytest.mark.slow
def test_pruning_prunes_converted_layers_as_under_ddp():
    ours = run_ranks(2, _prune, settings(1), has_group=False)
    reference = run_once(2, _prune, "ddp")
    for outcome in (ours[0], reference[0]):
        assert (outcome.state["gpt.blocks.0.up.weight"] == 0).mean() > 0.25
    assert_same(ours, reference, rtol=2e-2, atol=2e-2)


@pytest.mark.default_cases("full")
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_checkpoints_have_the_keys_of_the_plain_module_and_resume(tmp_path, form):
    factory = partial(GPTModule, ranks=2, num_batches=3)
    path = str(tmp_path / "saved")
    spec = settings(3, checkpoint=form)
    straight, resumed = (
        run_ranks(2, _fit_twice, spec, factory, path, ends, has_group=False)[0]
        for ends in ([2], [1, 2])
    )
    assert list(straight) == list(GPTModule().state_dict())
    for name, value in straight.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)


def _fit_twice(rank, world_size, spec, factory, path, ends):
    """Fits up to each of the epochs, from the checkpoint of the one before, with a new module."""
    ckpt_path = None
    for end in ends:
        torch.manual_seed(0)
        module = factory()
        trainer = make_trainer(spec, max_epochs=end, **plugin())
        trainer.fit(module, ckpt_path=ckpt_path)
        trainer.save_checkpoint(path)
        ckpt_path = path
    loaded = load_from_checkpoint(GPTModule, path).state_dict()  # not converted
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in loaded.items())
    return arrays(loaded)


@pytest.mark.slow
def test_a_run_resumes_in_bf16_mixed_and_back(tmp_path):
    run_ranks(2, _fit_in_turns, str(tmp_path / "saved"), has_group=False)


def _fit_in_turns(rank, world_size, path):
    ckpt_path = None
    mixed = {"precision": "bf16-mixed"}
    for epoch, options in enumerate([plugin(), mixed, plugin()], start=1):
        module = GPTModule(ranks=2, num_batches=2)
        trainer = make_trainer(settings(3), max_epochs=epoch, **options)
        trainer.fit(module, ckpt_path=ckpt_path)
        assert trainer.global_step == 2 * epoch
        assert isinstance(module.gpt.head, Float8Linear) == (options is not mixed)
        ckpt_path = path
        trainer.save_checkpoint(path)


@pytest.mark.refuses(
    "torchao's `enable_fsdp_float8_all_gather`", because="only FSDP can all-gather such parameters"
)
def test_the_all_gather_of_fsdp_is_refused_by_name():
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    for stage in range(4):
        module = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=config)
        with pytest.raises(
            ValueError,
            match=r"Parameter 0\.weight must be .*enable_fsdp_float8_all_gather=False",
        ):
            Engine(module, [torch.optim.SGD(module.parameters())], ZeroConfig(stage=stage))
    with pytest.raises(ValueError, match=r"enable_fsdp_float8_all_gather=False, got True"):
        Float8Precision(config)


def test_other_parameters_that_only_fsdp_gathers_are_refused_without_advice_on_float8():
    module = nn.Linear(16, 16)
    module.weight.fsdp_pre_all_gather = None  # as NF4Tensor has
    with pytest.raises(ValueError, match=r"FSDP alone can all-gather; train .* with FSDP2\.$"):
        Engine(module, [torch.optim.SGD(module.parameters())], ZeroConfig(stage=3))


def test_a_subclass_of_the_plugin_is_refused_by_name():
    class Own(Float8Precision):
        pass

    with pytest.raises(TypeError, match=r"plugin Own,.* or Float8Precision, but no subclass"):
        make_trainer(settings(3), plugins=Own(EMULATED()))


def test_only_layers_that_float8_can_multiply_and_no_excluded_ones_are_converted():
    class OwnLinear(nn.Linear):
        pass

    module = nn.ModuleDict(
        {
            "up": nn.Linear(16, 32),
            "odd": nn.Linear(16, 24),
            "own": OwnLinear(16, 16),
            "head": nn.Linear(32, 16),
        }
    )
    parameters = dict(module.named_parameters())
    precision = Float8Precision(EMULATED(), exclude=["*head"])
    for _ in range(2):  # of two runs
        precision.convert_module(module)
        assert [type(layer) for layer in module.values()] == [
            Float8Linear, nn.Linear, OwnLinear, nn.Linear
        ]  # fmt: skip
    assert all(p is parameters[name] for name, p in module.named_parameters())
    with pytest.warns(UserWarning, match="converted no layer of Linear.*multiples of 16"):
        Float8Precision().convert_module(nn.Linear(16, 8))


def _named_types(module):
    return {name: type(m) for name, m in module.named_modules() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize("item", ["head", "h*d", nn.Sequential, "Sequential"])
def test_exclude_keeps_all_layers_below_a_module(item):
    module = nn.ModuleDict(
        {
            "up": nn.Linear(16, 16),
            "head": nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)),
        }
    )
    Float8Precision(EMULATED(), exclude=[item]).convert_module(module)
    assert _named_types(module) == {"up": Float8Linear, "head.0": nn.Linear, "head.2": nn.Linear}


@pytest.mark.parametrize("item", ["body", "body.0", "*.0"])
def test_exclude_has_names_without_those_of_compiled_modules(item):
    body = torch.compile(nn.Sequential(nn.Linear(16, 16)), backend="eager")
    module = nn.ModuleDict({"up": nn.Linear(16, 16), "body": body})
    Float8Precision(EMULATED(), exclude=item).convert_module(module)
    assert list(_named_types(module).values()) == [Float8Linear, nn.Linear]


def test_a_layer_stays_the_same_object_with_all_that_it_has():
    layer, calls = nn.Linear(16, 16).eval(), []
    layer.register_forward_hook(lambda *_: calls.append("hook"))
    layer.reset_parameters = lambda: calls.append("reset")
    layer.compile(backend=lambda graph, _: calls.append("compile") or graph.forward)
    module = nn.Sequential(layer, prune.l1_unstructured(nn.Linear(16, 16), "weight", amount=0.5))
    x = torch.randn(16, 16)
    plain = module(x)
    calls.clear()
    Float8Precision(EMULATED()).convert_module(module)
    assert module[0] is layer
    assert _named_types(module) == {"0": Float8Linear, "1": Float8Linear}
    assert not layer.training
    error = (module(x) - plain).norm() / plain.norm()
    assert 1e-4 < error < 0.1
    layer.reset_parameters()
    assert calls == ["compile", "hook", "reset"]


def test_a_layer_that_cannot_be_converted_is_an_error_or_stays():
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    module[0].forward = module[0].forward
    module[1].config = "mine"
    with pytest.raises(ValueError, match=r"^1 has the attribute config, .*rename it"):
        Float8Precision(EMULATED()).convert_module(module)
    del module[1].config
    Float8Precision(EMULATED()).convert_module(module)
    assert _named_types(module) == {"0": nn.Linear, "1": Float8Linear}


def test_without_torchao_the_error_has_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ModuleNotFoundError, match=r'needs torchao: .*"lightning-zero\[float8\]"'):
        Float8Precision()


def test_wrong_settings_are_errors_that_say_what_is_expected():
    with pytest.raises(TypeError, match=r"Float8LinearConfig, got 'rowwise'; .*from_recipe_name"):
        Float8Precision("rowwise")
    with pytest.raises(TypeError, match=r"exclude must be names .*got 3"):
        Float8Precision(exclude=[3])
    module = nn.ModuleDict({"head": nn.Linear(16, 16), "body": nn.Linear(16, 16)})
    with pytest.raises(
        ValueError,
        match=r"'\*haed', .* no nn.Linear, .*named_modules.* '\*\.haed'\. The nearest: head, body",
    ):
        Float8Precision(EMULATED(), exclude="*haed").convert_module(module)
    module["norm"] = nn.LayerNorm(16)
    for item in ("norm", nn.LayerNorm):
        with pytest.raises(ValueError, match=r"exclude\) has .*no nn.Linear"):
            Float8Precision(EMULATED(), exclude=item).convert_module(module)
    Float8Precision(EMULATED(), exclude="head").convert_module(module)
    assert _named_types(module) == {"head": nn.Linear, "body": Float8Linear}


def _built():
    return convert_to_float8_training(MODELS["gpt"].build(), config=EMULATED())


def _measure(rank, world_size, configs):
    """Bytes that the engine counts after two steps, by configuration."""
    found = []
    for config in configs:
        module = _built()
        engine = Engine(module, [torch.optim.AdamW(module.parameters(), fused=True)], config)
        for _ in range(2):
            engine.zero_grad()
            engine.backward(loss_of(module, MODELS["gpt"].batch()))
            engine.step()
        tiers = engine.memory_report().tiers
        found.append({tier: dict(states) for tier, states in tiers.items()})
        engine.close()
    return found


@pytest.mark.slow
def test_the_plan_has_the_bytes_of_the_engine():
    configs = [ZeroConfig(stage=stage) for stage in (1, 3)]
    with torch.device("meta"):
        module = _built()
    step = partial(loss_of, batch=MODELS["gpt"].batch())
    runs = EngineRuns(module, [torch.optim.AdamW(module.parameters())], step)
    for rank, found in enumerate(run_ranks(2, _measure, configs)):
        for config, tiers in zip(configs, found, strict=True):
            counts = runs.count(config, RankOfGroup(rank, 2, False))
            assert {tier.value: dict(states) for tier, states in counts.held.items()} == tiers


def test_a_module_that_was_converted_otherwise_is_an_error():
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    Float8Precision(EMULATED()).convert_module(module)
    Float8Precision(EMULATED()).convert_module(module)
    for other in (Float8Precision(EMULATED(), exclude=["1"]), Float8Precision()):
        with pytest.raises(ValueError, match="is in float8 since an earlier run, with another"):
            other.convert_module(module)
