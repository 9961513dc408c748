"""Trains litgpt's model with the Trainer on two ranks: python gpt.py STRATEGY."""

import sys

import lightning as L
import torch
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy
from report import report
from torch.utils.data import DataLoader

import lightning_zero  # noqa: F401

CONFIG = {"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": 16, "padded_vocab_size": 64}


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(Config.from_name("pythia-14m", **CONFIG))

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = chunked_cross_entropy(self.gpt(tokens[:, :-1]), tokens[:, 1:])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    L.seed_everything(7)
    model = Model()
    trainer = L.Trainer(
        strategy=sys.argv[1],
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(torch.randint(64, (32, 17)), batch_size=4))
    report(trainer.callback_metrics["loss"], model)


if __name__ == "__main__":
    main()
