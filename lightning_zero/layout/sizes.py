"""Sizes with units, in settings and on the command line: 64M elements, 24GiB.

[Note: Units] K, M, G and T are 10^3, 10^6, 10^9 and 10^12, of bytes and of any other count. Ki, Mi,
Gi and Ti are 2^10, 2^20, 2^30 and 2^40. A B after the prefix stands for bytes and does not change
the number: 24G of memory are 24GB, and 24GiB are 7 % more. Case does not matter.
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
    """Parses a count such as "1000", "64M" or "256Ki". See [Note: Units].

    Raises:
        ValueError: It is not an integer, or a number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    number = None if match is None or match[3] else _number(match)
    if number is None or number.denominator != 1:
        raise ValueError(f"expected an integer such as 1000, 64M or 256Ki, got {text!r}")
    return int(number)


def parse_bytes(text: str) -> int:
    """Parses bytes such as "24GiB", "500MB" or "1000B", at least one. See [Note: Units].

    Raises:
        ValueError: It is not a size, or has no unit: a number alone is likely a mistake.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected a size such as 24GiB, 500MB or 1000B, got {text!r}")
    if not (match[2] or match[3]):
        raise ValueError(f"{text} has no unit; write {text}GiB or {text}GB")
    if (nbytes := int(_number(match))) < 1:
        raise ValueError(f"expected at least one byte, got {text!r}")
    return nbytes


def _number(match: re.Match[str]) -> Fraction:
    return Fraction(match[1]) * _PREFIXES[(match[2] or "").upper()]


def as_integer(name: str, value: object, *, least: int) -> int:
    """Converts the value of setting `name`, an int, a float such as 5e8, or text, to an int.

    Args:
        name: Name of the setting; one that ends in `_bytes` counts bytes.
        value: Value of the setting.
        least: The smallest valid number.

    Raises:
        TypeError: The value is not an integer.
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
            f'{name} must be an integer, got {value!r}; write it as 5e8 or "{example}".'
        )
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}.")
    return number


def byte_unit(nbytes: float) -> tuple[str, int]:
    """The largest unit that is at most `nbytes`, and its bytes."""
    return next((unit for unit in _UNITS if nbytes >= unit[1]), ("bytes", 1))


def format_bytes(nbytes: int) -> str:
    """Bytes with their largest unit, such as "1.50 GiB"."""
    unit, size = byte_unit(nbytes)
    return f"{nbytes} bytes" if size == 1 else f"{nbytes / size:.2f} {unit}"
