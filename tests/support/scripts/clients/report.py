"""What the scripts of this folder print at the end."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

__all__ = ["report"]


def report(loss: torch.Tensor | float, module: torch.nn.Module) -> None:
    """Prints the loss and the sum of all absolute values of the module, on rank 0.

    Collective: every rank.
    """
    values = [value.double().abs().sum().item() for value in module.state_dict().values()]
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("report", json.dumps({"loss": float(loss), "parameters": sum(values)}))
