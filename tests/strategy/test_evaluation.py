"""Evaluation, samplers, metrics and buffers; a module before, between and after fits."""

from __future__ import annotations

import copy
import io
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.fitting import arrays, fit_ranks, fit_reference, make_trainer, run_once, settings
from tests.support.models import ConvModule, GPTModule, MLPModule
from tests.support.warm import run_ranks


class IndexModule(MLPModule):
    """A loader without sampler; records its samples."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = {"train": [], "val": [], "predict": []}

    def dataloader(self):
        x = torch.arange(12.0)[:, None].expand(12, 8)
        return DataLoader(TensorDataset(x, torch.zeros(12, 3)), batch_size=2)

    def train_dataloader(self):
        return self.dataloader()

    val_dataloader = predict_dataloader = train_dataloader

    def training_step(self, batch, batch_idx):
        self.seen["train"] += batch[0][:, 0].tolist()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.seen["val"] += batch[0][:, 0].tolist()

    def predict_step(self, batch, batch_idx):
        self.seen["predict"] += batch[0][:, 0].tolist()


@pytest.mark.default_cases("3")
@pytest.mark.shows("`DistributedSampler` put in by the Trainer")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_distributed_sampler_is_injected_as_under_ddp(stage):
    ours = run_ranks(3, _samples_seen, settings(stage), has_group=False)
    assert ours == run_once(3, _samples_seen, "ddp")
    for kind in ("train", "val", "predict"):
        assert sorted(i for seen in ours for i in seen[kind]) == list(range(12))


def _samples_seen(rank, world_size, spec):
    seed_everything(7, verbose=False)
    module = IndexModule(ranks=world_size)
    trainer = make_trainer(spec, limit_val_batches=1.0)
    trainer.fit(module)
    trainer.predict(module)
    return module.seen


class MetricModule(MLPModule):
    """Logs its rank and its losses, in training and evaluation."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_rank", float(self.global_rank), sync_dist=True)
        self.log("train_sum", float(self.global_rank), sync_dist=True, reduce_fx="sum")
        self.log("train_loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_rank", float(self.global_rank), sync_dist=True)


@pytest.mark.default_cases("3")
@pytest.mark.shows("`self.log(..., sync_dist=True)`")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sync_dist_gives_the_mean_of_all_ranks_on_each(stage):
    factory = partial(MetricModule, ranks=3)
    options = {"limit_val_batches": 1.0}
    ours = fit_ranks(3, settings(stage), factory, options)
    reference = fit_reference(3, factory, options)
    for outcome in ours:
        assert outcome.metrics["train_rank"] == 1.0
        assert outcome.metrics["val_rank"] == 1.0
        assert outcome.metrics == pytest.approx(reference[0].metrics, rel=1e-6)


class SyncWitness(Callback):
    """Class of the module's normalization when fit starts."""

    def on_fit_start(self, trainer, pl_module):
        self.kinds = {type(m) for m in pl_module.modules() if "Norm" in type(m).__name__}


@pytest.mark.default_cases("3")
@pytest.mark.shows("`sync_batchnorm=True`")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sync_batchnorm_is_applied_for_the_fit_and_reverted_after_it(stage):
    for during, after in run_ranks(2, _normalizations, settings(stage), has_group=False):
        assert during == {nn.SyncBatchNorm}
        assert nn.SyncBatchNorm not in after
        assert len(after) == 1


def _normalizations(rank, world_size, spec):
    module = ConvModule(ranks=world_size)
    witness = SyncWitness()
    # SyncBatchNorm has no CPU kernel: the fit must not train
    trainer = make_trainer(
        spec, sync_batchnorm=True, callbacks=[witness], limit_train_batches=0, max_epochs=1
    )
    trainer.fit(module)
    return witness.kinds, {type(m) for m in module.modules() if "Norm" in type(m).__name__}


