"""Memory and traffic of every stage and offload, computed before a job runs.

Needs neither a device nor other ranks. Imports the engine, which counts the peak of a step itself.

    estimates       every stage with every offload: its estimate, whether it fits, the cheapest
    engine_run      peak of a step: the engine trains on shapes alone; few blocks stand for many
    planned_engine  the engine without other ranks and without files
    shapes_only     operators that allocate their results and compute nothing
    no_step         formulas for the peak where the inputs of the module are unknown
    memory          formulas for the model states between steps, equal to the engine's counts
    traffic         bytes between ranks and between tiers, and the time they take
    shapes          models known by name or by their Hugging Face config.json
    optimizers      the states that an optimizer keeps for each parameter

Start reading at `estimates`.
"""

from lightning_zero.planner.engine_run import EngineRuns
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
from lightning_zero.planner.memory import MemoryEstimator
from lightning_zero.planner.optimizers import OPTIMIZER_NAMES, make_optimizers
from lightning_zero.planner.shapes import SHAPES, Decoder, DecoderShape, shape_of_hugging_face
from lightning_zero.planner.traffic import Rates, Traffic

__all__ = [
    "OPTIMIZER_NAMES",
    "SHAPES",
    "Choice",
    "Decoder",
    "DecoderShape",
    "EngineRuns",
    "Estimate",
    "Job",
    "Machine",
    "MemoryEstimator",
    "Rates",
    "Traffic",
    "all_choices",
    "cheapest",
    "estimate",
    "make_optimizers",
    "shape_of_hugging_face",
    "make_memory_estimator",
]
