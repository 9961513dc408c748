"""Tensors whose values are read when they are used."""

import copy
import io

import pytest
import torch

from lightning_zero.tensors.lazy import LazyTensor, read_flat

VALUES = torch.arange(24.0).view(4, 6)


@pytest.fixture
def reads():
    return []


@pytest.fixture
def stored(reads):
    def read(start, stop):
        reads.append((start, stop))
        return VALUES.reshape(-1)[start:stop].clone()

    return LazyTensor.of(VALUES.shape, VALUES.dtype, read)


def test_metadata_is_answered_without_reading(stored, reads):
    assert stored.shape == (4, 6)
    assert stored.numel() == 24
    assert stored.dtype == torch.float32
    assert stored.device.type == "cpu"
    assert stored.dim() == 2
    assert "4, 6" in repr(stored)
    assert not reads


def test_every_use_reads_the_values(stored, reads):
    assert torch.equal(stored + 1, VALUES + 1)
    assert torch.equal(stored[1:3, 2], VALUES[1:3, 2])
    assert stored.sum() == VALUES.sum()
    assert torch.equal(torch.empty(4, 6).copy_(stored), VALUES)
    assert torch.equal(stored.to(torch.float64), VALUES.double())
    assert type(stored.clone()) is torch.Tensor
    assert stored.tolist() == VALUES.tolist()
    assert stored[0, 1].item() == 1
    assert (stored.numpy() == VALUES.numpy()).all()
    assert reads


def test_a_flat_range_is_read_alone(stored, reads):
    assert torch.equal(read_flat(stored, 5, 9), VALUES.reshape(-1)[5:9])
    assert reads == [(5, 9)]
    assert torch.equal(read_flat(VALUES, 5, 9), VALUES.reshape(-1)[5:9])


def test_a_write_is_refused(stored):
    with pytest.raises(
        RuntimeError, match="would write to a tensor whose values are stored in a file"
    ):
        stored.add_(1)
    with pytest.raises(RuntimeError, match="would write"):
        torch.add(VALUES, 1, out=stored)


def test_copies_and_pickles_are_plain(stored):
    assert type(copy.deepcopy(stored)) is torch.Tensor
    file = io.BytesIO()
    torch.save({"x": stored}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["x"]
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, VALUES)
