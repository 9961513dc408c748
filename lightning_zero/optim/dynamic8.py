"""Numbers of 8 bits for blocks of elements: codes, and one float32 scale for each block.

[Note: Dynamic numbers] As in T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
(arXiv 2110.02861), sections 2.1 and 2.2. The scale is the largest magnitude of a block, and a code
stands for a fraction of it. Fractions are dense near one, where errors matter, and reach far down:
half as many in each decade as in the decade above it.

    signed     zero, 127 magnitudes from 1e-6 to 1, their negatives: codes 0, 1 to 127, 128 to 254
    unsigned   zero, 255 magnitudes from 1e-7 to 1: codes 0, 1 to 255

Unlike in the paper, the largest fraction is exactly one, for both signs, so values that were
decoded are encoded to the same codes and scales again. The only unsigned number that becomes zero
is zero.

[Note: Codes by table] The first 19 bits of a float32 (sign, exponent, 10 bits of the fraction)
select its code in a table, which moves the border between two codes by at most 1/1000 of its
value. On a CPU that takes a small part of the time of a binary search.

A block with a NaN or an infinity is decoded to NaN and infinities, so these are never lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "BLOCK_NUMEL",
    "Piece",
    "decode",
    "encode_",
    "in_one_piece",
    "num_blocks",
    "pieces_of",
]

BLOCK_NUMEL = 256
# Elements that are decoded, stepped and encoded at a time: in float32, and with what is computed
# from them, those of each thread stay in the cache of its core. On a device, each call has a cost.
_CPU_PIECE_NUMEL = 2**16  # per thread
_DEVICE_PIECE_NUMEL = 2**24
_TABLE_BITS = 19
_IN_ONE_PIECE = ContextVar("in one piece", default=False)
_DECADES = {True: 7, False: 8}  # by signedness; the topmost decade has 64 or 128 numbers


def num_blocks(numel: int) -> int:
    """Blocks of a tensor; the last one may be shorter."""
    return -(-numel // BLOCK_NUMEL)


class Piece(NamedTuple):
    """Some blocks of equal length of a flat tensor."""

    elements: slice
    blocks: slice
    width: int  # elements of each block

    def of(self, flat: Tensor) -> Tensor:
        """Elements of the piece, a view of a contiguous 1-D tensor: (blocks, width)."""
        return flat[self.elements].view(-1, self.width)


def pieces_of(numel: int, device: torch.device) -> Iterator[Piece]:
    """Divides a flat tensor of `numel` elements; a shorter last block is a piece of its own."""
    full = numel // BLOCK_NUMEL * BLOCK_NUMEL
    is_on_cpu = device.type == "cpu"
    step = _CPU_PIECE_NUMEL * torch.get_num_threads() if is_on_cpu else _DEVICE_PIECE_NUMEL
    if _IN_ONE_PIECE.get():
        step = max(full, 1)
    for start in range(0, full, step):
        stop = min(start + step, full)
        blocks = slice(start // BLOCK_NUMEL, stop // BLOCK_NUMEL)
        yield Piece(slice(start, stop), blocks, BLOCK_NUMEL)
    if full < numel:
        last = full // BLOCK_NUMEL
        yield Piece(slice(full, numel), slice(last, last + 1), numel - full)


@contextmanager
def in_one_piece() -> Iterator[None]:
    """Context in which tensors are not divided, for code that computes no values."""
    token = _IN_ONE_PIECE.set(True)
    try:
        yield
    finally:
        _IN_ONE_PIECE.reset(token)


def decode(codes: Tensor, scales: Tensor, *, is_signed: bool) -> Tensor:
    """Values of codes: new, float32, of the shape of `codes`.

    Args:
        codes: Codes, uint8, of shape (blocks, elements of a block).
        scales: Scales, float32, of shape (blocks,).
        is_signed: Whether they are codes of signed numbers.
    """
    fractions = _fractions(is_signed, codes.device)
    values = fractions.index_select(0, codes.reshape(-1).int()).view(codes.shape)
    return values.mul_(scales.unsqueeze(1))


def encode_(values: Tensor, codes: Tensor, scales: Tensor, *, is_signed: bool) -> None:
    """Writes the codes and scales of `values` into tensors as `decode` takes them.

    `values`: float32, contiguous, of the shape of `codes`; overwritten.
    """
    torch.amax(values.abs() if is_signed else values, 1, out=scales)
    values.div_(torch.where(scales == 0, 1.0, scales).unsqueeze(1))
    first_bits = (values.view(torch.int32) >> (32 - _TABLE_BITS)).bitwise_and_(2**_TABLE_BITS - 1)
    table = _codes(is_signed, codes.device)
    codes.copy_(table.index_select(0, first_bits.view(-1)).view(codes.shape))


@cache
def _fractions(is_signed: bool, device: torch.device) -> Tensor:
    """Fraction of the scale for each code: float32."""
    return torch.from_numpy(_fraction_array(is_signed)).to(device)


@cache
def _codes(is_signed: bool, device: torch.device) -> Tensor:
    """Code of the nearest fraction, by the first bits of a float32: uint8."""
    shift = 32 - _TABLE_BITS
    bits = np.arange(2**_TABLE_BITS, dtype=np.uint32) << shift
    middles = (bits + 2 ** (shift - 1)).view(np.float32)
    fractions = _fraction_array(is_signed)
    order = np.argsort(fractions)
    ordered = fractions[order]
    codes = order[np.searchsorted((ordered[1:] + ordered[:-1]) / 2, middles)].astype(np.uint8)
    if not is_signed:
        codes[1:] = np.maximum(codes[1:], 1)
    codes[bits == 0] = 0
    return torch.from_numpy(codes).to(device)


def _fraction_array(is_signed: bool) -> np.ndarray:
    """Fraction for each code. In numpy, because the planner computes no large tensors of torch."""
    decades = _DECADES[is_signed]
    magnitudes = [
        10.0**-decade * (0.1 + 0.9 * (number + 1) / 2 ** (decades - 1 - decade))
        for decade in reversed(range(decades))
        for number in range(2 ** (decades - 1 - decade))
    ]
    negatives = [-magnitude for magnitude in magnitudes] if is_signed else []
    return np.array([0.0, *magnitudes, *negatives], dtype=np.float32)
