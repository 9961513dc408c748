"""What the checks found: a table, a page of Markdown and JSON, without names of hosts and users."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import NamedTuple

from lightning_zero.check.ranks import Check, Outcome
from lightning_zero.observe.tables import table

__all__ = ["Line", "as_table", "write_report"]


class Line(NamedTuple):
    """A check, what it found, and how long it took."""

    check: Check
    outcome: Outcome
    seconds: float


def as_table(lines: Sequence[Line]) -> str:
    """The lines as a table of the terminal's width."""
    rows = [[c.name, found.result, f"{s:.1f}", found.text] for c, found, s in lines]
    return table([["check", "result", "s", "found"], *rows], left=(0, 1, 3))


def write_report(lines: Sequence[Line], given: Mapping[str, bool], out: Path) -> str:
    """Writes both files into `out`; returns what to do with them. `given`: which options are."""
    page, data = out / "lightning-zero-check.md", out / "lightning-zero-check.json"
    page.write_text(_as_page(lines, given))
    found = [
        {"check": c.name, "result": o.result, "seconds": round(s, 2), "text": o.text}
        | {"numbers": o.numbers}
        for c, o, s in lines
    ]
    data.write_text(json.dumps({"options": given, "checks": found}, indent=1) + "\n")
    return (
        f"Please send {page.name} and {data.name}, also if all is well: open an issue at "
        f"{_tracker()}, paste the page and attach the JSON file. They have no names of hosts, "
        "users or paths; read them before you send them."
    )


def _as_page(lines: Sequence[Line], given: Mapping[str, bool]) -> str:
    results = [line.outcome.result for line in lines]
    counts = ", ".join(f"{results.count(r)} {r}" for r in ("ok", "failed", "skipped"))
    options = ", ".join(name for name, is_given in given.items() if is_given) or "none"
    total = sum(line.seconds for line in lines)
    parts = [f"# lightning-zero check: {counts}\n", f"{total:.0f} s; options: {options}.\n"]
    parts += ["| check | result | s | found |", "|---|---|---|---|"]
    for check, outcome, seconds in lines:
        what = (check.run.__doc__ or "").splitlines()[0].rstrip(".")
        text = outcome.text.replace("|", "\\|")
        parts.append(f"| {what} | **{outcome.result}** | {seconds:.1f} | {text} |")
    return "\n".join(parts) + "\n"


def _tracker() -> str:
    """Address of the issue tracker, from the URLs of the installed package."""
    with suppress(PackageNotFoundError):
        for entry in metadata("lightning-zero").get_all("Project-URL") or ():
            label, _, url = entry.partition(", ")
            if label.lower() == "issues":
                return str(url)
    return "the issue tracker of the project"
