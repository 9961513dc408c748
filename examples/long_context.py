"""Trains on long sequences with activation checkpointing and activations in CPU memory.

    python examples/long_context.py --context 131072

Each block stores only its input for backward, in pinned CPU memory. The loss is computed in chunks,
so the logits of the full sequence never exist. The script prints the bytes that were copied to CPU
memory and, on a GPU, the peak memory of the GPU. It also runs on a CPU, but saves no memory there.
"""

import argparse

import lightning.pytorch as pl
import torch
from gpt import GPT, Block, GPTConfig
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_zero


class LongContext(pl.LightningModule):
    """The GPT of `gpt.py`, with rotary positions."""

    def __init__(self, config: GPTConfig, chunk: int, min_bytes: int) -> None:
        super().__init__()
        self.gpt = GPT(config)
        self.head, self.gpt.head = self.gpt.head, torch.nn.Identity()
        self.chunk = chunk
        self.offload = lightning_zero.offload_activations(min_bytes=min_bytes)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with self.offload:
            hidden = self.gpt(batch[:, :-1])
            pieces = hidden.split(self.chunk, dim=1)
            targets = batch[:, 1:].split(self.chunk, dim=1)
            sums = [
                checkpoint(self._loss, *pair, use_reentrant=False)
                for pair in zip(pieces, targets, strict=True)
            ]
        loss = torch.stack(sums).sum() / batch[:, 1:].numel()
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(hidden).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


def copies(vocab_size: int, context: int, num: int) -> Tensor:
    """Random tokens; the second half of each sequence repeats the first half."""
    half = torch.randint(vocab_size, (num, context // 2 + 1))
    return torch.cat([half, half], dim=1)[:, : context + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--chunk", type=int, default=1024, help="tokens per chunk of the loss")
    parser.add_argument("--min-bytes", type=int, default=2**20, help="smallest tensor to offload")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--devices", default="auto")
    args = parser.parse_args()

    pl.seed_everything(0)
    config = GPTConfig(
        vocab_size=1024,
        context=args.context,
        width=args.width,
        num_layers=args.layers,
        num_heads=args.width // 64,
        is_llama=True,
    )
    trainer = pl.Trainer(
        strategy=lightning_zero.ZeroStrategy(stage=3, activation_checkpointing={Block}),
        devices=args.devices,
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
    )
    model = LongContext(config, args.chunk, args.min_bytes)
    trainer.fit(
        model, DataLoader(copies(config.vocab_size, args.context, 2 * args.steps), batch_size=1)
    )

    kept = model.offload.nbytes / args.steps / 2**20
    print(f"rank {trainer.global_rank}: {kept:.1f} MiB of activations per step in CPU memory")
    if torch.cuda.is_available():
        print(f"peak memory of the GPU: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    if trainer.is_global_zero:
        print(f"checkpoint: {trainer.checkpoint_callback.best_model_path}")


if __name__ == "__main__":
    main()
