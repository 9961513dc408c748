"""Muon for matrices and AdamW for the rest, in stage 3, with gradient accumulation.

    torchrun --nproc-per-node 2 examples/muon.py

Muon orthogonalizes full matrices, and stage 3 has shards. Here each rank steps some full matrices
with torch's own Muon. The script trains a GPT on the bytes of a Python module, with four
micro-batches in a step on every rank, and then in one process on all of them. Muon computes in
bfloat16, which enlarges rounding: in one process, adding the gradients in another order changes the
parameters as much as stage 3 does.
"""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_zero

MICRO_BATCHES, CONTEXT, MAX_NORM = 4, 64, 1.0
TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes()))


def build() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(width=64, num_layers=3, num_heads=4, is_llama=True))


def optimizers(model: GPT) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for embeddings, vectors and the head."""
    matrices = {name: p for name, p in model.blocks.named_parameters("blocks") if p.ndim == 2}
    others = [p for name, p in model.named_parameters() if name not in matrices]
    muon = torch.optim.Muon(matrices.values(), lr=2e-3, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=2e-3)]


def loss_of(model: nn.Module, step: int, micro_batch: int, rank: int) -> Tensor:
    """Loss on four sequences that only this rank has in this micro-batch."""
    seed = (step * MICRO_BATCHES + micro_batch) * 1000 + rank
    first = torch.randint(len(TEXT) - CONTEXT, (4,), generator=torch.Generator().manual_seed(seed))
    ids = torch.stack([TEXT[i : i + CONTEXT + 1] for i in first])
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train_sharded(model: GPT, steps: int) -> None:
    config = lightning_zero.ZeroConfig(stage=3)
    engine = lightning_zero.Engine(model, optimizers=optimizers(model), config=config)
    for step in range(steps):
        for i in range(MICRO_BATCHES):
            with engine.no_sync() if i < MICRO_BATCHES - 1 else nullcontext():
                loss = loss_of(model, step, i, dist.get_rank())
                engine.backward(loss / MICRO_BATCHES)
        engine.clip_grad_norm_(MAX_NORM)
        engine.step()
        engine.zero_grad()
    engine.close()  # every rank has all parameters again


def train_alone(model: GPT, steps: int, ranks: Sequence[int]) -> None:
    all_optimizers = optimizers(model)
    for step in range(steps):
        for rank in ranks:
            for i in range(MICRO_BATCHES):
                (loss_of(model, step, i, rank) / MICRO_BATCHES / len(ranks)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for optimizer in all_optimizers:
            optimizer.step()
            optimizer.zero_grad()


def difference(model: nn.Module, other: nn.Module) -> float:
    """Root of the mean square over all parameters."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return torch.cat([(a - b).detach().flatten() for a, b in pairs]).square().mean().sqrt().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    start, sharded, alone, reverse = (build() for _ in range(4))
    ranks = range(dist.get_world_size())
    train_sharded(sharded, args.steps)
    if dist.get_rank() == 0:
        train_alone(alone, args.steps, ranks)
        train_alone(reverse, args.steps, ranks[::-1])
        with torch.no_grad():
            for name, model in (("stage 3", sharded), ("one process", alone)):
                print(f"{name}: loss {loss_of(model, args.steps, 0, 0):.4f}")
        print(f"training moved the parameters by {difference(alone, start):.1e}")
        print(f"stage 3 differs from one process by {difference(sharded, alone):.1e}")
        print(f"one process in another order differs by {difference(reverse, alone):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
