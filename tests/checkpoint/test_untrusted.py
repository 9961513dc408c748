"""Malicious checkpoints: none may do more than raise an error."""

import errno
import io
import json
import os
import pathlib
import pickle
import random
import tracemalloc
import zipfile
from dataclasses import replace

import pytest
import torch
from torch import Size
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    MetadataIndex,
)

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.checkpoint.dcp_chunks import overlap
from lightning_zero.checkpoint.dcp_metadata import parse_metadata
from lightning_zero.checkpoint.dcp_reader import open_sharded
from lightning_zero.checkpoint.source import find_damage, raise_damage
from lightning_zero.cli import main
from tests.checkpoint.test_checkpoint_shard import values
from tests.checkpoint.test_dcp import save
from tests.checkpoint.test_source import write_indexed
from tests.support import fuzz
from tests.support.ranks import run_ranks


@pytest.fixture
def sharded(tmp_path):
    path = tmp_path / "sharded"
    save({"x": values((4, 6)), "list": [values((2,)), {"y": values((3,))}], "note": "n"}, path)
    return path


def _short(text):
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _attribute_of(module, name, attribute, value):
    """A pickle that sets an attribute of a global, through slots or a dict."""
    target = _short(module) + _short(name) + b"\x93"
    return target + b"N}" + _short(attribute) + value + b"s\x86b"


@pytest.mark.parametrize("command", ["inspect", "export"])
def test_metadata_that_replaces_an_attribute_of_a_class_is_refused(
    sharded, tmp_path, command, capsys
):
    good = (sharded / ".metadata").read_bytes()
    path = _short("pathlib") + _short("PosixPath") + b"\x93" + _short(str(tmp_path / "stolen"))
    index = "torch.distributed.checkpoint.metadata"
    evil = b"\x80\x04" + _attribute_of("pathlib", "PosixPath", "parent", path + b"\x85R")
    evil += b"0" + _attribute_of(index, "MetadataIndex", "__init__", _short("x")) + b"0" + good[2:]
    (sharded / ".metadata").write_bytes(evil)
    before = fuzz.attributes()
    out = [str(tmp_path / "out.safetensors"), "--format", "safetensors"]
    assert main([command, str(sharded), *(out if command == "export" else [])]) == 2
    assert ".metadata cannot be read (expected a" in capsys.readouterr().err
    assert fuzz.attributes() == before
    assert isinstance(pathlib.PosixPath("a/b").parent, pathlib.PosixPath)
    assert [path.name for path in tmp_path.iterdir()] == ["sharded"]


