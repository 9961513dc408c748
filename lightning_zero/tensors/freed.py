"""What a view of freed memory shows: NaN or an error, never a crash.

[Note: Reads of freed memory] A freed buffer keeps its storage object, for autograd's saved views
have it. A kernel does not look whether a storage has memory: reading a view of an emptied one ends
the process. So a freed storage stays readable or raises:

    CPU     Its memory is exchanged for a mapping that costs none: one small file of 0xFF bytes,
            mapped again and again, which is NaN in every floating dtype. Writes, NumPy arrays,
            `data_ptr` and `torch.save` are errors of torch.
    CUDA    Every access raises, with the text that is given here.

Where torch or the system lacks what this needs, the storage is emptied, as FSDP2 does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache
from typing import Any

import torch
from torch import UntypedStorage

__all__ = ["free", "refill"]

_TEXT = (
    "this tensor is a view of a parameter that is sharded at this moment: its memory is freed until"
    " the next use of its module. Take a copy where you take it: tensor.detach().clone()."
)
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # of Linux
_MIN_FILE_BYTES, _MAX_MAPPINGS = 2**20, 1024


def free(storage: Any, spare: Any) -> Any:
    """Gives the memory of `storage` back; its views are unusable until `refill`.

    Returns what `refill`, and the next call, are given as `spare`: a storage; None at first.
    """
    if spare is None and storage.device.type == "cpu":
        spare = _sentinel(storage.nbytes())
    if spare is not None:
        storage._swap_data_ptr_(spare)
        spare.resize_(0)
        return spare
    storage.resize_(0)
    if storage.device.type == "cuda" and _can_raise():
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, _TEXT)
    return None


def refill(storage: Any, nbytes: int, spare: Any) -> None:
    """Gives `storage` memory again, uninitialised."""
    if spare is not None:
        spare.resize_(nbytes)
        storage._swap_data_ptr_(spare)
        return
    if storage.device.type == "cuda" and _can_raise():
        torch._C._clear_storage_data_ptr_access_error_msg(storage._cdata)
    storage.resize_(nbytes)


def _can_raise() -> bool:
    """This build of torch can make a storage raise where it is used, and undo that."""
    names = "_set_storage_data_ptr_access_error_msg", "_clear_storage_data_ptr_access_error_msg"
    return all(hasattr(torch._C, name) for name in names)


def _sentinel(nbytes: int) -> Any:
    """A storage of NaN without memory of its own; None where the system has none."""
    if not hasattr(UntypedStorage, "_swap_data_ptr_") or not nbytes:
        return None
    address = _mapping(1 << (nbytes - 1).bit_length())
    if address is None:
        return None
    device = torch.device("cpu")
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    shown = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
    torch._C._set_throw_on_mutable_data_ptr(shown)
    return storage


@cache
def _mapping(nbytes: int) -> int | None:
    """The address of `nbytes` bytes of 0xFF, for good; the pages of one file in turn."""
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
        whole = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = libc.mmap(None, nbytes, 0, whole, -1, 0)
        if start == failed:
            return None
        access = mmap.PROT_READ | mmap.PROT_WRITE  # what is written is private, and lost
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
