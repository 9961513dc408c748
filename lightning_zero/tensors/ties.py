"""Refuses parameters that share memory with other tensors.

[Note: Ties] A parameter that several modules hold is one parameter: it has one gradient and one
step. `head.weight.data = embedding.weight.data` makes two parameters that share memory; an engine
would shard both, and they would diverge. Views of NumPy cannot be detected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_zero.tensors.guarded import has_placement

__all__ = ["alias_texts", "check_memory"]


@dataclass(frozen=True)
class _MemoryRange:
    """Memory of a tensor.

    Attributes:
        name: Qualified name with its kind, such as "parameter head.weight".
        tensor: The tensor.
        space: Address space; addresses of different spaces cannot be compared.
        start: Address of the first byte.
        stop: Address after the last byte.
    """

    name: str
    tensor: Tensor
    space: tuple[str, int]
    start: int
    stop: int

    def overlaps(self, other: _MemoryRange) -> bool:
        """Whether two tensors whose address ranges intersect share an element."""
        first, second = self.tensor, other.tensor
        if first.element_size() != second.element_size():
            return True
        size = first.element_size()
        if (self.start - other.start) % size or (first.is_contiguous() and second.is_contiguous()):
            return True
        lowest = min(self.start, other.start)
        marks = torch.zeros((max(self.stop, other.stop) - lowest) // size, dtype=torch.bool)
        views = [
            marks.as_strided(
                memory.tensor.shape, memory.tensor.stride(), (memory.start - lowest) // size
            )
            for memory in (self, other)
        ]
        views[0].fill_(True)
        return bool(views[1].any())


def check_memory(module: nn.Module) -> None:
    """Checks that no parameter shares memory with another tensor. See [Note: Ties].

    Parameters that belong to an engine already are skipped.

    Raises:
        ValueError: A parameter shares memory with another parameter or a buffer, or a trainable one
            contains an element several times.
    """
    with torch._C.DisableTorchFunctionSubclass():
        memory = list(_memory_of(module))
        for held in memory:
            _check_each_element_once(held)
        for first, second in _pairs(memory):
            raise ValueError(
                f"{second.name} shares memory with {first.name}: after sharding they would diverge "
                "at the first step. To tie two parameters, let both modules hold the same object, "
                "head.weight = embedding.weight, before the optimizer is created; compute any "
                "other view in forward, or copy the values: tensor.clone()."
            )


def alias_texts(module: nn.Module) -> list[str]:
    """A sentence for each plain attribute of a module that shares memory with a parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        parameters = list(_memory_of(module))
        own = {id(held.tensor) for held in parameters}
        others = [held for held in _attributes_of(module) if id(held.tensor) not in own]
        found: dict[str, str] = {}
        for other in others:
            for held in parameters:
                if (
                    held.space == other.space
                    and held.start < other.stop
                    and other.start < held.stop
                ):
                    found.setdefault(other.name, held.name)
    return [
        f"{attribute} shares memory with {name}, whose memory moves when it is sharded: the "
        "attribute keeps the current values. Compute it from the parameter where it is used."
        for attribute, name in found.items()
    ]


# ---------------------------------------------------------------- memory of tensors


def _memory_of(module: nn.Module) -> Iterator[_MemoryRange]:
    """Memory of all parameters and buffers, each tensor once."""
    named: list[tuple[str, Tensor]] = [
        (f"parameter {name}", parameter) for name, parameter in module.named_parameters()
    ]
    named += [(f"buffer {name}", buffer) for name, buffer in module.named_buffers()]
    for name, tensor in named:
        memory = _memory_range(name, tensor)
        if memory is not None:
            yield memory


def _attributes_of(module: nn.Module) -> Iterator[_MemoryRange]:
    """Memory of all tensors in plain attributes of modules, and in their lists and dicts."""
    for path, holder in module.named_modules():
        for key, value in vars(holder).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            values = value.values() if isinstance(value, dict) else value
            values = values if isinstance(value, (dict, list, tuple)) else [value]
            for item in values:
                name = f"attribute {path}.{key}" if path else f"attribute {key}"
                memory = _memory_range(name, item) if isinstance(item, Tensor) else None
                if memory is not None:
                    yield memory


def _memory_range(name: str, tensor: Tensor) -> _MemoryRange | None:
    """Memory of a strided tensor; None if it has no accessible memory of its own."""
    if has_placement(tensor) or is_lazy(tensor) or tensor.layout is not torch.strided:
        return None
    if not tensor.numel():
        return None
    try:
        storage = tensor.untyped_storage()
        base = 0 if tensor.is_meta else storage.data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass around other tensors
        return None
    if not base and not tensor.is_meta:
        return None
    space = (str(tensor.device), storage._cdata if tensor.is_meta else 0)
    start = base + int(tensor.storage_offset()) * tensor.element_size()
    stop = start + _extent(tensor) * tensor.element_size()
    return _MemoryRange(name, tensor, space, start, stop)


def _extent(tensor: Tensor) -> int:
    """Elements of memory from the first to the last element of `tensor`."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((int(size) - 1) * int(stride) for size, stride in steps)


def _check_each_element_once(memory: _MemoryRange) -> None:
    tensor = memory.tensor
    if tensor.requires_grad and _extent(tensor) < tensor.numel():
        raise ValueError(
            f"{memory.name} of shape {tuple(tensor.shape)} contains elements of its memory "
            "several times, as after expand(), and no optimizer can step it; make it contiguous: "
            "nn.Parameter(values.contiguous()), or expand the parameter in forward."
        )


def _pairs(memory: list[_MemoryRange]) -> Iterator[tuple[_MemoryRange, _MemoryRange]]:
    """Pairs that share an element, where the first (in the order of `memory`) is a parameter."""
    order = {id(this): index for index, this in enumerate(memory)}
    reach: list[_MemoryRange] = []  # ranges that may extend beyond the next start
    for this in sorted(memory, key=lambda this: (this.space, this.start, order[id(this)])):
        reach = [other for other in reach if other.space == this.space and other.stop > this.start]
        for other in reach:
            first, second = sorted((this, other), key=lambda this: order[id(this)])
            if isinstance(first.tensor, nn.Parameter) and first.overlaps(second):
                yield first, second
        reach.append(this)
