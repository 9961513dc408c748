"""Imports go one way: no package imports a later one, and no module itself through others."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

PACKAGE = Path(__file__).parents[2] / "lightning_zero"
FACE = {
    "__init__",
    "__main__",
    "_lightning",
    "_registration",
    "_version",
    "activations",
    "callbacks",
    "ray",
}  # what users import by path
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
    "fabric",
    "observe",
    "conf",
    "check",
    "cli",
]
ALONE = {  # packages that import only these
    "record": set(),
    "layout": set(),
    "tensors": {"layout", "record"},
    "health": {"layout", "record"},
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
        if package in PACKAGES[PACKAGES.index("launch") :]:
            known -= {"_lightning"}
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


def test_packages_before_launch_import_nothing_of_lightning():
    known = {"lightning_utilities", "wandb"}
    below = PACKAGES[: PACKAGES.index("launch")]
    assert_none(
        (module, {name for name in imported(module) if name.split(".")[0] in known})
        for module, package in packages()
        if package in below
    )


def test_lightning_is_imported_through_one_package():
    """`lightning_zero._lightning` lists its names, and chooses the distribution."""
    names = {"lightning", "pytorch_lightning", "lightning_fabric"}
    assert_none(
        (module, {name for name in imported(module) if name.split(".")[0] in names})
        for module in MODULES
        if package_of(module) != "_lightning"
    )


@pytest.mark.parametrize("name", ["pytorch", "fabric"])
def test_every_listed_name_of_lightning_is_used(name):
    source = f"lightning_zero._lightning.{name}"
    listed = {node.targets[0].id for node in syntax_of(source).body if isinstance(node, ast.Assign)}
    used = set()
    for module in MODULES:
        for node in ast.walk(syntax_of(module)):
            if isinstance(node, ast.ImportFrom) and node.module == source:
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pl":
                used.add(node.attr)
    assert listed <= used, f"delete these from {source}: {sorted(listed - used)}"


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
    from tests.support.preload import LOADED

    return LOADED


def test_neither_hydra_nor_wandb_is_imported_before_it_is_used():
    (modules,) = run_ranks(1, _modules, has_group=False)  # a process with package and callbacks
    assert {"lightning_zero", "lightning_zero.callbacks"} <= modules
    assert not {"hydra", "omegaconf", "wandb"} & modules


def test_only_comm_calls_collectives():
    may = {"comm", "health", "check"}  # `check` starts ranks of its own

    def known(module, package):
        found = {name for name in imported(module) if name.startswith("torch.distributed")}
        if package == "checkpoint":  # torch's format, which needs no process group
            return {name for name in found if not name.startswith("torch.distributed.checkpoint")}
        return found

    assert_none(
        (module, known(module, package)) for module, package in packages() if package not in may
    )


def test_health_calls_no_collective():
    """It knows process groups and their store, and ends their waits."""
    names = {"all_gather", "all_reduce", "barrier", "broadcast", "gather", "new_group", "reduce"}
    names |= {f"{name}_{kind}" for name in names for kind in ("object", "object_list")}

    def called(module):
        return {
            n.attr for n in ast.walk(syntax_of(module))
            if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "dist"
        } & names  # fmt: skip

    assert_none((module, called(module)) for module, package in packages() if package == "health")


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


# ------------------------------------------------- attributes that one object sets on another

# Attributes that torch, Python and Lightning document as settable, in names that are ours, too.
SETTABLE = {"data", "grad", "grad_dtype", "requires_grad", "__class__"}
OF_OTHERS = """
launch.children sys.excepthook
optim.clone copy.state
optim.step self.optimizer.state
planner.engine_run part.forward
strategy.checkpointing launcher.procs
tensors.sharded ctx.error
strategy.checkpointing self._checkpoint_io.checkpoint_io
strategy.loops exception.code
strategy.processes rank_zero_only.rank
strategy.requeue bound.arguments
health.tracebacks sys.excepthook
"""  # objects of torch, Python and Lightning


def is_assignment(node):
    return isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)


def set_attributes(node):
    """Nodes `x.attribute` that an assignment sets."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        found = (n for n in ast.walk(target) if isinstance(n, ast.Attribute))
        yield from (n for n in found if isinstance(n.ctx, ast.Store))


def own_attributes():
    """Names of the attributes that classes of the package declare or set on themselves."""
    for module in MODULES:
        for node in ast.walk(syntax_of(module)):
            if isinstance(node, ast.ClassDef):
                fields = (n for n in node.body if isinstance(n, ast.AnnAssign))
                yield from (ast.unparse(n.target) for n in fields)
            elif isinstance(node, ast.FunctionDef):  # setters of properties
                setters = [f"{node.name}.setter"]
                yield from (node.name for d in node.decorator_list if ast.unparse(d) in setters)
            elif is_assignment(node):
                found = set_attributes(node)
                yield from (n.attr for n in found if ast.unparse(n.value) in {"self", "cls"})


def constructed(function):
    """Names of the locals to which `function` assigns a new object: the call of a class."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            path = ast.unparse(node.value.func)
            parts = [part.lstrip("_") for part in path.split(".")]
            if path == "cls" or parts[0][:1].isupper() or parts[-1][:1].isupper():
                yield from (n.id for n in node.targets if isinstance(n, ast.Name))


def set_from_outside(node, ours, receivers=frozenset({"self", "cls"})):
    """Yields `x.attribute` where an assignment below `node` sets an attribute of an object of ours.

    Not where x is `self`, `cls` or the class itself, or an object that the same function has made.
    """
    if isinstance(node, ast.ClassDef):
        receivers |= {node.name}
    elif isinstance(node, ast.FunctionDef):
        receivers |= set(constructed(node))
    elif is_assignment(node):
        for target in set_attributes(node):
            if ast.unparse(target.value) not in receivers and target.attr in ours:
                yield ast.unparse(target)
    for child in ast.iter_child_nodes(node):
        yield from set_from_outside(child, ours, receivers)


def test_no_object_sets_an_attribute_of_another_after_its_construction():
    ours = set(own_attributes()) - SETTABLE
    found = {
        f"{module.partition('.')[2]} {target}"
        for module in MODULES
        for target in set_from_outside(syntax_of(module), ours)
    }
    known = set(OF_OTHERS.strip().splitlines())
    new, gone = sorted(found - known), sorted(known - found)
    assert not new, "pass it to the constructor, or return it:\n" + "\n".join(new)
    assert not gone, "delete these lines from the list:\n" + "\n".join(gone)
