"""The pages of docs/ and the README tell of all there is, and of nothing else."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import re

import pytest
import yaml
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import lightning_zero
import lightning_zero.callbacks
from lightning_zero.cli.options import add_commands
from tests.repository.test_layers import MODULES, syntax_of
from tests.support.pages import PAGES, ROOT, blocks

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)
LINKING = [*PAGES, "CONTRIBUTING.md"]


def text_of(page):
    return FENCED.sub("", (ROOT / page).read_text())


def slugs(page):
    """Anchors of the headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", LINKING)
def test_no_relative_link_is_broken(page):
    for link in LINK.findall(text_of(page)):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.is_file(), link
        assert target.resolve().is_relative_to(ROOT), link
        if anchor:
            assert anchor in slugs(target.resolve().relative_to(ROOT)), link


@pytest.mark.parametrize("page", LINKING)
def test_files_that_are_named_exist(page):
    pattern = r"`(?:\w+ )?((?:tests|examples|conf|docs|lightning_zero)/[\w./-]*)[` ]"
    for name in re.findall(pattern, text_of(page)):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES)
def test_names_of_the_package_exist(page):
    for name in re.findall(r"\blightning_zero((?:\.\w+)+)", PAGES[page]):
        parts = name[1:].split(".")
        is_public = parts[0] in lightning_zero.__all__
        assert is_public or importlib.util.find_spec(f"lightning_zero.{parts[0]}"), name
        if parts[0] == "callbacks" and len(parts) > 1:
            assert parts[1] in lightning_zero.callbacks.__all__, name


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_python_on_a_page_does_not_scroll(page):
    lines = [line for block in blocks("python", page) for line in block.splitlines()]
    assert [line for line in lines if len(line) > 84] == []


def test_every_page_is_in_the_navigation():
    (nav,) = re.findall(r"^nav:\n(?:[ ].*\n)+", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    documented = []

    def collect(entries):
        for entry in entries:
            (value,) = entry.values()
            documented.append(value) if isinstance(value, str) else collect(value)

    collect(yaml.safe_load(nav)["nav"])
    there = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert sorted(documented) == sorted(there)


def test_every_public_name_is_in_the_reference():
    names = [
        *(f"lightning_zero.{name}" for name in lightning_zero.__all__),
        *(f"lightning_zero.callbacks.{name}" for name in lightning_zero.callbacks.__all__),
        *(f"lightning_zero.optim.{name}" for name in lightning_zero.optim.__all__),
        "lightning_zero.fabric.ZeroStrategy",
        "lightning_zero.ray.RayZeroStrategy",
    ]
    page = PAGES["docs/reference/python.md"]
    documented = re.findall(r"^::: ([\w.]+)$", page, flags=re.MULTILINE)
    assert sorted(documented) == sorted(names)


def test_every_public_name_has_a_docstring():
    names = {
        f"{name}.{member}".rstrip("."): value
        for face in (lightning_zero, lightning_zero.callbacks)
        for name in face.__all__
        for member, value in [("", getattr(face, name)), *members_of(getattr(face, name))]
    }
    assert [name for name, value in names.items() if not inspect.getdoc(value)] == []


def members_of(value):
    """Public methods of a class; overridden methods of Lightning's are documented there."""
    classes = getattr(value, "__mro__", [])
    theirs = {n for c in classes if not c.__module__.startswith("lightning_zero") for n in vars(c)}
    return [
        (name, member)
        for name, member in inspect.getmembers(value if classes else None)
        if not name.startswith("_") and name not in theirs
        if callable(member) or isinstance(member, property)
    ]


def test_every_command_is_in_the_reference_and_every_option_in_its_help():
    rows = re.findall(r"^\| `([a-z]+)` \|", PAGES["docs/reference/cli.md"], flags=re.MULTILINE)
    subparsers = argparse.ArgumentParser().add_subparsers()
    add_commands(subparsers)
    assert sorted(rows) == sorted(subparsers.choices)
    for name, parser in subparsers.choices.items():
        options = [action for action in parser._actions if action.option_strings]
        assert not [action for action in options if not action.help], name


def test_every_dated_page_is_in_the_index_of_benchmarks():
    there = {path.name for path in (ROOT / "tests" / "benchmarks").glob("*.md")}
    documented = re.findall(r"\(\.\./tests/benchmarks/([\w.-]+\.md)\)", PAGES["docs/benchmarks.md"])
    assert sorted(documented) == sorted(there)


def test_every_message_of_the_page_of_errors_is_one_of_the_package():
    source = "".join(
        node.value
        for module in MODULES
        for node in ast.walk(syntax_of(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    rows = re.findall(r"^\| (`.+?) \|", PAGES["docs/guides/errors.md"], flags=re.MULTILINE)
    of_package = [row for row in rows if not re.search(r"\((Hydra|Lightning|torch)\)$", row)]
    assert len(of_package) > 20
    for message in re.findall(r"`([^`]+)`", " ".join(of_package)):
        for part in message.split("..."):
            assert part in source, message


def test_every_argument_of_fsdp_is_in_its_migration_page():
    others = [FSDPStrategy, FullyShardedDataParallel, ModelParallelStrategy, fully_shard]
    names = {name for other in others for name in inspect.signature(other).parameters}
    page = PAGES["docs/migration.md"]
    missing = {n for n in names - {"module", "kwargs"} if not re.search(rf"`(\w+\()?{n}\b", page)}
    assert missing == set()
