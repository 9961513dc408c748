"""Writes checkpoints in DeepSpeed's layout from full tensors, without DeepSpeed.

The layouts are those of DeepSpeed 0.19; `tests/deepspeed/test_checkpoint.py` compares them with
checkpoints that DeepSpeed wrote itself.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["write_deepspeed"]

MODEL = "mp_rank_00_model_states.pt"


def write_deepspeed(folder, module, optimizer, *, stage, world_size, client_state=None, bf16=False):
    """Writes a checkpoint of `module` and its AdamW; leaves no module of DeepSpeed imported.

    Args:
        folder: The checkpoint directory.
        module: Full module, trained.
        optimizer: AdamW over the trainable parameters of `module`.
        stage: 1, 2 or 3.
        world_size: Number of ranks that the files are written for.
        client_state: Argument of `save_checkpoint`.
        bf16: Whether the configuration has `"bf16": {"enabled": true}`.
    """
    tag = Path(folder) / "step7"
    tag.mkdir(parents=True)
    (tag.parent / "latest").write_text("step7")
    name_of = {p: name for name, p in module.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    shapes = [{name_of[p]: p.shape for p in group} for group in groups]
    shard = _shard_parameters if stage == 3 else _shard_groups
    values = {p: p.detach().float() for p in module.parameters()}
    masters = shard(groups, values, world_size)
    moments = {
        key: shard(groups, {p: s[key] for p, s in optimizer.state.items()}, world_size)
        for key in ("exp_avg", "exp_avg_sq")
    }
    frozen = {name_of[p]: p.detach() for p in module.parameters() if not p.requires_grad}
    with _DeepSpeed() as deepspeed:
        for rank in range(world_size):
            optim = {"zero_stage": deepspeed.Stage(stage), "loss_scaler": deepspeed.LossScaler()}
            base = {
                "state": {
                    number: {
                        "step": torch.tensor(float(optimizer.state[group[0]]["step"])),
                        **{key: flats[rank][number] for key, flats in moments.items()},
                    }
                    for number, group in enumerate(groups)
                },
                "param_groups": [
                    {**group, "params": [number]}
                    for number, group in enumerate(optimizer.param_groups)
                ],
            }
            if stage == 3:
                optim["optimizer_state_dict"] = base
                optim["fp32_flat_groups"] = masters[rank]
                optim["partition_count"] = world_size
            else:
                optim["base_optimizer_state"] = base
                optim["single_partition_of_fp32_groups"] = _without_padding(masters, groups)[rank]
                optim["partition_count"] = [world_size] * len(groups)
            prefix = "bf16_" if bf16 else ""
            file = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": optim, "ds_version": "0.19.8"}, tag / file)
        for rank in range(world_size if stage == 3 else 1):
            state = module.state_dict()
            fragments = dict(frozen)
            if stage == 3:
                fragments = {k: _part(v, rank, world_size).clone() for k, v in frozen.items()}
                for key in state.keys() - dict(module.named_buffers()).keys():
                    state[key] = torch.empty(0)
            content = {
                "module": state,
                "buffer_names": [name for name, _ in module.named_buffers()],
                "param_shapes": shapes,
                "frozen_param_shapes": {k: v.shape for k, v in frozen.items()} or None,
                "frozen_param_fragments": fragments or None,
                "shared_params": _shared(module),
                "ds_version": "0.19.8",
                "global_steps": 7,
                **(client_state or {}),
            }
            torch.save(content, tag / (f"zero_pp_rank_{rank}_{MODEL}" if stage == 3 else MODEL))


def _shard_groups(groups, values, world_size):
    """By rank and group: the concatenated parameters, padded to 2N, split into N parts."""
    flats = []
    for group in groups:
        flat = torch.cat([values[p].reshape(-1) for p in group])
        aligned = 2 * world_size * math.ceil(flat.numel() / (2 * world_size))
        flats.append(F.pad(flat, (0, aligned - flat.numel())).chunk(world_size))
    return [[flat[rank].clone() for flat in flats] for rank in range(world_size)]


def _without_padding(masters, groups):
    lasts = []
    for number, flat in enumerate(masters[-1]):
        total = len(masters) * flat.numel()
        lasts.append(flat[: flat.numel() - total + sum(p.numel() for p in groups[number])].clone())
    return [*masters[:-1], lasts]


def _shard_parameters(groups, values, world_size):
    """By rank and group: 1/N of every parameter, padded to a multiple of N."""
    return [
        [torch.cat([_part(values[p], rank, world_size) for p in group]) for group in groups]
        for rank in range(world_size)
    ]


def _part(value, rank, world_size):
    size = math.ceil(value.numel() / world_size)
    return F.pad(value.reshape(-1), (0, size * world_size - value.numel())).chunk(world_size)[rank]


def _shared(module):
    first = {}
    shared = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if first.setdefault(p, name) != name:
            shared[name] = first[p]
    return shared


class _DeepSpeed:
    """Provides DeepSpeed's classes by name, while objects are pickled."""

    def __enter__(self):
        class LossScaler:
            def __init__(self):
                self.cur_scale = 1.0

        class Stage(int):
            def __reduce__(self):
                return Stage, (int(self),)

        self.kept = {name: m for name, m in sys.modules.items() if name.startswith("deepspeed")}
        for cls, name, place in (
            (LossScaler, "LossScaler", "deepspeed.runtime.fp16.loss_scaler"),
            (Stage, "ZeroStageEnum", "deepspeed.runtime.zero.config"),
        ):
            cls.__module__, cls.__qualname__, cls.__name__ = place, name, name
            module = ModuleType(place)
            setattr(module, name, cls)
            parts = place.split(".")
            for index in range(1, len(parts)):
                parent = ".".join(parts[:index])
                sys.modules.setdefault(parent, ModuleType(parent))
            sys.modules[place] = module
        self.LossScaler, self.Stage = LossScaler, Stage
        return self

    def __exit__(self, *exception):
        for name in [name for name in sys.modules if name.startswith("deepspeed")]:
            del sys.modules[name]
        sys.modules.update(self.kept)


class TrainedModule(nn.Module):
    """Tied, frozen and odd-sized parameters, and buffers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm, self.mid, self.back = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        h = self.frozen(self.embedding(x))
        h = self.norm(h * self.scale.to(h.dtype))
        return self.head(self.back(self.mid(h).relu()))

    def groups(self):
        """Matrices with weight decay, vectors without."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
        ]

    def loss(self, step, rank):
        """Loss of four tokens of this rank."""
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randint(0, 11, (4,), generator=generator)
        return F.cross_entropy(self(x).float(), x.flip(0))
