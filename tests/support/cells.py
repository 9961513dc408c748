"""Which cells of a table of cases run by default, and which with the slow tests.

[Note: cells] What one property is claimed to do in every stage, by the same code, is tested by
default in stage 1, where parameters are replicated, and in stage 3, where they are sharded. Where
the stages differ in it (losses, accumulation, memory, traffic, records), each runs by default.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

__all__ = ["ANY_STAGE", "SHARDED_STAGE", "slow_but"]


def slow_but(fast: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """`cases`, of which all but `fast` are slow tests. A case of several values is a tuple."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(case if case in fast else pytest.param(*values, marks=pytest.mark.slow))
    return found


ANY_STAGE = slow_but((1, 3), range(4))
SHARDED_STAGE = slow_but((1, 3), (1, 2, 3))
