"""Optimizers with default settings, by name: those of torch, and those of this package."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.optim import AdamW8bit, Lion8bit, SGD8bit

__all__ = ["OPTIMIZER_NAMES", "make_optimizers"]

_FACTORIES: dict[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}
_FACTORIES |= {kind.__name__.lower(): kind for kind in (AdamW8bit, Lion8bit, SGD8bit)}
OPTIMIZER_NAMES = tuple(sorted([*_FACTORIES, "sgd_momentum"]))


def make_optimizers(
    name: str, named: Mapping[str, nn.Parameter], blocks: Collection[str] = ()
) -> list[Optimizer]:
    """Makes optimizers with default settings for all trainable parameters.

    "sgd_momentum" is SGD with momentum. Muon steps the matrices of the blocks; AdamW steps the
    other parameters.

    Args:
        name: Name of the optimizer's class, in upper or lower case.
        named: Parameters by name.
        blocks: Qualified names of the model's repeated blocks.

    Raises:
        ValueError: The name is unknown, or the model has no parameter for the optimizer.
    """
    key = name.lower()
    trained = {n: p for n, p in named.items() if p.requires_grad}
    if not trained:
        raise ValueError("the model has no parameter that requires a gradient.")
    if key not in OPTIMIZER_NAMES:
        known = ", ".join(OPTIMIZER_NAMES)
        raise ValueError(f"optimizer must be one of {known}, got {name!r}.")
    if key == "sgd_momentum":
        return [torch.optim.SGD(trained.values(), lr=0.1, momentum=0.9)]
    if key != "muon":
        return [_FACTORIES[key](trained.values(), lr=0.1)]  # type: ignore[call-arg]
    prefixes = tuple(f"{block}." for block in blocks)
    matrices = [n for n, p in trained.items() if p.dim() == 2 and n.startswith(prefixes)]
    if not matrices:
        raise ValueError("Muon steps the matrices of repeated blocks, but the model has none.")
    rest = [p for n, p in trained.items() if n not in matrices]
    muon = torch.optim.Muon([trained[n] for n in matrices])
    return [muon, torch.optim.AdamW(rest)] if rest else [muon]
