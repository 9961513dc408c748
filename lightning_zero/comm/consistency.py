"""What must be the same on every rank, compared before anything is sharded.

[Note: Consistency] Ranks that differ would train wrongly without a word, or end in the middle of a
collective whose sizes differ. So each rank writes down *facts*, one collective of two integers
compares a hash of them, and only where hashes differ are the facts themselves exchanged. That comes
before any group is made and any tensor travels that depends on them.

What may differ is no fact: values of parameters and buffers (rank 0's are taken), devices, seeds
and ranks in the options of an optimizer, tensors in them but for single numbers, timeouts, folders,
and modules without parameters, such as metrics of one rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from lightning_zero.comm.control import GlooControlPlane
from lightning_zero.comm.world import describe_failure, raise_together

__all__ = ["ComparedFields", "check_equal", "compare"]

ComparedFields = Mapping[
    str, Mapping[str, str]
]  # by subject, such as "parameter 0.weight": what it is


def compare(
    control: GlooControlPlane, facts: ComparedFields, failure: Exception | None = None
) -> None:
    """Raises on every rank where facts differ, or where any rank has failed. Collective.

    `failure` is why this rank cannot go on by itself; it is raised after the others know it.

    Raises:
        ValueError: ComparedFields differ; names the first difference, by rank.
        OSError, RuntimeError: Another rank has failed; says which and how.
    """
    own = _hash(facts, describe_failure(failure))
    least, minus_most = control.min_ints([own, -own])
    if least == -minus_most:
        if failure is not None:
            raise failure
        return
    everyone = control.gather_objects((describe_failure(failure), facts))
    raise_together(failure, [told for told, _ in everyone], "begin")
    check_equal([facts for _, facts in everyone])


def check_equal(everyone: Sequence[ComparedFields]) -> None:
    """Raises a ValueError that names the first difference between facts, given by rank."""
    difference = _first_difference(everyone)
    if difference is not None:
        raise ValueError(
            f"ranks differ in {difference}. Every rank must build the same model and optimizers, "
            "with the same settings and versions; only values of parameters may differ, of which "
            "rank 0's are taken."
        )


def _hash(facts: ComparedFields, failure: tuple[str, int | None] | None) -> int:
    ordered = [(subject, sorted(fields.items())) for subject, fields in facts.items()]
    digest = hashlib.sha256(repr((ordered, failure)).encode()).digest()
    return int.from_bytes(digest[:7], "big")  # it and its negative are int64


def _first_difference(everyone: Sequence[ComparedFields]) -> str | None:
    for place in zip_longest(*everyone):
        for subject in dict.fromkeys(subject for subject in place if subject is not None):
            found = [facts.get(subject) for facts in everyone]
            if any(fields != found[0] for fields in found):
                return _told(subject, found)
        if len(set(place)) > 1:
            return f"the order of their parameters: {_by_rank(place)} comes first"
    return None


def _told(subject: str, found: Sequence[Mapping[str, str] | None]) -> str:
    present = [fields for fields in found if fields is not None]
    if len(present) < len(found):
        having = ["is there" if fields is not None else "is missing" for fields in found]
        return f"{subject}: it {_by_rank(having)}"
    names = dict.fromkeys(name for fields in present for name in fields)
    for name in names:
        values = [fields.get(name, "not set") for fields in present]
        if len(set(values)) > 1:
            return f"{subject}: {name} is {_by_rank(values)}"
    raise AssertionError("equal mappings")


def _by_rank(values: Sequence[str | None]) -> str:
    """Such as `(3, 4) on ranks 0, 1, (3, 5) on rank 2`."""
    ranks: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    parts = []
    for value, those in ranks.items():
        plural = "s" if len(those) > 1 else ""
        parts.append(f"{value} on rank{plural} {', '.join(map(str, those))}")
    return " and ".join(parts)