def test_attributes_are_read_of_no_object_but_members_of_an_enum(sharded, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickles a member of an enum as a call of getattr."""
    written = (sharded / ".metadata").read_bytes()
    metadata = pickle.loads(written)
    by_name = lambda member, protocol: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    assert b"getattr" in pickle.dumps(metadata)
    assert parse_metadata(pickle.dumps(metadata)) == parse_metadata(written)
    of_class = lambda member, protocol: (getattr, (MetadataIndex, "fqn"))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", of_class)
    (sharded / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"MetadataIndex\.fqn is no member of an enum"):
        open_checkpoint(sharded)


def _fuzz_parsing(rank, world_size, real, seed, count):
    return fuzz.find_violations(parse_metadata, fuzz.pickles(real, seed, count))


def _fuzz_pickle(rank, world_size, seed, count):
    draw = random.Random(seed)
    made = [b"\x80\x04" + fuzz.attack(draw) + b"." for _ in range(count)]
    return fuzz.find_violations(_OfAllowedClasses.loads, made)


class _OfAllowedClasses(pickle.Unpickler):
    """An insufficient defence: an unpickler that allows some classes."""

    @classmethod
    def loads(cls, data):
        try:
            cls(io.BytesIO(data)).load()
        except (AttributeError, TypeError, IndexError, pickle.UnpicklingError) as error:
            raise ValueError(str(error)) from error

    def find_class(self, module, name):
        if module.startswith("torch.distributed") or module == "pathlib":
            return super().find_class(module, name)
        raise ValueError(name)


def test_the_search_finds_what_an_unpickler_of_allowed_classes_lets_through():
    (found,) = run_ranks(1, _fuzz_pickle, 0, 200)
    assert any("changed" in str(what) for what, _ in found)


def test_no_sequence_of_opcodes_does_more_than_return_or_raise(sharded):
    real = (sharded / ".metadata").read_bytes()
    assert run_ranks(1, _fuzz_parsing, real, 0, 1000) == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_no_sequence_of_many_does_more_than_return_or_raise(sharded, seed):
    real = (sharded / ".metadata").read_bytes()
    assert run_ranks(1, _fuzz_parsing, real, seed, 10_000, timeout_s=280) == [[]]


# ------------------------------------------------------------------------- files made by hand


def _edit(folder, change):
    """Applies `change` to the metadata of a directory, as torch's own object."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _place(metadata, name="x", **fields):
    index = next(i for i in metadata.storage_data if i.fqn == name)
    metadata.storage_data[index] = replace(metadata.storage_data[index], **fields)


def _chunk(metadata, offsets, sizes):
    entry = metadata.state_dict_metadata["x"]
    index = next(i for i in metadata.storage_data if i.fqn == "x")
    entry.chunks.append(replace(entry.chunks[0], offsets=Size(offsets), sizes=Size(sizes)))
    metadata.storage_data[_moved(index, Size(offsets))] = metadata.storage_data[index]


def _moved(index, offset):
    return type(index)(index.fqn, offset)


def _two_halves(metadata, second):
    metadata.state_dict_metadata["x"].chunks[0].sizes = Size((2, 6))
    _chunk(metadata, second, (2, 6))


_EDITS = {
    "outside": (lambda m: _place(m, relative_path="../other/__0_0.distcp"), "leads out of"),
    "absolute": (lambda m: _place(m, relative_path="/etc/passwd"), "leads out of"),
    "address": (lambda m: _place(m, relative_path="s3://bucket/x"), "leads out of"),
    "negative": (lambda m: _place(m, offset=-1), "an integer from 0"),
    "beyond the file": (lambda m: _place(m, offset=2**40), r"bytes, expected at least"),
    "shorter than its elements": (lambda m: _place(m, length=50), "24 elements in 50 bytes"),
    "overlapping": (lambda m: _two_halves(m, (1, 0)), "x has chunks that overlap"),
    "twice": (lambda m: _chunk(m, (1, 0), (3, 6)), "x has chunks that overlap"),
    "beyond its tensor": (lambda m: _two_halves(m, (3, 0)), "outside its tensor"),
    "other dimensions": (lambda m: _chunk(m, (0,), (1,)), "differ in their dimensions"),
    "not in a file": (lambda m: m.storage_data.popitem(), "storage entries"),
    "a long list": (
        lambda m: m.planner_data.update({"list.0": ("list", 10**9)}), "far more indices than values"
    ),
    "a huge tensor": (
        lambda m: setattr(m.state_dict_metadata["x"], "size", Size((2**40, 2**40))), "larger than"
    ),
    "a leaf with leaves": (lambda m: m.planner_data.update({"x": ("list",)}), "not form one tree"),
    "a dict with indices": (lambda m: m.planner_data.update({"x": (0, "x")}), "not form one tree"),
}  # fmt: skip


@pytest.mark.parametrize("edit", _EDITS)
def test_metadata_that_lies_is_refused(sharded, edit):
    change, words = _EDITS[edit]
    _edit(sharded, change)
    with pytest.raises(ValueError, match=words) as caught:
        open_sharded(sharded)
    assert str(sharded) in str(caught.value)


def test_chunks_of_any_grid_are_read_and_only_an_overlap_is_refused():
    entry = [_box((0, 0), (2, 3)), _box((0, 3), (2, 3)), _box((2, 0), (2, 5)), _box((2, 5), (2, 1))]
    assert not overlap(entry, (4, 6))
    assert overlap([*entry[:2], _box((2, 0), (2, 5)), _box((1, 5), (2, 1))], (4, 6))
    grid = [_box((y, x), (1, 2)) for y in range(40) for x in range(0, 80, 2)]
    assert not overlap(grid, (40, 80))
    assert overlap([*grid[1:], _box((7, 5), (1, 2))], (40, 80))


def _box(offsets, sizes):
    return ChunkStorageMetadata(Size(offsets), Size(sizes))


_NAMED = _short("torch") + _short("Size") + b"\x93"
_BOMBS = {
    "an index of the memo": b"\x80\x04]r\xff\xff\xff\xff.",
    "an announced length": b"\x80\x04X\xff\xff\xff\xffabc.",
    "a long integer": b"\x80\x04\x8b\xff\xff\xff\x7f1.",
    "a frame": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f.",
    "a key of tuples of tuples": b"}(" + b")" + b"2\x86" * 200 + b"Nu.",
    "a deep list": b"]" * 10**5 + b"a" * (10**5 - 1) + b".",
    "a deep tuple": b")" + b"\x85" * 10**5 + b".",
    "tuples of tuples": _NAMED + b")" + b"q\x00h\x00\x86" * 200 + b"\x85R.",
}


@pytest.mark.parametrize("bomb", _BOMBS)
def test_metadata_takes_no_more_memory_or_time_than_its_length(bomb):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            parse_metadata(_BOMBS[bomb])
        assert tracemalloc.get_traced_memory()[1] < 200 * len(_BOMBS[bomb]) + 10**6
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------- other formats


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/passwd", "a/../../secret.bin"])
def test_an_index_cannot_name_files_outside_its_folder(tmp_path, name):
    index = write_indexed(tmp_path / "model", ".bin")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "secret.bin")
    index.write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(ValueError, match=r"model\.bin\.index\.json.*leads out of"):
        open_checkpoint(index.parent)
    with pytest.raises(ValueError, match=r"model\.bin\.index\.json.*leads out of"):
        raise_damage(index.parent, find_damage(index.parent))


