"""Memory and values for modules on the meta device, while the engine wraps parameters.

[Note: Initialized in place] A module with parameters or buffers on the meta device gets memory. For
parameters this is the unsharded buffer of their bucket. The module is initialized there, by its
`reset_parameters()`, then by the `_init_weights(module)` of the nearest enclosing module that has
one. A `reset_parameters` that a script has assigned to the module itself decides alone. As soon as
all modules with parameters in a bucket are initialized, the bucket is sharded. So in stage 3 one
unit is unsharded at a time, in addition to the root.

[Note: Order of initialization] Modules are initialized in the order in which constructors end: an
inner module before the one that contains it. The random numbers do not depend on the stage or the
number of ranks. If constructors only call `reset_parameters`, they are those of a construction on
the device. The first module decides on tied parameters, and tensors that had values keep them.
Every rank initializes; rank 0's values are kept.

[Note: Nothing stays unset] Memory is filled with a sentinel before a module initializes itself. A
sentinel that remains is an error with the module and the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.plan import BucketPlan
from lightning_zero.tensors.buffer import FlatBuffer, promoted_dtype
from lightning_zero.tensors.meta import fill_sentinel, has_sentinel, pending_values, swap_memory

__all__ = ["check_can_materialize", "materialize", "move_all_but_parameters"]

_NUM_NAMED = 8  # modules, in an error


@dataclass(frozen=True)
class _Visit:
    """A module with tensors of its own on the meta device."""

    name: str  # qualified name
    module: nn.Module
    initializers: tuple[Callable[[], Any], ...]  # none if all values are pending
    has_pending_values: bool  # a checkpoint has values for all of its tensors on the meta device


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    own: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _visits(root: nn.Module) -> list[_Visit]:
    """Modules to initialize, in order. See [Note: Order of initialization]."""
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module, ancestors: tuple[nn.Module, ...]) -> Iterator[_Visit]:
        seen.add(module)
        ancestors = (*ancestors, module)
        for child_name, child in module.named_children():
            if child not in seen:
                yield from walk(f"{name}.{child_name}" if name else child_name, child, ancestors)
        on_meta = [tensor for tensor in _own_tensors(module).values() if tensor.is_meta]
        if on_meta:
            has_pending_values = all(pending_values(tensor) is not None for tensor in on_meta)
            initializers = () if has_pending_values else tuple(_initializers(ancestors))
            yield _Visit(name, module, initializers, has_pending_values)

    return list(walk("", root, ()))


def _initializers(ancestors: Sequence[nn.Module]) -> Iterator[Callable[[], Any]]:
    """Initializers of the last of `ancestors`, which are ordered from the outside in."""
    module = ancestors[-1]
    for name in ("reset_parameters", "_reset_parameters"):  # the latter: MultiheadAttention
        reset = getattr(module, name, None)
        if callable(reset):
            yield reset
            if name in vars(module):
                return
            break
    for outer in reversed(ancestors):
        init_weights = getattr(outer, "_init_weights", None)
        if callable(init_weights):
            yield partial(init_weights, module)
            break


def move_all_but_parameters(root: nn.Module, device: torch.device) -> None:
    """Moves buffers, and the tensors that modules move in an `_apply` of their own."""

    def move(tensor: Tensor) -> Tensor:
        stays = tensor.is_meta or isinstance(tensor, nn.Parameter)
        return tensor if stays else tensor.to(device)

    root._apply(move)  # that of a metric moves its state, which is in plain attributes


def check_can_materialize(module: nn.Module) -> None:
    """Raises if modules on the meta device cannot be initialized, with their names. Local."""
    lacking = [v for v in _visits(module) if not v.has_pending_values and not v.initializers]
    if not lacking:
        return
    named = [
        f"{visit.name or 'the module itself'} ({type(visit.module).__name__}: "
        f"{', '.join(name for name, t in _own_tensors(visit.module).items() if t.is_meta)})"
        for visit in lacking[:_NUM_NAMED]
    ]
    more = f" and {len(lacking) - _NUM_NAMED} more" if len(lacking) > _NUM_NAMED else ""
    raise ValueError(
        "these modules have parameters or buffers on the meta device and no reset_parameters() to "
        f"give them values: {'; '.join(named)}{more}. Define reset_parameters(self) in their "
        "class, or _init_weights(self, module) in an enclosing module, build them on a real "
        "device, or load a checkpoint that contains them."
    )


class _Materializer:
    """Gives memory and values to modules, one by one.

    Attributes:
        filled: Buffers of the buckets that wait for modules, by index of the bucket.
        visits: Modules to initialize, in order.
        waits_for: Number of modules that each bucket waits for.
    """

    def __init__(
        self, root: nn.Module, plans: Sequence[BucketPlan], device: torch.device, comm: Communicator
    ) -> None:
        self._device = device
        self._comm = comm
        self._plans = plans
        self._named = parameters_by_name(root)
        self._position = {
            self._named[slot.name]: (index, position)
            for index, plan in enumerate(plans)
            for position, slot in enumerate(plan.layout.slots)
        }
        self._buffers: dict[Tensor, Tensor] = {}  # by the buffer on the meta device
        self.filled: dict[int, FlatBuffer] = {}
        self.visits = _visits(root)
        self.waits_for = [0] * len(plans)
        for visit in self.visits:
            for index in self.buckets_of(visit):
                self.waits_for[index] += 1

    def buckets_of(self, visit: _Visit) -> list[int]:
        """Indices of the buckets of its own parameters, in order."""
        own = [p for p in visit.module._parameters.values() if p is not None]
        return sorted({self._position[parameter][0] for parameter in own})

    def fill(self, visit: _Visit) -> None:
        """Gives memory and values to the module's own tensors. Collective."""
        module = visit.module
        fresh = {name for name, tensor in _own_tensors(module).items() if tensor.is_meta}
        buffers = [name for name in module._buffers if name in fresh]  # one order on all ranks
        sources = {name: pending_values(tensor) for name, tensor in _own_tensors(module).items()}
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta:
                self._allocate(parameter)
        for name in buffers:
            module._buffers[name] = self._make_buffer(module._buffers[name])
        if not visit.has_pending_values:
            self._initialize(visit, fresh)
        for name in buffers:
            buffer = module._buffers[name]
            assert buffer is not None
            source = sources[name]
            if source is not None:
                buffer.copy_(source)
            self._comm.broadcast_(buffer)

    def _allocate(self, parameter: nn.Parameter) -> None:
        index, position = self._position[parameter]
        plan = self._plans[index]
        if index not in self.filled:
            own = [self._named[slot.name].dtype for slot in plan.layout.slots]
            self.filled[index] = FlatBuffer(
                plan.layout, promoted_dtype(plan.dtype, own), self._device
            )
        memory = self.filled[index].views[position]
        if memory.dtype != parameter.dtype:
            memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
        swap_memory(parameter, plan.layout.slots[position].name, memory)

    def _make_buffer(self, buffer: Tensor | None) -> Tensor:
        assert buffer is not None
        if buffer not in self._buffers:
            self._buffers[buffer] = torch.empty_like(buffer, device=self._device)
        return self._buffers[buffer]

    def _initialize(self, visit: _Visit, fresh: set[str]) -> None:
        before = _own_tensors(visit.module)
        kept = {name: t.clone() for name, t in before.items() if name not in fresh}
        for name in fresh:
            fill_sentinel(before[name])
        with self._device:
            for initialize in visit.initializers:
                initialize()
        after = _own_tensors(visit.module)
        for name, tensor in before.items():
            value = kept.get(name, after.get(name))
            if value is not None and value is not tensor:  # it was replaced, or had values before
                tensor.copy_(value)
            if name in visit.module._parameters:
                visit.module._parameters[name] = tensor  # type: ignore[assignment]
            else:
                visit.module._buffers[name] = tensor
        unset = [name for name in fresh if has_sentinel(before[name])]
        if unset:
            raise ValueError(
                f"module {visit.name or 'itself'} ({type(visit.module).__name__}) was on the meta "
                f"device, and its reset_parameters() has left {', '.join(sorted(unset))} without "
                "values (or set NaN); set every parameter and buffer of the module in it."
            )


def materialize(
    root: nn.Module, plans: Sequence[BucketPlan], device: torch.device, comm: Communicator
) -> Iterator[tuple[int, FlatBuffer | None]]:
    """Yields every bucket as soon as its parameters have values. See [Note: Initialized in place].

    Collective: every rank, which must build each bucket before it continues.

    Yields:
        The index of the bucket in `plans`, and the buffer that contains its parameters (in the
        widest dtype of the plan and the parameters), or None.
    """
    materializer = _Materializer(root, plans, device, comm)
    for index, count in enumerate(materializer.waits_for):
        if not count:
            yield index, None
    for visit in materializer.visits:
        with torch.no_grad():
            materializer.fill(visit)
        for index in materializer.buckets_of(visit):
            materializer.waits_for[index] -= 1
            if not materializer.waits_for[index]:
                yield index, materializer.filled.pop(index, None)
    _check_attributes(root)


def _check_attributes(root: nn.Module) -> None:
    for name, module in root.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ValueError(
                    f"attribute {key} of module {name or 'itself'} ({type(module).__name__}) is a "
                    "tensor on the meta device, but neither a parameter nor a buffer, so it gets "
                    "no values; build this module, such as a metric, on a real device."
                )
