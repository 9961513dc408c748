"""A Hydra project: all groups but `model` are those of `pkg://lightning_zero.conf`.

    python train.py model=large zero=stage2 offload=cpu_optimizer

`--help` lists all groups, and `--cfg job` prints all settings. Copy the folder: it
needs no other file of this repository.
"""

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_zero.conf import make_trainer, optimized_metric


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> float | None:
    import lightning.pytorch as pl  # takes seconds: not for --help and --cfg job

    pl.seed_everything(config.seed, workers=True)
    trainer = make_trainer(config)
    model, data = instantiate(config.model), instantiate(config.data)
    trainer.fit(model, datamodule=data, ckpt_path=config.ckpt_path)
    if trainer.is_global_zero:
        print(f"results: {config.paths.output_dir}")
    return optimized_metric(config, trainer.callback_metrics)


if __name__ == "__main__":
    main()
