"""Lightning's names for this package, from the distribution that the user's Trainer is from.

    pytorch   names of the Trainer's package
    fabric    names of Fabric's package

No other module imports Lightning. Both list each name once, with the type that it has in
`lightning`. Importing one of them imports Lightning.

[Note: Two distributions] The same source of Lightning is published as `lightning`, with
`lightning.pytorch` and `lightning.fabric`, and as `pytorch_lightning` with `lightning_fabric`. A
Trainer of one refuses a strategy of the other, since the classes differ. So a process uses one of
them, chosen when the first name is needed:

1. the one whose Trainer or Fabric asks its registry for a strategy by name;
2. the one that the environment variable `LIGHTNING_ZERO_LIGHTNING` names;
3. the one that is imported, if the other is not;
4. `lightning` if it is installed.

Alternatives considered: both in one process, with every class of ours made twice. `ZeroStrategy`
would then be two classes, and a user could import the wrong one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib.util import find_spec

__all__ = [
    "VARIABLE",
    "Distribution",
    "chosen",
    "how_to_change",
    "use",
    "used_by_children",
]

VARIABLE = "LIGHTNING_ZERO_LIGHTNING"


class Distribution(Enum):
    """A distribution of Lightning; its value is the name of the package to import."""

    LIGHTNING = "lightning"
    PYTORCH_LIGHTNING = "pytorch_lightning"

    @property
    def pytorch(self) -> str:
        """Package with the Trainer."""
        return "lightning.pytorch" if self is Distribution.LIGHTNING else "pytorch_lightning"

    @property
    def fabric(self) -> str:
        """Package with Fabric."""
        return "lightning.fabric" if self is Distribution.LIGHTNING else "lightning_fabric"

    @property
    def other(self) -> Distribution:
        first, second = Distribution
        return second if self is first else first

    @property
    def is_imported(self) -> bool:
        return self.value in sys.modules or self.fabric in sys.modules


class _Choice:
    """The choice of this process. See [Note: Two distributions]."""

    def __init__(self) -> None:
        self._made: Distribution | None = None

    def get(self) -> Distribution:
        if self._made is None:
            self._made = _find()
        return self._made

    def use(self, distribution: Distribution) -> None:
        if self._made is None:
            self._made = distribution
        elif self._made is not distribution:
            raise RuntimeError(
                f"a Trainer or Fabric of {distribution.value} asks for a strategy, but this "
                f"process already uses lightning_zero with {self._made.value}; {how_to_change()}"
            )


_CHOICE = _Choice()


def chosen() -> Distribution:
    """The distribution of this process, which is chosen now if it has not been before.

    Raises:
        ValueError: The environment variable does not name a distribution.
    """
    return _CHOICE.get()


def use(distribution: Distribution) -> None:
    """Chooses `distribution`.

    Raises:
        RuntimeError: The other one has been chosen before.
    """
    _CHOICE.use(distribution)


def how_to_change() -> str:
    """What a user does whose Trainer is of the distribution that has not been chosen."""
    distribution = chosen()
    other = distribution.other.value
    return (
        f"import the Trainer, Fabric and callbacks of {distribution.value}, or choose {other}: "
        f"import {other} before the classes of lightning_zero, or set {VARIABLE}={other}."
    )


@contextmanager
def used_by_children() -> Iterator[None]:
    """Makes processes that are started inside choose as this one: it sets the variable."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = chosen().value
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _find() -> Distribution:
    name = os.environ.get(VARIABLE)
    if name is not None:
        known = [distribution.value for distribution in Distribution]
        if name not in known:
            raise ValueError(f"{VARIABLE} must be one of {', '.join(known)}, got {name!r}.")
        return Distribution(name)
    imported = [distribution for distribution in Distribution if distribution.is_imported]
    if len(imported) == 1:
        return imported[0]
    is_installed = find_spec(Distribution.LIGHTNING.value) is not None
    return Distribution.LIGHTNING if is_installed else Distribution.PYTORCH_LIGHTNING
