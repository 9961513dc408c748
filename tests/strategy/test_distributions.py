"""`lightning` and `pytorch_lightning`: a process uses the one that its Trainer is from."""

from __future__ import annotations

import itertools
import json
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_zero._lightning import VARIABLE
from tests.support.pages import ROOT, blocks
from tests.support.processes import SCRIPTS, run_python, start_python
from tests.support.ranks import run_ranks

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]

pytestmark = pytest.mark.skipif(
    find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed"
)


# Runs programs as forks of a process that has imported torch, but neither package of Lightning.
SERVER = """
import json, os, sys
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.optim
import tests.support.metrics

def run(program, variables, output):
    for stream, path in ((1, output), (2, output + ".errors")):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), stream)
    os.environ.update(variables)
    exec(program, {"__name__": "__main__"})

assert not {"lightning", "pytorch_lightning", "lightning_fabric"} & set(sys.modules)
while line := sys.stdin.readline():
    child = os.fork()
    if child == 0:
        run(*json.loads(line))
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def run_program(tmp_path_factory):
    """A function of a program and variables of its environment; returns its output."""
    folder, numbers = tmp_path_factory.mktemp("programs"), itertools.count()

    def run(program, **variables):
        output = folder / str(next(numbers))
        print(json.dumps([program, variables, str(output)]), file=server.stdin, flush=True)
        status, printed = server.stdout.readline(), output.read_text()
        assert status == "0\n", printed + Path(f"{output}.errors").read_text()
        return printed

    with start_python("-c", SERVER) as server:
        yield run


def life_cycle(package, strategy, folder):
    run_python(SCRIPTS / "life_cycle.py", package, strategy, folder)
    return json.loads((folder / "saw.json").read_text())


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    return cache(lambda: life_cycle("lightning.pytorch", "ddp", tmp_path_factory.mktemp("ddp")))


@pytest.mark.slow
@pytest.mark.shows("`pytorch_lightning` in place of `lightning`")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("package", PACKAGES)
def test_fit_resume_validate_test_and_predict_equal_ddp(package, stage, tmp_path, reference):
    saw = life_cycle(package, f"zero{stage}", tmp_path)
    assert saw == pytest.approx(reference(), rel=1e-5)
    assert (tmp_path / "lightning_logs" / "version_1" / "zero" / "report.json").exists()


# Names and objects of ours in a program that imports a Trainer before or after them, and trains.
PROGRAM = """
import importlib, sys
import lightning_zero
{first}
from lightning_zero import ZeroStrategy
from lightning_zero.callbacks import ZeroMonitor
{second}
options = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
package = sys.modules[Trainer.__module__.removesuffix(".trainer.trainer")]
for given in ("zero3", ZeroStrategy(3)):
    strategy = Trainer(strategy=given, **options).strategy
    assert type(strategy) is ZeroStrategy
    assert isinstance(strategy, package.strategies.Strategy)
assert issubclass(ZeroMonitor, package.Callback)
demos = importlib.import_module(package.__name__ + ".demos.boring_classes")
trainer = Trainer(strategy="zero3", max_steps=2, limit_val_batches=0, **options)
trainer.fit(demos.BoringModel())
assert trainer.global_step == 2
assert not set({without}) & set(sys.modules)
"""
LIGHTNING = "from lightning.pytorch import Trainer"
PYTORCH_LIGHTNING = "from pytorch_lightning import Trainer"
OTHERS = {
    "lightning": ["pytorch_lightning", "lightning_fabric"],
    "pytorch_lightning": ["lightning"],
}


def execute(rank, world_size, program):
    """Runs `program` in a rank, whose process imported `lightning` before lightning_zero."""
    exec(program, {})


def test_classes_are_those_of_lightning_if_it_was_imported():
    run_ranks(
        1,
        execute,
        PROGRAM.format(first=LIGHTNING, second="", without=OTHERS["lightning"]),
        has_group=False,
    )


(PAGE,) = (
    block
    for block in blocks("python", "docs/guides/other-tools.md")
    if block.startswith("import pytorch_lightning")
)
PAGE = PAGE.replace("devices=8", 'devices=2, accelerator="cpu"')
PAGE += "\nassert type(trainer.strategy) is ZeroStrategy"


@pytest.mark.default_cases("pytorch_lightning")
@pytest.mark.parametrize(
    ("first", "second", "chosen", "variables"),
    [
        (PYTORCH_LIGHTNING, PAGE, "pytorch_lightning", {}),
        ("", LIGHTNING, "lightning", {}),
        ("", PYTORCH_LIGHTNING, "pytorch_lightning", {VARIABLE: "pytorch_lightning"}),
    ],
    ids=["pytorch_lightning", "imported later", "named by the variable"],
)
def test_classes_are_those_of_the_one_that_is_imported(
    run_program, first, second, chosen, variables
):
    program = PROGRAM.format(first=first, second=second, without=OTHERS[chosen])
    run_program(program, **variables)


BY_REGISTRY = """
import lightning_zero, lightning, pytorch_lightning
options = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
strategy = pytorch_lightning.Trainer(strategy="zero3", **options).strategy
assert isinstance(strategy, pytorch_lightning.strategies.Strategy)
for given in ("zero3", lightning_zero.ZeroStrategy(3)):
    try:
        lightning.Trainer(strategy=given, **options)
    except (RuntimeError, ValueError) as error:
        print(error)
