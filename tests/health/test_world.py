"""The end of process groups whose backends abort: stand-ins for NCCL's classes, on the CPU."""

import contextlib
import io
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_zero.health import world
from lightning_zero.health.world import disconnect_groups, is_nccl, known_backends
from tests.support.ranks import run_ranks


class StandIn(dist.ProcessGroup):
    """A group on the device, whose backend has the name and the attributes of one of torch."""

    def __init__(self, rank, size, backend, end):
        super().__init__(rank, size)
        self.backend, self.end, self.name_ = backend, end, ""

    @property
    def _device_types(self):
        return [torch.device("cuda")]

    @property
    def group_name(self):
        return self.name_

    def _set_group_name(self, name):
        self.name_ = name

    def _get_backend(self, device):
        return self.backend

    def _start_coalescing(self, device):
        pass

    def _end_coalescing(self, device):
        pass

    def abort(self):
        self.end()


def _legacy():
    """Has the attributes of torch's ProcessGroupNCCL, whose name is nccl."""
    calls = dict.fromkeys(("_group_start", "_group_end", "abort"), lambda: None)
    return SimpleNamespace(name=lambda: "nccl", supports_coalescing=True, **calls)


def _nccl2():
    """Has those of ProcessGroupNCCL2, which is nccl in torch 2.15, but for its name."""
    return SimpleNamespace(name=lambda: "nccl2", supports_coalescing=True, abort=lambda: None)


def _make(end, backend=_nccl2, num=1):
    """Makes groups that torch knows, and that `end` aborts."""

    def create(store, rank, size, timeout):
        return StandIn(rank, size, backend(), end)

    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # torch 2.15 cannot record what a stand-in does
    dist.Backend.register_backend("stand_in", create, devices=["cuda"])
    return [dist.new_group(backend="stand_in") for _ in range(num)]


def _is_registered(group):
    with contextlib.suppress(ValueError):
        return bool(dist.get_backend(group))
    return False


def _disconnect(groups):
    """Returns the seconds that it took, and what was printed."""
    began = time.monotonic()
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        disconnect_groups(groups)
    return time.monotonic() - began, printed.getvalue()


def _abort_together(rank, world_size):
    for backend in (_legacy, _nccl2):
        both, done = threading.Barrier(2), []

        def end(both=both, done=done):
            both.wait(timeout=30)  # as NCCL, whose kernels wait for each other
            done.append(True)

        groups = _make(end, backend, num=2)
        _, printed = _disconnect(groups)
        assert len(done) == 2, backend
        assert printed == ""
        assert not any(map(_is_registered, groups))


def test_groups_of_either_class_of_nccl_are_aborted_together():
    run_ranks(1, _abort_together)


def _fail_to_abort(rank, world_size):
    world._ABORT_S = 0.5
    _, refused = _disconnect(_make(_refuse))
    done = []
    hanging, others = _make(threading.Event().wait), _make(lambda: done.append(True))
    seconds, printed = _disconnect([*hanging, dist.new_group(), *others])
    assert done == [True]
    assert seconds < 5
    return refused, printed


def _refuse():
    raise NotImplementedError("no abort")


def test_a_group_that_cannot_be_aborted_is_reported_and_does_not_keep_the_others():
    ((refused, hanging),) = run_ranks(1, _fail_to_abort)
    for text, reason in ((refused, "NotImplementedError"), (hanging, "no answer in 0.5 s")):
        assert text.count("\n") == 1, text
        assert text.startswith("lightning_zero: rank 0: a process group on nccl2 could not"), text
        assert f"be aborted ({reason}" in text
        assert "end this process" in text


def _abort_world(rank, world_size):
    aborted = []
    dist.init_process_group("gloo")
    groups = _make(lambda: aborted.append(True), num=2)
    dist.distributed_c10d._update_default_pg(groups[0])
    disconnect_groups(groups)
    return len(aborted), dist.is_initialized()


def test_all_groups_end_with_the_default_one():
    ((num_aborted, is_initialized),) = run_ranks(1, _abort_world, has_group=False)
    assert num_aborted >= 2
    assert not is_initialized


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-legacy", "nccl-lazy"])
def test_every_kind_of_nccl_is_nccl(name):
    assert is_nccl(name)
    assert not is_nccl("gloo")


def test_backends_that_torch_registers_at_their_first_use_are_known():
    known = known_backends()
    assert len(known) == len(set(known))
    assert ("nccl-legacy" in known) == hasattr(dist, "ProcessGroupNCCL2")
