"""Which save the files of a sharded checkpoint belong to.

[Note: One save] A copy that breaks off, or goes over another checkpoint, leaves files of two saves
in one directory, each of them whole. So a save has an identifier. It stands at the end of each file
of a rank, after all items, where other readers do not look; and in `save.json` beside them, with a
digest of each file of rank 0 and of the end of every item, which holds the checksums of its
elements. Opening a checkpoint reads the ends of files; comparing it with its checksums reads the
ends of items, too. Files that were written without an identifier belong to no save, and to each
other; those with one are not complete without the record.
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

from lightning_zero.checkpoint.atomic import CheckpointPath
from lightning_zero.checkpoint.remote import Pread
from lightning_zero.checkpoint.torch_file import NUM_THREADS, open_pread
from lightning_zero.layout.foreign_names import printable

__all__ = [
    "RECORD",
    "digest_item_ends",
    "trailer",
    "find_foreign_files",
    "find_foreign_items",
    "encode_record",
]

RECORD = "save.json"
_TRAILER_BYTES = 128
_TRAILER = re.compile(rb"\0*\nlightning_zero: save ([0-9a-f]{32}), file ([^\n]*)\n")
_END_BYTES = 2048  # of an item: the directory of its records, with their checksums
_MAX_RECORD_BYTES = 2**24

_Part = tuple[int, int]  # offset and length of an item


def trailer(save: str, name: str) -> bytes:
    """The last bytes of the file `name` of a rank."""
    return f"\nlightning_zero: save {save}, file {name}\n".encode().rjust(_TRAILER_BYTES, b"\0")


def digest_item_ends(pread: Pread, parts: Iterable[_Part]) -> str:
    """The digest of the ends of the items of a file; what two names share counts once."""
    digest = hashlib.sha256()
    for offset, length in sorted(set(parts)):
        size = min(length, _END_BYTES)
        digest.update(f"{offset} {length} ".encode())
        digest.update(pread(size, offset + length - size))
    return digest.hexdigest()


def encode_record(save: str, ends: Mapping[str, str], contents: Mapping[str, Any]) -> bytes:
    """What `save.json` holds.

    Args:
        save: The identifier.
        ends: `digest_item_ends` of every rank's file; empty where the file cannot be read back.
        contents: Bytes of files of rank 0.
    """
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    text = json.dumps({"save": save, "ends_sha256": dict(ends), "sha256": digests}, indent=1)
    return f"{text}\n".encode()


def find_foreign_files(folder: CheckpointPath, metadata: Metadata) -> list[str]:
    """One line for each file that belongs to another save than the others."""
    problems: list[str] = []
    files = _files_by_folder(metadata)
    for beside, names in files.items():
        place = folder / beside if beside != "." else folder
        problems += _foreign_files_in(place, names)
    return problems


def _foreign_files_in(folder: CheckpointPath, names: Sequence[str]) -> list[str]:
    noted = _read_record(folder)
    if isinstance(noted, str):
        return [noted]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        saves = list(pool.map(partial(_read_trailer, folder), names))
    expected = noted["save"] if noted else saves[0]
    shown = f"save {expected[:8]}" if expected else "a save without a name"
    where = RECORD if noted else names[0]
    problems = [
        f"{printable(name)} belongs to {f'save {save[:8]}' if save else 'another save'}, "
        f"and {where} to {shown}: files of two saves lie in one directory"
        for name, save in zip(names, saves, strict=True)
        if save != expected
    ]
    if noted is None and expected and not problems:
        problems.append(f"{RECORD} of {shown} is missing: the copy is not complete")
    for name, digest in (noted["sha256"] if noted else {}).items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif _digest(path) != digest:
            problems.append(
                f"{printable(name)} differs from what {RECORD} says: it is damaged, or of another "
                "save"
            )
    return problems


def find_foreign_items(
    folder: CheckpointPath, metadata: Metadata, rank: int, world_size: int
) -> list[str]:
    """One line for each file of this rank's share of which items are those of another save."""
    parts: dict[str, list[_Part]] = {}
    for place in metadata.storage_data.values():
        parts.setdefault(place.relative_path, []).append((place.offset, place.length))
    noted = {
        beside: _read_record(folder / beside if beside != "." else folder)
        for beside in _files_by_folder(metadata)
    }
    problems = []
    for name in sorted(parts)[rank::world_size]:
        path = PurePosixPath(name)
        of_folder = noted[str(path.parent)]
        ends = of_folder["ends_sha256"] if isinstance(of_folder, dict) else {}
        expected = ends.get(path.name)
        if not expected or not (folder / name).is_file():
            continue
        with open_pread(folder / name) as pread:
            if digest_item_ends(pread, parts[name]) != expected:
                problems.append(f"{printable(name)} has items that differ from what {RECORD} says")
    return problems


def _files_by_folder(metadata: Metadata) -> dict[str, list[str]]:
    """The names of ranks' files, by their folder."""
    names = sorted({place.relative_path for place in metadata.storage_data.values()})
    by_folder: dict[str, list[str]] = {}
    for name in names:
        path = PurePosixPath(name)
        by_folder.setdefault(str(path.parent), []).append(path.name)
    return by_folder


def _read_trailer(folder: CheckpointPath, name: str) -> str:
    """The save that a file belongs to; empty where it does not say."""
    path = folder / name
    size = path.stat().st_size
    if size < _TRAILER_BYTES:
        return ""
    with open_pread(path) as pread:
        match = _TRAILER.fullmatch(pread(_TRAILER_BYTES, size - _TRAILER_BYTES))
    if match is None:
        return ""
    save, own_name = match[1].decode(), match[2]
    return save if own_name == name.encode() else f"{save} as {own_name.decode(errors='replace')}"


def _read_record(folder: CheckpointPath) -> dict[str, Any] | str | None:
    """What `save.json` holds, or what is wrong with it; None where there is none."""
    path = folder / RECORD
    if not path.is_file():
        return None
    with path.open("rb") as file:
        data = file.read(_MAX_RECORD_BYTES)
    try:
        noted = json.loads(data)
        names = [*noted["ends_sha256"].items(), *noted["sha256"].items()]
        is_text = all(isinstance(text, str) for pair in names for text in pair)
        if is_text and re.fullmatch("[0-9a-f]{32}", noted["save"]):
            known = {"meta.pt", ".metadata"}
            noted["sha256"] = {k: v for k, v in noted["sha256"].items() if k in known}
            return dict(noted)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return f"{RECORD} is no record of a save: it is damaged"


def _digest(path: CheckpointPath) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
