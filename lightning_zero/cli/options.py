"""Arguments of all `lightning-zero` commands; this module does not import torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from lightning_zero.layout.sizes import parse_bytes, parse_count

__all__ = ["PRECISIONS", "add_commands"]

# Precision of a Trainer: torch's dtype of autocast if mixed, else of the module ("": as built).
# float8: set by the plugin Float8Precision.
PRECISIONS = {
    "32-true": "",
    "bf16-mixed": "bfloat16",
    "16-mixed": "float16",
    "float8": "bfloat16",
    "bf16-true": "bfloat16",
    "16-true": "float16",
    "64-true": "float64",
}
_Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_commands(subparsers: _Subparsers) -> None:
    """Adds all commands in alphabetical order."""
    for add in (
        _add_check,
        _add_compare,
        _add_export,
        _add_inspect,
        _add_plan,
        _add_sweep,
        _add_trace,
    ):
        add(subparsers)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(what: str) -> Callable[[str], float]:
    """Parser of finite numbers above 0; its error reads "expected `what`"."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if 0 < (number := float(text)) < math.inf:
                return number
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")

    return parse


def _count(what: str, *, least: int = 1) -> Callable[[str], int]:
    """Parser of integers from `least` on; its error reads "expected `what`"."""

    def parse(text: str) -> int:
        with suppress(ValueError):
            if (number := parse_count(text)) >= least:
                return number
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")

    return parse


_seconds = _number("a number of seconds above 0")
_rate = _number("GB per second such as 25")
_positive = _count("an integer of at least 1")
_TRUST = "unpickle any class; use only with files that you trust"

# -------------------------------------------------------------------- check

_CHECK = """\
Tries training on this machine in about ten minutes: values against DDP, ranks
that fail, checkpoints, memory, and time against DDP and FSDP2. Prints a table,
and writes lightning-zero-check.md and .json, which have no names of hosts,
users or paths. Uses all GPUs of this node, or two CPU processes; on several
nodes, start it with torchrun or srun. The exit status is 1 if a check failed.
"""
_CHECK_EXAMPLES = """\
examples:
  lightning-zero check --quick
  lightning-zero check --config path/to/my-llama/config.json --nvme-path /scratch
  torchrun --nproc-per-node=8 -m lightning_zero check --module my.code:Model \
    --input 8x3x224x224
  srun --ntasks-per-node=8 python -m lightning_zero check
"""


