"""Copies the descriptions of `ZeroConfig`'s options into the docstring of `ZeroStrategy`.

`help()`, editors, the reference and LightningCLI read docstrings, some of them without running
code. So the docstring of `ZeroStrategy` repeats the texts of `ZeroConfig`, and a test compares
them. After a change of `ZeroConfig`:

    python -m tests.tools.option_docs --write

A description of `ZeroStrategy` may go on with sentences of its own, from "With the Trainer" on.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from pathlib import Path

from lightning_zero import ZeroConfig, ZeroStrategy

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


def main() -> None:
    """Compares the texts, or writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="update the docstring")
    is_writing = parser.parse_args().write
    path, text = source_with_descriptions()
    if is_writing:
        path.write_text(text)
    elif text != path.read_text():
        raise SystemExit(f"{path} differs from ZeroConfig; run with --write")


if __name__ == "__main__":
    main()
