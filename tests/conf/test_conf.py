"""Every file in conf/ composes, and every choice of groups builds its strategy and its Trainer."""

import inspect
import pickle
import re
from importlib.util import find_spec

import lightning.pytorch as pl
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf, open_dict

from lightning_zero import ZeroStrategy
from lightning_zero.callbacks import ZeroMonitor
from lightning_zero.conf import apply_extras, make_trainer, optimized_metric
from lightning_zero.launch.trainer import RunSettings
from lightning_zero.observe import loggers
from tests.support.composed import CONF, composed

FILES = sorted(CONF.rglob("*.yaml"))


CHOICES = {
    folder.relative_to(CONF).as_posix(): sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted({path.parent for path in FILES} - {CONF})
}
COMBINATIONS = [
    *(("stage3", "default", overlap) for overlap in CHOICES["overlap"]),
    *(("stage3", bucket, "comm") for bucket in CHOICES["bucket"] if bucket != "default"),
    *((zero, "large", "all") for zero in CHOICES["zero"]),
]
STAGES = {"off": 0, "stage1": 1, "stage2": 2, "stage3": 3, "auto": 3}  # auto: until it is set up

# What `instantiate` raises: Hydra 1.3 its own exception, Hydra 1.4 the one of the class.
REFUSED = (HydraException, ValueError, ModuleNotFoundError)

# Groups that need an optional dependency.
NEEDS = {
    "hparams_search=optuna": ("hydra_plugins.hydra_optuna_sweeper", "sweep"),
    "logger=tensorboard": ("tensorboard", "tensorboard"),
    "precision=float8": ("torchao", "float8"),
    "logger=many_loggers": ("tensorboard", "tensorboard"),
}


def skip_without_extra(*overrides):
    for package, extra in (NEEDS[word] for word in overrides if word in NEEDS):
        pytest.importorskip(package, reason=f"needs the extra {extra}")


@pytest.fixture
def in_job(tmp_path):
    """Composes as inside a job: with its directory and Hydra's settings."""

    def compose_job(*overrides, mode=RunMode.RUN, name="train"):
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            config = compose(name, overrides=list(overrides), return_hydra_config=True)
        with open_dict(config):
            config.hydra.runtime.output_dir = str(tmp_path)
            config.hydra.mode = mode
            config.hydra.job.num = 0
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
        return config

    yield compose_job
    HydraConfig.instance().cfg = None


@pytest.fixture(scope="module")
def plain():
    """The main job with all defaults."""
    return composed()


def overrides_of(path):
    """Overrides of the command in the first line of a file, which describes it."""
    lines = path.read_text().splitlines()
    comment = lines[1] if lines[0].startswith("# @package ") else lines[0]  # must be line 1
    pattern = (
        r"# (?P<what>.+): (srun |PYTHONPATH=examples )?python examples/(train|eval)\.py"
        r"(?P<overrides>.*)"
    )
    words = re.fullmatch(pattern, comment)
    assert words, f"{path}: {comment}"
    overrides = words["overrides"].split()
    if path.parent != CONF:
        assert f"{path.parent.relative_to(CONF).as_posix()}={path.stem}" in overrides, path
    return overrides


def test_every_file_begins_with_a_description_and_its_command():
    for path in FILES:
        overrides_of(path)


# Groups of which any choices go together; others change several groups, or belong to Hydra.
BESIDE = {
    group: choices
    for group, choices in CHOICES.items()
    if "/" not in group and group not in ("debug", "experiment", "hparams_search")
}


