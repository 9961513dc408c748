"""One script with Fabric: DDP and every stage by the name of the strategy alone."""

from __future__ import annotations

import contextlib
import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch import Trainer
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import lightning_zero
from lightning_zero.fabric import ZeroStrategy
from lightning_zero.health.failures import DesynchronizedError
from tests.support.cells import slow_but
from tests.support.fitting import arrays, run_once
from tests.support.loops import assert_same_state, batch, build, engine_for
from tests.support.ranks import RankError
from tests.support.warm import run_ranks

NAMES = ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]


def launch(strategy, world_size, **options):
    import lightning_zero  # noqa: F401  # registers the names

    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, **options)
    fabric.launch()
    return fabric


def state_of(model):
    """Full tensors, in every strategy."""
    state = {name: torch.Tensor(value).clone() for name, value in model.state_dict().items()}
    return arrays(state)


def _train(
    rank, world_size, strategy, precision="32-true", accumulation=2, clip=0.05, backend=None
):
    fabric = launch(strategy, world_size, precision=precision)
    module, optimizer = build()
    if backend is not None:
        module = torch.compile(module, backend=backend)
    model, optimizer = fabric.setup(module, optimizer)
    losses, norms = [], []
    for step in range(3 * accumulation):
        is_last = (step + 1) % accumulation == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = model(batch(rank, step))
            fabric.backward(loss / accumulation)
        losses.append(loss.item())
        if is_last:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=clip)))
            optimizer.step()
            optimizer.zero_grad()
    mean = fabric.all_reduce(torch.tensor(float(rank)), reduce_op="mean")
    assert float(mean) == (world_size - 1) / 2
    gathered = fabric.all_gather(torch.tensor([float(rank)]))
    assert gathered.flatten().tolist() == list(map(float, range(world_size)))
    assert fabric.broadcast(rank) == 0
    fabric.barrier()
    return losses, norms, arrays(model.state_dict())


def _train_engine(rank, world_size, stage, accumulation=2, clip=0.05):
    module, optimizer = build()
    engine = engine_for(module, [optimizer], stage)
    losses, norms = [], []
    for step in range(3 * accumulation):
        is_last = (step + 1) % accumulation == 0
        with contextlib.nullcontext() if is_last else engine.no_sync():
            loss = module(batch(rank, step))
            engine.backward(loss / accumulation)
        losses.append(loss.item())
        if is_last:
            norms.append(float(engine.clip_grad_norm_(clip)))
            engine.step()
            engine.zero_grad()
    return losses, norms, arrays(module.state_dict())


def _train_all(rank, world_size, strategy):
    """The trainings that are compared with DDP, one after the other on the same ranks."""
    trainings = (_train, _gan, _frozen_gan, _distill)
    return {training: training(rank, world_size, strategy) for training in trainings}


def outcomes(strategy, training):
    """Outcomes of a training on two ranks."""
    return [of_rank[training] for of_rank in run_once(2, _train_all, strategy)]


@pytest.mark.default_cases("zero3")
@pytest.mark.shows("Fabric")
@pytest.mark.parametrize("name", slow_but({"zero1", "zero3", "zero3_offload"}, NAMES))
def test_the_name_of_the_strategy_alone_gives_the_losses_of_ddp(name):
    expected, ours = outcomes("ddp", _train), outcomes(name, _train)
    for (losses, norms, state), (ddp_losses, ddp_norms, ddp_state) in zip(
        ours, expected, strict=True
    ):
        np.testing.assert_allclose(losses, ddp_losses, rtol=1e-6)
        np.testing.assert_allclose(norms, ddp_norms, rtol=2e-6)
        assert_same_state(state, ddp_state)


def _train_compiled(rank, world_size, stage):
    outcome = _train(rank, world_size, f"zero{stage}", backend="aot_eager")
    assert counters["stats"]["unique_graphs"] > 0
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_compiled_module_trains_as_the_plain_one(stage):
    expected = outcomes(f"zero{stage}", _train)
    ours = run_ranks(2, _train_compiled, stage, has_group=False)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
        assert_same_state(one[2], other[2])


