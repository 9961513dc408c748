"""Imports go one way: no package imports a later one, and no module itself through others."""

import ast
import sys
from functools import cache
from pathlib import Path

from tests.support.ranks import run_ranks

PACKAGE = Path(__file__).parents[2] / "lightning_zero"
FACE = {"__init__", "_api", "_version", "activations", "callbacks"}  # what users import by path
PACKAGES = [
    "record",
    "layout",
    "tensors",
    "health",
    "comm",
    "tiers",
    "core",
    "construction",
    "optim",
    "engine",
    "deepspeed",
    "checkpoint",
    "planner",
    "launch",
    "strategy",
    "observe",
    "conf",
    "cli",
]
ALONE = {  # packages that import only these
    "record": set(),
    "layout": set(),
    "tensors": {"layout"},
    "health": {"layout"},
    "deepspeed": {"layout", "tensors"},
    "launch": {"layout", "health"},
    "conf": {"launch", "strategy", "observe"},
}
MODULES = {
    ".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): p
    for p in sorted([*PACKAGE.rglob("*.py"), PACKAGE / "conf" / "__init__.py"])  # conf is a link
}


def package_of(module):
    return module.split(".")[1] if "." in module else ""


@cache
def syntax_of(module):
    return ast.parse(MODULES[module].read_text())


@cache
def imported(module):
    """Imported modules, also those for types only and those inside functions."""
    found = set()
    for node in ast.walk(syntax_of(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found


def own(module):
    return {name for name in imported(module) if name.split(".")[0] == "lightning_zero"}


def packages():
    return [(module, package_of(module)) for module in MODULES if package_of(module) in PACKAGES]


def assert_none(problems):
    """`problems`: a list of problems for each module."""
    bad = [f"{module}: {', '.join(sorted(found))}" for module, found in problems if found]
    assert not bad, "\n".join(bad)


def test_every_module_is_in_a_known_package():
    assert {package_of(module) for module in MODULES} == {*PACKAGES, "", *FACE - {"__init__"}}


def test_no_package_imports_a_later_one():
    def wrong(module, package):
        known = {package_of(name) for name in own(module)} - {package, "_version"}
        return known - ALONE.get(package, set(PACKAGES[: PACKAGES.index(package)]))

    assert_none((module, wrong(module, package)) for module, package in packages())


def test_no_module_imports_itself_through_others():
    order = []

    def visit(module, path):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in MODULES and module not in order:
            for name in sorted(own(module)):
                visit(name, [*path, module])
            order.append(module)

    for module in MODULES:
        visit(module, [])


def test_every_package_docstring_lists_its_modules():
    for package in PACKAGES:
        text = ast.get_docstring(syntax_of(f"lightning_zero.{package}"))
        modules = [
            name.split(".")[2] for name in MODULES if name.startswith(f"lightning_zero.{package}.")
        ]
        missing = [name for name in modules if not name.startswith("__") and name not in text]
        assert not missing or package == "cli", f"{package}: {missing}"


def test_only_launch_and_later_packages_import_lightning():
    known = {"lightning", "lightning_utilities", "wandb"}
    below = PACKAGES[: PACKAGES.index("launch")]
    assert_none(
        (module, {name for name in imported(module) if name.split(".")[0] in known})
        for module, package in packages()
        if package in below
    )


def test_only_launch_and_the_reading_of_configurations_import_hydra():
    assert_none(
        (
            module,
            {name for name in imported(module) if name.split(".")[0] in {"hydra", "omegaconf"}},
        )
        for module, package in packages()
        if package not in {"launch", "conf"} and module != "lightning_zero.cli.plan"
    )


def _modules(rank, world_size):
    return set(sys.modules)


def test_neither_hydra_nor_wandb_is_imported_before_it_is_used():
    (modules,) = run_ranks(1, _modules, has_group=False)  # a process with package and callbacks
    assert {"lightning_zero", "lightning_zero.callbacks"} <= modules
    assert not {"hydra", "omegaconf", "wandb"} & modules


def test_only_comm_calls_collectives():
    may = {
        "comm",
        "health",
        "cli",
    }  # `health` knows WORLD; `cli` starts ranks of its own to measure links

    def known(module, package):
        found = {name for name in imported(module) if name.startswith("torch.distributed")}
        if package == "checkpoint":  # torch's format, which needs no process group
            return {name for name in found if not name.startswith("torch.distributed.checkpoint")}
        return found

    assert_none(
        (module, known(module, package)) for module, package in packages() if package not in may
    )


def test_streams_and_events_are_made_in_one_module():
    made = {"Stream", "Event", "stream", "current_stream", "synchronize"}

    def found(module):
        attributes = {
            ast.unparse(n) for n in ast.walk(syntax_of(module)) if isinstance(n, ast.Attribute)
        }
        return attributes & {f"torch.cuda.{name}" for name in made}

    assert_none(
        (module, found(module)) for module in MODULES if module != "lightning_zero.record.streams"
    )


def test_no_stage_number_is_compared_outside_its_module():
    assert_none(
        (module, {ast.unparse(n) for n in ast.walk(syntax_of(module)) if compares_stage(n)})
        for module in MODULES
        if module not in {"lightning_zero.layout.stage", "lightning_zero.layout.config"}
    )


def compares_stage(node):
    if not isinstance(node, ast.Compare):
        return False
    names = [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    names += [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    numbers = [n for n in node.comparators if isinstance(n, ast.Constant)]
    return "stage" in names and any(isinstance(n.value, int) for n in numbers)
