"""LoRA on one device, with the frozen weights of a Hugging Face model in CPU memory.

    python examples/lora_offload.py

Stage 3 with offload also works on a single device, which then holds the weights of a block only
while the block runs. The script trains adapters of a small Llama with random weights, on the bytes
of a Python module: with Lightning's strategy for one device, and with offload. It prints both
losses, and where the model states are. For a model of yours, see `examples/lora.py`.
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_zero

CONTEXT = 64
TEXT = Path(argparse.__file__).read_bytes()


class Adapted(pl.LightningModule):
    """A frozen Llama of bytes with low-rank adapters for its linear layers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = LlamaForCausalLM(config)  # or AutoModelForCausalLM.from_pretrained(path)
        adapters = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")
        self.model = get_peft_model(model, adapters).train()
        self.report: lightning_zero.MemoryReport | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(self.trainer.strategy, lightning_zero.ZeroStrategy):
            self.report = self.trainer.strategy.memory_report()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    pieces = torch.tensor(list(TEXT[: len(TEXT) // CONTEXT * CONTEXT])).view(-1, CONTEXT)
    offload = lightning_zero.ZeroStrategy(stage=3, offload_param="cpu", offload_optimizer="cpu")
    for strategy in ("auto", offload):
        pl.seed_everything(0, verbose=False)
        trainer = pl.Trainer(
            strategy=strategy,
            devices=1,
            max_steps=args.steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Adapted(args.width, args.layers)
        trainer.fit(model, DataLoader(pieces, batch_size=4))
        name = "offload" if strategy is offload else "one device"
        print(f"{name}: loss {trainer.callback_metrics['loss']:.6f}")
    print(f"one device: {model.report.data_parallel_bytes / 2**20:.1f} MiB of model states on it")
    for tier, states in model.report.tiers.items():
        print(f"offload: {sum(states.values()) / 2**20:.1f} MiB of model states, {tier}")


if __name__ == "__main__":
    main()
