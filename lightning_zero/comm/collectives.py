"""Detects the user's own collectives in a forward in which ranks unshard different units.

[Note: Collectives of the user] A rank that waits in a collective answers no other rank, and a rank
that uses fewer units before the collective reaches it while others still request theirs. So all
ranks enter a round before any of them issues it: `CollectiveOrder.serve_until`. The strategy's own
calls, such as `self.all_gather` and its backward, do so automatically. Calls of torch.distributed
over all ranks are intercepted by a `TorchFunctionMode`, which torch's collectives support, while
code of a forward runs in stage 3. That costs microseconds per call of a torch function: it is off
where all ranks are known to use the same units: their recorded schedule has been replayed before,
no rank has ever requested another unit than the others, and no pass has had a collective
(`CollectiveOrder.expects_collectives`). The mode does not see: a barrier, which has no tensor; a
backward, which torch runs outside of such modes; modules with parts in torch.compile; and a
collective that is the first of all in the very pass in which ranks differ for the first time.
Before those users call `before_collective`. If ranks wait for each other nevertheless, their
watchdogs end the wait with an error that names this function.

Alternatives considered: replacing the functions of torch.distributed also affects code without an
engine, and misses functions imported by name; a `TorchDispatchMode` sees every kernel, at ten times
the cost; torch does not support a custom process group in the place of WORLD well enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from lightning_zero.health.watchdog import Watchdog
from lightning_zero.health.world import is_world

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
    """Mode that calls `before_collective` with the name of a user's collective before it is issued.

    Only collectives over all ranks count, and not those that code of this package waits for.
    """

    def __init__(self, before_collective: Callable[[str], None], watchdog: Watchdog) -> None:
        super().__init__()
        self._before_collective = before_collective
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
            self._before_collective(f"torch.distributed.{func.__name__}")
        return func(*args, **kwargs)

    def _is_users(self, group: Any) -> bool:
        """Whether all ranks take part in the call, and no code of this package made it."""
        return is_world(group) and not self._watchdog.is_waiting