@pytest.mark.parametrize("number", range(max(map(len, BESIDE.values()))))
def test_every_choice_composes_beside_those_of_other_groups(number):
    """One choice of each group: together the cases have all."""
    chosen = {group: choices[number % len(choices)] for group, choices in BESIDE.items()}
    if chosen["trainer"] == "ddp":  # it has no stage
        del chosen["zero"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        words = [f"{group}={choice}" for group, choice in chosen.items()]
        config = compose("train", overrides=words, return_hydra_config=True)
    found = dict(config.hydra.runtime.choices)
    assert {group: found[group] for group in chosen} == chosen
    assert config.trainer._target_ == "lightning.pytorch.Trainer"
    assert {"precision", "logger"} <= config.trainer.keys()


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_composes_with_its_command(path):
    overrides = overrides_of(path)
    skip_without_extra(*overrides)
    config = composed(*(word for word in overrides if word != "-m" and "," not in word))
    assert config.trainer._target_ == "lightning.pytorch.Trainer"
    if "trainer=ddp" in overrides:
        assert config.trainer.strategy == "ddp"
    else:
        assert config.trainer.strategy._target_ == "lightning_zero.ZeroStrategy"
    assert {"precision", "logger"} <= config.trainer.keys()


@pytest.mark.default_cases("stage3-default-none", "stage3-auto-comm", "stage1-large-all")
@pytest.mark.parametrize(("zero", "bucket", "overlap"), COMBINATIONS)
def test_every_choice_of_zero_bucket_and_overlap_builds_the_strategy(zero, bucket, overlap):
    config = composed(f"zero={zero}", f"bucket={bucket}", f"overlap={overlap}")
    if (zero, overlap) == ("off", "all"):
        with pytest.raises(REFUSED, match="overlap_step needs stage 1, 2 or 3"):
            instantiate(config.trainer.strategy)
        return
    strategy = instantiate(config.trainer.strategy)
    assert isinstance(strategy, ZeroStrategy)
    assert strategy.config.stage == STAGES[zero]
    assert strategy.config.overlap_comm == (overlap != "none")
    assert strategy.config.reduce_bucket_size == config.trainer.strategy.reduce_bucket_size


@pytest.mark.default_cases("llama2_7b")
@pytest.mark.parametrize("choice", CHOICES["model"])
def test_every_model_is_built_from_its_file(choice):
    config = composed(f"model={choice}", "data.context=32")
    with torch.device("meta"):
        model = instantiate(config.model)
    assert model.gpt.config.context == 32
    numel = sum(parameter.numel() for parameter in model.parameters())
    expected = {
        "tiny": 0.7e6,
        "llama_mini": 0.6593e6,
        "gpt_25m": 25e6,
        "gpt_125m": 85e6,
        "gpt_1b": 1.2e9,
        "llama2_7b": 6.738e9,
        "llama2_70b": 68.977e9,
    }
    assert numel == pytest.approx(expected[choice], rel=0.001 if "llama" in choice else 0.1)


BUILT = ["trainer", "precision", "callbacks", "logger", "paths", "debug", "experiment"]
ON_CPU = ["trainer.accelerator=cpu", "trainer.devices=1", "trainer.num_nodes=1"]


@pytest.mark.default_cases("precision=bf16_mixed", "logger=many_loggers")
@pytest.mark.parametrize(
    "override", [f"{group}={choice}" for group in BUILT for choice in CHOICES[group]]
)
def test_every_choice_builds_the_trainer(in_job, override):
    skip_without_extra(override)
    trainer = make_trainer(in_job(override, *ON_CPU))
    assert isinstance(trainer, pl.Trainer)
    assert isinstance(trainer.strategy, DDPStrategy if override == "trainer=ddp" else ZeroStrategy)
    names = [type(logger).__name__ for logger in trainer.loggers]
    expected = {
        "logger=none": [],
        "logger=wandb": ["WandbLogger"],
        "logger=tensorboard": ["TensorBoardLogger"],
        "logger=many_loggers": ["ContinuedCSVLogger", "TensorBoardLogger", "WandbLogger"],
    }
    usual = [] if override.startswith("debug=") else ["ContinuedCSVLogger"]
    assert names == expected.get(override, usual)


@pytest.mark.parametrize("choice", CHOICES["data"])
def test_every_choice_of_data_is_built(choice, tmp_path):
    data = instantiate(composed(f"data={choice}", f"paths.data_dir={tmp_path}").data)
    assert (data.root == tmp_path) == (choice == "folder")


def test_the_arguments_of_the_trainer_are_all_there_at_their_defaults():
    shown = composed("trainer=default", "precision=fp32", "paths.output_dir=run").trainer
    of_groups = {"strategy", "callbacks", "precision", "default_root_dir"}
    for name, parameter in list(inspect.signature(pl.Trainer).parameters.items()):
        if name not in of_groups:
            assert shown[name] == parameter.default, name
    assert set(shown) - {"_target_"} <= set(inspect.signature(pl.Trainer).parameters)
    assert shown.default_root_dir == "run"


@pytest.mark.default_cases("trainer=cpu-32-true", "trainer=gpu-bf16-mixed")
@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("trainer=cpu", "32-true"),
        ("trainer.accelerator=cuda", "bf16-mixed"),
        ("trainer=gpu", "bf16-mixed"),
        ("precision=bf16_mixed", "bf16-mixed"),
    ],
)
def test_a_cpu_computes_in_float32_by_default(word, expected):
    assert composed("trainer=cpu", word).trainer.precision == expected


