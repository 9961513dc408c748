"""NCCL's groups are aborted together, by whichever class of torch they are.

In torch 2.15 "nccl" is ProcessGroupNCCL2, and "nccl-legacy" the class of the versions before.
"""

from __future__ import annotations

import contextlib
import io
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_zero.health.world import disconnect_groups, known_backends
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def _sum(group: dist.ProcessGroup, value: torch.Tensor) -> None:
    group.allreduce([value]).wait()
    torch.cuda.synchronize()


def _abort_two(rank: int, world_size: int, backend: str, with_world: bool) -> tuple[str, bool]:
    torch.cuda.set_device(CUDA)
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, device_id=CUDA, timeout=limit)
    groups = [dist.new_group([0], timeout=limit) for _ in range(2)]
    if with_world:
        groups.insert(0, dist.group.WORLD)
    value = torch.ones(1, device=CUDA)
    for group in groups:
        _sum(group, value)  # NCCL connects at the first collective
    backends = [group._get_backend(CUDA) for group in groups]

    torch.cuda._sleep(1_000_000_000)  # half a second of work is in the stream
    began = time.monotonic()
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        disconnect_groups(groups)
    assert time.monotonic() - began < 5
    assert "could not be aborted" not in printed.getvalue()
    for group in groups:
        with pytest.raises(RuntimeError):
            _sum(group, value)
    errors = {str(aborted.get_error()) for aborted in backends if hasattr(aborted, "get_error")}
    torch.cuda.synchronize()  # the device still works
    assert value.item() == 1
    if not with_world:
        dist.destroy_process_group()
    return f"{type(backends[0]).__name__}: {sorted(errors)}", dist.is_initialized()


@pytest.mark.parametrize("with_world", [False, True])
@pytest.mark.parametrize("backend", ["nccl", "nccl-legacy"])
def test_groups_are_aborted_and_refuse_collectives(backend, with_world):
    if backend not in known_backends():
        pytest.skip("this torch has one class only, as nccl")
    arguments = (backend, with_world)
    ((found, is_initialized),) = run_ranks(
        1, _abort_two, *arguments, timeout_s=120, has_group=False
    )
    print(found)  # the legacy class has no error of its own after an abort
    assert not is_initialized
    if found.startswith("ProcessGroupNCCL2"):
        assert "COMM_ERROR" in found
        assert "SUCCESS" not in found
