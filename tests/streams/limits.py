"""What the clocks may see of a scenario, and how often."""

from __future__ import annotations

from tests.streams.scenarios import Scenario
from tests.streams.server import Outcome

__all__ = ["LEAST_BESIDE", "MOST_WAITS", "complaints"]

# Waits of the host in one step of four buckets. They must not increase.
MOST_WAITS = {
    "stage 3, cpu both, fp32, no group": 8,
    "stage 3, nvme both, fp32, no group": 10,
    "stage 1, cpu optimizer, fp32, clip": 6,
    "stage 1, cpu optimizer, fp16, plain": 6,
    "stage 2, cpu optimizer, bf16, overlap": 3,
    "stage 3, cpu optimizer, fp16, clip": 20,
    "stage 3, cpu optimizer, fp16, at once": 11,
    "stage 3, cpu parameters, bf16, accumulate": 8,
    "stage 3, cpu both, fp32, overlap": 8,
    "stage 3, cpu both, bf16, activations": 8,
    "stage 3, nvme optimizer, fp32, average": 16,
    "stage 3, nvme both, bf16, overlap": 10,
    "stage 3, half, fp16, plain": 5,
    **{f"stage {stage}, device, fp32, skip": 1 for stage in (1, 2, 3)},
}
_COPY, _GATHER, _REDUCE = (f"_{one}_stream of backends.py" for one in ("copy", "gather", "reduce"))
_GRADS, _ACTIVATIONS = "_stream of grad_offload.py", "the stream of activations.py"
_WORKER = "_stream of step_worker.py"
# Launches of compute in a step that run beside another stream, as a part of all launches. See
# [Note: Overlap] of the clocks. They are about 0.8 of what there was on 2026-11-27.
LEAST_BESIDE = {
    "stage 0, device, bf16, clip": {_REDUCE: 0.75},
    "stage 1, device, fp32, overlap": {_REDUCE: 0.7},
    "stage 3, device, fp32, plain": {_COPY: 0.28, _GATHER: 0.28, _REDUCE: 0.55},
    "stage 3, device, fp32, tensor rate": {_WORKER: 0.08},
    "stage 3, device, fp16, activations": {_GATHER: 0.15, _REDUCE: 0.45, _ACTIVATIONS: 0.45},
    "stage 3, cpu optimizer, fp16, clip": {_GATHER: 0.2, _REDUCE: 0.55, _GRADS: 0.06},
    "stage 3, cpu parameters, bf16, accumulate": {_COPY: 0.28, _GATHER: 0.28, _REDUCE: 0.5},
    "stage 3, nvme both, bf16, overlap": {_COPY: 0.2, _GATHER: 0.2, _REDUCE: 0.35, _GRADS: 0.06},
}


def complaints(scenario: Scenario, outcome: Outcome) -> list[str]:
    """What must not be, each as "KIND: what"; empty if all is well.

    The kinds are those of the clocks, WAIT (of the host, more often than it must), OVERLAP (of
    streams, less than there was) and ERROR (of the training).
    """
    if outcome.error:
        return [f"ERROR: {outcome.error}"]
    found = list(outcome.problems)
    # A scaler that may have to leave out a step looks whether, where torch's step cannot.
    waits = {why: count for why, count in outcome.syncs.items() if not why.endswith("[outside]")}
    limit = MOST_WAITS.get(scenario.name, 0 if scenario.is_on_device else None)
    if limit is not None and sum(waits.values()) > limit:
        found.append(f"WAIT: at most {limit} expected, got {waits}")
    for stream, least in LEAST_BESIDE.get(scenario.name, {}).items():
        part = outcome.beside.get(stream, 0) / max(outcome.num_launches, 1)
        if part < least:
            found.append(f"OVERLAP: {part:.2f} of the launches beside {stream}, less than {least}")
    return found
