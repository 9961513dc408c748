"""Finds units: the modules whose sharded parameters are unsharded together.

1. Blocks: modules that match `unit_classes`; without it, the members of each `ModuleList`,
   `ModuleDict` or `Sequential` with repeated classes, the outermost first.
2. Other modules with more parameters of their own than a limit: embeddings, output layers.
3. All other parameters, and those that two units share, belong to the root. A scripted module
   belongs to the unit around it, because it has no hooks.

[Note: Blocks in blocks] A member may itself contain repeated blocks: a stage of a vision model, or
a stack between two layers. Unsharding the member at once would need as much memory as the
stack. So its blocks are the units if they are of one kind and run one after the other: they are in
a `Sequential`, or no other member is of the kind of this one. A layer among layers of its kind is
one unit whatever it contains, such as the experts of a mixture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from torch import nn
from torch.jit import ScriptModule

from lightning_zero.layout.names import matches_module, no_match_message, saved_name

__all__ = ["LISTS", "ROOT", "find_blocks", "find_units"]

ROOT = ""
LISTS = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*LISTS, nn.Sequential)
_UNIT_NUMEL = 2**18  # a single smaller module belongs to the root, for one all-gather less

_Members = list[tuple[str, nn.Module]]  # by qualified name


def find_units(
    module: nn.Module, named: Mapping[str, nn.Parameter], blocks: Sequence[str]
) -> dict[str, str]:
    """Unit of each parameter that does not belong to the root, by name.

    Args:
        module: The root.
        named: Parameters of `module`, each once.
        blocks: Result of `find_blocks`; a parameter belongs to the innermost block.
    """
    units = set(blocks)
    for name, child in _hookable(module):
        own = sum(p.numel() for p in child.parameters(recurse=False))
        if name != ROOT and own >= _UNIT_NUMEL and _innermost(name, units) == ROOT:
            units.add(name)
    users: dict[nn.Parameter, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, set()).add(_innermost(name, units))
    return {
        name: next(iter(users[parameter]))
        for name, parameter in named.items()
        if len(users[parameter]) == 1 and users[parameter] != {ROOT}
    }


def find_blocks(
    module: nn.Module,
    classes: Sequence[str | type[nn.Module]] = (),
    *,
    option: str = "unit_classes",
    words: Sequence[str] = (),
) -> list[str]:
    """Qualified names of the blocks; see the docstring of this module.

    Args:
        module: The root.
        classes: Items of `option` that select blocks; empty: repeated blocks.
        option: Name of the option of `ZeroConfig`.
        words: Items of `option` that select no blocks; errors suggest them, too.

    Raises:
        ValueError: An item of `classes` matches no module with parameters.
    """
    if not classes:
        return [name for name, _ in _repeated_blocks(ROOT, module, {module})]
    candidates = {name: m for name, m in _hookable(module) if name != ROOT and _has_parameters(m)}
    found: dict[str, None] = {}
    for item in classes:
        matching = [n for n, m in candidates.items() if matches_module(saved_name(n), m, item)]
        if not matching:
            known = {saved_name(name): m for name, m in candidates.items()}
            raise ValueError(no_match_message(option, known, item, words=words))
        found |= dict.fromkeys(matching)
    return list(found)


def _hookable(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that can be units: a scripted one has no hooks."""
    return [pair for pair in module.named_modules() if not isinstance(pair[1], ScriptModule)]


def _repeated_blocks(path: str, module: nn.Module, seen: set[nn.Module]) -> _Members:
    """Blocks in `module`, whose name is `path`; a shared module counts once."""
    children = [(name, child) for name, child in module.named_children() if _has_parameters(child)]
    # A list has no forward of its own: its members are searched separately.
    members = [child for _, child in children if not isinstance(child, LISTS)]
    is_repeated = isinstance(module, _CONTAINERS) and _any_twice(map(type, members))
    kinds = Counter(map(_kind, members))
    blocks: _Members = []
    for name, child in children:
        if child in seen:
            continue
        seen.add(child)
        full_name = f"{path}.{name}" if path else name
        inner = _repeated_blocks(full_name, child, seen)
        is_member = is_repeated and not isinstance(child, (*LISTS, ScriptModule))
        is_stack = _is_stack(child, inner, is_alone=kinds[_kind(child)] == 1)
        blocks += [(full_name, child)] if is_member and not is_stack else inner
    return blocks


def _is_stack(member: nn.Module, inner: _Members, *, is_alone: bool) -> bool:
    """Whether the blocks in `member` are the units. See [Note: Blocks in blocks]."""
    kinds = (_kind(block) for _, block in inner if any(True for _ in block.children()))
    return (is_alone or isinstance(member, nn.Sequential)) and _any_twice(kinds)


def _kind(module: nn.Module) -> tuple[type[nn.Module], int]:
    return type(module), sum(p.numel() for p in module.parameters())


def _any_twice(kinds: Iterable[object]) -> bool:
    return max(Counter(kinds).values(), default=0) > 1


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _innermost(name: str, units: Set[str]) -> str:
    """The innermost of `units` that is `name` or contains it; the root if none does."""
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name
