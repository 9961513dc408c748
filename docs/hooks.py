"""Hooks of MkDocs that add the dated pages of `tests/benchmarks` to the site.

The sources link to these pages by their path in the repository, so that the links work there, too.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_FOLDER = "tests/benchmarks"
_ROOT = Path(__file__).parents[1]


def on_files(files: Any, config: Any) -> Any:
    """Adds the dated pages and their pictures below `benchmarks/`."""
    for path in sorted((_ROOT / _FOLDER).iterdir()):
        if path.suffix in (".md", ".png"):
            uri = f"benchmarks/{path.name}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites links to the dated pages as links within the site."""
    up = "../" * page.file.src_uri.count("/")
    return re.sub(rf"\]\((?:\.\./)+{_FOLDER}/", f"]({up}benchmarks/", markdown)
