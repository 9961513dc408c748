"""A Hydra application of a user's own: each rank trains, then writes down what it was given."""

import json
import logging
import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import seed_everything
from omegaconf import OmegaConf

import lightning_zero
from tests.support.fitting import make_trainer
from tests.support.models import MLPModule


@hydra.main(version_base="1.3", config_path="settings", config_name="config")
def main(config):
    seed_everything(7, verbose=False)
    trainer = make_trainer(config.strategy, devices=config.devices)
    trainer.fit(MLPModule(ranks=config.devices, num_batches=2))
    rank = trainer.global_rank
    logging.getLogger(__name__).info("rank %d has trained", rank)
    seen = {
        "version": lightning_zero.__version__,  # by which submitit sees that it must import it
        "world_size": trainer.world_size,
        "config": OmegaConf.to_container(config),
        "cwd": os.getcwd(),
        "output_dir": HydraConfig.get().runtime.output_dir,
        "job": HydraConfig.get().job.name,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "argv": sys.argv,
    }
    Path(HydraConfig.get().runtime.output_dir, f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
