"""The programs of `deepspeed_accumulation.py` with Lightning's Trainer and DeepSpeedStrategy.

    export DS_ACCELERATOR=cpu LOCAL_SIZE=2
    torchrun --nproc-per-node 2 tests/benchmarks/deepspeed_lightning.py

Lightning refuses DeepSpeed without CUDA. `OnCPU` steps over this check and over that of the
device's index, communicates over gloo, and permits torch's SGD with offload. `factor` multiplies
the loss: with `count`, it makes up for one of two divisions by the number of micro-batches.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import deepspeed
import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.strategies import deepspeed as lightning_deepspeed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.benchmarks.deepspeed_accumulation import (
    ROWS,
    STEPS,
    build,
    difference,
    optimizer_of,
    steps_of,
    train_alone,
)

CELLS = [  # offload, micro-batches, factor
    *((True, count, count) for count in (1, 2, 3, 4, 8)),
    *((False, count, count) for count in (3, 4, 8)),
    *((False, count, 1) for count in (2, 4)),
]


class OnCPU(DeepSpeedStrategy):
    """Lightning's strategy without its checks of the device."""

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def _setup_model_and_optimizer(self, model, optimizer, lr_scheduler=None):
        self.config["zero_force_ds_cpu_optimizer"] = False
        engine, wrapped, *_ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self.local_rank),
            config=self.config,
            model=model,
            model_parameters=model.parameters(),
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, wrapped


class Regression(pl.LightningModule):
    """The network of the other script."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.net = build()
        self.factor = factor
        self.trained: nn.Module | None = None

    def training_step(self, micro_batch, batch_idx: int) -> torch.Tensor:
        x, y = micro_batch[self.global_rank]
        return F.mse_loss(self.net(x), y) * self.factor

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of("sgd", self.net)

    def on_train_end(self) -> None:
        self.trained = build()
        self.trained.load_state_dict(self.net.state_dict())


def length(module: nn.Module) -> float:
    """Distance of the parameters from their initial values."""
    pairs = zip(module.parameters(), build().parameters(), strict=True)
    return torch.cat([(p - q).detach().flatten() for p, q in pairs]).norm().item()


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    lightning_deepspeed._validate_device_index_selection = lambda devices: None
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # as in the other script
    for is_offloaded, count, factor in CELLS:
        strategy = OnCPU(
            stage=2,
            offload_optimizer=is_offloaded,
            process_group_backend="gloo",
            logging_level=logging.ERROR,
            logging_batch_size_per_gpu=ROWS,
        )
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            accumulate_grad_batches=count,
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        model = Regression(factor)
        micro_batches = [micro_batch for step in steps_of(count) for micro_batch in step]
        trainer.fit(model, DataLoader(micro_batches, batch_size=None))
        alone = train_alone("sgd", count, range(count))
        row = {
            "system": f"lightning {lightning.__version__}, deepspeed {deepspeed.__version__}",
            "offload": is_offloaded,
            "count": count,
            "factor": factor,
            "steps": trainer.global_step,
            "all": difference(model.trained, alone),
            "first_and_last": difference(model.trained, train_alone("sgd", count, (0, count - 1))),
            "moved_ratio": length(model.trained) / length(alone),
        }
        if trainer.is_global_zero:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
