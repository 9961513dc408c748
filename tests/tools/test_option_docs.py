"""Every option of `ZeroStrategy` is described in place, with the text of `ZeroConfig`."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from lightning_zero import ZeroConfig, ZeroStrategy
from tests.tools.option_docs import (
    arguments,
    descriptions,
    expected,
    source_of_schema,
    source_with_descriptions,
)

_MIN_LETTERS = 20


def test_options_are_described_as_in_zero_config():
    path, text = source_with_descriptions()
    message = "run `python -m tests.tools.option_docs --write`"
    assert path.read_text() == text, message
    shared = descriptions(ZeroConfig.__doc__, "Attributes")
    for name, description in descriptions(ZeroStrategy.__doc__, "Args").items():
        assert description.startswith(shared.get(name, "")), f"{name}: {message}"


def test_hydras_schema_has_the_options_of_the_strategy():
    path, text = source_of_schema()
    assert path.read_text() == text, "run `python -m tests.tools.option_docs --write`"


def test_every_argument_has_a_description_in_the_order_of_the_signature():
    described = descriptions(ZeroStrategy.__doc__, "Args")
    assert list(described) == arguments()
    assert not [name for name, text in described.items() if len(text) < _MIN_LETTERS]


def test_defaults_in_descriptions_are_those_of_the_signature():
    parameters = inspect.signature(ZeroStrategy).parameters
    described = descriptions(ZeroStrategy.__doc__, "Args")
    defaults = {
        name: ast.literal_eval(found[1])
        for name, text in described.items()
        if (found := re.search(r"default (\w+|\"\w+\")\.", text))
    }
    assert len(defaults) > 20
    assert defaults == {name: parameters[name].default for name in defaults}


def test_lightning_cli_shows_every_description(capsys):
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    with pytest.raises(SystemExit):
        LightningCLI(
            BoringModel, args=["fit", "--trainer.strategy.help=lightning_zero.ZeroStrategy"]
        )
    shown = _without_spaces(capsys.readouterr().out)
    missing = [name for name, text in expected().items() if _without_spaces(text) not in shown]
    assert not missing


def _without_spaces(text: str) -> str:
    return "".join(text.split())
