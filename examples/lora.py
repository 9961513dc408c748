"""Trains LoRA adapters on a frozen Hugging Face model in stage 3, with 4-bit weights by --qlora.

    python examples/lora.py path/to/Llama-3.2-1B path/to/adapter --text path/to/texts --qlora

Frozen weights are sharded, too; 4-bit weights are sharded as they are stored. The result is a peft
directory: load it with `PeftModel.from_pretrained(model, "path/to/adapter")`.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import lightning.pytorch as pl
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import lightning_zero


class Adapted(pl.LightningModule):
    """A frozen causal language model with low-rank adapters for its linear layers."""

    def __init__(self, path: str, lr: float, is_4bit: bool) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self) -> None:
        if self.model is not None:  # Lightning calls this again before a second fit, or validate
            return
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        model = AutoModelForCausalLM.from_pretrained(
            self.hparams.path, quantization_config=quantization if self.hparams.is_4bit else None
        )
        self.model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")).train()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams.lr)

    def on_train_end(self) -> None:
        adapters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        with lightning_zero.gathered(adapters.values()):  # on every rank
            if self.trainer.is_global_zero:
                self.model.save_pretrained(self.trainer.default_root_dir, state_dict=adapters)


def batches(tokenizer, folder: str, context: int, batch_size: int) -> DataLoader:
    """Batches of the concatenated text files of a folder, in sequences of `context` tokens."""
    texts = [path.read_text() for path in sorted(Path(folder).rglob("*.txt"))]
    ids = tokenizer(tokenizer.eos_token.join(texts), return_tensors="pt").input_ids[0]
    pieces = ids[: len(ids) // context * context].view(-1, context)
    return DataLoader(pieces, batch_size=batch_size, shuffle=True, drop_last=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="directory with config.json, weights and tokenizer")
    parser.add_argument("out", help="directory for the adapters")
    parser.add_argument("--text", required=True, help="folder with *.txt files")
    parser.add_argument("--qlora", action="store_true", help="store the frozen weights in 4 bits")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=4, help="batch size per rank")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--devices", default="auto")
    args = parser.parse_args()
    if args.qlora and find_spec("bitsandbytes") is None:
        parser.error("--qlora needs 4-bit weights: pip install bitsandbytes")
    for folder, file in ((args.model, "config.json"), (args.text, "*.txt")):
        if not any(Path(folder).rglob(file)):
            parser.error(f"expected a folder with {file}, got {folder}")

    pl.seed_everything(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    trainer = pl.Trainer(
        strategy=lightning_zero.ZeroStrategy(stage=3, activation_checkpointing=True),
        devices=args.devices,
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        default_root_dir=args.out,
        enable_checkpointing=False,  # a checkpoint would also contain the frozen weights
    )
    data = batches(tokenizer, args.text, args.context, args.batch_size)
    trainer.fit(Adapted(args.model, args.lr, args.qlora), data)


if __name__ == "__main__":
    main()
