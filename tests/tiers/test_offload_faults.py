"""Full disks, removed files and missing paths: a clear error on every rank."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_zero import Engine, OffloadConfig, ZeroConfig
from tests.support.models import SquareBlocks
from tests.support.ranks import RankError, run_ranks

MIB = 2**20
BUFFERS = {"buffer_count": 3, "buffer_size": 2**18}
LIMIT = timedelta(seconds=8)  # after which a rank stops waiting for one that has failed


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a tmpfs of `nbytes`."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    mounted = []

    def mount(nbytes):
        path = tmp_path / "disk"
        path.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(path)], check=True
        )
        mounted.append(path)
        return str(path)

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def build(path, *, offload_param=None):
    torch.manual_seed(0)
    net = SquareBlocks(4)  # 16 MiB of parameters, 32 MiB of moments
    optimizer = torch.optim.AdamW(net.parameters())
    offload = OffloadConfig("nvme", nvme_path=str(path), **BUFFERS)
    config = ZeroConfig(
        stage=3, offload_optimizer=offload, offload_param=offload if offload_param else None
    )
    return net, Engine(net, [optimizer], config, timeout=LIMIT)


def train_step(net, engine):
    engine.zero_grad()
    loss = net(torch.ones(2, SquareBlocks.WIDTH)).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def _set_up(rank, world_size, path, offload_param):
    if isinstance(path, (list, tuple)):
        path = path[rank]
    try:
        build(path, offload_param=offload_param)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_a_disk_too_small_for_the_parameters_is_an_error_of_every_rank_at_set_up(small_disk):
    path = small_disk(10 * MIB)
    start = time.monotonic()
    for found in run_ranks(2, _set_up, path, True):
        assert found is not None
        kind, text = found
        assert kind in ("OSError", "RuntimeError"), text
    texts = [text for _, text in run_ranks(2, _set_up, path, True)]
    assert any(path in text and "bytes" in text for text in texts), texts
    assert time.monotonic() - start < 60


def _step_on_small_disk(rank, world_size, path):
    net, engine = build(path)
    try:
        for _ in range(2):  # a rank whose own step succeeded learns of the failure in the next step
            train_step(net, engine)
    except Exception as error:
        return str(error)
    return None


def test_a_disk_that_is_full_at_the_first_step_is_an_error_of_every_rank(small_disk):
    path = small_disk(25 * MIB)
    texts = run_ranks(2, _step_on_small_disk, path, timeout_s=60)
    assert all(texts), texts
    assert any(path in text and "bytes" in text for text in texts), texts


def _break_files(rank, world_size, path, how):
    net, engine = build(path, offload_param=True)
    train_step(net, engine)
    dist.barrier()
    if rank == 0:
        for file in Path(path).glob("*.rank0.*/*"):
            if file.name != ".lock":
                os.truncate(file, 4096) if how == "truncated" else file.unlink()
    dist.barrier()
    try:
        return train_step(net, engine)
    except Exception as error:
        return str(error)


@pytest.mark.slow
def test_a_file_truncated_by_another_process_is_an_error_that_names_it(tmp_path):
    texts = run_ranks(2, _break_files, str(tmp_path), "truncated", timeout_s=60)
    assert all(isinstance(text, str) for text in texts), texts
    assert any(str(tmp_path) in text and "4096 bytes" in text for text in texts), texts


@pytest.mark.slow
def test_an_unlinked_file_stays_usable(tmp_path):
    found = run_ranks(2, _break_files, str(tmp_path), "removed")
    expected = run_ranks(2, _break_files, str(tmp_path), "removed")
    assert found == expected
    assert all(isinstance(loss, float) for loss in found)


def test_a_path_that_is_missing_on_one_rank_is_an_error_of_both(tmp_path):
    paths = [str(tmp_path), str(tmp_path / "missing")]
    start = time.monotonic()
    found = run_ranks(2, _set_up, paths, False, timeout_s=60)
    assert all(found), found
    assert paths[1] in found[1][1]
    assert time.monotonic() - start < 40


def test_a_path_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    for kind, text in run_ranks(2, _set_up, str(path), False):
        assert kind in ("OSError", "NotADirectoryError", "RuntimeError")
        assert "directory" in text


class _Kill(torch.optim.AdamW):
    """Ends its process in the second step, with files open and writes in flight."""

    is_armed = False

    def step(self, closure=None):
        if self.is_armed:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def _die_in_mid_step(rank, world_size, path):
    net, engine = build(path, offload_param=True)
    train_step(net, engine)
    (optimizer,) = engine.optimizers
    optimizer.__class__ = _Kill
    optimizer.is_armed = True
    train_step(net, engine)


def _train(rank, world_size, path):
    net, engine = build(path, offload_param=True)
    names = {p.name for p in Path(path).iterdir()}
    losses = [train_step(net, engine) for _ in range(2)]
    dist.barrier()
    engine.close()
    return losses, names


def test_what_a_killed_job_leaves_is_removed_by_the_next_start(tmp_path):
    with pytest.raises(RankError, match=r"exit code -9|did not return"):
        run_ranks(2, _die_in_mid_step, str(tmp_path), timeout_s=60)
    left = {path.name for path in tmp_path.iterdir()}
    assert left
    for losses, names in run_ranks(2, _train, str(tmp_path)):
        assert losses[0] != losses[1]
        assert not names & left
    assert list(tmp_path.iterdir()) == []
