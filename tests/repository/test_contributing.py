"""The test that CONTRIBUTING.md shows is one."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def test_the_example_passes(tmp_path, monkeypatch):
    (source,) = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "example_of_contributing.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("example_of_contributing")
    module.test_all_ranks_have_the_same_weights_after_a_step(3)


def test_files_that_are_named_exist():
    for name in re.findall(r"tests/[\w/]+(?:\.py|/)", TEXT):
        assert (Path(__file__).parents[2] / name).exists(), name
