"""`lightning-zero inspect`: what is in a checkpoint."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.checkpoint.atomic import Place, files_below, locate
from lightning_zero.checkpoint.source import find_damage, has_checksums
from lightning_zero.checkpoint.summary import format_of, summarize
from lightning_zero.cli.sizes import in_words

__all__ = ["add_parser"]

_NUM_FILES = 20  # that are printed one by one
_KINDS = ("parameters", "optimizer", "other")
_FACTS = {
    "written by": {"lightning_zero_version": "lightning_zero", "lightning_version": "Lightning"},
    "run": {"world_size": "world size", "stage": "stage"},
    "progress": {"epoch": "epoch", "global_step": "step"},
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "inspect",
        help="say what is in a checkpoint",
        description="Says what is in a checkpoint, of any format, without reading its tensors. "
        "With --verify they are read and compared with their checksums; the status is 1 where "
        "some are damaged.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a path, or an address as s3://")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--verify", action="store_true", help="compare with the checksums")
    parser.add_argument(
        "--trust", action="store_true", help="unpickle any class; only for files that you trust"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    name: str = args.checkpoint
    path = locate(name)
    if not path.exists():
        raise FileNotFoundError(f"{name} does not exist.")
    damage = find_damage(name) if args.verify else []
    found: dict[str, Any] = {"path": name, "format": format_of(path), "files": _files(path)}
    if args.verify:
        found |= {"has_checksums": has_checksums(path), "damage": damage}
    if not damage:
        opened = open_checkpoint(name, weights_only=False if args.trust else None)
        found |= summarize(opened)
    print(json.dumps(found, indent=2) if args.json else _text(found))
    return 1 if damage else 0


def _files(path: Place) -> dict[str, int]:
    """Bytes by file name."""
    return {path.name: path.stat().st_size} if path.is_file() else files_below(path)


def _text(found: Mapping[str, Any]) -> str:
    lines = [f"{found['path']}: {found['format']}"]
    if "num_tensors" in found:
        lines += _content(found)
    files = list(found["files"].items())
    lines.append(f"{'files':<12}{len(files)}, {in_words(sum(found['files'].values()))}")
    lines += [f"{'':<12}{in_words(size):>12}  {name}" for name, size in files[:_NUM_FILES]]
    if len(files) > _NUM_FILES:
        lines.append(f"{'':<12}and {len(files) - _NUM_FILES} more")
    if "damage" in found:
        verdict = "as they were written" if found["has_checksums"] else "there are none"
        lines.append(f"{'checksums':<12}{'DAMAGED' if found['damage'] else verdict}")
        lines += [f"{'':<12}{line}" for line in found["damage"]]
    return "\n".join(lines)


def _content(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, keys in _FACTS.items():
        known = [f"{word} {found[key]}" for key, word in keys.items() if found[key] is not None]
        if known:
            lines.append(f"{name:<12}{', '.join(known)}")
    tied = f", {found['num_tied']} of them tied to others" if found["num_tied"] else ""
    average = ", averaged; the trained ones beside them" if found["has_average"] else ""
    lines.append(f"{'weights':<12}{found['num_tensors']} tensors{tied}{average}")
    lines.append(
        f"{'':<12}{found['parameters_numel']:,} elements: {_dtypes(found['dtypes_numel'])}"
    )
    if found["optimizer_bytes"]:
        dtypes = _dtypes(found["optimizer_dtypes_numel"])
        lines.append(f"{'optimizer':<12}{dtypes}")
    kinds = [f"{kind} {in_words(found[f'{kind}_bytes'])}" for kind in _KINDS]
    lines.append(f"{'bytes':<12}{', '.join(kinds)}")
    for number, tensor in enumerate(found["largest"]):
        title = "largest" if number == 0 else ""
        shape = " x ".join(map(str, tensor["shape"])) or "scalar"
        lines.append(f"{title:<12}{tensor['name']}  {shape}  {tensor['dtype']}")
    lines.append(f"{'entries':<12}{', '.join(found['entries'])}")
    return lines


def _dtypes(numel: Mapping[str, int]) -> str:
    return ", ".join(f"{dtype} {count:,}" for dtype, count in numel.items()) or "none"
