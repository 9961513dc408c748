"""`lightning-zero export`: writes a checkpoint in another format."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath, PurePosixPath
from typing import Any

import torch
from tqdm import tqdm

from lightning_zero._lightning.pytorch import __version__ as lightning_version
from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.checkpoint.export import drop_pages, plan_export
from lightning_zero.checkpoint.source import find_damage, raise_damage
from lightning_zero.checkpoint.storage import CheckpointPath, as_local, locate
from lightning_zero.layout.foreign_names import printable
from lightning_zero.layout.sizes import format_bytes

__all__ = ["run"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MAX_SHARD_BYTES = 5 * 1024**3
_DROP_BYTES = 32 * 1024**2  # mapped pages are dropped after this many bytes


def run(args: argparse.Namespace) -> int:
    checkpoint, out = locate(args.checkpoint), locate(args.out)
    _check_paths(checkpoint, out, args)
    max_shard_bytes = _max_shard_bytes(args, out)
    if not args.no_verify:
        raise_damage(args.checkpoint, find_damage(args.checkpoint))
    opened = open_checkpoint(args.checkpoint, weights_only=False if args.trust else None)
    opened.setdefault("pytorch-lightning_version", lightning_version)
    planned = plan_export(
        opened,
        args.format,
        dtype=_DTYPES[args.dtype] if args.dtype else None,
        max_shard_bytes=max_shard_bytes,
        is_averaged=args.ema,
        part=args.part,
    )
    for note in planned.notes:
        print(f"lightning-zero export: {printable(note)}", file=sys.stderr)
    with _progress_bar(planned.nbytes, checkpoint) as progress:
        planned.write(out, progress)
    print(f"{args.out}: {args.format}, {format_bytes(planned.nbytes)} of tensors")
    return 0


def _check_paths(checkpoint: CheckpointPath, out: CheckpointPath, args: argparse.Namespace) -> None:
    source, target = _resolved(checkpoint), _resolved(out)
    if not checkpoint.exists():
        raise FileNotFoundError(f"{args.checkpoint} does not exist.")
    if source == target or target in source.parents or source in target.parents:
        raise ValueError(
            f"{args.out} and {args.checkpoint} overlap; choose another path for the export."
        )
    local = as_local(out)
    if not args.force and (os.path.lexists(local) if local else out.exists()):
        raise FileExistsError(
            f"{args.out} exists; choose another path, or replace it with --force."
        )


def _resolved(path: CheckpointPath) -> PurePath:
    local = as_local(path)
    return local.resolve() if local else PurePosixPath(str(path))


def _max_shard_bytes(args: argparse.Namespace, out: CheckpointPath) -> int | None:
    limit: int | None = args.max_shard_size
    is_file = out.suffix == ".safetensors"
    if limit is not None and (is_file or args.format != "safetensors"):
        raise ValueError(
            "--max-shard-size is for a directory of safetensors files; remove it, or use --format "
            "safetensors and an OUT that does not end in .safetensors."
        )
    return None if is_file else limit or _MAX_SHARD_BYTES


@contextmanager
def _progress_bar(total: int, checkpoint: CheckpointPath) -> Iterator[Callable[[int], Any]]:
    """Shows a progress bar on a terminal, and drops mapped pages while reading."""
    pending, local = 0, as_local(checkpoint)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None, leave=False) as bar:

        def progress(nbytes: int) -> None:
            nonlocal pending
            bar.update(nbytes)
            pending += nbytes
            if pending >= _DROP_BYTES and local:
                pending = 0
                drop_pages(local)

        yield progress
