"""`lightning-zero plan`: what every stage and offload would take, before a job is submitted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from collections.abc import Sequence

from lightning_zero.cli.plan_source import PRECISIONS, Precision, Source, of_arguments
from lightning_zero.cli.plan_text import Row, as_dict, as_text, best_of
from lightning_zero.cli.rates import NAMES, read_rates
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.plan import Plan, make_plan
from lightning_zero.layout.recompute import find_checkpointed, outermost
from lightning_zero.layout.units import find_blocks
from lightning_zero.optim.trial import find_whole_tensors
from lightning_zero.planner import (
    Job,
    Machine,
    Rates,
    StepTrace,
    all_choices,
    data_parallel_bytes,
    estimate,
    find_repeats,
    make_optimizers,
    stretched,
    trace_step,
)

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Plans the job that `args` name, and prints what was found.

    Returns:
        0; 1 where nothing fits.
    """
    if args.plot is not None:
        from lightning_zero.cli.plan_plot import check_plot

        check_plot(args.plot)
    source = of_arguments(args)
    name = args.precision or source.settings.get("precision") or "bf16-mixed"
    if name not in PRECISIONS:
        raise ValueError(f"precision {name!r} is none of {', '.join(PRECISIONS)}.")
    precision = PRECISIONS[name]
    if precision.module is not None:
        source.module.to(precision.module)
    config = source.config
    if config.param_dtype is None:
        config = config.replace(param_dtype=precision.param)
    if precision.autocast is not None:
        config = config.under_autocast()
    machine = _machine(args, source)
    num_micro_batches = int(args.micro_batches or source.settings.get("micro_batches") or 1)
    dtypes = ZeroConfig(param_dtype=config.param_dtype, keep_float32=config.keep_float32)
    whole = make_plan(source.module, dtypes, world_size=1)
    blocks = outermost(find_blocks(source.module))
    named = parameters_by_name(source.module)
    optimizers = make_optimizers(args.optimizer, named, blocks)
    again = find_checkpointed(source.module, config.runs_again)
    traces, note = _traces(source, whole, again, () if again else blocks, precision)
    job = Job(
        source.module,
        optimizers,
        num_micro_batches=num_micro_batches,
        whole_tensors=find_whole_tensors(optimizers, config),
        averages=[Tier(where) for where in args.average],
    )
    rows = _rows(job, config, machine, traces)
    facts = {
        "model": source.title,
        "parameters": sum(parameter.numel() for parameter in named.values()),
        "precision": name,
        "optimizer": args.optimizer if len(optimizers) == 1 else "muon and adamw for the rest",
        "ranks": machine.num_ranks,
        "ranks_per_node": machine.ranks_per_node,
        "micro_batches": num_micro_batches,
        "data_parallel_bytes": data_parallel_bytes(named, optimizers),
    }
    best = best_of(rows)
    if args.json:
        print(json.dumps({**facts, "choices": [as_dict(row) for row in rows], "best": best}))
    else:
        print(as_text(facts, rows, machine, best, note))
    if args.plot is not None:
        from lightning_zero.cli.plan_plot import draw

        title = f"{source.title}, {name}, {machine.num_ranks} ranks"
        draw(rows, best["choice"] if best else None, machine, title, args.plot)
        print(f"plot: {args.plot}", file=sys.stderr)
    return 0 if best else 1


def _machine(args: argparse.Namespace, source: Source) -> Machine:
    num_ranks = args.ranks or source.settings.get("ranks")
    if not num_ranks:
        raise ValueError("say for how many ranks, such as --ranks 8.")
    per_node = args.ranks_per_node or source.settings.get("ranks_per_node") or min(num_ranks, 8)
    if args.ranks and not args.ranks_per_node:
        per_node = min(num_ranks, 8)
    if num_ranks % per_node:
        raise ValueError(
            f"--ranks {num_ranks} are not on machines of {per_node} each; set --ranks-per-node."
        )
    device_bytes = args.device_memory
    if args.on_cpu and device_bytes is None and args.host_memory is not None:
        device_bytes = args.host_memory // per_node
    return Machine(
        num_ranks,
        per_node,
        device_bytes,
        args.host_memory,
        args.disk,
        is_apart=not args.on_cpu,
        rates=_rates(args),
    )


def _rates(args: argparse.Namespace) -> Rates:
    """As the command line says, else a file, else as assumed."""
    measured = read_rates(args.rates) if args.rates is not None else {}
    given = {name: rate for name in NAMES if (rate := getattr(args, name)) is not None}
    fields = dict(zip(NAMES, ("link", "cpu_link", "nvme", "memory"), strict=True))
    used = {fields[name]: rate * 1e9 for name, rate in {**measured, **given}.items()}
    return dataclasses.replace(Rates(), **used)


def _traces(
    source: Source,
    plan: Plan,
    again: Sequence[str],
    blocks: Sequence[str],
    precision: Precision,
) -> tuple[tuple[StepTrace | None, StepTrace | None], str]:
    """The step as it is, and with activation checkpointing; and what cannot be told.

    Args:
        source: The module and its step.
        plan: Of its units.
        again: What runs again in any case.
        blocks: What may run again.
        precision: Of the step.
    """
    if source.step is None:
        return (None, None), "activations are not counted; give the shapes of inputs by --input."
    dtypes = {slot.name: b.dtype for b in plan.buckets for slot in b.layout.slots}
    units = [unit.name for unit in plan.units]
    repeats = find_repeats(source.module, units)
    step = source.step

    def run(gone: Sequence[str], checkpointed: Sequence[str]) -> StepTrace:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels that fake tensors do not choose
            return trace_step(
                source.module,
                step,
                units=[name for name in units if name not in gone],
                dtypes=dtypes,
                autocast=precision.autocast,
                checkpointed=[name for name in checkpointed if name not in gone],
            )

    def trace(checkpointed: Sequence[str]) -> StepTrace:
        short = None
        if repeats is not None:
            short = stretched(source.module, repeats, lambda gone: run(gone, checkpointed))
        return short or run([], checkpointed)

    try:
        plain = trace(again)
    except ValueError as error:
        return (None, None), f"activations are not counted: {error}"
    try:
        return (plain, trace(blocks) if blocks else None), ""
    except ValueError as error:
        return (plain, None), f"activation checkpointing is not counted: {error}"


def _rows(
    job: Job,
    config: ZeroConfig,
    machine: Machine,
    traces: tuple[StepTrace | None, StepTrace | None],
) -> list[Row]:
    plain, checkpointed = (dataclasses.replace(job, trace=trace) for trace in traces)
    return [
        Row(
            estimate(choice, plain, machine),
            None if traces[1] is None else estimate(choice, checkpointed, machine),
        )
        for choice in all_choices(config)
    ]
