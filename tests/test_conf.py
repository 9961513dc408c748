"""Every file in conf/ composes, and every choice of groups builds its strategy."""

import itertools
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from lightning_zero import ZeroStrategy

CONF = Path(__file__).parents[1] / "conf"
CHOICES = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir()
}
COMBINATIONS = list(itertools.product(CHOICES["zero"], CHOICES["bucket"], CHOICES["overlap"]))
STAGES = {"off": 0, "stage1": 1, "stage2": 2, "stage3": 3}


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


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_says_what_it_is_and_the_command_that_uses_it(path):
    lines = path.read_text().splitlines()
    comment = lines[1] if lines[0].startswith("# @package ") else lines[0]  # Hydra wants it first
    words = re.fullmatch(r"# (?P<what>.+): python examples/train\.py(?P<overrides>.*)", comment)
    assert words, comment
    overrides = words["overrides"].split()
    composed(*overrides)
    if path.parent != CONF:
        assert f"{path.parent.name}={path.stem}" in overrides


@pytest.mark.parametrize(("zero", "bucket", "overlap"), COMBINATIONS)
def test_every_choice_of_zero_bucket_and_overlap_builds_the_strategy(zero, bucket, overlap):
    config = composed(f"zero={zero}", f"bucket={bucket}", f"overlap={overlap}")
    strategy = instantiate(config.trainer.strategy)
    assert isinstance(strategy, ZeroStrategy)
    assert strategy.config.stage == STAGES[zero]
    assert strategy.config.overlap_comm == (overlap == "comm")
    assert strategy.config.reduce_bucket_size == config.trainer.strategy.reduce_bucket_size


@pytest.mark.parametrize("choice", CHOICES["model"])
def test_every_model_is_built_from_its_file(choice):
    config = composed(f"model={choice}", "data.context=32")
    model = instantiate(config.model)
    assert model.gpt.config.context == 32
    numel = sum(parameter.numel() for parameter in model.parameters())
    low, high = {"tiny": (0.6e6, 0.8e6), "gpt_25m": (24e6, 26e6)}[choice]
    assert low < numel < high


def test_a_strategy_of_another_library_can_be_named():
    assert composed("trainer.strategy=ddp").trainer.strategy == "ddp"
