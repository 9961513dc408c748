"""`lightning-zero inspect`: prints the content of a checkpoint."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.checkpoint.source import find_damage, format_of, has_checksums, summarize
from lightning_zero.checkpoint.storage import file_sizes, locate
from lightning_zero.layout.foreign_names import printable
from lightning_zero.layout.sizes import format_bytes
from lightning_zero.observe.tables import table

__all__ = ["run"]

_NUM_FILES = 20  # files that are listed by name
_KINDS = ("parameters", "optimizer", "other")
_FIELDS = {
    "written by": {"lightning_zero_version": "lightning_zero", "lightning_version": "Lightning"},
    "run": {"world_size": "world size", "stage": "stage"},
    "progress": {"epoch": "epoch", "global_step": "step"},
}


def run(args: argparse.Namespace) -> int:
    """Prints the content of the checkpoint; returns 1 if it is damaged."""
    name: str = args.checkpoint
    path = locate(name)
    if not path.exists():
        raise FileNotFoundError(f"{name} does not exist.")
    damage = find_damage(name) if args.verify else []
    files = {path.name: path.stat().st_size} if path.is_file() else file_sizes(path)
    found: dict[str, Any] = {"path": name, "format": format_of(path), "files": files}
    if args.verify:
        found |= {"has_checksums": has_checksums(path), "damage": damage}
    if not damage:
        opened = open_checkpoint(name, weights_only=False if args.trust else None)
        found |= summarize(opened)
    print(json.dumps(found, indent=2) if args.json else _text(found))
    return 1 if damage else 0


def _text(found: Mapping[str, Any]) -> str:
    lines = _content(found) if "num_tensors" in found else []
    files = found["files"]
    lines.append(("files", f"{len(files)}, {format_bytes(sum(files.values()))}"))
    lines += [("", f"{name}  {format_bytes(size)}") for name, size in files.items()][:_NUM_FILES]
    if len(files) > _NUM_FILES:
        lines.append(("", f"and {len(files) - _NUM_FILES} more"))
    if "damage" in found:
        verdict = "match" if found["has_checksums"] else "none"
        lines.append(("checksums", "DAMAGED" if found["damage"] else verdict))
        lines += [("", line) for line in found["damage"]]
    shown = [(title, printable(text)) for title, text in lines]  # names may hold control characters
    return f"{found['path']}: {found['format']}\n{table(shown, left=(0, 1))}"


def _content(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for name, keys in _FIELDS.items():
        known = [f"{word} {found[key]}" for key, word in keys.items() if found[key] is not None]
        if known:
            lines.append((name, ", ".join(known)))
    tied = f", {found['num_tied']} tied" if found["num_tied"] else ""
    average = ", averaged; the trained weights are stored beside them"
    if not found["has_average"]:
        average = ""
    lines += [
        ("weights", f"{found['num_tensors']} tensors{tied}{average}"),
        ("", f"{found['parameters_numel']:,} elements: {_dtypes(found['dtypes_numel'])}"),
    ]
    bad = found["nonfinite_parameters"]
    if bad:
        more = f" and {len(bad) - 1} more" if bad[1:] else ""
        lines.append(("NON-FINITE", f"saved with NaN or infinity in {bad[0]}{more}"))
    if found["optimizer_bytes"]:
        lines.append(("optimizer", _dtypes(found["optimizer_dtypes_numel"])))
    kinds = [f"{kind} {format_bytes(found[f'{kind}_bytes'])}" for kind in _KINDS]
    lines.append(("bytes", ", ".join(kinds)))
    for number, tensor in enumerate(found["largest"]):
        shape = " x ".join(map(str, tensor["shape"])) or "scalar"
        title = "largest" if number == 0 else ""
        lines.append((title, f"{tensor['name']}  {shape}  {tensor['dtype']}"))
    lines.append(("entries", ", ".join(found["entries"])))
    return lines


def _dtypes(numel: Mapping[str, int]) -> str:
    return ", ".join(f"{dtype} {count:,}" for dtype, count in numel.items()) or "none"
