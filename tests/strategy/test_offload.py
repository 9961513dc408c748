"""A Trainer gets the same bits from offloaded states as from states on the device."""

from __future__ import annotations

import os
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

from lightning_zero import full_grad, gathered
from lightning_zero.tiers.storage import Storage
from tests.support.cells import slow_but
from tests.support.fitting import DEVICE, fit, make_trainer, settings
from tests.support.models import FrozenModule, GANModule, GPTModule, MLPModule, UnusedModule
from tests.support.ranks import RankError, run_ranks

SMALL = {"buffer_count": 3, "buffer_size": 2**16}
NVME = {"device": "nvme", "nvme_path": "swap", **SMALL}
ALL_NVME = {"offload_optimizer": {**NVME, "max_in_cpu_bytes": 0}, "offload_param": NVME}
AUTO = {
    "device": "auto",
    "nvme_path": "swap",
    "max_in_device_bytes": 40_000,
    "max_in_cpu_bytes": 60_000,
    **SMALL,
}
# The CPU steps as a GPU does up to the last digits.
TOLERANCES = {"rtol": 1e-5, "atol": 1e-5} if DEVICE.type == "cuda" else {"rtol": 0, "atol": 0}
BUCKETS = {"reduce_bucket_size": 2**13}  # several for the modules of these tests
# By stage, settings whose runs must not differ.
SAME = {
    1: [{"offload_optimizer": NVME, "overlap_step": True}],
    2: [
        {"offload_optimizer": "cpu", "overlap_step": True},
        {"offload_optimizer": {**NVME, "max_in_cpu_bytes": 0, "ratio": 0.5}},
    ],
    3: [
        {"offload_optimizer": "cpu", "offload_param": "cpu"},
        {**ALL_NVME, "overlap_step": True},
    ],
}
REGISTERED = {
    "zero1_offload": 1,
    "zero2_offload": 2,
    "zero3_offload": 3,
    "zero3_offload_nvme": 3,
}
GPT = partial(GPTModule, ranks=2)


def full(stage):
    """Settings with which checkpoints are files that `torch.load` reads."""
    return settings(stage, checkpoint="full", **BUCKETS)


def part_memories():
    """From now on the CPU tier is other memory than the device's, as it is on CUDA."""
    make_storage = Storage.__init__

    def init_with_device_memory(self, *args, **kwargs):
        make_storage(self, *args, **kwargs)
        self.has_device_memory = True

    Storage.__init__ = init_with_device_memory


def assert_bit_equal(one, other, where):
    """Losses, full parameters and, where saved, optimizer states of two fits."""
    np.testing.assert_allclose(one.losses, other.losses, err_msg=f"{where}", **TOLERANCES)
    assert one.state.keys() == other.state.keys(), where
    for name, value in other.state.items():
        np.testing.assert_allclose(one.state[name], value, err_msg=f"{where} {name}", **TOLERANCES)
    assert one.global_step == other.global_step, where
    assert (one.checkpoint is None) == (other.checkpoint is None), where
    if one.checkpoint is not None:
        assert_equal_trees(one.checkpoint["optimizer_states"], other.checkpoint["optimizer_states"])


