import os
import sys

import hydra
import lightning as L

root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
os.environ["PROJECT_ROOT"] = root
sys.path.insert(0, root)

import lightning_zero  # noqa: E402, F401
from src.objects import all_of, make  # noqa: E402


@hydra.main(version_base="1.3", config_path="../configs", config_name="train.yaml")
def main(cfg):
    if cfg.get("seed"):
        L.seed_everything(cfg.seed, workers=True)
    model, data, trainer = make(cfg, callbacks=all_of(cfg.get("callbacks")))
    if cfg.train:
        path = cfg.get("ckpt_path")
        trainer.fit(model=model, datamodule=data, ckpt_path=path, weights_only=False)
    metrics = dict(trainer.callback_metrics)
    if cfg.test:
        path = trainer.checkpoint_callback.best_model_path or None
        trainer.test(model=model, datamodule=data, ckpt_path=path, weights_only=False)
        metrics |= trainer.callback_metrics
    if trainer.is_global_zero:
        print(f"{type(trainer.strategy).__name__} on {trainer.world_size} ranks:", metrics)
    return float(metrics[cfg.optimized_metric]) if cfg.get("optimized_metric") else None


if __name__ == "__main__":
    main()
