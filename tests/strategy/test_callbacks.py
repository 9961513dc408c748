"""Every callback of Lightning, under stages 1-3."""

from __future__ import annotations

import csv
import json
from functools import partial
from itertools import pairwise
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F

from tests.support.cells import SHARDED_STAGE
from tests.support.fitting import assert_same, fit, make_trainer, run_once, settings
from tests.support.models import MLPModule, Recorder
from tests.support.warm import run_ranks

STAGES = [1, 2, 3]


# ---------------------------------------------------------------- fine-tuning


class _Part(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
        self.norm = nn.LayerNorm(sizes[-1])
        self.scale = nn.Parameter(torch.ones(sizes[-1]))

    def forward(self, x):
        return self.norm(self.layers(x)).tanh() * self.scale


class BackboneModule(Recorder):
    """A backbone and a head with parameters of the same shapes, and one of the same values."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.backbone = _Part(8, 9, 9)
        self.neck = _Part(9, 9)
        self.unused = nn.Parameter(torch.ones(9))  # equal to the scale of the backbone
        self.head = nn.Linear(9, 3)

    def part_loss(self, part, rank):
        x, y = part
        return F.mse_loss(self.head(self.neck(self.backbone(x))), y)

    def groups(self):
        return [p for p in self.parameters() if p.requires_grad]


class LayerByLayer(BaseFinetuning):
    """Unfreezes one layer in every epoch."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        layers = pl_module.backbone.layers
        if epoch < len(layers):
            self.unfreeze_and_add_param_group(layers[-1 - epoch], optimizer, lr=1e-3)


FINETUNING = {
    "BackboneFinetuning": partial(BackboneFinetuning, unfreeze_backbone_at_epoch=1),
    "BaseFinetuning": LayerByLayer,
}


def _finetuning(make, folder=None):
    saved = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if folder else []
    return {
        "callbacks": [make(), *saved],
        "max_epochs": 3,
        "enable_checkpointing": bool(folder),
    }


def _finetune(rank, world_size, spec, name):
    """Outcomes of a run, and of one resumed after the first part was unfrozen."""
    factory, make = partial(BackboneModule, ranks=2), FINETUNING[name]
    first = fit(rank, world_size, spec, factory, _finetuning(make, "run"))
    path = "run/epoch=1.ckpt"
    return first, fit(rank, world_size, spec, factory, _finetuning(make), ckpt_path=path)


@pytest.mark.default_cases("BackboneFinetuning-3")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.shows(name)) for name in FINETUNING]
)
def test_what_is_unfrozen_trains_with_averaged_gradients_also_after_a_resume(name, stage):
    reference = run_once(1, _finetune, "auto", name)
    num_groups = len(reference[0][0].learning_rates)
    assert num_groups == {"BackboneFinetuning": 2, "BaseFinetuning": 3}[name]
    ours = run_ranks(2, _finetune, settings(stage), name, has_group=False)
    for one, expected in zip(zip(*ours, strict=True), zip(*reference, strict=True), strict=True):
        assert_same(one, expected)  # Lightning freezes the backbone again; the groups exist


# ---------------------------------------------------------------- pruning


def _prune(rank, world_size, spec):
    pruning = ModelPruning(
        "l1_unstructured", amount=0.3, parameter_names=["weight"], verbose=1,
        use_lottery_ticket_hypothesis=lambda epoch: epoch == 0,
    )  # fmt: skip
    options = {"callbacks": [pruning], "max_epochs": 3}
    return fit(rank, world_size, spec, partial(MLPModule, ranks=2), options, is_saving=True)


@pytest.mark.shows("ModelPruning")
@pytest.mark.default_cases("2")
@pytest.mark.parametrize("stage", [1, 2])
def test_pruning_equals_ddp_where_parameters_are_replicated(stage):
    reference = run_once(2, _prune, "ddp")
    ours = run_ranks(2, _prune, settings(stage), has_group=False)
    zeros = [(reference[0].state[f"net.{i}.weight"] == 0).mean() for i in (0, 2)]
    assert max(zeros) > 0.5
    assert_same(ours, reference)
    saved, expected = ours[0].checkpoint, reference[0].checkpoint
    assert list(saved["state_dict"]) == list(expected["state_dict"])
    torch.testing.assert_close(saved["state_dict"], expected["state_dict"])


