"""How much memory the live tensors of this process hold, and how much the process has."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["anonymous_bytes", "live_storage_bytes", "live_storages", "return_freed_memory"]

_M_MMAP_THRESHOLD = -3  # <malloc.h>


def anonymous_bytes() -> int:
    """Memory of this process that no file backs: the kernel's own count, by page."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no Anonymous in smaps_rollup; Linux is needed")


def return_freed_memory() -> None:
    """Makes glibc return freed blocks of 1 MiB or more, for good; it keeps up to 32 MiB of them.

    So does MALLOC_MMAP_THRESHOLD_=1048576 in the environment.
    """
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20) == 1


def live_storage_bytes(device_type: str | None = None) -> int:
    """Bytes of all storages that live tensors of this process hold, each storage counted once.

    Found: every tensor and storage that Python can reach, in whatever container, optimizer state or
    tensor subclass (a DTensor's local tensor); views and their bases; gradients that only autograd
    holds; the parts of sparse tensors. A storage counts in full even where a view refers to a part
    of it. Tensors in reference cycles count until they are collected: call `gc.collect()` first
    where they should not.

    Not found: tensors that `gc.freeze()` has set aside (a way to walk only what is new, fast), and
    what only C++ holds. These are tensors that autograd saved for backward, the buckets of
    DistributedDataParallel with `gradient_as_bucket_view=False`, workspaces of kernels, and copies
    inside gloo. Meta tensors hold nothing and count nothing.

    Args:
        device_type: Count storages of this device only, such as "cpu"; None: of all devices.
    """
    found = live_storages()
    wanted = (n for (kind, _), n in found.items() if device_type in (None, kind.partition(":")[0]))
    return sum(wanted)


def live_storages() -> dict[tuple[str, int], int]:
    """Bytes of every live storage by (device, address).

    Two storages at one address (memory shared with numpy or DLPack) are one entry, the larger.
    """
    found: dict[tuple[str, int], int] = {}
    things = gc.get_objects()
    # By the real type: asking a dead proxy for its `__class__` raises. Few are of these, of many.
    kinds = set(map(type, things))
    wanted = {kind for kind in kinds if issubclass(kind, Tensor | torch.UntypedStorage)}
    # Without this, reading `.grad` or `._base` of a subclass would run its __torch_function__.
    with torch._C.DisableTorchFunctionSubclass():
        for thing in [thing for thing in things if type(thing) in wanted]:
            if issubclass(type(thing), Tensor):
                for storage in _storages_of(thing):
                    _add(found, storage)
            else:
                _add(found, thing)
    return found


def _storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Storages of `tensor`, its base and its gradient; of a wrapper subclass, of what it wraps."""
    waiting = [tensor]
    while waiting:
        one = waiting.pop()
        waiting += _hidden_behind(one)
        storage = _read(one.untyped_storage)
        # A wrapper's storage has a size but no memory.
        if storage is not None and not is_traceable_wrapper_subclass(one):
            yield storage


def _hidden_behind(tensor: Tensor) -> list[Tensor]:
    """Tensors that are reached from `tensor` and that the garbage collector may not list."""
    hidden: list[Any] = []
    if tensor.is_leaf:  # `.grad` of another tensor warns
        hidden.append(_read(lambda: tensor.grad))
    hidden.append(_read(lambda: tensor._base))
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        hidden += [getattr(tensor, name, None) for name in names]
    if tensor.is_sparse:
        hidden += [_read(tensor._indices), _read(tensor._values)]
    return [one for one in hidden if isinstance(one, Tensor)]


def _read(get: Callable[[], Any]) -> Any:
    """What `get` returns, or None: a sparse or half-destroyed tensor raises when asked."""
    try:
        return get()
    except (RuntimeError, NotImplementedError, ReferenceError, AttributeError):
        return None


def _add(found: dict[tuple[str, int], int], storage: torch.UntypedStorage) -> None:
    if storage.device.type == "meta":
        return
    address, size = _read(storage.data_ptr), _read(storage.nbytes)
    if address and size:
        key = (str(storage.device), address)
        found[key] = max(found.get(key, 0), size)
