"""Directories of torch.distributed.checkpoint, opened as Lightning checkpoints."""

import os
import pickle
import random
import re
import struct
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_zero.checkpoint.dcp_reader import find_damage, is_sharded, open_sharded
from lightning_zero.tensors.lazy import LazyTensor, read_flat
from tests.checkpoint.test_checkpoint_shard import SHAPES, shard, values
from tests.support.warm import run_ranks


def save(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)


@pytest.fixture(scope="module")
def flat_ranges(tmp_path_factory):
    path = tmp_path_factory.mktemp("flat")
    run_ranks(3, _save_flat_ranges, str(path))
    return path


def _save_flat_ranges(rank, world_size, path):
    weights = {name: shard(values(shape), rank, world_size) for name, shape in SHAPES.items()}
    moments = shard(values((5, 7)).to(torch.bfloat16), rank, world_size)
    state = {
        "state_dict": {**weights, "extra": {"any": [1, "two"]}},
        "optimizer_0": {
            "state": {"matrix": {"exp_avg": moments, "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["matrix"]}],
        },
    }
    dcp.save(state, checkpoint_id=path)
    if rank == 0:
        torch.save({"epoch": 2, "hyper_parameters": {"width": 8}}, f"{path}/meta.pt")


def test_tensors_are_stored_ones_with_their_values(flat_ranges):
    assert is_sharded(flat_ranges)
    checkpoint = open_sharded(flat_ranges)
    assert checkpoint["epoch"] == 2
    assert checkpoint["hyper_parameters"] == {"width": 8}
    assert list(checkpoint["state_dict"]) == [*SHAPES, "extra"]
    assert checkpoint["state_dict"]["extra"] == {"any": [1, "two"]}
    for name, shape in SHAPES.items():
        stored = checkpoint["state_dict"][name]
        assert isinstance(stored, LazyTensor)
        assert torch.equal(stored.read(), values(shape)), name
    (state,) = checkpoint["optimizer_states"]
    assert state["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["matrix"]}]
    assert state["state"]["matrix"]["step"] == 3
    moments = state["state"]["matrix"]["exp_avg"]
    assert moments.dtype == torch.bfloat16
    assert torch.equal(moments.read(), values((5, 7)).to(torch.bfloat16))


def test_any_flat_range_is_read(flat_ranges):
    stored = open_sharded(flat_ranges)["state_dict"]
    for name, shape in SHAPES.items():
        numel = values(shape).numel()
        for start in range(numel):
            for stop in range(start, numel + 1):
                part = read_flat(stored[name], start, stop)
                assert torch.equal(part, values(shape).view(-1)[start:stop]), (name, start, stop)


def test_a_flat_range_reads_its_own_bytes_only(tmp_path):
    save({"big": torch.zeros(1000, 1000)}, tmp_path)
    stored = open_sharded(tmp_path)["state_dict"]["big"]
    read_flat(stored, 0, 1)  # finds the offset of the item's data
    before = _bytes_read()
    assert read_flat(stored, 5000, 6000).numel() == 1000
    assert _bytes_read() - before < 10_000


def test_an_object_is_read_completely_despite_short_reads(tmp_path, monkeypatch):
    save({"big": "x" * 100_000, "w": values((2, 2))}, tmp_path)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 2**14), at))
    assert open_sharded(tmp_path)["state_dict"]["big"] == "x" * 100_000


def _bytes_read():
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def test_boxes_of_dtensors_are_read_by_flat_range(tmp_path):
    run_ranks(2, _save_dtensors, str(tmp_path))
    stored = open_sharded(tmp_path)["state_dict"]
    for name in ("rows", "columns"):
        for start, stop in [(0, 35), (3, 20), (6, 8), (34, 35), (7, 14)]:
            part = read_flat(stored[name], start, stop)
            assert torch.equal(part, values((5, 7)).view(-1)[start:stop]), (name, start, stop)


def _save_dtensors(rank, world_size, path):
    mesh = init_device_mesh("cpu", (world_size,))
    rows = distribute_tensor(values((5, 7)), mesh, [Shard(0)])
    columns = distribute_tensor(values((5, 7)), mesh, [Shard(1)])
    dcp.save({"rows": rows, "columns": columns}, checkpoint_id=path)


def test_a_transposed_tensor_is_read_in_its_own_order(tmp_path):
    save({"x": values((4, 6)).t()}, tmp_path)
    stored = open_sharded(tmp_path)["state_dict"]["x"]
    assert torch.equal(stored.read(), values((4, 6)).t())
    assert torch.equal(read_flat(stored, 3, 9), values((4, 6)).t().reshape(-1)[3:9])


def test_a_model_and_its_optimizer_by_torchs_usual_names_are_understood(tmp_path):
    optimizer = {"state": {"w": {"exp_avg": values((2, 2))}}, "param_groups": [{"params": ["w"]}]}
    save({"model": {"w": values((2, 2))}, "optimizer": optimizer, "step": 7}, tmp_path)
    checkpoint = open_sharded(tmp_path)
    assert torch.equal(checkpoint["state_dict"]["w"].read(), values((2, 2)))
    assert checkpoint["optimizer_states"][0]["param_groups"] == [{"params": ["w"]}]
    assert checkpoint["step"] == 7
    save({"model": {"w": values((2, 2))}, "optim": {"param_groups.w.lr": 0.1}}, tmp_path / "flat")
    assert open_sharded(tmp_path / "flat")["optim"] == {"param_groups.w.lr": 0.1}


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match="is not a directory"):
        open_sharded(tmp_path / "nowhere")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"expected a file \.metadata, found notes\.txt"):
        open_sharded(tmp_path)
    save({"x": values((4, 6)), "y": values((4, 6))}, tmp_path)
    size = (tmp_path / "__0_0.distcp").stat().st_size
    os.truncate(tmp_path / "__0_0.distcp", size - 1)
    with pytest.raises(
        ValueError, match=rf"__0_0\.distcp has {size - 1} bytes, expected at least {size}"
    ):
        open_sharded(tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"incomplete: __0_0\.distcp is missing"):
        open_sharded(tmp_path)


