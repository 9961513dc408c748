"""Checkpoints of HSDP do not depend on groups: each element is written once; any run resumes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.distributed.checkpoint import FileSystemReader

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.cli import main
from tests.checkpoint.test_matrix import (
    MODEL,
    SavingAtStart,
    assert_close,
    assert_equal_bits,
)
from tests.support.fitting import arrays, make_trainer, settings
from tests.support.warm import run_ranks


def _train(rank, world_size, spec, source, folder, max_epochs):
    seed_everything(7 if source is None else 50, verbose=False)
    module = MODEL()
    trainer = make_trainer(spec, max_epochs=max_epochs, callbacks=[SavingAtStart(folder)])
    trainer.fit(module, ckpt_path=source)
    return arrays(module.state_dict())


SHARDED = partial(settings, checkpoint="sharded")
CHAIN = [
    (4, SHARDED(3, sharding_group_size=2)),
    (2, SHARDED(3)),
    (4, SHARDED(1, sharding_group_size=2, async_save=True)),
    (1, settings(2)),
    (4, settings(2, sharding_group_size=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("length", [3, pytest.param(len(CHAIN), marks=pytest.mark.slow)])
def test_a_run_that_changes_its_groups_every_epoch_is_the_one_that_has_none(length, tmp_path):
    source = None
    for epoch, (world_size, spec) in enumerate(CHAIN[:length]):
        folder = str(tmp_path / str(epoch))
        args = (spec, source, folder, epoch + 1)
        states = run_ranks(world_size, _train, *args, has_group=False)
        if source is not None and spec.get("checkpoint"):
            assert_equal_bits(source, f"{folder}/loaded")
        source = f"{folder}/trained"
    assert_close(states, length)
    check_written(tmp_path / "0" / "trained")
    saved, exported = tmp_path / "0" / "trained", tmp_path / "exported.safetensors"
    assert main(["export", str(saved), str(exported)]) == 0
    weights = open_checkpoint(exported)["state_dict"]
    for name, value in open_checkpoint(saved)["state_dict"].items():
        assert torch.equal(weights[name].clone(), value.clone()), name


def check_written(folder):
    """Asserts that every element is written once; two replicas write half of each shard."""
    metadata = FileSystemReader(folder).read_metadata()
    for name, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            seen = torch.zeros(entry.size, dtype=torch.int)
            for chunk in entry.chunks:
                box = zip(chunk.offsets, chunk.sizes, strict=True)
                seen[tuple(slice(start, start + size) for start, size in box)] += 1
            assert (seen == 1).all(), name
    numel = [0] * 4
    for index, place in metadata.storage_data.items():
        entry = metadata.state_dict_metadata[index.fqn]
        chunks = {chunk.offsets: chunk.sizes for chunk in getattr(entry, "chunks", ())}
        numel[int(place.relative_path.split("_")[2])] += chunks.get(
            index.offset, torch.Size([0])
        ).numel()
    for shard in range(2):
        assert numel[shard] == pytest.approx(numel[shard + 2], rel=0.2), numel
