"""What `train.py` and `eval.py` have in common: the objects of a configuration, and their order."""

from __future__ import annotations

from dataclasses import dataclass, field

import lightning.pytorch as pl
from hydra.utils import instantiate
from language_model import ByteLanguageModel
from omegaconf import DictConfig
from stdlib_text import StdlibText, bigram_bits_per_byte
from torch import Tensor

from lightning_zero.conf import make_trainer, optimized_metric

__all__ = ["Job"]


@dataclass
class Job:
    """A model, its data and the Trainer, as configured.

    Attributes:
        metrics: The last of each that was logged.
    """

    config: DictConfig
    data: StdlibText
    model: ByteLanguageModel
    trainer: pl.Trainer
    metrics: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, config: DictConfig) -> Job:
        if config.seed is not None:
            pl.seed_everything(config.seed, workers=True)
        data = instantiate(config.data)
        model = instantiate(config.model)
        return cls(config, data, model, make_trainer(config))

    def fit(self) -> None:
        """Trains, from `ckpt_path` on where there is one."""
        self.trainer.fit(self.model, datamodule=self.data, ckpt_path=self.config.ckpt_path)
        self.metrics |= self.trainer.callback_metrics

    def test(self) -> None:
        """Tests the best checkpoint of this training, or `ckpt_path` without one."""
        path = self.best_model_path if self.config.train else self.config.ckpt_path
        self.trainer.test(self.model, datamodule=self.data, ckpt_path=path or None)
        self.metrics |= self.trainer.callback_metrics
        if self.trainer.is_global_zero:
            bigram = bigram_bits_per_byte(self.data.train_text, self.data.test_windows())
            reached = self.metrics["test/bits_per_byte"]
            print(f"\ntest, bits per byte: model {reached:.3f}, bigram table {bigram:.3f}")

    @property
    def best_model_path(self) -> str:
        """Empty where none was saved."""
        callback = self.trainer.checkpoint_callback
        return str(getattr(callback, "best_model_path", ""))

    @property
    def optimized_metric(self) -> float | None:
        """What a sweeper makes small."""
        return optimized_metric(self.config, self.metrics)
