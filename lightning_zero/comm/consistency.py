"""Consistency check: model, optimizers and settings are equal on all ranks before sharding.

[Note: Consistency] Ranks that differ would train wrongly without an error, or fail in the middle of
a collective whose sizes differ. So each rank describes what must be equal in text fields, one
collective of two integers compares a hash of them, and only if the hashes differ are the fields
themselves exchanged. That comes before any group is made and any tensor is sent that depends on
them.

What may differ is not compared: values of parameters and buffers (rank 0's are used), devices, the
seeds and ranks in the options of an optimizer, tensors in them other than single numbers, timeouts,
folders, and modules without parameters, such as metrics of one rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from lightning_zero.comm.control import GlooControlPlane

__all__ = ["ComparedFields", "check_equal", "compare"]

# By subject, such as "parameter 0.weight": values by field, such as {"shape": "(4, 4)"}.
ComparedFields = Mapping[str, Mapping[str, str]]


def compare(control: GlooControlPlane, fields: ComparedFields) -> None:
    """Raises on every rank if fields differ. Collective.

    Args:
        control: Control plane of all ranks.
        fields: This rank's fields.

    Raises:
        ValueError: Fields differ; names the first difference, by rank.
    """
    own = _hash(fields)
    least, minus_most = control.min_ints([own, -own])
    if least != -minus_most:
        check_equal(control.gather_objects(fields))


def check_equal(everyone: Sequence[ComparedFields]) -> None:
    """Raises a ValueError that names the first difference between the fields, given by rank."""
    difference = _first_difference(everyone)
    if difference is not None:
        raise ValueError(
            f"ranks differ in {difference}. Every rank must build the same model and optimizers, "
            "with the same settings and versions; only values of parameters may differ (rank 0's "
            "are used)."
        )


def _hash(fields: ComparedFields) -> int:
    ordered = [(subject, sorted(values.items())) for subject, values in fields.items()]
    digest = hashlib.sha256(repr(ordered).encode()).digest()
    return int.from_bytes(digest[:7], "big")  # it and its negative are int64


def _first_difference(everyone: Sequence[ComparedFields]) -> str | None:
    for subjects in zip_longest(*everyone):
        for subject in dict.fromkeys(subject for subject in subjects if subject is not None):
            found = [fields.get(subject) for fields in everyone]
            if any(values != found[0] for values in found):
                return _describe_difference(subject, found)
        if len(set(subjects)) > 1:
            return f"the order of their parameters: {_by_rank(subjects)} comes first"
    return None


def _describe_difference(subject: str, found: Sequence[Mapping[str, str] | None]) -> str:
    present = [fields for fields in found if fields is not None]
    if len(present) < len(found):
        presence = ["missing" if fields is None else "present" for fields in found]
        return f"{subject}: it is {_by_rank(presence)}"
    names = dict.fromkeys(name for fields in present for name in fields)
    for name in names:
        values = [fields.get(name, "not set") for fields in present]
        if len(set(values)) > 1:
            return f"{subject}: {name} is {_by_rank(values)}"
    raise AssertionError("equal mappings")


def _by_rank(values: Sequence[str | None]) -> str:
    """Joins values and their ranks: `(3, 4) on ranks 0, 1 and (3, 5) on rank 2`."""
    ranks: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    parts = []
    for value, group in ranks.items():
        noun = "ranks" if len(group) > 1 else "rank"
        parts.append(f"{value} on {noun} {', '.join(map(str, group))}")
    return " and ".join(parts)
