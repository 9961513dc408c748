"""Invalid input is a clear error before any process group exists."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn

from lightning_zero import Engine, OffloadConfig, ZeroConfig
from lightning_zero.strategy.processes import check_numbering
from tests.support.fitting import make_trainer, settings
from tests.support.models import MLPModule
from tests.support.ranks import run_ranks

SIZES = [
    "reduce_bucket_size",
    "allgather_bucket_size",
    "prefetch_bucket_size",
    "param_persistence_threshold",
]
STAGE_3_ONLY = {
    "prefetch_bucket_size": 1,
    "param_persistence_threshold": 1,
    "reshard_after_forward": True,
}


def configure(**given):
    return ZeroConfig(**given)


def build_strategy(**given):
    from lightning_zero import ZeroStrategy

    return ZeroStrategy(**given)


@pytest.fixture(params=[configure, build_strategy], ids=["ZeroConfig", "ZeroStrategy"])
def build(request):
    yield request.param
    assert not dist.is_initialized()


@pytest.mark.parametrize("stage", [-1, 4, 10**6])
def test_an_unknown_stage_is_refused_with_the_known_ones(build, stage):
    with pytest.raises(ValueError, match=rf"stage must be one of 0, 1, 2, 3, got {stage}"):
        build(stage=stage)


@pytest.mark.parametrize("stage", ["3", 3.0, True, None])
def test_a_stage_that_is_no_integer_is_refused(build, stage):
    with pytest.raises((TypeError, ValueError), match="stage must be one of 0, 1, 2, 3"):
        build(stage=stage)


@pytest.mark.parametrize("stage", ["three", "3", None])
def test_the_error_of_a_stage_that_is_no_number_mentions_auto(build, stage):
    with pytest.raises(TypeError, match='ZeroStrategy also accepts "auto"'):
        build(stage=stage)


@pytest.mark.parametrize("timeout", ["1h", "30", True, [30]])
def test_a_timeout_of_a_wrong_type_is_refused_with_examples(timeout):
    with pytest.raises(
        TypeError, match=r"a datetime.timedelta or a number of seconds, got .*=3600"
    ):
        build_strategy(timeout=timeout)
    with pytest.raises(TypeError, match=r"timeout=timedelta\(hours=1\)"):
        Engine(torch.nn.Linear(1, 1), timeout=timeout)


@pytest.mark.parametrize("timeout", [0, -1.5, timedelta(0), float("nan"), float("inf"), 1e300])
def test_a_timeout_that_is_not_positive_and_finite_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout must be more than 0 seconds, and finite, got"):
        build_strategy(timeout=timeout)


@pytest.mark.parametrize("timeout", [30, 30.0, timedelta(seconds=30)])
def test_a_timeout_may_be_a_number_of_seconds(timeout):
    strategy = build_strategy(timeout=timeout)
    assert strategy._timeout == timedelta(seconds=30)
    assert build_strategy(timeout=None)._timeout is None


@pytest.mark.parametrize("backend", ["glo", "nccl2", "cpu:gloo,cuda:ncl", ""])
def test_an_unknown_backend_is_refused_with_the_known_ones(backend):
    with pytest.raises(
        ValueError, match=r"process_group_backend must be one of .*gloo, .*nccl.*got"
    ):
        build_strategy(process_group_backend=backend)


def test_a_backend_that_torch_was_built_without_is_refused():
    if dist.is_mpi_available():
        pytest.skip("this torch was built with MPI")
    with pytest.raises(ValueError, match=r"process_group_backend must be one of .*got 'mpi'"):
        build_strategy(process_group_backend="mpi")


def test_async_save_is_checked():
    with pytest.raises(TypeError, match="async_save must be True or False, got 'x'"):
        build_strategy(async_save="x", checkpoint="sharded")


def test_a_missing_nvme_path_is_refused_when_the_trainer_is_made(tmp_path):
    missing = tmp_path / "missing"
    strategy = build_strategy(offload_optimizer={"device": "nvme", "nvme_path": missing})
    with pytest.raises(ValueError, match=f"nvme_path must be an existing folder, got '{missing}'"):
        make_trainer("auto", strategy=strategy)
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", ["gloo", "GLOO", "nccl", "cpu:gloo,cuda:nccl", None])
def test_the_backends_of_torch_are_taken(backend):
    assert build_strategy(process_group_backend=backend).process_group_backend == backend


def test_a_backend_that_is_no_name_is_refused():
    with pytest.raises(TypeError, match="process_group_backend must be a name such as 'gloo'"):
        build_strategy(process_group_backend=1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-true"])
def test_float64_parameters_under_another_precision_are_refused_when_the_trainer_is_made(precision):
    message = f'param_dtype="float64" needs precision="64-true", got precision="{precision}"'
    with pytest.raises(ValueError, match=message):
        make_trainer(settings(3, param_dtype="float64"), precision=precision, devices=2)
    make_trainer(settings(3, param_dtype="float64"), precision="64-true", devices=2)


def test_an_unknown_key_is_refused_by_name(build):
    with pytest.raises(TypeError, match="reduce_buckets_size"):
        build(stage=1, reduce_buckets_size=1)


def _stage_for(name):
    return 2 if name == "allgather_bucket_size" else 3


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [-1, -5e8])
def test_a_negative_size_is_refused_by_name(build, name, value):
    with pytest.raises(ValueError, match=rf"{name} must be at least"):
        build(stage=_stage_for(name), **{name: value})


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0.5, "many", True, float("nan"), float("inf"), [1]])
def test_a_size_that_is_no_integer_is_refused_by_name(build, name, value):
    with pytest.raises((TypeError, ValueError), match=rf"{name} must be an integer"):
        build(stage=_stage_for(name), **{name: value})


@pytest.mark.parametrize("name", ["reduce_bucket_size"])
def test_a_bucket_of_no_elements_is_refused(build, name):
    with pytest.raises(ValueError, match=rf"{name} must be at least 1"):
        build(stage=3, **{name: 0})


@pytest.mark.parametrize("name", SIZES)
def test_sizes_may_be_written_as_floats_and_with_units(name):
    for written in (5e8, "500M", "0.5G"):
        config = ZeroConfig(stage=_stage_for(name), **{name: written})
        assert getattr(config, name) == 500_000_000
        assert isinstance(getattr(config, name), int)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", list(STAGE_3_ONLY))
def test_an_option_of_stage_3_is_refused_in_others(build, name, stage):
    with pytest.raises(ValueError, match=rf"{name} needs stage 3, got stage {stage}"):
        build(stage=stage, **{name: STAGE_3_ONLY[name]})


@pytest.mark.parametrize("stage", [0, 3])
def test_an_option_of_stages_1_and_2_is_refused_in_others(build, stage):
    with pytest.raises(ValueError, match=r"allgather_bucket_size needs stage 1 or 2"):
        build(stage=stage, allgather_bucket_size=1)


@pytest.mark.parametrize("name", ["overlap_comm", "broadcast_buffers", "reshard_after_forward"])
@pytest.mark.parametrize("value", [1, "true"])
def test_a_switch_that_is_no_bool_is_refused_by_name(build, name, value):
    with pytest.raises(TypeError, match=rf"{name} must be True or False"):
        build(stage=3, **{name: value})


@pytest.mark.parametrize("name", ["reduce_dtype", "param_dtype"])
@pytest.mark.parametrize("value", ["int8", torch.int64, 32, "float33"])
def test_a_dtype_that_is_not_floating_is_refused_by_name(build, name, value):
    with pytest.raises(ValueError, match=rf"{name} must be one of float16, bfloat16"):
        build(stage=3, **{name: value})


@pytest.mark.parametrize("value", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_may_be_a_name_or_a_dtype(value):
    assert ZeroConfig(reduce_dtype=value).reduce_dtype is torch.bfloat16


@pytest.mark.parametrize("value", [1, "", ["*.norm", 1], torch.float32, [dict]])
def test_an_invalid_keep_float32_is_refused(build, value):
    with pytest.raises(TypeError, match="keep_float32 must be names or patterns"):
        build(stage=3, keep_float32=value)


def test_one_name_or_class_may_stand_for_a_list():
    assert ZeroConfig(keep_float32="head").keep_float32_items == ("head",)
    assert ZeroConfig(keep_float32=[nn.Linear, "head"]).keep_float32_items == (nn.Linear, "head")
    assert ZeroConfig().keep_float32_items == ()


@pytest.mark.parametrize("value", ["disk", True, 3, ["cpu"], {"device": "disk"}])
@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param"])
def test_an_invalid_offload_is_refused(build, name, value):
    with pytest.raises((TypeError, ValueError), match=r"got ('disk'|True|3|\['cpu'\])"):
        build(stage=3, **{name: value})


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_can_be_offloaded_in_stage_3_only(build, stage):
    with pytest.raises(ValueError, match=rf"offload_param needs stage 3, got stage {stage}"):
        build(stage=stage, offload_param="cpu")


@pytest.mark.parametrize("settings", [{"offload_optimizer": "cpu"}, {"overlap_step": True}])
def test_offload_and_overlapped_steps_are_refused_where_nothing_is_sharded(build, settings):
    (name,) = settings
    with pytest.raises(ValueError, match=rf"{name} needs stage 1, 2 or 3, got stage 0"):
        build(stage=0, **settings)


def test_a_bad_value_inside_an_offload_is_refused_by_its_name(build):
    with pytest.raises(ValueError, match="ratio must be from 0"):
        build(stage=1, offload_optimizer={"device": "cpu", "ratio": 7})
    with pytest.raises(ValueError, match="offload_optimizer has no path; it has device"):
        build(stage=1, offload_optimizer={"device": "nvme", "path": "/swap"})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_may_be_a_name_a_mapping_or_a_config(stage):
    config = OffloadConfig("nvme", nvme_path="/swap")
    for value in (config, {"device": "nvme", "nvme_path": "/swap"}):
        assert ZeroConfig(stage=stage, offload_optimizer=value).offload_optimizer == config
    for value in (None, "none", {"device": "none"}):
        assert ZeroConfig(stage=stage, offload_optimizer=value).offload_optimizer is None


class EmptyModule(LightningModule):
    """Nothing to train."""

    def training_step(self, batch, batch_idx):
        return torch.zeros((), requires_grad=True)

    def configure_optimizers(self):
        return None

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(4, 1))


def _fit_error(rank, world_size, spec, module):
    """The error of a fit, and whether there was a process group when it came."""
    try:
        make_trainer(spec).fit(module())
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", dist.is_initialized()
    return None, dist.is_initialized()


def test_a_module_without_parameters_is_refused_before_any_process_group():
    for text, had_group in run_ranks(2, _fit_error, settings(1), EmptyModule, has_group=False):
        assert text is not None
        assert "EmptyModule" in text
        assert "parameter" in text
        assert not had_group


class ForeignModule(MLPModule):
    """The optimizer gets a parameter that is not the module's."""

    def groups(self):
        return [*self.parameters(), torch.nn.Parameter(torch.ones(13, 17))]


