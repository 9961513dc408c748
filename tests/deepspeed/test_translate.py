"""A DeepSpeed user's file gives the same training, or an error with the reason."""

import json

import pytest
import torch

from lightning_zero import OffloadConfig, ZeroConfig, ZeroStrategy
from lightning_zero.deepspeed import Translation, translate
from tests.support.fitting import make_trainer
from tests.support.models import MLPModule
from tests.support.warm import run_ranks

FROM_THE_DOCS = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 1,
    "fp16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": 5e8,
        "offload_optimizer": {"device": "cpu"},
    },
}
HUGGING_FACE = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
STAGE_2 = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "stage3_prefetch_bucket_size": 5e7,
    },
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
}
STAGE_3 = {
    "zero_optimization": {
        "stage": 3,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 0,
    },
    "train_micro_batch_size_per_gpu": 1,
    "communication_data_type": "bf16",
    "gradient_clipping": 0,
}
TABLE = [
    pytest.param(
        FROM_THE_DOCS,
        ZeroConfig(
            stage=3, overlap_comm=True, reduce_bucket_size=500_000_000, offload_optimizer="cpu"
        ),
        {"precision": "16-mixed", "accumulate_grad_batches": 1},
        8,
        {"contiguous_gradients", "sub_group_size"},
        id="the example of the documentation",
    ),
    pytest.param(
        HUGGING_FACE,
        ZeroConfig(stage=3),
        {},
        None,
        {
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_gather_16bit_weights_on_model_save",
            "fp16.initial_scale_power",
            "fp16.hysteresis",
            "steps_per_print",
            "wall_clock_breakdown",
        },
        id="Hugging Face, all auto",
    ),
    pytest.param(
        STAGE_2,
        ZeroConfig(
            stage=2,
            allgather_bucket_size=2 * 10**8,
            overlap_comm=False,
            reduce_bucket_size=2 * 10**8,
        ),
        {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
        4,
        {"allgather_partitions", "reduce_scatter", "stage3_prefetch_bucket_size"},
        id="stage 2 with a setting of stage 3",
    ),
    pytest.param(
        STAGE_3,
        ZeroConfig(
            stage=3,
            prefetch_bucket_size=0,
            param_persistence_threshold=10_000,
            reduce_dtype=torch.bfloat16,
        ),
        {"accumulate_grad_batches": 1},
        1,
        {"stage3_max_live_parameters"},
        id="stage 3 with sizes of zero",
    ),
    pytest.param({}, ZeroConfig(stage=0), {}, None, set(), id="an empty file"),
    pytest.param(
        {"zero_optimization": False}, ZeroConfig(stage=0), {}, None, set(), id="the old false"
    ),
    pytest.param(
        {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 7}},
        ZeroConfig(stage=3, prefetch_bucket_size=7),
        {},
        None,
        set(),
        id="the short names of stage 3",
    ),
    pytest.param(
        {"torch_autocast": {"enabled": True, "dtype": "float16"}, "bf16": {"enabled": False}},
        ZeroConfig(stage=0),
        {"precision": "16-mixed"},
        None,
        set(),
        id="torch_autocast",
    ),
    pytest.param(
        {"bfloat16": {"enabled": True, "check_grad_overflow": True}, "prescale_gradients": True},
        ZeroConfig(stage=0),
        {"precision": "bf16-mixed"},
        None,
        {"bfloat16.check_grad_overflow", "prescale_gradients"},
        id="the old name of bf16",
    ),
]


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "ds_config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def zero(**settings):
    return {"zero_optimization": {"stage": 3, **settings}}


def ignored_by(translation):
    """Paths of the settings without effect; those of zero_optimization are relative to it."""
    return {path.removeprefix("zero_optimization.") for path in translation.ignored}


@pytest.mark.parametrize(("source", "config", "trainer_kwargs", "batch_size", "ignored"), TABLE)
def test_a_file_means_what_it_means_to_deepspeed(
    write, source, config, trainer_kwargs, batch_size, ignored
):
    found = translate(write(source), world_size=4)
    assert found.config == config
    assert found.trainer_kwargs == trainer_kwargs
    assert found.batch_size_per_device == batch_size
    assert ignored_by(found) == ignored
    assert translate(source, world_size=4) == translate(str(write(source)), world_size=4) == found


