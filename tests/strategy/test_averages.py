"""Callbacks for weight averaging: the averages of DDP, sharded."""

from __future__ import annotations

import gc
from functools import partial
from unittest.mock import MagicMock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)

from tests.support.fitting import arrays, make_trainer, settings
from tests.support.models import ConvModule, MLPModule, TiedModule
from tests.support.ranks import RankError
from tests.support.storage import live_storage_bytes
from tests.support.warm import run_ranks

STAGES = [1, 2, 3]


class EveryEpoch(WeightAveraging):
    """A subclass as Lightning's documentation shows it: an equal average of epochs."""

    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None


CALLBACKS = {
    "EMAWeightAveraging": partial(EMAWeightAveraging, decay=0.7),
    "WeightAveraging": EveryEpoch,
    "StochasticWeightAveraging": partial(
        StochasticWeightAveraging, swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1
    ),
}


class Watch(pl.Callback):
    """Records the validation losses, for which the average is swapped in."""

    def __init__(self):
        self.losses = []

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.losses.append(float(trainer.callback_metrics["val_loss"]))


def train(spec, make_callback, factory, ckpt_path=None, folder=None, **options):
    """Final parameters, the average's, and validation losses; checkpoints go to `folder`."""
    pl.seed_everything(3, verbose=False)
    module, callback, watch = factory(), make_callback(), Watch()
    callbacks = [callback, watch]
    if folder is not None:
        options["enable_checkpointing"] = True
        callbacks.append(ModelCheckpoint(folder, "{epoch}", save_top_k=-1))
    options = {"max_epochs": 3, "limit_val_batches": 2, "num_sanity_val_steps": 1, **options}
    trainer = make_trainer(spec, callbacks=callbacks, **options)
    trainer.fit(module, ckpt_path=ckpt_path)
    average = callback._average_model
    return {
        "state": arrays(module.state_dict()),
        "average": arrays(average.state_dict()),
        "val": np.array(watch.losses),
        "train": np.array(module.losses),
    }


def assert_equal(ours, expected, tolerance=1e-6, names=("state", "average", "val")):
    for name in names:
        mine, other = ours[name], expected[name]
        if not isinstance(mine, dict):
            mine, other = {name: mine}, {name: other}
        assert list(mine) == list(other)
        for key, value in mine.items():
            np.testing.assert_allclose(
                value, other[key], rtol=tolerance, atol=tolerance, err_msg=f"{name} {key}"
            )


def _train_all(rank, world_size, specs, make_callback, factory, options=None):
    return [train(spec, make_callback, factory, **(options or {})) for spec in specs]


# ---------------------------------------------------------------- equal to DDP


@pytest.mark.default_cases("WeightAveraging-32-true")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.shows(name)) for name in CALLBACKS]
)
def test_averages_equal_those_of_ddp(name, precision):
    factory = partial(MLPModule, ranks=2)
    specs = ["ddp", *map(settings, STAGES)]
    if precision == "bf16-mixed":  # DDP leaves casts to autocast
        specs = ["ddp", *(settings(stage, param_dtype="float32") for stage in STAGES)]
        specs += map(settings, STAGES)
    options = {"precision": precision}
    results = run_ranks(
        2, _train_all, specs, CALLBACKS[name], factory, options, has_group=False, timeout_s=120
    )
    for of_rank in results:
        expected = of_rank[0]
        for number, ours in enumerate(of_rank[1:]):
            is_narrow = number >= len(STAGES)
            tolerance = 2e-2 if is_narrow else 1e-5 if precision == "bf16-mixed" else 1e-6
            assert_equal(ours, expected, tolerance)
    for ours in results[0][4:]:  # stages agree in their last bits, whatever DDP's casts do
        assert_equal(ours, results[0][4], 1e-6)


@pytest.mark.slow
@pytest.mark.shows("StochasticWeightAveraging")
def test_stochastic_averaging_updates_the_statistics_of_batchnorm():
    factory = partial(ConvModule, ranks=2)
    specs = ["ddp", *map(settings, STAGES)]
    callback = CALLBACKS["StochasticWeightAveraging"]
    for expected, *ours in run_ranks(2, _train_all, specs, callback, factory, has_group=False):
        for outcome in ours:
            assert_equal(outcome, expected, 2e-6)


@pytest.mark.slow
def test_buffers_and_tied_weights_are_averaged_as_under_ddp():
    specs = ["ddp", *map(settings, [0, *STAGES])]
    callback = CALLBACKS["EMAWeightAveraging"]
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3}
    for factory in (partial(ConvModule, ranks=2), partial(TiedModule, ranks=2)):
        (first, _) = run_ranks(2, _train_all, specs, callback, factory, options, has_group=False)
        for ours in first[1:]:
            assert_equal(ours, first[0], 2e-6)


# ---------------------------------------------------------------- save and resume


