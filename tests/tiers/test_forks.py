"""What a forked process, such as a DataLoader worker, gets of the memory of the tiers."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_zero.tiers.memory import aligned_empty, make_buffers

MIB = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Driver:
    """Stands for the CUDA runtime: remembers which memory is pinned."""

    def __init__(self):
        self.pinned = {}

    def cudaHostRegister(self, address, nbytes, flags):
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        return 0


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**vars(torch.cuda)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


def mapping_of(tensor):
    """Fields of /proc/self/smaps of the memory of `tensor`."""
    with open("/proc/self/smaps") as smaps:
        found, fields = False, {}
        for line in smaps:
            name, *values = line.split()
            if not name.endswith(":"):
                if found:
                    break
                start, stop = (int(end, 16) for end in name.split("-"))
                found = start <= tensor.data_ptr() < stop
                fields = {"offset": tensor.data_ptr() - start}
            elif found:
                fields[name[:-1]] = values
    return fields


def in_fork(read, tensor):
    """Returns what `read(tensor)`, an integer, is in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(read(tensor)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return int(text)


def last(tensor):
    return int(tensor[-1])


def resident(tensor):
    return int(mapping_of(tensor)["Rss"][0]) * 1024


@pytest.mark.parametrize("make", [lambda n: aligned_empty(n, pin=True), None], ids=["tier", "pool"])
def test_a_fork_copies_nothing_of_pinned_memory(driver, make):
    pinned = make(64 * MIB) if make else make_buffers(1, 64 * MIB, pin=True)[0]
    pinned.fill_(7)
    assert driver.pinned == {pinned.data_ptr(): 64 * MIB}
    assert "wf" in mapping_of(pinned)["VmFlags"]
    assert resident(pinned) >= 64 * MIB
    assert in_fork(resident, pinned) == 0
    assert in_fork(last, pinned) == 0
    assert last(pinned) == 7
    del pinned
    assert driver.pinned == {}


def test_a_fork_shares_memory_that_is_not_pinned():
    tensor = aligned_empty(MIB, pin=False).fill_(7)
    assert in_fork(last, tensor) == 7