def test_tags_and_checksums_cannot_name_files_outside_the_folder(tmp_path):
    (tmp_path / "out").mkdir()
    run = tmp_path / "run"
    run.mkdir()
    (run / "latest").write_text("../out")
    with pytest.raises(ValueError, match=r"run/latest does not name a tag: .*leads out of"):
        open_checkpoint(run)
    (run / "latest").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="run/latest does not name a tag: 'utf-8' codec"):
        open_checkpoint(run)
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "SHA256SUMS").write_text(f"{'0' * 64}  ../run/latest\n")
    (line,) = find_damage(tmp_path / "sums")
    assert line.startswith("line 1 of SHA256SUMS: the name")


def _deflated(path, name, inflated):
    """Compresses a record of the torch file at `path`, and makes it longer."""
    with zipfile.ZipFile(path) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for record, data in records.items():
            longer = data + bytes(inflated) if record.endswith(name) else data
            archive.writestr(record, longer)


@pytest.mark.default_cases("file", "object")
@pytest.mark.parametrize("form", ["file", "bin", "rest", "object"])
def test_a_record_that_inflates_is_refused_before_it_takes_memory(tmp_path, sharded, form):
    path = tmp_path / "a.pt"
    torch.save({"state_dict": {"x": torch.ones(3)}}, path)
    _deflated(path, "data.pkl", 10**8)
    assert path.stat().st_size < 10**6
    place = path
    if form == "bin":
        place = tmp_path / "model"
        index = write_indexed(place, ".bin")
        path = path.replace(index.parent / "model-00001-of-00002.bin")
    elif form == "rest":
        place, path = sharded, path.replace(sharded / "meta.pt")
    elif form == "object":
        end = (sharded / "__0_0.distcp").stat().st_size
        with (sharded / "__0_0.distcp").open("ab") as file:
            file.write(path.read_bytes())
        length = path.stat().st_size
        _edit(sharded, lambda m: _place(m, "note", offset=end, length=length))
        place, path = sharded, sharded / "__0_0.distcp"
    with pytest.raises(ValueError, match="compressed records would take") as caught:
        open_checkpoint(place)
    assert path.name in str(caught.value)


@pytest.mark.parametrize("command", ["inspect", "export", "error"])
def test_names_cannot_steer_the_terminal(tmp_path, command, capsys):
    name = "a\x1b]0;owned\x07\u202e\x9bm"
    torch.save({"state_dict": {name: torch.ones(3)}, name: 1}, tmp_path / "a.ckpt")
    arguments = ["export", str(tmp_path / "a.ckpt"), str(tmp_path / "o"), "--format", "safetensors"]
    if command == "inspect":
        arguments = ["inspect", str(tmp_path / "a.ckpt")]
    elif command == "error":
        torch.save({name: 1}, tmp_path / "a.ckpt")
    main(arguments)
    shown = "".join(capsys.readouterr())
    assert shown.replace("\n", "").isprintable()
    if command != "export":
        assert r"a\x1b]0;owned\x07\u202e\x9bm" in shown


def test_the_systems_error_names_the_file(sharded, monkeypatch):
    def pread(file, size, at):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(OSError, match=r"Input/output error.*__0_0\.distcp") as caught:
        find_damage(sharded)
    assert caught.value.errno == errno.EIO
