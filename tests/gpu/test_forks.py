"""Forked processes, such as DataLoader workers, do not pay for memory that is really pinned."""

from __future__ import annotations

import pytest

from lightning_zero.tiers.memory import aligned_empty
from tests.support.ranks import run_ranks
from tests.tiers.test_forks import MIB, in_fork, last, resident

pytestmark = pytest.mark.gpu


def _bytes_in_a_fork(rank, world_size):
    pinned = aligned_empty(256 * MIB, pin=True).fill_(7)
    copied = in_fork(resident, pinned)
    on_device = pinned.to("cuda", non_blocking=True)  # after the fork, from the same pages
    return copied, last(on_device), last(pinned)


def test_a_fork_copies_nothing_of_pinned_memory():
    assert run_ranks(1, _bytes_in_a_fork, has_group=False) == [(0, 7, 7)]
