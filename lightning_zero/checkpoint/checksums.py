"""Checksums of the files of a directory, in `SHA256SUMS`.

`sha256sum -c SHA256SUMS` reads it, too.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from lightning_zero.checkpoint.atomic import CheckpointPath, name_path_in_errors
from lightning_zero.layout.foreign_names import check_inside, printable

__all__ = ["CHECKSUMS", "find_damage", "write_checksums"]

CHECKSUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_BLOCK_BYTES = 1 << 20  # read at once; small, so that verifying takes little memory


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Writes `SHA256SUMS` for these files of `folder`, and syncs it."""
    path = folder / CHECKSUMS
    with name_path_in_errors(path), open(path, "w", encoding="utf-8") as file:
        listed = sorted(set(names) - {CHECKSUMS})
        file.writelines(f"{_hash(folder / name)}  {name}\n" for name in listed)
        file.flush()
        os.fsync(file.fileno())


def find_damage(folder: CheckpointPath, *, rank: int = 0, world_size: int = 1) -> list[str]:
    """Verifies this rank's share of `SHA256SUMS`; returns one line per missing or damaged file."""
    sums = folder / CHECKSUMS
    try:
        lines = sums.read_text(encoding="utf-8").splitlines() if sums.is_file() else []
    except UnicodeDecodeError as error:
        return [f"{CHECKSUMS} is not a text file ({error})"]
    damage = []
    for number, line in list(enumerate(lines, start=1))[rank::world_size]:
        match = _LINE.fullmatch(line)
        if not match:
            damage.append(f"line {number} of {CHECKSUMS} is not a checksum")
            continue
        digest, name = match.groups()
        try:
            file = folder / check_inside(name)
        except ValueError as error:
            damage.append(f"line {number} of {CHECKSUMS}: {error}")
            continue
        if not file.is_file():
            damage.append(f"{printable(name)} is missing")
        elif _hash(file) != digest:
            size = file.stat().st_size
            damage.append(
                f"{printable(name)} ({size} bytes) differs from its checksum in {CHECKSUMS}"
            )
    return damage


def _hash(path: CheckpointPath) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
