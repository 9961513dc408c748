"""Fine-tunes all weights of a local Hugging Face model in stage 3, and writes the result.

    python examples/finetune_llama.py path/to/Llama-3.2-1B path/to/tuned --text path/to/texts

Each rank reads and holds only its own shard of the weights. No rank ever holds the full model, not
even to save and export it. Load the result with
`AutoModelForCausalLM.from_pretrained("path/to/tuned")`.
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import lightning_zero
from lightning_zero.cli import main as lightning_zero_command


class FineTuned(pl.LightningModule):
    """A causal language model with the weights in `path`."""

    def __init__(self, path: str, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self) -> None:
        if self.model is not None:  # Lightning calls this again before a second fit, or validate
            return
        path = self.hparams.path
        with torch.device("meta"):  # allocates no memory
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        lightning_zero.load_weights(self.model, path)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, fused=True)


def batches(tokenizer, folder: str, context: int, batch_size: int) -> DataLoader:
    """Batches of the concatenated text files of a folder, in sequences of `context` tokens."""
    texts = [path.read_text() for path in sorted(Path(folder).rglob("*.txt"))]
    ids = tokenizer(tokenizer.eos_token.join(texts), return_tensors="pt").input_ids[0]
    pieces = ids[: len(ids) // context * context].view(-1, context)
    return DataLoader(pieces, batch_size=batch_size, shuffle=True, drop_last=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="directory with config.json, weights and tokenizer")
    parser.add_argument("out", help="new directory for the result")
    parser.add_argument("--text", required=True, help="folder with *.txt files")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=4, help="batch size per rank")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--devices", default="auto")
    args = parser.parse_args()
    if Path(args.out).exists():
        parser.error(f"{args.out} exists")
    for folder, file in ((args.model, "config.json"), (args.text, "*.txt")):
        if not any(Path(folder).rglob(file)):
            parser.error(f"expected a folder with {file}, got {folder}")

    pl.seed_everything(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = batches(tokenizer, args.text, args.context, args.batch_size)
    checkpoint = pl.callbacks.ModelCheckpoint(
        dirpath=f"{args.out}-checkpoints", filename="{step}", every_n_train_steps=args.steps
    )
    trainer = pl.Trainer(
        strategy=lightning_zero.ZeroStrategy(
            stage=3, activation_checkpointing=True, unshard_after_fit=False
        ),
        devices=args.devices,
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        callbacks=[checkpoint],
    )
    trainer.fit(FineTuned(args.model, args.lr), data)

    if trainer.is_global_zero:  # exports the checkpoint tensor by tensor
        words = ["export", checkpoint.best_model_path, args.out, "--part", "model"]
        if lightning_zero_command(words) == 0:
            AutoConfig.from_pretrained(args.model).save_pretrained(args.out)
            tokenizer.save_pretrained(args.out)
            print(f"weights and tokenizer: {args.out}")


if __name__ == "__main__":
    main()
