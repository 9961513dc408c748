"""Where a checkpoint is: what a user calls a path, as the system knows it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["local_path"]

_LOCAL = ("file://", "local://", "file:", "local:")


def local_path(path: str | os.PathLike[str]) -> Path:
    """An absolute path on a local or mounted file system.

    Args:
        path: May begin with `~`, be relative, or be a URL of the local file system (`file://`).

    Raises:
        ValueError: A URL of another file system.
    """
    text = os.fspath(path)
    for protocol in _LOCAL:
        if text.startswith(protocol):
            text = text.removeprefix(protocol)
            break
    if "://" in text:
        raise ValueError(f"expected a path on a local or mounted file system, got {text}.")
    return Path(text).expanduser().absolute()
