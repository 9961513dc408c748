"""Text data that every Python installation has: sources and docs of its standard library."""

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
_ONE_FILE_IN = 20  # one file in 20 is validation text, and one is test text


class Windows(Dataset[Tensor]):
    """Dataset of windows into a text.

    Args:
        text: 1-D, uint8.
        starts: Offset of each window in bytes; 1-D, int64.
        length: Length of a window in bytes.
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
    """Data loader that resumes after the last batch before a checkpoint, within the epoch.

    Lightning stores its state in the checkpoint. To repeat the same batches, the sampler must
    repeat its order, as the sampler that the Trainer injects does.
    """

    num_seen = 0  # batches of this epoch that were returned
    num_skipped = 0  # batches that the next epoch skips

    def __iter__(self) -> Iterator[Any]:
        skipped, self.num_skipped = self.num_skipped, 0
        self.num_seen = skipped
        for index, batch in enumerate(super().__iter__()):
            if index >= skipped:
                self.num_seen += 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"num_seen": self.num_seen % len(self)}  # 0: at the start of an epoch

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_skipped = state["num_seen"]


class StdlibText(pl.LightningDataModule):
    """Batches of bytes of shape (batch_size, context + 1), uint8.

    Files are assigned to training, validation and test by a hash of their path. So no evaluation
    text is used for training, and every rank, run and machine with the same Python has the same
    split. A training epoch has as many random crops as are needed to cover the text once. Crop i
    depends only on `seed`. The sampler that the Trainer injects gives each rank its share of the
    crops, in an order that depends on its seed and the epoch. The windows of validation and test
    are evenly spaced.

    Args:
        context: Length of a sequence in bytes.
        batch_size: Number of crops per batch and rank.
        num_validation_windows: Number of windows for validation, and for the test. 840 is a
            multiple of 1 to 8, so the sampler repeats no window on up to 8 ranks.
        seed: Seed of the random crops. None: 0, because all ranks need the same seed.
        root: Folder with the text files. None: the standard library of this Python.

    Raises:
        ValueError: `setup` found too little text under `root`.
    """

    train_text: Tensor  # 1-D, uint8, CPU; set in `setup`
    validation_text: Tensor  # as above
    test_text: Tensor  # as above, for stage "test" only

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
        """Reads the files, about 12 MB, on every rank."""
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
        """Windows for validation; they do not depend on the seed."""
        return self._windows(self.validation_text)

    def test_windows(self) -> Windows:
        """Windows for the test, from files used neither for training nor for validation."""
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
    """Yields relative path (with "/") and content of every text file under `root`, sorted."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in _SUFFIXES and path.is_file():
                yield path.relative_to(root).as_posix(), path.read_bytes()


def bigram_bits_per_byte(train_text: Tensor, windows: Windows) -> float:
    """Bits per byte of a bigram table on the bytes that the model predicts, as a baseline.

    The table counts the byte pairs of the entire training text, plus one for each pair.
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
