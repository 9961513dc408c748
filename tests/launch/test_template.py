"""A project laid out as lightning-hydra-template trains with the changes that the guide names.

`tests/support/template` has the template's structure: `src/train.py` and `src/eval.py`, groups in
`configs/`, a Trainer that Hydra instantiates, partial optimizers, callbacks and loggers by key.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.torch_file import open_without

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "tests" / "support" / "template"
GROUPS = ["hydra.searchpath=[pkg://lightning_zero.conf]", "+zero=stage3", "trainer.devices=2"]
NEEDS = {"optuna": "hydra_plugins.hydra_optuna_sweeper", "tensorboard": "tensorboard"}


@pytest.fixture
def run(tmp_path):
    """Runs a script of the project with overrides, and returns what it prints."""
    shutil.copytree(PROJECT, tmp_path / "project")

    def call(script, *words):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, f"src/{script}.py", *words],
            cwd=tmp_path / "project",
            env=environment | {"WANDB_SILENT": "true"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return call


@pytest.mark.parametrize("words", [["trainer=zero3"], GROUPS], ids=["name", "groups"])
def test_the_template_composes_with_a_strategy(words):
    words = [*words, "paths.output_dir=run"]
    with initialize_config_dir(version_base="1.3", config_dir=str(PROJECT / "configs")):
        config = compose("train", overrides=list(words)).trainer
    strategy = instantiate(config, logger=False).strategy
    assert isinstance(strategy, ZeroStrategy)
    assert (strategy.config.stage, strategy.world_size) == (3, 2)


def test_groups_in_the_defaults_refuse_another_strategy_until_they_are_removed(tmp_path):
    shutil.copytree(PROJECT / "configs", tmp_path / "configs")
    path = tmp_path / "configs" / "train.yaml"
    text = path.read_text().replace("  - trainer:", "  - zero: stage3\n  - trainer:")
    path.write_text(f"{text}\nhydra:\n  searchpath: [pkg://lightning_zero.conf]\n")
    (tmp_path / "configs/trainer/ddp.yaml").write_text("defaults: [default]\nstrategy: ddp\n")

    def strategy(*words):
        with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path / "configs")):
            return compose("train", overrides=list(words)).trainer.strategy

    assert strategy().stage == 3
    assert strategy("trainer=ddp", "~zero") == "ddp"
    with pytest.raises(
        ConfigCompositionException, match="str is not a subclass of ZeroStrategySettings"
    ):
        strategy("trainer=ddp")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["trainer=zero1"], ["trainer=zero3"], GROUPS], ids=["zero1", "zero3", "groups"]
)
def test_the_template_trains_tests_and_resumes(run, tmp_path, words):
    at = f"hydra.run.dir={tmp_path}/run"
    printed = run("train", *words, at, "logger=csv", "trainer.max_epochs=1")
    assert "ZeroStrategy on 2 ranks" in printed
    assert "test/acc" in printed
    path = tmp_path / "run" / "checkpoints" / "epoch_000.ckpt"
    assert "test/acc" in run("eval", *words, f"ckpt_path={path}")
    resumed = [f"hydra.run.dir={tmp_path}/more", f"ckpt_path={path}", "test=false"]
    run("train", *words, *resumed)
    last = open_without("src", tmp_path / "more/checkpoints/last.ckpt", weights_only=False)
    assert last["epoch"] == 1


@pytest.mark.slow
def test_the_template_writes_to_all_its_loggers(run, tmp_path):
    pytest.importorskip(NEEDS["tensorboard"])
    run("train", "trainer=zero3", f"hydra.run.dir={tmp_path}/run", "logger=many_loggers")
    for pattern in ("csv/*/metrics.csv", "tensorboard/*/events.*", "wandb/offline-run-*/*.wandb"):
        # Rank 0 writes it; the test of a run writes event files of its own.
        assert len({path.parent for path in (tmp_path / "run").glob(pattern)}) == 1, pattern


@pytest.mark.slow
@pytest.mark.parametrize("words", [["trainer=zero1"], GROUPS], ids=["zero1", "groups"])
def test_the_template_sweeps(run, tmp_path, words):
    sweep = [f"hydra.sweep.dir={tmp_path}/sweep", "trainer.max_epochs=1", "test=false"]
    printed = run("train", "-m", *words, *sweep, "model.optimizer.lr=0.01,0.001")
    assert printed.count("ZeroStrategy on 2 ranks") == 2
    assert len(list((tmp_path / "sweep").glob("*/checkpoints/last.ckpt"))) == 2


@pytest.mark.slow
def test_the_template_searches_with_optuna(run, tmp_path):
    pytest.importorskip(NEEDS["optuna"])
    sweep = [f"hydra.sweep.dir={tmp_path}/sweep", "trainer.max_epochs=1", "test=false"]
    run("train", "-m", "hparams_search=optuna", "experiment=example", *sweep)
    found = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    assert 0 <= found["best_value"] <= 1
