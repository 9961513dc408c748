"""Runs operators on shapes alone, and counts the bytes of the tensors that they would allocate.

[Note: Memory that is never written] Under `ShapesOnly` tensors have storages of the right size on
the CPU. The system reserves their memory, but assigns none before the first write, and large
operators do not write: their results are allocated, their values are not computed. Views are real,
and so is everything that keeps a storage alive, in Python or in autograd. Small tensors are
computed, so that counters, random seeds and messages between ranks have values.

[Note: Live bytes] A finalizer subtracts a storage when the last tensor on it is freed. The count is
what an allocator would be asked for, without its rounding and without the workspace inside kernels.
Attention counts as one fused kernel. Memory that an operator did not allocate, such as mapped CPU
memory, is not counted.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.comm.fake import skip_collective

__all__ = ["Results", "ShapesOnly"]

_MAX_COMPUTED_NUMEL = 2**14
_MAX_MESSAGE_BYTES = 2**20
_MIN_MAPPED_BYTES = 2**20
_ALLOCATES_ONLY = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "resize_",
    "is_set_to",
    "lift_fresh",
    "_unsafe_view",
}
_READS_VALUES = {"_local_scalar_dense", "equal", "item"}

Results = dict[Any, Any]  # results on the meta device, by operator and the shapes of its arguments


class ShapesOnly(TorchDispatchMode):
    """Computes small tensors only. See [Note: Memory that is never written].

    Args:
        results: Known results, which modes may share: most operators run many times.
        after_operator: Called with `live_bytes` after each operator.

    Attributes:
        live_bytes: Bytes of the storages that operators allocated and that still exist.
    """

    def __init__(self, results: Results, after_operator: Callable[[int], object]) -> None:
        super().__init__()
        self.live_bytes = 0
        self._results = results
        self._after_operator = after_operator
        self._known: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and the wrapper takes a fifth of the time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = _operator(func)
        result = self._run(func, operator, args, kwargs or {})
        if operator.allocates:
            for tensor in _tensors_in((result,)):
                self._count(tensor)
        self._after_operator(self.live_bytes)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = torch._C.TensorBase.untyped_storage(tensor)
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.live_bytes += storage.nbytes()
            weakref.finalize(storage, self._subtract, key, storage.nbytes()).atexit = False

    def _subtract(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= nbytes

    # ---------------------------------------------------------------- operators

    def _run(self, func: Any, operator: _Operator, args: Any, kwargs: Any) -> Any:
        if operator.is_always_run:
            return func(*args, **kwargs)
        tensors = [*_tensors_in(args), *_tensors_in(kwargs.values())]
        if operator.is_collective:
            is_message = all(tensor.nbytes <= _MAX_MESSAGE_BYTES for tensor in tensors)
            is_message &= not any(tensor.is_floating_point() for tensor in tensors)
            return func(*args, **kwargs) if is_message else skip_collective(operator.name, args)
        largest = max([tensor.numel() for tensor in tensors], default=0)
        is_message = bool(tensors) and all(t.dtype is torch.uint8 for t in tensors)
        if is_message and largest <= _MAX_MESSAGE_BYTES:
            return func(*args, **kwargs)
        if operator.written is not None:
            if largest <= _MAX_COMPUTED_NUMEL:
                return func(*args, **kwargs)
            written = [args[i] if i < len(args) else kwargs.get(n) for i, n in operator.written]
            return written[0] if len(written) == 1 else (tuple(written) or None)
        try:
            like = self._result_on_meta(func, operator, args, kwargs)
        except (RuntimeError, NotImplementedError):
            if largest > _MAX_COMPUTED_NUMEL:
                raise
            return func(*args, **kwargs)  # its result has a shape that depends on values
        for tensor in _tensors_in((like,)):
            largest = max(largest, tensor.numel())
        return func(*args, **kwargs) if largest <= _MAX_COMPUTED_NUMEL else _allocated(like)

    def _result_on_meta(self, func: Any, operator: _Operator, args: Any, kwargs: Any) -> Any:
        key: Any = (func, _key_of(args), _key_of(kwargs))
        try:
            if key in self._results:
                return self._results[key]
        except TypeError:  # an argument cannot be hashed
            key = None
        kwargs = {name: _on_meta(value) for name, value in kwargs.items() if name != "pin_memory"}
        if "device" in kwargs or operator.has_device:
            kwargs["device"] = torch.device("meta")
        result = func(*_on_meta(args), **kwargs)
        if key is not None:
            self._results[key] = result
        return result


class _Operator(NamedTuple):
    """What is known of an operator without its arguments.

    Attributes:
        name: Name without its namespace.
        is_always_run: Whether it writes no large tensor.
        is_collective: Whether it is of `torch.distributed`.
        written: Positions and names of the arguments that are also the results; None: the operator
            has new results.
        allocates: Whether a result is neither an argument nor a view of one.
        has_device: Whether it has an argument `device`.
    """

    name: str
    is_always_run: bool
    is_collective: bool
    written: tuple[tuple[int, str], ...] | None
    allocates: bool
    has_device: bool


@cache
def _operator(func: Any) -> _Operator:
    schema = func._schema
    name = schema.name.partition("::")[2]
    allocates = any(result.alias_info is None for result in schema.returns)
    written = [
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return _Operator(
        name,
        func.is_view or name in _ALLOCATES_ONLY or name in _READS_VALUES,
        func.namespace == "c10d",
        tuple(written[: len(schema.returns)]) if schema.is_mutable and not allocates else None,
        allocates,
        any(argument.name == "device" for argument in schema.arguments),
    )


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _key_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_key_of, value))
    if isinstance(value, dict):
        return tuple((name, _key_of(part)) for name, part in value.items())
    return type(value), value


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=torch.device("meta")
        )
    if isinstance(value, list | tuple):
        return type(value)(map(_on_meta, value))
    return value


def _allocated(like: Any) -> Any:
    """Tensors on the CPU with the shapes of `like`; numbers that may be indices are 0."""
    if isinstance(like, list | tuple):
        return type(like)(map(_allocated, like))
    if not isinstance(like, Tensor):
        return like
    size, stride, dtype = like.size(), like.stride(), like.dtype
    if like.numel() <= 1 or not dtype.is_floating_point:
        zeros = _zeros(like.untyped_storage().nbytes())
        return zeros.view(dtype).as_strided(size, stride)
    return torch.empty_strided(size, stride, dtype=dtype)


def _zeros(num_bytes: int) -> Tensor:
    """Zeros that are not written if there are many, which `torch.zeros` would do.

    Raises:
        OSError: The system does not reserve the memory.
    """
    if num_bytes < _MIN_MAPPED_BYTES:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)
