"""torch.compile of the module, of submodules and of blocks, under every stage."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from lightning_zero import Engine, ZeroConfig, load_weights
from tests.support.fitting import make_trainer, settings
from tests.support.models import GPTModule
from tests.support.ranks import run_ranks

NUM_BATCHES = 4


def module_itself(module, backend):
    """The LightningModule itself."""
    return torch.compile(module, backend=backend)


def submodule(module, backend):
    """What the LightningModule wraps."""
    module.gpt = torch.compile(module.gpt, backend=backend)
    return module


def blocks(module, backend):
    """Each block, by a module around it."""
    for index, block in enumerate(module.gpt.blocks):
        module.gpt.blocks[index] = torch.compile(block, backend=backend)
    return module


def in_place(module, backend):
    """Each block, and two methods."""
    for block in module.gpt.blocks:
        block.compile(backend=backend)
    module.gpt.norm.forward = torch.compile(module.gpt.norm.forward, backend=backend)
    return module


def plain(module, backend):
    """Nothing."""
    return module


class QuietGPT(GPTModule):
    """Logs nothing: no strategy compiles a step with `self.log` in it."""

    def training_step(self, batch, batch_idx):
        return self.part_loss(batch, self.global_rank)

    def validation_step(self, batch, batch_idx):
        return self.part_loss(batch, self.global_rank)

    test_step = validation_step


class Witness(Callback):
    """Losses, and the number of compiled graphs after each of them."""

    def __init__(self):
        self.losses, self.counts, self.evaluated = [], [], []

    def on_train_batch_end(self, trainer, module, outputs, *args):
        self.losses.append(float(outputs["loss"]))
        self.counts.append(counters["stats"]["unique_graphs"])

    def on_validation_batch_end(self, trainer, module, outputs, *args):
        self.evaluated.append(float(outputs))

    on_test_batch_end = on_validation_batch_end


def _fit(spec, compiled, backend, ckpt_path=None, max_epochs=1, save=None):
    torch._dynamo.reset()
    counters.clear()
    seed_everything(7, verbose=False)
    module = compiled(QuietGPT(ranks=2, num_batches=NUM_BATCHES), backend)
    witness = Witness()
    limits = {"max_epochs": max_epochs, "limit_val_batches": 1, "limit_test_batches": 1}
    trainer = make_trainer(spec, callbacks=[witness], **limits)
    trainer.fit(module, ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    witness.evaluated.clear()
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    validated, tested = witness.evaluated
    assert validated == pytest.approx(tested, rel=1e-6)
    return witness.losses, witness.counts, validated


def _compare(rank, world_size, cases, backend):
    return [_fit(spec, compiled, backend) for spec, compiled in cases]


def _assert_equal(outcomes, cases):
    (expected, _, expected_metric), *rest = outcomes
    assert len(expected) == NUM_BATCHES
    for (spec, compiled), (losses, counts, metric) in zip(cases[1:], rest, strict=True):
        case = f"{compiled.__name__} under {spec}"
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=case)
        assert metric == pytest.approx(expected_metric, rel=1e-5), case
        if compiled is not plain:
            assert counts[1] > 0, f"nothing was compiled: {case}"
            assert counts[1] == counts[-1], f"{counts} graphs: {case}"


SMALL = settings(1, reduce_bucket_size=4000)  # several buckets, gathered during the next forward
FAST = [
    (SMALL, module_itself),
    (settings(3), module_itself),
    (settings(3), submodule),
    (settings(2), in_place),
]
FAST += [(settings(3), in_place)]
ALL = [
    (spec, compiled)
    for compiled in (module_itself, submodule, blocks, in_place)
    for spec in (SMALL, settings(2), settings(3))
]


@pytest.mark.slow
@pytest.mark.shows("`torch.compile` of the module, of submodules, of blocks")
def test_compiled_modules_train_as_plain_ones_do_and_are_compiled_once():
    cases = [("ddp", plain), *FAST]
    for outcomes in run_ranks(2, _compare, cases, "aot_eager", has_group=False, timeout_s=240):
        _assert_equal(outcomes, cases)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "backend", "cases"), [(1, "aot_eager", ALL), (2, "inductor", FAST)]
)
def test_every_way_of_compiling_trains_as_plain_modules_do(world_size, backend, cases):
    cases = [("ddp", plain), (settings(3), plain), *cases]
    found = run_ranks(world_size, _compare, cases, backend, has_group=False, timeout_s=1200)
    for outcomes in found:
        _assert_equal(outcomes, cases)


class Outside(nn.Module):
    """Uses parameters where their module's forward does not run."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 9) * 0.1)
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))

    def forward(self, x):
        x = functional.linear((x @ self.weight).tanh(), self.blocks[0].weight)
        return self.blocks[2](x + self.blocks[1].bias).square().mean()


def _losses(stage, compile_):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    module = compile_(Outside())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    config = ZeroConfig(stage=stage, reduce_bucket_size=50)
    engine = Engine(module, optimizers=[optimizer], config=config)
    losses, counts = [], []
    for _ in range(4):
        loss = module(torch.ones(4, 8))
        engine.backward(loss)
        engine.step()
        engine.zero_grad()
        losses.append(float(loss.detach()))
        counts.append(counters["stats"]["unique_graphs"])
    engine.close()
    return losses, counts


@pytest.mark.filterwarnings("ignore:.*is used outside its module's forward")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_compiled_module_may_use_parameters_anywhere(stage):
    expected, _ = _losses(stage, lambda module: module)
    losses, counts = _losses(stage, lambda module: torch.compile(module, backend="aot_eager"))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert 0 < counts[1] == counts[-1]


def _save_and_load(rank, world_size):
    found = {}
    for form, spec in (("full", settings(3)), ("sharded", settings(3, checkpoint="sharded"))):
        _fit(spec, submodule, "eager", save=form)
        for compiled in (submodule, plain):
            found[form, compiled.__name__] = _fit(settings(2), compiled, "eager", form, 2)
    _fit("ddp", submodule, "eager", save="ddp")
    found["ddp", "submodule"] = _fit(settings(3), submodule, "eager", "ddp", 2)
    found["ddp", "plain"] = _fit(settings(3), plain, "eager", "ddp", 2)
    saved = torch.load("full", weights_only=True)["state_dict"]
    for path in ("full", "sharded"):
        loaded = QuietGPT.load_from_checkpoint(path)
        compiled = submodule(QuietGPT(), "eager")
        load_weights(compiled, path)
        for module in (loaded, compiled):
            for name, value in module.state_dict().items():
                assert torch.equal(value, saved[name.replace("_orig_mod.", "")]), (path, name)
    return found, list(saved)


@pytest.mark.slow
def test_checkpoints_are_exchanged_between_compiled_and_plain_modules():
    names = list(QuietGPT().state_dict())
    for found, keys in run_ranks(2, _save_and_load, has_group=False, timeout_s=240):
        assert keys == names
        expected = found["full", "plain"]
        assert len(expected[0]) == NUM_BATCHES
        for case, (losses, _, metric) in found.items():
            np.testing.assert_allclose(losses, expected[0], rtol=1e-5, err_msg=str(case))
            assert metric == pytest.approx(expected[2], rel=1e-5), case
