"""Every file in conf/ composes, and every choice of groups builds its strategy."""

import itertools
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.utils import instantiate

import lightning_zero.conf  # noqa: F401
from lightning_zero import ZeroStrategy

CONF = Path(__file__).parents[1] / "conf"
FILES = sorted(CONF.rglob("*.yaml"))
CHOICES = {
    folder.relative_to(CONF).as_posix(): sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted({path.parent for path in FILES} - {CONF})
}
COMBINATIONS = list(itertools.product(CHOICES["zero"], CHOICES["bucket"], CHOICES["overlap"]))
STAGES = {"off": 0, "stage1": 1, "stage2": 2, "stage3": 3, "auto": 3}  # auto: until it is set up


def composed(*overrides):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose("config", overrides=list(overrides))


@pytest.mark.parametrize(
    "override", [f"{group}={choice}" for group, choices in CHOICES.items() for choice in choices]
)
def test_every_file_composes(override):
    config = composed(override)
    assert config.trainer._target_ == "lightning.pytorch.Trainer"
    assert config.trainer.strategy._target_ == "lightning_zero.ZeroStrategy"
    assert "precision" in config.trainer
    assert "logger" in config.trainer


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_says_what_it_is_and_the_command_that_uses_it(path):
    lines = path.read_text().splitlines()
    comment = lines[1] if lines[0].startswith("# @package ") else lines[0]  # Hydra wants it first
    pattern = (
        r"# (?P<what>.+): (srun |PYTHONPATH=examples )?python examples/train\.py(?P<overrides>.*)"
    )
    words = re.fullmatch(pattern, comment)
    assert words, comment
    overrides = words["overrides"].split()
    composed(*(word for word in overrides if word != "-m" and "," not in word))
    if path.parent != CONF:
        assert f"{path.parent.relative_to(CONF).as_posix()}={path.stem}" in overrides


@pytest.mark.parametrize(("zero", "bucket", "overlap"), COMBINATIONS)
def test_every_choice_of_zero_bucket_and_overlap_builds_the_strategy(zero, bucket, overlap):
    config = composed(f"zero={zero}", f"bucket={bucket}", f"overlap={overlap}")
    if (zero, overlap) == ("off", "all"):
        with pytest.raises(HydraException, match="overlap_step needs stage 1, 2 or 3"):
            instantiate(config.trainer.strategy)
        return
    strategy = instantiate(config.trainer.strategy)
    assert isinstance(strategy, ZeroStrategy)
    assert strategy.config.stage == STAGES[zero]
    assert strategy.config.overlap_comm == (overlap != "none")
    assert strategy.config.reduce_bucket_size == config.trainer.strategy.reduce_bucket_size


@pytest.mark.parametrize("choice", CHOICES["model"])
def test_every_model_is_built_from_its_file(choice):
    config = composed(f"model={choice}", "data.context=32")
    with torch.device("meta"):
        model = instantiate(config.model)
    assert model.gpt.config.context == 32
    numel = sum(parameter.numel() for parameter in model.parameters())
    expected = {
        "tiny": 0.7e6,
        "gpt_25m": 25e6,
        "gpt_125m": 85e6,
        "gpt_1b": 1.2e9,
        "llama_7b": 6.738e9,
        "llama_70b": 68.977e9,
    }
    assert numel == pytest.approx(expected[choice], rel=0.001 if "llama" in choice else 0.1)


def test_a_job_on_slurm_asks_for_a_gpu_for_each_task_where_the_trainer_uses_them():
    def launcher(*overrides):
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            words = ["hydra/launcher=slurm", *overrides]
            return compose("config", overrides=words, return_hydra_config=True).hydra.launcher

    assert launcher("trainer=node").gpus_per_node == 2
    assert launcher("trainer=node", "hydra.launcher.tasks_per_node=8").gpus_per_node == 8
    assert launcher("trainer.accelerator=cpu").gpus_per_node is None


