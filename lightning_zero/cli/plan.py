"""`lightning-zero plan`: what every stage and offload would take, before a job is submitted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lightning_zero.cli.plan_source import PRECISIONS, Precision, Source, of_arguments
from lightning_zero.cli.sizes import in_words, parse_bytes
from lightning_zero.config import ZeroConfig
from lightning_zero.plan import make_plan
from lightning_zero.planner import (
    Estimate,
    Job,
    Machine,
    Rates,
    StepTrace,
    all_choices,
    estimate,
    find_repeats,
    make_optimizer,
    stretched,
    trace_step,
)

__all__ = ["Row", "add_parser"]

_GIB = 1024**3
_DESCRIPTION = (
    "Says for every stage and offload what one rank takes on its device, its machine in CPU memory "
    "and on disk, and what a step moves; which fit, and the cheapest of those. It sums the plan of "
    "the engine itself, without a device. The status is 1 where nothing fits."
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "plan", help="say what a job would take", description=_DESCRIPTION, allow_abbrev=False
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="a preset, such as llama2_70b")
    what.add_argument("--module", metavar="MODULE:CLASS", help="a torch or Lightning module")
    what.add_argument("--config-name", help="a Hydra configuration, with overrides behind it")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of the configuration")
    parser.add_argument("--config-dir", help="of --config-name (default: the package's conf)")
    parser.add_argument("--arg", action="append", default=[], help="NAME=VALUE for the class")
    parser.add_argument(
        "--input", action="append", default=[], help="shape of an argument: 8x3x224x224, 8x64:int64"
    )
    parser.add_argument("--batch", type=_count, help="of a rank (default: 1)")
    parser.add_argument("--context", type=_count, help="in tokens (default: 1024)")
    parser.add_argument("--micro-batches", type=_count, help="in a step (default: 1)")
    parser.add_argument("--precision", choices=PRECISIONS, help="(default: bf16-mixed)")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="(default: adamw)")
    parser.add_argument("--ranks", type=_count, help="in all")
    parser.add_argument("--ranks-per-node", type=_count, help="(default: --ranks, at most 8)")
    parser.add_argument("--device-memory", type=_bytes, help="of a rank, such as 24GiB")
    parser.add_argument("--host-memory", type=_bytes, help="of a machine, such as 512GiB")
    parser.add_argument("--disk", type=_bytes, help="of a machine, such as 2TB")
    parser.add_argument("--on-cpu", action="store_true", help="ranks compute on the CPU")
    for name, what_for in (
        ("link", "between ranks, of one"),
        ("cpu-link", "between device and CPU memory, of one rank"),
        ("io", "of a machine's disk, as io-bench measures it (mixed)"),
    ):
        parser.add_argument(f"--{name}-gb-per-s", type=_rate, metavar="GB", help=what_for)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw it")
    parser.set_defaults(run=_run)


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if rate <= 0:
        raise argparse.ArgumentTypeError(f"expected GB per second such as 25, got {text!r}")
    return rate * 1e9


def _bytes(text: str) -> int:
    if re.fullmatch(r"[\d.]+", text.strip()):
        raise argparse.ArgumentTypeError(f"{text} has no unit; say {text}GiB or {text}GB")
    return parse_bytes(text)


@dataclass(frozen=True)
class Row:
    """One choice.

    Attributes:
        plain: As the module is.
        checkpointed: With its repeated blocks under activation checkpointing; None where there are
            none, or activations are unknown.
    """

    plain: Estimate
    checkpointed: Estimate | None


def _run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        from lightning_zero.cli.plan_plot import check_matplotlib

        check_matplotlib()
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
    machine, num_micro_batches = _machine(args, source), _micro_batches(args, source)
    traces, note = _traces(source, config, precision)
    rows = _rows(source.module, config, args.optimizer, machine, traces, num_micro_batches)
    numel = sum(p.numel() for p in source.module.parameters())
    facts = {
        "model": source.title,
        "parameters": numel,
        "precision": name,
        "optimizer": args.optimizer,
        "ranks": machine.num_ranks,
        "ranks_per_node": machine.ranks_per_node,
        "micro_batches": num_micro_batches,
    }
    best = _best(rows)
    if args.json:
        print(json.dumps({**facts, "choices": [_as_dict(row) for row in rows], "best": best}))
    else:
        print(_text(facts, rows, machine, best, note))
    if args.plot is not None:
        from lightning_zero.cli.plan_plot import draw

        draw(rows, machine, f"{source.title}, {name}, {machine.num_ranks} ranks", args.plot)
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
    given = {
        "link": args.link_gb_per_s,
        "cpu_link": args.cpu_link_gb_per_s,
        "nvme": args.io_gb_per_s,
    }
    rates = dataclasses.replace(Rates(), **{k: v for k, v in given.items() if v is not None})
    return Machine(
        num_ranks,
        per_node,
        device_bytes,
        args.host_memory,
        args.disk,
        is_apart=not args.on_cpu,
        rates=rates,
    )


def _micro_batches(args: argparse.Namespace, source: Source) -> int:
    return int(args.micro_batches or source.settings.get("micro_batches") or 1)


def _traces(
    source: Source, config: ZeroConfig, precision: Precision
) -> tuple[tuple[StepTrace | None, StepTrace | None], str]:
    """The step as it is, and with activation checkpointing; and what cannot be told."""
    if source.step is None:
        return (None, None), "activations are not counted; give the shapes of inputs by --input."
    base = ZeroConfig(stage=3, param_dtype=config.param_dtype)
    plan = make_plan(source.module, base, world_size=1)
    dtypes = {slot.name: b.dtype for b in plan.buckets for slot in b.layout.slots}
    units = [unit.name for unit in plan.units]
    blocks = _blocks(source.module, units)
    repeats = find_repeats(source.module, units)
    step = source.step

    def run(gone: Sequence[str], checkpointed: Sequence[str]) -> StepTrace:
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
        plain = trace([])
    except ValueError as error:
        return (None, None), f"activations are not counted: {error}"
    try:
        return (plain, trace(blocks) if blocks else None), ""
    except ValueError as error:
        return (plain, None), f"activation checkpointing is not counted: {error}"


def _blocks(module: nn.Module, units: Sequence[str]) -> list[str]:
    """Units of a class that there is more than once."""
    classes = [type(module.get_submodule(name)) for name in units if name]
    return [n for n in units if n and classes.count(type(module.get_submodule(n))) > 1]


def _rows(
    module: nn.Module,
    config: ZeroConfig,
    optimizer_name: str,
    machine: Machine,
    traces: tuple[StepTrace | None, StepTrace | None],
    num_micro_batches: int,
) -> list[Row]:
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        raise ValueError(f"{type(module).__name__} has no parameter that is trained.")
    optimizer = make_optimizer(optimizer_name, trained)
    job = Job(module, [optimizer], traces[0], num_micro_batches)
    rows = []
    for choice in all_choices(config):
        plain = estimate(choice, job, machine)
        with_less = None
        if traces[1] is not None:
            with_less = estimate(choice, dataclasses.replace(job, trace=traces[1]), machine)
        rows.append(Row(plain, with_less))
    return rows


def _best(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The cheapest that fits; activation checkpointing computes the forward twice."""
    found = [(row.plain.cost, False, row.plain) for row in rows if row.plain.fits]
    found += [
        (row.checkpointed.cost, True, row.checkpointed)
        for row in rows
        if row.checkpointed is not None and row.checkpointed.fits
    ]
    # Time first; at the same time of transfers, the one that computes less.
    found.sort(key=lambda entry: (entry[0][0], entry[1], entry[0]))
    if not found:
        return None
    _, is_checkpointed, best = found[0]
    return {"choice": best.choice.name, "checkpointing": is_checkpointed, **_numbers(best)}


