"""Imports go down only: a lower room never knows a higher one."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_zero"
LAYERS = {
    0: {
        "stage",
        "config",
        "layout",
        "mesh",
        "offload",
        "plan",
        "memory",
        "deepspeed",
        "planner",
        "recording",
        "tracing",
    },
    1: {
        "axes",
        "buffer",
        "channel",
        "comm",
        "comm_bench",
        "control",
        "exchange",
        "flight",
        "recorder",
        "state_keys",
        "stored",
        "tiers",
        "world",
        "written",
    },
    2: {
        "access",
        "activations",
        "assembly",
        "attached",
        "awaited",
        "bucket",
        "bucket_step",
        "building",
        "chunk",
        "compare",
        "compiled",
        "counting",
        "engine",
        "from_meta",
        "gathering",
        "grad_home",
        "gradient",
        "guard",
        "handover",
        "hooks",
        "left_out",
        "lockstep",
        "norm",
        "optim_state",
        "owned_state",
        "masters",
        "materialize",
        "piece",
        "probe",
        "reducing",
        "replica_mean",
        "schedule",
        "shadow",
        "sharded_tensor",
        "shards",
        "shared_buffers",
        "stand_in",
        "step",
        "toys",
        "trained",
        "unit",
        "worker",
    },
    3: {"checkpoint"},
    4: {
        "after_fit",
        "averages",
        "auto",
        "callbacks",
        "checkpoint_io",
        "checkpoint_strategy",
        "checkpoints",
        "cli",
        "engine_life",
        "engine_strategy",
        "batch_boundary",
        "evaluation",
        "csv_logger",
        "launcher",
        "load_from_checkpoint",
        "precision",
        "preflight",
        "process_strategy",
        "refused",
        "requeue",
        "saving",
        "schema",
        "settings",
        "strategy",
        "wandb_run",
    },
}
LAYER_OF = {room: layer for layer, rooms in LAYERS.items() for room in rooms}
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")
CONF = {"conf": 4}  # lies at the top of the repository


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_every_room_has_a_layer():
    assert {room_of(path) for path in FILES} == set(LAYER_OF)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_import_goes_up(path):
    layer = LAYER_OF[room_of(path)]
    for module in imported_modules(path):
        if module.startswith("lightning_zero."):
            assert (LAYER_OF | CONF)[module.split(".")[1]] <= layer, module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_top_layer_knows_lightning(path):
    tops = {module.split(".")[0] for module in imported_modules(path)}
    known = {"lightning", "lightning_utilities", "hydra", "omegaconf", "wandb"}
    assert LAYER_OF[room_of(path)] == 4 or not tops & known


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_lowest_layer_knows_no_process_group(path):
    if LAYER_OF[room_of(path)] == 0:
        assert not any(m.startswith("torch.distributed") for m in imported_modules(path))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_communicator_calls_collectives_of_the_engine(path):
    # `cli` starts ranks of its own to measure links.
    if room_of(path) not in {"axes", "channel", "cli", "comm", "control", "exchange", "world"}:
        known = {m for m in imported_modules(path) if m.startswith("torch.distributed")}
        if room_of(path) == "checkpoint":  # torch's format, which needs no process group
            known = {m for m in known if not m.startswith("torch.distributed.checkpoint")}
        assert not known


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_stage_number_is_compared_outside_its_room(path):
    if room_of(path) in {"stage", "config"}:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            names = [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)]
            names += [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
            numbers = [n for n in node.comparators if isinstance(n, ast.Constant)]
            is_number = any(isinstance(n.value, int) for n in numbers)
            assert not ("stage" in names and is_number), ast.unparse(node)