def _add_check(subparsers: _Subparsers) -> None:
    parser = subparsers.add_parser(
        "check",
        help="try training on this machine, and write a report",
        description=_CHECK,
        epilog=_CHECK_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(first_line="loading torch", overrides=[], config_name=None)
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer cases: about a minute")
    group = parser.add_argument_group(
        "your model (random values, AdamW, float32, default settings)"
    )
    add_model = group.add_mutually_exclusive_group().add_argument
    shape = "config.json of a Hugging Face model, whose shape is trained; or a preset of `plan`"
    add_model("--config", dest="model", metavar="CONFIG.json", help=shape)
    add_model("--module", metavar="MODULE:CLASS", help="a torch or Lightning module to build")
    _add_inputs(group.add_argument)
    add = parser.add_argument_group("machine").add_argument
    add("--ranks", type=_positive, metavar="N", help="ranks, without torchrun or srun")
    add("--on-cpu", action="store_true", help="train on CPUs, even if there are GPUs")
    disk = "folder on a local disk, whose speed is measured and which offload uses"
    add("--nvme-path", metavar="DIR", help=disk)
    out = "folder of the report, which all nodes share (default: this one)"
    add("--out", type=Path, default=Path(), metavar="DIR", help=out)


# -------------------------------------------------------------------- compare, export, inspect


def _add_compare(subparsers: _Subparsers) -> None:
    add = subparsers.add_parser(
        "compare",
        help="name the first step and parameter in which two runs differ",
        description="Compares what the callback Fingerprints wrote in two runs, of any strategies, "
        "stages and numbers of ranks. The exit status is 1 if they differ.",
        allow_abbrev=False,
    ).add_argument
    what = "directory of a run, or its fingerprints.jsonl"
    add("first", metavar="RUN_A", help=what)
    add("second", metavar="RUN_B", help=what)
    rtol = (
        "largest difference of a norm or a sum, relative to the largest norm of all parameters, or "
        "of all gradients, in that step (default: equal bits)"
    )
    add("--rtol", type=_number("a number above 0"), metavar="RTOL", help=rtol)


_EXPORT = """\
Writes a checkpoint in another format. It is converted tensor by tensor, so it
may be larger than memory.
"""
_EXPORT_FORMATS = """\
CHECKPOINT is a Lightning checkpoint, a sharded checkpoint, a state dict, a
safetensors file or directory, or a DeepSpeed ZeRO directory. CHECKPOINT and OUT
are paths, or addresses such as s3://bucket/run. Formats:

  safetensors  the weights, in the layout of Hugging Face: OUT is a directory
               with files of at most --max-shard-size and an index, or one
               file if it ends in .safetensors
  ckpt         everything, in one file from which any Lightning strategy resumes
  dcp          everything, in a directory of torch.distributed.checkpoint
"""


def _add_export(subparsers: _Subparsers) -> None:
    add = subparsers.add_parser(
        "export",
        help="write a checkpoint in another format",
        description=_EXPORT,
        epilog=_EXPORT_FORMATS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    ).add_argument
    add("checkpoint", metavar="CHECKPOINT")
    add("out", metavar="OUT")
    add(
        "--format",
        choices=["safetensors", "ckpt", "dcp"],
        default="safetensors",
        help="format of OUT (default: %(default)s)",
    )
    add("--dtype", choices=["bf16", "fp16", "fp32"], help="cast floating-point weights")
    max_size = "largest size of a safetensors file, such as 500MB (default: 5GiB)"
    add("--max-shard-size", type=_bytes, metavar="SIZE", help=max_size)
    averaged = "export the averaged weights of Lightning's WeightAveraging"
    add("--ema", action="store_true", help=averaged)
    add(
        "--part",
        metavar="NAME",
        help="export only the weights of this submodule, under their names in it; for example "
        "model, for a LightningModule with a Hugging Face model in self.model",
    )
    add("--force", action="store_true", help="replace OUT if it exists")
    add("--trust", action="store_true", help=_TRUST)
    add("--no-verify", action="store_true", help="do not verify checksums first")


def _add_inspect(subparsers: _Subparsers) -> None:
    add = subparsers.add_parser(
        "inspect",
        help="print the content of a checkpoint",
        description="Prints the content of a checkpoint of any format without reading its tensors. "
        "With --verify the tensors are read and compared with their checksums; the exit status is "
        "1 if any are damaged.",
        allow_abbrev=False,
    ).add_argument
    add("checkpoint", metavar="CHECKPOINT", help="path, or address such as s3://bucket/run")
    add("--json", action="store_true", help="print JSON")
    add("--verify", action="store_true", help="verify checksums")
    add("--trust", action="store_true", help=_TRUST)


# -------------------------------------------------------------------- plan

_PLAN = """\
Estimates the device memory of a rank, the CPU memory and disk of a node, and
the bytes that a step sends, for every stage and offload. Prints the choices
that are worth a look, and for the cheapest that fits the call of the Trainer
and the overrides of conf/. The estimate needs no device. The exit status is 1
if nothing fits.
"""
_PLAN_EXAMPLES = """\
examples:
  lightning-zero plan --model llama2_70b --ranks 16 --device-memory 80GiB
  lightning-zero plan --model path/to/my-llama --ranks 8 --context 8192
  lightning-zero plan --module my.code:Model --arg width=512 \\
    --input 8x3x224x224 --ranks 4
  lightning-zero plan --config-dir conf --config-name train model=gpt_1b \\
    trainer.devices=8
"""
_RATES = {
    "link": "bandwidth between ranks, per rank",
    "cpu-link": "bandwidth between device and CPU memory, per rank",
    "io": "bandwidth of a node's disk, reading and writing at once",
    "memory": "bandwidth of a node's CPU memory, for optimizer steps on the CPU",
}


def _add_plan(subparsers: _Subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        usage="%(prog)s (--model M | --module M:C | --config-name C [OVERRIDE ...])\n"
        "                           [options]",
        help="estimate memory and traffic of a job",
        description=_PLAN,
        epilog=_PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(first_line="loading torch and building the model")
    _add_model(parser)
    _add_training(parser)
    _add_machine(parser)
    add = parser.add_argument_group("output").add_argument
    add("--all", action="store_true", help="print every choice, and what the estimate assumes")
    add("--json", action="store_true", help="print JSON")
    add("--plot", type=Path, metavar="PNG", help="also draw a plot")


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model (one of the first three)")
    what = group.add_mutually_exclusive_group(required=True).add_argument
    what(
        "--model",
        help="a preset, such as llama2_70b (an unknown name lists all), or a Hugging Face "
        "config.json, or the directory that contains it",
    )
    what("--module", metavar="MODULE:CLASS", help="a torch or Lightning module to build")
    what("--config-name", help="a Hydra configuration, followed by overrides")
    add = group.add_argument
    add("overrides", nargs="*", metavar="OVERRIDE", help="KEY=VALUE for --config-name")
    add("--config-dir", help="directory of --config-name (default: conf of this package)")
    _add_inputs(add)


def _add_inputs(add: Callable[..., object]) -> None:
    """Adds how a module is built and called, for `check` and `plan`."""
    argument = "argument of --module; may be repeated"
    add("--arg", action="append", default=[], metavar="NAME=VALUE", help=argument)
    shape = "shape of an argument of forward, such as 8x3x224x224 or 8x64:int64; may be repeated"
    add("--input", action="append", default=[], metavar="SHAPE", help=shape)
    samples = "samples in a micro-batch of a rank (default: 1)"
    add("--batch", type=_positive, metavar="N", help=samples)
    add("--context", type=_positive, metavar="N", help="tokens in a sample (default: 1024)")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add("--micro-batches", type=_positive, metavar="N", help="micro-batches in a step (default: 1)")
    precision = "precision of the Trainer (default: that of a configuration, or bf16-mixed)"
    add("--precision", choices=PRECISIONS, metavar="NAME", help=precision)
    add(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help="optimizer of torch, or adamw8bit, lion8bit, sgd8bit (default: adamw)",
    )
    add(
        "--average",
        action="append",
        default=[],
        choices=("cpu", "device"),
        help="keep an average of the weights there (Lightning keeps it in CPU memory)",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("machine").add_argument
    add(
        "--ranks",
        type=_positive,
        metavar="N",
        help="number of ranks; required with --model, --module",
    )
    of_node = "ranks on a node (default: --ranks, at most 8)"
    add("--ranks-per-node", type=_positive, metavar="N", help=of_node)
    add(
        "--device-memory",
        type=_bytes,
        metavar="SIZE",
        help="device memory of a rank, such as 24GiB",
    )
    add("--host-memory", type=_bytes, metavar="SIZE", help="CPU memory of a node, such as 512GiB")
    add("--disk", type=_bytes, metavar="SIZE", help="disk of a node, such as 2TB")
    add("--on-cpu", action="store_true", help="the device is the CPU")
    for name, description in _RATES.items():
        add(f"--{name}-gb-per-s", type=_rate, metavar="RATE", help=description)


# -------------------------------------------------------------------- sweep and trace


def _add_sweep(subparsers: _Subparsers) -> None:
    add = subparsers.add_parser(
        "sweep",
        help="print a line for each job of a sweep",
        description="Prints overrides, stage, memory, throughput and a metric of every job in a "
        "directory, from the reports of the callback ZeroMonitor. The exit status is 1 if a job "
        "has no report.",
        allow_abbrev=False,
    ).add_argument
    add("directory", metavar="DIR", type=Path, help="directory of the sweep")
    metric = "metric to show (default: optimized_metric of the Hydra configuration)"
    add("--metric", metavar="NAME", help=metric)


def _add_trace(subparsers: _Subparsers) -> None:
    add = subparsers.add_parser(
        "trace",
        help="show compute, communication and waits of a step",
        description="Merges the recordings of all ranks of a step, made by the callback "
        "ZeroMonitor(trace_steps=[10]), into a trace for Perfetto (ui.perfetto.dev) or "
        "chrome://tracing and a plot. Prints how much communication was overlapped with compute.",
        allow_abbrev=False,
    ).add_argument
    add("run_directory", metavar="RUN", type=Path, help="directory of the run")
    add("--step", type=int, metavar="N", help="step to show (default: all recorded steps)")
    out = "output directory (default: the parent of the recordings)"
    add("--out", type=Path, metavar="DIR", help=out)