def test_every_auto_is_named_with_what_to_set(write):
    found = translate(write(HUGGING_FACE))
    message = found.message()
    for line in (
        'bf16.enabled: Trainer(precision="bf16-mixed")',
        'fp16.enabled: Trainer(precision="16-mixed")',
        "gradient_clipping: Trainer(gradient_clip_val=...)",
        "gradient_accumulation_steps: Trainer(accumulate_grad_batches=...)",
        "train_micro_batch_size_per_gpu: batch_size of your DataLoader",
        "train_batch_size: batch_size of your DataLoader",
        "zero_optimization.reduce_bucket_size: nothing: the default",
    ):
        assert f"  {line}" in message
    assert len(found.autos) == json.dumps(HUGGING_FACE).count('"auto"')
    assert translate({"bf16": "auto"}).autos == {"bf16": 'Trainer(precision="bf16-mixed")'}
    assert '"auto"' not in translate(STAGE_2).message()


# Offload.


def nvme(**settings):
    return OffloadConfig("nvme", nvme_path="/nvme", **settings)


def at_nvme(**settings):
    return {"device": "nvme", "nvme_path": "/nvme", **settings}


OFFLOADS = [
    ({"offload_optimizer": {"device": "cpu"}}, {"offload_optimizer": OffloadConfig("cpu")}, set()),
    (
        {"offload_optimizer": {"device": "cpu", "pin_memory": False, "ratio": 0.3}},
        {"offload_optimizer": OffloadConfig("cpu", pin_memory=False, ratio=0.3)},
        set(),
    ),
    (
        {"offload_optimizer": at_nvme(pin_memory=False, fast_init=False)},
        {"offload_optimizer": nvme(pin_memory=False)},
        {"offload_optimizer.fast_init"},
    ),
    (
        {"offload_optimizer": at_nvme(pipeline_read=True, pipeline_write=True)},
        {"offload_optimizer": nvme()},
        {"offload_optimizer.pipeline_read", "offload_optimizer.pipeline_write"},
    ),
    (
        {"offload_param": at_nvme(buffer_count=5, buffer_size=1e8, max_in_cpu=1e9)},
        {"offload_param": nvme()},
        {"offload_param.buffer_count", "offload_param.buffer_size", "offload_param.max_in_cpu"},
    ),
    (
        {"offload_param": {"device": "cpu", "buffer_count": 5, "buffer_size": 1e8}},
        {"offload_param": OffloadConfig("cpu")},
        {"offload_param.buffer_count", "offload_param.buffer_size"},
    ),
    (
        {"offload_param": {"device": "cpu", "nvme_path": "/nvme"}},
        {"offload_param": OffloadConfig("cpu")},
        {"offload_param.nvme_path"},
    ),
    (
        {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 1e9},
        {"offload_optimizer": OffloadConfig("cpu")},
        {"sub_group_size"},
    ),
    (
        {"cpu_offload": False, "offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": OffloadConfig("cpu")},
        set(),
    ),
    ({"cpu_offload": False, "cpu_offload_params": False}, {}, set()),
    ({"cpu_offload_use_pin_memory": True}, {}, {"cpu_offload_use_pin_memory"}),
]


@pytest.mark.parametrize(
    ("settings", "expected", "ignored"), OFFLOADS, ids=[str(case[0]) for case in OFFLOADS]
)
def test_offload_is_where_deepspeed_has_it(write, settings, expected, ignored):
    found = translate(write(zero(**settings)))
    assert found.config == ZeroConfig(stage=3, **expected)
    assert ignored_by(found) == ignored


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("settings", "expected", "ignored"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, "cpu", set()),
        # In these stages DeepSpeed's "nvme" means CPU memory, for the entire optimizer.
        ({"offload_optimizer": at_nvme()}, "cpu", {"offload_optimizer.nvme_path"}),
        (
            {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            "cpu",
            {"offload_optimizer.ratio"},
        ),
        ({"offload_param": {"device": "cpu"}}, None, {"offload_param.device"}),
        ({"offload_param": {"device": "nvme"}}, None, {"offload_param.device"}),
    ],
    ids=str,
)
def test_below_stage_3_parameters_stay_and_the_optimizer_is_offloaded_to_cpu(
    settings, expected, ignored, stage
):
    found = translate({"zero_optimization": {"stage": stage, **settings}})
    assert found.config == ZeroConfig(stage=stage, offload_optimizer=expected)
    assert ignored_by(found) == ignored


@pytest.mark.parametrize("key", ["offload_optimizer", "offload_param"])
def test_stage_0_offloads_nothing_and_reports_it(key):
    found = translate({"zero_optimization": {"stage": 0, key: {"device": "cpu"}}})
    assert found.config == ZeroConfig(stage=0)
    assert found.ignored == (f"zero_optimization.{key}.device",)
    assert found.message().endswith(f"have no effect here: {found.ignored[0]}")


