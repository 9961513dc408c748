"""Requeueing after SLURM's signal: where ranks stop, what they save, and that no step is repeated.

srun's variables and `scontrol` are stand-ins here; tests/slurm has the real ones.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DistributedSampler

from examples.stdlib_text import ResumableLoader
from lightning_zero.strategy.requeue import RequeuedExit, _check_owner, _wait_until_seen
from tests.launch.test_slurm_layout import as_srun
from tests.support import ranks
from tests.support.cells import slow_but
from tests.support.fitting import arrays
from tests.support.models import GPTModule
from tests.support.warm import run_ranks

SIGUSR1, SIGTERM = signal.SIGUSR1, signal.SIGTERM


class Module(GPTModule):
    def train_dataloader(self):
        dataset = self.dataset(2 * self.num_batches * self.trainer.world_size)
        sampler = DistributedSampler(dataset, self.trainer.world_size, self.global_rank)
        return ResumableLoader(dataset, batch_size=2, sampler=sampler)

    val_dataloader = train_dataloader


class Signalled(Callback):
    """Sends the signal to one rank in the middle of a batch; each rank records its events."""

    def __init__(self, at, signum, on_rank):
        self.at, self.signum, self.on_rank = at, signum, on_rank
        self.seen, self.losses = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen.append(("batch", trainer.current_epoch, batch_idx, trainer.global_step))
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.at:
            self.at = None
            if trainer.global_rank == self.on_rank:
                os.kill(os.getpid(), self.signum)

    def on_train_batch_end(self, trainer, module, *_):
        self.losses.append(module.losses[-1])

    def on_validation_end(self, trainer, *_):
        self.seen.append(("validation", trainer.current_epoch, trainer.global_step))

    def on_train_epoch_end(self, trainer, *_):
        self.seen.append(("epoch", trainer.current_epoch, trainer.global_step))

    def on_train_end(self, trainer, *_):
        self.seen.append(("end", trainer.current_epoch, trainer.global_step))


def write_scontrol(state="RUNNING", error=""):
    script = Path("bin", "scontrol")
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        f'#!/bin/sh\necho "$@" >> asked\n[ "$1" = show ] && echo "JobState={state} Reason=None"\n'
        f'[ "$1" = show ] || [ -z "{error}" ] || {{ echo "{error}" >&2; exit 1; }}\n'
    )
    script.chmod(0o755)
    os.environ["PATH"] = f"{script.parent.absolute()}:{os.environ['PATH']}"


def run(rank, witness, options, *, restarts=0):
    os.environ.pop("LIGHTNING_ZERO_NUM_FITS", None)  # as in a new process
    os.environ["SLURM_RESTART_COUNT"] = str(restarts)
    if options.get("plugins") == "async":
        options = {**options, "plugins": [AsyncCheckpointIO()]}
    seed_everything(7, verbose=False)
    module = Module(ranks=2, scheduler="per step", num_batches=4)
    trainer = as_srun(
        rank,
        devices=2,
        num_tasks=2,
        callbacks=[witness],
        use_distributed_sampler=False,
        **{"max_epochs": 3, "limit_val_batches": 1.0, **options},
    )
    try:
        trainer.fit(module)
    except RequeuedExit as error:
        return error
    return arrays(module.state_dict())


def _interrupted_twice(rank, world_size, at, options, signum):
    if rank == 0:
        write_scontrol()
    expected = Signalled(None, None, None)
    state = run(rank, expected, options)
    handlers = [signal.getsignal(s) for s in (SIGUSR1, SIGTERM)]
    seen, losses, saved_at = [], [], []
    for restarts, batch in enumerate((*at, None)):
        witness = Signalled(batch, signum, on_rank=1)
        outcome = run(rank, witness, options, restarts=restarts)
        assert isinstance(outcome, RequeuedExit) == (batch is not None)
        assert [signal.getsignal(s) for s in (SIGUSR1, SIGTERM)] == handlers
        if batch is not None:
            assert outcome.code == 143
            assert [path.name for path in Path().glob("*.ckpt")] == ["requeue-1-0.ckpt"]
        seen += witness.seen
        losses += witness.losses
        saved_at.append(witness.seen[-1])
    assert seen == expected.seen
    assert losses == expected.losses
    for name, value in state.items():
        np.testing.assert_array_equal(outcome[name], value, err_msg=name)
    assert rank > 0 or not list(Path().glob("*.ckpt"))  # rank 0 removes it
    return saved_at[:-1]


EPOCHS = {"max_epochs": 3}
STEPS = {"max_epochs": None, "max_steps": 11}


@pytest.mark.parametrize(
    ("at", "options", "last_seen"),
    [
        ((1, 6), EPOCHS | {"plugins": "async"}, ["batch", "batch"]),
        *slow_but(
            [],
            [
                ((1, 6), EPOCHS, ["batch", "batch"]),
                ((3, 7), EPOCHS, ["epoch", "epoch"]),  # the last batch of an epoch
                ((3, 7), STEPS, ["epoch", "epoch"]),
                ((1, 6), STEPS, ["batch", "batch"]),
                ((1, 3), EPOCHS | {"val_check_interval": 2}, ["validation", "epoch"]),
                ((1, 5), EPOCHS | {"accumulate_grad_batches": 2}, ["batch", "batch"]),
                ((0, 5), EPOCHS | {"accumulate_grad_batches": 4}, ["epoch", "epoch"]),
                ((0, 1), EPOCHS | {"limit_train_batches": 1}, ["epoch", "epoch"]),
            ],
        ),
    ],
    ids=str,
)
def test_a_run_that_is_requeued_twice_does_everything_once(at, options, last_seen):
    for saved_at in run_ranks(2, _interrupted_twice, at, options, SIGUSR1, has_group=False):
        assert [event[0] for event in saved_at] == last_seen


@pytest.mark.slow
def test_sigterm_of_a_preemption_does_the_same():
    run_ranks(2, _interrupted_twice, (1, 6), EPOCHS, SIGTERM, has_group=False)


def _cancelled(rank, world_size):
    if rank == 0:
        write_scontrol(state="CANCELLED")
    outcome = run(rank, Signalled(2, SIGTERM, on_rank=0), {})
    return outcome.code, Path("asked").read_text() if rank == 0 else ""


def test_sigterm_of_a_cancelled_job_saves_and_does_not_requeue():
    (code, asked), (other, _) = run_ranks(2, _cancelled, has_group=False)
    assert code == other == 143
    assert asked == "show job -o 1\n"


def _not_queued(rank, world_size):
    if rank == 0:
        write_scontrol(error="Requested operation is presently disabled")
    # Python returns None for handlers that were installed before it started.
    signal.getsignal = lambda signum: None
    witness = Signalled(2, SIGUSR1, on_rank=0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(rank, witness, {})
    return len(witness.losses), [str(warning.message) for warning in seen]


def test_a_job_that_cannot_be_requeued_logs_the_reason_and_trains_on():
    (num_losses, warned), (other, _) = ranks.run_ranks(2, _not_queued, has_group=False)
    assert num_losses == other == 12
    (warning,) = [text for text in warned if "not requeued" in text]
    assert "scontrol requeue 1: Requested operation is presently disabled" in warning
    assert "continues to train" in warning


def _on_another_node(rank, world_size):
    if rank == 0:
        write_scontrol()
    first = Signalled(1, SIGUSR1, on_rank=0)
    run(rank, first, {})
    # The file system of rank 1's node does not show the file yet: it must not start from scratch.
    options = {} if rank == 0 else {"default_root_dir": f"{os.getcwd()}/late"}
    second = Signalled(None, None, None)
    run(rank, second, options, restarts=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(rank, Signalled(None, None, None), {"max_epochs": 1}, restarts=2)
    texts = [str(warning.message) for warning in seen]
    return len(first.losses + second.losses), [t for t in texts if "SLURM restarted this job" in t]


@pytest.mark.slow
def test_ranks_go_on_from_what_rank_0_sees_and_it_warns_where_there_is_nothing():
    (num_losses, warned), (other, none) = run_ranks(2, _on_another_node, has_group=False)
    assert num_losses == other == 12
    (text,) = warned
    assert "SLURM_RESTART_COUNT=2" in text
    assert "requeue-1-0.ckpt does not exist: fit starts from scratch" in text
    assert not none


def test_a_file_that_another_node_has_written_is_waited_for(tmp_path):
    path = tmp_path / "requeue-1-0.ckpt"
    timer = threading.Timer(0.5, path.touch)
    timer.start()
    _wait_until_seen(path, 30)
    assert path.exists()
    timer.join()
    _wait_until_seen(tmp_path / "never", 0.1)


def test_the_exit_after_a_save_needs_no_argument_of_lightning(monkeypatch):
    def init(self):  # as in Lightning 2.7
        SystemExit.__init__(self)

    monkeypatch.setattr(SIGTERMException, "__init__", init, raising=False)
    assert RequeuedExit().code == 143


def _second_fit(rank, world_size):
    if rank == 0:
        write_scontrol()
    os.environ |= {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}
    run(rank, Signalled(None, None, None), {})
    os.environ["LIGHTNING_ZERO_NUM_FITS"] = "1"
    seed_everything(7, verbose=False)
    trainer = as_srun(
        rank, devices=2, num_tasks=2, callbacks=[Signalled(1, SIGUSR1, 0)], max_epochs=3
    )
    with pytest.raises(RequeuedExit):
        trainer.fit(Module(ranks=2))
    first = Signalled(None, None, None)
    run(rank, first, {}, restarts=1)
    return len(first.losses), [p.name for p in Path().glob("*.ckpt")], Path("asked").read_text()


@pytest.mark.slow
def test_the_first_fit_of_a_job_does_not_take_up_what_the_second_saved():
    for num_losses, files, asked in run_ranks(2, _second_fit, has_group=False):
        assert num_losses == 12
        assert files == ["requeue-1-1.ckpt"]
        assert asked == "requeue 77_3\n"


@pytest.mark.parametrize("kind", ["of another user", "a link"])
def test_only_what_this_user_has_saved_is_taken_up(tmp_path, kind):
    folder = tmp_path / "requeue-1-0.ckpt"
    folder.mkdir()
    own = folder / "meta.pt"
    own.touch()
    _check_owner(folder)
    _check_owner(tmp_path / "nothing")
    if kind == "a link":
        (folder / "link").symlink_to(own)
        with pytest.raises(PermissionError, match="it is a link"):
            _check_owner(folder)
        return
    if os.getuid():
        pytest.skip("needs root, to give a file to another user")
    os.chown(own, 1234, -1)
    with pytest.raises(PermissionError, match=r"belongs to user 1234.*meta\.pt"):
        _check_owner(folder)