def assert_equal_trees(one, other):
    if isinstance(other, dict):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert_equal_trees(one[key], value)
    elif isinstance(other, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal_trees(a, b)
    elif isinstance(other, torch.Tensor):
        assert type(one) is torch.Tensor
        torch.testing.assert_close(one, other, check_device=False, equal_nan=True, **TOLERANCES)
    else:
        assert one == other


def fit_with(rank, world_size, spec, factory, options=None, **rest):
    """A fit whose swap folder is there before and empty of this rank's directories after."""
    Path("swap").mkdir(exist_ok=True)
    outcome = fit(rank, world_size, spec, factory, options() if options else None, **rest)
    assert not list(Path("swap").glob(f"*.rank{rank}.*"))
    return outcome


def compare(rank, world_size, factory, options=None, stages=(1, 2, 3), same=SAME):
    part_memories()
    for stage in stages:
        base = full(stage)
        expected = fit_with(rank, world_size, base, factory, options, is_saving=True)
        assert len(set(expected.losses)) > 1
        for offload in same[stage]:
            found = fit_with(
                rank, world_size, {**base, **offload}, factory, options, is_saving=True
            )
            assert_bit_equal(found, expected, (stage, offload))


# The registered names.


class Watcher(Callback):
    """Sees where the module thinks it is, and which swap directories there are."""

    def __init__(self):
        self.directories = set()

    def on_train_batch_end(self, trainer, module, *args):
        assert module.device == trainer.strategy.root_device
        assert module.device.type == DEVICE.type
        self.directories |= {path.name for path in Path("swap").iterdir()}


def _fit_by_name(rank, world_size, name, stage):
    os.environ["LIGHTNING_ZERO_NVME_PATH"] = os.path.abspath("swap")
    watcher = Watcher()
    common = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 2}
    factory = partial(GPTModule, ranks=world_size, is_tied=True, num_batches=5)
    expected = fit_with(rank, world_size, settings(stage), factory, lambda: common)
    options = {**common, "callbacks": [watcher]}
    found = fit_with(rank, world_size, name, factory, lambda: options)
    assert_bit_equal(found, expected, name)
    return watcher.directories


@pytest.mark.default_cases("zero3_offload_nvme-1")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", slow_but(["zero3_offload_nvme"], REGISTERED))
def test_every_name_trains_as_on_the_device_in_swap_directories_of_its_own(name, world_size):
    found = run_ranks(world_size, _fit_by_name, name, REGISTERED[name], has_group=False)
    directories = set().union(*found)
    assert len(directories) == (world_size if name.endswith("nvme") else 0)
    for rank in range(world_size if directories else 0):
        assert sum(f".rank{rank}." in name for name in directories) == 1


@pytest.mark.slow
def test_two_jobs_at_once_on_one_path_do_not_meet(tmp_path):
    results = {}

    def job(number):
        spec = settings(3, **{k: {**v, "nvme_path": str(tmp_path)} for k, v in ALL_NVME.items()})
        results[number] = run_ranks(2, _fit_slowly, spec, str(tmp_path), has_group=False)

    jobs = [threading.Thread(target=job, args=(number,)) for number in range(2)]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join()
    assert len(results) == 2
    assert max(number for ranks in results.values() for _, number in ranks) == 4
    for (one, _), (other, _) in zip(results[0], results[1], strict=True):
        assert_bit_equal(one, other, "two jobs")
    assert list(tmp_path.iterdir()) == []


class MeetingCallback(Callback):
    """Waits in its first batch until the directories of all jobs are there."""

    def __init__(self, path):
        self.path = Path(path)
        self.most = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        deadline = time.monotonic() + (20 if batch_idx == 0 else 0)
        while True:
            self.most = max(self.most, len(list(self.path.iterdir())))
            if self.most == 4 or time.monotonic() > deadline:
                return
            time.sleep(0.05)


def _fit_slowly(rank, world_size, spec, path):
    meeting = MeetingCallback(path)
    return fit(rank, world_size, spec, GPT, {"callbacks": [meeting]}), meeting.most


# Loops, optimizers, parameters.


