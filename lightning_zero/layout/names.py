"""Names of parameters and modules, as plans and checkpoints have them."""

from __future__ import annotations

from torch import nn

__all__ = ["modules_by_name", "parameters_by_name", "saved_name"]


def saved_name(name: str) -> str:
    """`name` without what `torch.compile(module)` puts around a module: the same without it."""
    return name.replace("_orig_mod.", "")


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """As `module.named_parameters()`, by the names that a plan has."""
    return {saved_name(name): parameter for name, parameter in module.named_parameters()}


def modules_by_name(module: nn.Module) -> dict[str, nn.Module]:
    """The module and all below it, those that are shared by every name."""
    return {saved_name(n): m for n, m in module.named_modules(remove_duplicate=False)}
