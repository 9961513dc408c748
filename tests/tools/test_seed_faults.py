"""Faults are seeded where they matter, one at a time, the same ones for the same seed."""

from __future__ import annotations

import ast

import pytest

from tests.tools.seed_faults import KINDS, ROOT, apply, choose, faults_in, run_tests

SOURCE = """
if TYPE_CHECKING:
    skipped = 1 < 2

def step(rank, size, pending, out, part):
    assert rank < size
    if size == 1:  # \u00e4
        return part
    pending.wait()
    out.copy_(
        part[rank],
    )
    if size > 2: raise ValueError(f"{rank} {size < 3}")
"""
GOOD = "def is_less(a, b):\n    return a < b\n\n\ndef unused(a, b):\n    return a > b\n"
TEST = "from lightning_zero.mine import is_less\n\ndef test_it():\n    assert is_less(1, 2)\n"


def test_each_kind_of_fault_is_found_in_code_that_runs_and_not_in_checks():
    found = [(fault.kind, fault.line, fault.after) for fault in faults_in("a.py", SOURCE)]
    assert found == [
        ("comparison", 7, "(not (size == 1))"),
        ("wait", 9, "pass"),
        ("copy", 10, "pass"),
        ("ranks", 11, "(rank ^ 1)"),
        ("comparison", 13, "(not (size > 2))"),
    ]


def test_a_fault_changes_its_place_only():
    for fault in faults_in("a.py", SOURCE):
        bad = apply(fault, SOURCE)
        ast.parse(bad)
        assert bad.replace(fault.after, fault.before, 1) == SOURCE
    with pytest.raises(ValueError, match="other sources"):
        apply(fault, SOURCE.replace("size", "sice"))


def test_the_package_has_faults_of_all_kinds_and_a_seed_chooses_them():
    sources = {
        file.relative_to(ROOT).as_posix(): file.read_text()
        for file in (ROOT / "lightning_zero").rglob("*.py")
    }
    faults = [fault for name, source in sources.items() for fault in faults_in(name, source)]
    chosen = choose(faults, 8, seed=1)
    assert chosen == choose(list(reversed(faults)), 8, seed=1) != choose(faults, 8, seed=2)
    assert [fault.kind for fault in chosen] == [*KINDS, *KINDS]


@pytest.mark.default_cases("unused-False")
@pytest.mark.parametrize(("function", "is_found"), [("is_less", True), ("unused", False)])
def test_a_fault_is_found_where_a_test_fails(function, is_found, tmp_path):
    (tmp_path / "lightning_zero").mkdir()
    source = tmp_path / "lightning_zero" / "mine.py"
    source.write_text(GOOD)
    (source.parent / "__init__.py").touch()  # before one that is installed
    (tmp_path / "test_mine.py").write_text(TEST)
    of_less, of_unused = faults_in("lightning_zero/mine.py", GOOD)
    fault = of_less if function == "is_less" else of_unused
    outcome = run_tests(fault, tmp_path, ["-q", "test_mine.py"], limit_s=250.0)
    assert outcome.is_found is is_found
    assert ("test_it" in outcome.because) is is_found
    assert source.read_text() == GOOD
