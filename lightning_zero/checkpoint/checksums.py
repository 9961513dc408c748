"""`SHA256SUMS` of a checkpoint directory: written, and verified by all ranks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.new_file import create
from lightning_zero.layout.foreign_names import check_inside, printable

__all__ = ["CHECKSUMS", "file_digest", "find_listed_damage", "write_checksums"]

_BLOCK_BYTES = 1 << 20
CHECKSUMS = "SHA256SUMS"
_CHECKSUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")  # a line


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Writes `SHA256SUMS` for these files of `folder`; `sha256sum -c SHA256SUMS` reads it, too."""
    text = "".join(f"{file_digest(folder / name)}  {name}\n" for name in sorted(names)).encode()
    with create(folder / CHECKSUMS, len(text)) as file:
        file.write(text)


def find_listed_damage(folder: Any, *, rank: int = 0, world_size: int = 1) -> list[str]:
    """Verifies this rank's share of `SHA256SUMS` in a folder, local or remote.

    Returns:
        One line for each file that is missing or damaged.
    """
    sums = folder / CHECKSUMS
    try:
        lines = sums.read_text(encoding="utf-8").splitlines() if sums.is_file() else []
    except UnicodeDecodeError as error:
        return [f"{CHECKSUMS} is not a text file ({error})"]
    damage = []
    for number, line in list(enumerate(lines, start=1))[rank::world_size]:
        match = _CHECKSUM.fullmatch(line)
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
        elif file_digest(file) != digest:
            size = file.stat().st_size
            damage.append(
                f"{printable(name)} ({size} bytes) differs from its checksum in {CHECKSUMS}"
            )
    return damage


def file_digest(path: Any) -> str:
    """SHA-256 of a file, local or remote, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
