"""Optimizers that keep their states in few bits, with a scale for each block of elements."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import Recorder

__all__ = ["KINDS", "LIBRARIES", "BlockModule", "Blocks", "Blockwise", "builder_of"]

BLOCK = 256


class Blocks(torch.Tensor):
    """Float values as integers of 8 bits and a scale for each block: a tensor made of tensors."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Blocks:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, values: Tensor) -> Blocks:
        rows = values.reshape(-1, BLOCK)
        scale = rows.abs().amax(dim=1).clip(1e-12) / 127
        codes = (rows / scale[:, None]).round().to(torch.int8)
        return cls(codes.view(values.shape), scale)

    def floats(self) -> Tensor:
        return (self.codes.view(-1, BLOCK) * self.scale[:, None]).view(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: Any, *_: Any) -> Blocks:
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} of Blocks")


class Blockwise(torch.optim.Optimizer):
    """Adam with quantized moments, for tensors of at least 4096 elements that fill their blocks.

    The momentum is stored in Blocks, the second moment as plain tensors of codes and scales. Other
    tensors have float32 moments.
    """

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group["lr"], self.state[p])
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads like torch, which casts codes to floats, and casts them back."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if isinstance(state["square"], dict):
                state["square"]["codes"] = state["square"]["codes"].to(torch.int8)

    @staticmethod
    def _update(p: Tensor, lr: float, state: dict[str, Any]) -> None:
        if p.numel() < 4096 or p.numel() % BLOCK:
            momentum = state.setdefault("momentum", torch.zeros_like(p))
            square = state.setdefault("square", torch.zeros_like(p))
            momentum.lerp_(p.grad, 0.1)
            square.lerp_(p.grad.square(), 0.05)
        else:
            zeros = Blocks.of(torch.zeros_like(p))
            momentum = state.get("momentum", zeros).floats().lerp(p.grad, 0.1)
            saved = state.get("square", {"codes": zeros.codes, "scale": zeros.scale})
            square = Blocks(**saved).floats().lerp(p.grad.square(), 0.05)
            state["momentum"], kept = Blocks.of(momentum), Blocks.of(square)
            state["square"] = {"codes": kept.codes, "scale": kept.scale}
        p.addcdiv_(momentum, square.clip(0).sqrt() + 0.1, value=-lr)


class BlockModule(Recorder):
    """A weight of 20 blocks, and weights that are too small or not a multiple of the block."""

    def __init__(self, kind: str = "tests.support.low_bit.Blockwise", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind = kind
        self.layers = nn.Sequential(
            nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 3)
        )

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        x, y = part
        return F.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> Any:
        return builder_of(self.kind)(self.parameters(), lr=1e-2)


# By library, its optimizers; each must give the values of one process.
KINDS = {
    "tests": ["tests.support.low_bit.Blockwise"],
    "torchao": [f"torchao.optim.{name}" for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")],
    "bitsandbytes": [
        f"bitsandbytes.optim.{name}" for name in ("AdamW8bit", "Lion8bit", "AdamW32bit")
    ],
}
LIBRARIES = [name for name in KINDS if importlib.util.find_spec(name) is not None]


def builder_of(kind: str) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer class of this name; torchao's is run without compiling it, which is slow."""
    library, name = kind.rsplit(".", 1)
    built: Callable[..., torch.optim.Optimizer] = getattr(importlib.import_module(library), name)
    torch.compiler.set_stance("force_eager")
    return built
