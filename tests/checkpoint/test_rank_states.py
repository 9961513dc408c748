"""Checkpoints have the random generators and data loaders of every rank."""

from __future__ import annotations

import io
import pickle
import random
import shutil
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_zero.checkpoint import open_checkpoint, rank_states
from lightning_zero.checkpoint.rank_states import (
    encode_state,
    gather_rank_states,
    random_state,
    rank_state_shard,
    read_rank_state,
    set_random_state,
)
from lightning_zero.checkpoint.source import find_damage
from lightning_zero.checkpoint.states import METADATA_KEY, RANK_STATES_KEY
from lightning_zero.comm.control import GlooControlPlane
from tests.support.fitting import make_trainer, settings
from tests.support.ranks import RankError
from tests.support.warm import run_ranks

NUM_BATCHES = 4  # of an epoch
_CPU = torch.device("cpu")


class Stream:
    """A stateful loader: each rank has places of its own, and moves through them at random."""

    def __init__(self, rank, note=None):
        self.first = self.place = 1000 * rank
        self.num_read = 0
        self.note = note

    def __iter__(self):
        torch.rand(1)  # an iterator of torch's DataLoader draws a seed, too
        return self._read()

    def _read(self):
        while self.num_read < NUM_BATCHES:
            self.num_read += 1
            self.place += 1 + random.randrange(5) + int(np.random.randint(5))
            yield torch.full((2, 4), self.place / 1000) + torch.rand(2, 4)
        self.num_read, self.place = 0, self.first  # Lightning loads no state after an epoch

    def __len__(self):
        return NUM_BATCHES

    def state_dict(self):
        return {"place": self.place, "num_read": self.num_read, "note": self.note}

    def load_state_dict(self, state):
        self.place, self.num_read = state["place"], state["num_read"]