@pytest.mark.refuses(
    "ModelPruning", stages=(3,), because="it ranks the elements of full parameters"
)
def test_pruning_of_sharded_parameters_is_refused_by_name():
    with pytest.raises(ValueError, match=r"ModelPruning .* in stage 3 parameters are sharded"):
        run_one_trainer(ModelPruning("l1_unstructured", amount=0.3))


def run_one_trainer(*callbacks):
    trainer = make_trainer(settings(3), callbacks=list(callbacks), devices=1)
    trainer.fit(MLPModule())


# ---------------------------------------------------------------- learning rates


class FindingRate(LearningRateFinder):
    """Searches a learning rate before the first epoch, and keeps the one that is set."""

    def on_fit_start(self, trainer, pl_module):
        self.lr_find(trainer, pl_module)


class RateModule(MLPModule):
    lr = 1e-3

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-5)


def _find_rate(rank, world_size, specs):
    factory = partial(RateModule, ranks=world_size, num_batches=20)
    results = []
    for spec in specs:
        search = {"num_training_steps": 30, "max_lr": 0.1, "early_stop_threshold": None}
        found, kept = LearningRateFinder(**search), FindingRate(**search, update_attr=False)
        taken = fit(rank, world_size, spec, factory, {"callbacks": [found]})
        same = fit(rank, world_size, spec, factory, {"callbacks": [kept]})
        plain = fit(rank, world_size, spec, factory)
        results.append((found.optimal_lr.suggestion(), taken, same, plain))
    return results


@pytest.mark.slow
@pytest.mark.shows("LearningRateFinder")
def test_the_learning_rate_finder_suggests_as_under_ddp_and_leaves_no_trace():
    specs = ["ddp", *map(settings, STAGES)]
    results = run_ranks(2, _find_rate, specs, has_group=False, timeout_s=180)
    reference, *ours = zip(*results, strict=True)
    for of_ranks in ours:
        for (rate, taken, same, plain), (expected, *_) in zip(of_ranks, reference, strict=True):
            assert rate == expected
            assert taken.learning_rates == [rate]
            assert same.losses[-20:] == plain.losses  # the first ones are the finder's
            for key, value in plain.state.items():
                np.testing.assert_array_equal(same.state[key], value)
        assert_same([r[1] for r in of_ranks], [r[1] for r in reference], rtol=1e-5)


# ---------------------------------------------------------------- observing callbacks


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epochs = [], 0

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, *args):
        self.batches.append((prediction.clone(), list(indices)))

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.epochs += len(predictions)


class Falling(MLPModule):
    """A module with a metric that early stopping watches, and a loss spike."""

    spikes_at = None

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        is_spike = batch_idx == self.spikes_at and self.global_rank == 1
        return loss * 1000 if is_spike else loss

    def validation_step(self, batch, batch_idx):
        self.log("stops", float(self.current_epoch == 0), sync_dist=True)


BARS = {"TQDMProgressBar": TQDMProgressBar, "RichProgressBar": RichProgressBar}
SUMMARIES = {"ModelSummary": ModelSummary, "RichModelSummary": RichModelSummary}


def _watch(rank, world_size, spec, bar, summary):
    """Runs one fit with every observing callback, and returns their records."""
    pl.seed_everything(7, verbose=False)
    seen = {}
    name = spec if isinstance(spec, str) else f"stage{spec['stage']}"
    folder = Path(f"{name}-{bar}")
    summary, bar = SUMMARIES[summary](max_depth=-1), BARS[bar]()
    early = EarlyStopping("stops", patience=1, mode="max", min_delta=0.5)
    throughput = ThroughputMonitor(
        batch_size_fn=lambda batch: len(batch[0]), window_size=2, separator="|"
    )
    timer, writer = Timer(duration="00:00:10:00"), Writer()
    look = LambdaCallback(
        on_fit_start=lambda trainer, module: seen.update(
            summary=str(summary._summary(trainer, module)),
            total=summary._summary(trainer, module).total_parameters,
        ),
        on_train_batch_end=lambda trainer, module, *_: seen.update(
            bar=sorted(bar.get_metrics(trainer, module)), batches=bar.total_train_batches
        ),
    )
    callbacks = [LearningRateMonitor("step"), DeviceStatsMonitor(cpu_stats=True), early, timer]
    callbacks += [throughput, SpikeDetection(warmup=100), look, summary, bar, writer]
    trainer = make_trainer(
        spec, callbacks=callbacks, max_epochs=6, limit_val_batches=1, log_every_n_steps=1,
        enable_progress_bar=True, enable_model_summary=True, logger=CSVLogger(folder, "", ""),
    )  # fmt: skip
    module = Falling(ranks=world_size, scheduler="per step")
    trainer.fit(module)
    seen["epochs"], seen["stopped"] = trainer.current_epoch, early.stopped_epoch
    seen["elapsed_s"], seen["losses"] = timer.time_elapsed("train"), module.losses
    trainer.predict(module)
    seen["predictions"], seen["written"] = writer.batches, writer.epochs
    if rank == 0:
        with open(folder / "metrics.csv") as file:
            seen["metrics"] = list(csv.DictReader(file))
    return seen


