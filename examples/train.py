"""Trains a byte-level GPT on the standard library of this Python: `python examples/train.py`.

Every setting is in `conf/` and can be changed on the command line, as in
`python examples/train.py zero=stage2 bucket=large overlap=none trainer.devices=2`.
"""

from __future__ import annotations

import hydra
import lightning.pytorch as pl
from hydra.utils import instantiate
from language_model import ByteLanguageModel
from omegaconf import DictConfig
from stdlib_text import StdlibText, bigram_bits_per_byte

import lightning_zero.conf  # noqa: F401  (also makes trainer.strategy=zero3 known)

_PROMPT = b"class "


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(config: DictConfig) -> None:
    pl.seed_everything(config.seed, workers=True)
    data = instantiate(config.data)
    model = instantiate(config.model)
    callbacks = [c for c in instantiate(config.callbacks).values() if c is not None]
    trainer = instantiate(config.trainer, callbacks=callbacks)
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        _print_result(trainer, model, data)


def _print_result(trainer: pl.Trainer, model: ByteLanguageModel, data: StdlibText) -> None:
    """Rank 0 alone: after `fit` the parameters are whole on every rank."""
    reached = trainer.callback_metrics.get("val/bits_per_byte", float("nan"))
    bigram = bigram_bits_per_byte(data.train_text, data.validation_windows())
    print(f"\nvalidation, bits per byte: model {reached:.3f}, bigram table {bigram:.3f}")
    print(f"checkpoint: {trainer.checkpoint_callback.best_model_path}")
    text = _PROMPT + model.eval().continuation(_PROMPT, num_bytes=300)
    print(f"a continuation of {_PROMPT.decode()!r}:\n{text.decode('ascii', 'backslashreplace')}")


if __name__ == "__main__":
    main()
