"""torch.compile of the module, of submodules and of blocks, under every stage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_zero import Engine, Float8Precision, ZeroConfig, load_from_checkpoint, load_weights
from tests.support.fitting import make_trainer, settings
from tests.support.models import GPTModule, regression_data
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
FAST += [(settings(3, activation_checkpointing="selective"), in_place)]
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


def _count_breaks(rank, world_size, stage, precision):
    """Compiled graphs, compiled frames and graph breaks after each step of compiled blocks."""
    options = {"precision": precision}
    if precision == "float8":
        from torchao.float8 import Float8LinearConfig

        options = {"plugins": [Float8Precision(Float8LinearConfig(emulate=True))]}
    torch._dynamo.reset()
    counters.clear()
    module = GPTModule(ranks=2, num_batches=NUM_BATCHES)
    for block in module.gpt.blocks:
        block.compile(backend="aot_eager")
    counts = []

    def count(*_):
        graphs, frames = counters["stats"]["unique_graphs"], counters["frames"]["total"]
        counts.append((graphs, frames, sum(counters["graph_break"].values())))

    end = LambdaCallback(on_train_batch_end=count)
    make_trainer(settings(stage), callbacks=[end], **options).fit(module)
    return counts


@pytest.mark.default_cases("3-32-true")
@pytest.mark.shows("compiled blocks: no graph break, no compilation after the first step")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "float8"])
@pytest.mark.parametrize("stage", range(4))
def test_a_compiled_block_is_one_graph_that_no_later_step_compiles_again(stage, precision):
    if precision == "float8":
        pytest.importorskip("torchao", reason="needs torchao")
    for counts in run_ranks(2, _count_breaks, stage, precision, has_group=False):
        graphs, _, num_breaks = counts[0]
        assert (graphs, num_breaks) == (1, 0)  # equal blocks share their graph
        assert counts == [counts[0]] * NUM_BATCHES


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


@pytest.mark.default_cases("3")
@pytest.mark.filterwarnings("ignore:.*is used outside its module's forward")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_compiled_module_may_use_parameters_anywhere(stage):
    expected, _ = _losses(stage, lambda module: module)
    losses, counts = _losses(stage, lambda module: torch.compile(module, backend="aot_eager"))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert 0 < counts[1] == counts[-1]


class Reading(Outside):
    """Adds the norm of its last gradient, which it reads in the forward."""

    def forward(self, x):
        loss = super().forward(x)
        grad = self.blocks[2].weight.grad
        return loss if grad is None else loss + grad.norm()


LENGTHS = [4, 4, 3, 5, 6, 4]  # the second one marks the batch as dynamic


def _losses_of_lengths(module, backend, accumulates=False, **settings):
    """Like a Trainer, zeroes gradients between forward and backward. Reads them after the step."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    module = module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    config = ZeroConfig(reduce_bucket_size=50, **settings)
    if backend is not None:
        module = torch.compile(module, backend=backend)
    engine = Engine(module, optimizers=[optimizer], config=config)
    if accumulates:  # a user may reset torch.compile at any time
        torch._dynamo.reset()
    losses, grads, counts = [], [], []
    for number, length in enumerate(LENGTHS):
        x = torch.linspace(-1, 1, length * 8, dtype=settings.get("param_dtype"))
        loss = module(x.view(length, 8))
        grads.append([p.grad is not None for p in module.parameters()])
        if not accumulates or number % 3 == 0:
            engine.zero_grad()
        engine.backward(loss)
        if not accumulates or number % 3 == 2:
            engine.step()
        losses.append(float(loss.detach()))
        counts.append(counters["stats"]["unique_graphs"])
    engine.close()
    return losses, grads, counts


def _assert_compiled_as_plain(module, backend="eager", **settings):
    *expected, _ = _losses_of_lengths(module, None, **settings)
    *found, counts = _losses_of_lengths(module, backend, **settings)
    assert found[0] == pytest.approx(expected[0], rel=1e-5), settings
    assert found[1] == expected[1], settings
    return counts


