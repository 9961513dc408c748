"""Copies options: descriptions from `ZeroConfig` to `ZeroStrategy`, names from there to Hydra.

`help()`, editors, the reference and LightningCLI read docstrings, some of them without running
code. So the docstring of `ZeroStrategy` repeats the texts of `ZeroConfig`, and a test compares
them. After a change of `ZeroConfig` or of the
arguments of `ZeroStrategy`:

    python -m tests.tools.option_docs --write

A description of `ZeroStrategy` may go on with sentences of its own, from "With the Trainer" on.

Hydra's schema in `launch/options.py` repeats names, types and defaults, so that a configuration is
composed without importing torch and Lightning.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from lightning_zero import ZeroConfig, ZeroStrategy
from lightning_zero.launch import options

_SIMPLE = {bool, int, float, str, NoneType}
_SET_BY_TRAINER = {"accelerator", "parallel_devices", "cluster_environment", "precision_plugin"}
_SCHEMA = '''"""Hydra's schema of the options of `ZeroStrategy`, without torch and Lightning.

Written by `python -m tests.tools.option_docs --write`; a test compares it with `ZeroStrategy`.
"""

from dataclasses import dataclass
from typing import Any

__all__ = ["ZeroStrategySettings"]


@dataclass
class ZeroStrategySettings:
    """Options whose default YAML can express; Any: the strategy checks the value itself."""

'''
_ADDED = "With the Trainer"
_WIDTH = 100


def descriptions(doc: str, section: str) -> dict[str, str]:
    """Descriptions by name in one section of a Google-style docstring, each on one line."""
    body = re.search(rf"^{section}:\n((?:    .*\n?|\n)+)", inspect.cleandoc(doc), re.MULTILINE)
    assert body is not None, f"no section {section}"
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", body[1], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def arguments() -> list[str]:
    """Names of the arguments of `ZeroStrategy`, in the order of its signature."""
    return list(inspect.signature(ZeroStrategy).parameters)


def expected() -> dict[str, str]:
    """Descriptions of the arguments of `ZeroStrategy`: those of `ZeroConfig`, and its own."""
    assert ZeroConfig.__doc__ is not None
    assert ZeroStrategy.__doc__ is not None
    of_engine = descriptions(ZeroConfig.__doc__, "Attributes")
    own = descriptions(ZeroStrategy.__doc__, "Args")
    texts = {}
    for name in arguments():
        text = own.get(name, "")
        if name in of_engine:
            added = _ADDED + text.partition(_ADDED)[2] if _ADDED in text else ""
            text = f"{of_engine[name]} {added}".strip()
        texts[name] = text
    return texts


def source_with_descriptions() -> tuple[Path, str]:
    """The file of `ZeroStrategy`, and its text with the expected descriptions."""
    path = Path(inspect.getfile(ZeroStrategy))
    source = path.read_text()
    (node,) = [
        one
        for one in ast.parse(source).body
        if isinstance(one, ast.ClassDef) and one.name == ZeroStrategy.__name__
    ]
    lines = source.splitlines(keepends=True)
    start, end = node.body[0].lineno - 1, node.body[0].end_lineno
    doc = "".join(lines[start:end])
    entries = "".join(_entry(name, text) for name, text in expected().items())
    doc = re.sub(
        r"(?<=^    Args:\n)(?: {8}.*\n)+", entries.replace("\\", r"\\"), doc, flags=re.MULTILINE
    )
    return path, "".join(lines[:start]) + doc + "".join(lines[end:])


def _entry(name: str, text: str) -> str:
    filled = textwrap.fill(
        f"{name}: {text}",
        _WIDTH,
        initial_indent=" " * 8,
        subsequent_indent=" " * 12,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{filled}\n"


def source_of_schema() -> tuple[Path, str]:
    """The file of Hydra's schema, and the text that it should have."""
    hints = get_type_hints(ZeroStrategy.__init__)
    lines = ['    _target_: str = "lightning_zero.ZeroStrategy"\n']
    for name, parameter in inspect.signature(ZeroStrategy).parameters.items():
        if name not in _SET_BY_TRAINER and type(parameter.default) in _SIMPLE:
            default = repr(parameter.default).replace("'", '"')
            lines.append(f"    {name}: {_yaml_type(hints[name])} = {default}\n")
    return Path(options.__file__), _SCHEMA + "".join(lines)


def _yaml_type(hint: Any) -> str:
    """Text of `hint` if Hydra can check it, else Any: the strategy checks such settings itself."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if not set(parts) <= _SIMPLE:
        return "Any"
    return " | ".join("None" if part is NoneType else part.__name__ for part in parts)


def main() -> None:
    """Compares the texts, or writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="update the files")
    is_writing = parser.parse_args().write
    for path, text in (source_with_descriptions(), source_of_schema()):
        if is_writing:
            path.write_text(text)
        elif text != path.read_text():
            raise SystemExit(f"{path} differs from ZeroConfig or ZeroStrategy; run with --write")


if __name__ == "__main__":
    main()
