"""SLURM's layout variables are compared with the Trainer; srun itself is not started."""

from __future__ import annotations

import os

import pytest

from tests.support.fitting import make_trainer, settings
from tests.support.models import MLPModule
from tests.support.ranks import run_ranks


def as_srun(rank, *, devices, num_tasks, **options):
    """A Trainer that sees the variables that srun sets, instead of torchrun's."""
    for name in ("TORCHELASTIC_RUN_ID", "GROUP_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ |= {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": str(num_tasks),
        "SLURM_NTASKS_PER_NODE": str(num_tasks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_NODELIST": "127.0.0.1",
    }
    return make_trainer(settings(3), devices=devices, **options)


def _fit(rank, world_size):
    trainer = as_srun(rank, devices=2, num_tasks=2)
    trainer.fit(MLPModule(ranks=2))
    return type(trainer.strategy.cluster_environment).__name__, trainer.world_size


def test_ranks_started_by_srun_train_together():
    assert run_ranks(2, _fit, has_group=False) == [("SLURMEnvironment", 2)] * 2


def _fit_with_wrong_layout(rank, world_size):
    with pytest.raises(ValueError, match=r"#SBATCH --ntasks-per-node=4"):
        as_srun(rank, devices=4, num_tasks=2).fit(MLPModule(ranks=4))


def test_another_number_of_tasks_than_devices_is_refused():
    run_ranks(2, _fit_with_wrong_layout, has_group=False)
