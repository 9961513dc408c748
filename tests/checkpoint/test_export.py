"""Export of checkpoints to other formats, tensor by tensor."""

import json
import os
import shutil

import pytest
import safetensors.torch
import torch
from torch import nn

from lightning_zero.checkpoint import export as export_module
from lightning_zero.checkpoint import load_weights, open_checkpoint
from lightning_zero.checkpoint.export import plan_export
from lightning_zero.checkpoint.source import find_damage
from lightning_zero.checkpoint.torch_file import no_progress, write_torch_file
from lightning_zero.tensors.lazy import LazyTensor
from tests.support.deepspeed_format import write_deepspeed
from tests.support.full_disk import mounted_tmpfs

FORMATS = ["safetensors", "ckpt", "dcp"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def trained():
    """A module and its Lightning checkpoint after one step of Adam."""
    torch.manual_seed(0)
    module = Tied()
    optimizer = torch.optim.AdamW(
        [
            {"params": list(module.norm.parameters()), "weight_decay": 0.0},
            {"params": [module.embedding.weight]},
        ]
    )
    module.head(module.norm(module.embedding(torch.arange(8)))).square().sum().backward()
    optimizer.step()
    checkpoint = {
        "epoch": 1,
        "global_step": 5,
        "pytorch-lightning_version": "2.6.1",
        "state_dict": module.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint": {"best": torch.tensor(0.5)}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hyper_parameters": {"width": 4},
    }
    return module, checkpoint


@pytest.fixture
def checkpoint():
    return trained()[1]


def place(folder, form):
    return folder / ("out.safetensors" if form == "safetensors" else "out")


def export(checkpoint, form, path, **options):
    planned = plan_export(checkpoint, form, **options)
    reported = []
    planned.write(path, reported.append)
    assert sum(reported) >= planned.nbytes * 0.9
    assert not find_damage(path)
    return open_checkpoint(path)


def named(state, names):
    """Converts an optimizer state to parameter names."""
    ids = dict(enumerate(names))
    return {
        "state": {ids[number]: entry for number, entry in state["state"].items()},
        "param_groups": [
            {**group, "params": [ids[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def assert_equal(one, other, path="checkpoint"):
    if isinstance(other, dict):
        assert set(one) == set(other), path
        for key in other:
            assert_equal(one[key], other[key], f"{path}[{key!r}]")
    elif isinstance(other, (list, tuple)):
        assert len(one) == len(other), path
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{path}[{number}]")
    elif isinstance(other, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    else:
        assert one == other, path


@pytest.mark.parametrize("form", ["ckpt", "dcp"])
def test_everything_comes_back(form, checkpoint, tmp_path):
    assert_equal(export(checkpoint, form, tmp_path / "out"), checkpoint)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_each_format_is_exported_to_each(first, form, checkpoint, tmp_path):
    sharded = {"max_shard_bytes": 200} if "safetensors" in (first, form) else {}
    opened = export(checkpoint, first, tmp_path / "first", **sharded)
    again = export(opened, form, tmp_path / "again", **sharded)
    assert_equal(again["state_dict"], checkpoint["state_dict"])
    if "safetensors" not in (first, form):
        assert_equal(again, checkpoint)


@pytest.mark.parametrize("first", FORMATS)
def test_tied_weights_are_stored_once_and_have_both_names(first, checkpoint, tmp_path):
    options = {"max_shard_bytes": 10**6} if first == "safetensors" else {}
    opened = export(checkpoint, first, tmp_path / "first", **options)
    out = tmp_path / "model.safetensors"
    export(opened, "safetensors", out)
    stored = safetensors.torch.load_file(out)
    assert "embedding.weight" in stored
    assert "head.weight" not in stored
    with safetensors.safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    fresh = Tied()
    assert safetensors.torch.load_model(fresh, out) == (set(), [])
    assert_equal(fresh.state_dict(), checkpoint["state_dict"])
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(10, 4))
    load_weights(untied, out)
    assert_equal(untied.state_dict(), checkpoint["state_dict"])
    again = export(open_checkpoint(out), "ckpt", tmp_path / "again.ckpt")["state_dict"]
    assert again["head.weight"].data_ptr() == again["embedding.weight"].data_ptr()


def test_the_index_is_hugging_faces(checkpoint, tmp_path):
    checkpoint["state_dict"]["wide"] = torch.rand(100, 3)
    export(checkpoint, "safetensors", tmp_path / "out", max_shard_bytes=300)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    held = {name: safetensors.torch.load_file(tmp_path / "out" / name) for name in names}
    for name, file in index["weight_map"].items():
        assert torch.equal(held[file][name], checkpoint["state_dict"][name])
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in held.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert index["metadata"]["tied"] == {"head.weight": "embedding.weight"}
    assert sizes[0] <= 300
    assert sorted(os.listdir(tmp_path / "out")) == [
        "SHA256SUMS", *names, "model.safetensors.index.json"
    ]  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_one_file_needs_no_index(checkpoint, tmp_path):
    export(checkpoint, "safetensors", tmp_path / "out", max_shard_bytes=10**6)
    assert sorted(os.listdir(tmp_path / "out")) == ["SHA256SUMS", "model.safetensors"]


def test_a_part_is_exported_under_its_own_names(checkpoint, tmp_path):
    opened = export(checkpoint, "safetensors", tmp_path / "norm.safetensors", part="norm")
    inside = {k[5:]: v for k, v in checkpoint["state_dict"].items() if k.startswith("norm.")}
    assert_equal(opened["state_dict"], inside)
    with pytest.raises(ValueError, match="got nor; the checkpoint has embedding, head, norm"):
        plan_export(checkpoint, "safetensors", part="nor")
    with pytest.raises(ValueError, match="needs --format safetensors, got ckpt"):
        plan_export(checkpoint, "ckpt", part="norm")


def test_the_library_reads_every_dtype(tmp_path):
    dtypes = [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.bool, torch.uint16, torch.complex64,
    ]  # fmt: skip
    state = {str(dtype): torch.randint(0, 2, (3, 3)).to(dtype) for dtype in dtypes}
    state |= {
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(0, 4),
        "strided": torch.eye(4).T[1:],
    }
    export({"state_dict": state}, "safetensors", tmp_path / "x.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert set(loaded) == set(state)
    for name, value in state.items():
        assert loaded[name].dtype == value.dtype
        assert loaded[name].shape == value.shape
        assert loaded[name].tolist() == value.tolist()


def test_a_dtype_that_safetensors_does_not_have_is_an_error(tmp_path):
    planned = plan_export(
        {"state_dict": {"z": torch.zeros(2, dtype=torch.complex128)}}, "safetensors"
    )
    with pytest.raises(ValueError, match=r"z is torch\.complex128, which safetensors does not"):
        planned.write(tmp_path / "x.safetensors", no_progress)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("form", FORMATS)
def test_a_cast_changes_floating_point_weights_and_nothing_else(form, checkpoint, tmp_path):
    opened = export(checkpoint, form, place(tmp_path, form), dtype=torch.bfloat16)
    for name, value in checkpoint["state_dict"].items():
        is_float = value.is_floating_point()
        expected = value.bfloat16() if is_float else value
        assert_equal(opened["state_dict"][name], expected)
    if form != "safetensors":
        assert_equal(opened["optimizer_states"], checkpoint["optimizer_states"])


def test_a_16_bit_module_is_exported_in_float32_from_its_masters(tmp_path):
    master = torch.rand(4)
    narrow = master.bfloat16()
    state = {"a": narrow, "tied": narrow, "buffer": torch.ones(2, dtype=torch.bfloat16)}
    source = {"state_dict": state, "lightning_zero_masters": {"a": master}}
    path = tmp_path / "x.safetensors"
    opened = export(source, "safetensors", path, dtype=torch.float32)["state_dict"]
    assert_equal(opened, {"a": master, "tied": master, "buffer": torch.ones(2)})
    assert "tied" not in safetensors.torch.load_file(path)
    opened = export(source, "safetensors", path)["state_dict"]
    assert_equal(opened, state)


@pytest.mark.parametrize("form", FORMATS)
def test_a_directory_of_deepspeed_is_exported(form, tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.rand(2, 5)).square().sum().backward()
    optimizer.step()
    write_deepspeed(tmp_path / "deepspeed", module, optimizer, stage=3, world_size=3)
    source = open_checkpoint(tmp_path / "deepspeed")
    opened = export(source, form, place(tmp_path, form))
    assert_equal(opened["state_dict"], dict(module.state_dict()))
    if form == "ckpt":
        fresh = torch.optim.AdamW(module.parameters())
        fresh.load_state_dict(opened["optimizer_states"][0])
        for parameter, state in optimizer.state.items():
            assert torch.equal(fresh.state[parameter]["exp_avg"], state["exp_avg"])


def test_a_cast_that_would_give_infinity_is_an_error(tmp_path):
    state = {"big": torch.tensor([1e5]), "already": torch.tensor([float("inf")])}
    planned = plan_export({"state_dict": state}, "ckpt", dtype=torch.float16)
    with pytest.raises(ValueError, match=r"big has values up to 1e\+05.*use --dtype bf16"):
        planned.write(tmp_path / "x.ckpt", no_progress)
    assert not os.listdir(tmp_path)


def averaged(checkpoint):
    current = {name: value + 1 for name, value in checkpoint["state_dict"].items()}
    return checkpoint | {
        "current_model_state": current, "averaging_state": {"n_averaged": torch.tensor(3)}
    }  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_averaged_weights_are_taken_when_asked_for(form, checkpoint, tmp_path):
    options = {"is_averaged": True}
    opened = export(averaged(checkpoint), form, place(tmp_path, form), **options)
    assert_equal(opened["state_dict"], checkpoint["state_dict"])
    left = {"optimizer_states", "current_model_state", "averaging_state", "callbacks"}
    assert not left & set(opened)
    if form != "safetensors":
        assert opened["hyper_parameters"] == {"width": 4}


def test_without_asking_the_trained_weights_are_exported_and_both_stay_in_a_checkpoint(
    checkpoint, tmp_path
):
    both = averaged(checkpoint)
    planned = plan_export(both, "safetensors")
    assert "use --ema for the averaged ones" in planned.notes[0]
    opened = export(both, "safetensors", tmp_path / "out.safetensors")
    assert_equal(opened["state_dict"], both["current_model_state"])
    assert_equal(export(both, "ckpt", tmp_path / "out.ckpt"), both)
    assert_equal(export(both, "dcp", tmp_path / "out"), both)


def test_no_averaged_weights_is_an_error(checkpoint):
    with pytest.raises(ValueError, match="has no averaged weights"):
        plan_export(checkpoint, "safetensors", is_averaged=True)


def test_what_is_no_tensor_is_named(checkpoint):
    checkpoint["state_dict"]["norm._extra_state"] = {"a": 1}
    assert "norm._extra_state" in plan_export(checkpoint, "safetensors").notes[0]
    assert not plan_export(checkpoint, "ckpt").notes


def test_optimizer_states_by_name_become_those_of_torch(checkpoint, tmp_path):
    expected = checkpoint["optimizer_states"]
    names = ["norm.weight", "norm.bias", "embedding.weight"]
    checkpoint["optimizer_states"] = [named(expected[0], names)]
    sharded = export(checkpoint, "dcp", tmp_path / "out")
    assert_equal(sharded["optimizer_states"], checkpoint["optimizer_states"])
    opened = export(sharded, "ckpt", tmp_path / "out.ckpt")
    assert_equal(opened["optimizer_states"], expected)
    module = Tied()
    optimizer = torch.optim.AdamW(
        [{"params": list(module.norm.parameters())}, {"params": [module.embedding.weight]}]
    )
    optimizer.load_state_dict(opened["optimizer_states"][0])
    assert optimizer.param_groups[0]["weight_decay"] == 0.0


def test_torch_reads_the_directory(checkpoint, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    export(checkpoint, "dcp", tmp_path / "out")
    dcp_to_torch_save(tmp_path / "out", tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=False)
    assert_equal(loaded["state_dict"], checkpoint["state_dict"])


@pytest.mark.parametrize("form", FORMATS)
def test_an_error_while_reading_leaves_what_was_there(form, tmp_path):
    def read(start, stop):
        raise OSError("the disk broke")

    bad = LazyTensor.of((4,), torch.float32, read)
    state = {"good": torch.rand(4), "bad": bad}
    (tmp_path / "out").write_bytes(b"before")
    options = {"max_shard_bytes": 100} if form == "safetensors" else {}
    planned = plan_export({"state_dict": state}, form, **options)
    with pytest.raises(OSError, match="the disk broke"):
        planned.write(tmp_path / "out", no_progress)
    assert (tmp_path / "out").read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["out"]


def test_a_file_that_does_not_fit_into_memory_is_refused_with_formats_that_need_none(
    tmp_path, monkeypatch
):
    state = {"w": LazyTensor.of((1000,), torch.float32, lambda start, stop: torch.zeros(0))}
    planned = plan_export({"state_dict": state}, "ckpt")
    monkeypatch.setattr(export_module, "available_memory_bytes", lambda: 3999)
    with pytest.raises(ValueError, match=r"needs all tensors in memory, .*--format dcp, or"):
        planned.write(tmp_path / "out", no_progress)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    yield from mounted_tmpfs(tmp_path / "disk", 2**18)


@pytest.mark.parametrize("form", FORMATS)
def test_a_full_disk_names_path_and_bytes_and_leaves_nothing(form, small_disk):
    options = {"max_shard_bytes": 10**5} if form == "safetensors" else {}
    planned = plan_export(
        {"state_dict": {str(i): torch.rand(20_000) for i in range(5)}}, form, **options
    )
    with pytest.raises(OSError, match=r"disk/out was not written: it needs 4\d{5} bytes"):
        planned.write(small_disk / "out", no_progress)
    assert os.listdir(small_disk) == []


def test_an_export_replaces_a_file_by_a_directory_and_back(checkpoint, tmp_path):
    out = tmp_path / "out"
    for form in ("ckpt", "dcp", "ckpt"):
        assert_equal(export(checkpoint, form, out), checkpoint)
    shutil.rmtree(out, ignore_errors=True)
    write_torch_file(checkpoint, out)
    assert os.listdir(tmp_path) == ["out"]
