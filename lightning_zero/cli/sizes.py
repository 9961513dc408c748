"""Sizes as people write them, and files of measured rates."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

__all__ = [
    "NAMES",
    "check_rates",
    "count_of",
    "in_words",
    "number_of",
    "parse_bytes",
    "parse_bytes_with_unit",
    "parse_seconds",
    "read_rates",
    "write_rates",
]

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("", 1024), ("B", 1000))
}


def parse_bytes(text: str) -> int:
    """The bytes in "5GiB" or "5G", "500MB" (of 10^6) or "1000".

    Raises:
        argparse.ArgumentTypeError: It is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    units = {name.upper(): size for name, size in _UNITS.items()}
    if not match or match[2].upper() not in units:
        raise argparse.ArgumentTypeError(
            f"expected a size such as 5GiB, 500MB or 1000 (bytes), got {text!r}"
        )
    if not (nbytes := int(float(match[1]) * units[match[2].upper()])):
        raise argparse.ArgumentTypeError(f"expected at least one byte, got {text!r}")
    return nbytes


def parse_bytes_with_unit(text: str) -> int:
    """As `parse_bytes`, where a number alone is likely a mistake.

    Raises:
        argparse.ArgumentTypeError: It is no size, or has no unit.
    """
    nbytes = parse_bytes(text)
    if text.strip()[-1].isdigit():
        raise argparse.ArgumentTypeError(f"{text} has no unit; say {text}GiB or {text}GB")
    return nbytes


def number_of(what: str) -> Callable[[str], float]:
    """A parser of finite numbers above 0, whose error says that `what` was expected."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if 0 < (number := float(text)) < math.inf:
                return number
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")

    return parse


def count_of(what: str, *, least: int = 1) -> Callable[[str], int]:
    """Likewise of whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
        return int(text)

    return parse


parse_seconds = number_of("a number of seconds above 0")


def in_words(nbytes: int) -> str:
    """Bytes in the largest binary unit of which there is one: "1.50 GiB"."""
    for unit, size in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"


# GB are 10^9 bytes.
NAMES = ("link_gb_per_s", "cpu_link_gb_per_s", "io_gb_per_s", "memory_gb_per_s")


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