def _numbers(estimate: Estimate) -> dict[str, Any]:
    least, most = estimate.transfer_seconds
    return {
        "device_bytes": estimate.device_bytes,
        "host_bytes_per_node": estimate.host_bytes,
        "disk_bytes_per_node": estimate.disk_bytes,
        "transfer_seconds": [least, most],
    }


def _as_dict(row: Row) -> dict[str, Any]:
    plain, less = row.plain, row.checkpointed
    return {
        "zero": plain.choice.zero,
        "offload": plain.choice.offload,
        "fits": plain.fits,
        "fits_with_checkpointing": None if less is None else less.fits,
        **_numbers(plain),
        "device_bytes_with_checkpointing": None if less is None else less.device_bytes,
        "rest_bytes_per_rank": {
            tier.value: {state.value: nbytes for state, nbytes in states.items()}
            for tier, states in plain.resting.tiers.items()
        },
        "module_buffer_bytes": plain.resting.module_buffer_bytes,
        "pool_bytes": plain.resting.pool_bytes,
        "staging_bytes": plain.staging_bytes,
        "peak_bytes": {
            "gathered": plain.peak.gathered_bytes,
            "gradient buckets": plain.peak.bucket_bytes,
            "activations": plain.peak.activation_bytes,
        },
        "step_bytes": dataclasses.asdict(plain.traffic),
        "missing_bytes": plain.excess,
    }


