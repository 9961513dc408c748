"""Files of measured rates, which `comm-bench` and `io-bench` write and `plan` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["NAMES", "check_rates", "read_rates", "write_rates"]

# As `Rates` of the planner calls them; GB are 10^9 bytes.
NAMES = {
    "link_gb_per_s": "link",
    "cpu_link_gb_per_s": "cpu_link",
    "io_gb_per_s": "nvme",
    "memory_gb_per_s": "memory",
}


def read_rates(path: Path) -> dict[str, float]:
    """GB per second by name, of those that there are.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no such file.
    """
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); let comm-bench --rates write it.") from None
    if not isinstance(found, dict) or not set(found) <= set(NAMES):
        raise ValueError(f"{path} must hold an object with {', '.join(NAMES)}, got {found!r}.")
    for name, rate in found.items():
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
            raise ValueError(f"{name} in {path} must be GB per second such as 25, got {rate!r}.")
    return {name: float(rate) for name, rate in found.items()}


def check_rates(path: Path | None) -> None:
    """Refuses now, rather than when all is measured, what `write_rates` would refuse."""
    if path is not None and path.exists():
        read_rates(path)


def write_rates(path: Path, measured: Mapping[str, float]) -> None:
    """Adds rates to a file, or replaces those of the same names; whole or not at all.

    Raises:
        OSError: The file cannot be written.
        ValueError: There is another file in its place.
    """
    known = read_rates(path) if path.exists() else {}
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(json.dumps({**known, **measured}, indent=2) + "\n")
    written.replace(path)
