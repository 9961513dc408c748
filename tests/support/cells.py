"""Which cases of a table of cases run by default, and which are slow tests.

[Note: cells] What one property is claimed to do in every stage, by the same code, is tested by
default in stage 1, where parameters are replicated, and in stage 3, where they are sharded. Where
other tests execute the same code, `@pytest.mark.default_cases("ID", ...)` names the cases that run
by default, by the text in the brackets of their names; the others are slow.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

__all__ = ["ANY_STAGE", "SHARDED_STAGE", "mark_slow_cases", "slow_but"]


def slow_but(fast: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """`cases`, of which all but `fast` are slow tests. A case of several values is a tuple."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(case if case in fast else pytest.param(*values, marks=pytest.mark.slow))
    return found


ANY_STAGE = slow_but((1, 3), range(4))
SHARDED_STAGE = slow_but((1, 3), (1, 2, 3))


def mark_slow_cases(items: Iterable[pytest.Item]) -> dict[str, set[str]]:
    """Marks the cases slow that `default_cases` does not name.

    Returns:
        Names without a case, by function. Cases that are not collected count as missing.
    """
    missing: dict[str, set[str]] = {}
    for item in items:
        mark = item.get_closest_marker("default_cases")
        if mark is not None:
            function, _, case = item.nodeid.removesuffix("]").partition("[")
            missing.setdefault(function, set(mark.args)).discard(case)
            if case not in mark.args:
                item.add_marker("slow")
    return {function: names for function, names in missing.items() if names}