@pytest.mark.default_cases("1")
@pytest.mark.filterwarnings("ignore:.*is used outside its module's forward")
@pytest.mark.parametrize("stage", [1, 3])
def test_another_batch_length_compiles_again_while_parameters_have_gradients(stage):
    counts = _assert_compiled_as_plain(Outside, stage=stage)
    assert 0 < counts[0] == counts[1] < counts[2] <= counts[3] == counts[-1], counts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is used outside its module's forward")
@pytest.mark.parametrize("stage", [0, 2])
def test_a_compiled_forward_that_reads_a_gradient_sees_it(stage):
    _assert_compiled_as_plain(Reading, stage=stage)


NARROW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
KINDS = [
    ("eager", {}),
    ("inductor", {}),
    ("aot_eager", {"accumulates": True}),
    ("aot_eager", {"offload_optimizer": "cpu"}),
    ("aot_eager", {"offload_optimizer": "cpu", "overlap_step": True}),
    ("aot_eager", {"offload_optimizer": {"device": "nvme", "nvme_path": "nvme"}}),
    ("eager", NARROW),
]


def _compile_kinds(rank, world_size, kinds):
    counts = []
    Path("nvme").mkdir(exist_ok=True)
    for backend, kind in kinds:
        for stage in range("offload_optimizer" in kind, 4):
            found = _assert_compiled_as_plain(Outside, backend, stage=stage, **kind)
            counts.append((stage, kind, found))
    return counts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is used outside its module's forward")
def test_another_batch_length_compiles_once_in_every_stage_and_tier():
    for found in run_ranks(2, _compile_kinds, KINDS, timeout_s=600):
        for stage, kind, counts in found:
            case = stage, kind, counts
            assert 0 < counts[0] == counts[1] < counts[2] <= counts[3] == counts[-1], case


class Layers(nn.Sequential):
    """torch compiles no forward of its own classes in place."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


class Uneven(LightningModule):
    """The last batch of an epoch and the batches of a validation are shorter than the others."""

    def __init__(self):
        super().__init__()
        self.net = Layers(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3))
        self.has_grads = []  # in each forward

    def training_step(self, batch, batch_idx):
        loss = self.validation_step(batch, batch_idx)
        self.has_grads.append(self.net[0].weight.grad is not None)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return functional.mse_loss(self.net(x), y)

    def train_dataloader(self):
        return DataLoader(regression_data(22), batch_size=4)

    def val_dataloader(self):
        return DataLoader(regression_data(4), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _fit_uneven(rank, world_size, specs, options):
    outcomes = []
    for spec, is_compiled in specs:
        torch._dynamo.reset()
        counters.clear()
        seed_everything(7, verbose=False)
        module = Uneven()
        if is_compiled:
            module.net.compile(backend="aot_eager")
        witness = Witness()
        trainer = make_trainer(
            spec, callbacks=[witness], max_epochs=2, limit_val_batches=2, **options
        )
        trainer.fit(module)
        outcomes.append((witness.losses, module.has_grads, witness.counts))
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"val_check_interval": 1}])
def test_a_trainer_compiles_for_another_length_once_and_for_evaluation_once(options):
    specs = [("ddp", False), *((settings(stage), True) for stage in range(4))]
    for outcomes in run_ranks(2, _fit_uneven, specs, options, has_group=False, timeout_s=240):
        (expected, has_grads, _), *found = outcomes
        for stage, (losses, had_grads, counts) in enumerate(found):
            np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=f"stage {stage}")
            assert had_grads == has_grads, f"stage {stage}"
            num_graphs = 1 if stage < 3 else 2  # a graph ends where a unit begins
            assert (counts[0], counts[-1]) == (num_graphs, 3 * num_graphs), (
                f"stage {stage}: {counts}"
            )


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
        loaded = load_from_checkpoint(QuietGPT, path)
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
