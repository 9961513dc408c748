"""Temporary patches of methods of Lightning's objects.

Lightning has no hook that may end a training between two batches, none before the first collective
after the last batch of an evaluation, none around the averaging of weights, and none for the
entries of a checkpoint alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import update_wrapper
from typing import Any

__all__ = ["Patches"]


class Patches:
    """Methods of individual objects that replace those of their classes, until `undo`.

    A method that the user has patched, for example for a tracer, is called by our patch and
    restored afterwards.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, dict[str, Any]]] = []  # with earlier patches of the method

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        assert hasattr(type(owner), name), f"no {name} in this release of Lightning"
        own = vars(owner)
        self._made.append((owner, name, {name: own[name]} if name in own else {}))
        own[name] = function

    def within(
        self, owner: Any, name: str, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.put(owner, name, _Within(getattr(owner, name), context))

    def undo(self) -> None:
        """Restores the methods of all objects. Idempotent."""
        while self._made:
            owner, name, before = self._made.pop()
            vars(owner).pop(name, None)
            vars(owner).update(before)


class _Within:
    """A method that runs inside a context; its attributes are those of the original method."""

    def __init__(
        self, method: Callable[..., Any], context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._method = method
        self._context = context
        update_wrapper(self, method, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            return self._method(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_method" not in vars(self):
            raise AttributeError(name)
        return getattr(self._method, name)