def test_two_loggers_are_both_used(in_job):
    words = ["logger=[csv,wandb]", "logger.csv.name=numbers", "tags=[a,b]"]
    csv, wandb = make_trainer(in_job(*words, *ON_CPU)).loggers
    assert csv.name == "numbers"
    assert wandb._wandb_init["tags"] == ["a", "b"]
    assert wandb._wandb_init["job_type"] == "train"


def test_a_list_that_a_logger_takes_stays_unresolved_in_what_is_logged(in_job, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "never")
    config = in_job("logger=[csv,wandb]", "tags=['${oc.env:MY_TOKEN}']", *ON_CPU)
    trainer = make_trainer(config)
    assert trainer.loggers[1]._wandb_init["tags"] == ["never"]
    (logs,) = (each for each in trainer.callbacks if isinstance(each, RunSettings))
    assert "never" not in str(logs._settings)
    assert "never" not in OmegaConf.to_yaml(config)


@pytest.mark.default_cases("logger=none")
@pytest.mark.parametrize("word", ["logger=none", "trainer.logger=false", "logger.csv=null"])
def test_without_a_logger_the_learning_rate_is_not_watched(in_job, word):
    trainer = make_trainer(in_job(word, *ON_CPU))
    assert trainer.loggers == []
    kinds = {type(callback) for callback in trainer.callbacks}
    assert {ModelCheckpoint, EarlyStopping, ZeroMonitor} <= kinds
    assert LearningRateMonitor not in kinds


