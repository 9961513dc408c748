"""Trains a byte-level Llama on the standard library of this Python: `python examples/train.py`.

Every setting is in `conf/`. Change settings on the command line, for example
`python examples/train.py zero=stage2 bucket=large overlap=none trainer.devices=2`.
"""

from __future__ import annotations

import hydra
from job import Job
from omegaconf import DictConfig
from stdlib_text import bigram_bits_per_byte

_PROMPT = b"class "


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(config: DictConfig) -> float | None:
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
    reached = job.metrics.get("val/bits_per_byte", float("nan"))
    bigram = bigram_bits_per_byte(job.data.train_text, job.data.validation_windows())
    print(f"\nvalidation, bits per byte: model {reached:.3f}, bigram table {bigram:.3f}")
    print(f"checkpoint: {job.best_model_path or 'none'}")
    try:
        text = _PROMPT + job.model.eval().continuation(_PROMPT, num_bytes=300)
    except RuntimeError as error:
        print(f"no continuation: {error}")
        return
    print(f"a continuation of {_PROMPT.decode()!r}:\n{text.decode('ascii', 'backslashreplace')}")


if __name__ == "__main__":
    main()