def _spike(rank, world_size, spec):
    module = Falling(ranks=world_size, num_batches=6)
    module.spikes_at = 4
    path = Path(spec if isinstance(spec, str) else f"stage{spec['stage']}").absolute()
    detection = SpikeDetection(exclude_batches_path=str(path / "skipped.json"), atol=50)
    with pytest.raises(TrainingSpikeException):
        make_trainer(spec, callbacks=[detection]).fit(module)
    if rank == 0:
        assert json.loads((path / "skipped.json").read_text()) == detection.bad_batches
    return detection.bad_batches


def _watch_all(rank, world_size, spec):
    """Records with one progress bar and summary, with the others, and of a spike."""
    seen = _watch(rank, world_size, spec, "TQDMProgressBar", "ModelSummary")
    seen["rich"] = _watch(rank, world_size, spec, "RichProgressBar", "RichModelSummary")
    seen["spike"] = _spike(rank, world_size, spec)
    return seen


def columns(seen, part):
    """Logged values of the metrics whose names contain `part`, by name."""
    names = [name for name in seen["metrics"][0] if part in name]
    return {name: [row[name] for row in seen["metrics"] if row[name]] for name in names}


def rates(seen):
    return [float(value) for values in columns(seen, "lr-").values() for value in values]


CHECKS = {
    "LearningRateMonitor": lambda seen: rates(seen),
    "DeviceStatsMonitor": lambda seen: {k: len(v) for k, v in columns(seen, "DeviceStats").items()},
    "ThroughputMonitor": lambda seen: {
        name: values if name.endswith(("batches", "samples")) else len(values)
        for name, values in columns(seen, "train|").items()
    },
    "EarlyStopping": lambda seen: (seen["epochs"], seen["stopped"]),
    "ModelSummary": lambda seen: (seen["summary"], seen["total"]),
    "RichModelSummary": lambda seen: (seen["rich"]["summary"], seen["rich"]["total"]),
    "TQDMProgressBar": lambda seen: (seen["bar"], seen["batches"]),
    "RichProgressBar": lambda seen: (seen["rich"]["bar"], seen["rich"]["batches"]),
    "SpikeDetection": lambda seen: seen["spike"],
    "Timer": lambda seen: seen["elapsed_s"] > 0,
    "LambdaCallback": lambda seen: sorted(seen.keys() - {"metrics"}),
    "BasePredictionWriter": lambda seen: ([i for _, i in seen["predictions"]], seen["written"]),
}


def shows_each(names):
    """A mark for each of `names`."""

    def decorate(function):
        for name in names:
            function = pytest.mark.shows(name)(function)
        return function

    return decorate


@pytest.mark.default_cases("3")
@shows_each(CHECKS)
@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_observing_callbacks_record_the_same_as_under_ddp(stage):
    ours = run_ranks(2, _watch_all, settings(stage), has_group=False)
    reference = run_once(2, _watch_all, "ddp")
    for seen, of_ddp in zip(ours, reference, strict=True):
        for name, check in CHECKS.items():
            if "Monitor" not in name or "metrics" in seen:
                found, expected = check(seen), check(of_ddp)
                assert found, name
                assert found == (pytest.approx(expected) if "Rate" in name else expected), name
        np.testing.assert_allclose(seen["losses"], of_ddp["losses"], rtol=1e-5)
        both = zip(seen["predictions"], of_ddp["predictions"], strict=True)
        for (predicted, _), (expected, _) in both:
            torch.testing.assert_close(predicted, expected)
        assert seen["total"] == 8 * 13 + 13 + 13 * 3 + 3  # elements of the full model
