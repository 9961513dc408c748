"""Sharded checkpoints: every rank writes a part; any stage and world size resumes any other."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
)
from torch.distributed.checkpoint import FileSystemReader

from lightning_zero import OffloadConfig, __version__, load_from_checkpoint
from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.checkpoint.save_record import find_foreign_items
from lightning_zero.checkpoint.source import find_damage
from lightning_zero.comm.control import Channel
from lightning_zero.strategy import saving
from tests.support import ranks
from tests.support.fitting import arrays, make_trainer, run_once, settings
from tests.support.models import ConvModule, FrozenModule, GANModule, GPTModule, MLPModule
from tests.support.warm import run_ranks

MODELS = {
    "tied gpt": partial(GPTModule, ranks=2, is_tied=True),
    "batch norm": partial(ConvModule, ranks=2),
    "two groups": partial(MLPModule, ranks=2, scheduler="per step"),
    "frozen": partial(FrozenModule, ranks=2),
}


def sharded(stage, **options):
    return settings(stage, checkpoint="sharded", **options)


def named(states, module):
    """Converts optimizer states of torch, by number, to those of a sharded checkpoint, by name."""
    names = [name for name, _ in module.named_parameters()]
    optimizers = module.configure_optimizers()
    optimizer = optimizers["optimizer"] if isinstance(optimizers, dict) else optimizers
    of = {p: n for n, p in module.named_parameters()}
    numbered = [of[p] for group in optimizer.param_groups for p in group["params"]]
    assert set(numbered) <= set(names)
    return [
        {
            "state": {numbered[number]: entry for number, entry in state["state"].items()},
            "param_groups": [
                {**group, "params": [numbered[number] for number in group["params"]]}
                for group in state["param_groups"]
            ],
        }
        for state in states
    ]


def assert_same_values(ours, reference, path="checkpoint"):
    """Asserts equal keys, types, shapes, dtypes and values to 1e-6; ours may be lazy."""
    if isinstance(reference, dict):
        assert set(ours) == set(reference), path
        for key, value in reference.items():
            assert_same_values(ours[key], value, f"{path}[{key!r}]")
    elif isinstance(reference, (list, tuple)):
        assert len(ours) == len(reference), path
        for index, value in enumerate(reference):
            assert_same_values(ours[index], value, f"{path}[{index}]")
    elif isinstance(reference, torch.Tensor):
        assert ours.dtype == reference.dtype, path
        assert ours.shape == reference.shape, path
        torch.testing.assert_close(ours.clone(), reference, rtol=1e-6, atol=1e-6, msg=path)
    else:
        assert ours == reference, path


@pytest.mark.default_cases("two groups-2")
@pytest.mark.parametrize(
    ("model", "stage"),
    [
        ("tied gpt", 0),
        ("tied gpt", 3),
        ("batch norm", 1),
        ("two groups", 2),
        ("frozen", 3),
    ],
)
def test_the_directory_has_what_ddp_writes_by_name(model, stage, tmp_path):
    # After fit for odd stages, when every rank has the full module; otherwise before its end.
    save = _save if stage % 2 else _save_at_end
    run_ranks(2, save, sharded(stage), MODELS[model], str(tmp_path / "ours"), has_group=False)
    reference = run_once(2, _save_and_read, "ddp", MODELS[model], save)[0]
    ours = open_checkpoint(tmp_path / "ours")
    note = ours.pop("lightning_zero")
    if save is _save_at_end:  # a run has states of its ranks until it ends
        assert len(note.pop("rank_state_bytes")) == 2
        ours.pop("lightning_zero_rank_states")
    assert note == {
        "version": __version__,
        "stage": stage,
        "world_size": 2,
    }
    module = MODELS[model]()
    states = named(reference["optimizer_states"], module)
    assert list(ours["state_dict"]) == list(reference["state_dict"])
    assert_same_values(ours, {**reference, "optimizer_states": states})


def _save(rank, world_size, spec, factory, path):
    seed_everything(7, verbose=False)
    trainer = make_trainer(spec)
    trainer.fit(factory())
    trainer.save_checkpoint(path)


def _save_and_read(rank, world_size, spec, factory, save):
    save(rank, world_size, spec, factory, "full.ckpt")
    return torch.load("full.ckpt", weights_only=True)


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_writes_one_file_with_its_share(stage, tmp_path):
    path = tmp_path / "a.ckpt"
    factory = partial(GPTModule, ranks=3, is_tied=True)
    run_ranks(3, _save_at_end, sharded(stage), factory, str(path), has_group=False)
    files = {p.name: p.stat().st_size for p in path.iterdir()}
    parts = [files.pop(f"__{rank}_0.distcp") for rank in range(3)]
    assert set(files) == {".metadata", "meta.pt", "save.json", "SHA256SUMS"}
    sums = dict(line.split()[::-1] for line in (path / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == {".metadata", "meta.pt", "save.json"}
    for name, digest in sums.items():
        assert hashlib.sha256((path / name).read_bytes()).hexdigest() == digest
    # Tied and replicated tensors are written once: parameters and two moments.
    numel = sum(p.numel() for p in factory().parameters())
    num_items = 3 * 3 * len(list(factory().parameters())) * 3
    assert 12 * numel < sum(parts) < 12 * numel + 2000 * num_items
    assert max(parts) < sum(parts) / 2
    assert os.listdir(tmp_path) == ["a.ckpt"]


class SavingAtEnd(Callback):
    """Saves when training ends."""

    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def _save_at_end(rank, world_size, spec, factory, path, **options):
    seed_everything(7, verbose=False)
    make_trainer(spec, callbacks=[SavingAtEnd(path)], **options).fit(factory())


# -------------------------------------------------------------------- resuming


def _resume(rank, world_size, specs, factory, folder):
    """Trains one epoch with each strategy, resumed from the last checkpoint of the previous one."""
    path = None
    for number, spec in enumerate(specs):
        seed_everything(7 if path is None else 100 + rank, verbose=False)
        module = factory()
        saver = ModelCheckpoint(f"{folder}/{number}", save_last=True)
        trainer = make_trainer(
            spec, max_epochs=number + 1, callbacks=[saver], enable_checkpointing=True
        )
        trainer.fit(module, ckpt_path=path)
        path = f"{folder}/{number}/last.ckpt"
    return arrays(module.state_dict()), module.losses


def _uninterrupted(rank, world_size, spec, factory, num_epochs):
    seed_everything(7, verbose=False)
    module = factory()
    make_trainer(spec, max_epochs=num_epochs).fit(module)
    return arrays(module.state_dict()), module.losses[-4:]


@pytest.mark.slow
@pytest.mark.shows("sharded checkpoint, also asynchronous")
@pytest.mark.parametrize(
    ("model", "is_async", "stage"),
    [
        ("tied gpt", False, 3),
        ("tied gpt", True, 2),
        ("batch norm", False, 1),
        ("batch norm", True, 3),
        ("two groups", False, 0),
        ("two groups", True, 1),
        ("two groups", False, 2),
    ],
)
def test_resuming_is_bit_equal_to_never_stopping(model, is_async, stage):
    specs = [sharded(stage, async_save=is_async)] * 2
    ours = run_ranks(2, _resume, specs, MODELS[model], "saved", has_group=False)
    reference = run_once(2, _uninterrupted, settings(stage), MODELS[model], 2)
    for (state, losses), (expected, expected_losses) in zip(ours, reference, strict=True):
        assert losses == expected_losses
        for name, value in expected.items():
            if "running" not in name:  # rank 0 broadcasts it to the others on resuming
                np.testing.assert_array_equal(state[name], value, err_msg=name)


@pytest.mark.default_cases("nvme to memory-True")
@pytest.mark.parametrize(
    ("order", "is_async"), [("nvme to memory", True), ("memory to nvme", False)]
)
def test_one_tier_resumes_another(order, is_async):
    small = {"nvme_path": ".", "buffer_count": 3, "buffer_size": 2**16}
    disk = {name: OffloadConfig("nvme", **small) for name in ("offload_optimizer", "offload_param")}
    specs = [sharded(3, async_save=is_async, **disk), sharded(3, async_save=is_async)]
    if order == "memory to nvme":
        specs.reverse()
    ours = run_ranks(2, _resume, specs, MODELS["two groups"], "saved", has_group=False)
    reference = run_once(2, _uninterrupted, settings(3), MODELS["two groups"], 2)
    for (state, losses), (expected, expected_losses) in zip(ours, reference, strict=True):
        assert losses == expected_losses
        for name, value in expected.items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)


@pytest.mark.default_cases("full to sharded-1")
@pytest.mark.parametrize(("order", "stage"), [("sharded to full", 3), ("full to sharded", 1)])
def test_full_and_sharded_resume_and_overwrite_each_other(stage, order, tmp_path):
    specs = [sharded(stage), settings(stage, checkpoint="full")]
    if order == "full to sharded":
        specs.reverse()
    ours = run_ranks(
        2, _resume_in_place, specs, MODELS["two groups"], str(tmp_path / "a.ckpt"), has_group=False
    )
    reference = run_once(2, _uninterrupted, settings(stage), MODELS["two groups"], 2)
    for (state, losses), (expected, expected_losses) in zip(ours, reference, strict=True):
        assert losses == expected_losses
        for name, value in expected.items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)
    assert (tmp_path / "a.ckpt").is_dir() == (order == "full to sharded")
    assert os.listdir(tmp_path) == ["a.ckpt"]


def _resume_in_place(rank, world_size, specs, factory, path):
    for number, spec in enumerate(specs):
        seed_everything(7 + number, verbose=False)
        module = factory()
        trainer = make_trainer(spec, max_epochs=number + 1, callbacks=[SavingAtEnd(path)])
        trainer.fit(module, ckpt_path=path if number else None)
    return arrays(module.state_dict()), module.losses


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_masters_of_a_16_bit_module_are_kept(stage):
    specs = [sharded(stage)] * 2
    ours = run_ranks(2, _resume_bf16, specs, "saved", has_group=False)
    reference = run_once(2, _bf16_uninterrupted, settings(stage))
    for state, expected in zip(ours, reference, strict=True):
        for name, value in expected.items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)


def _resume_bf16(rank, world_size, specs, folder):
    path = None
    for number, spec in enumerate(specs):
        seed_everything(7 + number, verbose=False)
        module = MLPModule(ranks=world_size)
        saver = ModelCheckpoint(f"{folder}/{number}", save_last=True)
        options = {"callbacks": [saver], "enable_checkpointing": True, "precision": "bf16-true"}
        trainer = make_trainer(spec, max_epochs=number + 1, **options)
        trainer.fit(module, ckpt_path=path)
        path = f"{folder}/{number}/last.ckpt"
    masters = open_checkpoint(path)["lightning_zero_masters"]
    assert {value.dtype for value in masters.values()} == {torch.float32}
    state = open_checkpoint(path)["state_dict"]
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    if trainer.max_epochs == 2:
        trainer.save_checkpoint("late.ckpt")  # from the masters that are kept after fit
        late = open_checkpoint("late.ckpt")["lightning_zero_masters"]
        for name, value in masters.items():
            assert torch.equal(late[name].clone(), value.clone())
    return arrays(module.state_dict())


def _bf16_uninterrupted(rank, world_size, spec):
    seed_everything(7, verbose=False)
    module = MLPModule(ranks=world_size)
    make_trainer(spec, max_epochs=2, precision="bf16-true").fit(module)
    return arrays(module.state_dict())


def test_several_optimizers_are_saved_separately(tmp_path):
    run_ranks(2, _save, sharded(3), partial(GANModule, ranks=2), str(tmp_path), has_group=False)
    states = open_checkpoint(tmp_path)["optimizer_states"]
    assert len(states) == 2
    assert all(len(state["state"]) > 0 for state in states)
    assert not set(states[0]["state"]) & set(states[1]["state"])


class EarlySaver(MLPModule):
    """Saves before the first step."""

    def on_train_start(self):
        self.trainer.save_checkpoint("early.ckpt")


def test_saving_before_the_first_step_gives_an_empty_optimizer_state_that_loads():
    run_ranks(2, _save_early, sharded(3), has_group=False)


def _save_early(rank, world_size, spec):
    seed_everything(7, verbose=False)
    first = EarlySaver(ranks=world_size)
    make_trainer(spec).fit(first)
    assert open_checkpoint("early.ckpt")["optimizer_states"][0]["state"] == {}
    seed_everything(8, verbose=False)
    second = MLPModule(ranks=world_size)
    make_trainer(spec).fit(second, ckpt_path="early.ckpt")
    assert second.losses == first.losses


@pytest.mark.parametrize("stage", [3])
def test_evaluation_reads_a_directory_with_all_or_with_weights_only(stage):
    ours = run_ranks(2, _validate, sharded(stage), has_group=False)
    reference = run_once(2, _validate, "ddp")
    for one, other in zip(ours, reference, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def _validate(rank, world_size, spec):
    seed_everything(7, verbose=False)
    trainer = make_trainer(spec, limit_train_batches=1)
    trainer.fit(ConvModule(ranks=world_size))
    trainer.save_checkpoint("full.ckpt")
    trainer.save_checkpoint("weights.ckpt", weights_only=True)
    trainer.strategy.barrier()
    losses = []
    for path in ("full.ckpt", "weights.ckpt"):
        seed_everything(rank, verbose=False)
        fresh = ConvModule(ranks=world_size)
        trainer = make_trainer(spec, limit_val_batches=2)
        losses.append(trainer.validate(fresh, ckpt_path=path, verbose=False)[0]["val_loss"])
    with pytest.raises(KeyError, match="contains only the model"):
        make_trainer(spec).fit(ConvModule(ranks=world_size), ckpt_path="weights.ckpt")
    assert losses[0] == losses[1]
    return losses


# -------------------------------------------------------------------- callbacks and hooks


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "is_async"), [(1, False), (3, True)])
def test_model_checkpoint_keeps_the_best_and_the_last_as_under_ddp(stage, is_async):
    ours = run_ranks(2, _files, sharded(stage, async_save=is_async), has_group=False)
    reference = run_once(2, _files, "ddp")
    for (names, losses), (expected, expected_losses) in zip(ours, reference, strict=True):
        assert names == expected
        assert losses == pytest.approx(expected_losses, rel=1e-6)


def _files(rank, world_size, spec):
    seed_everything(7, verbose=False)
    saver = ModelCheckpoint("saved", save_last="link", save_top_k=2, monitor="rising", mode="max")
    options = {"callbacks": [saver], "enable_checkpointing": True, "limit_val_batches": 1.0}
    trainer = make_trainer(spec, max_epochs=4, **options)
    module = MLPModule(ranks=world_size)
    trainer.fit(module)
    trainer.strategy.barrier()
    names = sorted(str(p) for p in Path("saved").iterdir())
    losses = [
        trainer.validate(module, ckpt_path=path, verbose=False)[0]["val_loss"]
        for path in ("best", "last")
    ]
    return [Path(saver.best_model_path).name, *names], losses


class Rewriting(MLPModule):
    """Renames one entry, deletes one and adds one.

    Args:
        on_rank: The only rank that changes entries; None: all ranks.
        **kwargs: Arguments of `MLPModule`.
    """

    def __init__(self, on_rank=None, **kwargs):
        super().__init__(**kwargs)
        self.on_rank = on_rank

    def on_save_checkpoint(self, checkpoint):
        if self.on_rank in (None, self.global_rank):
            state = checkpoint["state_dict"]
            first, second = list(state)[:2]
            state["renamed"] = state.pop(first)
            state["halved"] = state.pop(second).half()
            state["added"] = torch.arange(3.0)
            checkpoint["mine"] = {"also": state["renamed"], "number": 5}

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        first, second = [name for name, _ in self.named_parameters()][:2]
        state[first] = state.pop("renamed") * 1
        state[second] = state.pop("halved")
        assert state.pop("added").tolist() == [0.0, 1.0, 2.0]
        assert torch.equal(checkpoint["mine"]["also"].clone(), state[first])


@pytest.mark.default_cases("None")
@pytest.mark.parametrize("on_rank", [None, 0])
def test_hooks_may_rename_delete_cast_and_add_entries_also_on_rank_0_alone(on_rank):
    run_ranks(2, _rewrite, sharded(3), on_rank, has_group=False)


def _rewrite(rank, world_size, spec, on_rank):
    seed_everything(7, verbose=False)
    module = Rewriting(on_rank, ranks=world_size)
    trainer = make_trainer(spec)
    trainer.fit(module)
    trainer.save_checkpoint("a.ckpt")
    opened = open_checkpoint("a.ckpt")
    assert opened["state_dict"]["halved"].dtype == torch.float16
    assert opened["mine"]["number"] == 5
    other = Rewriting(ranks=world_size)
    make_trainer(spec, max_epochs=2).fit(other, ckpt_path="a.ckpt")
    name = next(iter(dict(module.named_parameters())))
    assert torch.equal(opened["state_dict"]["renamed"].clone(), module.state_dict()[name])


class Deleting(MLPModule):
    """Deletes all entries on rank 1 alone."""

    def on_save_checkpoint(self, checkpoint):
        if self.global_rank == 1:
            checkpoint["state_dict"].clear()
            checkpoint["optimizer_states"].clear()


def test_hooks_of_other_ranks_than_rank_0_do_not_change_a_checkpoint():
    run_ranks(2, _save_and_delete, sharded(3), has_group=False)


def _save_and_delete(rank, world_size, spec):
    module = Deleting(ranks=world_size)
    trainer = make_trainer(spec)
    trainer.fit(module)
    trainer.save_checkpoint("a.ckpt")
    opened = open_checkpoint("a.ckpt")
    assert len(opened["optimizer_states"]) == 1
    for name, value in module.state_dict().items():
        assert torch.equal(opened["state_dict"][name].clone(), value)


class Again(MLPModule):
    """Writes three checkpoints; the last one has another entry."""

    def on_train_batch_end(self, *args):
        self.trainer.save_checkpoint(f"{self.trainer.global_step}.ckpt")

    def on_save_checkpoint(self, checkpoint):
        if self.trainer.global_step == 3:
            checkpoint["state_dict"]["added"] = torch.arange(3.0)


def _save_again(rank, world_size, spec):
    sent = []  # bytes for rank 0, by save
    gather = Channel.gather

    def counted(channel, value):
        sent[-1] += len(pickle.dumps(value))
        return gather(channel, value)

    class Counts(Callback):
        def on_train_batch_end(self, *args):
            sent.append(0)

    Channel.gather = counted
    trainer = make_trainer(spec, max_steps=3, callbacks=[Counts()])
    module = Again(ranks=world_size)
    trainer.fit(module)
    first, second, third = sent
    assert second < first / 4
    assert rank or third > first
    states = [open_checkpoint(f"{step}.ckpt")["state_dict"] for step in (1, 2, 3)]
    assert ["added" in state for state in states] == [False, False, True]
    for name, value in module.state_dict().items():
        assert torch.equal(states[2][name].clone(), value)
        assert not value.is_floating_point() or not torch.equal(states[1][name].clone(), value)
    make_trainer(spec, max_steps=4).fit(Again(ranks=world_size), ckpt_path="2.ckpt")


def test_the_save_plan_is_agreed_on_once():
    ranks.run_ranks(2, _save_again, sharded(3), has_group=False)


class Reading(MLPModule):
    def on_save_checkpoint(self, checkpoint):
        next(iter(checkpoint["state_dict"].values())).norm()


def test_a_hook_that_reads_values_gets_a_helpful_error():
    with pytest.raises(AssertionError, match=r'ZeroStrategy\(checkpoint="full"\)'):
        run_ranks(2, _save_at_end, sharded(3), partial(Reading, ranks=2), "a.ckpt", has_group=False)


def test_the_path_of_rank_0_counts():
    run_ranks(2, _save_to_own_path, sharded(3), has_group=False)


def _save_to_own_path(rank, world_size, spec):
    trainer = make_trainer(spec)
    trainer.fit(MLPModule(ranks=world_size))
    trainer.save_checkpoint(f"{rank}.ckpt")
    assert {p.name for p in Path().iterdir()} == {"0.ckpt"}


class FindingRate(LearningRateFinder):
    """Runs the learning rate finder before the first epoch, and keeps the learning rate."""

    def on_fit_start(self, trainer, pl_module):
        self.lr_find(trainer, pl_module)
        self.smoothed = self.optimal_lr.results["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [True])
def test_the_learning_rate_finder_restores_what_it_saved(is_async):
    ours = run_ranks(2, _find_rate, sharded(3, async_save=is_async), has_group=False)
    reference = run_once(2, _find_rate, "ddp")
    for (smoothed, losses), (expected, expected_losses) in zip(ours, reference, strict=True):
        assert len(smoothed) > 5
        assert smoothed == pytest.approx(expected, rel=1e-5)
        assert losses == pytest.approx(expected_losses, rel=1e-6)


def _find_rate(rank, world_size, spec):
    seed_everything(7, verbose=False)
    module = MLPModule(ranks=world_size, num_batches=12)
    module.lr = 1e-3
    finder = FindingRate(num_training_steps=30, update_attr=False)
    make_trainer(spec, callbacks=[finder]).fit(module)
    assert not list(Path().iterdir())
    return finder.smoothed, module.losses[-12:]


@pytest.mark.parametrize("stage", [2])
def test_averaged_weights_are_saved_and_resumed_as_under_ddp(stage):
    ours = run_ranks(2, _resume_average, sharded(stage), has_group=False)
    reference = run_once(2, _resume_average, "ddp")
    for one, expected in zip(ours, reference, strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(one[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def _resume_average(rank, world_size, spec):
    path = None
    for number in range(2):
        seed_everything(7 + number, verbose=False)
        module = MLPModule(ranks=world_size)
        callbacks = [EMAWeightAveraging(decay=0.5), SavingAtEnd(f"{number}.ckpt")]
        make_trainer(spec, max_epochs=number + 1, callbacks=callbacks).fit(module, ckpt_path=path)
        path = f"{number}.ckpt"
    return arrays(module.state_dict())


# -------------------------------------------------------------------- errors


class WithWidth(MLPModule):
    """Has hyperparameters; one is an object.

    Args:
        width: Any number.
        shape: Any object.
        **kwargs: Arguments of `MLPModule`.
    """

    def __init__(self, width=3, shape=None, **kwargs):
        super().__init__(**kwargs)
        self.save_hyperparameters("width", "shape")


def test_a_module_and_its_rich_hyperparameters_are_loaded_from_a_directory(tmp_path):
    run_ranks(2, _load_with_hyperparameters, str(tmp_path / "a.ckpt"), has_group=False)


def _load_with_hyperparameters(rank, world_size, path):
    seed_everything(7, verbose=False)
    module = WithWidth(width=5, shape=Path("a"), ranks=world_size)
    trainer = make_trainer(sharded(3))
    trainer.fit(module)
    trainer.save_checkpoint(path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        make_trainer(sharded(3), max_epochs=2).fit(WithWidth(ranks=world_size), ckpt_path=path)
    resumed = WithWidth(ranks=world_size)
    trainer = make_trainer(sharded(3), max_epochs=2)
    trainer.fit(resumed, ckpt_path=path, weights_only=False)
    assert trainer.global_step == 8
    loaded = load_from_checkpoint(WithWidth, path, weights_only=False, ranks=world_size)
    assert loaded.hparams == {"width": 5, "shape": Path("a")}
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_a_link_to_an_incomplete_checkpoint_is_warned_of():
    from lightning_zero import ZeroStrategy

    strategy = ZeroStrategy(checkpoint="sharded", async_save=True)
    trainer = make_trainer(
        "auto",
        strategy=strategy,
        devices=1,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(save_last="link")],
    )
    with pytest.warns(UserWarning, match="leaves a dangling link"):
        strategy._saving.check_callbacks(trainer, is_sharded=True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"filename": "best", "save_top_k": 2, "monitor": "loss"}, r"put \{step\} into"),
        ({"filename": "all", "save_top_k": -1}, r"put \{step\} into"),
    ],
)
def test_a_callback_that_would_lose_checkpoints_is_refused_at_set_up(options, text):
    callbacks = [ModelCheckpoint(**options)]
    trainer = make_trainer(
        sharded(1, async_save=True), enable_checkpointing=True, callbacks=callbacks, devices=1
    )
    with pytest.raises(ValueError, match=text):
        trainer.fit(MLPModule(ranks=1))


@pytest.mark.default_cases("options2")
@pytest.mark.parametrize(
    "options", [{"filename": "best"}, {"filename": "{step}", "save_top_k": -1}, {}]
)
def test_a_callback_with_unique_checkpoint_names_is_accepted(options, tmp_path):
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=1, **options)
    spec = sharded(1, async_save=True)
    trainer = make_trainer(spec, enable_checkpointing=True, callbacks=[callback], devices=1)
    trainer.fit(MLPModule(ranks=1))
    assert Path(callback.best_model_path).is_dir()


def test_settings_that_do_not_fit_are_errors_at_construction():
    from lightning.pytorch.plugins import AsyncCheckpointIO

    from lightning_zero import ZeroStrategy

    with pytest.raises(ValueError, match="checkpoint must be one of"):
        ZeroStrategy(checkpoint="split")
    with pytest.raises(ValueError, match="async_save needs sharded checkpoints"):
        ZeroStrategy(checkpoint="full", async_save=True)
    with pytest.raises(ValueError, match="does not use a CheckpointIO, got AsyncCheckpointIO"):
        ZeroStrategy(checkpoint="sharded", checkpoint_io=AsyncCheckpointIO())


def test_damage_and_foreign_directories_are_errors_on_every_rank():
    run_ranks(2, _load_damaged, sharded(3), has_group=False)


def _load_damaged(rank, world_size, spec):
    trainer = make_trainer(spec)
    trainer.fit(MLPModule(ranks=world_size))
    trainer.save_checkpoint("a.ckpt")
    file = Path("a.ckpt/__1_0.distcp")
    if rank == 0:
        data = bytearray(file.read_bytes())
        middle = len(data) // 2
        data[middle : middle + 500] = bytes(500)
        file.write_bytes(data)
        Path("foreign").mkdir()
        Path("foreign/notes.txt").touch()
    trainer.strategy.barrier()
    fresh = MLPModule(ranks=world_size)
    with pytest.raises(ValueError, match=r"is damaged: __1_0\.distcp .* differs from its checksum"):
        make_trainer(spec).validate(fresh, ckpt_path="a.ckpt")
    trainer.strategy.barrier()
    if rank == 0:
        os.truncate(file, file.stat().st_size // 2)
    trainer.strategy.barrier()
    with pytest.raises(ValueError, match=r"is damaged: __1_0\.distcp \(\d+ bytes\)"):
        make_trainer(spec).validate(fresh, ckpt_path="a.ckpt")
    with pytest.raises(ValueError, match=r"is not a checkpoint: a directory that holds notes\.txt"):
        make_trainer(spec).validate(fresh, ckpt_path="foreign")


# Files that a copy of the second save over the first has written when it is interrupted.
_COPIED = {
    "one rank's file": ["__1_0.distcp"],
    "what comes first by name": [".metadata", "SHA256SUMS", "__0_0.distcp"],
    "all but the record": [".metadata", "SHA256SUMS", "__0_0.distcp", "__1_0.distcp", "meta.pt"],
    "the rest": ["meta.pt"],
    "half of a file": [],
}


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory):
    path = tmp_path_factory.mktemp("saves")
    run_ranks(2, _save_twice, str(path), has_group=False)
    return path


def _save_twice(rank, world_size, path):
    trainer = make_trainer(sharded(3))
    trainer.fit(MLPModule(ranks=world_size))
    trainer.save_checkpoint(f"{path}/first")
    with torch.no_grad():
        for parameter in trainer.lightning_module.parameters():
            parameter.add_(1)
    trainer.fit_loop.epoch_progress.current.completed += 1
    trainer.save_checkpoint(f"{path}/second")


def test_metadata_without_an_item_of_a_file_differs_from_its_save(two_saves):
    metadata = FileSystemReader(two_saves / "first").read_metadata()
    in_file = [
        i for i, info in metadata.storage_data.items() if info.relative_path == "__0_0.distcp"
    ]
    del metadata.storage_data[in_file[-1]]
    (problem,) = find_foreign_items(two_saves / "first", metadata, 0, 1)
    assert problem == "__0_0.distcp has items that differ from save.json"


@pytest.mark.parametrize("copied", _COPIED)
def test_files_of_two_saves_in_one_directory_are_refused(two_saves, tmp_path, copied):
    mixed = tmp_path / "mixed"
    shutil.copytree(two_saves / "first", mixed)
    assert find_damage(mixed) == []
    for name in _COPIED[copied]:
        shutil.copy(two_saves / "second" / name, mixed / name)
    assert torch.load(two_saves / "second" / "meta.pt")  # like other readers
    if copied == "half of a file":
        data = bytearray((mixed / "__0_0.distcp").read_bytes())
        data[: len(data) // 2] = (two_saves / "second" / "__0_0.distcp").read_bytes()[
            : len(data) // 2
        ]
        (mixed / "__0_0.distcp").write_bytes(data)
        assert any("__0_0.distcp has items that differ" in line for line in find_damage(mixed))
        return
    assert any(" of two saves " in line or "save.json" in line for line in find_damage(mixed))
    with pytest.raises(
        ValueError,
        match=r"(directory holds files of two saves|digest in save\.json|differ from save\.json)",
    ):
        open_checkpoint(mixed)


def test_a_copy_that_ends_before_the_record_is_refused(two_saves, tmp_path):
    shutil.copytree(two_saves / "first", tmp_path / "copy")
    (tmp_path / "copy" / "save.json").unlink()
    with pytest.raises(ValueError, match=r"save\.json of save \w+ is missing"):
        open_checkpoint(tmp_path / "copy")


class Asks(Callback):
    """Calls the strategy's `state_dict` functions, like a user, and saves a checkpoint."""

    def on_train_end(self, trainer, pl_module):
        state = trainer.strategy.lightning_module_state_dict()
        trainer.save_checkpoint("both.ckpt")
        self.kinds = {type(value) for value in state.values()}
        self.is_empty = any(value.is_meta for value in state.values())
        if trainer.is_global_zero:
            torch.save({name: value.clone() for name, value in state.items()}, "asked.pt")


