"""DeepSpeed's checkpoint directories, in the layout of `tests/support/deepspeed_format.py`.

If DeepSpeed is installed (pip install deepspeed; it runs on CPUs), also as it writes them itself.
"""

import importlib.util
import os
import pickle
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.tensors.lazy import LazyTensor, read_flat
from tests.support.deepspeed_format import TrainedModule, write_deepspeed
from tests.support.ranks import free_port

STAGES = [1, 2, 3]


def trained(num_steps=3):
    """A module and its optimizer after some steps on the batches of two ranks."""
    torch.manual_seed(0)
    module = TrainedModule()
    optimizer = torch.optim.AdamW(module.groups(), lr=1e-2, eps=1e-5)
    for step in range(num_steps):
        (sum(module.loss(step, rank) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


def assert_holds(opened, module, optimizer, **tolerance):
    """Asserts that the opened checkpoint has the values of the module and the optimizer."""
    state = module.state_dict()
    assert list(opened["state_dict"]) == list(state)
    for name, value in state.items():
        assert opened["state_dict"][name].shape == value.shape, name
        torch.testing.assert_close(
            opened["state_dict"][name] + 0, value, check_dtype=False, **tolerance, msg=name
        )
    (saved,) = opened["optimizer_states"]
    parameters = dict(module.named_parameters())
    names = [[parameters[name] for name in group["params"]] for group in saved["param_groups"]]
    for mine, theirs in zip(optimizer.param_groups, names, strict=True):
        assert set(mine["params"]) == set(theirs)
    if "weight_decay" in saved["param_groups"][0]:  # "elastic" checkpoints have no options
        assert [g["weight_decay"] for g in saved["param_groups"]] == [0.1, 0.0]
    assert {parameters[name] for name in saved["state"]} == set(optimizer.state)
    for name, entry in saved["state"].items():
        for key, value in optimizer.state[parameters[name]].items():
            assert entry[key].shape == value.shape, name
            torch.testing.assert_close(entry[key] + 0, value, **tolerance, msg=f"{key} of {name}")


EXACT = {"rtol": 0, "atol": 0}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_moments_and_the_users_state_are_there(tmp_path, stage, world_size):
    module, optimizer = trained()
    write_deepspeed(
        tmp_path / "ds",
        module,
        optimizer,
        stage=stage,
        world_size=world_size,
        client_state={"epoch": 4},
        bf16=world_size == 2,
    )
    opened = open_checkpoint(tmp_path / "ds")
    assert_holds(opened, module, optimizer, **EXACT)
    assert opened["epoch"] == 4
    assert set(opened) == {"epoch", "state_dict", "optimizer_states"}
    assert_holds(open_checkpoint(tmp_path / "ds" / "step7"), module, optimizer, **EXACT)


@pytest.mark.parametrize("stage", STAGES)
def test_a_part_of_a_tensor_is_read_from_the_ranks_that_have_it(tmp_path, stage):
    module, optimizer = trained()
    write_deepspeed(tmp_path, module, optimizer, stage=stage, world_size=3)
    opened = open_checkpoint(tmp_path)["state_dict"]
    assert any(isinstance(value, LazyTensor) for value in opened.values())
    for name, value in module.state_dict().items():
        for start, stop in ((0, value.numel()), (1, value.numel() - 1), (2, 2)):
            part = read_flat(opened[name], start, stop)
            assert torch.equal(part, value.reshape(-1)[start:stop]), name


def test_the_users_own_classes_need_weights_only_false(tmp_path):
    module, optimizer = trained()
    write_deepspeed(
        tmp_path, module, optimizer, stage=2, world_size=2, client_state={"args": Namespace(x=1)}
    )
    with pytest.raises(pickle.UnpicklingError, match="argparse"):
        open_checkpoint(tmp_path)
    opened = open_checkpoint(tmp_path, weights_only=False)
    assert opened["args"].x == 1
    assert_holds(opened, module, optimizer, **EXACT)


def test_files_that_are_missing_too_many_or_damaged_are_an_error(tmp_path):
    module, optimizer = trained()
    write_deepspeed(tmp_path, module, optimizer, stage=3, world_size=3)
    tag = tmp_path / "step7"
    one = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    one.rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"2 \*_optim_states.pt and 3 .*, expected 3"):
        open_checkpoint(tmp_path)
    one.write_bytes((tmp_path / "away").read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"zero_pp_rank_1_mp_rank_00_optim_states.pt .*truncated"):
        open_checkpoint(tmp_path)
    (tmp_path / "away").rename(one)
    other = tag / "zero_pp_rank_1_mp_rank_01_optim_states.pt"
    other.touch()
    with pytest.raises(ValueError, match="tensor parallelism, or two saves"):
        open_checkpoint(tmp_path)
    other.unlink()
    (tag / "layer_00-model_states.pt").touch()
    with pytest.raises(ValueError, match="without experts or pipeline layers"):
        open_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("step8")
    with pytest.raises(FileNotFoundError, match="names the tag 'step8'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("stage", STAGES)
def test_flat_tensors_of_another_length_are_an_error(tmp_path, stage):
    module, optimizer = trained()
    write_deepspeed(tmp_path, module, optimizer, stage=stage, world_size=2)
    for file in (tmp_path / "step7").glob("*model_states.pt"):
        content = torch.load(file, weights_only=True)
        content["param_shapes"][0]["more"] = torch.Size([40])
        torch.save(content, file)
    with pytest.raises(ValueError, match="elements for a group of parameters, expected"):
        open_checkpoint(tmp_path)


SETTINGS = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2": {"zero_optimization": {"stage": 2}},
    "stage 2 round robin": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "stage 2 elastic": {"zero_optimization": {"stage": 2, "elastic_checkpoint": True}},
    "stage 3": {"zero_optimization": {"stage": 3}},
    "stage 3 sub-groups": {"zero_optimization": {"stage": 3, "sub_group_size": 40}},
    "stage 2 bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "stage 3 bf16": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
}

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="needs DeepSpeed, on which nothing here depends: pip install deepspeed",
)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("name", list(SETTINGS))
def test_deepspeeds_own_checkpoints_hold_what_one_process_computes(tmp_path, name):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "-m", "tests.support.deepspeed_writer"]
    subprocess.run(
        [*command, repr(SETTINGS[name]), str(tmp_path)],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        cwd=root,
        check=True,
        timeout=200,
    )
    module, optimizer = trained()
    # bfloat16 rounds gradients, not masters: Adam's steps of 1e-2 differ slightly.
    tolerance = {"rtol": 0.1, "atol": 2e-2} if "bf16" in name else {"rtol": 1e-4, "atol": 1e-6}
    opened = open_checkpoint(tmp_path)
    if name == "stage 0":
        for key, value in module.state_dict().items():
            torch.testing.assert_close(opened["state_dict"][key], value, **tolerance)
        return
    assert_holds(opened, module, optimizer, **tolerance)
    trained_names = set(opened["optimizer_states"][0]["state"])
    assert all(opened["state_dict"][key].dtype == torch.float32 for key in trained_names)
    reference = torch.load(tmp_path / "full.pt", weights_only=True)
    for key in trained_names:
        assert torch.equal(opened["state_dict"][key] + 0, reference[key]), key
