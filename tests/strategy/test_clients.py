"""Libraries that train with Lightning: their code, unchanged, with the name of a strategy."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from tests.support.processes import SCRIPTS, run_python

# A script in tests/support/scripts/clients, and the package that it imports.
CLIENTS = {
    "nbeats": "darts",
    "deepar": "gluonts",
    "byol": "lightly",
    "gpt": "litgpt",
    "gpt_fabric": "litgpt",
    "nhits": "neuralforecast",
    "tft": "pytorch_forecasting",
    "tabular": "pytorch_tabular",
    "unet": "segmentation_models_pytorch",
}
CASES = [
    pytest.param(
        script,
        marks=pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed"),
        id=f"{package}: {script}",
    )
    for script, package in CLIENTS.items()
]


@pytest.fixture(scope="module")
def torchvision():
    """Most of the libraries import it, and PyPI's fails without CUDA's torch."""
    program = "try:\n    import torchvision\nexcept RuntimeError as error:\n    print(error)"
    if find_spec("torchvision") is not None and (error := run_python("-c", program)):
        pytest.skip(f"torchvision was built for another torch: {error.strip()}")


@pytest.mark.slow
@pytest.mark.shows(
    "models of darts, gluonts, lightly, litgpt, neuralforecast, pytorch_forecasting, "
    "pytorch_tabular, segmentation_models_pytorch",
    stages=(1, 3),
)
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("script", CASES)
def test_a_library_trains_unchanged_to_the_loss_and_parameters_of_ddp(script, tmp_path):
    def report(strategy):
        folder = tmp_path / strategy
        folder.mkdir()
        output = run_python(SCRIPTS / "clients" / f"{script}.py", strategy, cwd=folder)
        (line,) = (line for line in output.splitlines() if line.startswith("report "))
        return json.loads(line.removeprefix("report "))

    expected = pytest.approx(report("ddp"), rel=1e-6)
    assert report("zero1") == expected
    assert report("zero3") == expected
