"""Imports torchmetrics without scipy, matplotlib and transformers, which some of its metrics use.

Lightning imports torchmetrics, and that imports these packages where they are installed: a third of
the time of the import. No test uses such a metric.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

from lightning_utilities.core import imports

_LEFT_OUT = ("scipy", "matplotlib", "transformers")
_is_available, _is_met = imports.package_available, imports.RequirementCache.__bool__


def _is_package(name: str) -> bool:
    return name not in _LEFT_OUT and _is_available(name)


def _is_requirement(cache: Any) -> bool:
    return not str(cache.requirement).startswith(_LEFT_OUT) and _is_met(cache)


with (
    mock.patch.object(imports, "package_available", _is_package),
    mock.patch.object(imports.RequirementCache, "__bool__", _is_requirement),
):
    importlib.import_module("torchmetrics")
