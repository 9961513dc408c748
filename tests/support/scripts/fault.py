"""Trains a tiny model until a fault: fault.py FAULT PLACE WORKERS STRATEGY RANK DEVICES FOLDER.

Just before the fault its time is left in FOLDER/fault; each rank leaves the batches it has begun.
FAULT "none" trains to the end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_zero import ZeroStrategy

FAULTY_BATCH = 1  # of the first epoch; the first forward is a place of its own
FAULTY_FETCH = 4  # batch that a worker fetches while the first ones are trained on
NUM_BATCHES = 6
BATCH_SIZE = 2
FAULTY_SAVE = 3  # call of torch.save within a checkpoint: the file of this rank is begun


@dataclass
class Plan:
    """What goes wrong, where, and on which rank."""

    fault: str
    place: str
    rank: int
    folder: Path

    def fire(self) -> None:
        """The fault, once."""
        flag = self.folder / "fault"
        if self.fault == "none" or flag.exists():
            return
        draft = self.folder / "fault.draft"
        draft.write_text(repr(time.monotonic()))
        draft.rename(flag)
        if self.fault == "exception":
            raise ArithmeticError("out of luck")
        if self.fault == "sys.exit":
            sys.exit(3)
        if self.fault == "os._exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, self.fault))


class FireInBackward(torch.autograd.Function):
    """Calls something when the gradient passes."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


class Block(nn.Module):
    """A layer; what is called in the middle of its forward and of its backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.in_forward = self.in_backward = lambda: None

    def forward(self, x):
        x = self.first(x).relu()
        self.in_forward()
        return self.second(FireInBackward.apply(x, lambda: self.in_backward()))


class FaultySGD(torch.optim.SGD):
    """Calls something when it has stepped what it was given: a part of the model, perhaps."""

    in_step = None

    def step(self, closure=None):
        loss = super().step(closure)
        if FaultySGD.in_step is not None:
            FaultySGD.in_step()
        return loss


class Samples(Dataset):
    """Rows of ones; a worker fires where it is asked for the faulty batch."""

    def __init__(self, num_ranks, fire):
        self.num_ranks, self.fire = num_ranks, fire

    def __len__(self):
        return BATCH_SIZE * NUM_BATCHES * self.num_ranks

    def __getitem__(self, index):
        # Each rank has every num_ranks-th sample.
        batch = index // (BATCH_SIZE * self.num_ranks)
        if batch == FAULTY_FETCH and get_worker_info() is not None:
            self.fire()
        return torch.ones(8)


class FaultyModule(LightningModule):
    """Two blocks and all the places where something may go wrong."""

    def __init__(self, plan: Plan, num_ranks: int, workers: str) -> None:
        super().__init__()
        self.plan, self.num_ranks, self.workers = plan, num_ranks, workers
        self.is_stepping = False
        if plan.place != "configure_model":
            self.build()

    def build(self):
        self.first, self.second, self.head = Block(), Block(), nn.Linear(8, 1)
        self.second.in_forward = lambda: self.at("mid_forward", self.is_due())
        self.second.in_backward = lambda: self.at("backward", self.is_due())

    def at(self, place, is_due=True):
        if place == self.plan.place and is_due and self.global_rank == self.plan.rank:
            self.plan.fire()

    def is_due(self):
        return self.trainer.training and self.trainer.global_step >= FAULTY_BATCH

    def setup(self, stage):
        self.at("setup")

    def configure_model(self):
        if self.plan.place == "configure_model":
            self.at("configure_model")
            self.build()

    def forward(self, x):
        y = self.first(x)
        self.at("first_forward", self.trainer.training)
        return self.head(self.second(y))

    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()

    def on_train_batch_start(self, batch, batch_idx):
        with open(self.plan.folder / f"batches-{self.global_rank}", "a") as file:
            file.write(f"{self.current_epoch}.{batch_idx} ")

    def on_before_optimizer_step(self, optimizer):
        self.is_stepping = True

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.is_stepping = False
        self.at("between_batches", batch_idx == FAULTY_BATCH)
        if self.plan.place == "save" and batch_idx == FAULTY_BATCH:
            self.save()

    def save(self):
        save, calls = torch.save, []

        def fire_and_save(*args, **options):
            calls.append(args)
            self.at("save", len(calls) == FAULTY_SAVE)
            return save(*args, **options)

        torch.save = fire_and_save
        try:
            self.trainer.save_checkpoint(self.plan.folder / "saved.ckpt")
        finally:
            torch.save = save

    def validation_step(self, batch, batch_idx):
        self.at("validation", batch_idx == FAULTY_BATCH)
        self.log("val_loss", self(batch).square().mean(), sync_dist=True)

    def teardown(self, stage):
        self.at("teardown")

    def configure_optimizers(self):
        FaultySGD.in_step = lambda: self.at("step", self.is_stepping and self.is_due())
        return FaultySGD(self.parameters(), lr=0.01, momentum=0.9)

    def train_dataloader(self):
        return self.loader("in_worker")

    def val_dataloader(self):
        return self.loader("nowhere")

    def loader(self, place):
        # The module itself must not go to a worker: its trainer would follow.
        is_faulty = self.plan.place == place and self.global_rank == self.plan.rank
        samples = Samples(self.num_ranks, self.plan.fire if is_faulty else lambda: None)
        return DataLoader(
            samples,
            batch_size=BATCH_SIZE,
            num_workers=0 if self.workers == "0workers" else 2,
            persistent_workers=self.workers == "2persistent",
        )


def main() -> None:
    fault, place, workers, strategy, rank, devices, folder = sys.argv[1:]
    plan = Plan(fault, place, int(rank), Path(folder))
    trainer = Trainer(
        accelerator="cpu",
        devices=int(devices),
        strategy=ZeroStrategy(stage=int(strategy.removeprefix("zero")), checkpoint="sharded"),
        max_epochs=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=3,
    )
    torch.manual_seed(0)
    trainer.fit(FaultyModule(plan, int(devices), workers))


if __name__ == "__main__":
    main()
