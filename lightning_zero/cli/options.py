"""What may be typed after `lightning-zero`, of every command; nothing here imports torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from lightning_zero.layout.sizes import parse_bytes, parse_count

__all__ = ["EXPORT_DTYPES", "PRECISIONS", "add_commands"]

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
EXPORT_DTYPES = ("bf16", "fp16", "fp32")
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

# -------------------------------------------------------------------- comm-bench

_COMM_BENCH = (
    "Times all-gather, reduce-scatter and all-reduce as training runs them, over NCCL or gloo, and "
    "prints the flags to give to `lightning-zero plan`. By itself it starts a rank for every GPU, "
    "or two on the CPU; under torchrun or srun it measures the ranks that these have started."
)


def _add_comm_bench(subparsers: _Subparsers) -> None:
    parser = subparsers.add_parser(
        "comm-bench", help="measure the links between ranks", description=_COMM_BENCH
    )
    parser.add_argument(
        "--devices",
        type=_count("at least 2 ranks", least=2),
        metavar="N",
        help="ranks to start here",
    )
    parser.add_argument("--on-cpu", action="store_true", help="gloo between CPU processes")
    parser.add_argument(
        "--sizes",
        type=_bytes,
        nargs="+",
        default=[2**20, 2**22, 2**24, 2**26],
        metavar="SIZE",
        help="of whole tensors (default: 1MiB 4MiB 16MiB 64MiB)",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=0.3,
        help="of each measurement (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="for which ranks wait for one another (default: %(default)s)",
    )
    parser.add_argument("--rates", type=Path, metavar="FILE", help="write the rate to it, for plan")
    parser.add_argument("--json", action="store_true", help="print JSON alone")


# -------------------------------------------------------------------- export

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
    parser = subparsers.add_parser(
        "export",
        help="write a checkpoint in another format",
        description="Writes a checkpoint in another format, tensor by tensor, so that it may be "
        "larger than memory.",
        epilog=_EXPORT_FORMATS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--format", choices=["safetensors", "ckpt", "dcp"], default="safetensors")
    parser.add_argument("--dtype", choices=EXPORT_DTYPES, help="cast floating-point weights")
    parser.add_argument(
        "--max-shard-size",
        type=_bytes,
        metavar="SIZE",
        help="of a safetensors file, such as 5GiB (default) or 500MB",
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help="take the averaged weights of Lightning's WeightAveraging",
    )
    parser.add_argument(
        "--part",
        metavar="NAME",
        help="the weights of this submodule alone, under the names that they have in it: model "
        "where a LightningModule has a Hugging Face model as self.model",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument(
        "--trust", action="store_true", help="unpickle any class; only for files that you trust"
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare with the checksums first"
    )


# -------------------------------------------------------------------- inspect, io-bench


def _add_inspect(subparsers: _Subparsers) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="say what is in a checkpoint",
        description="Says what is in a checkpoint, of any format, without reading its tensors. "
        "With --verify they are read and compared with their checksums; the status is 1 where "
        "some are damaged.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a path, or an address as s3://")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--verify", action="store_true", help="compare with the checksums")
    parser.add_argument(
        "--trust", action="store_true", help="unpickle any class; only for files that you trust"
    )


def _add_io_bench(subparsers: _Subparsers) -> None:
    parser = subparsers.add_parser(
        "io-bench",
        help="measure a disk as NVMe tier",
        description="Measure a disk as the NVMe tier uses it, and print the settings to use. "
        "The file that it makes goes whatever happens.",
    )
    parser.add_argument("path", type=Path, help="a folder on the disk, as nvme_path")
    parser.add_argument(
        "--size", type=_bytes, default="4GiB", help="of the file (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=1.0,
        help="of each measurement (default: %(default)s)",
    )
    parser.add_argument("--rates", type=Path, metavar="FILE", help="write the rate to it, for plan")
    parser.add_argument("--json", action="store_true", help="print JSON alone")


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
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model",
        help="a preset, such as llama_70b (a wrong name lists all); or a config.json of Hugging "
        "Face, or the folder that holds it",
    )
    what.add_argument("--module", metavar="MODULE:CLASS", help="a torch or Lightning module")
    what.add_argument("--config-name", help="a Hydra configuration, with overrides behind it")
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="KEY=VALUE, of --config-name"
    )
    parser.add_argument(
        "--config-dir", help="folder of --config-name (default: the package's conf)"
    )
    parser.add_argument(
        "--arg", action="append", default=[], metavar="NAME=VALUE", help="an argument of --module"
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE",
        help="shape of an argument of forward: 8x3x224x224, 8x64:int64",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch", type=_positive, metavar="N", help="samples of a rank (default: 1)"
    )
    parser.add_argument(
        "--context", type=_positive, metavar="N", help="tokens of a sample (default: 1024)"
    )
    parser.add_argument(
        "--micro-batches", type=_positive, metavar="N", help="in a step (default: 1)"
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, metavar="NAME", help="of a Trainer (default: bf16-mixed)"
    )
    parser.add_argument(
        "--optimizer", default="adamw", metavar="NAME", help="of torch (default: adamw)"
    )
    parser.add_argument(
        "--average",
        action="append",
        default=[],
        choices=("cpu", "device"),
        help="an average of the weights, and where it rests: Lightning's are in CPU memory",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=_positive, metavar="N", help="in all; needed with --model and --module"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=_positive,
        metavar="N",
        help="of a machine (default: --ranks, at most 8)",
    )
    parser.add_argument(
        "--device-memory",
        type=_bytes,
        metavar="SIZE",
        help="of a rank, such as 24GiB",
    )
    parser.add_argument(
        "--host-memory",
        type=_bytes,
        metavar="SIZE",
        help="of a machine, such as 512GiB",
    )
    parser.add_argument("--disk", type=_bytes, metavar="SIZE", help="of a machine, such as 2TB")
    parser.add_argument("--on-cpu", action="store_true", help="ranks compute on the CPU")
    for name, what_for in (
        ("link", "between ranks, of one, as comm-bench measures it"),
        ("cpu-link", "between device and CPU memory, of one rank"),
        ("io", "of a machine's disk, as io-bench measures it (mixed)"),
        ("memory", "of a machine's CPU memory, for steps on the CPU"),
    ):
        parser.add_argument(f"--{name}-gb-per-s", type=_rate, metavar="RATE", help=what_for)
    parser.add_argument(
        "--rates", type=Path, metavar="FILE", help="rates that comm-bench and io-bench wrote"
    )


# -------------------------------------------------------------------- trace


def _add_trace(subparsers: _Subparsers) -> None:
    parser = subparsers.add_parser(
        "trace",
        help="show what computed, travelled and waited in a step",
        description="Merges what the ranks of a run recorded of a step, by the callback "
        "ZeroMonitor(trace_steps=[10]), into a trace for Perfetto (ui.perfetto.dev) or "
        "chrome://tracing, and a picture; prints what was hidden behind computation.",
        allow_abbrev=False,
    )
    parser.add_argument("run_directory", metavar="RUN", type=Path, help="directory of the run")
    parser.add_argument(
        "--step", type=int, metavar="N", help="which (default: all that are recorded)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write (default: beside the recordings)"
    )
