"""The copies that the planner counts are those of the engine beside a device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_zero import ZeroConfig
from lightning_zero.planner import Choice, EngineRuns, Machine, estimate
from tests.streams.checker import Checker
from tests.streams.scenarios import Scenario
from tests.streams.training import Net, loss_of

NVME = {"device": "nvme", "nvme_path": ".", "buffer_count": 2, "buffer_size": 2**16}
BOTH = {"offload_optimizer": "cpu", "offload_param": "cpu"}
CASES: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "optimizer": ({"stage": 1, "offload_optimizer": "cpu"}, "fp32", ()),
    "optimizer, 16 bit": ({"stage": 2, "offload_optimizer": "cpu"}, "bf16", ("accumulate",)),
    "parameters": ({"stage": 3, "offload_param": "cpu"}, "fp32", ()),
    "parameters, 16 bit": ({"stage": 3, "offload_param": "cpu"}, "bf16", ()),
    "both": ({"stage": 3, **BOTH}, "fp32", ("accumulate",)),
    "both, 16 bit": ({"stage": 3, **BOTH}, "bf16", ()),
    "parameters in files": ({"stage": 3, "offload_param": NVME}, "fp32", ()),
    "parameters in files, 16 bit": ({"stage": 3, "offload_param": NVME}, "bf16", ()),
    "all in files": ({"stage": 3, "offload_param": NVME, "offload_optimizer": NVME}, "bf16", ()),
    "files": ({"stage": 3, "offload_param": NVME, "offload_optimizer": "cpu"}, "fp32", ()),
}


@pytest.mark.default_cases("both, 16 bit")
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_of_copies_in_a_step_are_those_that_the_engine_copies(
    checker: Checker, name: str
):
    settings, precision, options = CASES[name]
    scenario = Scenario(
        config=settings, precision=precision, options=(*options, "recorded"), num_ranks=8
    )
    outcome = checker.run(scenario)
    assert not outcome.error
    with torch.device("meta"):
        module = Net()
    optimizers = [torch.optim.AdamW(module.parameters())]
    step = partial(loss_of, device=torch.device("cpu"))
    micro_batches = 1 + ("accumulate" in options)
    runs = EngineRuns(module, optimizers, step, num_micro_batches=micro_batches)
    config = ZeroConfig(**settings, param_dtype=torch.bfloat16 if precision == "bf16" else None)
    machine = Machine(8, 8, has_device_memory=True)
    counts = estimate(Choice("", "", config), runs, machine).counts
    stepped_numel = outcome.copied.pop("stepped")
    assert outcome.copied == {"to_cpu": counts.to_cpu, "to_device": counts.from_cpu}
    # float32: the gradient is read; main parameter and two states of Adam are read and written.
    assert counts.cpu_step == (1 + 2 * 3) * 4 * stepped_numel
    assert bool(stepped_numel) == ("offload_optimizer" in settings)
