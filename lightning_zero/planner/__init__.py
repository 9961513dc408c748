"""Memory and traffic of every stage and offload, computed before a job runs.

Needs neither a device nor other ranks. The engine itself counts: it trains on shapes alone.

    choices         every stage with every offload, as settings and as text
    estimates       memory and traffic of a choice, and whether it fits
    engine_run      bytes of a step and between steps; few blocks stand for many
    counts          bytes between steps and moved in a step, of all buckets
    planned_engine  the engine without other ranks and without files
    shapes_only     operators that allocate their results and compute nothing
    shapes          models known by name or by their Hugging Face config.json
    optimizers      optimizers of torch by name

Start reading at `estimates`.
"""

from lightning_zero.planner.choices import Choice, all_choices, as_arguments, auto_base
from lightning_zero.planner.counts import Counts
from lightning_zero.planner.engine_run import EngineRuns
from lightning_zero.planner.estimates import (
    Estimate,
    Machine,
    Rates,
    estimate,
    with_recompute,
)
from lightning_zero.planner.optimizers import OPTIMIZER_NAMES, make_optimizers
from lightning_zero.planner.shapes import SHAPES, Decoder, DecoderShape, shape_of_hugging_face

__all__ = [
    "OPTIMIZER_NAMES",
    "SHAPES",
    "Choice",
    "Counts",
    "Decoder",
    "DecoderShape",
    "EngineRuns",
    "Estimate",
    "Machine",
    "Rates",
    "all_choices",
    "as_arguments",
    "auto_base",
    "estimate",
    "make_optimizers",
    "shape_of_hugging_face",
    "with_recompute",
]
