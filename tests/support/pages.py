"""README.md and the pages of docs/, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["GUIDES", "PAGES", "README", "ROOT", "blocks"]

ROOT = Path(__file__).parents[2]
README = "README.md"
GUIDES = "docs/guides"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / README, *sorted((ROOT / "docs").rglob("*.md")))
}
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def blocks(language: str, page: str) -> list[str]:
    """The blocks of code in one language, in the order of the page."""
    return [text for kind, text in _BLOCK.findall(PAGES[page]) if kind == language]
