"""What holds for every test."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A Trainer of one device forms a group in the test's own process and leaves it behind."""
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
