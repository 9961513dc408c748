"""Hides gradients while torch.compile traces a graph: callbacks that torch calls around it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch._dynamo.callback import callback_handler

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.param_grads import HiddenGrad

__all__ = ["GradHider"]


class GradHider:
    """Hides gradients from torch.compile. See [Note: Hidden gradients] in param_grads.py.

    It ignores compilations by other threads than the one that trains: a worker may compile a
    function of the optimizer while that thread uses the gradients.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._thread = 0  # the thread of the last `watch`
        self._hidden: list[tuple[Bucket, list[HiddenGrad]]] = []  # while a graph is traced
        this = weakref.ref(self)  # torch keeps the callbacks of an engine that is not closed
        self._before = partial(_call, this, GradHider._hide)
        self._after = partial(_call, this, GradHider._show)
        weakref.finalize(self, _remove, self._before, self._after)

    def watch(self) -> None:
        """Hides gradients during compilations by this thread, until `torch._dynamo.reset`."""
        self._thread = threading.get_ident()
        if self._before not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._before)
            callback_handler.register_end_callback(self._after)

    def _hide(self) -> None:
        if threading.get_ident() != self._thread:
            return
        with torch.inference_mode(mode=False):
            for bucket in self._buckets:
                bucket.wait_for_step()  # a worker would set `.grad` meanwhile
                grads = bucket.grads.param_grads
                hidden = grads.hide(bucket.plan.dtype, bucket.comm.device)
                self._hidden.append((bucket, hidden))

    def _show(self) -> None:
        hidden, self._hidden = self._hidden, []
        with torch.inference_mode(mode=False):
            for bucket, grads in hidden:
                bucket.grads.param_grads.unhide(grads)


def _call(hider: weakref.ref[GradHider], method: Callable[[GradHider], None], *_: object) -> None:
    manager = hider()
    if manager is not None:
        method(manager)


def _remove(before: Callable[..., None], after: Callable[..., None]) -> None:
    """Removes the callbacks of a hider that no longer exists, unless torch has dropped them."""
    if before in callback_handler.start_callbacks:
        callback_handler.remove_start_callback(before)
        callback_handler.remove_end_callback(after)
