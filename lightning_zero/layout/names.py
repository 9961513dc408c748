"""Names of parameters and modules in plans, checkpoints and settings.

`torch.compile(module)` wraps a module in another one, which inserts `_orig_mod.` into names. Plans
and checkpoints are written without it. Checkpoints are read with and without it, so compiled and
plain modules can load each other's.
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule

__all__ = [
    "matches_module",
    "parameters_by_name",
    "saved_name",
    "no_match_message",
    "with_compiled_names",
    "with_saved_names",
]


def saved_name(name: str) -> str:
    """`name` without the `_orig_mod.` of compiled modules."""
    return name.replace("_orig_mod.", "")


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of `module` by their names in a plan."""
    return {saved_name(name): parameter for name, parameter in module.named_parameters()}


# ---------------------------------------------------------------- state dicts


def with_saved_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with the names of the module without compilation."""
    if not any("_orig_mod." in name for name in state_dict):
        return state_dict
    return _renamed(state_dict, saved_name)


def with_compiled_names(module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict with the names of `module`, whether that or the saved module is compiled."""
    around = [name for name, m in module.named_modules() if isinstance(m, OptimizedModule)]
    if not around and not any("_orig_mod." in name for name in state_dict):
        return state_dict

    def own_name(name: str) -> str:
        name = saved_name(name)
        for outer in around:  # from the outside in: names of the inner modules already contain it
            prefix = f"{outer}." if outer else ""
            if name.startswith(prefix):
                name = f"{prefix}_orig_mod.{name[len(prefix) :]}"
        return name

    return _renamed(state_dict, own_name)


def _renamed(state_dict: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    renamed: OrderedDict[str, Any] = OrderedDict((rename(k), v) for k, v in state_dict.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:  # versions by module name
        renamed._metadata = OrderedDict(  # type: ignore[attr-defined]
            (rename(f"{name}.").removesuffix(".") if name else name, value)
            for name, value in metadata.items()
        )
    return renamed


# ---------------------------------------------------------------- settings


def matches_module(path: str, module: nn.Module, item: str | type[nn.Module]) -> bool:
    """Whether `item` is a class of `module`, or a name or pattern that matches its path or class.

    Base classes count, too. `path`: qualified name of the module.
    """
    if isinstance(item, type):
        return isinstance(module, item)
    names = [path, *(kind.__name__ for kind in type(module).__mro__)]
    return any(fnmatchcase(name, item) for name in names)


def no_match_message(
    option: str,
    modules: Mapping[str, nn.Module],
    item: str | type[nn.Module],
    *,
    kind: str = "module with parameters",
    parameters: Iterable[str] = (),
    words: Iterable[str] = (),
) -> str:
    """Text of the error if `item` of the setting `option` matches nothing in the model.

    Args:
        option: Name of the setting.
        modules: Modules that it can select, by qualified name.
        item: Class, name or pattern.
        kind: Description of `modules`.
        parameters: Names of parameters that it can select, too.
        words: Other items of the setting.
    """
    if isinstance(item, type):
        return f"{option} has {item.__name__}, but no {kind} is an instance of it."
    classes = [type(m).__name__ for m in modules.values()]
    known = dict.fromkeys([*words, *parameters, *filter(None, modules), *classes])
    near = difflib.get_close_matches(item, known, n=3, cutoff=0.0)
    what, names = (f"parameter or {kind}", "parameters") if parameters else (kind, "modules")
    nearest = f"The nearest: {', '.join(near)}." if near else "There is none."
    return (
        f"{option} has {item!r}, which matches no {what}, by name or class; write full names, as "
        f"in named_{names}(), or patterns such as '*.{item.lstrip('*.') or 'head'}'. {nearest}"
    )
