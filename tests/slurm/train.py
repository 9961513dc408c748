"""Trains under srun: python train.py STRATEGY DEVICES NODES FOLDER [KEY=VALUE ...].

Every rank saves what it saw of the training into FOLDER when it ends. Where FOLDER/pause-N exists,
rank 0 waits at step N until the file is gone, so that a test can send its signal there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import tests.support.metrics  # noqa: F401, first: it shortens the import of Lightning # isort: skip
import numpy as np
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader, DistributedSampler

from examples.stdlib_text import ResumableLoader
from lightning_zero.observe.loggers import ContinuedCSVLogger
from tests.support.fitting import arrays, make_trainer, settings
from tests.support.models import GPTModule


class Module(GPTModule):
    """A module whose batches continue where a checkpoint was saved."""

    def train_dataloader(self):
        world_size = self.trainer.world_size
        dataset = self.dataset(self.num_batches * self.batch_size * world_size)
        sampler = DistributedSampler(dataset, world_size, self.global_rank, shuffle=True)
        return ResumableLoader(dataset, batch_size=self.batch_size, sampler=sampler)

    def val_dataloader(self):
        return DataLoader(self.dataset(8), batch_size=2)


class Notes(Callback):
    """Records events of each rank over all runs, as lines of a file."""

    def __init__(self, folder):
        self.folder = folder

    def note(self, trainer, what):
        with (self.folder / f"notes-{trainer.global_rank}").open("a") as file:
            file.write(f"{what} {trainer.current_epoch} {trainer.global_step}\n")

    def on_train_batch_start(self, trainer, *_):
        if trainer.is_global_zero:
            pause = self.folder / f"pause-{trainer.global_step}"
            while pause.exists():
                (self.folder / f"paused-{trainer.global_step}").touch()
                time.sleep(0.05)
        self.note(trainer, "batch")

    def on_train_batch_end(self, trainer, module, *_):
        module.log("loss", module.losses[-1])
        with (self.folder / f"losses-{trainer.global_rank}").open("a") as file:
            file.write(f"{module.losses[-1]!r}\n")

    def on_validation_end(self, trainer, *_):
        self.note(trainer, "validation")

    def on_train_epoch_end(self, trainer, *_):
        self.note(trainer, "epoch")

    def on_train_start(self, trainer, *_):
        self.note(trainer, "start")

    def on_train_end(self, trainer, *_):
        self.note(trainer, "end")


def train(strategy, devices, nodes, folder, **options):
    torch.set_num_threads(1)
    seed_everything(7, verbose=False)
    stages = {f"zero{stage}": settings(stage) for stage in range(4)}
    trainer = make_trainer(
        stages.get(strategy, strategy),
        devices=devices,
        num_nodes=nodes,
        default_root_dir=folder,
        callbacks=[Notes(folder)],
        use_distributed_sampler=False,
        logger=ContinuedCSVLogger(folder, name="csv", version=""),
        log_every_n_steps=1,
        **{"max_epochs": 2, "limit_val_batches": 1.0, **options},
    )
    module = Module(ranks=devices * nodes, scheduler="per step", num_batches=6)
    trainer.fit(module)
    state = arrays(module.state_dict())
    np.savez(folder / f"rank{trainer.global_rank}.npz", **state)


def main():
    strategy, devices, nodes, folder = sys.argv[1], *map(int, sys.argv[2:4]), Path(sys.argv[4])
    options = {key: json.loads(value) for key, _, value in (w.partition("=") for w in sys.argv[5:])}
    train(strategy, devices, nodes, folder, **options)


if __name__ == "__main__":
    main()
