"""Values for what is on the meta device, module by module, while the engine takes parameters over.

[Note: Initialised in place] A module whose parameters or buffers are on the meta device gets
memory, which for parameters is the whole buffer of their bucket itself, and is initialised there:
by its `reset_parameters()`, then by the `_init_weights(module)` of the nearest module around it
that has one. As soon as all modules that share in a bucket are initialised, the bucket is sharded;
so in a stage that shards parameters one unit is whole at a time, beside the root.

[Note: Order of initialisation] Modules are initialised in the order in which constructors end:
those inside before the one around them. The numbers drawn do not depend on the stage or on the
number of ranks, and where constructors do nothing but call `reset_parameters` they are those of
a construction on the device. Of tied parameters the first module decides, and whatever had values
before keeps them. Every rank initialises; rank 0's values are taken.

[Note: Nothing stays unset] Memory is marked before a module initialises itself. Marks that are left
afterwards are an error that names the module and the tensor.
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

__all__ = ["check_can_materialize", "materialize"]

_NUM_NAMED = 8  # in an error


@dataclass(frozen=True)
class _Visit:
    """A module with tensors of its own on the meta device."""

    name: str  # qualified
    module: nn.Module
    initializers: tuple[Callable[[], Any], ...]  # none where all values are awaited
    is_awaited: bool  # a checkpoint has values for all of its tensors on the meta device


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    own: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _visits(root: nn.Module) -> list[_Visit]:
    """See [Note: Order of initialisation]."""
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module, around: tuple[nn.Module, ...]) -> Iterator[_Visit]:
        seen.add(module)
        around = (*around, module)
        for child_name, child in module.named_children():
            if child not in seen:
                yield from walk(f"{name}.{child_name}" if name else child_name, child, around)
        on_meta = [tensor for tensor in _own_tensors(module).values() if tensor.is_meta]
        if on_meta:
            is_awaited = all(pending_values(tensor) is not None for tensor in on_meta)
            initializers = () if is_awaited else tuple(_initializers(around))
            yield _Visit(name, module, initializers, is_awaited)

    return list(walk("", root, ()))


def _initializers(around: Sequence[nn.Module]) -> Iterator[Callable[[], Any]]:
    """Of the last of `around`, given the modules around it from the outside in."""
    module = around[-1]
    for name in ("reset_parameters", "_reset_parameters"):  # the latter: MultiheadAttention
        reset = getattr(module, name, None)
        if callable(reset):
            yield reset
            break
    for outer in reversed(around):
        init_weights = getattr(outer, "_init_weights", None)
        if callable(init_weights):
            yield partial(init_weights, module)
            break


def check_can_materialize(module: nn.Module) -> None:
    """Raises, with names, where modules on the meta device cannot be initialised. Local."""
    lacking = [v for v in _visits(module) if not v.is_awaited and not v.initializers]
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
        "class, or _init_weights(self, module) in a module around them, build them on a real "
        "device, or load a checkpoint that holds them."
    )


class _Materializer:
    """Gives memory and values; knows which bucket waits for which modules."""

    def __init__(
        self, root: nn.Module, plans: Sequence[BucketPlan], device: torch.device, comm: Communicator
    ) -> None:
        self._device = device
        self._comm = comm
        self._plans = plans
        self._named = parameters_by_name(root)
        self._place = {
            self._named[slot.name]: (index, position)
            for index, plan in enumerate(plans)
            for position, slot in enumerate(plan.layout.slots)
        }
        self._buffers: dict[Tensor, Tensor] = {}  # by buffer on the meta device
        self.filled: dict[int, FlatBuffer] = {}  # by bucket, while it waits
        self.visits = _visits(root)
        self.waits_for = [0] * len(plans)
        for visit in self.visits:
            for index in self.buckets_of(visit):
                self.waits_for[index] += 1

    def buckets_of(self, visit: _Visit) -> list[int]:
        """The buckets that hold parameters of its own, in order."""
        own = [p for p in visit.module._parameters.values() if p is not None]
        return sorted({self._place[parameter][0] for parameter in own})

    def fill(self, visit: _Visit) -> None:
        """Gives the module's own tensors memory and values. Collective."""
        module = visit.module
        fresh = {name for name, tensor in _own_tensors(module).items() if tensor.is_meta}
        buffers = [name for name in module._buffers if name in fresh]  # one order on all ranks
        sources = {name: pending_values(tensor) for name, tensor in _own_tensors(module).items()}
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta:
                self._give_memory(parameter)
        for name in buffers:
            module._buffers[name] = self._make_buffer(module._buffers[name])
        if not visit.is_awaited:
            self._initialize(visit, fresh)
        for name in buffers:
            buffer = module._buffers[name]
            assert buffer is not None
            source = sources[name]
            if source is not None:
                buffer.copy_(source)
            self._comm.broadcast_(buffer)

    def _give_memory(self, parameter: nn.Parameter) -> None:
        index, position = self._place[parameter]
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
            if value is not None and value is not tensor:  # it was replaced, or is not ours to set
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
    """Yields every bucket as soon as its parameters have values: its index in `plans`.

    With it comes the buffer in which its parameters lie already (in the widest dtype of the plan
    and of the parameters), or None. Collective: every rank, which must build the bucket before it
    asks for the next. See [Note: Initialised in place].
    """
    walk = _Materializer(root, plans, device, comm)
    for index, count in enumerate(walk.waits_for):
        if not count:
            yield index, None
    for visit in walk.visits:
        with torch.no_grad():
            walk.fill(visit)
        for index in walk.buckets_of(visit):
            walk.waits_for[index] -= 1
            if not walk.waits_for[index]:
                yield index, walk.filled.pop(index, None)
    _check_attributes(root)


def _check_attributes(root: nn.Module) -> None:
    for name, module in root.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ValueError(
                    f"attribute {key} of module {name or 'itself'} ({type(module).__name__}) is a "
                    "tensor on the meta device, neither a parameter nor a buffer, so that nothing "
                    "gives it values; build this module (metrics, say) on a real device."
                )
