"""Code shared by `train.py` and `eval.py`: creates and runs the objects of a configuration."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field

import lightning.pytorch as pl
from hydra.utils import instantiate
from language_model import ByteLanguageModel
from omegaconf import DictConfig
from stdlib_text import StdlibText, bigram_bits_per_byte
from torch import Tensor

from lightning_zero.conf import apply_extras, make_trainer, optimized_metric

__all__ = ["Job"]

_log = logging.getLogger(__name__)  # one log file per rank, see conf/train.yaml
# Warnings of Lightning and torch about their own code, or about intended settings of this job.
for _text in (".*`srun` command is available", ".*LeafSpec", ".*does not have many workers"):
    warnings.filterwarnings("ignore", _text)


@dataclass
class Job:
    """A model, its data and the Trainer, as configured.

    Attributes:
        metrics: Last logged value of each metric.
    """

    config: DictConfig
    data: StdlibText
    model: ByteLanguageModel
    trainer: pl.Trainer
    metrics: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, config: DictConfig) -> Job:
        apply_extras(config)
        if config.seed is not None:
            pl.seed_everything(config.seed, workers=True)
        data = instantiate(config.data)
        model = instantiate(config.model)
        return cls(config, data, model, make_trainer(config))

    def fit(self) -> None:
        """Trains the model, resuming from `ckpt_path` if it is set."""
        trainer = self.trainer
        _log.info("rank %d of %d trains", trainer.global_rank, trainer.world_size)
        if self.config.ckpt_path and trainer.is_global_zero:
            print(f"resuming from {self.config.ckpt_path}")
        trainer.fit(self.model, datamodule=self.data, ckpt_path=self.config.ckpt_path)
        self.metrics |= trainer.callback_metrics
        _log.info("step %d, %s", trainer.global_step, self._format_metrics())

    def test(self) -> None:
        """Tests the best checkpoint of this training, or `ckpt_path` if `train=false`."""
        path = self.best_model_path if self.config.train else self.config.ckpt_path
        self.trainer.test(self.model, datamodule=self.data, ckpt_path=path or None)
        self.metrics |= self.trainer.callback_metrics
        if self.trainer.is_global_zero:
            bigram = bigram_bits_per_byte(self.data.train_text, self.data.test_windows())
            reached = self.metrics["test/bits_per_byte"]
            print(f"\ntest, bits per byte: model {reached:.3f}, bigram table {bigram:.3f}")
        _log.info("tested, %s", self._format_metrics())

    def _format_metrics(self) -> str:
        return ", ".join(f"{name} {float(value):.4g}" for name, value in self.metrics.items())

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint; empty if none was saved."""
        callback = self.trainer.checkpoint_callback
        return str(getattr(callback, "best_model_path", ""))

    @property
    def last_model_path(self) -> str:
        """Path of the checkpoint at the end of training; empty if none was saved."""
        callback = self.trainer.checkpoint_callback
        return str(getattr(callback, "last_model_path", ""))

    @property
    def optimized_metric(self) -> float | None:
        """Value of the metric that a sweeper minimizes."""
        return optimized_metric(self.config, self.metrics)