def _resume(rank, world_size, make_callback, factory, stages):
    """Uninterrupted and resumed runs by checkpoint kind and stage, here and under DDP."""
    results = {"ddp": train("ddp", make_callback, factory, folder="ddp", max_epochs=4)}
    for form in ("full", "sharded"):
        for stage in stages:
            spec = settings(stage, checkpoint=form)
            folder = f"{form}{stage}"
            results[folder] = train(spec, make_callback, factory, folder=folder, max_epochs=4)
            path = f"{folder}/epoch=1.ckpt"
            results[f"{folder} again"] = train(spec, make_callback, factory, path, max_epochs=4)
            other = "ddp" if form == "full" else settings(stages[0])
            results[f"{folder} other"] = train(other, make_callback, factory, path, max_epochs=4)
            if form == "full":
                path = "ddp/epoch=1.ckpt"
                results[f"{folder} of ddp"] = train(
                    spec, make_callback, factory, path, max_epochs=4
                )
            if rank == 0 and form == "full":
                _assert_same_file(f"{folder}/epoch=1.ckpt", "ddp/epoch=1.ckpt")
    return results


def _assert_same_file(ours, other):
    ours, other = (torch.load(path, weights_only=True) for path in (ours, other))
    for key in ("state_dict", "current_model_state"):
        assert (key in ours) == (key in other)
        for name, value in other.get(key, {}).items():
            assert list(ours[key]) == list(other[key])
            torch.testing.assert_close(ours[key][name], value, rtol=1e-6, atol=1e-6)
    assert ours.get("averaging_state") == other.get("averaging_state")
    for name, state in other["callbacks"].items():
        if "average_model_state" in state:
            average = ours["callbacks"][name]["average_model_state"]
            torch.testing.assert_close(average, state["average_model_state"], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("EMAWeightAveraging", marks=pytest.mark.shows("EMAWeightAveraging")),
        pytest.param(
            "StochasticWeightAveraging",
            marks=[pytest.mark.shows("StochasticWeightAveraging"), pytest.mark.slow],
        ),
    ],
)
def test_averaging_resumes_exactly_also_under_ddp_and_from_it(name):
    factory = partial(MLPModule, ranks=2)
    (results, _) = run_ranks(
        2, _resume, CALLBACKS[name], factory, STAGES, has_group=False, timeout_s=120
    )
    full = results.pop("ddp")
    for case, ours in results.items():
        is_resumed = case.count(" ")
        if case.endswith("again"):
            assert_equal(ours, results[case.removesuffix(" again")], 0, ("state", "average"))
        else:
            assert_equal(ours, full, 1e-6, ("state", "average") if is_resumed else ("val",))


def _resume_without_memory(rank, world_size):
    make = CALLBACKS["StochasticWeightAveraging"]
    train(settings(3), make, partial(MLPModule, ranks=1), folder="full", max_epochs=3)
    with pytest.raises(ValueError, match="averages of weights, which their callback cannot"):
        train(settings(3), make, lambda: MLPModule(ranks=1).to("meta"), "full/epoch=1.ckpt")


def test_averages_are_not_lost_in_parameters_that_have_no_memory_yet():
    run_ranks(1, _resume_without_memory, has_group=False)


class FindingRate(LearningRateFinder):
    """Searches a learning rate before the first epoch, and keeps the one that is set."""

    def on_fit_start(self, trainer, module):
        self.lr_find(trainer, module)


class RateModule(MLPModule):
    lr = 1e-3


def _find_rate(rank, world_size):
    """Averages after a search for the learning rate, which restores them."""
    for name in CALLBACKS:
        for stage in STAGES:
            outcomes = []
            for finders in ([], [FindingRate(num_training_steps=4, update_attr=False)]):
                pl.seed_everything(3, verbose=False)
                module, callback = RateModule(ranks=world_size), CALLBACKS[name]()
                make_trainer(settings(stage), callbacks=[callback, *finders], max_epochs=3).fit(
                    module
                )
                average = arrays(callback._average_model.state_dict())
                outcomes.append({"state": arrays(module.state_dict()), "average": average})
            assert_equal(*outcomes, 0, ("state", "average"))


@pytest.mark.slow
def test_a_search_for_the_learning_rate_leaves_averages_as_they_were():
    run_ranks(2, _find_rate, has_group=False, timeout_s=120)


# ---------------------------------------------------------------- memory


class Weigh(pl.Callback):
    """Bytes of the average, and of all live tensors, after some training."""

    def on_train_epoch_end(self, trainer, module):
        gc.collect()
        averages = [getattr(c, "_average_model", None) for c in trainer.callbacks]
        storages = {
            part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
            for average in averages
            if average is not None
            for parameter in average.parameters()
            for part in [getattr(parameter.data, "local", parameter.data)]
        }
        module.bytes = sum(storages.values())
        module.live_bytes = live_storage_bytes()
        module.reported = trainer.strategy.memory_report().average_bytes