def test_the_strategy_offloads_as_in_the_file(write):
    path = write(zero(offload_optimizer=at_nvme(), offload_param={"device": "cpu"}))
    config = ZeroStrategy.from_deepspeed(path).config
    assert (config.offload_optimizer, config.offload_param) == (nvme(), OffloadConfig("cpu"))
    lower = ZeroStrategy.from_deepspeed(path, stage=2).config
    assert (lower.offload_optimizer, lower.offload_param) == (nvme(), None)
    assert ZeroStrategy.from_deepspeed(path, stage=0).config.offload_optimizer is None
    assert ZeroStrategy.from_deepspeed(path, offload_param=None).config.offload_param is None


@pytest.mark.parametrize("off", [None, False, {}, {"device": "none"}, {"device": None}])
def test_offload_that_is_off_is_silent(off):
    found = translate({**zero(offload_optimizer=off), "gradient_clipping": 1.0})
    assert found.ignored == ()
    assert found.warnings == ()
    assert found.message() == ""


def test_a_silent_file_warns_that_clipping_depends_on_the_version_of_deepspeed():
    assert "1.0 since 0.19.3" in translate({}).warnings[0]
    assert "gradient_clip_val" not in translate({}).trainer_kwargs
    for said in (0, 0.5, "auto"):
        assert not translate({"gradient_clipping": said}).warnings


def test_the_message_names_each_ignored_setting_once():
    message = translate(FROM_THE_DOCS, world_size=4).message()
    assert message.endswith(
        "these settings have no effect here: zero_optimization.contiguous_gradients, "
        "zero_optimization.sub_group_size"
    )


# Batch sizes: train_batch_size = micro-batch x accumulation x world size.


@pytest.mark.parametrize(
    ("total", "micro", "steps", "world_size", "expected"),
    [
        (32, 4, 2, 4, (2, 4)),
        (32, None, 2, 4, (2, 4)),
        (32, 4, None, 4, (2, 4)),
        (None, 4, 2, 4, (2, 4)),
        (32, None, None, 4, (1, 8)),
        (None, 4, None, 4, (1, 4)),
        (None, None, 2, 4, (2, None)),
        (None, None, None, 4, (None, None)),
        (32, 4, 2, None, (2, 4)),
        (32, None, 2, None, (2, None)),
        (32, None, None, None, (1, None)),
        (None, 4, None, None, (1, 4)),
        (32, "auto", 2, 4, (2, 4)),
        (32, 4, "auto", 4, (2, 4)),
        (32, "auto", "auto", 4, (None, None)),
        ("auto", 4, "auto", 4, (None, 4)),
    ],
)
def test_the_third_batch_size_follows_from_two(total, micro, steps, world_size, expected):
    given = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    source = {key: value for key, value in given.items() if value is not None}
    found = translate(source, world_size=world_size)
    steps = found.trainer_kwargs.get("accumulate_grad_batches")
    assert (steps, found.batch_size_per_device) == expected


@pytest.mark.parametrize(
    ("source", "world_size"),
    [
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 3),
        ({"train_batch_size": 2}, 4),
        ({"train_batch_size": 30, "gradient_accumulation_steps": 4}, 2),
        (
            {
                "train_batch_size": 32,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 1,
            },
            4,
        ),
    ],
)
def test_batch_sizes_that_do_not_multiply_are_refused(source, world_size):
    with pytest.raises(ValueError, match=r"train_batch_size \d+ of the .* must be .* x .* x"):
        translate(source, world_size=world_size)


def test_a_global_batch_size_without_world_size_warns_about_the_data_loader():
    (warning, _) = translate({"train_batch_size": 32, "gradient_accumulation_steps": 2}).warnings
    assert "batch_size = 32 / (2 x number of devices)" in warning


def fit_with(rank, world_size, file, **options):
    """Loss at the end of a fit, or the error of the set-up."""
    file = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, **file}
    strategy = ZeroStrategy.from_deepspeed(file, world_size=options.pop("planned", None))
    options = {**strategy.trainer_kwargs, **options}
    trainer = make_trainer("ddp", max_steps=1, strategy=strategy, **options)
    try:
        trainer.fit(MLPModule(ranks=world_size))
    except ValueError as error:
        return str(error)
    return trainer.global_step


FILE = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}


