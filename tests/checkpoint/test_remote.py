"""Checkpoints on remote storage, read and written by one process."""

from unittest.mock import Mock

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save_file

from lightning_zero import open_checkpoint
from lightning_zero.checkpoint import storage
from lightning_zero.checkpoint.export import plan_export
from lightning_zero.checkpoint.source import find_damage
from lightning_zero.checkpoint.storage import RemotePath, locate
from lightning_zero.checkpoint.torch_file import no_progress, write_torch_file
from lightning_zero.cli import main
from lightning_zero.strategy.saving import Saving, is_download
from lightning_zero.tensors.lazy import LazyTensor, read_flat


@pytest.fixture(autouse=True)
def memory():
    yield MemoryFileSystem()
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def some_tensors():
    values = torch.arange(60.0).view(6, 10)
    return {
        "a": values,
        "tied": values,
        "turned": values.t(),
        "part": values[2:4, 1:],
        "narrow": values.bfloat16(),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(7),
    }


@pytest.mark.parametrize("write", [torch.save, write_torch_file])
def test_any_range_of_a_tensor_is_read_from_a_file(write, tmp_path, memory):
    tensors = some_tensors()
    write({"state_dict": tensors, "epoch": 3}, tmp_path / "a.ckpt")
    memory.put_file(tmp_path / "a.ckpt", "/a.ckpt")
    assert find_damage("memory://a.ckpt") == []
    opened = open_checkpoint("memory://a.ckpt")
    assert opened["epoch"] == 3
    state = opened["state_dict"]
    assert state["a"] is state["tied"]
    for name, value in tensors.items():
        assert isinstance(state[name], LazyTensor)
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name].clone(), value)
        half, stop = value.numel() // 2, min(value.numel() // 2 + 3, value.numel())
        assert torch.equal(read_flat(state[name], half, stop), value.reshape(-1)[half:stop])


class Held:
    def __init__(self, values):
        self.values = values


def test_tensors_in_objects_have_values_too(tmp_path, memory):
    values = torch.arange(4.0)
    torch.save({"state_dict": {"a": values}, "held": Held(values)}, tmp_path / "a.ckpt")
    memory.put_file(tmp_path / "a.ckpt", "/a.ckpt")
    opened = open_checkpoint("memory://a.ckpt", weights_only=False)
    assert torch.equal(opened["held"].values, values)
    assert torch.equal(opened["state_dict"]["a"], values)


def test_weights_of_hugging_face_are_read_in_ranges(tmp_path, memory):
    tensors = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    memory.put_file(tmp_path / "model.safetensors", "/model/model.safetensors")
    for address in ("memory://model", "memory://model/model.safetensors"):
        state = open_checkpoint(address)["state_dict"]
        assert torch.equal(state["a"].clone(), tensors["a"])
        assert read_flat(state["b"], 2, 4).tolist() == [1, 1]
    data = (tmp_path / "model.safetensors").read_bytes()
    for damaged in (data[:-1], data[:20], b"\0" * 99):
        memory.pipe_file("/b.safetensors", damaged)
        with pytest.raises(ValueError, match="truncated or damaged"):
            open_checkpoint("memory://b.safetensors")


