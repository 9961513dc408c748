"""A DeepSpeed configuration as typed sections; an error names the key, its value and what to do."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_zero.deepspeed.keys import BLOCKS, KNOWN, Rule, is_unset

__all__ = ["Section", "check_keys", "read", "type_and_params"]


@dataclass(frozen=True)
class Section:
    """One level of the file. A getter returns None for a key that is absent, null or "auto".

    Attributes:
        values: Plain dicts, lists and scalars; never shared with the caller.
        name: Dotted path from the top of the file, empty at the top.
    """

    values: dict[str, Any]
    name: str = ""

    def path(self, key: str) -> str:
        """The key as the user finds it, such as "fp16.loss_scale"."""
        return f"{self.name}.{key}" if self.name else key

    def has(self, key: str) -> bool:
        """Whether the file sets the key."""
        return not is_unset(self.values.get(key))

    def flag(self, key: str) -> bool | None:
        """True or false."""
        value: Any = self.values.get(key)
        if is_unset(value) or isinstance(value, bool):
            return value if isinstance(value, bool) else None
        raise self.error(key, "true or false")

    def number(self, key: str) -> float | None:
        """A finite number that is not negative."""
        value: Any = self.values.get(key)
        if is_unset(value):
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            raise self.error(key, "a number that is not negative")
        return float(value)

    def whole(self, key: str, *, least: int = 0) -> int | None:
        """A whole number; 5e8 is one."""
        value: Any = self.values.get(key)
        if is_unset(value):
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"a whole number of at least {least}")
        return value

    def section(self, key: str) -> Section:
        """A section inside this one, empty where absent; checked where its keys are known."""
        value: Any = self.values.get(key)
        if is_unset(value):
            value = {}
        if not isinstance(value, dict):
            raise self.error(key, "a section in braces")
        inner = Section(value, self.path(key))
        if key in BLOCKS:
            check_keys(inner, BLOCKS[key])
        return inner

    def refuse(self, rules: Mapping[str, Rule]) -> None:
        """Raise for the first key whose value would change the training.

        Raises:
            ValueError: Says what to do.
        """
        for key, (is_on, remedy) in rules.items():
            if key in self.values and is_on(self.values[key]):
                raise ValueError(
                    f"{self.path(key)} = {self.values[key]!r} changes the training and is not "
                    f"available here: {remedy}"
                )

    def error(self, key: str, expected: str) -> ValueError:
        """The error for a key with a wrong value."""
        return ValueError(
            f"{self.path(key)} must be {expected}, got {self.values[key]!r}; "
            "correct it or leave it out."
        )


def check_keys(section: Section, known: Iterable[str]) -> None:
    """Raise for a key that DeepSpeed does not have.

    Raises:
        ValueError: Names the nearest known key.
    """
    known = sorted(known)
    for key in section.values:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
        hint = f" (did you mean {section.path(near[0])}?)" if near else ""
        raise ValueError(
            f"{section.path(str(key))} is not a DeepSpeed setting{hint}; correct it or remove it."
        )


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> Section:
    """The top of the file, with its keys checked.

    Raises:
        ValueError: Not JSON, a key twice, or an unknown key.
        TypeError: `source` is neither a path nor a mapping.
    """
    if isinstance(source, (str, os.PathLike)):
        values = _parse(Path(source))
    elif isinstance(source, Mapping):
        values = source
    else:
        raise TypeError(f"expected a path or a mapping, got {source!r} ({type(source).__name__}).")
    if not isinstance(values, Mapping):
        raise ValueError(f"{source} must hold one section in braces, got {type(values).__name__}.")
    top = Section(_plain(values))
    check_keys(top, KNOWN)
    return top


def _parse(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON: {error}. Comments and trailing commas, which DeepSpeed accepts, "
            "must be removed."
        ) from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"{', '.join(twice)} stands twice in one section; keep one.")
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(part) for part in value]
    return value


def type_and_params(section: Mapping[str, Any], name: str) -> tuple[str, Section]:
    """The two keys of an optimizer or scheduler section.

    Raises:
        ValueError: An unknown key, or no type.
    """
    top = Section(_plain(section), name)
    check_keys(top, BLOCKS[name])
    kind = top.values.get("type")
    if not isinstance(kind, str):
        raise ValueError(f"{name}.type must be a name such as AdamW or WarmupLR, got {kind!r}.")
    return kind, top.section("params")