def test_tensorboard_that_is_not_installed_is_named(in_job, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(REFUSED, match=r"pip install \"lightning-zero\[tensorboard\]\""):
        make_trainer(in_job("logger=tensorboard", *ON_CPU))


@pytest.mark.default_cases("trainer.strategy=ddp")
@pytest.mark.parametrize("word", ["trainer=ddp", "trainer.strategy=ddp"])
def test_the_monitor_is_left_out_where_another_strategy_trains(in_job, word):
    trainer = make_trainer(in_job(word, *ON_CPU))
    assert isinstance(trainer.strategy, DDPStrategy)
    kinds = {type(callback) for callback in trainer.callbacks}
    assert {ModelCheckpoint, LearningRateMonitor} <= kinds
    assert ZeroMonitor not in kinds


def test_other_settings_of_the_strategy_do_not_matter_to_ddp():
    words = ["trainer=ddp", "bucket=large", "offload=cpu", "sharding=node", "overlap=all"]
    assert composed(*words).trainer.strategy == "ddp"


def test_settings_without_a_strategy_are_refused(in_job):
    with pytest.raises(ValueError, match=r"settings \(.*but no strategy; add zero="):
        make_trainer(in_job("~zero", *ON_CPU))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_job_for_gpus_names_the_choice_that_runs_without(in_job):
    with pytest.raises(ValueError, match=r"accelerator=cuda needs a GPU.*; add trainer=cpu"):
        make_trainer(in_job("experiment=gpt_1b_offload"))


def test_an_unknown_name_of_a_strategy_gets_the_nearest_one(in_job):
    with pytest.raises(ValueError, match=r"got 'zero2_offloads'; did you mean zero2_offload\?"):
        make_trainer(in_job("trainer.strategy=zero2_offloads", *ON_CPU))


@pytest.mark.default_cases("fdr", "overfit")
@pytest.mark.parametrize("choice", CHOICES["debug"])
def test_debugging_is_one_quiet_process_and_writes_nothing_but_its_log(in_job, choice, tmp_path):
    config = in_job("logger=csv", "trainer=node", f"debug={choice}")
    assert config.task_name == "debug"
    assert (config.trainer.accelerator, config.trainer.devices) == ("cpu", 1)
    trainer = make_trainer(config)
    assert not trainer.checkpoint_callbacks
    changed = {"fdr": ("fast_dev_run", True), "overfit": ("overfit_batches", 3)}
    changed |= {"limit": ("limit_train_batches", 0.01), "profiler": ("profiler", "simple")}
    name, value = changed.get(choice, ("limit_train_batches", 20))
    assert config.trainer[name] == value
    assert list(tmp_path.iterdir()) == []


def test_names_of_checkpoints_can_be_typed_as_an_override(in_job):
    (callback,) = make_trainer(in_job(*ON_CPU)).checkpoint_callbacks
    metrics = {"step": 600, "epoch": 0, "val/bits_per_byte": torch.tensor(2.5)}
    path = callback.format_checkpoint_name(metrics)
    assert path.endswith("checkpoints/step_000600.ckpt")
    assert composed(f"ckpt_path={path}").ckpt_path == path
    assert callback.save_last
    assert callback.monitor == "val/bits_per_byte"


def test_the_usual_keys_are_at_the_root(plain):
    config = plain
    assert (config.task_name, config.train, config.test) == ("train", True, False)
    assert (config.ckpt_path, config.seed, list(config.tags)) == (None, 0, ["dev"])
    words = ["trainer.limit_train_batches=2", "trainer.deterministic=true", "trainer.max_epochs=3"]
    config = composed(*words, "seed=null", "tags=[a]", "test=true")
    assert config.trainer.limit_train_batches == 2
    assert config.trainer.deterministic is True


def test_paths_are_those_of_the_project_and_the_job(in_job, tmp_path, monkeypatch):
    monkeypatch.setenv("PROJECT_ROOT", "/project")
    config = in_job(f"paths.log_dir={tmp_path}/logs")
    assert config.paths.data_dir == "/project/data"
    assert config.paths.output_dir == config.trainer.default_root_dir == str(tmp_path)
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        words = [f"paths.log_dir={tmp_path}/logs", "task_name=mine"]
        hydra = compose("train", overrides=words, return_hydra_config=True).hydra
    assert hydra.run.dir.startswith(f"{tmp_path}/logs/mine/runs/")
    assert hydra.sweep.dir.startswith(f"{tmp_path}/logs/mine/multiruns/")


def test_a_run_is_named_by_its_overrides_and_grouped_by_its_sweep(in_job, monkeypatch):
    words = ["zero=stage2", "logger=wandb", "model.lr=0.01", "tags=[x]", "task_name=mine"]
    wandb = in_job(*words).logger.wandb
    assert (wandb.name, wandb.group, wandb.job_type) == ("zero=stage2 model.lr=0.01", None, "mine")
    assert list(wandb.tags) == ["x"]
    sweep = [*words, "hydra.sweep.dir=outputs/my-sweep"]
    assert in_job(*sweep, mode=RunMode.MULTIRUN).logger.wandb.group == "my-sweep"
    wandb = in_job("logger=wandb").logger.wandb
    assert wandb.name is None
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")
    assert wandb.group == "slurm-17"


def test_main_returns_the_metric_that_is_named(plain):
    metrics = {"val/bits_per_byte": torch.tensor(2.5)}
    assert optimized_metric(plain, metrics) == 2.5
    config = plain.copy()
    config.optimized_metric = None
    assert optimized_metric(config, metrics) is None
    config.optimized_metric = "acc"
    assert optimized_metric(OmegaConf.create({}), metrics) is None
    with pytest.warns(UserWarning, match=r"was not logged; logged metrics: val/bits_per_byte\."):
        assert optimized_metric(config, metrics) is None


@pytest.mark.skipif(
    find_spec("hydra_plugins.hydra_optuna_sweeper") is None, reason="needs the extra sweep"
)
def test_a_search_is_a_sweep_over_the_ranges_of_its_file():
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        words = ["hparams_search=optuna", "hydra.sweeper.n_trials=3"]
        hydra = compose("train", overrides=words, return_hydra_config=True).hydra
    assert hydra.mode == RunMode.MULTIRUN
    assert hydra.sweeper.n_trials == 3
    assert set(hydra.sweeper.params) == {"model.lr", "model.warmup"}


def test_an_evaluation_is_the_same_configuration_without_training(plain):
    config = composed("model=gpt_25m", name="eval")
    assert (config.task_name, config.train, config.test) == ("eval", False, True)
    assert config.model.width == 512
    assert set(plain) == set(config)


def test_an_evaluation_without_a_checkpoint_is_refused():
    from eval import main

    with pytest.raises(ValueError, match="give ckpt_path=PATH"):
        main.__wrapped__(composed(name="eval"))


def test_a_job_on_slurm_asks_for_a_gpu_for_each_task_where_the_trainer_uses_them():
    def launcher(*overrides):
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            words = ["hydra/launcher=slurm", *overrides]
            return compose("train", overrides=words, return_hydra_config=True).hydra.launcher

    assert launcher("trainer=node", "hydra.launcher.tasks_per_node=8").gpus_per_node == 8
    assert launcher("trainer.accelerator=cpu").gpus_per_node is None


@pytest.mark.default_cases("zero=stage3")
@pytest.mark.parametrize("strategy", ["trainer.strategy=zero3", "zero=stage3"])
def test_a_job_on_slurm_imports_what_registers_the_strategies(strategy):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        words = ["hydra/launcher=slurm", strategy]
        config = compose("train", overrides=words, return_hydra_config=True)
    (callback,) = config.hydra.callbacks.values()
    # Submitit pickles the callback; a worker that loads it imports lightning_zero.
    assert callback._target_ == "lightning_zero.launch.hydra_jobs.HydraJobs"


def test_the_choices_of_zero_are_its_stages_alone():
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        assert GlobalHydra.instance().config_loader().get_group_options("zero") == sorted(STAGES)


def test_another_application_composes_the_trainer_of_a_laptop(tmp_path):
    app = "defaults: [_self_, /trainer: laptop]\nhydra: {searchpath: ['pkg://lightning_zero.conf']}"
    (tmp_path / "app.yaml").write_text(app)
    with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path)):
        trainer = compose("app").trainer
    expected = {"cpu": 2, "cuda": "auto"}
    assert trainer.devices == expected[trainer.accelerator]


