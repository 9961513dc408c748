"""Collectives of the user's own in a forward in which ranks gather other units.

[Note: Collectives of the user] A rank that waits in one answers no other rank, and a rank that has
used fewer units before it comes there while others still ask for theirs. So all ranks come together
in a round before any issues it: `CollectiveOrder.serve_until`. Those of the strategy, as `self.all_gather`, do so by
themselves. Those of torch.distributed over all ranks are seen by a `TorchFunctionMode`, for which
torch's collectives have a place, while code of a forward runs in stage 3: in passes without a
plan, and in all once one has had a collective. It costs a few microseconds for each call of a torch
function. It does not see a barrier, which has no tensor; a backward, which torch runs outside of
such modes; modules with parts in torch.compile; and a first collective in a pass that has a plan by
then. Before such a one users call `before_collective`. Where ranks wait in a circle all the same,
their watchdogs end it, and name the cure.

Alternatives considered: functions of torch.distributed replaced by others see those that no engine
has part in, and miss those that were imported by name; a `TorchDispatchMode` sees every kernel, at
ten times the cost; a process group in the place of WORLD is more than torch promises to bear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from lightning_zero.comm.watchdog import Watchdog
from lightning_zero.comm.world import is_world

__all__ = ["UserCollectiveMode"]

_NAMES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
)
_COLLECTIVES = frozenset(getattr(dist, name) for name in _NAMES if hasattr(dist, name))


class UserCollectiveMode(TorchFunctionMode):
    """While it is entered, `meet` is called with a user's collective before that is issued.

    Collectives over all ranks count, but for those that code of the package waits for.
    """

    def __init__(self, meet: Callable[[str], None], watchdog: Watchdog) -> None:
        super().__init__()
        self._meet = meet
        self._watchdog = watchdog

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _COLLECTIVES and self._is_users(kwargs.get("group")):
            self._meet(f"torch.distributed.{func.__name__}")
        return func(*args, **kwargs)

    def _is_users(self, group: Any) -> bool:
        """Whether all ranks take part, and no code of the package waits for it."""
        return is_world(group) and not self._watchdog.is_waiting
