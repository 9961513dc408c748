"""Crashes are simulated after each file operation of a save: a complete checkpoint remains."""

import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils._pytree import tree_flatten_with_path

from lightning_zero import OffloadConfig, newest_checkpoint, open_checkpoint
from lightning_zero.checkpoint.atomic import delete_leftovers
from lightning_zero.checkpoint.source import find_damage
from tests.support.disk_crashes import Recording, crashes, operations_in, read_tree, write_tree
from tests.support.fitting import make_trainer, settings
from tests.support.models import MLPModule
from tests.support.ranks import run_ranks

SMALL = {"nvme_path": ".", "buffer_count": 3, "buffer_size": 2**16}
NVME = {name: OffloadConfig("nvme", **SMALL) for name in ("offload_optimizer", "offload_param")}


def content(path):
    """Content of a checkpoint, as numbers and bytes."""
    assert find_damage(path) == []
    leaves, _ = tree_flatten_with_path(open_checkpoint(path))
    return [
        (str(key), leaf.numpy(force=True).tobytes() if isinstance(leaf, torch.Tensor) else leaf)
        for key, leaf in leaves
        if "loops" not in str(key) and "lightning_zero'" not in str(key)
    ]


class Saving(Callback):
    """Saves to `path` when training ends, and records the file operations.

    Args:
        path: Path of the checkpoint.
        number: Number of this save; the first one is not recorded.
        drops: Name of the previous checkpoint, which is deleted after this save.
    """

    def __init__(self, path, number, drops):
        self.path, self.number, self.drops = Path(path), number, drops

    def on_train_end(self, trainer, pl_module):
        strategy, folder = trainer.strategy, self.path.parent
        strategy.barrier()
        if self.number and trainer.is_global_zero and folder.exists():
            shutil.copytree(folder, "before")
        strategy.barrier()
        recording = Recording(folder.parent) if self.number else None
        trainer.save_checkpoint(self.path)
        if self.drops:
            strategy.remove_checkpoint(folder / self.drops)
        strategy.finish_saving()
        strategy.barrier()
        if recording is not None:
            recording.save(Path(f"rank{trainer.global_rank}"))


def _save_twice(rank, world_size, specs, folder, names):
    """Saves once for each of `specs`, with different weights."""
    for number, spec in enumerate(specs):
        if spec is None:
            continue
        seed_everything(7 + number, verbose=False)
        drops = names[0] if number and names[0] != names[1] else None
        callback = Saving(f"{folder}/{names[number]}", number, drops)
        make_trainer(spec, callbacks=[callback]).fit(MLPModule(ranks=world_size))
    if rank == 0 and Path("before").exists():
        shutil.move("before", f"{folder}-before")
    return Path(f"rank{rank}").read_bytes()


def _check_crashes(tmp_path, specs, *, names=("a.ckpt", "a.ckpt"), num_random=3):
    """Records the save with `specs[1]` over that with `specs[0]`, and checks all crashes.

    Returns:
        Number of crashes.
    """
    folder = tmp_path / "top" / "run"
    logs = run_ranks(2, _save_twice, specs, str(folder), names, has_group=False)
    for rank, log in enumerate(logs):
        (tmp_path / f"log{rank}").write_bytes(log)
    before = tmp_path / "top" / "run-before"
    new = content(folder / names[1])
    old = content(before / names[0]) if before.exists() else None
    operations = operations_in([tmp_path / "log0", tmp_path / "log1"])
    tree = {"run": read_tree(before)} if before.exists() else {}
    num_crashes = 0
    for words, left in crashes(tree, operations, num_random):
        num_crashes += 1
        shutil.rmtree(tmp_path / "crash", ignore_errors=True)
        write_tree(left, tmp_path / "crash")
        where = tmp_path / "crash" / "run"
        delete_leftovers(where)  # like a run with ckpt_path="last"
        complete = [
            content(where / name) for name in dict.fromkeys(names) if (where / name).exists()
        ]
        found = newest_checkpoint(where)
        assert all(one in (old, new) for one in complete), words
        assert bool(complete) or old is None, words
        assert (found is None) == (not complete), words
    assert new in complete, words  # the previous one may still exist
    return num_crashes


def test_every_crash_of_a_sharded_save_leaves_the_old_or_the_new_checkpoint(tmp_path):
    num_crashes = _check_crashes(tmp_path, [settings(3, checkpoint="sharded")] * 2, num_random=1)
    assert num_crashes > 30


FORMS = {
    "full": settings(1, checkpoint="full"),
    "sharded": settings(2, checkpoint="sharded"),
    "async": settings(3, checkpoint="sharded", async_save=True),
    "nvme": settings(3, checkpoint="sharded", **NVME),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("full", "full"),
        ("async", "async"),
        ("nvme", "nvme"),
        ("full", "sharded"),
        ("full", "async"),
        ("sharded", "full"),
        ("sharded", "sharded"),
        (None, "sharded"),
        (None, "full"),
    ],
)
def test_every_crash_of_every_save_leaves_the_old_or_the_new(before, after, tmp_path):
    _check_crashes(tmp_path, [FORMS.get(before), FORMS[after]], num_random=8)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["full", "sharded", "async"])
def test_every_crash_of_a_save_that_drops_the_one_before_leaves_one_of_them(form, tmp_path):
    _check_crashes(tmp_path, [FORMS[form]] * 2, names=("a.ckpt", "b.ckpt"), num_random=8)