"""


@pytest.mark.slow
def test_with_both_the_first_registry_decides_and_the_other_trainer_raises_an_error(run_program):
    of_name, of_object = run_program(BY_REGISTRY).splitlines()
    for text in (of_name, of_object):
        assert "choose lightning: import lightning before" in text
        assert f"set {VARIABLE}=lightning." in text


@pytest.mark.slow
def test_an_unknown_name_in_the_variable_is_an_error(run_program):
    program = """
try:
    from lightning_zero import ZeroStrategy
except ValueError as error:
    print(error)
"""
    known = "must be one of lightning, pytorch_lightning, got 'pl'."
    assert run_program(program, **{VARIABLE: "pl"}) == f"{VARIABLE} {known}\n"


FABRIC = """
import sys
import lightning_zero
import torch
from {package} import Fabric

sums = []
for strategy in ("zero1", "zero3"):
    torch.manual_seed(0)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=1)
    fabric.launch()
    module = torch.nn.Linear(4, 2)
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=0.1))
    for step in range(3):
        optimizer.zero_grad()
        fabric.backward(model(torch.full((2, 4), step + 1.0)).square().sum())
        optimizer.step()
    sums.append(sum(value.double().abs().sum().item() for value in model.state_dict().values()))
assert not set({without}) & set(sys.modules)
"""


def train_with_fabric(rank, world_size):
    names = {}
    exec(FABRIC.format(package="lightning.fabric", without=OTHERS["lightning"]), names)
    return names["sums"]


@pytest.mark.slow
def test_fabric_of_lightning_fabric_trains_as_that_of_lightning(run_program):
    (expected,) = run_ranks(1, train_with_fabric, has_group=False)
    program = FABRIC.format(package="lightning_fabric", without=OTHERS["pytorch_lightning"])
    assert json.loads(run_program(program + "print(sums)")) == expected


MODULE = """
import sys
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel

class Model(BoringModel):
    def on_train_end(self):
        assert "lightning" not in sys.modules
        assert isinstance(self.trainer.strategy, pl.strategies.Strategy)
"""
SPAWN = """
if __name__ == "__main__":  # a spawned process imports nothing by running this again
    import lightning_zero
    from model import Model
    from pytorch_lightning import Trainer

    strategy = lightning_zero.ZeroStrategy(3, start_method="spawn")
    options = dict(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    Trainer(strategy=strategy, max_steps=2, limit_val_batches=0, **options).fit(Model())
"""


@pytest.mark.slow
def test_spawned_ranks_choose_as_the_process_that_starts_them(tmp_path):
    (tmp_path / "model.py").write_text(MODULE)
    script = tmp_path / "train.py"
    script.write_text(SPAWN)
    run_python(script)


INSTALLED_ALONE = """
import lightning_zero
from importlib.util import find_spec
from {package} import Trainer
from {package}.demos.boring_classes import BoringModel
from {fabric} import Fabric
assert not any(map(find_spec, {without}))
options = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
trainer = Trainer(strategy="zero3", max_steps=2, limit_val_batches=0, **options)
trainer.fit(BoringModel())
assert trainer.global_step == 2 and type(trainer.strategy) is lightning_zero.ZeroStrategy
fabric = Fabric(strategy="zero1", accelerator="cpu", devices=1)
assert type(fabric.strategy).__module__ == "lightning_zero.fabric.strategy"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "fabric"),
    [("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric")],
    ids=["lightning", "pytorch_lightning"],
)
def test_each_distribution_trains_where_it_alone_is_installed(tmp_path, package, fabric):
    without = OTHERS[package.partition(".")[0]]
    for path in Path(find_spec("torch").origin).parents[1].iterdir():
        if path.name.partition("-")[0] not in without and path.suffix != ".pth":
            (tmp_path / path.name).symlink_to(path)
    program = INSTALLED_ALONE.format(package=package, fabric=fabric, without=without)
    run_python("-S", "-c", program, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