@pytest.mark.parametrize("strategy", ["trainer.strategy=zero3", "zero=stage3"])
def test_a_job_on_slurm_imports_what_registers_the_strategies(strategy):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        words = ["hydra/launcher=slurm", strategy]
        config = compose("config", overrides=words, return_hydra_config=True)
    (callback,) = config.hydra.callbacks.values()
    # Submitit pickles it: a worker imports its module, and so lightning_zero.
    assert callback._target_ == "lightning_zero.strategy.hydra_jobs.HydraJobs"


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


def test_without_hydra_nothing_of_it_nor_of_wandb_is_imported():
    code = "import sys, lightning_zero; print({'hydra', 'omegaconf', 'wandb'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_strategy_of_another_library_can_be_named():
    assert composed("trainer.strategy=ddp").trainer.strategy == "ddp"


@pytest.mark.parametrize("choice", CHOICES["experiment"])
def test_an_experiment_changes_what_it_says(choice):
    strategy = composed(f"experiment={choice}").trainer.strategy
    changed = {
        "little_memory": ("prefetch_bucket_size", 0),
        "gpt_1b_offload": ("offload_optimizer", "cpu"),
    }
    name, value = changed[choice]
    assert strategy[name] == value


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("zero=stage4", r"Could not find 'zero/stage4'(.*\n)+.*stage1(.*\n)+.*stage3"),
        ("zeros=stage3", "Could not override 'zeros'"),
        ("trainer.strategy.stag=3", r"Key 'stag' not in 'ZeroStrategySettings \(--cfg job"),
        (
            "trainer.strategy.overlap_comm=perhaps",
            r"'perhaps' is not a valid bool(.*\n)+.*\(--cfg job",
        ),
        ("trainer.strategy.async_save=3.5", "'3.5' is not a valid bool|not convertible to bool"),
        ("trainer.strategy.reduce_bucket_size=[1]", "incompatible with type hint"),
    ],
)
def test_a_wrong_group_key_or_type_is_an_error_before_anything_runs(override, text):
    with pytest.raises(HydraException) as caught:
        composed(override)
    assert re.search(text, f"{caught.value}\n{caught.value.__cause__}")


def test_a_composed_config_can_be_kept_in_a_checkpoint():
    strategy = composed().trainer.strategy
    assert pickle.loads(pickle.dumps(strategy)) == strategy


def test_the_monitor_takes_its_steps_from_the_command_line():
    overrides = ("callbacks.monitor.trace_steps=[10,20]", "callbacks.monitor.dirpath=run")
    monitor = instantiate(composed(*overrides).callbacks.monitor)
    assert monitor.trace_steps == (10, 20)
    with pytest.raises(HydraException, match="trace_stepz"):
        composed("callbacks.monitor.trace_stepz=[10]")


def test_all_settings_of_the_strategy_are_shown_at_their_defaults():
    shown = composed().trainer.strategy
    named = {"stage", "reshard_after_forward", "param_dtype", "keep_float32", "start_method"}
    assert named <= set(shown)
    assert instantiate(shown).config == ZeroStrategy(stage=3).config


def test_a_setting_that_yaml_cannot_say_is_built_by_its_target():
    timeout = "+trainer.strategy.timeout={_target_: datetime.timedelta, seconds: 7}"
    strategy = instantiate(composed(timeout).trainer.strategy)
    assert strategy._timeout.total_seconds() == 7


@pytest.mark.parametrize("value", ["head", "[head,'*.norm']"])
def test_what_stays_in_float32_can_be_said_on_the_command_line(value):
    strategy = instantiate(composed(f"trainer.strategy.keep_float32={value}").trainer.strategy)
    assert strategy.config.kept[0] == "head"


@pytest.mark.parametrize(("choice", "size"), [("world", None), ("node", "node"), (2, 2)])
def test_every_choice_of_sharding_builds_the_strategy(choice, size):
    named = f"sharding={choice}"
    override = f"trainer.strategy.sharding_group_size={choice}" if choice == 2 else named
    assert instantiate(composed(override).trainer.strategy).config.sharding_group_size == size


def test_a_node_of_shards_is_refused_where_nothing_is_sharded():
    with pytest.raises(HydraException, match="sharding_group_size needs stage 1, 2 or 3"):
        instantiate(composed("zero=off", "sharding=node").trainer.strategy)


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
