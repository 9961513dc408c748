"""What a rank's interrupted or aborted transfers do to itself and to its peers."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_zero.exchange import PeerToPeer
from tests.distributed.ranks import run_ranks


class Interrupted:
    """The last of the works: Ctrl-C comes when all before it have arrived."""

    def wait(self):
        raise KeyboardInterrupt


def _wait_twice(rank, world_size):
    exchange = PeerToPeer(dist.new_group(timeout=timedelta(seconds=5)), rank, world_size)
    whole = torch.full((4,), float(rank))
    pending = exchange.all_gather(whole)
    pending.works.append(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    pending.wait()
    return whole.tolist()


def test_a_transfer_whose_wait_was_interrupted_can_be_waited_for_again():
    for whole in run_ranks(2, _wait_twice, timeout_s=20):
        assert whole == [0, 0, 1, 1]
