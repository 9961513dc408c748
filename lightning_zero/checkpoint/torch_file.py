"""Files of `torch.save`, mapped into memory where their format allows."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

__all__ = ["is_torch_file", "open_torch_file"]

_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_MAGIC = b"\x80"  # what torch.save wrote before 1.6, and writes on request


def is_torch_file(path: Path) -> bool:
    """Whether it begins as a file of `torch.save` does."""
    with path.open("rb") as file:
        found = file.read(4)
    return found == _ZIP_MAGIC or found.startswith(_PICKLE_MAGIC)


def open_torch_file(
    path: Path, *, weights_only: bool | None = None, pickle_module: ModuleType | None = None
) -> Any:
    """What was given to `torch.save`, its tensors on the CPU.

    Mapped tensors are private to this process: a write to one is not written to the file.

    Args:
        path: The file.
        weights_only: As for `torch.load`.
        pickle_module: Instead of pickle, where `weights_only` is False.

    Raises:
        ValueError: It is truncated or damaged.
        pickle.UnpicklingError: It holds what `weights_only` refuses.
    """
    with path.open("rb") as file:
        is_zip = file.read(4) == _ZIP_MAGIC
    if is_zip and not zipfile.is_zipfile(path):  # which looks at the end of the file
        raise ValueError(_damaged(path, "its end is missing"))
    try:
        return torch.load(
            path,
            map_location="cpu",
            mmap=is_zip,
            weights_only=weights_only,
            pickle_module=pickle_module,
        )
    except pickle.UnpicklingError as error:
        if is_zip or "Unsupported" in str(error):
            raise  # a class that is refused
        raise ValueError(_damaged(path, str(error))) from error
    except (EOFError, OSError, RuntimeError) as error:
        if not any(
            word in str(error)
            for word in ("PytorchStreamReader", "EOF", "corrupted", "Invalid arg")
        ):
            raise  # of a class that is unpickled
        raise ValueError(_damaged(path, str(error))) from error


def _damaged(path: Path, why: str) -> str:
    return (
        f"{path} ({path.stat().st_size} bytes) is truncated, damaged or not written by "
        f"torch.save: {why}. If its save or copy was interrupted, use an earlier checkpoint or "
        "copy it again."
    )
