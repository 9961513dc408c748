"""Makes reads of freed memory return NaN or raise, instead of crashing the process.

[Note: Reads of freed memory] A freed buffer keeps its storage object, because views saved by
autograd hold it. A kernel does not check whether a storage has memory: reading a view of an empty
storage crashes the process. So a freed storage stays readable or raises:

    CPU     Its memory is swapped for a mapping without memory of its own: one small file of 0xFF
            bytes, mapped repeatedly, which is NaN in every floating dtype. Writes, NumPy arrays,
            `data_ptr` and `torch.save` raise errors of torch.
    CUDA    Every access raises `_TEXT`.

Without the functions of torch or the system that this needs, the storage is resized to 0, as in
FSDP2.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, UntypedStorage

__all__ = ["can_raise", "free", "read_error", "refill", "unreadable"]

_TEXT = (
    "this tensor is a view of a parameter that is currently sharded: its memory is freed until the "
    "next use of its module. Copy the values when you take the view: tensor.detach().clone()."
)
_UNREADABLE = (
    "parameter {} was read by C++ code, such as a scripted function or torch.vmap, while it was "
    "sharded, or before its all-gather had ended. Call that code in the forward of the module that "
    "holds the parameter, or inside `with lightning_zero.gathered(module):`."
)
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # values on Linux
_MIN_FILE_BYTES, _MAX_MAPPINGS = 2**20, 1024


def free(storage: Any, spare: Any) -> Any:
    """Frees the memory of `storage`; its views are unusable until `refill`.

    Args:
        storage: The storage to free.
        spare: Result of the previous call for this storage; None in the first call.

    Returns:
        The argument `spare` of `refill` and of the next call: a storage, or None.
    """
    if spare is None and storage.device.type == "cpu":
        spare = _sentinel(storage.nbytes())
    if spare is not None:
        storage._swap_data_ptr_(spare)
        spare.resize_(0)
        return spare
    storage.resize_(0)
    if storage.device.type == "cuda" and can_raise():
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, _TEXT)
    return None


def refill(storage: Any, nbytes: int, spare: Any) -> None:
    """Allocates uninitialized memory for a freed `storage`."""
    if spare is not None:
        spare.resize_(nbytes)
        storage._swap_data_ptr_(spare)
        return
    if storage.device.type == "cuda" and can_raise():
        torch._C._clear_storage_data_ptr_access_error_msg(storage._cdata)
    storage.resize_(nbytes)


def unreadable(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Tensors in place of the values of guarded parameters, which have no memory of their own.

    C++ that reads one gets an error that names the parameter, or NaN with versions of torch that
    cannot raise. Writes raise errors of torch.

    Args:
        shapes: Shapes of the parameters, by name.
        dtype: Their dtype.
        device: Their device.
    """
    found: list[Tensor] = []
    for name, shape in shapes.items():
        if not found or can_raise():
            ones = torch.full((dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device)
            element = ones.view(dtype).view(())
            torch._C._set_throw_on_mutable_data_ptr(element)
        found.append(element.expand(tuple(shape)))
        if can_raise():
            storage = element.untyped_storage()
            torch._C._set_storage_data_ptr_access_error_msg(
                storage._cdata, _UNREADABLE.format(name)
            )
    return found


def read_error(name: str) -> RuntimeError:
    """Error for parameter `name`, whose tensor of `unreadable` was read."""
    return RuntimeError(_UNREADABLE.format(name))


@cache
def can_raise() -> bool:
    """Whether this build of torch can make accesses to a storage raise, and undo that."""
    names = "_set_storage_data_ptr_access_error_msg", "_clear_storage_data_ptr_access_error_msg"
    return all(hasattr(torch._C, name) for name in names)


def _sentinel(nbytes: int) -> Any:
    """A storage that reads as NaN and has no memory of its own; None if not supported."""
    if not hasattr(UntypedStorage, "_swap_data_ptr_") or not nbytes:
        return None
    address = _mapping(1 << (nbytes - 1).bit_length())
    if address is None:
        return None
    device = torch.device("cpu")
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    view = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
    torch._C._set_throw_on_mutable_data_ptr(view)
    return storage


@cache
def _mapping(nbytes: int) -> int | None:
    """Address of `nbytes` bytes of 0xFF: the pages of one file, mapped repeatedly, never unmapped.

    None if the system does not support it.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    failed = ctypes.c_void_p(-1).value
    nbytes = max(nbytes, mmap.PAGESIZE)
    file_bytes = min(nbytes, max(_MIN_FILE_BYTES, nbytes // _MAX_MAPPINGS))
    file = os.memfd_create("lightning_zero_freed")
    try:
        with open(file, "wb", closefd=False) as writer:
            writer.write(b"\xff" * file_bytes)
        reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = libc.mmap(None, nbytes, 0, reserved, -1, 0)
        if start == failed:
            return None
        access = mmap.PROT_READ | mmap.PROT_WRITE  # writes are private to the process, and lost
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        for offset in range(0, nbytes, file_bytes):
            if libc.mmap(start + offset, file_bytes, access, flags, file, 0) == failed:
                return None
    except OSError:
        return None
    finally:
        os.close(file)
    address: int = start
    return address
