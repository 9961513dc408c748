"""A ZeRO stage as data: the states of a bucket that are sharded.

The stages follow Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models" (2020), section 5. Other files ask a `Stage` which states are sharded and never
compare stage numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

__all__ = ["STAGES", "Stage", "State"]


class State(Enum):
    """One kind of model state, either replicated or sharded to 1/N between uses."""

    PARAM = "parameters"
    GRAD = "gradients"
    OPTIM = "optimizer"


@dataclass(frozen=True)
class Stage:
    """The model states that a ZeRO stage shards."""

    number: int  # 0 to 3, for messages and file names only
    shards: frozenset[State]  # each rank keeps 1/N of these

    def has_shard(self, state: State) -> bool:
        return state in self.shards

    @cached_property
    def shards_params(self) -> bool:
        """Whether parameters are sharded: unsharded before each use, resharded after it."""
        return State.PARAM in self.shards

    @cached_property
    def all_gathers_after_step(self) -> bool:
        """Whether each rank steps its shard only, and updated parameters are then all-gathered."""
        return State.OPTIM in self.shards and State.PARAM not in self.shards

    @property
    def reduces_every_backward(self) -> bool:
        """Whether every micro-batch is reduced: unsharded gradients are freed after backward."""
        return State.GRAD in self.shards

    def __str__(self) -> str:
        return f"stage {self.number}"


STAGES: dict[int, Stage] = {
    0: Stage(0, frozenset()),
    1: Stage(1, frozenset({State.OPTIM})),
    2: Stage(2, frozenset({State.OPTIM, State.GRAD})),
    3: Stage(3, frozenset({State.OPTIM, State.GRAD, State.PARAM})),
}