# -------------------------------------------------------------------- for people


def _text(
    facts: dict[str, Any], rows: Sequence[Row], machine: Machine, best: Any, note: str
) -> str:
    head = (
        f"{facts['model']}: {facts['parameters']:,} parameters, {facts['precision']}, "
        f"{facts['optimizer']}, {machine.num_ranks} ranks, {machine.ranks_per_node} on a machine"
    )
    header = ["GiB", "states", "peak", "checkpointed", "host", "disk", "sent", "seconds", "fits"]
    lines = [header, *(_line(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
    legend = (
        "states, peak, sent: of one rank, on its device, in a step; checkpointed: the peak with\n"
        "activation checkpointing; host, disk: of a machine; seconds: transfers of a step, all at\n"
        "once and one after another."
    )
    return "\n".join(
        part
        for part in (head, note, "", table, "", legend, _verdict(rows, best))
        if part is not None
    )


def _line(row: Row) -> list[str]:
    plain, less = row.plain, row.checkpointed
    on_device = sum(next(iter(plain.resting.tiers.values())).values())
    least, most = plain.transfer_seconds
    fits = "yes" if plain.fits else "checkpointed" if less is not None and less.fits else "no"
    return [
        plain.choice.name,
        _gib(on_device),
        _gib(plain.device_bytes),
        "" if less is None else _gib(less.device_bytes),
        _gib(plain.host_bytes),
        _gib(plain.disk_bytes),
        _gib(plain.traffic.wire),
        f"{least:.3g}..{most:.3g}",
        fits,
    ]


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f}" if nbytes < 100 * _GIB else f"{nbytes / _GIB:.0f}"


def _verdict(rows: Sequence[Row], best: Any) -> str:
    if best is not None:
        how = " with activation checkpointing" if best["checkpointing"] else ""
        return (
            f"cheapest that fits: {best['choice']}{how}: {in_words(best['device_bytes'])} on each "
            f"device, {in_words(best['host_bytes_per_node'])} of CPU memory and "
            f"{in_words(best['disk_bytes_per_node'])} on disk for each machine"
        )
    estimates = [row.checkpointed or row.plain for row in rows]
    nearest = sorted(estimates, key=lambda e: sum(e.excess.values()))[:3]
    lines = ["nothing fits; nearest, all with activation checkpointing where there is a number:"]
    for one in nearest:
        missing = ", ".join(f"{in_words(n)} of {name}" for name, n in one.excess.items())
        lines.append(f"  {one.choice.name}: {missing} too little")
    return "\n".join(lines)