def fits_with(rank, world_size):
    steps = {**FILE, "gradient_accumulation_steps": 2}
    return [
        fit_with(rank, world_size, steps),
        fit_with(rank, world_size, steps, accumulate_grad_batches=1),
        fit_with(rank, world_size, FILE, planned=4),
        fit_with(rank, world_size, {"train_batch_size": 7}),
        fit_with(rank, world_size, {**FILE, "gradient_accumulation_steps": "auto"}),
        fit_with(rank, world_size, FILE),
    ]


def test_batch_sizes_that_do_not_match_the_ranks_are_an_error_at_set_up():
    for right, forgotten, other_ranks, odd, auto, unknown in run_ranks(
        2, fits_with, has_group=False
    ):
        assert right == 1
        for error in (forgotten, other_ranks, auto, unknown):
            assert "train_batch_size 16 of the DeepSpeed file must be batch size x" in error
            assert "got 4 x 1 x 2; pass **strategy.trainer_kwargs to the Trainer" in error
            assert "and world_size to from_deepspeed" in error
        assert "train_batch_size 7" in odd
        assert "got ? x 1 x 2; pass **strategy.trainer_kwargs" in odd


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True])
def test_a_world_size_is_an_integer(world_size):
    with pytest.raises(ValueError, match="world_size"):
        translate({}, world_size=world_size)


# Precision.


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        ({}, None),
        ({"communication_data_type": "fp16"}, torch.float16),
        ({"communication_data_type": "FP32"}, torch.float32),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, torch.bfloat16),
    ],
)
def test_gradients_are_summed_in_float32_unless_lowered(source, dtype):
    found = translate(source)
    assert found.config.reduce_dtype == dtype
    assert found.ignored == ()


