"""Trains a byte-level Llama on the standard library of this Python: `python examples/train.py`.

Every setting is in `conf/`. Change settings on the command line, for example
`python examples/train.py zero=stage2 bucket=large overlap=none trainer.devices=2`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

import lightning_zero.conf  # noqa: F401  # registers what the files of conf refer to

if TYPE_CHECKING:
    from job import Job

_PROMPT = b"class "
_MAX_PARAMETERS_ON_CPU = 10_000_000


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> float | None:
    from job import Job  # torch and Lightning: not for --help and --cfg job

    job = Job.of(config)
    if config.train:
        job.fit()
        if job.trainer.is_global_zero:
            _print_result(job)
    if config.test:
        job.test()
    return job.optimized_metric


def _print_result(job: Job) -> None:
    """Prints on rank 0. After `fit` each rank has the full parameters, if they fit in memory."""
    from stdlib_text import bigram_bits_per_byte

    reached = job.metrics.get("val/bits_per_byte")
    if reached is None:
        print("\nno validation ran: trainer.val_check_interval is longer than the training")
    else:
        bigram = bigram_bits_per_byte(job.data.train_text, job.data.validation_windows())
        print(f"\nvalidation, bits per byte: model {reached:.3f}, bigram table {bigram:.3f}")
    print(f"checkpoint: {job.best_model_path or job.last_model_path or 'none'}")
    if _samples(job):
        _print_continuation(job)
    print(f"results: {job.config.paths.output_dir}")


def _samples(job: Job) -> bool:
    """`config.sample`; with auto, not in a sweep, and not from a large model on a CPU."""
    if job.config.sample != "auto":
        return bool(job.config.sample)
    num_parameters = sum(parameter.numel() for parameter in job.model.parameters())
    is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    on_cpu = job.config.trainer.accelerator == "cpu"
    return not is_sweep and not (on_cpu and num_parameters > _MAX_PARAMETERS_ON_CPU)


def _print_continuation(job: Job) -> None:
    try:
        text = _PROMPT + job.model.eval().continuation(_PROMPT, num_bytes=300)
    except RuntimeError as error:
        print(f"no continuation: {error}")
        return
    print(f"a continuation of {_PROMPT.decode()!r}:\n{text.decode('ascii', 'backslashreplace')}")


if __name__ == "__main__":
    main()
