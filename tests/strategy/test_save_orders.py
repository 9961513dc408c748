"""A save after fit, validate, test and predict in any order writes what DDP writes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from lightning_zero import open_checkpoint
from tests.support.fitting import arrays, make_trainer, run_once, settings
from tests.support.models import MLPModule
from tests.support.warm import run_ranks

RUNS = ("validate", "test", "predict")
# Each run follows a save of the one before it; the second fit begins anew, as under DDP.
BY_DEFAULT = ("validate", "fit", "test", "validate", "predict", "test")
OTHERS = [("fit", *order) for order in itertools.permutations(RUNS)]
OURS = {"lightning_zero", "lightning_zero_masters", "lightning_zero_rank_states"}
OFFLOADED = settings(3, offload_optimizer="cpu", offload_param="cpu")


class SavesInside(Callback):
    """Has a state, and saves while the engine of a test runs."""

    def on_test_end(self, trainer, pl_module):
        trainer.save_checkpoint("inside-test.ckpt")

    def state_dict(self):
        return {"number": 1.5}


def _fit_more(path, spec, world_size):
    seed_everything(8, verbose=False)
    module = MLPModule(ranks=world_size, scheduler="per step")
    trainer = make_trainer(spec, max_epochs=4)
    trainer.fit(module, ckpt_path=path)
    return module.losses, arrays(module.state_dict())


def _run_in_order(rank, world_size, spec, order, resumed):
    """Saves after each run; returns the checkpoints, and what the `resumed` ones resume to."""
    seed_everything(7, verbose=False)
    module = MLPModule(ranks=world_size, scheduler="per step")
    options = {"limit_val_batches": 1.0, "max_epochs": 2, "callbacks": [SavesInside()]}
    trainer = make_trainer(spec, **options)
    saved = {}
    for number, run in enumerate(order):
        options = {} if run in ("fit", "predict") else {"verbose": False}
        getattr(trainer, run)(module, **options)
        trainer.save_checkpoint(f"{number}-{run}.ckpt")
        saved[number] = f"{number}-{run}.ckpt"
    if "test" in order:
        saved["inside"] = "inside-test.ckpt"
    is_full = spec == "ddp" or spec.get("checkpoint") == "full"
    found = [torch.load(path, weights_only=True) for path in saved.values() if is_full]
    return found, [_fit_more(saved[key], spec, world_size) for key in resumed]


def _leaves(value, path=""):
    """Every number, text and tensor of a checkpoint, by where it is."""
    if isinstance(value, dict):
        found = {}
        for key, one in value.items():
            found |= _leaves(one, f"{path}/{key}")
        return found or {path: "empty"}
    if isinstance(value, (list, tuple)):
        return _leaves(dict(enumerate(value)), path)
    return {path: value}


def _assert_as_ddp(ours, reference):
    for (mine, resumed), (theirs, expected) in zip(ours, reference, strict=True):
        for one, other in zip(mine, theirs if mine else [], strict=True):
            one, other = ({k: v for k, v in c.items() if k not in OURS} for c in (one, other))
            one, other = _leaves(one), _leaves(other)
            assert one.keys() == other.keys()
            for path, value in other.items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(one[path], value, rtol=1e-6, atol=1e-6, msg=path)
                elif isinstance(value, float):
                    assert one[path] == pytest.approx(value, rel=1e-6), path
                else:
                    assert one[path] == value, path
        for one, other in zip(resumed, expected, strict=True):
            np.testing.assert_allclose(one[0], other[0], rtol=1e-6, atol=1e-6)
            for name, value in other[1].items():
                np.testing.assert_allclose(one[1][name], value, rtol=1e-6, atol=1e-6, err_msg=name)


SPECS = {
    "stage 1": settings(1, checkpoint="full"),
    "stage 2": settings(2, checkpoint="full"),
    "stage 3": settings(3, checkpoint="full"),
    "offloaded": OFFLOADED | {"checkpoint": "full"},
    "stage 1, sharded": settings(1, checkpoint="sharded"),
    "stage 3, sharded": settings(3, checkpoint="sharded", async_save=True),
}


@pytest.mark.default_cases("stage 3, sharded")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_save_after_each_run_has_the_optimizer_states_and_resumes_as_under_ddp(spec):
    resumed = [len(BY_DEFAULT) - 1, "inside"]
    ours = run_ranks(2, _run_in_order, spec, BY_DEFAULT, resumed, has_group=False)
    _assert_as_ddp(ours, run_once(2, _run_in_order, "ddp", BY_DEFAULT, resumed))


@pytest.mark.slow
@pytest.mark.parametrize("order", OTHERS, ids=" ".join)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_order_of_runs_is_saved_as_under_ddp(spec, order):
    resumed = list(range(len(order)))
    ours = run_ranks(2, _run_in_order, spec, order, resumed, has_group=False)
    _assert_as_ddp(ours, run_once(2, _run_in_order, "ddp", order, resumed))


# ---------------------------------------------------------------- 16-bit modules


def _masters_saved(rank, world_size, kind):
    """Main parameters in saves after a fit, a test of the same values, and two other changes."""
    seed_everything(7, verbose=False)
    module = MLPModule(ranks=world_size)
    trainer = make_trainer(settings(3, checkpoint=kind), precision="bf16-true")

    def masters(path):
        trainer.save_checkpoint(path)
        found = open_checkpoint(path).get("lightning_zero_masters", {})
        return {name: master.clone() for name, master in found.items()}

    trainer.fit(module)
    after_fit = masters("fit.ckpt")
    trainer.test(module, verbose=False)
    after_test = masters("test.ckpt")
    with torch.no_grad():
        module.net[0].weight.zero_()
    after_write = masters("write.ckpt")
    trainer.test(module, verbose=False)
    after_second_test = masters("second.ckpt")
    trainer.test(module, ckpt_path="fit.ckpt", verbose=False)
    return [after_fit, after_test, after_write, after_second_test, masters("loaded.ckpt")]


@pytest.mark.parametrize("kind", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_main_parameters_are_saved_after_other_runs_where_the_module_still_has_them(kind):
    fit, test, write, second, loaded = run_ranks(2, _masters_saved, kind, has_group=False)[0]
    weight = "net.0.weight"
    assert any(not torch.equal(m, m.bfloat16().float()) for m in fit.values())
    for other in (test, loaded):
        assert fit.keys() == other.keys()
        assert all(torch.equal(fit[name], other[name]) for name in fit)
    assert weight not in write
    assert not second[weight].any()
    for name in write:
        assert torch.equal(fit[name], write[name])
        assert torch.equal(fit[name], second[name])
