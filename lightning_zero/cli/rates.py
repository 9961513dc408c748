"""Files of measured bandwidths, written by `comm-bench` and `io-bench` and read by `plan`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["NAMES", "check_rates", "read_rates", "write_rates"]

# Attribute of the planner's `Rates` by name in the file; a GB is 10^9 bytes.
NAMES = {
    "link_gb_per_s": "link",
    "cpu_link_gb_per_s": "cpu_link",
    "io_gb_per_s": "nvme",
    "memory_gb_per_s": "memory",
}


def read_rates(path: Path) -> dict[str, float]:
    """Reads the rates of a file: GB per second by name.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a file of rates.
    """
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); write it with comm-bench --rates."
        ) from None
    if not isinstance(found, dict) or not set(found) <= set(NAMES):
        raise ValueError(f"{path}: expected an object with {', '.join(NAMES)}, got {found!r}.")
    for name, rate in found.items():
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
            raise ValueError(f"{name} in {path} must be GB per second such as 25, got {rate!r}.")
    return {name: float(rate) for name, rate in found.items()}


def check_rates(path: Path | None) -> None:
    """Raises the errors of `write_rates` before the measurement."""
    if path is not None and path.exists():
        read_rates(path)


def write_rates(path: Path, measured: Mapping[str, float]) -> None:
    """Adds rates to a file, atomically; rates of the same names are replaced.

    Raises:
        OSError: The file cannot be written.
        ValueError: The existing file is not a file of rates.
    """
    known = read_rates(path) if path.exists() else {}
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(json.dumps({**known, **measured}, indent=2) + "\n")
    written.replace(path)
