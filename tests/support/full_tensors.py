"""Optimizers that step full tensors, and modules that they train."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import GPTModule, Recorder

__all__ = ["ADAFACTOR", "CASES", "Lamb", "MuonAndAdam", "NormedLamb", "Rows"]


class _OfTensors(torch.optim.Optimizer):
    """Steps one tensor after another."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin([p for g in self.param_groups for p in g["params"] if p.grad is not None])
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p, self.state[p])
        return loss

    def begin(self, parameters: list[Tensor]) -> None:
        """Called with all tensors that have gradients, before they are stepped."""

    def update(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
        """Steps one tensor."""
        raise NotImplementedError


class Lamb(_OfTensors):
    """LAMB (You et al., 2020): Adam with steps scaled to the norm of each tensor."""

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    def update(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
        """See the class."""
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        state["exp_avg"].lerp_(p.grad, 0.1)
        state["exp_avg_sq"].lerp_(p.grad.square(), 0.01)
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
        p.sub_(update, alpha=float(group["lr"] * p.norm() / (update.norm() + 1e-6)))


class NormedLamb(Lamb):
    """Lamb with gradients divided by the norm of all gradients."""

    def begin(self, parameters: list[Tensor]) -> None:
        """See the class."""
        grads = [p.grad for p in parameters]
        if grads:
            torch._foreach_div_(grads, torch.stack(torch._foreach_norm(grads)).norm() + 1e-6)


class Rows(_OfTensors):
    """Keeps one number for each row, in a list; counts its calls, so it needs a single call."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    def begin(self, parameters: list[Tensor]) -> None:
        """Counts the calls."""
        for group in self.param_groups:
            group["calls"] += 1

    def update(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
        """See the class."""
        rows = p.grad.reshape(len(p), -1) if p.dim() else p.grad.reshape(1, 1)
        (seen,) = state.setdefault("seen", [torch.zeros(len(rows))])
        seen.add_(rows.square().mean(dim=1))
        scale = (seen + 0.1).sqrt() * group["calls"]
        p.sub_((rows / scale[:, None]).reshape(p.shape), alpha=group["lr"])


class MuonAndAdam(_OfTensors):
    """Muon for groups with `use_muon`, Adam for the others, in one optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    def update(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
        """See the class."""
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
        momentum.lerp_(p.grad, 0.1)
        if group["use_muon"]:
            p.sub_(_orthogonal(momentum), alpha=group["lr"])
            return
        square = state.setdefault("exp_avg_sq", torch.zeros_like(p))
        square.lerp_(p.grad.square(), 0.05)
        p.addcdiv_(momentum, square.sqrt() + 1e-3, value=-group["lr"])


def _orthogonal(matrix: Tensor) -> Tensor:
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / (wide.norm() + 1e-3)
    for _ in range(3):
        wide = 1.5 * wide - 0.5 * wide @ wide.T @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


ADAFACTOR = partial(torch.optim.Adafactor, lr=1e-2, eps=(1e-3, 1e-3))
_MUON = partial(torch.optim.Muon, lr=1e-2)
_ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)


class _Built(GPTModule):
    """The tiny GPT under any optimizer."""

    def __init__(self, build: Callable[..., torch.optim.Optimizer] = Lamb, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.build = build

    def configure_optimizers(self) -> Any:
        return self.build(self.parameters())


class _Combined(GPTModule):
    """One optimizer, with a group of matrices and a group of the rest."""

    def configure_optimizers(self) -> Any:
        matrices, rest = _split(self)
        return MuonAndAdam(
            [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
        )


class _TwoOptimizers(GPTModule):
    """torch's Muon for the matrices of the blocks, AdamW for the rest."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        matrices, rest = _split(self)
        return [_MUON(matrices), _ADAMW(rest)]


class _TwoClipped(_TwoOptimizers):
    """Two micro-batches, clipped, with a Muon that does not round to bfloat16."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        matrices, rest = _split(self)
        return [MuonAndAdam([{"params": matrices, "use_muon": True}]), _ADAMW(rest)]


class _Conv(Recorder):
    """Tensors of 4, 2, 1 and 0 dimensions."""

    def __init__(self, build: Callable[..., torch.optim.Optimizer] = Lamb, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.build = build
        self.conv = nn.Conv2d(1, 5, 2)
        self.linear = nn.Linear(15, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        x, y = part
        hidden = self.conv(x.view(-1, 1, 2, 4)).tanh().flatten(1)
        return F.mse_loss(self.linear(hidden) * self.scale, y)

    def configure_optimizers(self) -> Any:
        return self.build(self.parameters())


class _Matrices(_Conv):
    """Matrices only, as Muon requires."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(build=_MUON, **kwargs)
        self.conv, self.scale = nn.Linear(8, 13, bias=False), None
        self.linear = nn.Linear(13, 3, bias=False)

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        x, y = part
        return F.mse_loss(self.linear(self.conv(x).tanh()), y)


def _split(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    named = dict(module.named_parameters())
    matrices = [p for name, p in named.items() if "blocks" in name and p.dim() == 2]
    rest = [p for p in named.values() if all(p is not other for other in matrices)]
    return matrices, rest


# Modules and gradient options of the Trainer, by name.
CASES: dict[str, tuple[Callable[..., Recorder], dict[str, Any]]] = {
    "Muon": (_Matrices, {}),
    "Adafactor": (partial(_Built, ADAFACTOR), {"gradient_clip_val": 0.3}),
    "LAMB": (partial(_Conv, Lamb), {}),
    "LAMB, accumulated": (
        partial(_Built, Lamb, num_batches=10),
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
    ),
    "all in one call": (partial(_Conv, Rows), {}),
    "Muon and AdamW": (_TwoOptimizers, {}),
    "Muon and AdamW, clipped": (partial(_TwoClipped, num_batches=10), {}),
    "Muon and Adam in one": (_Combined, {}),
}
