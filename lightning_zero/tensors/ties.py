"""Parameters that show the same memory, and what else shows memory of a parameter.

[Note: Ties] A parameter that several modules hold is one parameter: it has one gradient and one
step. `head.weight.data = embedding.weight.data` makes two that show the same memory, which an
engine would shard twice and train apart. Where both show the same elements in the same shape, they
become one: the modules hold the same object from then on. Anything else that shares memory is
refused. Memory that NumPy alone has a view of cannot be seen.
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
class _Shown:
    """The memory that a tensor shows."""

    name: str  # qualified, with its kind, such as "parameter head.weight"
    tensor: Tensor
    space: tuple[str, int]  # addresses of different ones cannot be compared
    start: int  # address of its first byte, and of the one after its last
    stop: int

    def is_as(self, other: _Shown) -> bool:
        """The same elements in the same way."""
        one, two = self.tensor, other.tensor
        is_same = self.start == other.start and one.dtype is two.dtype
        return is_same and one.shape == two.shape and one.stride() == two.stride()

    def overlaps(self, other: _Shown) -> bool:
        """Whether an element is in both, where their ranges of addresses have some in common."""
        one, two = self.tensor, other.tensor
        if self.is_as(other) or one.element_size() != two.element_size():
            return True
        size = one.element_size()
        if (self.start - other.start) % size or (one.is_contiguous() and two.is_contiguous()):
            return True
        first = min(self.start, other.start)
        marks = torch.zeros((max(self.stop, other.stop) - first) // size, dtype=torch.bool)
        views = [
            marks.as_strided(
                shown.tensor.shape, shown.tensor.stride(), (shown.start - first) // size
            )
            for shown in (self, other)
        ]
        views[0].fill_(True)
        return bool(views[1].any())


def tie_shared(module: nn.Module, preferred: Container[nn.Parameter] = ()) -> list[str]:
    """Makes parameters of `module` one that show the same memory. See [Note: Ties].

    Args:
        module: Parameters that an engine holds already are left out.
        preferred: Those of optimizers: of two, the one that is here stays.

    Returns:
        A sentence for each tie.

    Raises:
        ValueError: Two share memory in another way, or optimizers have both; or a trained one shows
            an element several times.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for one in _shown_by(module):
            _check_each_element_once(one)
        texts: list[str] = []
        while pairs := list(_pairs(list(_shown_by(module)))):
            for tie in [_Tie.of(one, other, preferred) for one, other in pairs]:
                tie.make(module)
                texts.append(tie.text)
    return texts


@dataclass(frozen=True)
class _Tie:
    """Two parameters that become one."""

    kept: _Shown
    dropped: _Shown

    @classmethod
    def of(cls, one: _Shown, other: _Shown, preferred: Container[nn.Parameter]) -> _Tie:
        """Raises where they cannot."""
        are_alike = type(one.tensor) is type(other.tensor) and one.is_as(other)
        are_parameters = isinstance(one.tensor, nn.Parameter)
        if not are_alike or not are_parameters:
            raise ValueError(
                f"{other.name} shows memory of {one.name}, and is no parameter of the same shape: "
                "sharded, they would go apart at the first step. To tie two parameters, let both "
                "modules hold the same one, as in head.weight = embedding.weight; compute any "
                "other view in forward, or copy the values: tensor.clone()."
            )
        if one.tensor.requires_grad != other.tensor.requires_grad:
            raise ValueError(
                f"{one.name} and {other.name} show the same memory, and one of them is frozen; tie "
                "them by holding the same parameter, as in head.weight = embedding.weight, or give "
                "each values of its own: tensor.clone()."
            )
        if one.tensor in preferred and other.tensor in preferred:
            raise ValueError(
                f"the optimizers have {one.name} and {other.name}, which show the same memory: it "
                "would be stepped twice. Tie them before the optimizer is made: let both modules "
                "hold the same parameter, as in head.weight = embedding.weight."
            )
        return cls(other, one) if other.tensor in preferred else cls(one, other)

    @property
    def text(self) -> str:
        return (
            f"{self.kept.name} and {self.dropped.name} show the same memory: they are one "
            "parameter from now on, with one gradient and one step, as after head.weight = "
            "embedding.weight."
        )

    def make(self, module: nn.Module) -> None:
        for holder in module.modules():
            for key, parameter in list(holder._parameters.items()):
                if parameter is self.dropped.tensor:
                    setattr(holder, key, self.kept.tensor)


def alias_texts(module: nn.Module) -> list[str]:
    """A sentence for each plain attribute of a module that shows memory of a parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        parameters = list(_shown_by(module))
        own = {id(one.tensor) for one in parameters}
        others = [one for one in _attributes_of(module) if id(one.tensor) not in own]
        found: dict[str, str] = {}
        for other in others:
            for one in parameters:
                if one.space == other.space and one.start < other.stop and other.start < one.stop:
                    found.setdefault(other.name, one.name)
    return [
        f"{attribute} shows memory of {name}, which moves when it is sharded: the attribute keeps "
        "the values of now. Take it from the parameter where it is used."
        for attribute, name in found.items()
    ]


# ---------------------------------------------------------------- which memory


def _shown_by(module: nn.Module) -> Iterator[_Shown]:
    """Of all parameters and buffers, each tensor once."""
    named: list[tuple[str, Tensor]] = [
        (f"parameter {name}", parameter) for name, parameter in module.named_parameters()
    ]
    named += [(f"buffer {name}", buffer) for name, buffer in module.named_buffers()]
    for name, tensor in named:
        shown = _shown(name, tensor)
        if shown is not None:
            yield shown


def _attributes_of(module: nn.Module) -> Iterator[_Shown]:
    for path, holder in module.named_modules():
        for key, value in vars(holder).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            values = value.values() if isinstance(value, dict) else value
            values = values if isinstance(value, (dict, list, tuple)) else [value]
            for one in values:
                name = f"attribute {path}.{key}" if path else f"attribute {key}"
                if isinstance(one, Tensor) and (shown := _shown(name, one)) is not None:
                    yield shown


def _shown(name: str, tensor: Tensor) -> _Shown | None:
    """None where it has no memory of its own that can be looked at."""
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
    return _Shown(name, tensor, space, start, start + _extent(tensor) * tensor.element_size())


def _extent(tensor: Tensor) -> int:
    """Elements of memory from the first to the last of `tensor`."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((int(size) - 1) * int(stride) for size, stride in steps)


def _check_each_element_once(shown: _Shown) -> None:
    tensor = shown.tensor
    if tensor.requires_grad and _extent(tensor) < tensor.numel():
        raise ValueError(
            f"{shown.name} of shape {tuple(tensor.shape)} shows elements of its memory several "
            "times, as expand() makes it, and no optimizer can step it; give it memory for each: "
            "nn.Parameter(values.contiguous()), or expand the parameter in forward."
        )


def _pairs(shown: list[_Shown]) -> Iterator[tuple[_Shown, _Shown]]:
    """Those that share an element, one of them a parameter; each with the first that it shares."""
    order = {id(one): index for index, one in enumerate(shown)}
    reach: list[_Shown] = []  # those that may go on beyond the next start
    for one in sorted(shown, key=lambda one: (one.space, one.start, order[id(one)])):
        reach = [other for other in reach if other.space == one.space and other.stop > one.start]
        is_new = True
        for other in reach:
            first, second = sorted((one, other), key=lambda one: order[id(one)])
            if isinstance(first.tensor, nn.Parameter) and first.overlaps(second):
                yield first, second
                is_new &= not first.is_as(second)
        if is_new:
            reach.append(one)
