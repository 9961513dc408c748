"""Failures while a sharded checkpoint is saved: the old one and the training survive."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import threading
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.checkpoint.checksums import find_listed_damage
from lightning_zero.checkpoint.dcp_writer import ShardedSave
from lightning_zero.strategy import saving
from tests.support.fitting import arrays, make_trainer, run_once, settings
from tests.support.models import GPTModule, MLPModule
from tests.support.ranks import RankError, run_ranks
from tests.support.waits import Pace


def sharded(stage, **options):
    return settings(stage, checkpoint="sharded", **options)


@pytest.fixture
def small_disk(tmp_path):
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"a small disk must be mounted, which needs root: {done.stderr.decode()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


# -------------------------------------------------------------------- a read-only disk


def _load_from(rank, world_size, path):
    trainer = make_trainer(sharded(1))
    try:
        trainer.fit(MLPModule(ranks=world_size), ckpt_path=path)
    except OSError as error:
        return error.errno


def test_what_cannot_be_recovered_is_an_error_on_all_ranks(small_disk):
    (small_disk / ".a.ckpt.zero-replaced").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    errors = run_ranks(2, _load_from, str(small_disk / "a.ckpt"), has_group=False)
    assert errors == [errno.EROFS] * 2


# -------------------------------------------------------------------- short memory


def test_memory_that_is_short_on_one_rank_is_an_error_on_all(tmp_path):
    run_ranks(2, _lack_memory, str(tmp_path), has_group=False)
    assert os.listdir(tmp_path) == []


def _lack_memory(rank, world_size, folder):
    def lack(*args, **options):
        raise MemoryError("no memory")

    if rank == 1:
        ShardedSave.snapshot = lack
    trainer = make_trainer(sharded(1, async_save=True), callbacks=[SavingOnce(folder)])
    with pytest.raises(MemoryError, match="no memory"):
        trainer.fit(MLPModule(ranks=world_size))


def test_where_one_rank_has_no_memory_for_its_copy_training_waits_for_the_save(tmp_path):
    run_ranks(2, _wait_for_save, str(tmp_path), has_group=False)


def _wait_for_save(rank, world_size, folder):
    if rank == 1:
        saving.available_memory_bytes = lambda: 0
    callback = SavingOnce(folder)
    trainer = make_trainer(sharded(1, async_save=True), callbacks=[callback])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(MLPModule(ranks=world_size))
    assert callback.is_complete
    warned = [w for w in caught if "training waits for this save" in str(w.message)]
    assert len(warned) == (rank == 0)


class SavingOnce(Callback):
    def __init__(self, folder):
        self.path = Path(folder) / "a.ckpt"

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            trainer.save_checkpoint(self.path)
            self.is_complete = self.path.is_dir()


# -------------------------------------------------------------------- a full disk


class FillingDisk(Callback):
    """Saves in every batch; the disk is full in the second and third.

    Args:
        folder: Folder on the disk.
        is_async: Whether errors are raised by the next save.
    """

    def __init__(self, folder, is_async):
        self.folder = Path(folder)
        self.is_async = is_async
        self.errors = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        filler = self.folder / "filler"
        if trainer.is_global_zero:
            if batch_idx == 1:
                trainer.strategy.finish_saving()
                free = os.statvfs(self.folder)
                filler.write_bytes(bytes((free.f_bavail - 20) * free.f_frsize))
            if batch_idx == 3:
                filler.unlink()
        trainer.strategy.barrier()
        try:
            trainer.save_checkpoint(self.folder / "a.ckpt")
        except OSError as error:
            self.errors.append((error.errno, str(error)))
        trainer.strategy.barrier()
        if not self.is_async:
            names = {p.name for p in self.folder.iterdir()} - {"filler"}
            assert names == {"a.ckpt"}, names
            expected = 1 if batch_idx in (1, 2) else batch_idx + 1
            assert open_checkpoint(self.folder / "a.ckpt")["global_step"] == expected
            assert find_listed_damage(self.folder / "a.ckpt") == []


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("is_async", [False, True])
def test_a_full_disk_is_an_error_that_harms_nothing(is_async, small_disk):
    spec = sharded(3, async_save=is_async)
    ours = run_ranks(2, _fill_disk, spec, str(small_disk), is_async, has_group=False)
    reference = run_once(2, _fit_gpt, settings(3))
    for (state, errors), expected in zip(ours, reference, strict=True):
        assert errors == ours[0][1]
        # An asynchronous save fails in the next save, so both full disks raise one error.
        assert len(errors) == (1 if is_async else 2)
        for code, text in errors:
            assert code == errno.ENOSPC
            assert "was not written: it needs" in text
            assert str(small_disk / "a.ckpt") in text
        for name, value in expected.items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)
    assert os.listdir(small_disk) == ["a.ckpt"]
    assert open_checkpoint(small_disk / "a.ckpt")["global_step"] == 4
    assert find_listed_damage(small_disk / "a.ckpt") == []


def test_a_full_disk_is_named_although_another_rank_is_interrupted(small_disk):
    interrupted, full = run_ranks(2, _fill_and_interrupt, str(small_disk), has_group=False)
    assert interrupted == "KeyboardInterrupt"
    assert "was not written: it needs" in full


def _fill_and_interrupt(rank, world_size, folder):
    trainer = make_trainer(sharded(3), limit_train_batches=1)
    trainer.fit(GPTModule(ranks=world_size))
    trainer.strategy.barrier()
    if rank == 0:

        def interrupt(*args):
            raise KeyboardInterrupt

        ShardedSave._write = interrupt
        with open(f"{folder}/other", "wb") as file, suppress(OSError):
            file.write(bytes(2**21))
    trainer.strategy.barrier()
    try:
        trainer.save_checkpoint(f"{folder}/a.ckpt")
    except (OSError, KeyboardInterrupt) as error:
        return str(error) or type(error).__name__


def _fill_disk(rank, world_size, spec, folder, is_async):
    seed_everything(7, verbose=False)
    module = GPTModule(ranks=world_size, num_batches=5)
    callback = FillingDisk(folder, is_async)
    make_trainer(spec, callbacks=[callback], limit_train_batches=4).fit(module)
    return arrays(module.state_dict()), callback.errors


def _fit_gpt(rank, world_size, spec):
    seed_everything(7, verbose=False)
    module = GPTModule(ranks=world_size, num_batches=5)
    make_trainer(spec, limit_train_batches=4).fit(module)
    return arrays(module.state_dict())


# -------------------------------------------------------------------- killed at any moment


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_kills", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_after_a_kill_at_any_moment_the_newest_complete_checkpoint_loads(num_kills, tmp_path):
    generator = random.Random(num_kills)
    names = ["kept.ckpt", "same.ckpt"]
    for number in range(num_kills):
        folder = tmp_path / str(number)
        folder.mkdir()
        spec = sharded(3, async_save=number % 2 == 1)
        with pytest.raises(RankError, match=r"died with exit code -9|did not return|Traceback"):
            run_ranks(
                2,
                _save_until_killed,
                spec,
                str(folder),
                generator.uniform(0.0, 0.6),
                number % 3,
                has_group=False,
                timeout_s=30,
            )
        reported = int((folder / "reported").read_text())
        newest = max(
            open_checkpoint(path)["global_step"]
            for path in folder.glob("*.ckpt")
            if path.name in names
        )
        assert newest >= reported
        for path in folder.glob("*.ckpt"):
            assert find_listed_damage(path) == []
        steps = run_ranks(2, _load_all, str(folder), has_group=False)
        assert steps[0] == steps[1]


class SavingWithoutEnd(Callback):
    """Overwrites one checkpoint again and again; another name has the first checkpoint."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        name = "same.ckpt" if batch_idx else "kept.ckpt"
        trainer.save_checkpoint(self.folder / name)
        if trainer.is_global_zero and batch_idx:
            (self.folder / "reported.tmp").write_text(str(trainer.global_step - 1))
            os.replace(self.folder / "reported.tmp", self.folder / "reported")


