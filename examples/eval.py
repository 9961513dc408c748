"""Tests a checkpoint: `python examples/eval.py ckpt_path=...`, with the `model=` of its training.

The number of ranks, the stage and the offload settings may differ from those of the training.
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

import lightning_zero.conf  # noqa: F401  # registers what the files of conf refer to


@hydra.main(version_base="1.3", config_path="../conf", config_name="eval")
def main(config: DictConfig) -> float | None:
    if config.ckpt_path is None:
        raise ValueError("expected the checkpoint to test, got none; give ckpt_path=PATH.")
    from job import Job  # torch and Lightning: not for --help and --cfg job

    job = Job.of(config)
    job.test()
    return job.optimized_metric


if __name__ == "__main__":
    main()
