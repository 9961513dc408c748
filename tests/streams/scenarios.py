"""What is trained under the clocks: every way that moves memory differently."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

__all__ = ["ALL", "CHOSEN", "Scenario"]


@dataclass(frozen=True)
class Scenario:
    """One way to train.

    Attributes:
        name: Name of the scenario.
        config: Arguments of `ZeroConfig`.
        precision: "fp32", "bf16", or "fp16" with a loss scaler.
        optimizer: "adamw"; the same with a "tensor rate", or by "foreach"; or "muon" on full
            tensors.
        options: Any of "clip", "accumulate", "looks" between steps, "average" of the weights,
            offloaded "activations", "offloaded states" between steps, an "evaluation" before each
            step, "edits" of parameters before the first step and after an evaluation, gradients
            "unscaled by the step" of a loss scaler, "failures" of a forward and of a backward, and
            "recorded" copies in the last step.
        fault: Name of a seeded fault; empty: none.
        num_ranks: World size; this is rank 0. 0: there is no process group.
    """

    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    optimizer: str = "adamw"
    options: tuple[str, ...] = ()
    fault: str = ""
    num_ranks: int = 8

    @property
    def is_on_device(self) -> bool:
        """All states rest there."""
        return not any(key.startswith("offload") for key in self.config)


_NVME = {"device": "nvme", "nvme_path": ".", "buffer_count": 2, "buffer_size": 2**16}
_PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu optimizer": {"offload_optimizer": "cpu"},
    "cpu parameters": {"offload_param": "cpu"},
    "cpu both": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "nvme optimizer": {"offload_optimizer": _NVME},
    "nvme parameters": {"offload_param": _NVME},
    "nvme both": {"offload_optimizer": _NVME, "offload_param": _NVME},
    "nvme gradients": {"offload_optimizer": {**_NVME, "max_in_cpu_bytes": 0}},
    "half": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
}
_LIKE_OTHERS = ("nvme parameters", "nvme optimizer", "nvme gradients", "half")
_PRECISIONS = ("fp32", "bf16", "fp16")
_WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"options": ("clip",)},
    "accumulate": {"options": ("accumulate",)},
    "groups": {"config": {"sharding_group_size": 4}, "options": ("accumulate", "clip")},
    "overlap": {"config": {"overlap_step": True}, "options": ("looks",)},
    "overlap beside replicated": {
        "config": {"overlap_step": True, "param_persistence_threshold": 200},
        "options": ("looks",),
    },
    "muon": {"optimizer": "muon", "options": ("looks",)},
    "overlap of muon": {
        "optimizer": "muon",
        "config": {"overlap_step": True},
        "options": ("looks",),
    },
    "foreach": {"optimizer": "foreach"},
    "tensor rate": {"optimizer": "tensor rate", "config": {"overlap_step": True}},
    "at once": {"config": {"assume_elementwise": True}},
    "tensor rate at once": {
        "optimizer": "tensor rate",
        "config": {"assume_elementwise": True},
    },
    "unscaled by the step": {"options": ("unscaled by the step",)},
    "average": {"options": ("average", "looks")},
    "activations": {"options": ("activations",)},
    "offloaded states": {"options": ("offloaded states",)},
    "evaluation": {"options": ("evaluation",)},
    "edits": {"options": ("edits",)},
    "unguarded": {"config": {"on_nonfinite": None}},
    "skip": {"config": {"on_nonfinite": "skip"}},
    "no overlap": {"config": {"overlap_comm": False}},
    "failures": {"options": ("failures",)},
    "failures in groups": {"config": {"sharding_group_size": 4}, "options": ("failures",)},
    "one rank": {"num_ranks": 1},
    "no group": {"num_ranks": 0},
}
_EQUAL_IN_ALL_PRECISIONS = (
    "offloaded states",
    "evaluation",
    "edits",
    "unguarded",
    "skip",
    "no overlap",
    "failures",
    "failures in groups",
    "one rank",
    "no group",
    "tensor rate",
    "tensor rate at once",
)


_WAYS_OF_STAGE_0 = ("plain", "clip", "accumulate", "failures", "no group", "unguarded")


def _scenario(stage: int, place: str, precision: str, way: str) -> Scenario:
    options = dict(_WAYS[way])
    config = {"stage": stage, **_PLACES[place], **options.pop("config", {})}
    name = f"stage {stage}, {place}, {precision}, {way}"
    return Scenario(name, config, precision, **options)


_CHOSEN = """
0, device, bf16, clip
1, device, fp32, overlap
1, device, fp32, failures
1, device, bf16, groups
1, cpu optimizer, fp16, plain
2, device, fp16, accumulate
2, cpu optimizer, bf16, overlap
2, device, fp32, overlap of muon
3, cpu optimizer, bf16, overlap beside replicated
3, device, fp32, overlap
3, device, fp16, activations
3, device, fp32, plain
3, device, fp32, failures in groups
3, device, bf16, muon
3, cpu optimizer, fp16, clip
3, cpu optimizer, bf16, evaluation
3, cpu optimizer, fp32, tensor rate at once
3, half, fp16, plain
3, cpu parameters, bf16, accumulate
3, cpu both, fp32, no group
3, cpu both, fp32, evaluation
3, device, fp32, skip
3, device, fp32, unguarded
3, nvme parameters, fp32, plain
3, nvme both, fp32, no group
3, nvme optimizer, fp32, average
3, nvme both, bf16, overlap
"""
CHOSEN = {f"stage {line}" for line in _CHOSEN.split("\n") if line}


def _is_worth_it(stage: int, place: str, precision: str, way: str) -> bool:
    if way in _EQUAL_IN_ALL_PRECISIONS and precision != "fp32":
        return False
    if way == "overlap beside replicated" and stage != 3:
        return False
    if way == "unscaled by the step" and precision != "fp16":
        return False
    if way in ("skip", "unguarded") and place != "device":
        return False
    if place in _LIKE_OTHERS and way != "plain":
        return False
    if stage == 0:  # nothing is sharded
        return place == "device" and way in _WAYS_OF_STAGE_0
    return stage == 3 or "offload_param" not in _PLACES[place]


ALL = [
    one
    for case in product((0, 1, 2, 3), _PLACES, _PRECISIONS, _WAYS)
    if (one := _scenario(*case)).name in CHOSEN or _is_worth_it(*case)
]
