"""What may be typed after `lightning-zero`, of every command; nothing here imports torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from lightning_zero.layout.sizes import parse_bytes, parse_count

__all__ = ["PRECISIONS", "add_commands"]

# Of a Trainer, with torch's dtype: of autocast where it is mixed, else of the module; "": as built.
PRECISIONS = {
    "32-true": "",
    "bf16-mixed": "bfloat16",
    "16-mixed": "float16",
    "bf16-true": "bfloat16",
    "16-true": "float16",
    "64-true": "float64",
}
_Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_commands(subparsers: _Subparsers) -> None:
    """Adds every command, in the order of the alphabet."""
    for add in (_add_comm_bench, _add_export, _add_inspect, _add_io_bench, _add_plan, _add_trace):
        add(subparsers)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(what: str) -> Callable[[str], float]:
    """A parser of finite numbers above 0, whose error says that `what` was expected."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if 0 < (number := float(text)) < math.inf:
                return number
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")

    return parse


def _count(what: str, *, least: int = 1) -> Callable[[str], int]:
    """Likewise of whole numbers from `least` on."""

    def parse(text: str) -> int:
        with suppress(ValueError):
            if (number := parse_count(text)) >= least:
                return number
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")

    return parse


_seconds = _number("a number of seconds above 0")
_rate = _number("GB per second such as 25")
_positive = _count("a whole number of at least 1")
_TRUST = "unpickle any class; only for files that you trust"

# -------------------------------------------------------------------- comm-bench, io-bench

_COMM_BENCH = (
    "Times all-gather, reduce-scatter and all-reduce as training runs them, over NCCL or gloo, and "
    "prints the flags to give to `lightning-zero plan`. By itself it starts a rank for every GPU, "
    "or two on the CPU; under torchrun or srun it measures the ranks that these have started."
)


def _add_comm_bench(subparsers: _Subparsers) -> None:
    add = subparsers.add_parser(
        "comm-bench", help="measure the links between ranks", description=_COMM_BENCH
    ).add_argument
    ranks = _count("at least 2 ranks", least=2)
    add("--devices", type=ranks, metavar="N", help="ranks to start here")
    add("--on-cpu", action="store_true", help="gloo between CPU processes")
    add(
        "--sizes",
        type=_bytes,
        nargs="+",
        default=[2**20, 2**22, 2**24, 2**26],
        metavar="SIZE",
        help="of whole tensors (default: 1MiB 4MiB 16MiB 64MiB)",
    )
    add("--seconds", type=_seconds, default=0.3, help="of each measurement (default: %(default)s)")
    add(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="for which ranks wait for one another (default: %(default)s)",
    )
    add("--rates", type=Path, metavar="FILE", help="write the rate to it, for plan")
    add("--json", action="store_true", help="print JSON alone")


def _add_io_bench(subparsers: _Subparsers) -> None:
    add = subparsers.add_parser(
        "io-bench",
        help="measure a disk as NVMe tier",
        description="Measure a disk as the NVMe tier uses it, and print the settings to use. "
        "The file that it makes goes whatever happens.",
    ).add_argument
    add("path", type=Path, help="a folder on the disk, as nvme_path")
    add("--size", type=_bytes, default="4GiB", help="of the file (default: %(default)s)")
    add("--seconds", type=_seconds, default=1.0, help="of each measurement (default: %(default)s)")
    add("--rates", type=Path, metavar="FILE", help="write the rate to it, for plan")
    add("--json", action="store_true", help="print JSON alone")


# -------------------------------------------------------------------- export, inspect

_EXPORT_FORMATS = """\
CHECKPOINT is a Lightning checkpoint, a sharded one, a state dict, safetensors,
or a directory of DeepSpeed ZeRO. It and OUT are paths, or addresses such as
s3://bucket/run. Formats:

  safetensors  the weights, as Hugging Face reads them: OUT is a directory with
               files of at most --max-shard-size and an index, or one file if it
               ends with .safetensors
  ckpt         everything, in one file that any Lightning strategy resumes from
  dcp          everything, as a directory of torch.distributed.checkpoint
"""


def _add_export(subparsers: _Subparsers) -> None:
    add = subparsers.add_parser(
        "export",
        help="write a checkpoint in another format",
        description="Writes a checkpoint in another format, tensor by tensor, so that it may be "
        "larger than memory.",
        epilog=_EXPORT_FORMATS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    ).add_argument
    add("checkpoint", metavar="CHECKPOINT")
    add("out", metavar="OUT")
    add("--format", choices=["safetensors", "ckpt", "dcp"], default="safetensors")
    add("--dtype", choices=["bf16", "fp16", "fp32"], help="cast floating-point weights")
    of_shard = "of a safetensors file, such as 5GiB (default) or 500MB"
    add("--max-shard-size", type=_bytes, metavar="SIZE", help=of_shard)
    averaged = "take the averaged weights of Lightning's WeightAveraging"
    add("--ema", action="store_true", help=averaged)
    add(
        "--part",
        metavar="NAME",
        help="the weights of this submodule alone, under the names that they have in it: model "
        "where a LightningModule has a Hugging Face model as self.model",
    )
    add("--force", action="store_true", help="replace OUT if it exists")
    add("--trust", action="store_true", help=_TRUST)
    add("--no-verify", action="store_true", help="do not compare with the checksums first")


