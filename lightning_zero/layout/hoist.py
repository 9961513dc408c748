"""The plan that is made of a log of gathers and reductions; see order.py."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["hoisted"]


def hoisted(log: Sequence[int], numels: Sequence[int], ahead: int | None) -> tuple[int, ...]:
    """The plan of a log: gathers come before the reductions that they need not wait for.

    A unit that forward gathers last and backward first is gathered once, unless forward gathers it
    twice: the second time it may be for a use without gradients, after which it is freed.

    Args:
        log: Events; see `Order`.
        numels: Elements of each unit.
        ahead: A gather passes the reductions since the gather before it; with a number, also those
            before earlier ones, as long as their units have no more elements. 0: none.
    """
    turn = len(numels)
    plan: list[int] = []
    since: list[int] = []  # reductions between each gather and the one before it
    units: list[int] = []
    num_since = 0
    last_of_forward: int | None = None
    for event in log:
        if event > turn:
            num_since += 1
            plan.append(event)
            continue
        if event == turn:
            is_last_once = bool(units) and units.count(units[-1]) == 1
            last_of_forward = units[-1] if is_last_once else None
            plan.append(event)
            since, units, num_since = [], [], 0
            continue
        units.append(event)
        since.append(num_since)
        num_since = 0
        is_whole, last_of_forward = event == last_of_forward, None
        if is_whole:
            continue
        passed, together = 0, 0
        for num, unit in zip(reversed(since), reversed(units), strict=True):
            together += numels[unit]
            if ahead is not None and together > ahead:
                break
            passed += num
            if ahead is None:
                break
        place = len(plan)
        while passed and plan[place - 1] > turn:
            place, passed = place - 1, passed - 1
        plan.insert(place, event)
    return tuple(plan)