class CountsCalls(torch.optim.Optimizer):
    """Counts its calls in the groups, so that it can be called once in a step only."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "calls": 0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.5)
                    p.add_(mean, alpha=-group["lr"] / group["calls"])
        return loss


class OptimizerModule(GPTModule):
    """The GPT with an optimizer by name."""

    made = {
        "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
        "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
        "adam fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
        "rmsprop centered": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
        "plain sgd": lambda p: torch.optim.SGD(p, lr=0.05),
        "counts calls": CountsCalls,
    }

    def __init__(self, name, **kwargs):
        super().__init__(**kwargs)
        self.name = name

    def configure_optimizers(self):
        return self.made[self.name](self.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["adagrad"], OptimizerModule.made))
def test_every_kind_of_optimizer_steps_offloaded_states_as_on_the_device(name):
    factory = partial(OptimizerModule, name, ranks=2, num_batches=3)
    run_ranks(2, compare, factory, has_group=False)


class SeveralBackwardsModule(GANModule):
    """Two backwards for one step, the second after a look at the gradients of the first."""

    def training_step(self, batch, batch_idx):
        x, real = batch
        optimizer_g, optimizer_d = self.optimizers()
        fake = self.generator(x[:, :5])
        optimizer_d.zero_grad()
        optimizer_g.zero_grad()
        self.manual_backward((self.discriminator(real) - 1).square().mean())
        self.losses.append(float(full_grad(self.discriminator[0].weight).norm()))
        self.manual_backward(self.discriminator(fake).square().mean())
        self.losses.append(float(full_grad(self.generator[0].weight).norm()))
        optimizer_g.step()
        self.clip_gradients(optimizer_d, 0.1, "norm")
        optimizer_d.step()


def _by_value():
    return {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


def _accumulating():
    return {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}


class WritingCallback(Callback):
    """Halves a weight on rank 0 between steps, looks at states, and validates."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        (optimizer,) = trainer.optimizers
        states = optimizer.state_dict()["state"]  # right after the step
        module.losses += [float(states[number]["exp_avg"].sum()) for number in sorted(states)]
        with gathered(module.gpt.head, writeback=True):
            if trainer.is_global_zero:
                module.gpt.head.weight.data.mul_(0.5)
        with gathered(module):
            module.losses.append(float(sum(p.double().sum() for p in module.parameters())))

    def on_before_optimizer_step(self, trainer, module, optimizer):
        grads = [full_grad(p) for p in module.parameters()]
        module.losses += [float(grad.norm()) for grad in grads if grad is not None]


def _writing():
    return {"callbacks": [WritingCallback()], "limit_val_batches": 2, "val_check_interval": 1}


SCENARIOS = {
    "two optimizers": (partial(GANModule, ranks=2), None),
    "several backwards": (partial(SeveralBackwardsModule, ranks=2), None),
    "two groups and a schedule": (partial(MLPModule, ranks=2, scheduler="per step"), None),
    "clipping by value": (GPT, _by_value),
    "accumulation": (partial(GPTModule, ranks=2, num_batches=7), _accumulating),
    "frozen": (partial(FrozenModule, ranks=2), None),
    "frozen and not given": (partial(FrozenModule, is_given_frozen=False, ranks=2), None),
    "unused": (partial(UnusedModule, ranks=2), None),
    "looks and writes between steps": (GPT, _writing),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["several backwards"], SCENARIOS))
def test_what_a_user_does_gives_the_same_offloaded(name):
    factory, options = SCENARIOS[name]
    run_ranks(2, compare, factory, options, has_group=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["unused"], SCENARIOS))
def test_one_rank_alone_too(name):
    factory, options = SCENARIOS[name]
    factory = partial(factory, ranks=1)
    run_ranks(1, compare, factory, options, has_group=False)


# Precision.


def _ema():
    return {
        "callbacks": [EMAWeightAveraging(decay=0.5)],
        "precision": "bf16-mixed",
        "limit_val_batches": 2,
        "max_epochs": 2,
    }


@pytest.mark.slow
def test_averaged_weights_swapped_in_are_kept_beside_offloaded_masters():
    run_ranks(2, compare, GPT, _ema, (2,), has_group=False)


def _bf16_true():
    return {"precision": "bf16-true", "gradient_clip_val": 0.1}


@pytest.mark.slow
def test_a_module_in_16_bits_with_offloaded_masters():
    run_ranks(2, compare, GPT, _bf16_true, has_group=False)