class Dropping(LightningModule):
    def __init__(self, rank, note=None):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )
        self.stream = Stream(rank, note)
        self.seen = []  # the place of each batch, and its loss

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch).square().mean()
        self.seen.append((self.stream.place, loss.item()))
        return loss

    def train_dataloader(self):
        return self.stream

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class SavesAt(Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def _fit(rank, world_size, strategy, seed, callbacks=(), *, ckpt_path=None, note=None):
    seed_everything(7, verbose=False)
    module = Dropping(rank, note)
    seed_everything(seed + rank, verbose=False)
    trainer = make_trainer(
        strategy,
        max_epochs=3,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        use_distributed_sampler=False,
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return module.seen


def _fit_and_resume(rank, world_size, stage, options, at_end_of_epoch):
    strategy = settings(stage, **options)
    if at_end_of_epoch:
        saves, path, step = ModelCheckpoint("saved", "{epoch}", save_top_k=-1), "epoch=0", 4
        path = f"saved/{path}.ckpt"
    else:
        saves, path, step = SavesAt(6, "saved.ckpt"), "saved.ckpt", 6
    straight = _fit(rank, world_size, strategy, 100, [saves])
    resumed = _fit(rank, world_size, strategy, 900, ckpt_path=path)
    return straight[step:], resumed


_KINDS = {
    "full": {"checkpoint": "full"},
    "sharded": {"checkpoint": "sharded"},
    "async": {"checkpoint": "sharded", "async_save": True},
}


@pytest.mark.default_cases("in an epoch-2-full", "in an epoch-3-sharded")
@pytest.mark.shows("loader and random state of every rank, in checkpoints of both kinds")
@pytest.mark.parametrize("options", _KINDS.values(), ids=_KINDS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("at_end_of_epoch", [False, True], ids=["in an epoch", "after an epoch"])
def test_every_rank_continues_with_its_own_batches_and_random_numbers(
    stage, options, at_end_of_epoch
):
    results = run_ranks(2, _fit_and_resume, stage, options, at_end_of_epoch, has_group=False)
    for straight, resumed in results:
        assert straight == resumed
    places = [[place for place, _ in resumed] for _, resumed in results]
    assert not set(places[0]) & set(places[1])


def _save(rank, world_size, path, note=None):
    strategy = settings(3, checkpoint="sharded")
    _fit(rank, world_size, strategy, 100, [SavesAt(6, path)], note=note)


def _resume(rank, world_size, path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = _fit(rank, world_size, settings(3, checkpoint="sharded"), 900, ckpt_path=path)
    messages = [str(w.message) for w in caught if "ranks saved" in str(w.message)]
    return seen[0][0], messages


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two ranks."""
    path = tmp_path_factory.mktemp("saved") / "saved.ckpt"
    run_ranks(2, _save, str(path), has_group=False)
    return path


def test_another_number_of_ranks_loads_the_loaders_of_rank_0_and_reports_it(saved):
    results = run_ranks(3, _resume, str(saved), has_group=False)
    assert all(place < 1000 for place, _ in results)
    (text,) = results[0][1]
    assert text == (
        "2 ranks saved the checkpoint, and 3 resume from it: every rank loads the data loaders' "
        "states of rank 0, and the random generators are not restored."
    )
    assert results[1][1] == results[2][1] == []


class Unsafe:
    def __reduce__(self):
        return print, ("code of a checkpoint",)


def _save_unsafe(rank, world_size, path):
    _save(rank, world_size, path, note=Unsafe() if rank == 1 else None)


def test_a_pickled_class_of_another_rank_is_refused_on_all(tmp_path):
    path = str(tmp_path / "saved.ckpt")
    run_ranks(2, _save_unsafe, path, has_group=False)
    with pytest.raises(RankError) as error:
        run_ranks(2, _resume, path, has_group=False)
    assert "weights_only" in str(error.value).lower()
    assert "code of a checkpoint" not in str(error.value)


class Unpicklable:
    def __reduce__(self):
        raise TypeError("this loader has no state that can be saved")


def _save_unpicklable(rank, world_size, path):
    with pytest.raises((TypeError, RuntimeError), match="no state that can be saved"):
        _save(rank, world_size, path, note=Unpicklable() if rank == 1 else None)
    return Path(path).exists()


def test_a_state_that_cannot_be_pickled_is_an_error_on_all_ranks(tmp_path):
    path = str(tmp_path / "saved.ckpt")
    assert run_ranks(2, _save_unpicklable, path, has_group=False) == [False, False]


def test_a_damaged_state_is_found_by_its_checksum(saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / "saved.ckpt")
    assert find_damage(path) == []
    encoded = open_checkpoint(path)[RANK_STATES_KEY][:].numpy().tobytes()
    (file,) = (f for f in path.glob("__1_0.distcp") if encoded[-4000:-3000] in f.read_bytes())
    content = bytearray(file.read_bytes())
    content[content.index(encoded[-4000:-3000]) + 10] ^= 1
    file.write_bytes(content)
    assert any("__1_0.distcp" in line for line in find_damage(path))


@pytest.fixture(params=[np.random.MT19937, np.random.PCG64])
def generator(request):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(request.param(3))
    yield
    np.random.set_bit_generator(before)


@pytest.mark.usefixtures("generator")
def test_random_states_are_restored_as_they_were():
    state = random_state(_CPU)
    expected = torch.rand(3), np.random.rand(3), random.random(), random.gauss(0, 1)
    decoded = torch.load(_file(encode_state({"random": state})), weights_only=True)["random"]
    random.gauss(0, 1)
    set_random_state(decoded, _CPU)
    found = torch.rand(3), np.random.rand(3), random.random(), random.gauss(0, 1)
    assert torch.equal(found[0], expected[0])
    assert np.array_equal(found[1], expected[1])
    assert found[2:] == expected[2:]


def test_each_rank_reads_its_own_range():
    states = [{"loaders": ["x" * 10**rank]} for rank in range(4)]
    encoded = [encode_state(state) for state in states]
    sizes = [each.numel() for each in encoded]
    shards = [rank_state_shard(each, sizes, rank) for rank, each in enumerate(encoded)]
    assert [shard.shape for shard in shards] == [(sum(sizes),)] * 4
    checkpoint = {
        RANK_STATES_KEY: torch.cat([shard.read_owned() for shard in shards]),
        METADATA_KEY: {"rank_state_bytes": sizes},
    }
    read = partial(read_rank_state, checkpoint, weights_only=True)
    assert [read(rank) for rank in range(4)] == states
    checkpoint[METADATA_KEY]["rank_state_bytes"] = sizes[:3]
    with pytest.raises(ValueError, match="bytes of states of ranks, expected"):
        read(0)


def _file(encoded):
    return io.BytesIO(encoded.numpy().tobytes())


def test_a_class_that_weights_only_refuses_is_not_loaded():
    encoded = encode_state({"loaders": [Unsafe()]})
    checkpoint = {
        RANK_STATES_KEY: encoded,
        METADATA_KEY: {"rank_state_bytes": [encoded.numel()]},
    }
    with pytest.raises(pickle.UnpicklingError):
        read_rank_state(checkpoint, 0, weights_only=True)


def test_states_that_would_fill_the_memory_are_left_out_of_a_full_checkpoint(monkeypatch):
    alone, checkpoint = GlooControlPlane.__new__(GlooControlPlane), {}
    alone.rank, alone.size, alone._group = 0, 1, None
    gather_rank_states(checkpoint, {"loaders": [1]}, alone)
    assert read_rank_state(checkpoint, 0) == {"loaders": [1]}
    monkeypatch.setattr(rank_states, "_MAX_GATHERED_BYTES", 100)
    with pytest.warns(UserWarning, match=r"without the states of its 1 ranks, of up to \d+ bytes"):
        gather_rank_states(empty := {}, {"loaders": [1]}, alone)
    assert not empty
