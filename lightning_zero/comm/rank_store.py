"""The ranks' store as a client sees it that must not wait for ever."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch.distributed as dist

__all__ = ["HostedStore", "store_of_ranks"]

_LOOK_S = 0.05


class HostedStore:
    """A store which one of the ranks has in its process; of one thread.

    A request to it has no time limit: where that process dies while forks of it, such as workers of
    a data loader, hold its connections open, no answer comes and no end either. So another thread,
    which may stay behind, waits for the answer.

    Args:
        store: A client that nobody else uses.
        is_gone: Whether the process that has the store is; asked while an answer is late.
    """

    def __init__(self, store: Any, is_gone: Callable[[], bool]) -> None:
        self._store = store
        self._is_gone = is_gone
        self._requests: queue.SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None]
        self._requests = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="lightning-zero-store").start()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The requests of a store: `check`, `get`, `set`, `add`, `compare_set`."""
        return partial(self._ask, name)

    def close(self) -> None:
        """No request comes any more."""
        self._requests.put(None)

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Raises RuntimeError, as the store does, where its process is gone."""
        answer: Future[Any] = Future()
        self._requests.put((answer, name, arguments))
        while not wait([answer], timeout=_LOOK_S).done:
            if self._is_gone():
                raise RuntimeError("the process that has the ranks' store is gone.")
        return answer.result()

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            answer, name, arguments = request
            try:
                answer.set_result(getattr(self._store, name)(*arguments))
            except BaseException as error:
                answer.set_exception(error)
        self._store = None


def store_of_ranks(rank: int, is_rank_0_gone: Callable[[], bool]) -> Any:
    """The store of WORLD, by a connection of its own: a request waits for the one before it.

    Args:
        rank: Of this process.
        is_rank_0_gone: See `HostedStore`.
    """
    default: Any = dist.distributed_c10d._get_default_store()
    store = default.clone()
    return HostedStore(store, is_rank_0_gone) if rank and _is_with_rank_0(store) else store


def _is_with_rank_0(store: Any) -> bool:
    """Whether it goes with the process of rank 0; else it is in files, or torchrun has it."""
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return hasattr(store, "port") and not is_torchruns
