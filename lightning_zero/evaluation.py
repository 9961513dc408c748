"""Validation, test and prediction with a different number of batches on each rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.pytorch import Trainer

from lightning_zero.lockstep import Lockstep

__all__ = ["LockstepEvaluation"]

# No hook of Lightning's comes between the last batch and the first collective after it, which
# synchronises the metrics, so these methods of the running loop are wrapped: the first ends a data
# loader's batches (prediction has none of it), the second ends the loop.
_END_OF_LOADER = "_store_dataloader_outputs"
_END_OF_LOOP = "on_run_end"


class LockstepEvaluation:
    """Around the batches of Lightning's running evaluation loop."""

    def __init__(self) -> None:
        self._loop: Any = None
        self._lockstep: Lockstep | None = None

    def begin(self, trainer: Trainer, lockstep: Lockstep) -> None:
        """Before the first batch. Collective."""
        self.end()
        self._loop, self._lockstep = trainer._active_loop, lockstep
        if hasattr(self._loop, _END_OF_LOADER):
            self._end_before(_END_OF_LOADER, lockstep.begin_loop)
        self._end_before(_END_OF_LOOP)
        lockstep.begin_loop()

    def end(self) -> None:
        """After the loop, or after an exception in it. Local where the loop came to its end."""
        if self._loop is not None:
            vars(self._loop).pop(_END_OF_LOADER, None)
            vars(self._loop).pop(_END_OF_LOOP, None)
        self._loop = self._lockstep = None

    def _end_before(self, name: str, then: Callable[[], None] | None = None) -> None:
        lockstep = self._lockstep
        assert lockstep is not None
        method = getattr(self._loop, name)

        @wraps(method)
        def ending(*args: Any, **kwargs: Any) -> Any:
            lockstep.end_loop()
            output = method(*args, **kwargs)
            if then is not None:
                then()
            return output

        setattr(self._loop, name, ending)