def _save_until_killed(rank, world_size, spec, folder, delay_s, victim):
    """Kills one rank, or both (victim 2), `delay_s` after the third checkpoint."""
    if victim in (rank, 2):
        threading.Thread(target=_kill_later, args=(folder, delay_s), daemon=True).start()
    seed_everything(7, verbose=False)
    module = GPTModule(ranks=world_size, num_batches=10_000)
    make_trainer(spec, callbacks=[SavingWithoutEnd(folder)]).fit(module)


def _kill_later(folder, delay_s):
    while True:
        with suppress(FileNotFoundError, ValueError):
            if int(Path(folder, "reported").read_text()) >= 3:
                break
        time.sleep(0.005)
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGKILL)


def _load_all(rank, world_size, folder):
    steps = []
    for path in sorted(Path(folder).glob("*.ckpt")):
        trainer = make_trainer(sharded(2), max_steps=1)
        trainer.fit(GPTModule(ranks=world_size), ckpt_path=path)
        steps.append(trainer.global_step)
    # A new save to a name with leftovers of a crash.
    trainer.save_checkpoint(Path(folder) / "same.ckpt")
    assert {p.name for p in Path(folder).iterdir()} == {"kept.ckpt", "same.ckpt", "reported"}
    return steps


# -------------------------------------------------------------------- errors in the background