def test_an_optimizer_over_foreign_parameters_is_refused_with_their_shape():
    for text, _ in run_ranks(2, _fit_error, settings(1), ForeignModule, has_group=False):
        assert text is not None
        assert text.startswith("ValueError")
        assert "13, 17" in text


def _second_engine(rank, world_size):
    from lightning_zero import Engine

    module = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    config = ZeroConfig(stage=2)
    engine = Engine(module, optimizers=[optimizer], config=config)
    try:
        Engine(module, optimizers=[optimizer], config=config)
    except (ValueError, RuntimeError) as error:
        text = str(error)
    else:
        text = None
    engine.close()
    Engine(module, optimizers=[optimizer], config=config).close()
    return text


def test_a_second_engine_on_one_module_is_refused_until_the_first_is_closed():
    for text in run_ranks(2, _second_engine):
        assert text is not None
        assert "close" in text


class NestedModule(MLPModule):
    """Fits itself with a second strategy while the first is at work."""

    stage = 3
    text = None

    def on_train_start(self):
        trainer = self.trainer
        with pytest.raises((ValueError, RuntimeError)) as raised:
            make_trainer(settings(self.stage)).fit(self)
        self.text = str(raised.value)
        self.trainer = trainer


def _fit_inside_fit(rank, world_size, stage):
    module = NestedModule(ranks=world_size)
    module.stage = stage
    make_trainer(settings(stage)).fit(module)
    return module.text, len(module.losses)


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_second_strategy_on_a_module_in_training_is_refused_and_the_first_goes_on(stage):
    for text, num_steps in run_ranks(2, _fit_inside_fit, stage, has_group=False):
        assert re.search("already|another|two", text), text
        assert num_steps == 4


