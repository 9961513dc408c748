"""Any damage of a checkpoint is an error that names the file, or has no effect on its values."""

import pickle
import random
import shutil

import pytest
import torch
from safetensors.torch import save_file

from lightning_zero import open_checkpoint
from lightning_zero.checkpoint.export import plan_export
from lightning_zero.checkpoint.source import find_damage
from lightning_zero.checkpoint.torch_file import no_progress, write_torch_file
from lightning_zero.tensors.lazy import LazyTensor
from tests.checkpoint.test_source import write_indexed
from tests.deepspeed.test_checkpoint import trained
from tests.support.deepspeed_format import write_deepspeed

_NAMED_BY_KIND = (".index.json", "_model_states.pt")  # no other entry has their names
_FORMS = ["file", "sharded", "safetensors", "indexed", "bin", "deepspeed"]


def _content():
    state = {f"layer.{n}.weight": torch.rand(40, 30) for n in range(4)}
    moments = {name: {"exp_avg": torch.rand(40, 30), "step": torch.tensor(3.0)} for name in state}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": list(state)}]}
    return {"state_dict": state, "optimizer_states": [optimizer], "epoch": 3}


def _write(form, path):
    """Writes a checkpoint of this format; returns the path to open."""
    if form == "file":
        write_torch_file(_content(), path)
    elif form == "sharded":
        plan_export(_content(), "dcp").write(path, no_progress)
    elif form == "safetensors":
        path = path.with_suffix(".safetensors")
        save_file(_content()["state_dict"], path)
    elif form == "deepspeed":
        module, optimizer = trained()
        write_deepspeed(path, module, optimizer, stage=2, world_size=2)
    else:
        write_indexed(path, ".safetensors" if form == "indexed" else ".bin")
    return path


def _flat(value, name=""):
    """Leaves of a tree by path, tensors with values."""
    if isinstance(value, dict):
        return {
            k: v for key, each in value.items() for k, v in _flat(each, f"{name}/{key}").items()
        }
    if isinstance(value, (list, tuple)):
        return _flat(dict(enumerate(value)), name)
    if isinstance(value, torch.Tensor):
        value = value.read() if isinstance(value, LazyTensor) else value
        return {name: (value.dtype, value.shape, value.contiguous().flatten().tolist())}
    return {name: value}


def _damage(file, others, draw):
    """Damages a file as disks, copies and users do; returns a description."""
    data = bytearray(file.read_bytes())
    kind = draw.choice(
        ["bit", "bits", "zeros", "noise", "truncated", "empty", "gone", "more", "other"]
    )
    at = draw.randrange(len(data))
    length = draw.choice([1, 16, 512, 4096])
    if kind == "bit":
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "bits":
        for _ in range(20):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "zeros":
        data[at : at + length] = bytes(len(data[at : at + length]))
    elif kind == "noise":
        data[at : at + length] = draw.randbytes(len(data[at : at + length]))
    elif kind == "truncated":
        del data[at:]
    elif kind == "empty":
        data.clear()
    elif kind == "more":
        data += draw.randbytes(length)
    elif kind == "other":
        data = bytearray(draw.choice(others).read_bytes())
    file.write_bytes(data)
    if kind == "gone":
        file.unlink()
    return kind


def _outcome(path, damaged, expected, *, has_checksums):
    """Describes a wrong reaction to the damage; None if the reaction is right."""
    try:
        lines = find_damage(path)
    except (ValueError, OSError) as error:
        lines = [f"{path}: {error}"]
    except Exception as error:
        return f"find_damage raised {type(error).__name__}: {error}"
    # Each line is about a file in `path`, which the error names.
    if any(damaged.name in line for line in lines) or (lines and damaged == path):
        return None
    try:
        found = _flat(open_checkpoint(path))
    except (ValueError, OSError, pickle.UnpicklingError) as error:
        shown = f"{error} {getattr(error, 'filename', '')}"
        if not damaged.exists() and damaged.name.endswith(_NAMED_BY_KIND):
            return None if str(path) in shown else f"does not name {path}: {error!r}"
        return None if damaged.name in shown else f"does not name {damaged.name}: {error!r}"
    except Exception as error:
        return f"open raised {type(error).__name__}: {error}"
    if lines:
        return f"does not name {damaged.name}: {lines}"
    if has_checksums and repr(found) != repr(expected):
        return "loads other values"
    return None


def _study(form, tmp_path, seeds):
    torch.manual_seed(0)
    good = _write(form, tmp_path / "good")
    expected = _flat(open_checkpoint(good))
    wrong = []
    for seed in seeds:
        draw = random.Random(seed)
        path = tmp_path / f"bad{good.suffix}"
        if good.is_dir():
            shutil.copytree(good, path)
        else:
            shutil.copy(good, path)
        files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
        damaged = draw.choice(files)
        kind = _damage(damaged, files, draw)
        has_checksums = damaged.suffix not in (".safetensors", ".json") and damaged.name != "latest"
        why = _outcome(path, damaged, expected, has_checksums=has_checksums)
        if why:
            wrong.append(f"{form} {seed}: {kind} in {damaged.name}: {why}")
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return wrong


@pytest.mark.parametrize("form", _FORMS)
def test_a_damage_is_an_error_that_names_the_file(form, tmp_path):
    assert _study(form, tmp_path, range(4)) == []


@pytest.mark.slow
@pytest.mark.parametrize("form", _FORMS)
def test_any_of_many_damages_is_an_error_that_names_the_file(form, tmp_path):
    assert _study(form, tmp_path, range(100, 160)) == []
