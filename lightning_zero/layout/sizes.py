"""Sizes as people write them, in settings and on the command line: 64M elements, 24GiB.

[Note: Units] K, M, G and T are 10^3, 10^6, 10^9 and 10^12, of bytes as of anything else that is
counted; with an i, Ki, Mi, Gi and Ti are 2^10, 2^20, 2^30 and 2^40. A B behind them says that bytes
are meant and changes nothing: 24G of memory are 24GB, and 24GiB are 7 % more. Case does not matter.
"""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["format_bytes", "parse_bytes", "parse_count", "byte_unit", "as_integer"]

_PREFIXES: dict[str, int] = {"": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("I", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?(B)?", flags=re.IGNORECASE)
_UNITS = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))


def parse_count(text: str) -> int:
    """The whole number that "1000", "64M" or "256Ki" says. See [Note: Units].

    Raises:
        ValueError: It says none, or bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    number = None if match is None or match[3] else _number(match)
    if number is None or number.denominator != 1:
        raise ValueError(f"expected a whole number such as 1000, 64M or 256Ki, got {text!r}")
    return int(number)


def parse_bytes(text: str) -> int:
    """The bytes, at least one, that "24GiB", "500MB" or "1000B" says. See [Note: Units].

    Raises:
        ValueError: It is no size, or has no unit: a number alone is likely a mistake.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected a size such as 24GiB, 500MB or 1000B, got {text!r}")
    if not (match[2] or match[3]):
        raise ValueError(f"{text} has no unit; say {text}GiB or {text}GB")
    if (nbytes := int(_number(match))) < 1:
        raise ValueError(f"expected at least one byte, got {text!r}")
    return nbytes


def _number(match: re.Match[str]) -> Fraction:
    return Fraction(match[1]) * _PREFIXES[(match[2] or "").upper()]


def as_integer(name: str, value: object, *, least: int) -> int:
    """What a user gave for the setting `name`: an int, a float such as 5e8, or text.

    Args:
        name: Counts bytes if it ends in `_bytes`, else anything else.
        value: What was given.
        least: The smallest number that has a meaning.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is less than `least`.
    """
    parse, example = (parse_bytes, "8GiB") if name.endswith("_bytes") else (parse_count, "64M")
    number = value
    if isinstance(value, str):
        try:
            number = parse(value)
        except ValueError:
            number = None
    elif isinstance(value, float) and value.is_integer():
        number = int(value)  # 5e8 in JSON and YAML is a float
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(
            f'{name} must be a whole number, got {value!r}; write it as 5e8 or "{example}".'
        )
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}.")
    return number


def byte_unit(nbytes: float) -> tuple[str, int]:
    """The unit in which the largest of some sizes is best read, and its bytes."""
    return next((unit for unit in _UNITS if nbytes >= unit[1]), ("bytes", 1))


def format_bytes(nbytes: int) -> str:
    """Bytes in GiB, MiB or KiB, the largest of which there is one: "1.50 GiB"."""
    unit, size = byte_unit(nbytes)
    return f"{nbytes} bytes" if size == 1 else f"{nbytes / size:.2f} {unit}"
