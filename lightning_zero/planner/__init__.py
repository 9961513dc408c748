"""Plan before a job: bytes and transfers of every stage and offload, from shapes alone.

Imports layout, and of optim how an optimizer is copied. No device and no process group is touched.

    estimates   every stage with every offload; all of it for one; which fit; the cheapest
    resting     bytes at rest, by the rules by which the engine allocates, of one rank and of all
    trace       one step on fake tensors: order of use, activations; of a deep model from a few of
                its blocks
    timeline    the schedule replayed on that: `Peak`, what a step needs beside what rests
    traffic     bytes between ranks and tiers, and the time they take
    shapes      models that are known by name, or by the config.json of Hugging Face
    optimizers  what an optimizer keeps of each parameter

Begin with `estimates`.
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