class OverflowModule(GPTModule):
    """The second batch overflows on rank 1."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 and self.global_rank == 1 else loss


def _scaled():
    warnings.simplefilter("ignore")
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    return {
        "plugins": [MixedPrecision("16-mixed", DEVICE.type, scaler=scaler)],
        "gradient_clip_val": 0.1,
    }


GRADS_IN_MEMORY = {
    1: SAME[1],
    2: [{"offload_optimizer": NVME, "overlap_step": True}],
    3: [{"offload_optimizer": NVME, "offload_param": NVME}],
}


@pytest.mark.slow
def test_a_scaler_skips_and_unscales_offloaded_steps():
    factory = partial(OverflowModule, ranks=2)
    run_ranks(2, compare, factory, _scaled, (1, 2, 3), GRADS_IN_MEMORY, has_group=False)


@pytest.mark.slow
def test_a_scaler_unscales_gradients_on_nvme():
    factory = partial(OverflowModule, ranks=2)
    run_ranks(2, compare, factory, _scaled, (3,), {3: [ALL_NVME]}, has_group=False)


# Checkpoints.


def _mid_epoch():
    saver = ModelCheckpoint("mid", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    return {"callbacks": [saver], "enable_checkpointing": True}


def _compare_files(rank, world_size):
    part_memories()
    for stage, offloads in SAME.items():
        contents = []
        for offload in ({}, *offloads):
            spec = {**full(stage), **offload, "overlap_step": True}
            fit_with(rank, world_size, spec, GPT, _mid_epoch)
            files = sorted(Path("mid").glob("*.ckpt"))
            contents.append([torch.load(path, weights_only=True) for path in files])
            assert len(files) == 4
            torch.distributed.barrier()
            if rank == 0:
                for path in files:
                    path.unlink()
            torch.distributed.barrier()
        for others in contents[1:]:
            for one, other in zip(contents[0], others, strict=True):
                assert_equal_trees(other["state_dict"], one["state_dict"])
                assert_equal_trees(other["optimizer_states"], one["optimizer_states"])


@pytest.mark.slow
def test_a_checkpoint_in_mid_epoch_has_the_values_of_its_step_while_steps_overlap():
    run_ranks(2, _compare_files, has_group=False)


def _resume(rank, world_size, specs, factory):
    """An epoch with each of `specs`, resumed from the last; the state and the last file."""
    part_memories()
    Path("swap").mkdir(exist_ok=True)
    path = None
    for number, spec in enumerate(specs):
        seed_everything(7 if path is None else 100, verbose=False)
        module = factory()
        saver = ModelCheckpoint(f"saved{len(specs)}-{number}", save_last=True)
        options = {"callbacks": [saver], "enable_checkpointing": True}
        trainer = make_trainer(spec, max_epochs=number + 1, **options)
        trainer.fit(module, ckpt_path=path)
        path = f"saved{len(specs)}-{number}/last.ckpt"
    after = f"after-{len(specs)}.ckpt"
    trainer.save_checkpoint(after)  # when the swap files are gone
    last, late = (torch.load(file, weights_only=True) for file in (path, after))
    assert_equal_trees(late["optimizer_states"], last["optimizer_states"])
    return last


def _compare_resumed(rank, world_size, tiers):
    uninterrupted = _uninterrupted(rank, world_size, full(3), GPT, len(tiers))
    specs = [full(3) | tier for tier in tiers]
    found = _resume(rank, world_size, specs, GPT)
    assert_equal_trees(found["state_dict"], uninterrupted["state_dict"])
    assert_equal_trees(found["optimizer_states"], uninterrupted["optimizer_states"])


def _uninterrupted(rank, world_size, spec, factory, num_epochs):
    seed_everything(7, verbose=False)
    saver = ModelCheckpoint("uninterrupted", save_last=True)
    options = {"callbacks": [saver], "enable_checkpointing": True, "max_epochs": num_epochs}
    make_trainer(spec, **options).fit(factory())
    return torch.load("uninterrupted/last.ckpt", weights_only=True)


CPU = {"offload_optimizer": "cpu", "offload_param": "cpu"}
MIXED = {"offload_optimizer": AUTO, "offload_param": AUTO, "overlap_step": True}


RESUMED = {
    "nvme to device": [ALL_NVME, {}],
    "device to nvme": [{}, ALL_NVME],
    "cpu to nvme to auto": [CPU, ALL_NVME, MIXED],
    "auto to cpu to device": [MIXED, CPU, {}],
    "nvme to nvme": [ALL_NVME, ALL_NVME],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["cpu to nvme to auto", "nvme to device"], RESUMED))
def test_a_checkpoint_of_one_tier_is_resumed_in_another_exactly(name):
    run_ranks(2, _compare_resumed, RESUMED[name], has_group=False)


# Exceptions.


class FailingModule(GPTModule):
    """Its optimizer raises in the second step, on all ranks, after some of the buckets."""

    is_armed = False

    def training_step(self, batch, batch_idx):
        self.optimizers().optimizer.num_calls_left = 2 if self.is_armed and batch_idx == 1 else None
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return FailingAdamW(self.parameters(), lr=1e-3)


class FailingAdamW(torch.optim.AdamW):
    """Raises when no calls are left."""

    num_calls_left = None

    def step(self, closure=None):
        if self.num_calls_left is not None:
            raise ArithmeticError("out of luck")
        return super().step(closure)


def _fail_and_go_on(rank, world_size, stage, offload):
    part_memories()
    Path("swap").mkdir(exist_ok=True)
    spec = settings(stage, **BUCKETS, **offload)
    seed_everything(7, verbose=False)
    module = FailingModule(ranks=world_size)
    module.is_armed = True
    shapes = [p.shape for p in module.parameters()]
    trainer = make_trainer(spec)
    with pytest.raises((ArithmeticError, RuntimeError), match="out of luck"):
        trainer.fit(module)
    assert [p.shape for p in module.parameters()] == shapes
    assert not list(Path("swap").glob(f"*.rank{rank}.*"))
    module.is_armed = False
    before = len(module.losses)
    make_trainer(spec).fit(module)
    assert len(module.losses) == before + 4  # two were left out
    assert all(np.isfinite(module.losses))
    assert not list(Path("swap").glob(f"*.rank{rank}.*"))


@pytest.mark.default_cases("3-offload5")
@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (2, {}),
        pytest.param(1, {"offload_optimizer": NVME}, marks=pytest.mark.slow),
        pytest.param(2, {"offload_optimizer": "cpu", "overlap_step": True}, marks=pytest.mark.slow),
        (2, {"offload_optimizer": NVME, "overlap_step": True}),
        pytest.param(3, ALL_NVME, marks=pytest.mark.slow),
        (3, {**ALL_NVME, "overlap_step": True}),
    ],
)
def test_an_optimizer_that_raises_leaves_no_files_and_the_next_fit_trains(stage, offload):
    run_ranks(2, _fail_and_go_on, stage, offload, has_group=False, timeout_s=20)


class RaisingModule(GPTModule):
    """Raises in the second batch, on rank 1 only."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 1:
            raise ArithmeticError("out of luck")
        return loss


def _raise_on_one_rank(rank, world_size, folder):
    spec = settings(3, **{k: {**v, "nvme_path": folder} for k, v in ALL_NVME.items()})
    try:
        make_trainer(spec).fit(RaisingModule(ranks=world_size))
    finally:
        assert not list(Path(folder).glob(f"*.rank{rank}.*"))


@pytest.mark.slow
def test_an_exception_on_one_rank_leaves_no_files(tmp_path):
    with pytest.raises(RankError, match="ArithmeticError: out of luck") as raised:
        run_ranks(2, _raise_on_one_rank, str(tmp_path), has_group=False)
    assert "AssertionError" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
