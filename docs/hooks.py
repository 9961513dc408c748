"""Hooks of MkDocs: the dated pages of `tests/benchmarks`, GitHub's alerts, and the version.

The sources are pages for GitHub, too. They link to the dated pages by their path in the repository,
and a warning is an alert (`> [!WARNING]`), which the site shows as an admonition.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_FOLDER = "tests/benchmarks"
_ROOT = Path(__file__).parents[1]
_ALERT = re.compile(r"^> \[!(\w+)\]\n((?:>.*\n?)+)", flags=re.MULTILINE)


def on_config(config: Any) -> Any:
    """Puts the version of the package into the footer of every page."""
    source = (_ROOT / "lightning_zero" / "_version.py").read_text()
    version = re.search(r'^__version__ = "(.+)"', source, flags=re.MULTILINE)
    assert version is not None
    config.copyright = f"lightning_zero {version[1]}"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the dated pages and their pictures below `benchmarks/`."""
    for path in sorted((_ROOT / _FOLDER).iterdir()):
        if path.suffix in (".md", ".png"):
            uri = f"benchmarks/{path.name}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites links to the dated pages as links within the site, and alerts as admonitions."""
    up = "../" * page.file.src_uri.count("/")
    markdown = _ALERT.sub(_as_admonition, markdown)
    return re.sub(rf"\]\((?:\.\./)+{_FOLDER}/", f"]({up}benchmarks/", markdown)


def _as_admonition(alert: re.Match[str]) -> str:
    lines = [re.sub(r"^> ?", "    ", line).rstrip() for line in alert[2].splitlines()]
    return "\n".join([f"!!! {alert[1].lower()}", "", *lines, ""])
