"""Unknown options are errors with a similar name, or with what replaces another strategy's."""

from __future__ import annotations

import inspect
import re

import pytest
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_zero
from lightning_zero import Engine, OffloadConfig, ZeroConfig, ZeroStrategy
from lightning_zero.fabric import ZeroStrategy as FabricStrategy
from lightning_zero.health.reports import WAIT_REPORT_S
from lightning_zero.layout.foreign_options import FOREIGN_OPTIONS, REMOVED_OPTIONS

OTHERS = [
    DDPStrategy,
    DeepSpeedStrategy,
    DistributedDataParallel,
    FSDPStrategy,
    FullyShardedDataParallel,
    ModelParallelStrategy,
    fully_shard,
]
# Options that nothing replaces: the error lists ours.
WITHOUT_EQUIVALENT = {
    "model_averaging_period",
    "dim",
    "check_reduction",
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
    "block_size",
    "queue_depth",
    "single_submit",
    "overlap_events",
    "thread_count",
    "allgather_partitions",
    "reduce_scatter",
    "logging_batch_size_per_gpu",
    "logging_level",
    "contiguous_memory_optimization",
    "synchronize_checkpoint_boundary",
}
OWN = set(inspect.signature(ZeroStrategy).parameters)


@pytest.mark.parametrize("kind", [ZeroStrategy, ZeroConfig, FabricStrategy])
def test_a_similar_name_is_suggested(kind):
    with pytest.raises(TypeError, match=r"has no option overlap_com; did you mean overlap_comm\?$"):
        kind(stage=2, overlap_com=True)


@pytest.mark.parametrize("kind", [ZeroStrategy, ZeroConfig, FabricStrategy])
def test_without_a_similar_name_all_are_listed(kind):
    with pytest.raises(TypeError, match=r"has no option xyz; it has .*, overlap_step, .*\.$"):
        kind(stage=2, xyz=True)


def test_a_subclass_is_named_and_may_have_options_of_its_own():
    class Mine(ZeroStrategy):
        def __init__(self, mine=0, **options):
            super().__init__(**options)

    assert Mine(mine=1, stage=2).config.stage == 2
    with pytest.raises(TypeError, match="Mine has no option stagge; did you mean stage"):
        Mine(stagge=2)


def test_from_deepspeed_explains_them_too():
    with pytest.raises(TypeError, match="did you mean overlap_comm"):
        ZeroStrategy.from_deepspeed({"train_batch_size": 4}, world_size=2, overlap_com=True)


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ({"cpu_offload": True}, "offload_param="),
        ({"state_dict_type": "sharded"}, 'checkpoint="sharded"'),
        ({"device_mesh": (2, 4)}, "sharding_group_size"),
        ({"auto_wrap_policy": {object}}, "unit_classes"),
        ({"offload_parameters": True}, "offload_param="),
        ({"max_in_cpu": 1}, "max_in_cpu_bytes"),
        ({"config": "ds.json"}, "from_deepspeed"),
        ({"find_unused_parameters": True}, "leave it out"),
    ],
)
def test_an_option_of_another_strategy_names_ours(option, ours):
    with pytest.raises(TypeError, match=re.escape(ours)):
        ZeroStrategy(**option)


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
def test_every_option_of_another_strategy_is_known(other):
    names = set(inspect.signature(other).parameters) - {"module", "kwargs"}
    assert names - OWN - set(FOREIGN_OPTIONS) - WITHOUT_EQUIVALENT == set()


REMOVED = [(kind, name) for kind in (ZeroStrategy, ZeroConfig, FabricStrategy, Engine)
           for name in REMOVED_OPTIONS]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), REMOVED)
def test_a_removed_option_is_gone_and_the_error_names_what_to_do(kind, name):
    text = rf"has no option {name} any more; (leave it out: |use (timeout|prefetch_bucket_size), )"
    with pytest.raises(TypeError, match=text):
        kind(**{name: None})


def test_the_removed_wait_is_the_one_that_is_reported():
    assert f"a wait of {WAIT_REPORT_S:g} s " in REMOVED_OPTIONS["wait_report_s"]


def test_no_option_of_ours_is_said_to_be_foreign():
    assert not OWN & {*FOREIGN_OPTIONS, *REMOVED_OPTIONS}


def test_replacements_exist():
    ours = OWN | set(inspect.signature(OffloadConfig).parameters)
    for text in FOREIGN_OPTIONS.values():
        for name in re.findall(r"(?<![.\w])([a-z_]+)=", text):
            assert name in ours | {"precision", "scaler"}, text
        for name in re.findall(r"lightning_zero\.(\w+)", text):
            assert name in lightning_zero.__all__


def test_the_signature_stays():
    assert list(inspect.signature(ZeroStrategy).parameters)[:2] == ["stage", "reduce_bucket_size"]
    assert "overlap_comm" in inspect.signature(ZeroConfig).parameters
