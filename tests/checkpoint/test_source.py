"""Opening checkpoints: single files of every format, and directories of weights."""

import json
import pickle
from argparse import Namespace
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_zero.checkpoint import open_checkpoint
from tests.support.storage import anonymous_bytes

STATE = OrderedDict(weight=torch.arange(6.0).view(2, 3), bias=torch.ones(2, dtype=torch.bfloat16))


def assert_state(opened):
    assert list(opened["state_dict"]) == list(STATE)
    for name, value in STATE.items():
        assert opened["state_dict"][name].dtype == value.dtype
        assert torch.equal(opened["state_dict"][name], value)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_lightning_checkpoint_comes_as_it_is(tmp_path, is_zip):
    path = tmp_path / "a.ckpt"
    content = {"state_dict": STATE, "epoch": 3, "optimizer_states": [{"state": {}}]}
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    opened = open_checkpoint(path)
    assert_state(opened)
    assert opened["epoch"] == 3
    assert opened["optimizer_states"] == [{"state": {}}]


def test_a_state_dict_comes_with_its_metadata_as_the_only_entry(tmp_path):
    module = nn.BatchNorm1d(2)
    torch.save(module.state_dict(), tmp_path / "a.pt")
    opened = open_checkpoint(str(tmp_path / "a.pt"))
    assert list(opened) == ["state_dict"]
    assert opened["state_dict"]._metadata == module.state_dict()._metadata


def test_what_is_pickled_needs_weights_only_false(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": STATE, "hyper_parameters": Namespace(x=1)}, path)
    with pytest.raises(pickle.UnpicklingError) as caught:
        open_checkpoint(path)
    text = str(caught.value)
    assert "argparse.Namespace is not loaded by default" in text
    assert "pass weights_only=False where you load it" in text
    assert "\\x1b" not in text  # torch's text has colours
    assert open_checkpoint(path, weights_only=False)["hyper_parameters"].x == 1


def test_one_safetensors_file(tmp_path):
    save_file(dict(STATE), tmp_path / "a.safetensors")
    opened = open_checkpoint(tmp_path / "a.safetensors")
    assert torch.equal(opened["state_dict"]["weight"], STATE["weight"])
    assert opened["state_dict"]["bias"].dtype == torch.bfloat16


def test_safetensors_of_every_dtype_are_read_as_the_library_reads_them(tmp_path):
    names = (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz "
        "float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 complex64 int64 int32 int16 int8 uint64 "
        "uint32 uint16 uint8"
    )
    dtypes = [getattr(torch, name) for name in names.split()]
    data = torch.arange(96, dtype=torch.uint8).view(2, 48)
    path = tmp_path / "a.safetensors"
    save_file({str(dtype): data.clone().view(dtype) for dtype in dtypes}, path)
    opened, expected = open_checkpoint(path)["state_dict"], load_file(path)
    assert opened.keys() == expected.keys()
    for name, value in expected.items():
        assert opened[name].dtype == value.dtype
        assert opened[name].shape == value.shape
        assert torch.equal(opened[name].view(torch.uint8), value.view(torch.uint8))


def test_a_dtype_of_safetensors_that_is_not_known_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    path.write_bytes(path.read_bytes().replace(b"F32", b"Q99"))
    with pytest.raises(ValueError, match="dtype Q99, which is not known here"):
        open_checkpoint(path)


def test_gaps_and_overlaps_of_safetensors_are_damage(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.zeros(4)}, path)
    data = path.read_bytes()
    for lie in (b"[12,28]", b"[0,16] ", b"[-9,7] ", b"[0.,16]"):
        path.write_bytes(data.replace(b"[16,32]", lie))
        with pytest.raises(ValueError, match="is truncated or damaged"):
            open_checkpoint(path)


def write_indexed(folder, suffix=".safetensors"):
    folder.mkdir()
    weight_map = {}
    for number, (name, value) in enumerate(STATE.items(), start=1):
        file = f"model-{number:05}-of-00002{suffix}"
        write = save_file if suffix == ".safetensors" else torch.save
        write({name: value}, folder / file)
        weight_map[name] = file
    index = folder / f"model{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 28}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_directory_with_an_index(tmp_path, suffix):
    index = write_indexed(tmp_path / "model", suffix)
    (tmp_path / "model" / "config.json").write_text("{}")
    assert_state(open_checkpoint(index.parent))
    assert_state(open_checkpoint(index.parent.as_uri()))


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors", "pytorch_model.bin"])
def test_a_directory_with_one_file_of_weights(tmp_path, name):
    write = save_file if name.endswith("safetensors") else torch.save
    write(dict(STATE), tmp_path / name)
    torch.save({"learning_rate": 1}, tmp_path / "training_args.bin")
    opened = open_checkpoint(tmp_path)
    assert torch.equal(opened["state_dict"]["weight"], STATE["weight"])


def test_an_index_that_names_what_is_not_there_is_an_error(tmp_path):
    index = write_indexed(tmp_path / "model")
    text = index.read_text()
    (index.parent / "model-00002-of-00002.safetensors").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002.safetensors are"):
        open_checkpoint(index.parent)
    (tmp_path / "away").rename(index.parent / "model-00002-of-00002.safetensors")
    index.write_text(text.replace('"bias"', '"scale"'))
    with pytest.raises(ValueError, match="are not in their files: scale"):
        open_checkpoint(index.parent)
    index.write_text("[]")
    with pytest.raises(ValueError, match="is not an index of weights"):
        open_checkpoint(index.parent)


def test_several_files_without_an_index_are_an_error_that_names_them(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file(dict(STATE), tmp_path / name)
    with pytest.raises(
        ValueError, match=r"holds a.safetensors, b.safetensors, and it is not clear"
    ):
        open_checkpoint(tmp_path)


def test_other_files_are_an_error_that_describes_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "note.txt").write_text("hello, world")
    with pytest.raises(ValueError, match=r"first bytes are b'hello, w'. Accepted: a Lightning"):
        open_checkpoint(tmp_path / "note.txt")
    with pytest.raises(ValueError, match=r"a directory that holds note.txt\."):
        open_checkpoint(tmp_path)
    (tmp_path / "empty.ckpt").touch()
    with pytest.raises(ValueError, match="is empty: its save was interrupted"):
        open_checkpoint(tmp_path / "empty.ckpt")
    torch.save({"model": STATE, "step": 3}, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match=r"contains a dict with 'model', 'step', which is neither"):
        open_checkpoint(tmp_path / "foreign.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"contains a builtins.list, expected a dict"):
        open_checkpoint(tmp_path / "list.pt")


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors", "legacy.pt"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_a_truncated_file_is_an_error(tmp_path, suffix, part):
    path = tmp_path / f"a{suffix}"
    big = {"weight": torch.randn(100, 100)}
    if suffix == ".safetensors":
        save_file(big, path)
    else:
        torch.save({"state_dict": big}, path, _use_new_zipfile_serialization=suffix == ".ckpt")
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    with pytest.raises(ValueError, match=rf"{path.name} \(\d+ bytes\) is truncated"):
        open_checkpoint(path)


@pytest.mark.default_cases(".safetensors")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_reading_maps_the_file_and_takes_no_memory(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    value = torch.randn(16 * 2**20)
    save_file({"w": value}, path) if suffix == ".safetensors" else torch.save({"w": value}, path)
    expected = float(value.sum())
    del value
    before = anonymous_bytes()
    opened = open_checkpoint(path)
    assert float(opened["state_dict"]["w"].sum()) == pytest.approx(expected, rel=1e-3)
    assert anonymous_bytes() - before < 8 * 2**20  # the file has 64 MiB
