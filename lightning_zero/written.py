"""Finds out whether somebody has written to a tensor, without a copy of it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Fingerprint"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 4096


class Fingerprint:
    """Sums over the bits of a tensor, by rows and by columns: one pass over it, 0.2 % of its size.

    Equal sums of changed values would need changes that cancel in every row and every column.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Takes the sums of `tensor`, 1-D, on any device; they stay there."""
        self._sums = _sums(tensor)

    def matches(self, tensor: Tensor) -> bool:
        """Whether `tensor` still has those bits. Waits for its device."""
        return all(torch.equal(a, b) for a, b in zip(self._sums, _sums(tensor), strict=True))


def _sums(tensor: Tensor) -> tuple[Tensor, Tensor]:
    words = tensor.detach().view(_WORDS[tensor.element_size()])
    rows = functional.pad(words, (0, -words.numel() % _ROW)).view(-1, _ROW)
    return rows.sum(dim=1, dtype=torch.int64), rows.sum(dim=0, dtype=torch.int64)
