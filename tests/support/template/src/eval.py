import os
import sys

import hydra

root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
os.environ["PROJECT_ROOT"] = root
sys.path.insert(0, root)

import lightning_zero  # noqa: E402, F401
from src.objects import make  # noqa: E402


@hydra.main(version_base="1.3", config_path="../configs", config_name="eval.yaml")
def main(cfg):
    assert cfg.ckpt_path
    model, data, trainer = make(cfg)
    trainer.test(model=model, datamodule=data, ckpt_path=cfg.ckpt_path, weights_only=False)
    if trainer.is_global_zero:
        print(f"{type(trainer.strategy).__name__} tested:", dict(trainer.callback_metrics))


if __name__ == "__main__":
    main()