def test_truncated_or_foreign_metadata_is_an_error_and_runs_nothing(tmp_path):
    save({"x": values((4, 6))}, tmp_path)
    size = (tmp_path / ".metadata").stat().st_size
    os.truncate(tmp_path / ".metadata", size // 2)
    with pytest.raises(ValueError, match="cannot be read"):
        open_sharded(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Touch(tmp_path / "touched")))
    with pytest.raises(ValueError, match=r"not allowed in checkpoint metadata; .* dcp_to_torch"):
        open_sharded(tmp_path)
    assert not (tmp_path / "touched").exists()
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"not": "metadata"}))
    with pytest.raises(ValueError, match="is not metadata of torch"):
        open_sharded(tmp_path)


class _Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "os.mkdir"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("pathlib", "Path.mkdir"),
        ("pathlib._local", "os.mkdir"),
        ("torch", "os.mkdir"),
    ],
)
def test_metadata_reaches_nothing_through_the_classes_it_may_have(module, name, tmp_path):
    touched = str(tmp_path / "touched")
    words = [b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name, touched)]
    stack_global, call = b"\x93", b"\x85R."
    pickled = b"\x80\x04" + words[0] + words[1] + stack_global + words[2] + call
    (tmp_path / ".metadata").write_bytes(pickled)
    with pytest.raises(ValueError, match="is not allowed in checkpoint metadata"):
        open_sharded(tmp_path)
    assert not (tmp_path / "touched").exists()


def test_one_wrong_bit_of_a_tensor_is_named_with_its_file(tmp_path):
    save({"x": values((4, 6)), "y": values((5, 7)), "extra": {"any": 1}}, tmp_path)
    file = tmp_path / "__0_0.distcp"
    good = file.read_bytes()
    assert find_damage(tmp_path) == []
    inside = good.index(values((4, 6)).numpy().tobytes())
    for number in range(10):
        data = bytearray(good)
        data[inside + random.Random(number).randrange(96)] ^= 1 << number % 8
        file.write_bytes(data)
        (line,) = find_damage(tmp_path)
        assert re.match(
            rf"__0_0.distcp \({len(good)} bytes\) differs from its checksums in x: record "
            r"archive/data/0 \(96 bytes\) has checksum",
            line,
        )
        shares = [find_damage(tmp_path, rank=rank, world_size=2) for rank in range(2)]
        assert sorted(shares) == [[], [line]]
    os.truncate(file, 10)
    (line,) = find_damage(tmp_path)
    assert line.startswith("__0_0.distcp (10 bytes) differs from its checksums in ")
    file.unlink()
    assert find_damage(tmp_path) == ["__0_0.distcp is missing"]
    os.truncate(tmp_path / ".metadata", 10)
    (line,) = find_damage(tmp_path)
    assert ".metadata cannot be read" in line


def test_records_are_found_through_their_directory(tmp_path, monkeypatch):
    save({"x": torch.arange(40_000.0), "y": values((5, 7))}, tmp_path)
    end_of_zip = zipfile._EndRecData64

    def strict(file, offset, record):  # like later versions of Python
        file.seek(offset - zipfile.sizeEndCentDir64Locator, 2)
        place = file.tell()
        locator = file.read(zipfile.sizeEndCentDir64Locator)
        signature, _, directory, _ = struct.unpack(zipfile.structEndArchive64Locator, locator)
        assert signature != zipfile.stringEndArchive64Locator or directory < place
        return end_of_zip(file, offset, record)

    monkeypatch.setattr(zipfile, "_EndRecData64", strict)
    assert find_damage(tmp_path) == []


def test_damaged_bytes_are_named_when_they_are_read(tmp_path):
    save({"x": values((4, 6))}, tmp_path)
    data = bytearray((tmp_path / "__0_0.distcp").read_bytes())
    data[:200] = bytes(200)
    (tmp_path / "__0_0.distcp").write_bytes(data)
    stored = open_sharded(tmp_path)["state_dict"]["x"]
    with pytest.raises(ValueError, match=r"x cannot be read from .*__0_0\.distcp"):
        stored.read()


def test_files_of_one_name_in_two_folders_are_two(tmp_path):
    reader = dcp.FileSystemReader
    metadata = []
    for name, sign in (("x", 1), ("y", -1)):
        save({name: sign * values((4, 6))}, tmp_path / name)
        metadata.append(reader(tmp_path / name).read_metadata())
        for index, place in metadata[-1].storage_data.items():
            path = f"{name}/{place.relative_path}"
            metadata[-1].storage_data[index] = replace(place, relative_path=path)
    metadata[0].state_dict_metadata |= metadata[1].state_dict_metadata
    metadata[0].storage_data |= metadata[1].storage_data
    metadata[0].planner_data |= metadata[1].planner_data
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata[0]))
    state_dict = open_sharded(tmp_path)["state_dict"]
    assert torch.equal(state_dict["x"].read(), values((4, 6)))
    assert torch.equal(state_dict["y"].read(), -values((4, 6)))
