"""Two jobs save to one path at the same time: a reader always finds one complete checkpoint."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.checkpoint.checkpoint_shard import CheckpointShard
from lightning_zero.checkpoint.dcp_writer import ShardedSave
from lightning_zero.checkpoint.source import find_damage
from lightning_zero.checkpoint.torch_file import write_torch_file
from lightning_zero.comm.communicator import Communicator
from tests.support.ranks import run_ranks

NUMEL = 20_000


def _save_again_and_again(rank, world_size, path, numbers, forms):
    """Saves weights with the number of the save as values, half of them on each rank.

    Returns:
        Errors, each of a save that the other job's has prevented; it is made again.
    """
    errors = []
    comm = Communicator(torch.device("cpu"), timeout=timedelta(seconds=60))
    channel = comm.control.open_channel()
    half = NUMEL // world_size
    owned = range(rank * half, (rank + 1) * half)
    for number in numbers:
        while True:
            try:
                _save(rank, path, number, owned, channel, is_full=forms == "both" and number % 2)
                break
            except Exception as error:
                if "is saving to this path" not in str(error):
                    raise
                errors.append(str(error))
    return errors


def _save(rank, path, number, owned, channel, *, is_full):
    if is_full:
        if rank == 0:
            weights = torch.full((NUMEL,), float(number))
            write_torch_file({"global_step": number, "state_dict": {"w": weights}}, path)
        return

    def read(start, stop):
        return torch.full((stop - start,), float(number))

    shard = CheckpointShard.of("w", (NUMEL,), torch.float32, owned, read)
    content = {"global_step": number, "state_dict": {"w": shard}}
    with channel.session():
        ShardedSave.prepare(content, path, {"w": shard}, channel).run()


def _open_repeatedly(path, has_ended):
    """Opens the checkpoint until the jobs have ended; returns the number of times."""
    count = 0
    while not has_ended.is_set():
        checkpoint = open_checkpoint(path)
        time.sleep(0.02 * (count % 3))  # between opening and reading
        weights = checkpoint["state_dict"]["w"].clone()
        assert weights.tolist() == [float(checkpoint["global_step"])] * NUMEL
        if count % 3 == 0:
            assert find_damage(path) == []
        count += 1
    return count


@pytest.mark.parametrize(
    ("num_saves", "forms"),
    [
        (3, "sharded"),
        pytest.param(50, "sharded", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param(50, "both", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_every_look_finds_a_complete_checkpoint_while_two_jobs_save(num_saves, forms, tmp_path):
    path = tmp_path / "run" / "last.ckpt"
    path.parent.mkdir()
    write_torch_file({"global_step": 0, "state_dict": {"w": torch.zeros(NUMEL)}}, path)
    has_ended = threading.Event()
    with ThreadPoolExecutor(4) as threads:
        readers = [threads.submit(_open_repeatedly, path, has_ended) for _ in range(2)]
        try:
            jobs = [
                threads.submit(
                    run_ranks,
                    2,
                    _save_again_and_again,
                    Path(path),
                    range(first, first + num_saves),
                    forms,
                    timeout_s=500,
                )
                for first in (1, 1001)
            ]
            for job in jobs:
                job.result()
        finally:
            has_ended.set()
        assert min(reader.result() for reader in readers) > num_saves
    assert os.listdir(path.parent) == ["last.ckpt"]
    assert open_checkpoint(path)["global_step"] in (num_saves, 1000 + num_saves)
