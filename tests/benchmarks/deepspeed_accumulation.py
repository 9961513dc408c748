"""Gradient accumulation in DeepSpeed's stage 2 with CPU offload, compared with one process.

    torchrun --nproc-per-node 2 tests/benchmarks/deepspeed_accumulation.py deepspeed [STAGE]
    torchrun --nproc-per-node 2 tests/benchmarks/deepspeed_accumulation.py lightning_zero [STAGE]

Each cell trains a small network for three steps in float32, each of `count` micro-batches on each
of two CPU ranks, and prints the largest difference of a parameter from three trainings in one
process: on all micro-batches of each step, on only the first and the last one (with the same
divisor), and none.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "2"))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

STEPS, ROWS, WORLD_SIZE = 3, 4, 2
COUNTS = (1, 2, 3, 4, 8)
CASES = ((2, True), (2, False), (1, True))  # stage, offload
MicroBatch = list[tuple[Tensor, Tensor]]  # of each rank


def build() -> nn.Module:
    torch.manual_seed(7)
    hidden = [nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU()]
    return nn.Sequential(*hidden, nn.Linear(32, 4))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps_of(count: int) -> list[list[MicroBatch]]:
    """The same data in every training: steps, micro-batches, ranks."""
    generator = torch.Generator().manual_seed(count)

    def pair() -> tuple[Tensor, Tensor]:
        x = torch.randn(ROWS, 8, generator=generator)
        return x, 2 * x[:, :4] + torch.randn(ROWS, 4, generator=generator)

    micro_batches = [[pair() for _ in range(WORLD_SIZE)] for _ in range(STEPS * count)]
    return [micro_batches[step * count : (step + 1) * count] for step in range(STEPS)]


def train_alone(name: str, count: int, used: Iterable[int]) -> nn.Module:
    """One process, on the micro-batches `used` of each step."""
    model = build()
    optimizer = optimizer_of(name, model)
    for step in steps_of(count):
        for i in set(used):
            for x, y in step[i]:
                (F.mse_loss(model(x), y) / (count * WORLD_SIZE)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train_deepspeed(name: str, count: int, stage: int, *, is_offloaded: bool) -> nn.Module:
    import deepspeed

    model = build()
    zero: dict[str, object] = {"stage": stage, "reduce_bucket_size": 10**6}
    if is_offloaded:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": count,
        "gradient_clipping": 0.0,  # 1.0 by default in 0.19.8
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = optimizer_of(name, model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in steps_of(count):
        for micro_batch in step:
            x, y = micro_batch[dist.get_rank()]
            engine.backward(F.mse_loss(engine(x), y))  # DeepSpeed divides by count
            engine.step()  # an optimizer step after the last one only
    assert engine.global_steps == STEPS
    return model


def train_lightning_zero(name: str, count: int, stage: int, *, is_offloaded: bool) -> nn.Module:
    import lightning_zero

    model = build()
    offload = {"offload_optimizer": "cpu"} if is_offloaded else {}
    config = lightning_zero.ZeroConfig(stage=stage, **offload)
    engine = lightning_zero.Engine(model, optimizers=[optimizer_of(name, model)], config=config)
    for step in steps_of(count):
        for i, micro_batch in enumerate(step):
            x, y = micro_batch[dist.get_rank()]
            with engine.no_sync() if i < count - 1 else contextlib.nullcontext():
                engine.backward(F.mse_loss(model(x), y) / count)
        engine.step()
        engine.zero_grad()
    engine.close()
    return model


def difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def main() -> None:
    system = sys.argv[1]
    torch.set_num_threads(1)
    if system == "deepspeed":
        import deepspeed
        from deepspeed.utils import logger

        logger.setLevel("ERROR")
        # Without a compiled all-reduce in shared memory; gloo does it.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
        deepspeed.init_distributed(dist_backend="gloo")
        version, train = deepspeed.__version__, train_deepspeed
    else:
        import lightning_zero

        dist.init_process_group("gloo")
        version, train = lightning_zero.__version__, train_lightning_zero
    cases = [case for case in CASES if not sys.argv[2:] or case == (int(sys.argv[2]), True)]
    cells = [
        (*case, name, count) for case in cases for name in ("sgd", "adamw") for count in COUNTS
    ]
    for stage, is_offloaded, name, count in cells:
        trained = train(name, count, stage, is_offloaded=is_offloaded)
        alone = train_alone(name, count, range(count))
        row = {
            "system": f"{system} {version}",
            "stage": stage,
            "offload": is_offloaded,
            "optimizer": name,
            "count": count,
            "all": difference(trained, alone),
            "first_and_last": difference(trained, train_alone(name, count, (0, count - 1))),
            "moved": difference(alone, build()),
        }
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
