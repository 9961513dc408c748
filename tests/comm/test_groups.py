"""Process groups of the data plane: how many there are, and which backend they have."""

import resource

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_zero import Engine, ZeroConfig
from lightning_zero.comm.backends import backend_for, queue_warnings
from lightning_zero.comm.communicator import allow_connections
from tests.support.ranks import run_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def _num_groups(rank, world_size, config):
    """Number of data-plane groups that an engine makes on torch's fake backend."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    before = set(dist.distributed_c10d._world.pg_map)
    engine = Engine(torch.nn.Linear(4, 4), config=ZeroConfig(**config))
    made = set(dist.distributed_c10d._world.pg_map) - before
    engine.close()
    left = set(dist.distributed_c10d._world.pg_map) - before
    dist.destroy_process_group()
    return len(made) - 1, len(left)  # one is the control plane's


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"stage": 3}, 1),
        ({"stage": 1}, 1),
        ({"stage": 3, "overlap_step": True}, 1),
        # A thread all-gathers what it has stepped, in no fixed order with the main thread's sums.
        ({"stage": 1, "overlap_step": True}, 2),
    ],
    ids=str,
)
def test_an_engine_has_one_communicator_unless_gathers_are_separate(config, expected):
    assert run_ranks(1, _num_groups, config, has_group=False) == [(expected, 0)]


def _backends(rank, world_size, backend):
    store = {"store": FakeStore(), "rank": 0, "world_size": 1} if backend == "fake" else {}
    dist.init_process_group(backend, **store)
    found = backend_for(CPU), backend_for(CUDA)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("cpu:gloo,cuda:fake", ("gloo", "fake")),
        ("gloo", ("gloo", "gloo")),
        ("fake", ("fake", "fake")),
        (None, ("gloo", "nccl")),
    ],
)
def test_the_backend_is_that_of_the_device(backend, expected):
    assert run_ranks(1, _backends, backend, has_group=False) == [expected]


def test_one_queue_for_two_communicators_is_warned_about(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert queue_warnings(CUDA) == []
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert queue_warnings(CPU) == []
    (text,) = queue_warnings(CUDA)
    assert "wait for each other" in text


def _limit_after(rank, world_size, size):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    allow_connections(size)
    return resource.getrlimit(resource.RLIMIT_NOFILE), hard


def test_the_limit_of_open_files_grows_with_the_ranks():
    for size in (2, 512):
        (((soft, left), hard),) = run_ranks(1, _limit_after, size, has_group=False)
        assert left == hard
        assert soft == min(1024 + 9 * size, hard if hard > 0 else 10**9)
