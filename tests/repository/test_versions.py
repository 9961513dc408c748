"""Versions of torch and Lightning: what users get, what CI has, what tests/versions.sh tests."""

import re
import subprocess
from pathlib import Path

from packaging.requirements import Requirement

from tests.repository.test_wheel import ROOT

SCRIPT = ROOT / "tests" / "versions.sh"


def _requirements(lines):
    found = [Requirement(line) for line in lines]
    return {one.name: one.specifier for one in found if one.name in {"torch", "lightning"}}


def _accepted():
    (block,) = re.findall(
        r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    return _requirements(re.findall(r'^  "(.*?)"', block, re.M))


def test_ci_has_one_version_that_users_may_have():
    text = (ROOT / ".ci" / "constraints.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    accepted, pinned = _accepted(), _requirements(lines)
    assert accepted.keys() == pinned.keys() == {"torch", "lightning"}
    for name, specifier in pinned.items():
        (one,) = specifier
        assert one.operator == "=="
        assert one.version in accepted[name]
    run = (ROOT / ".ci" / "run").read_text()
    assert run.index("export PIP_CONSTRAINT=$work/.ci/constraints.txt") < run.index(".ci/readme")


def test_no_upper_bound_makes_pip_downgrade_a_users_torch():
    for specifier in _accepted().values():
        assert {one.operator for one in specifier} <= {">=", "!="}


def test_the_suite_of_other_versions_exists():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    (suite,) = re.findall(r"^suite=\(\n(.*?)^\)", SCRIPT.read_text(), re.M | re.S)
    missing = [name for name in suite.split() if not Path(ROOT, name).exists()]
    assert not missing