def _ask(rank, world_size, stage):
    seed_everything(7, verbose=False)
    asks, module = Asks(), GPTModule(ranks=2)
    trainer = make_trainer(sharded(stage), callbacks=[asks], precision="bf16-mixed")
    trainer.fit(module)
    later = trainer.strategy.lightning_module_state_dict()
    asked, saved = torch.load("asked.pt"), open_checkpoint("both.ckpt")["state_dict"]
    assert asks.kinds == {torch.Tensor}
    assert not asks.is_empty
    assert list(asked) == list(saved) == list(later)
    for name, value in asked.items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, saved[name].clone())
        assert torch.equal(value, later[name])
        assert torch.equal(pickle.loads(pickle.dumps(later[name])), value)


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_state_dict_has_full_tensors_and_the_checkpoint_has_shards(stage):
    run_ranks(2, _ask, stage, has_group=False)


class WideModule(MLPModule):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = torch.nn.Embedding(2**15, 256)  # 2**23 elements, 32 MiB

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.table.weight[:2].sum()


def _resident_peak_bytes():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def _save_by_default(rank, world_size, options):
    trainer = make_trainer(settings(3, **options), max_steps=1)
    grown = []

    class Saver(Callback):
        def on_train_end(self, trainer, module):
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current size
            before = _resident_peak_bytes()
            trainer.save_checkpoint("auto.ckpt")
            grown.append(_resident_peak_bytes() - before)

    trainer.callbacks.append(Saver())
    trainer.fit(WideModule(ranks=world_size))
    return grown[0], Path("auto.ckpt").is_dir()


def test_an_offloaded_run_saves_a_sharded_checkpoint_without_the_model_in_memory():
    nvme = {"device": "nvme", "nvme_path": "."}
    options = {"offload_optimizer": nvme, "offload_param": nvme}
    ((grown, is_sharded),) = ranks.run_ranks(1, _save_by_default, options, has_group=False)
    assert is_sharded
    full_bytes = 3 * 4 * 2**23
    assert grown < full_bytes / 2, f"{grown / 2**20:.0f} MiB"


def _save_with_little_memory(rank, world_size):
    found = []
    for free_bytes in (2**27, 2**30):
        saving.available_memory_bytes = lambda free_bytes=free_bytes: free_bytes
        found.append(_save_by_default(rank, world_size, {})[1])
    return found


def test_a_checkpoint_larger_than_half_of_the_free_memory_is_sharded_by_default():
    assert ranks.run_ranks(2, _save_with_little_memory, has_group=False) == [[True, False]] * 2
