"""A ZeRO stage as data: which states of a bucket rest as shards.

The stages follow Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models" (2020), section 5. Every other file asks a `Stage` which states rest as shards; none
compares stage numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["STAGES", "Stage", "State"]


class State(Enum):
    """One kind of model state. Each rests either whole on every rank or as a shard of 1/N."""

    PARAM = "parameters"
    GRAD = "gradients"
    OPTIM = "optimizer"


@dataclass(frozen=True)
class Stage:
    """Which states rest as shards."""

    number: int  # 0 to 3, for messages and file names only
    shards: frozenset[State]  # of which each rank keeps 1/N

    def has_shard(self, state: State) -> bool:
        return state in self.shards

    @property
    def shards_params(self) -> bool:
        """Parameters rest as shards: they are gathered before each use and released after it."""
        return State.PARAM in self.shards

    @property
    def all_gathers_after_step(self) -> bool:
        """Each rank updates its shard only: whole parameters are gathered after the step."""
        return State.OPTIM in self.shards and State.PARAM not in self.shards

    @property
    def reduces_every_backward(self) -> bool:
        """Whole gradients do not outlive a backward, so every micro-batch is reduced."""
        return State.GRAD in self.shards

    def __str__(self) -> str:
        return f"stage {self.number}"


STAGES: dict[int, Stage] = {
    0: Stage(0, frozenset()),
    1: Stage(1, frozenset({State.OPTIM})),
    2: Stage(2, frozenset({State.OPTIM, State.GRAD})),
    3: Stage(3, frozenset({State.OPTIM, State.GRAD, State.PARAM})),
}
