"""Fixtures: stores, and tensors for them."""

import pytest

from lightning_zero.tiers.memory import aligned_empty
from lightning_zero.tiers.nvme import NvmeStore

PAGE = 4096


@pytest.fixture
def store(tmp_path):
    opened = NvmeStore(tmp_path, rank=0, block_bytes=4 * PAGE)
    yield opened
    opened.close()


@pytest.fixture
def filled():
    """Returns a function: `filled(nbytes, value)` makes an aligned tensor."""
    return lambda nbytes, value=0: aligned_empty(nbytes, pin=False).fill_(value)