def _add_inspect(subparsers: _Subparsers) -> None:
    add = subparsers.add_parser(
        "inspect",
        help="say what is in a checkpoint",
        description="Says what is in a checkpoint, of any format, without reading its tensors. "
        "With --verify they are read and compared with their checksums; the status is 1 where "
        "some are damaged.",
        allow_abbrev=False,
    ).add_argument
    add("checkpoint", metavar="CHECKPOINT", help="a path, or an address as s3://")
    add("--json", action="store_true", help="print JSON")
    add("--verify", action="store_true", help="compare with the checksums")
    add("--trust", action="store_true", help=_TRUST)


# -------------------------------------------------------------------- plan

_PLAN = """\
Says for every stage and offload what one rank takes on its device, its machine
in CPU memory and on disk, and what a step moves; which fit, and the cheapest of
those. It sums the plan of the engine itself, without a device. The status is 1
where nothing fits.
"""
_PLAN_EXAMPLES = """\
examples:
  lightning-zero plan --model llama_70b --ranks 16 --device-memory 80GiB --host-memory 1TiB
  lightning-zero plan --model path/to/my-llama --ranks 8 --device-memory 80GiB --context 8192
  lightning-zero plan --module my.code:Model --arg width=512 --input 8x3x224x224 --ranks 4
  lightning-zero plan --config-dir conf --config-name config model=gpt_1b trainer.devices=8
"""
_RATES = {
    "link": "between ranks, of one, as comm-bench measures it",
    "cpu-link": "between device and CPU memory, of one rank",
    "io": "of a machine's disk, as io-bench measures it (mixed)",
    "memory": "of a machine's CPU memory, for steps on the CPU",
}


def _add_plan(subparsers: _Subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="say what a job would take",
        description=_PLAN,
        epilog=_PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_model(parser)
    _add_training(parser)
    _add_machine(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw it")


def _add_model(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True).add_argument
    what(
        "--model",
        help="a preset, such as llama_70b (a wrong name lists all); or a config.json of Hugging "
        "Face, or the folder that holds it",
    )
    what("--module", metavar="MODULE:CLASS", help="a torch or Lightning module")
    what("--config-name", help="a Hydra configuration, with overrides behind it")
    add = parser.add_argument
    add("overrides", nargs="*", metavar="OVERRIDE", help="KEY=VALUE, of --config-name")
    add("--config-dir", help="folder of --config-name (default: the package's conf)")
    add("--arg", action="append", default=[], metavar="NAME=VALUE", help="an argument of --module")
    shape = "shape of an argument of forward: 8x3x224x224, 8x64:int64"
    add("--input", action="append", default=[], metavar="SHAPE", help=shape)


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--batch", type=_positive, metavar="N", help="samples of a rank (default: 1)")
    add("--context", type=_positive, metavar="N", help="tokens of a sample (default: 1024)")
    add("--micro-batches", type=_positive, metavar="N", help="in a step (default: 1)")
    of_trainer = "of a Trainer (default: bf16-mixed)"
    add("--precision", choices=PRECISIONS, metavar="NAME", help=of_trainer)
    add("--optimizer", default="adamw", metavar="NAME", help="of torch (default: adamw)")
    add(
        "--average",
        action="append",
        default=[],
        choices=("cpu", "device"),
        help="an average of the weights, and where it rests: Lightning's are in CPU memory",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=_positive, metavar="N", help="in all; needed with --model and --module")
    of_node = "of a machine (default: --ranks, at most 8)"
    add("--ranks-per-node", type=_positive, metavar="N", help=of_node)
    add("--device-memory", type=_bytes, metavar="SIZE", help="of a rank, such as 24GiB")
    add("--host-memory", type=_bytes, metavar="SIZE", help="of a machine, such as 512GiB")
    add("--disk", type=_bytes, metavar="SIZE", help="of a machine, such as 2TB")
    add("--on-cpu", action="store_true", help="ranks compute on the CPU")
    for name, what_for in _RATES.items():
        add(f"--{name}-gb-per-s", type=_rate, metavar="RATE", help=what_for)
    add("--rates", type=Path, metavar="FILE", help="rates that comm-bench and io-bench wrote")


# -------------------------------------------------------------------- trace


def _add_trace(subparsers: _Subparsers) -> None:
    add = subparsers.add_parser(
        "trace",
        help="show what computed, travelled and waited in a step",
        description="Merges what the ranks of a run recorded of a step, by the callback "
        "ZeroMonitor(trace_steps=[10]), into a trace for Perfetto (ui.perfetto.dev) or "
        "chrome://tracing, and a picture; prints what was hidden behind computation.",
        allow_abbrev=False,
    ).add_argument
    add("run_directory", metavar="RUN", type=Path, help="directory of the run")
    add("--step", type=int, metavar="N", help="which (default: all that are recorded)")
    beside = "where to write (default: beside the recordings)"
    add("--out", type=Path, metavar="DIR", help=beside)
