"""The tests that run by default execute all that the others do."""

from __future__ import annotations

import re

from tests.tools.choose import ALWAYS, choose, shortened
from tests.tools.records import ROOT, Records

A, B, C = ("a.py", 1, 2), ("a.py", 2, 3), ("b.py", 1, 2)
RECORDS = Records(
    arcs={
        "t.py::cheap": {A},
        "t.py::wide[1]": {A, B, C},
        "t.py::narrow[1]": {B},
        "t.py::narrow[2]": {C},
        "t.py::other[1]": {A},
        "t.py::other[2]": {A},
        "t.py::long": {A},
    },
    durations_s={
        "t.py::cheap": 0.1,
        "t.py::wide[1]": 9.0,
        "t.py::narrow[1]": 1.0,
        "t.py::narrow[2]": 1.0,
        "t.py::other[1]": 3.0,
        "t.py::other[2]": 2.0,
        "t.py::long": 30.0,
    },
)


def test_what_is_chosen_executes_all_for_the_least_time_with_a_case_of_every_function():
    kept = choose(RECORDS, cheap_s=0.25, case_s=4.0)
    assert kept == {"t.py::cheap", "t.py::narrow[1]", "t.py::narrow[2]", "t.py::other[2]"}


def test_a_function_stands_for_its_cases_where_all_are_left_out():
    names = RECORDS.durations_s
    assert shortened({"t.py::other[1]", "t.py::wide[1]"}, names) == ["t.py::other[1]", "t.py::wide"]


def test_the_tests_of_a_line_begin_with_the_quickest_of_each_file():
    assert RECORDS.tests_of("b.py", range(1, 2)) == ["t.py::narrow[2]", "t.py::wide[1]"]


def test_what_is_always_chosen_exists():
    for name in ALWAYS:
        file, _, rest = name.partition("::")
        function = re.split(r"\[|::", rest)[-1 if "[" not in rest else 0]
        assert f"def {function}" in (ROOT / file).read_text(), name