@pytest.mark.parametrize("stage", slow_but({3}, (1, 2, 3)))
def test_fabric_is_bit_equal_to_an_engine(stage):
    expected = run_ranks(2, _train_engine, stage)
    ours = outcomes(f"zero{stage}", _train)
    for one, other in zip(ours, expected, strict=True):
        assert one[:2] == other[:2]
        for name, value in one[2].items():
            np.testing.assert_array_equal(value, other[2][name], err_msg=name)


@pytest.mark.default_cases("16-mixed")
@pytest.mark.parametrize(
    "precision", slow_but({"bf16-mixed", "16-mixed"}, ["bf16-mixed", "16-mixed", "bf16-true"])
)
def test_precisions_train_about_as_with_ddp(precision):
    expected = run_ranks(2, _train, "ddp", precision, has_group=False)
    ours = run_ranks(2, _train, "zero3", precision, has_group=False)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one[0], other[0], rtol=3e-2)
        assert {v.dtype for v in one[2].values()} == {v.dtype for v in other[2].values()}


# -------------------------------------------------------------------------------- several modules


class Generator(nn.Sequential):
    def __init__(self):
        # A bias before BatchNorm would have gradients that are zero but for rounding.
        first = nn.Linear(4, 16, bias=False)
        super().__init__(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))


class Discriminator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def _gan(rank, world_size, strategy):
    """The loop of Lightning's example of a DCGAN, with a gradient penalty."""
    fabric = launch(strategy, world_size)
    torch.manual_seed(0)
    generator, discriminator = Generator(), Discriminator()
    adam = {"lr": 1e-2, "eps": 1e-5, "betas": (0.5, 0.999)}
    optimizer_d = torch.optim.Adam(discriminator.parameters(), **adam)
    optimizer_g = torch.optim.Adam(generator.parameters(), **adam)
    discriminator, optimizer_d = fabric.setup(discriminator, optimizer_d)
    generator, optimizer_g = fabric.setup(generator, optimizer_g)
    random = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(4):
        real = torch.randn(6, 8, generator=random)
        discriminator.zero_grad()
        output = discriminator(real.requires_grad_())
        (gradient,) = torch.autograd.grad(output.sum(), real, create_graph=True)
        loss_real = F.binary_cross_entropy_with_logits(output, torch.ones(6, 1))
        fabric.backward(loss_real + gradient.square().mean())
        fake = generator(torch.randn(6, 4, generator=random))
        output = discriminator(fake.detach())
        loss_fake = F.binary_cross_entropy_with_logits(output, torch.zeros(6, 1))
        fabric.backward(loss_fake)
        optimizer_d.step()
        generator.zero_grad()
        loss = F.binary_cross_entropy_with_logits(discriminator(fake), torch.ones(6, 1))
        fabric.backward(loss)
        optimizer_g.step()
        losses += [loss_real.item(), loss_fake.item(), loss.item()]
    return losses, arrays(generator.state_dict()), arrays(discriminator.state_dict())


@pytest.mark.default_cases("zero3")
@pytest.mark.shows("Fabric: several modules, as in a GAN")
@pytest.mark.parametrize("name", slow_but({"zero1", "zero3"}, NAMES))
def test_a_gan_with_two_setups_equals_ddp(name):
    for one, other in zip(outcomes(name, _gan), outcomes("ddp", _gan), strict=True):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
        assert_same_state(one[1], other[1])
        assert_same_state(one[2], other[2])


def _frozen_gan(rank, world_size, strategy):
    """The discriminator is frozen in the step of the generator."""
    fabric = launch(strategy, world_size)
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 8), Discriminator()
    optimizer_d = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    optimizer_g = torch.optim.SGD(generator.parameters(), lr=0.1)
    discriminator, optimizer_d = fabric.setup(discriminator, optimizer_d)
    generator, optimizer_g = fabric.setup(generator, optimizer_g)
    random = torch.Generator().manual_seed(rank)
    for _ in range(3):
        fake = generator(torch.randn(6, 4, generator=random))
        discriminator.requires_grad_(False)
        fabric.backward(-discriminator(fake).mean())
        optimizer_g.step()
        optimizer_g.zero_grad()
        if strategy == "zero3":
            coordinator = fabric.strategy.engine_of(discriminator).coordinator
            assert coordinator.training_state.name == "IDLE"
            assert not any(unit.buckets and unit.is_unsharded for unit in coordinator.units)
        discriminator.requires_grad_(True)
        fabric.backward(discriminator(fake.detach()).square().mean())
        optimizer_d.step()
        optimizer_d.zero_grad()
    return arrays(generator.state_dict()), arrays(discriminator.state_dict())