@pytest.mark.slow
@pytest.mark.shows("evaluation in inference mode")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", [pytest.param(GPTModule, marks=pytest.mark.slow), ConvModule])
def test_evaluation_in_inference_mode_between_fits_equals_ddp(model, stage):
    factory = partial(model, ranks=2)
    ours = run_ranks(2, _fit_with_inference_mode, settings(stage), factory, has_group=False)
    reference = run_once(2, _fit_with_inference_mode, "ddp", factory)
    for (state, is_inference), (expected, _) in zip(ours, reference, strict=True):
        assert is_inference
        for name, value in expected.items():
            np.testing.assert_allclose(state[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


class InferenceWitness(Callback):
    """Whether validation ran in inference mode."""

    was_inference = False

    def on_validation_batch_start(self, *args):
        self.was_inference |= torch.is_inference_mode_enabled()


class _NotGloo:
    """torch.distributed with a backend named NCCL, for which Lightning uses inference mode."""

    def __getattr__(self, name):
        return getattr(torch.distributed, name)

    def get_backend(self):
        return "nccl"


def _fit_with_inference_mode(rank, world_size, spec, factory):
    import lightning.pytorch.loops.utilities as loops

    seed_everything(7, verbose=False)
    module = factory()
    witness = InferenceWitness()
    options = {"limit_val_batches": 2, "val_check_interval": 1, "callbacks": [witness]}
    trainer = make_trainer(spec, **options)
    with mock.patch.object(loops, "dist", _NotGloo()):
        trainer.validate(module, verbose=False)
        trainer.fit(module)
        trainer.validate(module, verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module)
        make_trainer(spec, **options).fit(module)
    return arrays(module.state_dict()), witness.was_inference


@pytest.mark.slow
@pytest.mark.shows("validate, test and predict before and after fit; a second fit")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", [pytest.param(MLPModule, marks=pytest.mark.slow), ConvModule])
def test_evaluation_before_and_after_fit_and_a_second_fit_equal_ddp(model, stage):
    factory = partial(model, ranks=2)
    ours = run_ranks(2, _life, settings(stage), factory, has_group=False)
    reference = run_once(2, _life, "ddp", factory)
    for (metrics, predictions, state, _), (expected, predicted, final, _) in zip(
        ours, reference, strict=True
    ):
        np.testing.assert_allclose(metrics, expected, rtol=1e-6)
        for one, other in zip(predictions, predicted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
        for name, value in final.items():
            np.testing.assert_allclose(state[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
    assert [traces for *_, traces in ours] == [[], []]


def _life(rank, world_size, spec, factory):
    """Evaluates, fits, evaluates, fits again, then once more with another Trainer."""
    seed_everything(7, verbose=False)
    module = factory()
    module.predict_step = lambda batch, batch_idx: module.net(batch[0].view(_shape(module)))
    module.predict_dataloader = module.train_dataloader
    before = _traces(module)
    trainer = make_trainer(spec, limit_val_batches=1.0)
    metrics, predictions = [], []

    def evaluate():
        metrics.append(trainer.validate(module, verbose=False)[0]["val_loss"])
        metrics.append(trainer.test(module, verbose=False)[0]["test_loss"])
        predictions.extend(p.numpy().copy() for p in trainer.predict(module))

    evaluate()
    trainer.fit(module)
    evaluate()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    evaluate()
    trainer = make_trainer(spec, limit_val_batches=1.0)
    trainer.fit(module)
    evaluate()
    traces = [trace for trace in _traces(module) if trace not in before]
    return metrics, predictions, arrays(module.state_dict()), traces


def _shape(module):
    return (-1, 3, 8, 8) if isinstance(module, ConvModule) else (-1, 8)


def _traces(module):
    """Traces of a strategy on a module: hooks, methods, attributes of parameters."""
    traces = []
    for name, child in module.named_modules():
        for kind, value in vars(child).items():
            if "hooks" in kind and kind != "_load_state_dict_post_hooks" and value:
                traces.append(f"{name}: {kind}")
            if kind == "forward":
                traces.append(f"{name}: forward")
        traces.append(f"{name}: {type(child).__name__}")
    for name, parameter in module.named_parameters():
        traces += [f"{name}.{key}" for key in vars(parameter)]
        traces += [name] * bool(parameter._backward_hooks)
        traces += [name] * bool(parameter._post_accumulate_grad_hooks)
    return traces


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_after_fit_the_module_has_full_tensors_of_its_own(stage):
    for text in run_ranks(2, _check_after_fit, settings(stage), has_group=False):
        assert text == "good"


def _check_after_fit(rank, world_size, spec):
    module = GPTModule(ranks=world_size, is_tied=True)
    shapes = {name: p.shape for name, p in module.named_parameters()}
    objects = dict(module.named_parameters())
    make_trainer(spec).fit(module)
    for name, parameter in module.named_parameters():
        assert parameter is objects[name], name
        assert type(parameter) is nn.Parameter, name
        assert type(parameter.data) is torch.Tensor, name
        assert parameter.shape == shapes[name], name
        assert parameter.device.type == "cpu", name
        assert parameter.grad is None or parameter.grad.shape == parameter.shape, name
        assert not parameter.is_inference(), name
    ids = torch.arange(6)[None]
    logits = module.gpt(ids)
    logits.sum().backward()
    clone = copy.deepcopy(module)
    torch.testing.assert_close(clone.gpt(ids), logits, rtol=0, atol=0)
    fresh = GPTModule(ranks=world_size, is_tied=True)
    fresh.load_state_dict(module.state_dict())
    torch.testing.assert_close(fresh.gpt(ids), logits, rtol=0, atol=0)
    module.load_state_dict(fresh.state_dict())
    module.to(torch.float64)
    assert module.gpt.head.weight is module.gpt.tokens.weight
    file = io.BytesIO()
    torch.save(clone.gpt.norm.state_dict(), file)
    assert file.tell() < 20_000, "a layer's file has the storage of the full model"
    return "good"


@pytest.mark.slow
@pytest.mark.shows("the module under another strategy afterwards")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("order", ["ours first", "ddp first"])
def test_a_module_goes_from_one_strategy_to_another(order, stage):
    specs = [settings(stage), "ddp"]
    if order == "ddp first":
        specs.reverse()
    ours = run_ranks(2, _fit_twice, specs, has_group=False)
    reference = run_once(2, _fit_twice, ["ddp", "ddp"])
    for one, other in zip(ours, reference, strict=True):
        for name, value in other.items():
            np.testing.assert_allclose(one[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def _fit_twice(rank, world_size, specs):
    seed_everything(7, verbose=False)
    module = ConvModule(ranks=world_size)
    for spec in specs:
        make_trainer(spec).fit(module)
    return arrays(module.state_dict())


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_after_fit_the_trainer_still_evaluates_and_saves_as_under_ddp(stage):
    ours = run_ranks(2, _save_after_fit, settings(stage), has_group=False)
    reference = run_once(2, _save_after_fit, "ddp")
    for one, other in zip(ours, reference, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_allclose(one[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def _save_after_fit(rank, world_size, spec):
    seed_everything(7, verbose=False)
    module = MLPModule(ranks=world_size)
    trainer: Trainer = make_trainer(spec, limit_val_batches=1.0)
    trainer.fit(module)
    trainer.save_checkpoint("after.ckpt")
    checkpoint = torch.load("after.ckpt", weights_only=True)
    state = arrays(checkpoint["state_dict"])
    for index, entry in checkpoint["optimizer_states"][0]["state"].items():
        state |= {f"{index} {name}": value.numpy() for name, value in entry.items()}
    state["val_loss"] = np.array(trainer.validate(module, verbose=False)[0]["val_loss"])
    return state
