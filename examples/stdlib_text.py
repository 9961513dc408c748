"""Text that every machine with Python has: its standard library's source and docs, as bytes."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

__all__ = ["ResumableLoader", "StdlibText", "Windows", "bigram_bits_per_byte", "read_files"]

_SUFFIXES = (".py", ".txt", ".rst", ".md")
_SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "idle_test",
    "site-packages",
    "test",
    "tests",
}
_ONE_FILE_IN = 20  # is validation text, and one is test text


class Windows(Dataset[Tensor]):
    """Pieces of a text.

    Args:
        text: 1-D, uint8.
        starts: Where the pieces start; 1-D, int64.
        length: Bytes of a piece.
    """

    def __init__(self, text: Tensor, starts: Tensor, length: int) -> None:
        self.text = text
        self.starts = starts
        self.length = length

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.starts[index])
        return self.text[start : start + self.length]


class ResumableLoader(DataLoader[Any]):
    """Goes on behind the batch at which a checkpoint was saved, where others start over.

    Lightning keeps the state in the checkpoint. For the same batches the sampler must give the same
    order again; the one that the Trainer injects does.
    """

    num_seen = 0  # batches of this epoch that were handed out
    num_skipped = 0  # batches that the next epoch leaves out

    def __iter__(self) -> Iterator[Any]:
        skipped, self.num_skipped = self.num_skipped, 0
        self.num_seen = skipped
        for index, batch in enumerate(super().__iter__()):
            if index >= skipped:
                self.num_seen += 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"num_seen": self.num_seen % len(self)}  # 0: the next epoch is whole

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_skipped = state["num_seen"]


class StdlibText(pl.LightningDataModule):
    """Batches of shape (batch_size, context + 1), uint8: tell each byte from those before it.

    Whole files are split by a hash of their path, so that no text for evaluation is trained on and
    every rank, run and machine with the same Python has the same split. A training epoch is as many
    random crops as cover the text once: crop i is fixed by `seed`, and the sampler that the Trainer
    injects gives each rank its share of the crops, in an order fixed by its seed and epoch.
    The windows of validation and test lie at even distances.

    Args:
        context: Bytes that the model reads at once.
        batch_size: Crops in a batch of one rank.
        num_validation_windows: Of the test, too. 840 is a multiple of 1 to 8, so that the sampler
            repeats none there.
        seed: Fixes the random crops. None: as 0, since all ranks must have the same.
        root: Folder to read. None: the standard library of this Python.

    Raises:
        ValueError: `setup` found too little text under `root`.
    """

    train_text: Tensor  # 1-D, uint8, CPU; from setup on
    validation_text: Tensor  # same
    test_text: Tensor  # same, for a test

    def __init__(
        self,
        *,
        context: int = 64,
        batch_size: int = 16,
        num_validation_windows: int = 840,
        seed: int | None = 0,
        root: str | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.num_validation_windows = num_validation_windows
        self.seed = seed or 0
        self.root = Path(root or sysconfig.get_path("stdlib"))

    def setup(self, stage: str) -> None:
        """Reads the files; about 12 MB, on every rank."""
        parts: dict[str, list[bytes]] = {"training": [], "validation": [], "test": []}
        for path, content in read_files(self.root):
            parts[_part(path)].append(content)
        self.train_text = self._join(parts["training"], "training")
        self.validation_text = self._join(parts["validation"], "validation")
        if stage == "test":
            self.test_text = self._join(parts["test"], "test")

    def train_dataloader(self) -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        last = len(self.train_text) - self.context
        starts = torch.randint(last, (len(self.train_text) // self.context,), generator=generator)
        crops = Windows(self.train_text, starts, self.context + 1)
        return ResumableLoader(crops, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.validation_windows(), batch_size=4 * self.batch_size)

    def test_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.test_windows(), batch_size=4 * self.batch_size)

    def validation_windows(self) -> Windows:
        """The windows of every validation, whatever the seed."""
        return self._windows(self.validation_text)

    def test_windows(self) -> Windows:
        """The windows of every test, of text that no training and no choice has seen."""
        return self._windows(self.test_text)

    def _windows(self, text: Tensor) -> Windows:
        last = len(text) - self.context - 1
        starts = torch.linspace(0, last, self.num_validation_windows, dtype=torch.float64).long()
        return Windows(text, starts, self.context + 1)

    def _join(self, parts: list[bytes], name: str) -> Tensor:
        text = bytearray(b"".join(parts))
        if len(text) < 2 * (self.context + 1):
            raise ValueError(
                f"expected text files ({', '.join(_SUFFIXES)}) under {self.root}, "
                f"got {len(text)} bytes of {name} text; give data.root a folder with more text."
            )
        return torch.frombuffer(text, dtype=torch.uint8)


def read_files(root: Path) -> Iterator[tuple[str, bytes]]:
    """Relative path (with "/") and content of every text file under `root`, in order of folders."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in _SUFFIXES and path.is_file():
                yield path.relative_to(root).as_posix(), path.read_bytes()


def bigram_bits_per_byte(train_text: Tensor, windows: Windows) -> float:
    """What a table of byte pairs makes of the bytes that the model is asked for: the mark to beat.

    The table holds the pairs of the whole training text, each counted once more than seen.
    """
    counts = np.ones((256, 256))
    counts += np.bincount(_pairs(train_text.numpy()), minlength=256 * 256).reshape(256, 256)
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True)).ravel()
    return float(np.mean([bits[_pairs(window.numpy())].mean() for window in windows]))


def _pairs(text: np.ndarray) -> np.ndarray:
    return text[:-1].astype(np.uint16) << 8 | text[1:]


def _part(path: str) -> str:
    digest = hashlib.sha256(path.encode()).digest()
    number = int.from_bytes(digest[:8], "big") % _ONE_FILE_IN
    return {0: "validation", 1: "test"}.get(number, "training")
