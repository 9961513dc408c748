"""A thread that steps buckets beside the next forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

__all__ = ["StepWorker"]


class StepWorker:
    """Runs steps in the order in which they are handed over, one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def submit(self, run: Callable[[], None], stepping: Sequence[Future[None]]) -> None:
        """Runs `run`, which fulfils the futures `stepping`; if it fails, all that are left fail."""

        def work() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            try:
                run()
            except BaseException as error:
                for future in stepping:
                    if not future.done():
                        future.set_exception(error)

        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="zero-step")
        self._last = self._executor.submit(work)

    def drain(self) -> None:
        """Waits until nothing is left to run; failures are told by the futures."""
        if self._last is not None:
            self._last.result()
            self._last = None

    def close(self) -> None:
        """Waits, and ends the thread."""
        self.drain()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
