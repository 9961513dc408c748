"""Export of checkpoints that are larger than memory."""

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.checkpoint.export import plan_export
from lightning_zero.checkpoint.torch_file import no_progress
from lightning_zero.tensors.lazy import LazyTensor

MIB = 1024**2
# Resident memory before the export, at its peak, and the part of the peak without a file.
MEASURED = """
import json, sys, threading
import lightning_zero.cli.export, lightning_zero.strategy.strategy  # with torch and Lightning
from lightning_zero.cli import main

def status(name):
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(name + ":")]
    return int(line.split()[1]) * 1024

def watch():
    while not is_done.wait(0.005):
        peak[0] = max(peak[0], status("RssAnon"))

before, anonymous, peak = status("VmRSS"), status("RssAnon"), [0]
is_done = threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
result = main(sys.argv[1:])
is_done.set()
watcher.join()
highest = status("VmHWM")  # as ru_maxrss, which however begins at that of the process before exec
print(json.dumps([result, highest - before, highest, peak[0] - anonymous, peak[0]]))
"""


@dataclass(frozen=True)
class Size:
    """Dimensions of a transformer, in elements."""

    width: int
    num_layers: int
    vocab_size: int

    def shapes(self):
        yield "embedding", (self.vocab_size, self.width)
        for number in range(self.num_layers):
            yield f"layers.{number}.attention", (self.width, 4 * self.width)
            yield f"layers.{number}.up", (self.width, 4 * self.width)
            yield f"layers.{number}.down", (4 * self.width, self.width)


SMALL = Size(512, 7, 12_000)  # 28 M
LARGE = Size(2048, 18, 50_304)  # 1.0 B


def values_of(number, shape):
    """Random values from a seed, created when they are read."""
    numel = torch.Size(shape).numel()

    def read(start, stop):
        generator = torch.Generator().manual_seed(number)
        base = torch.randn(4099, generator=generator)
        first = start % 4099
        return base.repeat((stop - start) // 4099 + 2)[first : first + stop - start]

    assert numel
    return LazyTensor.of(shape, torch.float32, read)


def write_checkpoint(size, form, path):
    shapes = dict(size.shapes())
    state = {name: values_of(number, shape) for number, (name, shape) in enumerate(shapes.items())}
    moments = {
        name: {
            "step": torch.tensor(1.0),
            "exp_avg": values_of(1000 + number, shape),
            "exp_avg_sq": values_of(2000 + number, shape),
        }
        for number, (name, shape) in enumerate(shapes.items())
    }
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": list(shapes)}]}
    tree = {"state_dict": state, "optimizer_states": [optimizer], "epoch": 0, "global_step": 1}
    plan_export(tree, form).write(path, no_progress)
    return state


def export(*arguments):
    command = [sys.executable, "-c", MEASURED, "export", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result, *found = json.loads(done.stdout.splitlines()[-1])
    assert result == 0, done.stderr
    names = ("resident above start", "resident", "anonymous above start", "anonymous")
    print({name: f"{value / MIB:.0f} MiB" for name, value in zip(names, found, strict=True)})
    return dict(zip(names, found, strict=True))


def assert_same_weights(path, state):
    opened = open_checkpoint(path)["state_dict"]
    assert set(opened) == set(state)
    for name, value in opened.items():
        expected = state[name].read().to(value.dtype)
        assert torch.equal(value.clone() if type(value) is LazyTensor else value, expected), name


TARGETS = {
    "safetensors": ["--dtype", "bf16", "--max-shard-size", "1GiB"],
    "dcp": ["--format", "dcp"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [("ckpt", "safetensors"), ("dcp", "dcp")])
def test_a_checkpoint_of_340_mb_is_exported_in_160(source, target, tmp_path):
    state = write_checkpoint(SMALL, source, tmp_path / "source")
    found = export(tmp_path / "source", tmp_path / "out", *TARGETS[target])
    assert found["resident above start"] < 160 * MIB
    assert found["anonymous above start"] < 100 * MIB
    assert_same_weights(tmp_path / "out", state)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("source", "target"), [("dcp", "safetensors"), ("dcp", "dcp")])
def test_a_checkpoint_of_1_b_parameters_is_exported_below_1_5_gib(source, target, tmp_path):
    write_checkpoint(LARGE, source, tmp_path / "source")
    found = export(tmp_path / "source", tmp_path / "out", *TARGETS[target])
    assert found["resident"] < 1536 * MIB
    assert found["anonymous"] < 1536 * MIB