def test_commands_read_and_write_at_addresses(tmp_path, memory, capsys):
    tensors = {name: v for name, v in some_tensors().items() if v.is_contiguous()}
    torch.save({"state_dict": tensors}, tmp_path / "a.ckpt")
    source = str(tmp_path / "a.ckpt")
    for out, form in (("run/b.ckpt", "ckpt"), ("run/c", "dcp"), ("d", "safetensors")):
        address = f"memory://{out}"
        assert main(["export", source, address, "--format", form]) == 0
        assert main(["export", source, address, "--format", form]) == 2
        assert "exists" in capsys.readouterr().err
        assert main(["inspect", address, "--verify"]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert f" weights {len(tensors)} tensors, 1 tied" in printed
        state = open_checkpoint(address)["state_dict"]
        assert all(torch.equal(state[name].clone(), value) for name, value in tensors.items())
        source = address
    assert main(["export", source, "memory://run/c", "--format", "dcp", "--force"]) == 0
    assert find_damage("memory://run/c") == []
    assert main(["export", source, "memory://run/b.ckpt", "--format", "dcp", "--force"]) == 2
    assert "holds a full checkpoint" in capsys.readouterr().err
    assert main(["export", source, "memory://run/c", "--format", "ckpt", "--force"]) == 2
    assert "holds a directory, which a file cannot replace" in capsys.readouterr().err


def test_an_incomplete_save_is_an_error(memory):
    memory.pipe_file("/run/a.ckpt/save-00000000/__0_0.distcp", b"some")
    with pytest.raises(ValueError, match=r"a file \.metadata"):
        open_checkpoint("memory://run/a.ckpt")
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found: memory://run/b"):
        open_checkpoint("memory://run/b.ckpt")


def test_damage_at_an_address_is_found(tmp_path, memory):
    write_torch_file({"state_dict": {"a": torch.arange(100.0)}}, tmp_path / "a.ckpt")
    data = bytearray((tmp_path / "a.ckpt").read_bytes())
    data[data.index(torch.arange(100.0).numpy().tobytes()) + 40] ^= 1
    memory.pipe_file("/a.ckpt", bytes(data))
    assert len(find_damage("memory://a.ckpt")) == 1


def test_a_file_is_there_only_when_all_of_it_was_written(memory):
    path = RemotePath("memory://run/a.ckpt")
    with path.atomic_write(3) as file:
        file.write(b"old")
    with pytest.raises(RuntimeError, match="on the way"), path.atomic_write(3) as file:  # noqa: PT012
        file.write(b"new")
        raise RuntimeError("on the way")
    assert path.open().read() == b"old"


@pytest.mark.parametrize("name", ["run[1]/a.ckpt", "run?/*.ckpt"])
def test_deleting_takes_a_name_as_it_is_and_not_for_a_pattern(name, memory):
    for path in (f"/{name}/.metadata", f"/{name}/save-1/b", "/run1/a.ckpt", "/run?/b.ckpt"):
        memory.pipe_file(path, b"some")
    RemotePath(f"memory://{name}").remove()
    assert sorted(memory.find("/")) == ["/run1/a.ckpt", "/run?/b.ckpt"]
    RemotePath(f"memory://{name}").remove()
    RemotePath("memory://run1/a.ckpt").remove()
    assert memory.find("/") == ["/run?/b.ckpt"]


def test_large_ranges_are_read_in_pieces(memory, monkeypatch):
    monkeypatch.setattr(storage, "_PIECE_BYTES", 100)
    monkeypatch.setattr(storage, "_NUM_PIECES", 2)
    monkeypatch.setattr(storage, "_BLOCK_BYTES", 64)
    data = bytes(range(256)) * 3
    memory.pipe_file("/a", data)
    path = RemotePath("memory://a")
    for start in (0, 1, 63, 64, 500):
        for size in (0, 1, 63, 64, 65, 250, 700):
            assert path.read(start, start + size) == data[start : start + size]
    memory.pipe_file("/a", data[:700])
    with pytest.raises(OSError, match="returned 32 bytes for"):
        path.read(668, 768)


def test_what_storage_does_not_delete_stays_with_a_warning(memory, monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "rm", Mock(side_effect=RuntimeError("no answer")))
    with pytest.warns(UserWarning, match="could not be deleted: no answer"):
        Saving("sharded", is_async=False).remove("memory://run/a.ckpt")


def test_an_export_that_fails_leaves_nothing_at_an_address(memory):
    def lost(start, stop):
        raise OSError("no answer")

    tensors = {"a": torch.ones(8), "b": LazyTensor.of((8,), torch.float32, lost)}
    planned = plan_export({"state_dict": tensors}, "safetensors", max_shard_bytes=64)
    with pytest.raises(OSError, match="no answer"):
        planned.write(RemotePath("memory://run/out"), no_progress)
    assert not RemotePath("memory://run/out").exists()


def test_a_path_may_begin_as_a_web_address_does():
    assert is_download("https://host/a.ckpt")
    assert not is_download("http_runs/a.ckpt")


def test_a_missing_package_is_named():
    with pytest.raises(ImportError, match="`pip install gcsfs`"):
        RemotePath("gs://bucket/a.ckpt")


def test_a_protocol_that_is_not_known_is_named_with_its_address():
    with pytest.raises(
        ValueError, match=r"S4://b/a.ckpt is not an address .* Protocol not known: S4"
    ):
        RemotePath("S4://b/a.ckpt")


def test_storage_errors_are_reported_in_one_line(memory, monkeypatch, capsys):
    def refuse(*_, **__):
        raise LookupError("no\n credentials")  # like errors of botocore, not an OSError

    monkeypatch.setattr(MemoryFileSystem, "exists", refuse)
    assert main(["inspect", "memory://run/a.ckpt"]) == 2
    expected = "lightning-zero inspect: error: memory://run/a.ckpt: no credentials\n"
    assert capsys.readouterr().err == expected


def test_files_of_two_saves_at_an_address_are_refused(memory):
    for number in range(2):
        content = {"state_dict": {"a": torch.full((3, 3), number)}, "epoch": number}
        plan_export(content, "dcp").write(locate(f"memory://run/{number}"), no_progress)
    (first, second) = (f"/run/{number}" for number in range(2))
    (of_first,) = (f for f in memory.find(first) if f.endswith(".distcp"))
    (of_second,) = (f for f in memory.find(second) if f.endswith(".distcp"))
    assert find_damage("memory://run/0") == []
    memory.pipe_file(of_first, memory.cat_file(of_second))
    with pytest.raises(ValueError, match="directory holds files of two saves"):
        open_checkpoint("memory://run/0")
    assert "two saves" in "".join(find_damage("memory://run/0"))