# Errors.


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            zero(reduce_bucket_size=-1),
            "zero_optimization.reduce_bucket_size must be an integer",
        ),
        (zero(reduce_bucket_size=1.5), "reduce_bucket_size must be an integer"),
        (zero(reduce_bucket_size=True), "reduce_bucket_size must be an integer"),
        (zero(reduce_bucket_size="5e8"), "got '5e8'"),
        (zero(overlap_comm=1), "overlap_comm must be true or false, got 1"),
        (
            zero(stage3_prefetch_bucket_size=1, prefetch_bucket_size=2),
            "same setting with two values",
        ),
        (zero(offload_param={"device": "disk"}), 'must be "none", "cpu" or "nvme", got \'disk\''),
        (zero(offload_optimizer={"device": "hpu"}), "offload_optimizer.device must be"),
        (zero(offload_optimizer={"device": "cpu", "ratio": 2}), "ratio must be a number from 0"),
        (zero(offload_optimizer={"device": "cpu", "pin_memory": 1}), "pin_memory must be true"),
        (zero(offload_param={"device": "nvme", "nvme_path": 3}), "nvme_path must be the path"),
        (
            {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp32"}},
            "data_types.grad_accum_dtype and communication_data_type are the same setting",
        ),
        ({"zero_optimization": {"stage": 4}}, "stage must be 0, 1, 2 or 3, got 4"),
        ({"zero_optimization": {"stage": "auto"}}, "stage must be 0, 1, 2 or 3, got 'auto'"),
        ({"zero_optimization": {"stage": True}}, "stage must be 0, 1, 2 or 3, got True"),
        ({"zero_optimization": "stage 3"}, "zero_optimization must be a section"),
        ({"fp16": True}, "fp16 must be a section"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled must be true or false"),
        (zero(reduce_bucket_size=0), "reduce_bucket_size must be an integer of at least 1, got 0"),
        ({"zero_optimization": True}, "zero_optimization must be a section in braces, got True"),
        ({"zero_optimization": 2}, "zero_optimization must be a section in braces, got 2"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are enabled"),
        ({"gradient_clipping": float("inf")}, "gradient_clipping must be a number"),
        ({"gradient_clipping": True}, "gradient_clipping must be a number"),
        ({"gradient_accumulation_steps": 0}, "at least 1, got 0"),
        ({"train_batch_size": "32"}, "train_batch_size must be an integer"),
        ({"communication_data_type": "int8"}, "fp16, bf16 or fp32, got 'int8'"),
    ],
)
def test_a_mistake_in_the_file_is_named(write, source, message):
    with pytest.raises(ValueError, match=message):
        translate(write(source))


UNKNOWN = [
    ({"train_batchsize": 1}, "train_batchsize (did you mean train_batch_size?)"),
    ({"zzz": 1}, "zzz"),
    (
        zero(reduce_bucketsize=1),
        "zero_optimization.reduce_bucketsize (did you mean reduce_bucket_size",
    ),
    (
        zero(stage3_prefetch_bucket=1),
        "zero_optimization.stage3_prefetch_bucket (did you mean stage3_",
    ),
    ({"fp16": {"enable": True}}, "fp16.enable (did you mean enabled?)"),
    (zero(offload_param={"path": "/x"}), "zero_optimization.offload_param.path"),
    (zero(offload_optimizer={"buffer_size": 1}), "zero_optimization.offload_optimizer.buffer_size"),
]


@pytest.mark.parametrize(("source", "listed"), UNKNOWN, ids=str)
def test_an_unknown_key_is_listed_in_the_warning_with_a_similar_one(source, listed):
    assert f"these settings have no effect here: {listed}" in translate(source).message()


CHANGES_THE_TRAINING = [
    {"sparse_gradients": True},
    {"sparse_gradients": "yes"},
    {"gradient_allreduce_op": "sum"},
    {"managed_gradient_accumulation": False},
    {"amp": {"enabled": True, "opt_level": "O1"}},
    {"fp16": {"enabled": True, "loss_scale": 128}},
    zero(cpu_offload=True),
    zero(cpu_offload_param=True),
    zero(cpu_offload_params=True),
    {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}},
    {"data_efficiency": {"enabled": True}},
    {"compression_training": {"sparse_pruning": {"shared_parameters": {"enabled": True}}}},
    {"progressive_layer_drop": {"enabled": True, "theta": 0.5}},
    {"pipeline": {"stages": 2}},
    {"sparse_attention": {"mode": "fixed"}},
    {"elasticity": {"enabled": True}},
    {"tensor_parallel": {"autotp_size": 2}},
    {"sequence_parallel_size": 2},
    {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    {"bf16": {"bf16_optimizer_states": "yes"}},
    {"data_types": {"param_dtype": "bf16"}},
    {"data_types": {"buffer_dtype": "bf16"}},
    zero(zero_quantized_weights=True),
    zero(zero_quantized_gradients=True),
    zero(zero_hpz_partition_size=8),
    zero(zenflow={"topk_ratio": 0.1}),
]


@pytest.mark.parametrize("source", CHANGES_THE_TRAINING, ids=str)
def test_what_changes_the_training_is_refused_with_what_to_do(source):
    with pytest.raises(ValueError, match=r"would change the training and is not supported: .+"):
        translate(source)


@pytest.mark.parametrize(
    "source",
    [
        {"sparse_gradients": False},
        {"gradient_allreduce_op": "mean"},
        {"curriculum_learning": {"enabled": False}},
        {"compression_training": {"sparse_pruning": {"shared_parameters": {"enabled": False}}}},
        {"amp": {"enabled": "auto"}},
        {"tensor_parallel": {"autotp_size": 1}},
        zero(zero_quantized_weights=False, zero_hpz_partition_size=1, mics_shard_size=-1),
    ],
    ids=str,
)
def test_the_same_settings_turned_off_are_accepted(source):
    assert translate(source).ignored == ()


def test_groups_of_mics_are_sharding_groups_in_stage_3():
    assert translate(zero(stage=3, mics_shard_size=8)).config.sharding_group_size == 8
    assert translate(zero(stage=3, mics_shard_size=-1)).config.sharding_group_size is None
    lower = translate(zero(stage=2, mics_shard_size=8))
    assert lower.config.sharding_group_size is None
    assert lower.ignored == ("zero_optimization.mics_shard_size",)
    with pytest.raises(ValueError, match="mics_shard_size"):
        translate(zero(stage=3, mics_shard_size="all"))
    strategy = ZeroStrategy.from_deepspeed(zero(stage=3, mics_shard_size=8), stage=2)
    assert strategy.config.sharding_group_size == 8


def test_a_file_that_is_not_json_is_named(write):
    with pytest.raises(ValueError, match=r"ds_config.json is not valid JSON: .*omments"):
        translate(write('{"train_batch_size": 32,  // all devices\n}'))
    with pytest.raises(ValueError, match="must be one section in braces, got list"):
        translate(write("[]"))
    with pytest.raises(ValueError, match="train_batch_size appears twice"):
        translate(write('{"train_batch_size": 32, "train_batch_size": 64}'))
    with pytest.raises(FileNotFoundError, match="no_such_file"):
        translate("no_such_file.json")
    with pytest.raises(TypeError, match="a path or a mapping"):
        translate(3)


def test_a_translation_needs_settings_and_arguments_of_the_trainer_alone():
    made = Translation(ZeroConfig(stage=2), {"precision": "bf16-mixed"})
    assert made.batch_size_per_device is None
    assert made.message() == ""
