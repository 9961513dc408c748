"""Bytes of memory that is kept for its next use: what `buffer.Scratch` is to a replay."""

from __future__ import annotations

__all__ = ["Scratch"]


class Scratch:
    """Memory in pieces; on the CPU kept for the next use, the smallest piece that is enough."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._spare: list[int] = []  # bytes
        self.nbytes = 0  # of all pieces

    def take(self, nbytes: int) -> int:
        """A piece of at least so many bytes: its size."""
        fitting = [piece for piece in self._spare if piece >= nbytes]
        if not fitting:
            self.nbytes += nbytes
            return nbytes
        self._spare.remove(min(fitting))
        return min(fitting)

    def give(self, piece: int) -> None:
        """Returns a piece that `take` gave."""
        if self._keeps:
            self._spare.append(piece)
        else:
            self.nbytes -= piece

    def clear(self) -> None:
        """Frees all pieces."""
        self._spare.clear()
        self.nbytes = 0
