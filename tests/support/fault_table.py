"""Tables of the fault matrix: python -m tests.support.fault_table RESULTS...

RESULTS are files of JSON lines; see `fault_matrix.py`. The last line of each cell counts. Seconds
are from the fault to the end of the last process; cells that had to be killed have none.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main"]


def main(paths: Sequence[str]) -> None:
    cells: dict[str, dict[str, Any]] = {}
    for path in paths:
        for line in Path(path).read_text().splitlines():
            result = json.loads(line)
            if result["fault"] != "none":
                cells[result["cell"]] = result
    results = list(cells.values())
    for axis in ("fault", "place", "world_size"):
        print(f"| {axis} | cells | passed | hung | min s | median s | max s |")
        print("|---|---|---|---|---|---|---|")
        for value in dict.fromkeys(result[axis] for result in results):
            print(_row(value, [result for result in results if result[axis] == value]))
        if axis == "fault":
            print(_row("all", results))
        print()
    for result in results:
        if result["problems"]:
            print(f"- {result['cell']}: {'; '.join(result['problems'])}")


def _row(name: Any, results: Iterable[dict[str, Any]]) -> str:
    results = list(results)
    passed = sum(result["verdict"] == "passed" for result in results)
    ended = [r["seconds"] for r in results if not r["killed"] and r["seconds"] is not None]
    hung = sum(result["killed"] > 0 for result in results)
    numbers = [min(ended), statistics.median(ended), max(ended)] if ended else []
    texts = [f"{number:.1f}" for number in numbers] or ["-"] * 3
    return f"| {name} | {len(results)} | {passed} | {hung} | {' | '.join(texts)} |"


if __name__ == "__main__":
    main(sys.argv[1:])
