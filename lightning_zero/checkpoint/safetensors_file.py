"""Weights written as Hugging Face reads them: `.safetensors` files and their index.

[Note: Safetensors] A file is 8 bytes with the length of the header, the header (JSON: dtype, shape
and place of each tensor), and the tensors' bytes without gaps. The library that reads them writes
from memory; here a tensor is read when its bytes are due. Of tied weights, which the format cannot
say, the first name is stored, and the header's metadata maps every other name to it, as
`safetensors.torch.save_model` does.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lightning_zero.checkpoint.archive import Progress, pieces
from lightning_zero.checkpoint.file import replacing

__all__ = ["INDEX", "WHOLE", "split", "write_index", "write_safetensors"]

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], tied: Mapping[str, str], progress: Progress
) -> None:
    """Writes one file, whole or not at all.

    Args:
        path: Of the file.
        tensors: By name.
        tied: Further names of these tensors, and of which.
        progress: Is told the bytes of every piece.

    Raises:
        ValueError: A dtype that the format does not have.
        OSError: See `replacing`.
    """
    # The widest elements first, so that every tensor is aligned to its own.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header = _header(ordered, tied)
    total = len(header) + sum(_nbytes(tensor) for _, tensor in ordered)
    with replacing(path, total) as file:
        file.write(header)
        for _, tensor in ordered:
            for piece in pieces(tensor):
                file.write(piece)
                progress(len(piece))


def split(tensors: Mapping[str, Tensor], max_bytes: int) -> dict[str, dict[str, Tensor]]:
    """Tensors by file, in their order, no file larger than `max_bytes` but for one tensor alone.

    Returns:
        By file name: `model.safetensors`, or `model-00001-of-00003.safetensors` and so on.
    """
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + _nbytes(tensor) > max_bytes:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += _nbytes(tensor)
    if len(files) == 1:
        return {WHOLE: files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": held
        for number, held in enumerate(files, start=1)
    }


def write_index(
    path: Path, files: Mapping[str, Mapping[str, Tensor]], tied: Mapping[str, str]
) -> None:
    """Writes the index: which name is in which file; and in its metadata, what tied names mean."""
    place = {name: file for file, held in files.items() for name in held}
    metadata: dict[str, object] = {
        "total_size": sum(_nbytes(tensor) for held in files.values() for tensor in held.values())
    }
    if tied:
        metadata["tied"] = dict(tied)
    index = {"metadata": metadata, "weight_map": place}
    text = (json.dumps(index, indent=2) + "\n").encode()
    with replacing(path, len(text)) as file:
        file.write(text)


def _header(ordered: Iterable[tuple[str, Tensor]], tied: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **tied}}
    offset = 0
    for name, tensor in ordered:
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{name} is {tensor.dtype}, which safetensors does not have; use --dtype, or "
                "--format ckpt or dcp."
            )
        stop = offset + _nbytes(tensor)
        entry = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**entry, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
