"""Runs the pretraining loop of litgpt with Fabric on two ranks: python gpt_fabric.py STRATEGY."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from litgpt import Config, pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from torch.utils.data import DataLoader

import lightning_zero  # noqa: F401

CONFIG = {"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": 16, "padded_vocab_size": 64}


class Tokens(DataModule):
    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(64, (32, max_seq_length + 1), generator=generator)
        self.loader = DataLoader(tokens, batch_size=batch_size)

    def train_dataloader(self) -> DataLoader:
        return self.loader

    val_dataloader = train_dataloader


def main() -> None:
    fabric = L.Fabric(strategy=sys.argv[1], accelerator="cpu", devices=2)
    fabric.launch()
    losses = []
    fabric.log_dict = lambda metrics, step: losses.append(metrics)
    pretrain.main(
        fabric=fabric,
        devices=2,
        seed=7,
        initial_checkpoint_dir=None,
        resume=False,
        config=Config.from_name("pythia-14m", **CONFIG),
        data=Tokens(),
        out_dir=Path(f"out-{sys.argv[1]}"),
        tokenizer_dir=None,
        tokenizer=None,
        train=TrainArgs(
            global_batch_size=16,
            micro_batch_size=4,
            max_tokens=1024,
            max_norm=1.0,
            lr_warmup_steps=1,
            save_interval=4,
            log_interval=1,
        ),
        eval=EvalArgs(interval=4, max_iters=2, final_validation=True),
        optimizer="AdamW",
    )
    saved = torch.load(f"out-{sys.argv[1]}/final/lit_model.pth", weights_only=False)["model"]
    values = [value.double().abs().sum().item() for value in saved.values()]
    if fabric.global_rank == 0:
        loss = float(losses[-1]["val_loss"])
        print("report", json.dumps({"loss": loss, "parameters": sum(values)}))


if __name__ == "__main__":
    main()
