"""Imports go down only: a lower room never knows a higher one."""

import ast
from functools import cache
from pathlib import Path

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
        "kept",
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
        "composite",
        "control",
        "doing",
        "exchange",
        "flight",
        "peers",
        "rank_store",
        "recorder",
        "state_keys",
        "stored",
        "tiers",
        "watchdog",
        "world",
        "written",
    },
    2: {
        "access",
        "activations",
        "alike",
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
        "mixed_dtypes",
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


@cache
def syntax_of(path):
    return ast.parse(path.read_text())


@cache
def imported_modules(path):
    found = set()
    for node in ast.walk(syntax_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


def assert_none(problems):
    """`problems`: by file, what is wrong there."""
    bad = [f"{path.relative_to(PACKAGE)}: {', '.join(found)}" for path, found in problems if found]
    assert not bad, "\n".join(bad)


def test_every_room_has_a_layer():
    assert {room_of(path) for path in FILES} == set(LAYER_OF)


def test_no_import_goes_up():
    def upward(path):
        own = {m for m in imported_modules(path) if m.startswith("lightning_zero.")}
        layers = LAYER_OF | CONF
        return [m for m in own if layers[m.split(".")[1]] > LAYER_OF[room_of(path)]]

    assert_none((path, upward(path)) for path in FILES)


def test_only_the_top_layer_knows_lightning():
    known = {"lightning", "lightning_utilities", "hydra", "omegaconf", "wandb"}
    assert_none(
        (path, [m for m in imported_modules(path) if m.split(".")[0] in known])
        for path in FILES
        if LAYER_OF[room_of(path)] != 4
    )


def test_the_lowest_layer_knows_no_process_group():
    assert_none(
        (path, [m for m in imported_modules(path) if m.startswith("torch.distributed")])
        for path in FILES
        if LAYER_OF[room_of(path)] == 0
    )


def test_only_the_communicator_calls_collectives_of_the_engine():
    # `cli` starts ranks of its own to measure links.
    callers = {"axes", "channel", "cli", "comm", "control", "exchange", "world"}
    callers |= {"doing", "watchdog"}  # they end the wait in one, and tell of it

    def known(path):
        found = [m for m in imported_modules(path) if m.startswith("torch.distributed")]
        if room_of(path) == "checkpoint":  # torch's format, which needs no process group
            return [m for m in found if not m.startswith("torch.distributed.checkpoint")]
        return found

    assert_none((path, known(path)) for path in FILES if room_of(path) not in callers)


def test_no_stage_number_is_compared_outside_its_room():
    assert_none(
        (path, [ast.unparse(n) for n in ast.walk(syntax_of(path)) if compares_stage(n)])
        for path in FILES
        if room_of(path) not in {"stage", "config"}
    )


def compares_stage(node):
    if not isinstance(node, ast.Compare):
        return False
    names = [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    names += [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    numbers = [n for n in node.comparators if isinstance(n, ast.Constant)]
    return "stage" in names and any(isinstance(n.value, int) for n in numbers)
