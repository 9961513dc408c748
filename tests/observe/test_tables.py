"""Text in columns, fitted to the width of the terminal."""

import pytest

from lightning_zero.observe.tables import WIDTH, paragraph, table

LINES = [
    ["GiB", "offload", "on GPUs", "peak"],
    ["stage3", "nvme, gradients too", "0.0", "70.5"],
    ["[red]", "", "44.9", "112"],
]


@pytest.fixture
def columns(monkeypatch):
    return lambda width: monkeypatch.setenv("COLUMNS", str(width))


def test_a_table_that_fits_has_one_line_for_each_row(columns):
    columns(80)
    assert table(LINES, left=(0, 1)).splitlines() == [
        "GiB     offload              on GPUs  peak",
        "stage3  nvme, gradients too      0.0  70.5",
        "[red]                           44.9   112",
    ]


def test_a_wide_table_is_narrowed_and_wrapped_between_words(columns):
    columns(27)
    assert table(LINES, left=(0, 1)).splitlines() == [
        "GiB    offload   on GPUs peak",
        "stage3 nvme,         0.0 70.5",
        "       gradients",
        "       too",
        "[red]               44.9  112",
    ]


def test_no_cell_is_truncated_in_a_table_that_is_still_too_wide(columns):
    columns(5)
    text = table(LINES, left=(0, 1))
    for cell in ("stage3", "gradients", "70.5", "[red]", "44.9", "112"):
        assert cell in text


def test_a_file_has_120_columns_and_no_codes(monkeypatch):
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.__stdout__", None)
    lines = paragraph("[bold]1.5 words " * 50).splitlines()
    assert WIDTH - 15 < len(lines[0]) <= WIDTH == 120
    assert "\x1b" not in "".join(lines)
    assert " ".join(lines).split() == ["[bold]1.5", "words"] * 50
