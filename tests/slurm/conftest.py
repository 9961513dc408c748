"""One cluster for all tests of this folder; each test has a folder that the nodes share."""

import tempfile
from pathlib import Path

import pytest

from tests.slurm.cluster import cluster, why_no_slurm


@pytest.fixture(scope="session")
def slurm():
    reason = why_no_slurm()
    if reason is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="zero-slurm-") as folder:
        Path(folder).chmod(0o755)
        with cluster(Path(folder)) as made:
            yield made
