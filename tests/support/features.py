"""The table of what works in docs/limits.md, written by the tests that passed.

    @pytest.mark.shows("EMAWeightAveraging")                       # in stages 1, 2 and 3
    @pytest.mark.shows("ModelPruning", stages=(1, 2))
    @pytest.mark.refuses("ModelPruning", stages=(3,), because="it ranks full parameters")

A test with a parameter `stage` counts for that stage alone. One mark on each of several tests, or
several marks on one, are fine: a cell is "yes" if all tests behind it have passed. What is no
callback of Lightning's gets a row among the features.

`pytest -m "shows or refuses" --write-features docs/limits.md` runs the tests and writes it;
`pytest --collect-only --list-features` prints the one that would be written if all passed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["BEGIN", "END", "Claim", "table"]

BEGIN, END = "<!-- features: begin -->", "<!-- features: end -->"
_STAGES = (1, 2, 3)


@dataclass(frozen=True, order=True)
class Claim:
    """What one test shows: that something works in a stage, or is refused there with a reason."""

    name: str
    stage: int
    because: str | None = None

    @property
    def cell(self) -> str:
        return "yes" if self.because is None else "refused"


def claims_of(item: pytest.Item) -> list[Claim]:
    """From the marks of one test."""
    claims = []
    for mark in (*item.iter_markers("shows"), *item.iter_markers("refuses")):
        (name,) = mark.args
        unknown = mark.kwargs.keys() - {"stages", "because"}
        because = mark.kwargs.get("because")
        if unknown or (mark.name == "refuses") != (because is not None):
            raise pytest.UsageError(f"{item.nodeid}: {mark} needs a name, and a reason to refuse")
        stages = mark.kwargs.get("stages")
        own = getattr(item, "callspec", None) and item.callspec.params.get("stage")
        if stages is None:
            stages = (own,) if isinstance(own, int) else _STAGES
        claims += [Claim(name, stage, because) for stage in stages if stage in _STAGES]
    return claims


def table(claims: Iterable[Claim]) -> str:
    """Two tables in Markdown: Lightning's callbacks, and the rest."""
    from lightning.pytorch import callbacks

    rows: dict[str, dict[int, Claim]] = {}
    for claim in claims:
        known = rows.setdefault(claim.name, {}).setdefault(claim.stage, claim)
        if known != claim:
            raise pytest.UsageError(f"{claim.name} is said to be {known.cell} and {claim.cell}")
    are_callbacks = {name: name in callbacks.__all__ for name in rows}
    parts = []
    for is_callback, title in ((True, "callback of Lightning"), (False, "feature")):
        names = sorted((n for n in rows if are_callbacks[n] is is_callback), key=str.lower)
        lines = [f"| {title} | stage 1 | stage 2 | stage 3 | |", "|---|---|---|---|---|"]
        titles: dict[str, list[str]] = {}  # of each row; equal callbacks share one
        for name in names:
            key = _cells(rows[name]) if is_callback else name
            titles.setdefault(key, []).append(name)
        for together in titles.values():
            title = ", ".join(f"`{name}`" if is_callback else name for name in together)
            lines.append(f"| {title} | {_cells(rows[together[0]])} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cells(claims: dict[int, Claim]) -> str:
    texts = [claims[stage].cell if stage in claims else "" for stage in _STAGES]
    reasons = sorted({claim.because for claim in claims.values() if claim.because is not None})
    return f"{' | '.join(texts)} | {'; '.join(reasons)}"


class Features:
    """Collects what marked tests claim and which of them passed."""

    def __init__(self) -> None:
        self.claimed: list[Claim] = []
        self.passed: list[Claim] = []
        self.failed: set[Claim] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Before any is deselected; the claims are sent with the reports."""
        for item in items:
            claims = claims_of(item)
            self.claimed += claims
            if claims:
                texts = json.dumps([[c.name, c.stage, c.because] for c in claims])
                item.user_properties.append(("features", texts))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for key, value in report.user_properties:
            if key == "features":
                claims = [Claim(*parts) for parts in json.loads(value)]
                if report.when == "call" and report.passed:
                    self.passed += claims
                elif report.failed:
                    self.failed |= set(claims)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("features")
    group.addoption("--write-features", metavar="FILE", help="write the table into a page")
    group.addoption("--list-features", action="store_true", help="print what the marks claim")


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "shows(name, stages=(1, 2, 3)): the test shows that this works; a row of docs/limits.md",
        "refuses(name, stages, because): the test shows that this is refused, and why",
    ):
        config.addinivalue_line("markers", line)
    config.pluginmanager.register(Features(), "features")


def pytest_sessionfinish(session: pytest.Session) -> None:
    features = session.config.pluginmanager.get_plugin("features")
    assert isinstance(features, Features)
    if session.config.getoption("list_features"):
        print(f"\n{BEGIN}\n{table(features.claimed)}\n{END}")
    path = session.config.getoption("write_features")
    if path is not None:
        write(Path(path), table(claim for claim in features.passed if claim not in features.failed))


def write(page: Path, text: str) -> None:
    """Replaces what is between the two comments."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise pytest.UsageError(f"{page} has no {BEGIN} ... {END}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