def test_a_discriminator_that_is_frozen_for_a_step_stays_sharded():
    both = outcomes("zero3", _frozen_gan), outcomes("ddp", _frozen_gan)
    for one, other in zip(*both, strict=True):
        assert_same_state(one[0], other[0])
        assert_same_state(one[1], other[1])


class Scorer(nn.Linear):
    """Takes its input in a UserDict, as a tokenizer returns it."""

    def forward(self, inputs):
        return super().forward(inputs["x"])


def _hidden_input(rank, world_size):
    fabric = launch("zero3", world_size)
    scorer = fabric.setup_module(Scorer(4, 2).requires_grad_(False))
    model = nn.Linear(3, 4)
    model, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = scorer(UserDict(x=model(torch.ones(2, 3)))).sum()
    assert loss.requires_grad
    fabric.backward(loss)


def test_an_input_inside_another_object_has_a_gradient():
    run_ranks(2, _hidden_input, has_group=False)


def _distill(rank, world_size, strategy):
    """A frozen teacher by `setup_module`, and a student whose optimizer is set up later."""
    fabric = launch(strategy, world_size)
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)).requires_grad_(False)
    student = nn.Linear(8, 3)
    teacher = fabric.setup_module(teacher) if strategy != "ddp" else teacher
    student = fabric.setup_module(student)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(student.parameters(), lr=1e-2, eps=1e-5))
    random = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(4):
        x = torch.randn(6, 8, generator=random)
        loss = F.mse_loss(student(x), teacher(x))
        fabric.backward(loss)
        fabric.clip_gradients(student, optimizer, clip_val=0.02)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, arrays(student.state_dict())


@pytest.mark.default_cases("zero3")
@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_a_teacher_and_a_student_equal_ddp(name):
    for one, other in zip(outcomes(name, _distill), outcomes("ddp", _distill), strict=True):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-6)
        assert_same_state(one[1], other[1])


# -------------------------------------------------------------------------------------- the rest


def _clip_infinite(rank, world_size, strategy):
    fabric = launch(strategy, world_size)
    module, optimizer = build()
    model, optimizer = fabric.setup(module, optimizer)
    fabric.backward(model(batch(rank, 0)) * float("inf"))
    engine = fabric.strategy.engine_of(model)
    grads = [bucket.grads.main.tensor.clone() for bucket in engine.buckets]
    with pytest.raises(RuntimeError, match="were not clipped"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    for bucket, before in zip(engine.buckets, grads, strict=True):
        assert torch.equal(bucket.grads.main.tensor.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.default_cases("zero3")
@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_gradients_do_not_change_if_their_norm_is_not_finite(name):
    run_ranks(2, _clip_infinite, name, has_group=False)


def _skip_with_scaler(rank, world_size):
    fabric = launch(
        ZeroStrategy(stage=2, on_nonfinite="stop"),
        world_size,
        plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**60)),
    )
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    steps = []
    for _ in range(2):
        loss = model(torch.ones(2, 4)).float().square().sum() * 1e30
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fabric.backward(loss)
        steps.append(fabric.strategy.engines[0].guard.last_report.step)
        optimizer.step()
        optimizer.zero_grad()
    assert steps == [0, 1]


def test_a_loss_scaler_decides_and_its_steps_are_reported():
    run_ranks(2, _skip_with_scaler, has_group=False)


def _methods(rank, world_size):
    fabric = launch("zero3", world_size)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            raise AssertionError("not called")

        def encode(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    with fabric.init_module(empty_init=True):
        module = Two()
    assert module.layers[0].weight.is_meta
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="mark_forward_method"):
        model.encode(torch.ones(2, 8))
    model.mark_forward_method("encode")
    loss = model.encode(torch.ones(2, 8)).sum()
    with pytest.raises(RuntimeError, match=r"fabric.backward\(loss\)"):
        loss.backward()
    fabric.backward(model.encode(torch.ones(2, 8)).sum())
    optimizer.step()


