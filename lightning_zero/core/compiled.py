"""Modules that torch.compile runs: which they are, and what must be over before they begin.

[Note: Graphs end at hooks] The schedule's hooks are no part of a compiled graph: one that runs into
a hook ends there and another one begins behind it. So a whole module in one graph has one for each
unit, and compiled blocks are not cut. A graph must see plain parameters: it is compiled for their
class, and a guarded one, whose gather is still under way, would have it compiled again. Units are
whole by then; what is gathered after a step is waited for before a compiled module begins.
"""

from __future__ import annotations

from torch import nn
from torch._dynamo import OptimizedModule

__all__ = ["compiled_modules", "is_compiled"]


def is_compiled(module: nn.Module) -> bool:
    """`torch.compile(module)`, `module.compile()` or a compiled method on the instance."""
    if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
        return True
    return any(hasattr(value, "_torchdynamo_orig_callable") for value in vars(module).values())


def compiled_modules(root: nn.Module) -> list[nn.Module]:
    """Of `root` and the modules inside it."""
    return [module for module in root.modules() if is_compiled(module)]
