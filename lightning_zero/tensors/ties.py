"""Parameters that share memory are tied; other tensors that share it are refused or reported.

[Note: Ties] A parameter that several modules hold is one parameter: it has one gradient and one
step. `head.weight.data = embedding.weight.data` makes two parameters that share memory; an engine
would shard both, and they would diverge. If both have the same elements in the same shape, they are
tied: the modules then hold the same object. Any other parameter or buffer that shares memory is
refused. Views of NumPy cannot be detected.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_zero.tensors.guarded import has_placement

__all__ = ["alias_texts", "tie_shared"]


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

    def matches(self, other: _MemoryRange) -> bool:
        """Whether both tensors have the same elements in the same order."""
        one, two = self.tensor, other.tensor
        is_same = self.start == other.start and one.dtype is two.dtype
        return is_same and one.shape == two.shape and one.stride() == two.stride()

    def overlaps(self, other: _MemoryRange) -> bool:
        """Whether two tensors whose address ranges intersect share an element."""
        one, two = self.tensor, other.tensor
        if self.matches(other) or one.element_size() != two.element_size():
            return True
        size = one.element_size()
        if (self.start - other.start) % size or (one.is_contiguous() and two.is_contiguous()):
            return True
        first = min(self.start, other.start)
        marks = torch.zeros((max(self.stop, other.stop) - first) // size, dtype=torch.bool)
        views = [
            marks.as_strided(
                memory.tensor.shape, memory.tensor.stride(), (memory.start - first) // size
            )
            for memory in (self, other)
        ]
        views[0].fill_(True)
        return bool(views[1].any())


def tie_shared(module: nn.Module, preferred: Container[nn.Parameter] = ()) -> list[str]:
    """Ties parameters of `module` that share memory. See [Note: Ties].

    Args:
        module: Parameters that already belong to an engine are skipped.
        preferred: Parameters of optimizers; of two tied parameters, the one in here is kept.

    Returns:
        A sentence for each tie.

    Raises:
        ValueError: Two tensors share memory in another way; optimizers have both parameters; or a
            trainable parameter contains an element several times.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for one in _memory_of(module):
            _check_each_element_once(one)
        texts: list[str] = []
        while pairs := list(_pairs(list(_memory_of(module)))):
            for tie in [_Tie.of(one, other, preferred) for one, other in pairs]:
                tie.make(module)
                texts.append(tie.text)
    return texts


@dataclass(frozen=True)
class _Tie:
    """Two parameters that become one."""

    kept: _MemoryRange
    dropped: _MemoryRange

    @classmethod
    def of(cls, one: _MemoryRange, other: _MemoryRange, preferred: Container[nn.Parameter]) -> _Tie:
        """Chooses the parameter to keep; raises ValueError if the two cannot be tied."""
        are_equal = type(one.tensor) is type(other.tensor) and one.matches(other)
        are_parameters = isinstance(one.tensor, nn.Parameter)
        if not are_equal or not are_parameters:
            raise ValueError(
                f"{other.name} shares memory with {one.name}, but is not a parameter of the same "
                "shape: after sharding, they would diverge at the first step. To tie two "
                "parameters, let both modules hold the same one, as in head.weight = "
                "embedding.weight; compute any other view in forward, or copy the values: "
                "tensor.clone()."
            )
        if one.tensor.requires_grad != other.tensor.requires_grad:
            raise ValueError(
                f"{one.name} and {other.name} share memory, and one of them is frozen; tie them "
                "by holding the same parameter, as in head.weight = embedding.weight, or copy the "
                "values of one: tensor.clone()."
            )
        if one.tensor in preferred and other.tensor in preferred:
            raise ValueError(
                f"the optimizers have {one.name} and {other.name}, which share memory: it would "
                "be stepped twice. Tie them before the optimizer is created: let both modules "
                "hold the same parameter, as in head.weight = embedding.weight."
            )
        return cls(other, one) if other.tensor in preferred else cls(one, other)

    @property
    def text(self) -> str:
        return (
            f"{self.kept.name} and {self.dropped.name} share memory: they are now one parameter, "
            "with one gradient and one step, as after head.weight = embedding.weight."
        )

    def make(self, module: nn.Module) -> None:
        """Replaces the dropped parameter in all modules."""
        for holder in module.modules():
            for key, parameter in list(holder._parameters.items()):
                if parameter is self.dropped.tensor:
                    setattr(holder, key, self.kept.tensor)


def alias_texts(module: nn.Module) -> list[str]:
    """A sentence for each plain attribute of a module that shares memory with a parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        parameters = list(_memory_of(module))
        own = {id(one.tensor) for one in parameters}
        others = [one for one in _attributes_of(module) if id(one.tensor) not in own]
        found: dict[str, str] = {}
        for other in others:
            for one in parameters:
                if one.space == other.space and one.start < other.stop and other.start < one.stop:
                    found.setdefault(other.name, one.name)
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
            for one in values:
                name = f"attribute {path}.{key}" if path else f"attribute {key}"
                memory = _memory_range(name, one) if isinstance(one, Tensor) else None
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
    """Pairs that share an element, where the first one (in the order of `memory`) is a parameter.

    Several equal ranges each give a pair with the first of them.
    """
    order = {id(one): index for index, one in enumerate(memory)}
    reach: list[_MemoryRange] = []  # ranges that may extend beyond the next start
    for one in sorted(memory, key=lambda one: (one.space, one.start, order[id(one)])):
        reach = [other for other in reach if other.space == one.space and other.stop > one.start]
        is_new = True
        for other in reach:
            first, second = sorted((one, other), key=lambda one: order[id(one)])
            if isinstance(first.tensor, nn.Parameter) and first.overlaps(second):
                yield first, second
                is_new &= not first.matches(second)
        if is_new:
            reach.append(one)
