"""Memory and traffic of every stage and offload, computed from shapes before a job runs.

Uses neither a device nor a process group. Imports `layout`, and from `optim` the code that copies
an optimizer.

    estimates   every stage with every offload: its estimate, whether it fits, the cheapest
    memory      bytes of the model states between steps, by the engine's rules of allocation
    trace       one step on fake tensors: order of use and activations; of a deep model from a few
                of its blocks
    simulation  the schedule run on a trace: `Peak`, the memory of a step without the model states
    traffic     bytes between ranks and between tiers, and the time they take
    shapes      models known by name or by their Hugging Face config.json
    optimizers  the states that an optimizer keeps for each parameter

Start reading at `estimates`.
"""

from lightning_zero.planner.estimates import (
    Choice,
    Estimate,
    Job,
    Machine,
    all_choices,
    cheapest,
    estimate,
    make_memory_estimator,
)
from lightning_zero.planner.optimizers import (
    OPTIMIZER_NAMES,
    data_parallel_bytes,
    full_checkpoint_bytes,
    make_optimizers,
)
from lightning_zero.planner.shapes import SHAPES, Decoder, DecoderShape, shape_of_hugging_face
from lightning_zero.planner.trace import (
    RepeatedBlocks,
    StepTrace,
    extrapolate_trace,
    find_repeated_blocks,
    trace_step,
)
from lightning_zero.planner.traffic import Rates, Traffic

__all__ = [
    "OPTIMIZER_NAMES",
    "SHAPES",
    "Choice",
    "Decoder",
    "DecoderShape",
    "Estimate",
    "Job",
    "Machine",
    "Rates",
    "RepeatedBlocks",
    "StepTrace",
    "Traffic",
    "all_choices",
    "cheapest",
    "data_parallel_bytes",
    "full_checkpoint_bytes",
    "estimate",
    "find_repeated_blocks",
    "make_optimizers",
    "shape_of_hugging_face",
    "extrapolate_trace",
    "make_memory_estimator",
    "trace_step",
]
