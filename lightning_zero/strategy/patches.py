"""Methods of Lightning's objects, replaced for a time: by loops, slurm, averages and strategy.

Lightning has no hook that may end a training between two batches, none before the first collective
after the last batch of an evaluation, and none around the averaging of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

__all__ = ["Patches"]


class Patches:
    """Methods of single objects that hide those of their classes, until `undo`."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        assert hasattr(type(owner), name), f"no {name} in this release of Lightning"
        vars(owner)[name] = function
        self._made.append((owner, name))

    def within(
        self, owner: Any, name: str, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        method = getattr(owner, name)

        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with context():
                return method(*args, **kwargs)

        self.put(owner, name, run)

    def undo(self) -> None:
        """All objects have the methods of their classes again. Doing it again is harmless."""
        while self._made:
            owner, name = self._made.pop()
            vars(owner).pop(name, None)