class FailingLater(Callback):
    """Makes the second asynchronous save fail: a file has the name of its folder."""

    def __init__(self, folder, at_end):
        self.folder = Path(folder)
        self.at_end = at_end

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == (3 if self.at_end else 1):
            trainer.save_checkpoint(self.folder / "file" / "a.ckpt")
        elif batch_idx == 0:
            trainer.save_checkpoint(self.folder / "good.ckpt")
        elif batch_idx == 2 and not self.at_end:
            with pytest.raises(OSError, match="file"):
                trainer.save_checkpoint(self.folder / "after.ckpt")
            assert (self.folder / "after.ckpt").is_dir()  # complete already
        elif not self.at_end:
            trainer.save_checkpoint(self.folder / "last.ckpt")


def test_an_error_in_the_background_surfaces_at_the_next_save_which_is_made_all_the_same(tmp_path):
    (tmp_path / "file").touch()
    run_ranks(2, _fail_later, str(tmp_path), False, has_group=False)
    assert open_checkpoint(tmp_path / "good.ckpt")["global_step"] == 1
    assert open_checkpoint(tmp_path / "after.ckpt")["global_step"] == 3
    assert open_checkpoint(tmp_path / "last.ckpt")["global_step"] == 4


def test_an_error_in_the_background_of_one_rank_is_named_with_its_cause_on_every_rank(tmp_path):
    (other, warned), (own, _) = run_ranks(2, _fail_on_one_rank, str(tmp_path), has_group=False)
    assert own == "the disk is worn out"
    (warning,) = warned
    for text in (other, warning):
        assert "rank 1 could not" in text
        assert own in text
    assert open_checkpoint(tmp_path / "after.ckpt")["global_step"] == 2


class SavingTwice(Callback):
    def __init__(self, folder):
        self.folder = Path(folder)
        self.errors = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            trainer.save_checkpoint(self.folder / "a.ckpt")
        elif batch_idx == 1:
            try:
                trainer.save_checkpoint(self.folder / "after.ckpt")
            except Exception as error:
                self.errors.append(str(error))


def _fail_on_one_rank(rank, world_size, folder):
    run = ShardedSave.run

    def run_and_fail(save):
        ShardedSave.run = run
        run(save)
        raise RuntimeError("the disk is worn out")

    if rank == 1:
        ShardedSave.run = run_and_fail
    callback = SavingTwice(folder)
    trainer = make_trainer(sharded(1, async_save=True), callbacks=[callback])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(MLPModule(ranks=world_size))
    (error,) = callback.errors
    texts = [str(w.message) for w in caught]
    return error, [text for text in texts if "previous asynchronous save" in text]


@pytest.mark.slow
def test_an_error_in_the_background_surfaces_when_fit_ends_at_the_latest(tmp_path):
    (tmp_path / "file").touch()
    run_ranks(2, _fail_at_end, str(tmp_path), has_group=False)


def _fail_at_end(rank, world_size, folder):
    with pytest.raises(OSError, match="file"):
        _fail_later(rank, world_size, folder, True)
    _fit_gpt(rank, world_size, settings(3))


def _fail_later(rank, world_size, folder, at_end):
    seed_everything(7, verbose=False)
    module = MLPModule(ranks=world_size)
    make_trainer(sharded(3, async_save=True), callbacks=[FailingLater(folder, at_end)]).fit(module)