def test_marked_methods_run_as_forwards_and_empty_modules_are_materialized():
    run_ranks(2, _methods, has_group=False)


def _wrong(rank, world_size):
    from lightning_zero.fabric import ZeroStrategy

    text = r"^ZeroStrategy with Fabric has no option offload_params; did you mean offload_param\?$"
    with pytest.raises(TypeError, match=text):
        ZeroStrategy(3, offload_params="cpu")
    with pytest.raises(
        TypeError, match=r"^unshard_after_fit is no option with Fabric: it needs the Trainer\.$"
    ):
        ZeroStrategy(unshard_after_fit=True)
    with pytest.raises(ValueError, match=r'stage must be 0, 1, 2 or 3 .* "auto" needs the Trainer'):
        ZeroStrategy("auto")
    with pytest.raises(ValueError, match="offload_param needs stage 3"):
        ZeroStrategy(2, offload_param="cpu")
    with pytest.raises(ValueError, match="checkpoint must be one of"):
        ZeroStrategy(checkpoint="some")
    fabric = launch(ZeroStrategy(2, sharding_group_size=1, prefetch_bucket_size=None), world_size)
    module, optimizer = build()
    with pytest.raises(ValueError, match="holds no parameter of a module that was set up"):
        fabric.setup_optimizers(optimizer)
    with pytest.raises(ValueError, match="was not set up"):
        fabric.strategy.engine_of(module)
    pair = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for one in pair:
        fabric.setup_module(one)
    with pytest.raises(ValueError, match="SGD holds parameters of 2 modules"):
        fabric.setup_optimizers(torch.optim.SGD(nn.ModuleList(pair).parameters()))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(pair[0].parameters()))
    with pytest.raises(ValueError, match="has no param_groups"):
        optimizer.load_state_dict({})


def test_wrong_arguments_are_refused():
    run_ranks(2, _wrong, has_group=False)


def test_a_strategy_of_the_other_class_is_refused_with_the_name_of_the_right_one():
    with pytest.raises(ValueError, match=r"Fabric needs lightning_zero\.fabric\.ZeroStrategy"):
        Fabric(accelerator="cpu", devices=1, strategy=lightning_zero.ZeroStrategy(2))
    with pytest.raises(ValueError, match=r"the Trainer needs lightning_zero\.ZeroStrategy"):
        Trainer(accelerator="cpu", devices=1, strategy=ZeroStrategy(2))


def _other_settings(rank, world_size):
    from lightning_zero.fabric import ZeroStrategy

    launch(ZeroStrategy(3, prefetch_bucket_size=100 + rank), world_size)


def test_ranks_with_other_settings_are_refused():
    with pytest.raises(RankError, match="prefetch_bucket_size"):
        run_ranks(2, _other_settings, has_group=False)


def _set_up_alone(rank, world_size, name):
    """Rank 0 sets up another object, while rank 1 trains."""
    fabric = launch("zero3", world_size)
    module = nn.Linear(4, 2)
    model = fabric.setup_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    calls = {
        "set-up of a module": lambda: fabric.setup_module(nn.Linear(4, 2)),
        "attachment of an optimizer": lambda: fabric.setup_optimizers(optimizer),
    }
    call = (lambda: fabric.backward(model(torch.ones(1, 4)).sum())) if rank else calls[name]
    with pytest.raises(DesynchronizedError, match=f"rank 0 reached the {name}"):
        call()


@pytest.mark.parametrize("name", ["set-up of a module", "attachment of an optimizer"])
def test_a_set_up_on_some_ranks_is_an_error_on_all(name):
    run_ranks(2, _set_up_alone, name, has_group=False, timeout_s=20)


def _too_few_devices(rank, world_size):
    launch("zero2", 1)


def test_a_number_of_devices_other_than_that_of_ranks_is_refused():
    with pytest.raises(RankError, match="does not match the world size"):
        run_ranks(2, _too_few_devices, has_group=False)
