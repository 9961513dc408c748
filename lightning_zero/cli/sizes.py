"""Sizes as people write them."""

from __future__ import annotations

import argparse
import re

__all__ = ["in_words", "parse_bytes"]

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


def parse_bytes(text: str) -> int:
    """The bytes in "5GiB", "500MB" or "1000".

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


def in_words(nbytes: int) -> str:
    """Bytes in the largest binary unit of which there is one: "1.50 GiB"."""
    for unit, size in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"
