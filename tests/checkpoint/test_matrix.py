"""Sharded checkpoints depend on neither stage nor world size: any cell resumes any other."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from lightning_zero.checkpoint import open_checkpoint
from tests.support.fitting import arrays, make_trainer, run_once, settings
from tests.support.models import MLPModule
from tests.support.ranks import run_ranks

CELLS = [(stage, world_size) for stage in (1, 2, 3) for world_size in (1, 2, 3, 4)]
CHAIN = [(1, 1), (3, 4), (1, 2), (2, 3), (3, 2), (2, 1), (3, 3), (1, 4), (2, 4)]
# Every world size divides the global batch into equal parts, so that one process is a reference.
MODEL = partial(MLPModule, ranks=12, batch_size=1, num_batches=3, scheduler="per step")


class SavingAtStart(Callback):
    """Saves the loaded state before training, and the final state."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_start(self, trainer, pl_module):
        trainer.save_checkpoint(f"{self.folder}/loaded")

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(f"{self.folder}/trained")


def _train_on(rank, world_size, stage, sources, folder, max_epochs):
    """Resumes from each source; writes the loaded and the final parameters to `folder`."""
    states = []
    for number, source in enumerate(sources):
        seed_everything(7 if source is None else 50 + number, verbose=False)
        module = MODEL()
        callbacks = [SavingAtStart(f"{folder}/{number}")]
        spec = settings(stage, checkpoint="sharded")
        trainer = make_trainer(spec, max_epochs=max_epochs, callbacks=callbacks)
        trainer.fit(module, ckpt_path=source)
        states.append(arrays(module.state_dict()))
    return states


def assert_equal_bits(path, other):
    one, two = open_checkpoint(path), open_checkpoint(other)
    assert list(one["state_dict"]) == list(two["state_dict"])
    for name, value in one["state_dict"].items():
        assert torch.equal(value.clone(), two["state_dict"][name].clone()), name
    for first, second in zip(one["optimizer_states"], two["optimizer_states"], strict=True):
        assert first["param_groups"] == second["param_groups"]
        assert set(first["state"]) == set(second["state"])
        for name, entry in first["state"].items():
            assert set(entry) == {"step", "exp_avg", "exp_avg_sq"}
            for key, value in entry.items():
                assert torch.equal(value.clone(), second["state"][name][key].clone()), (name, key)
    assert one["global_step"] == two["global_step"]


def assert_close(states, num_epochs):
    for state in states:
        for name, value in _uninterrupted(num_epochs).items():
            np.testing.assert_allclose(state[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def _uninterrupted(num_epochs):
    return run_once(1, _train_in_one_process, num_epochs)[0]


def _train_in_one_process(rank, world_size, num_epochs):
    seed_everything(7, verbose=False)
    module = MODEL()
    make_trainer("auto", max_epochs=num_epochs).fit(module)
    return arrays(module.state_dict())


@pytest.mark.slow
def test_a_run_that_changes_stage_and_world_size_every_epoch_is_the_one_that_does_not(tmp_path):
    source = None
    for epoch, (stage, world_size) in enumerate(CHAIN):
        folder = tmp_path / str(epoch)
        results = run_ranks(
            world_size, _train_on, stage, [source], str(folder), epoch + 1, has_group=False
        )
        if source is not None:
            assert_equal_bits(source, folder / "0" / "loaded")
        for states in results:
            assert_close(states, epoch + 1)
        source = str(folder / "0" / "trained")
    assert {stage for stage, _ in CHAIN} == {1, 2, 3}
    assert all(one != other for one, other in pairwise(CHAIN))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint from each cell."""
    folder = tmp_path_factory.mktemp("cells")
    for stage, world_size in CELLS:
        path = folder / f"{stage}-{world_size}"
        run_ranks(world_size, _train_on, stage, [None], str(path), 1, has_group=False)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("stage", "world_size"), CELLS)
def test_every_cell_resumes_every_other(stage, world_size, saved, tmp_path):
    sources = [str(saved / f"{s}-{w}" / "0" / "trained") for s, w in CELLS]
    results = run_ranks(
        world_size,
        _train_on,
        stage,
        sources,
        str(tmp_path),
        2,
        has_group=False,
        timeout_s=300,
    )
    for number, source in enumerate(sources):
        assert_equal_bits(source, Path(tmp_path, str(number), "loaded"))
    for states in results:
        assert_close(states, 2)