@pytest.mark.default_cases("little_memory")
@pytest.mark.parametrize("choice", CHOICES["experiment"])
def test_an_experiment_applies_its_settings(choice):
    changed = {
        "little_memory": ("trainer.strategy.prefetch_bucket_size", 0),
        "gpt_1b": ("model.context", 2048),
        "gpt_1b_offload": ("trainer.strategy.offload_optimizer", "cpu"),
        "example": ("trainer.strategy.stage", 2),
    }
    name, value = changed[choice]
    assert OmegaConf.select(composed(f"experiment={choice}"), name) == value


@pytest.mark.default_cases(
    r"zero=stage4-Could not find 'zero/stage4'(.*\\n)+.*stage1(.*\\n)+.*stage3",
    "trainer.strategy.stag=3-Key 'stag' not in 'ZeroStrategySettings'",
    "trainer.strategy.async_save=3.5-'3.5' is not a valid bool|not convertible to bool",
)
@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("zero=stage4", r"Could not find 'zero/stage4'(.*\n)+.*stage1(.*\n)+.*stage3"),
        ("zeros=stage3", "Could not override 'zeros'"),
        ("trainer=ddp zero=stage2", "str is not a subclass of ZeroStrategySettings. value: ddp"),
        ("trainer.strategy.stag=3", "Key 'stag' not in 'ZeroStrategySettings'"),
        ("trainer.strategy.overlap_comm=perhaps", "'perhaps' is not a valid bool"),
        ("trainer.strategy.async_save=3.5", "'3.5' is not a valid bool|not convertible to bool"),
        ("trainer.strategy.reduce_bucket_size=[1]", "incompatible with type hint"),
    ],
)
def test_a_wrong_group_key_or_type_is_an_error_before_anything_runs(override, text):
    with pytest.raises(HydraException) as caught:
        composed(*override.split())
    assert re.search(text, f"{caught.value}\n{caught.value.__cause__}")


@pytest.mark.default_cases("adafactor")
@pytest.mark.parametrize("choice", CHOICES["optimizer"])
def test_an_optimizer_takes_the_place_of_the_models_and_stays_out_of_its_checkpoints(choice):
    with torch.device("meta"):
        model = instantiate(composed(f"optimizer={choice}", "model=tiny").model)
    assert model.make_optimizer(model.parameters()).defaults["lr"] == model.lr
    assert type(model.make_optimizer([model.gpt.norm.weight])).__name__.lower() == choice
    assert "optimizer" not in model.hparams


