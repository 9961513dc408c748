"""Identifies the save that each file of a sharded checkpoint belongs to.

[Note: One save] A copy that is interrupted, or that overwrites another checkpoint, leaves files of
two saves in one directory, each of them complete. Every save therefore has an identifier. It is
stored in a trailer of each rank's file, after all items, where other readers do not look; and in
`save.json`, together with a digest of each file of rank 0 and a digest of the ends of all items,
which contain the checksums of their elements. Opening a checkpoint reads the trailers; verifying it
reads the ends of the items, too. Files without an identifier, from other writers, are taken as
files of one save; files with an identifier are not complete without `save.json`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from lightning_zero.checkpoint.checksums import file_digest
from lightning_zero.checkpoint.storage import CheckpointPath, Ranges, open_checked
from lightning_zero.checkpoint.torch_file import NUM_THREADS
from lightning_zero.layout.foreign_names import printable

__all__ = [
    "ALIGNMENT",
    "RECORD",
    "digest_item_ends",
    "encode_record",
    "find_foreign_files",
    "find_foreign_items",
    "trailer",
]

RECORD = "save.json"
ALIGNMENT = 64  # items start at multiples of it, so that a memory map of their elements is aligned
_TRAILER_BYTES = 128
_TRAILER = re.compile(rb"\0*\nlightning_zero: save ([0-9a-f]{32}), file ([^\n]*)\n")
_END_BYTES = 2048  # at the end of an item: the directory of its records, with their checksums
_MAX_RECORD_BYTES = 2**24

_Part = tuple[int, int]  # offset and length of an item


def trailer(save: str, name: str) -> bytes:
    """The last `_TRAILER_BYTES` bytes of a rank's file `name`."""
    return f"\nlightning_zero: save {save}, file {name}\n".encode().rjust(_TRAILER_BYTES, b"\0")


def digest_item_ends(ranges: Ranges, parts: Iterable[_Part]) -> str:
    """SHA-256 of the ends of a file's items; an item with several names counts once."""
    digest = hashlib.sha256()
    for offset, length in sorted(set(parts)):
        stop = offset + length
        digest.update(f"{offset} {length} ".encode())
        digest.update(ranges(stop - min(length, _END_BYTES), stop))
    return digest.hexdigest()


def encode_record(save: str, ends: Mapping[str, str], contents: Mapping[str, Any]) -> bytes:
    """Content of `save.json`.

    Args:
        save: Identifier of the save.
        ends: `digest_item_ends` of every rank's file; empty if the file cannot be read back.
        contents: Content of the files of rank 0, by name.
    """
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    text = json.dumps({"save": save, "ends_sha256": dict(ends), "sha256": digests}, indent=1)
    return f"{text}\n".encode()


def find_foreign_files(folder: CheckpointPath, metadata: Metadata) -> list[str]:
    """Returns one line for each file that belongs to a different save than the others."""
    problems: list[str] = []
    files = _files_by_folder(metadata)
    for parent, names in files.items():
        problems += _foreign_files_in(folder / parent if parent != "." else folder, names)
    return problems


def _foreign_files_in(folder: CheckpointPath, names: Sequence[str]) -> list[str]:
    record = _read_record(folder)
    if isinstance(record, str):
        return [record]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        saves = list(pool.map(partial(_read_trailer, folder), names))
    expected = record["save"] if record else saves[0]
    expected_name = f"save {expected[:8]}" if expected else "a save without an identifier"
    reference = RECORD if record else names[0]
    problems = []
    for name, save in zip(names, saves, strict=True):
        if save != expected:
            save_name = f"save {save[:8]}" if save else "another save"
            problems.append(
                f"{printable(name)} belongs to {save_name}, but {reference} to {expected_name}: "
                "the directory holds files of two saves"
            )
    if record is None and expected and not problems:
        problems.append(f"{RECORD} of {expected_name} is missing: the copy is not complete")
    for name, digest in (record["sha256"] if record else {}).items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif file_digest(path) != digest:
            problems.append(
                f"{printable(name)} differs from its digest in {RECORD}: it is damaged, or belongs "
                "to another save"
            )
    return problems


def find_foreign_items(
    folder: CheckpointPath, metadata: Metadata, rank: int, world_size: int
) -> list[str]:
    """Returns one line for each file of this rank's share that has items of another save."""
    parts: dict[str, list[_Part]] = {}
    for info in metadata.storage_data.values():
        parts.setdefault(info.relative_path, []).append((info.offset, info.length))
    records = {
        parent: _read_record(folder / parent if parent != "." else folder)
        for parent in _files_by_folder(metadata)
    }
    has_empty = any(0 in getattr(m, "size", ()) for m in metadata.state_dict_metadata.values())
    problems = []
    for name in sorted(parts)[rank::world_size]:
        path = PurePosixPath(name)
        record = records[str(path.parent)]
        ends = record["ends_sha256"] if isinstance(record, dict) else {}
        expected = ends.get(path.name)
        if not expected or not (folder / name).is_file():
            continue
        if has_empty and _has_unlisted_items(folder / name, parts[name]):
            continue
        with open_checked(folder / name) as ranges:
            if digest_item_ends(ranges, parts[name]) != expected:
                problems.append(f"{printable(name)} has items that differ from {RECORD}")
    return problems


def _has_unlisted_items(path: CheckpointPath, parts: Iterable[_Part]) -> bool:
    """Whether the metadata omits items of a file, which are in the file's digest.

    Earlier versions wrote a tensor without elements on every rank, and the metadata names one copy.
    """
    end = 0
    for offset, length in sorted(set(parts)):
        if offset - end >= ALIGNMENT:
            return True
        end = offset + length
    return path.stat().st_size - _TRAILER_BYTES > end


def _files_by_folder(metadata: Metadata) -> dict[str, list[str]]:
    """Names of the ranks' files, by their folder."""
    names = sorted({info.relative_path for info in metadata.storage_data.values()})
    by_folder: dict[str, list[str]] = {}
    for name in names:
        path = PurePosixPath(name)
        by_folder.setdefault(str(path.parent), []).append(path.name)
    return by_folder


def _read_trailer(folder: CheckpointPath, name: str) -> str:
    """Identifier of the save that a file belongs to; empty if the file has no trailer."""
    path = folder / name
    size = path.stat().st_size
    if size < _TRAILER_BYTES:
        return ""
    with open_checked(path) as ranges:
        match = _TRAILER.fullmatch(ranges(size - _TRAILER_BYTES, size))
    if match is None:
        return ""
    save, own_name = match[1].decode(), match[2]
    return save if own_name == name.encode() else f"{save} as {own_name.decode(errors='replace')}"


def _read_record(folder: CheckpointPath) -> dict[str, Any] | str | None:
    """Content of `save.json`, or a line that describes its damage; None if it does not exist."""
    path = folder / RECORD
    if not path.is_file():
        return None
    with path.open("rb") as file:
        data = file.read(_MAX_RECORD_BYTES)
    try:
        record = json.loads(data)
        names = [*record["ends_sha256"].items(), *record["sha256"].items()]
        is_text = all(isinstance(text, str) for pair in names for text in pair)
        if is_text and re.fullmatch("[0-9a-f]{32}", record["save"]):
            known = {"meta.pt", ".metadata"}
            record["sha256"] = {k: v for k, v in record["sha256"].items() if k in known}
            return dict(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return f"{RECORD} is not a record of a save: it is damaged"