class DroppingPredecessor(Callback):
    """After each save, deletes the previous one, like ModelCheckpoint with save_top_k=1."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")
        if batch_idx:
            trainer.strategy.remove_checkpoint(self.folder / f"{batch_idx - 1}.ckpt")
        trainer.strategy.barrier()
        names = [p.name for p in self.folder.iterdir() if not p.name.startswith(".")]
        self.seen.append(len(names))


@pytest.mark.slow
def test_a_checkpoint_is_not_removed_before_its_successor_is_complete(tmp_path):
    results = run_ranks(2, _drop_predecessor, str(tmp_path), has_group=False)
    assert all(count >= 1 for count in results[0][1:])
    assert [p.name for p in tmp_path.iterdir()] == ["3.ckpt"]


def _drop_predecessor(rank, world_size, folder):
    callback = DroppingPredecessor(folder)
    spec = sharded(3, async_save=True)
    make_trainer(spec, callbacks=[callback]).fit(GPTModule(ranks=world_size))
    return callback.seen


@pytest.mark.default_cases("False")
@pytest.mark.parametrize("is_async", [True, False])
def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(is_async, small_disk):
    old = small_disk / "old.ckpt"
    old.mkdir()
    subprocess.run(["mount", "--bind", str(old), str(old)], check=True)  # busy
    try:
        run_ranks(2, _drop_busy, str(small_disk), is_async, has_group=False)
    finally:
        subprocess.run(["umount", "-l", str(old)], check=True)
    assert open_checkpoint(small_disk / "0.ckpt")["global_step"] == 1
    assert old.is_dir()


class DroppingBusy(Callback):
    def __init__(self, folder):
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            trainer.save_checkpoint(self.folder / "0.ckpt")
            trainer.strategy.remove_checkpoint(self.folder / "old.ckpt")


def _drop_busy(rank, world_size, folder, is_async):
    trainer = make_trainer(sharded(1, async_save=is_async), callbacks=[DroppingBusy(folder)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(MLPModule(ranks=world_size))
    assert any("could not be deleted" in str(w.message) for w in caught) == (rank == 0)


def test_a_save_in_flight_ends_although_training_fails(tmp_path):
    run_ranks(2, _fail_in_training, str(tmp_path), has_group=False)
    assert open_checkpoint(tmp_path / "a.ckpt")["global_step"] == 1
    assert open_checkpoint(tmp_path / "failed" / "on_exception.ckpt")["global_step"] == 2
    for path in (tmp_path / "a.ckpt", tmp_path / "failed" / "on_exception.ckpt"):
        assert find_listed_damage(path) == []


class Failing(MLPModule):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.trainer.save_checkpoint(self.folder / "a.ckpt")
        if batch_idx == 2:
            raise ArithmeticError("out of luck")
        return super().training_step(batch, batch_idx)


def _fail_in_training(rank, world_size, folder):
    module = Failing(ranks=world_size)
    module.folder = Path(folder)
    callbacks = [OnExceptionCheckpoint(module.folder / "failed"), ModelCheckpoint(save_top_k=0)]
    options = {"callbacks": callbacks, "enable_checkpointing": True}
    with pytest.raises(ArithmeticError, match="out of luck"):
        make_trainer(sharded(3, async_save=True), **options).fit(module)


def test_an_exception_on_one_rank_between_saves_does_not_leave_the_others_waiting(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankError, match="ArithmeticError: out of luck"):
        run_ranks(2, _fail_alone, str(tmp_path), has_group=False)
    assert time.monotonic() - start < 30


class FailingAlone(MLPModule):
    """One rank fails when the others start to save."""

    def training_step(self, batch, batch_idx):
        if batch_idx in (1, 2):
            if batch_idx == 2 and self.global_rank == 1:
                raise ArithmeticError("out of luck")
            self.trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")
        return super().training_step(batch, batch_idx)


def _fail_alone(rank, world_size, folder):
    Pace()
    module = FailingAlone(ranks=world_size)
    module.folder = Path(folder)
    spec = sharded(3, timeout=timedelta(seconds=20))
    make_trainer(spec).fit(module)
