"""The optimizer step: the user's own optimizer, on this rank's slices, bucket by bucket.

[Note: One step of the user's optimizer] The optimizer object is kept as it is; a pre-hook and a
post-hook do the work, so that `optimizer.step()` is right whoever calls it: Lightning, a
GradScaler, a hand-written loop. The pre-hook runs a closure first (parameters must be whole in it),
then steps bucket after bucket by calling the optimizer's own step function on the bucket's
parameters alone: the gather of a stepped bucket travels while the next one is stepped. The body
that follows finds no gradients and does nothing. An optimizer that counts calls in its groups
cannot be called once for each bucket; it runs its body once over all of them instead. `probe` finds
out which kind an optimizer is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import record_function

from lightning_zero.bucket import Bucket
from lightning_zero.guard import has_placement
from lightning_zero.probe import StepKind, raw_step

__all__ = ["OptimizerStep"]


class OptimizerStep:
    """Runs one optimizer on the slices of this rank, from hooks on `optimizer.step`.

    Attributes:
        optimizer: The user's optimizer.
        kind: How it may be called.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        kind: StepKind,
        *,
        before: Callable[[], None],
        order: Callable[[], Sequence[Bucket]],
    ) -> None:
        self.optimizer = optimizer
        self.kind = kind
        self._before = before  # waits for what the step must not overtake
        self._order = order  # all buckets, in the order in which the next forward needs them
        self._stepping: list[Bucket] = []
        # A subclass's step may call its parent's, which calls hooks too.
        self._is_inside = self._is_inside_bucket = False
        self._handles = [
            optimizer.register_step_pre_hook(self._pre_hook),
            optimizer.register_step_post_hook(self._post_hook),
        ]

    def detach(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _pre_hook(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._is_inside:
            return None
        # torch counts the optimizer itself among the arguments.
        _, *rest = args
        closure = rest[0] if rest else kwargs.get("closure")
        if callable(closure):
            with torch.enable_grad():
                loss = closure()
            args = (optimizer, lambda: loss, *rest[1:]) if rest else args
            kwargs = kwargs if rest else {**kwargs, "closure": lambda: loss}
        self._before()
        members = self._members()
        self._stepping = [
            bucket
            for bucket in self._order()
            if any(p in members and p.grad is not None for p in bucket.parameters)
        ]
        self._is_inside = True
        if self.kind is StepKind.BY_BUCKET:
            try:
                for bucket in self._stepping:
                    self._step_bucket(bucket)
            except BaseException:
                self._is_inside = False
                raise
            for bucket in self._stepping:
                _hide_grads(bucket)
        else:
            for bucket in self._stepping:
                bucket.enter_step()
        return args, kwargs

    def _post_hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_inside_bucket:
            return
        self._is_inside = False
        for bucket in self._stepping:
            if self.kind is StepKind.AT_ONCE:
                bucket.leave_step(is_changed=True)
            else:
                bucket.grads.show()
        self._stepping = []

    def _step_bucket(self, bucket: Bucket) -> None:
        with record_function(f"zero::step {bucket.plan.name}"), self._only(bucket):
            bucket.enter_step()
            self._is_inside_bucket = True
            try:
                raw_step(self.optimizer)
            finally:
                self._is_inside_bucket = False
                bucket.leave_step(is_changed=True)

    def _members(self) -> set[nn.Parameter]:
        """The optimizer's parameters.

        Raises:
            ValueError: One was added that no engine holds.
        """
        members = {p for group in self.optimizer.param_groups for p in group["params"]}
        for parameter in members:
            if not has_placement(parameter):
                raise ValueError(
                    f"{type(self.optimizer).__name__} holds a parameter of shape "
                    f"{tuple(parameter.shape)} that the engine does not: its gradient would not be "
                    "averaged. Add parameters to the module before the engine is built."
                )
        return members

    @contextmanager
    def _only(self, bucket: Bucket) -> Iterator[None]:
        """Restricts the optimizer's groups to the parameters of `bucket`."""
        members = set(bucket.parameters)
        groups = self.optimizer.param_groups
        kept = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if p in members]
        try:
            yield
        finally:
            for group, parameters in zip(groups, kept, strict=True):
                group["params"] = parameters


def _hide_grads(bucket: Bucket) -> None:
    for parameter in bucket.parameters:
        parameter.grad = None
