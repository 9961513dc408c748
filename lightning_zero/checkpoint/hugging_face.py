"""Weights in Hugging Face's layout: one `.safetensors` file, or several with an index.

[Note: Safetensors] A file has 8 bytes with the length of the header, the header (JSON: dtype, shape
and offsets of each tensor), and the tensors' bytes without gaps. The library safetensors writes
from memory; this module reads a tensor only when its bytes are written. The format does not support
tied weights: the first name is stored, and the header's metadata maps every other name to it, as
`safetensors.torch.save_model` does.

The index is a JSON file in the same folder that maps names to files,
`{"weight_map": {name: file}}`.
"""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.storage import (
    CheckpointPath,
    Ranges,
    atomic_write,
    open_ranges,
)
from lightning_zero.checkpoint.torch_file import (
    Progress,
    iter_bytes,
    lazy_tensor,
    open_torch_file,
)
from lightning_zero.layout.foreign_names import check_inside, printable

__all__ = [
    "INDEX",
    "encode_index",
    "files_with_checksums",
    "has_weights",
    "open_directory",
    "open_safetensors",
    "split_by_size",
    "write_safetensors",
]

INDEX = "model.safetensors.index.json"
# In the order of preference: repositories often have the same weights in both formats. The folder
# may have further files (training_args.bin).
_SINGLE_FILES = {".safetensors": "model.safetensors", ".bin": "pytorch_model.bin"}
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
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
_DAMAGE_ERRORS = (struct.error, ValueError, KeyError, TypeError, AttributeError)
_FLOAT4 = torch.float4_e2m1fn_x2  # two elements in a byte, which torch counts as one
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()} | {"F4": _FLOAT4}


def write_safetensors(
    path: CheckpointPath, tensors: Mapping[str, Tensor], tied: Mapping[str, str], progress: Progress
) -> None:
    """Writes one file atomically. `tied` maps further names of these tensors to their first names.

    Raises:
        ValueError: The format does not support the dtype of a tensor.
        OSError: See `atomic_write`.
    """
    # The largest elements first, so that every tensor is aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header = _header(ordered, tied)
    total = len(header) + sum(tensor.nbytes for _, tensor in ordered)
    with atomic_write(path, total) as file:
        file.write(header)
        for _, tensor in ordered:
            for piece in iter_bytes(tensor, progress):
                file.write(piece)


def split_by_size(tensors: Mapping[str, Tensor], max_bytes: int) -> dict[str, dict[str, Tensor]]:
    """Tensors by file name, in order; a file exceeds `max_bytes` only if it has a single tensor."""
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > max_bytes:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    if len(files) == 1:
        return {_SINGLE_FILES[".safetensors"]: files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": file_tensors
        for number, file_tensors in enumerate(files, start=1)
    }


def encode_index(files: Mapping[str, Mapping[str, Tensor]], tied: Mapping[str, str]) -> bytes:
    """Content of the index: the file of every name, and in its metadata the tied names."""
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    metadata: dict[str, object] = {
        "total_size": sum(t.nbytes for tensors in files.values() for t in tensors.values())
    }
    if tied:
        metadata["tied"] = dict(tied)
    index = {"metadata": metadata, "weight_map": weight_map}
    return (json.dumps(index, indent=2) + "\n").encode()


def _header(ordered: Iterable[tuple[str, Tensor]], tied: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **tied}}
    offset = 0
    for name, tensor in ordered:
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{name} is {tensor.dtype}, which safetensors does not support; use --dtype, or "
                "--format ckpt or dcp."
            )
        stop = offset + tensor.nbytes
        entry = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**entry, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def has_weights(path: CheckpointPath) -> bool:
    return any(any(path.glob(f"*{suffix}*")) for suffix in _SINGLE_FILES)


def open_directory(path: CheckpointPath, *, weights_only: bool | None = None) -> dict[str, Tensor]:
    """Opens a directory of `*.safetensors` or `*.bin` as a state dict."""
    found = _find_weights(path)
    if found.name.endswith(".index.json"):
        return _open_indexed(path, found, weights_only)
    return _open_file(found, weights_only)


def files_with_checksums(path: CheckpointPath) -> list[CheckpointPath]:
    """Files that `open_directory` opens and whose records have checksums."""
    found = _find_weights(path)
    names = {found.name}
    if found.name.endswith(".index.json"):
        names = set(_read_index(found)[0].values())
    return [path / name for name in sorted(names) if not name.endswith(".safetensors")]


