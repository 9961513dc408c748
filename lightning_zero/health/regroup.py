"""How ranks agree in their store, without a process group, whether to continue after a failure.

Used by the thread of a watchdog only.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Regroup"]

_ALL_CAME, _LOST = "together", "lost"


class Regroup:
    """Decisions of the ranks, one per epoch: the time from one successful regroup to the next.

    Every method gets the store. None is a store that is lost: then the ranks cannot continue.

    Args:
        name: Prefix of the keys in the store.
        rank: Rank of this process.
        size: Number of ranks.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self._name = name
        self._rank = rank
        self._size = size

    def count_raised(self, store: Any, epoch: int, num: int) -> int | None:
        """Adds `num` to the count of ranks that raised an error, and returns it; None: lost."""
        return None if store is None else int(store.add(f"{self._name}/raised/{epoch}", num))

    def claim(self, store: Any, epoch: int, name: str) -> int | None:
        """The rank that was the first to claim `name`; None: lost."""
        key = f"{self._name}/{name}/{epoch}"
        return None if store is None else int(store.compare_set(key, "", str(self._rank)))

    def arrive(self, store: Any, epoch: int) -> bool | None:
        """Counts this rank as one that continues. False: no rank can; None: not decided yet."""
        if store is None:
            return False
        store.add(f"{self._name}/come/{epoch}", 1)
        return None

    def decide(self, store: Any, epoch: int, *, is_over: bool) -> bool | None:
        """Whether all ranks continue; None: not decided yet. The first rank decides for all.

        Args:
            store: The store.
            epoch: The epoch.
            is_over: Whether this rank waits no longer, and decides that they do not.
        """
        if store is None:
            return False
        key, decision = f"{self._name}/regroup/{epoch}", None
        if is_over:
            decision = _LOST
        elif int(store.get(f"{self._name}/come/{epoch}")) >= self._size:
            decision = _ALL_CAME
        if decision is not None:
            return bool(store.compare_set(key, "", decision).decode() == _ALL_CAME)
        return bool(store.get(key).decode() == _ALL_CAME) if store.check([key]) else None