def test_extras_print_unresolved_settings_and_refuse_a_run_without_tags(capsys, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "never")
    words = ["extras.print_config=true", "+hub=${oc.env:MY_TOKEN}"]
    config = composed(*words, "hydra.run.dir=x")
    config.paths.output_dir = config.paths.work_dir = "run"
    apply_extras(config)
    printed = capsys.readouterr().out
    assert "bits_per_byte" in printed
    assert "hub: ${oc.env:MY_TOKEN}" in printed
    assert "never" not in printed
    with pytest.raises(ValueError, match=r"needs tags, got none; give tags=\[NAME\]"):
        apply_extras(composed("extras.enforce_tags=true", "tags=[]"))


def test_the_help_has_a_word_on_every_group():
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        header = compose("train", return_hydra_config=True).hydra.help.header
    for group in CHOICES:
        assert re.search(rf"^  ([a-z_]+, )?{group}[, ]", header, flags=re.MULTILINE), group


def test_precision_does_not_depend_on_where_its_group_stands(tmp_path):
    first = "defaults: [_self_, /precision: fp16_mixed, /trainer: laptop]"
    (tmp_path / "app.yaml").write_text(
        f"{first}\nhydra: {{searchpath: ['pkg://lightning_zero.conf']}}"
    )
    with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path)):
        assert compose("app").trainer.precision == "16-mixed"


def test_a_composed_config_can_be_kept_in_a_checkpoint(plain):
    strategy = plain.trainer.strategy
    assert pickle.loads(pickle.dumps(strategy)) == strategy


def test_the_monitor_takes_its_steps_from_the_command_line():
    overrides = ("callbacks.monitor.trace_steps=[10,20]", "callbacks.monitor.dirpath=run")
    monitor = instantiate(composed(*overrides).callbacks.monitor)
    assert monitor.trace_steps == (10, 20)
    with pytest.raises(HydraException, match="trace_stepz"):
        composed("callbacks.monitor.trace_stepz=[10]")


def test_all_settings_of_the_strategy_are_shown_at_their_defaults(plain):
    shown = plain.trainer.strategy
    named = {"stage", "reshard_after_forward", "param_dtype", "keep_float32", "start_method"}
    assert named <= set(shown)
    assert instantiate(shown).config == ZeroStrategy(stage=3).config


def test_a_setting_that_yaml_cannot_express_is_built_by_its_target():
    timeout = "+trainer.strategy.timeout={_target_: datetime.timedelta, seconds: 7}"
    strategy = instantiate(composed(timeout).trainer.strategy)
    assert strategy._timeout.total_seconds() == 7


@pytest.mark.default_cases("[head,'*.norm']")
@pytest.mark.parametrize("value", ["head", "[head,'*.norm']"])
def test_keep_float32_can_be_set_on_the_command_line(value):
    strategy = instantiate(composed(f"trainer.strategy.keep_float32={value}").trainer.strategy)
    assert strategy.config.keep_float32_items[0] == "head"


@pytest.mark.default_cases("2-2")
@pytest.mark.parametrize(("choice", "size"), [("world", None), ("node", "node"), (2, 2)])
def test_every_choice_of_sharding_builds_the_strategy(choice, size):
    named = f"sharding={choice}"
    override = f"trainer.strategy.sharding_group_size={choice}" if choice == 2 else named
    assert instantiate(composed(override).trainer.strategy).config.sharding_group_size == size


def test_a_node_of_shards_is_refused_where_nothing_is_sharded():
    with pytest.raises(REFUSED, match="sharding_group_size needs stage 1, 2 or 3"):
        instantiate(composed("zero=off", "sharding=node").trainer.strategy)


@pytest.mark.default_cases("cpu", "nvme_optimizer")
@pytest.mark.parametrize("choice", CHOICES["offload"])
def test_every_choice_of_offload_builds_the_strategy(choice, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_ZERO_NVME_PATH", str(tmp_path))
    strategy = instantiate(composed("zero=stage3", f"offload={choice}").trainer.strategy)
    expected = {
        "none": (None, None),
        "cpu_optimizer": ("cpu", None),
        "cpu": ("cpu", "cpu"),
        "nvme_optimizer": ("nvme", None),
        "nvme": ("nvme", "nvme"),
        "auto": ("auto", None),
    }
    for name, device in zip(("offload_optimizer", "offload_param"), expected[choice], strict=True):
        setting = getattr(strategy.config, name, None)
        assert getattr(setting, "device", setting) == device
        if device == "nvme":
            assert setting.folder == str(tmp_path)
