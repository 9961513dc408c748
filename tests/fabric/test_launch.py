"""Fabric starts the ranks itself: by running the script again, or by forking."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
import lightning_zero
from lightning.fabric import Fabric


def train(fabric):
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 2)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in range(3):
        fabric.backward(model(torch.full((1, 4), float(fabric.global_rank))).sum())
        optimizer.step()
        optimizer.zero_grad()
    weight = model.state_dict()["weight"] + 0
    fabric.print(f"world size {fabric.world_size}, weights {weight.sum().item():.4f}")
    if "fail" in sys.argv and fabric.global_rank == 1:
        raise ValueError("rank 1 fails")
    fabric.barrier()


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy=sys.argv[1])
    if sys.argv[1].endswith("notebook"):
        fabric.launch(train)
    else:
        fabric.launch()
        train(fabric)
"""


def run(tmp_path, *arguments):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "zero3_notebook"])
def test_fabric_starts_the_ranks(name, tmp_path):
    done = run(tmp_path, name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("world size 2, weights") == 1


@pytest.mark.slow
def test_a_failed_rank_ends_all(tmp_path):
    done = run(tmp_path, "zero3", "fail")
    assert done.returncode != 0
    assert "rank 1 fails" in done.stderr
