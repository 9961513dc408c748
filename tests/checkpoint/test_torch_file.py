"""Torch files: writing, and checksums."""

import io
import os
import random
import re
import zipfile
from collections import OrderedDict
from unittest.mock import patch

import pytest
import torch
from torch import nn

from lightning_zero.checkpoint import torch_file
from lightning_zero.checkpoint.torch_file import find_damage, has_checksums, write_torch_file
from lightning_zero.tensors.lazy import LazyTensor

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint16,
    torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def stored(values):
    flat = values.reshape(-1)
    return LazyTensor.of(values.shape, values.dtype, lambda a, b: flat[a:b].clone())


def sample(dtype, shape=(3, 5)):
    return torch.randint(0, 2, shape).to(dtype)


def write_and_load(tree, path, **options):
    with patch.object(torch_file, "atomic_write", wraps=torch_file.atomic_write) as atomic_write:
        write_torch_file(tree, path)
    _, reserved_bytes = atomic_write.call_args.args
    assert path.stat().st_size <= reserved_bytes
    assert not find_damage(path)
    return torch.load(path, **{"weights_only": True, **options})


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_loads_plain_and_stored_tensors(dtype, is_mapped, tmp_path):
    values = {"plain": sample(dtype), "empty": sample(dtype, (0, 3)), "scalar": sample(dtype, ())}
    tree = values | {f"stored {name}": stored(value) for name, value in values.items()}
    loaded = write_and_load(tree, tmp_path / "a.pt", mmap=is_mapped)
    for name, value in loaded.items():
        expected = values[name.removeprefix("stored ")]
        assert type(value) is torch.Tensor
        assert value.dtype == dtype
        assert value.shape == expected.shape
        assert value.stride() == expected.stride()
        assert torch.equal(value.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))
        assert value.data_ptr() % 64 == 0 or not is_mapped


def test_it_holds_what_torch_save_holds(tmp_path):
    full = torch.arange(12.0).view(3, 4)
    tree = OrderedDict(
        full=full,
        part=full[1:, ::2],
        parameter=nn.Parameter(torch.ones(2), requires_grad=False),
        shared=[full, full.view(-1)],
        storage=torch.arange(3).untyped_storage(),
        sparse=torch.eye(3).to_sparse(),
        python={"step": 3, "name": "x", "none": None, 4: (1.5, True)},
    )
    ours = write_and_load(tree, tmp_path / "ours.pt", weights_only=False)
    torch.save(tree, tmp_path / "torch.pt")
    theirs = torch.load(tmp_path / "torch.pt", weights_only=False)
    assert list(ours) == list(theirs)
    assert ours["part"].stride() == theirs["part"].stride()
    assert ours["part"].data_ptr() - ours["full"].data_ptr() == 16
    assert ours["shared"][1].data_ptr() == ours["full"].data_ptr()
    assert type(ours["parameter"]) is nn.Parameter
    assert torch.equal(ours["sparse"].to_dense(), torch.eye(3))
    assert ours["storage"].nbytes() == theirs["storage"].nbytes()
    assert ours["python"] == tree["python"]
    assert torch.equal(ours["full"], full)


def test_a_stored_tensor_under_two_names_is_written_once_and_tied_again(tmp_path):
    tied = stored(torch.rand(1000))
    loaded = write_and_load({"a": tied, "b": tied}, tmp_path / "a.pt")
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert (tmp_path / "a.pt").stat().st_size < 8000


def test_all_bytes_of_storages_are_reported(tmp_path):
    tied, reported = stored(torch.rand(50)), []
    tree = {"x": tied, "y": tied, "z": torch.zeros(3, dtype=torch.int64)}
    write_torch_file(tree, tmp_path / "a.pt", reported.append)
    assert sum(reported) == 200 + 24


@pytest.mark.parametrize("writer", ["ours", "torch", "torch to a buffer"])
def test_one_wrong_bit_anywhere_in_a_record_is_named(writer, tmp_path):
    path = tmp_path / "a.pt"
    tree = {"x": torch.arange(1000.0), "y": torch.arange(50)}
    if writer == "ours":
        write_torch_file(tree, path)
    elif writer == "torch":
        torch.save(tree, path)
    else:
        torch.save(tree, buffer := io.BytesIO())
        path.write_bytes(buffer.getvalue())
    assert not find_damage(path)
    good = path.read_bytes()
    inside = good.index(torch.arange(1000.0).numpy().tobytes())
    for number in range(10):
        offset = inside + random.Random(number).randrange(4000)
        bad = bytearray(good)
        bad[offset] ^= 1 << number % 8
        path.write_bytes(bad)
        (line,) = find_damage(path)
        assert re.match(r"record \w+/data/0 \(4000 bytes\) has checksum", line)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99, 0.9999])
def test_a_truncated_file_is_an_error(kept, tmp_path):
    path = tmp_path / "a.pt"
    write_torch_file({"x": torch.rand(100_000)}, path)
    os.truncate(path, int(path.stat().st_size * kept))
    (line,) = find_damage(path)
    assert "the directory of its records at the end is missing" in line


@pytest.mark.default_cases("bits0")
@pytest.mark.parametrize("bits", [(3,), (0, 7)])
def test_a_wrong_bit_in_the_directory_at_the_end_is_named_and_never_another_error(tmp_path, bits):
    path = tmp_path / "a.pt"
    write_torch_file({"x": torch.arange(4.0)}, path)
    full = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
    num_found = 0
    for place in range(start, len(full)):
        for bit in bits:
            data = bytearray(full)
            data[place] ^= 1 << bit
            path.write_bytes(data)
            num_found += bool(find_damage(path))
            assert has_checksums(path) in (True, False)
    assert num_found > 34 * len(bits)


def test_shares_of_the_work_cover_every_record(tmp_path):
    path = tmp_path / "a.pt"
    write_torch_file({str(i): torch.full((10,), i + 1.0) for i in range(7)}, path)
    data = bytearray(path.read_bytes())
    for number in range(7):
        data[data.index(torch.full((10,), number + 1.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    lines = find_damage(path)
    assert len(lines) == 7
    shares = [find_damage(path, rank=rank, world_size=2) for rank in range(2)]
    assert min(map(len, shares)) > 0
    assert sorted(shares[0] + shares[1]) == sorted(lines)


def test_files_without_checksums_pass(tmp_path):
    torch.save({"x": torch.rand(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert not find_damage(tmp_path / "old.pt")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.rand(3)}, tmp_path / "unchecked.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert not find_damage(tmp_path / "unchecked.pt")


def test_what_cannot_be_pickled_leaves_no_file(tmp_path):
    with pytest.raises((AttributeError, TypeError), match=r"pickle|local"):
        write_torch_file({"f": lambda: 0}, tmp_path / "a.pt")
    assert os.listdir(tmp_path) == []
