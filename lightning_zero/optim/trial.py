"""Finds out what an optimizer looks at, and how it may be called: by trying it on toy tensors.

It may look at every element by itself (Adam), at every tensor by itself (Muon, Adafactor, LAMB), or
at all tensors together (a norm over all gradients), in which case it cannot be sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.layout.config import ZeroConfig
from lightning_zero.optim.toys import Trial, run_trial

__all__ = ["CannotShardError", "Findings", "StepKind", "find_whole_tensors", "probe"]


class CannotShardError(ValueError):
    """An optimizer that must see all tensors at once."""


class StepKind(Enum):
    """How an optimizer may be called."""

    BY_BUCKET = "each bucket by itself"
    AT_ONCE = "all slices in one call"


@dataclass(frozen=True)
class Findings:
    """What a probe has found out.

    Attributes:
        kind: How the optimizer may be called.
        is_elementwise: It treats every element by itself; else every tensor.
    """

    kind: StepKind
    is_elementwise: bool

    def __and__(self, other: Findings) -> Findings:
        """What holds for both."""
        kind = self.kind if self.kind is other.kind else StepKind.AT_ONCE
        return Findings(kind, self.is_elementwise and other.is_elementwise)


def probe(optimizer: Optimizer, device: torch.device, dtype: torch.dtype) -> Findings:
    """Finds out, on toy parameters, what an optimizer looks at and how it may be called.

    Clones of the optimizer, with its settings but none of its state, step toys: all in one call;
    then divided as ranks would divide them, in slices and in whole tensors, and piece after piece.
    Equal results prove that the division does not matter.

    Raises:
        CannotShardError: It looks at all tensors together, so that sharding it would change the
            training.
        ValueError: Its step needs a closure, or cannot be tried.
    """
    name = type(optimizer).__name__
    try:
        start = run_trial(optimizer, device, dtype, Trial(num_steps=0))
        whole = run_trial(optimizer, device, dtype, Trial())
    except Exception as error:
        raise ValueError(
            f"optimizer {name} cannot be stepped after the backward, bucket by bucket: its step "
            f"failed on a probe with {type(error).__name__}: {error}. Use an optimizer whose "
            "step() needs no closure and takes dense gradients, such as AdamW."
        ) from error
    if torch.equal(start, whole):
        raise _refusal(name, "a clone of it does not move the parameters in its groups")
    tried = _Tried(optimizer, device, dtype, whole)
    # Slices of one tensor may be rounded in other places than the tensor.
    if tried.agrees(Trial(is_cut=True, num_ranks=2), 1e-4) and tried.agrees(
        Trial(is_cut=True), 1e-4
    ):
        return Findings(tried.kind(is_cut=True), is_elementwise=True)
    tried.error = None
    if tried.agrees(Trial(num_ranks=2), 1e-6):
        return Findings(tried.kind(is_cut=False), is_elementwise=False)
    if tried.error is not None:
        raise _refusal(
            name,
            "it does not step some of its tensors where the others are empty and have no gradients "
            f"({type(tried.error).__name__}: {tried.error})",
        )
    raise _refusal(
        name,
        "it looks at all tensors together: stepping some of them by themselves gives other values "
        "than stepping all in one call, as a norm over all gradients does",
    )


def find_whole_tensors(optimizers: Sequence[Optimizer], config: ZeroConfig) -> list[int]:
    """Which optimizers must step whole tensors; of one that cannot be tried nothing is known."""
    found: list[int] = []
    for index, optimizer in enumerate([] if config.assume_elementwise else optimizers):
        with suppress(ValueError):
            if not probe(optimizer, torch.device("cpu"), torch.float32).is_elementwise:
                found.append(index)
    return found


class _Tried:
    """Trials of one optimizer, compared with stepping whole toys in one call."""

    def __init__(
        self, optimizer: Optimizer, device: torch.device, dtype: torch.dtype, whole: Tensor
    ) -> None:
        self._optimizer = optimizer
        self._device = device
        self._dtype = dtype
        self._whole = whole
        self._results: dict[Trial, Tensor | Exception] = {Trial(): whole}
        self.error: Exception | None = None  # of the last trial that failed

    def agrees(self, trial: Trial, tolerance: float) -> bool:
        """Whether a trial gives the same values, relative to each and to the largest."""
        values = self._run(trial)
        if values is None:
            return False
        atol = tolerance / 100 * max(1.0, float(self._whole.abs().max()))
        return torch.allclose(self._whole, values, rtol=tolerance, atol=atol)

    def kind(self, *, is_cut: bool) -> StepKind:
        """Whether pieces may be stepped one after another: only where the very bits agree."""
        together = self._run(Trial(is_cut=is_cut))
        in_turn = self._run(Trial(is_cut=is_cut, is_in_turn=True))
        if together is None or in_turn is None or not torch.equal(together, in_turn):
            return StepKind.AT_ONCE
        return StepKind.BY_BUCKET

    def _run(self, trial: Trial) -> Tensor | None:
        if trial not in self._results:
            try:
                result: Tensor | Exception = run_trial(
                    self._optimizer, self._device, self._dtype, trial
                )
            except Exception as error:
                result = error
            self._results[trial] = result
        result = self._results[trial]
        if isinstance(result, Exception):
            self.error = result
            return None
        return result


def _refusal(name: str, reason: str) -> CannotShardError:
    return CannotShardError(
        f"optimizer {name} cannot be sharded: {reason}. Sharding it would change the training; use "
        "stage 0, or an optimizer that treats every element or every tensor by itself, such as "
        "AdamW, Muon or Adafactor; or promise by assume_elementwise=True that it treats every "
        "element by itself."
    )
