"""Sharded tensors of one engine that are alive, and their end with the engine.

[Note: Tensors that outlive their engine] Users keep sharded tensors: an average of the weights in a
callback, the best weights in a global variable. They can be read only while ranks communicate, by
all ranks together; after a run, code of one rank pickles them, or a later run uses them. So when an
engine closes, all ranks gather them, and each becomes a plain full tensor: the same object, with
torch's class (`engine/held.py`).

Ranks must agree on which of their tensors are one and the same. The tensors of a parameter are
numbered in the order of their creation. If the history of a parameter (how many tensors there were,
and a checksum of their shapes and dtypes) is equal on all ranks, equal numbers are one tensor. What
some rank has created or kept alone cannot be gathered, and using it raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn
from weakref import WeakValueDictionary

from torch import Tensor
from torch.utils.weak import TensorWeakRef

__all__ = ["EndedShard", "Key", "LiveTensors"]

Key = tuple[int, int]  # parameter, number


class LiveTensors:
    """Weak references to sharded tensors. See [Note: Tensors that outlive their engine].

    Attributes:
        has_ended: Whether the engine is closed.
        histories: Number of the tensors of each parameter, and a checksum of their shapes and
            dtypes. `ShardedTensor.of`, which makes the tensors, writes both of these.
        tensors: The tensors that are alive.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self.histories: list[tuple[int, int]] = []
        self.tensors: WeakValueDictionary[Key, Tensor] = WeakValueDictionary()

    def add_parameter(self) -> int:
        """Returns the number of one more parameter; in the same order on every rank."""
        self.histories.append((0, 0))
        return len(self.histories) - 1

    def history(self, parameter: int) -> tuple[int, int]:
        """Number of the tensors of a parameter, and a checksum. Local."""
        return self.histories[parameter]

    def end(self) -> dict[Key, Tensor]:
        """Returns the tensors that are alive, and keeps no reference to them. Local."""
        self.has_ended = True
        # The second reference repairs one that torch itself has kept alive.
        alive = {key: TensorWeakRef(tensor)() for key, tensor in self.tensors.items()}
        self.tensors.clear()
        return {key: tensor for key, tensor in alive.items() if tensor is not None}


@dataclass(frozen=True)
class EndedShard:
    """In place of the elements of a tensor that has outlived its engine; each use raises.

    Implements `LocalShard` of tensors/shard_spec.py.

    Attributes:
        title: Name of the tensor, such as "p.data of parameter head.weight".
        reason: Why it did not become a full tensor, as a clause.
    """

    title: str
    reason: str

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"{self.title} was sharded, and its engine is closed; it did not become a full tensor, "
            f"because {self.reason}. Keep such a tensor on every rank, or a full copy: "
            "tensor.full_tensor(), on every rank, before the run ends."
        )

    def read(self) -> Tensor:
        self._refuse()

    def change(self, write: Callable[[Tensor], object]) -> None:
        self._refuse()

    def check_memory(self, call: str, num_bytes: int) -> None:
        self._refuse()
