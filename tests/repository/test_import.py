"""What `import lightning_zero` does to a process, and what it leaves alone."""

import ast
import inspect
import subprocess
import sys

import pytest

import lightning_zero

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
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import StrategyRegistry
import lightning.pytorch.strategies as strategies
ours = [one for one in sys.meta_path if type(one).__module__.startswith("lightning_zero")]
waited_for = {one.name for one in ours}
assert waited_for == {"pytorch_lightning.strategies", "lightning_fabric.strategies"}, waited_for
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
assert [one for one in sys.meta_path if not hasattr(one, "name")] == finders
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