def _find_weights(path: CheckpointPath) -> CheckpointPath:
    """The index, or the single file of weights, in a directory."""
    for suffix, single_file in _SINGLE_FILES.items():
        indices: list[CheckpointPath] = sorted(path.glob(f"*{suffix}.index.json"), key=str)
        files: list[CheckpointPath] = sorted(path.glob(f"*{suffix}"), key=str)
        if len(indices) == 1:
            return indices[0]
        if not indices and single_file in [file.name for file in files]:
            return path / single_file
        if indices or len(files) > 1:
            names = ", ".join(file.name for file in indices or files)
            raise ValueError(
                f"{path} holds {names}, and it is not clear which to load; pass the path of one "
                "file, or keep one *.index.json only."
            )
        if files:
            return files[0]
    patterns = " nor ".join(f"*{suffix}" for suffix in _SINGLE_FILES)
    raise ValueError(f"{path} has neither {patterns}.")


def open_safetensors(path: CheckpointPath) -> dict[str, Tensor]:
    """Tensors of one file, which are read when they are used. See [Note: Safetensors]."""
    size = path.stat().st_size
    try:
        ranges = open_ranges(path)
        (length,) = struct.unpack("<Q", ranges(0, 8))
        header = json.loads(bytes(ranges(8, 8 + length)))
        metadata = header.pop("__metadata__", {})
        tensors: dict[str, Tensor] = {
            name: _lazy_tensor(ranges, 8 + length, entry) for name, entry in header.items()
        }
        spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
        starts, stops = [start for start, _ in spans], [stop for _, stop in spans]
        if [*starts, size - 8 - length] != [0, *stops]:
            raise ValueError("its tensors do not fill the file without gaps")
        return _with_tied(tensors, metadata)
    except (*_DAMAGE_ERRORS, RuntimeError) as error:
        raise ValueError(
            f"{path} ({size} bytes) is truncated or damaged: {printable(str(error))}. Copy it "
            "again."
        ) from error


def _lazy_tensor(ranges: Ranges, origin: int, entry: Mapping[str, Any]) -> Tensor:
    dtype = _TORCH_DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"a tensor has dtype {entry['dtype']}, which is not known here")
    start, stop = map(operator.index, entry["data_offsets"])
    shape = entry["shape"]
    if dtype is _FLOAT4:
        shape = [*shape[:-1], shape[-1] // 2]
    like = torch.empty(shape, dtype=dtype, device="meta")
    if like.nbytes != stop - start:
        raise ValueError(
            f"a {entry['dtype']} tensor of shape {entry['shape']} has {stop - start} bytes"
        )
    return lazy_tensor(ranges, origin + start, like)


def _open_file(path: CheckpointPath, weights_only: bool | None) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return open_safetensors(path)
    content = open_torch_file(path, weights_only=weights_only)
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains a {type(content).__name__}, expected a state dict.")
    return content


def _read_index(index: CheckpointPath) -> tuple[dict[str, str], dict[str, str]]:
    """The file of every name, and the tied names."""
    try:
        content = json.loads(index.read_text())
        weight_map = {str(k): check_inside(v) for k, v in content["weight_map"].items()}
        tied = dict(dict(content.get("metadata") or {}).get("tied") or {})
        return weight_map, tied
    except (*_DAMAGE_ERRORS, RecursionError) as error:
        raise ValueError(
            f"{index} is not an index of weights: expected JSON with a dict 'weight_map' of names "
            f"to files, got {type(error).__name__}: {printable(str(error))}."
        ) from error


def _open_indexed(
    folder: CheckpointPath, index: CheckpointPath, weights_only: bool | None
) -> dict[str, Tensor]:
    weight_map, tied = _read_index(index)
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{index} names {len(names)} files, of which {printable(', '.join(absent))} are "
            "missing; copy or download the directory again."
        )
    opened: dict[str, Any] = {name: _open_file(folder / name, weights_only) for name in names}
    missing = [f"{name} in {file}" for name, file in weight_map.items() if name not in opened[file]]
    if missing:
        raise ValueError(
            f"{index} names weights that are not in their files: {printable(', '.join(missing))}; "
            "copy or download the directory again."
        )
    return _with_tied({name: opened[file][name] for name, file in weight_map.items()}, tied)


def _with_tied(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """Adds tied weights under their further names; `metadata` maps those to names in the file."""
    tied = {o: name for o, name in metadata.items() if name in tensors and o not in tensors}
    return {**tensors, **{other: tensors[name] for other, name in tied.items()}}