def test_more_gpus_than_there_are_is_refused():
    count = torch.cuda.device_count() + 1
    with pytest.raises(Exception, match=r"(?i)gpu|cuda"):
        make_trainer(settings(3), accelerator="cuda", devices=count)
    assert not dist.is_initialized()


def test_more_devices_than_the_launcher_started_are_refused():
    for text, had_group in run_ranks(2, _four_devices, has_group=False):
        assert "4" in text
        assert "2" in text
        assert not had_group


def _four_devices(rank, world_size):
    assert os.environ["WORLD_SIZE"] == "2"
    try:
        make_trainer(settings(3), devices=4).fit(MLPModule(ranks=4))
    except ValueError as error:
        return str(error), dist.is_initialized()
    return None, dist.is_initialized()


def test_mps_is_refused_by_name():
    from lightning_zero import ZeroStrategy

    def set_up():
        ZeroStrategy(
            stage=3,
            accelerator=CPUAccelerator(),
            parallel_devices=[torch.device("mps", 0)],
            cluster_environment=LightningEnvironment(),
        ).setup_environment()

    with pytest.raises((ValueError, RuntimeError), match=r"(?i)mps"):
        set_up()
    assert not dist.is_initialized()


@pytest.mark.parametrize("size", [0, -2])
def test_a_group_without_ranks_is_refused(build, size):
    with pytest.raises(
        ValueError, match=f"sharding_group_size must be at least 1 rank, got {size}"
    ):
        build(sharding_group_size=size)


