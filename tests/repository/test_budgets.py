"""What the package may not exceed. A change that removes a concept lowers its limit.

The files that an unshard and a gradient enter are counted in tests/benchmarks/test_hops.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.repository import test_compat
from tests.repository.test_layers import MODULES, syntax_of

RECOVERING = re.compile(
    r"_?(reset|recover|regroup|restart|refuse_regroup|mark_lost|leave_failed)\w*"
)
MODES = {"TorchFunctionMode", "TorchDispatchMode"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef

LIMITS = {
    "attributes of a class": 27,
    "methods of a class": 39,
    "classes with more than 18 attributes or 28 methods": 5,
    "functions that reset or recover": 4,
    "subclasses of Tensor": 4,
    "function and dispatch modes": 3,
    "private names of torch and Lightning": 118,
    "lines with the name `one`": 5,
    "lines of a module": 598,
    "lines of a function": 65,
}


@cache
def _definitions() -> list[ast.AST]:
    """All classes and functions."""
    kinds = ast.ClassDef | FUNCTIONS
    nodes = (node for module in MODULES for node in ast.walk(syntax_of(module)))
    return [node for node in nodes if isinstance(node, kinds)]


def _nodes(kind: type) -> Iterator:
    yield from (node for node in _definitions() if isinstance(node, kind))


def _attributes(cls: ast.ClassDef) -> set[str]:
    """Names that the methods of a class assign to `self`, and fields of a dataclass."""
    fields = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    targets = (
        node
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
    of_self = {t.attr for t in targets if isinstance(t.value, ast.Name) and t.value.id == "self"}
    return fields | of_self


def _num_methods(cls: ast.ClassDef) -> int:
    return sum(isinstance(node, FUNCTIONS) for node in cls.body)


def _bases(cls: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).rpartition(".")[2] for base in cls.bases}


def _num_ones(module: str) -> int:
    """Lines on which a variable or argument is called `one`."""
    nodes = ast.walk(syntax_of(module))
    return len({n.lineno for n in nodes if "one" in (getattr(n, "id", ""), getattr(n, "arg", ""))})


def _private_names() -> set[str]:
    listed = {
        f"{owner}: {path}" for owner, paths in test_compat.ATTRIBUTES.items() for path in paths
    }
    return listed | {f"{m}.{name}" for m, names in test_compat.IMPORTED.items() for name in names}


def _counts() -> dict[str, int]:
    classes = list(_nodes(ast.ClassDef))
    functions = list(_nodes(FUNCTIONS))
    sizes = [(len(_attributes(cls)), _num_methods(cls)) for cls in classes]
    tensors = {"Tensor", "Parameter"}
    for _ in range(3):  # subclasses of subclasses
        tensors |= {cls.name for cls in classes if _bases(cls) & tensors}
    return {
        "attributes of a class": max(attributes for attributes, _ in sizes),
        "methods of a class": max(methods for _, methods in sizes),
        "classes with more than 18 attributes or 28 methods": sum(
            attributes > 18 or methods > 28 for attributes, methods in sizes
        ),
        "functions that reset or recover": sum(
            bool(RECOVERING.fullmatch(function.name)) for function in functions
        ),
        "subclasses of Tensor": len(tensors) - 2,
        "function and dispatch modes": sum(bool(_bases(cls) & MODES) for cls in classes),
        "private names of torch and Lightning": len(_private_names()),
        "lines with the name `one`": sum(map(_num_ones, MODULES)),
        "lines of a module": max(len(p.read_text().splitlines()) for p in MODULES.values()),
        "lines of a function": max(f.end_lineno - f.lineno + 1 for f in functions),
    }


def test_nothing_exceeds_its_limit():
    counts = _counts()
    assert counts.keys() == LIMITS.keys()
    exceeding = {name: found for name, found in counts.items() if found > LIMITS[name]}
    assert not exceeding, f"{exceeding}, limits {LIMITS}"
