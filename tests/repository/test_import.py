"""What `import lightning_zero` does to a process, and what it leaves alone."""

import ast
import inspect
import os
import re
import subprocess
import sys

import pytest

import lightning_zero
from tests.support.pages import ROOT

BEFORE_LIGHTNING = """
import importlib, sys
import lightning_zero
importlib.reload(lightning_zero)
names = {"torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric", "hydra"}
loaded = names & set(sys.modules)
assert not loaded, loaded
assert {*lightning_zero.__all__, "__version__"} <= set(dir(lightning_zero))
from lightning_zero import Engine, ZeroConfig
assert "lightning" not in sys.modules
import tests.support.metrics
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import StrategyRegistry
import lightning.pytorch.strategies as strategies
ours = [one for one in sys.meta_path if type(one).__module__.startswith("lightning_zero")]
assert len(ours) == 1 and ours[0].find_spec("torch", None) is None
assert strategies.__spec__.loader is strategies.__loader__ is not None
assert type(strategies.__loader__) is type(saving.__loader__)
assert saving.pl_load.__module__ == "lightning.fabric.utilities.cloud_io"
assert "zero3_notebook" in StrategyRegistry.available_strategies()
assert "lightning_zero.strategy" not in sys.modules
assert not issubclass(lightning_zero.ZeroStrategy, strategies.SingleDeviceStrategy)
strategy = Trainer(strategy="zero3", accelerator="cpu", devices=1, logger=False).strategy
assert type(strategy) is lightning_zero.ZeroStrategy and strategy.config.stage == 3
"""
AFTER_LIGHTNING = """
import sys
from lightning.pytorch import Trainer
finders = list(sys.meta_path)
import lightning_zero
assert sys.meta_path[1:] == finders
assert "lightning_zero.strategy" not in sys.modules
strategy = Trainer(strategy="zero2_offload", accelerator="cpu", devices=1, logger=False).strategy
assert type(strategy) is lightning_zero.ZeroStrategy and strategy.config.stage == 2
"""


@pytest.mark.parametrize(
    "program",
    [BEFORE_LIGHTNING, pytest.param(AFTER_LIGHTNING, marks=pytest.mark.slow)],
    ids=["engine, then Lightning", "after Lightning"],
)
def test_the_import_registers_names_and_changes_nothing_else(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_are_declared_for_type_checkers_as_they_are_imported():
    (block,) = (
        node for node in ast.parse(inspect.getsource(lightning_zero)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )  # fmt: skip
    declared = {alias.name: node.module for node in block.body for alias in node.names}
    modules = {name: f"lightning_zero.{m}" for name, m in lightning_zero._MODULE_OF.items()}
    assert declared == modules
    assert {*lightning_zero.__all__} == {*modules, "__version__"}
    assert lightning_zero.__all__ == sorted(lightning_zero.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'lightning_zero' has no attribute 'ZeroStrat'"):
        _ = lightning_zero.ZeroStrat


_SHOWN = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.getcwd())
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    names = {"torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric"}
    print("imported:", sorted(names & set(sys.modules)))
"""


@pytest.mark.default_cases("train.py---cfg", "hydra_project/train.py---help")
@pytest.mark.parametrize("words", [("--help",), ("--cfg", "job")], ids=lambda words: words[0])
@pytest.mark.parametrize("script", ["train.py", "eval.py", "hydra_project/train.py"], ids=str)
def test_help_and_settings_of_an_example_are_shown_without_torch_and_lightning(script, words):
    path = ROOT / "examples" / script
    done = subprocess.run(
        [sys.executable, "-c", _SHOWN, path.name, *words],
        cwd=path.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shown, _, imported = done.stdout.rpartition("imported: ")
    assert imported == "[]\n"
    if words == ("--help",):  # all groups: those of the project, and those of the package
        for group in ("model", "zero", "offload", "trainer", "callbacks"):
            assert re.search(rf"^{group}: \w+", shown, re.MULTILINE), group
    else:
        assert "_target_: lightning_zero.ZeroStrategy" in shown