@pytest.mark.parametrize("size", [True, "2", "nodes", 2.5, [2]])
def test_a_group_size_that_is_no_number_of_ranks_is_refused(build, size):
    with pytest.raises(TypeError, match='must be a number of ranks, "node" or None, got'):
        build(sharding_group_size=size)


@pytest.mark.parametrize("size", [2, "node"])
def test_shard_groups_are_refused_in_stage_0(build, size):
    with pytest.raises(ValueError, match="sharding_group_size needs stage 1, 2 or 3, got stage 0"):
        build(stage=0, sharding_group_size=size)


def test_a_trainer_whose_ranks_do_not_fill_shard_groups_is_refused_when_it_is_made():
    message = "sharding_group_size must divide the number of ranks, got 4 with 6"
    with pytest.raises(ValueError, match=message):
        make_trainer(settings(3, sharding_group_size=4), devices=3, num_nodes=2)
    strategy = make_trainer(
        settings(3, sharding_group_size="node"), devices=3, num_nodes=2
    ).strategy
    assert strategy.config.group_size(local_world_size=strategy.num_processes) == 3


def test_ranks_that_are_not_numbered_node_by_node_are_warned_of():
    check_numbering(5, 1, 4)
    with pytest.warns(match="rank 1 runs on node 1, expected on node 0"):
        check_numbering(1, 1, 4)


GIVEN = {
    "reduce_bucket_size": 7, "prefetch_bucket_size": 7, "param_persistence_threshold": 7,
    "unit_classes": "Block", "reshard_after_forward": False, "overlap_comm": False,
    "reduce_dtype": "float64", "param_dtype": "bfloat16", "keep_float32": "head",
    "activation_checkpointing": True, "broadcast_buffers": False, "assume_elementwise": True,
    "offload_optimizer": "cpu", "offload_param": "cpu", "overlap_step": True,
    "sharding_group_size": 2, "on_nonfinite": "skip",
}  # fmt: skip


def test_the_strategy_passes_every_option_to_the_engine():
    assert {*GIVEN, "stage", "allgather_bucket_size"} == {f.name for f in fields(ZeroConfig)}
    assert build_strategy(stage=3, **GIVEN).config == ZeroConfig(stage=3, **GIVEN)
    given = {"stage": 2, "allgather_bucket_size": 7}
    assert build_strategy(**given).config == ZeroConfig(**given)
