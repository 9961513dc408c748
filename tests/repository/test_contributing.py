"""The test that CONTRIBUTING.md shows is one."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def test_the_example_passes(tmp_path, monkeypatch):
    (source,) = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "example_of_contributing.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("example_of_contributing")
    module.test_all_ranks_have_the_same_weights_after_a_step(3)


def test_the_links_of_the_readme_become_absolute_for_the_index(tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (tmp_path / "README.md").write_text(readme)
    (command,) = re.findall(r"^ +(url=.*\n +sed .*)$", TEXT, flags=re.MULTILINE)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    found = (tmp_path / "README.md").read_text()
    targets = re.findall(r"\]\(([^)]*)\)", found)
    assert len(targets) == len(re.findall(r"\]\(([^)]*)\)", readme))
    assert all(target.startswith(("https://", "#")) for target in targets), targets
    assert "/raw/v0.1.0/docs/trace.png" in found
    assert "/blob/v0.1.0/docs/quickstart.md" in found