class Wide(MLPModule):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 4096), torch.nn.Linear(4096, 3))


def _weigh(rank, world_size, stage, precision):
    """Bytes of the average and in all, elements, reported bytes."""
    live = []
    for make in ([], [CALLBACKS["EMAWeightAveraging"]]):
        module = Wide(ranks=world_size)
        callbacks = [*(one() for one in make), Weigh()]
        options = {"precision": precision, "limit_val_batches": 1}
        gc.collect()
        gc.freeze()  # earlier objects are not counted
        before = live_storage_bytes()
        make_trainer(settings(stage), callbacks=callbacks, **options).fit(module)
        live.append(module.live_bytes - before)
    numel = sum(p.numel() for p in module.parameters())
    return module.bytes, live[1] - live[0], numel, module.reported


@pytest.mark.shows("averages of weights at 4/N bytes per parameter")
@pytest.mark.default_cases("bf16-mixed-3")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_an_average_takes_four_bytes_of_every_parameter_over_all_ranks(precision, stage):
    for found in run_ranks(2, _weigh, stage, precision, has_group=False):
        own, added, numel, reported = found
        assert reported == own
        assert own == pytest.approx(4 * numel / 2, rel=0.01)  # padding
        assert added == pytest.approx(own, rel=0.02)


# ---------------------------------------------------------------- refused functions, and others


def _normed(average, current, number):
    return average + (current - average) / current.norm()


NOT_ELEMENTWISE = {
    "WeightAveraging": partial(WeightAveraging, avg_fn=_normed),
    "StochasticWeightAveraging": partial(StochasticWeightAveraging, swa_lrs=1e-2, avg_fn=_normed),
}


def _average_norms(rank, world_size, stage, name):
    train(settings(stage), NOT_ELEMENTWISE[name], partial(MLPModule, ranks=world_size))


@pytest.mark.default_cases("WeightAveraging-1")
@pytest.mark.refuses(
    "an averaging function that is not elementwise", because="each rank averages its shards"
)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_an_averaging_function_that_needs_full_tensors_is_refused(name, stage):
    with pytest.raises(RankError, match=r"averaging function .* is not elementwise") as raised:
        run_ranks(2, _average_norms, stage, name, has_group=False)
    assert str(raised.value).count("ValueError: the averaging function of") >= 2


@pytest.mark.slow
def test_stage_0_averages_with_any_function():
    run_ranks(2, _average_norms, 0, "StochasticWeightAveraging", has_group=False)


class Look(pl.Callback):
    """Reads the average from a callback."""

    def on_train_epoch_end(self, trainer, module):
        from lightning_zero import gathered

        average = trainer.callbacks[0]._average_model.module
        ones = torch.ones(1, 8, device=module.device)
        with pytest.raises(RuntimeError, match=r"net\.0\.\w+ of the averaged model is sharded"):
            average(ones)
        with gathered(average):
            self.full = average(ones).detach().cpu()
        assert average.net[0].weight.shape == (13, 8)


def _look(rank, world_size):
    callback, look = CALLBACKS["EMAWeightAveraging"](), Look()
    module = MLPModule(ranks=world_size)
    for stage in (0, 3):
        make_trainer(settings(stage), callbacks=[callback, look]).fit(module)
        assert torch.allclose(module(torch.ones(1, 8)), look.full)
    # Another run with the same callback, and one that only validates.
    trainer = make_trainer(settings(2), callbacks=[callback], limit_val_batches=1)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    assert not {"_swap_models", "on_load_checkpoint"} & vars(callback).keys()
    assert "state_dict" not in vars(callback._average_model)


@pytest.mark.slow
def test_an_average_has_full_values_only_while_unsharded():
    run_ranks(2, _look, has_group=False)


# ---------------------------------------------------------------- a user's own methods


def _trace(rank, world_size, name, method):
    """Whether a user's tracer of a callback's method has recorded all calls, and is restored."""
    pl.seed_everything(3, verbose=False)
    callback = CALLBACKS[name]()
    tracer = MagicMock(wraps=getattr(callback, method))
    setattr(callback, method, tracer)
    seen = []
    watch = pl.callbacks.LambdaCallback(
        on_train_end=lambda *_: seen.append(getattr(callback, method).call_count)
    )
    trainer = make_trainer(
        settings(3), callbacks=[callback, watch], max_epochs=3, limit_val_batches=1
    )
    trainer.fit(MLPModule(ranks=world_size, num_batches=2))
    assert getattr(callback, method) is tracer
    return tracer.call_count, seen


@pytest.mark.parametrize(
    ("name", "method"),
    [("StochasticWeightAveraging", "update_parameters"), ("WeightAveraging", "_swap_models")],
)
def test_a_method_that_a_user_has_put_on_a_callback_is_called_and_left_there(name, method):
    (count, seen) = run_ranks(1, _trace, name, method, has_group=False)[0]
    assert count >= 1
    assert seen == [count] or method == "_swap_models"
