"""Step time with states in CPU memory and on NVMe, beside the same stages on the device and DDP.

    python tests/benchmarks/offload.py --nvme-path /mnt/nvme
    python tests/benchmarks/offload.py --systems ddp zero3 zero3-nvme-overlap --rounds 40

Method and table are those of `step_time.py`: all systems live in the same ranks and take one step
each in turn. `zeroS-T` is stage S with the optimizer in tier T (stage 3 + CPU: parameters too),
`-overlap` steps beside the next forward. A turn ends when nothing is in flight any more: what a
step hides behind the next forward is only seen with `--steps-per-turn` above 1, which is the
default here. DeepSpeed runs where it is installed, `deepspeed3-nvme` only where it is named, for it
needs libaio and a compiler. The swap path should be a local disk that takes
O_DIRECT, with nothing else on it.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in the ranks

import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks import step_time
from tests.benchmarks.systems import SYSTEMS, DeepSpeed, LightningZero, make_available

STEPS_PER_TURN = "4"
PATH_VARIABLE = "LIGHTNING_ZERO_NVME_PATH"  # the ranks, processes of their own, read it too
OFFLOADS = {
    "zero2-cpu": (2, {"offload_optimizer": "cpu"}),
    "zero3-cpu": (3, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    "zero3-nvme": (3, {"offload_optimizer": "nvme"}),
}
DEEPSPEED = {
    "deepspeed2-cpu": (2, {"offload_optimizer": {"device": "cpu"}}),
    "deepspeed3-cpu": (
        3,
        {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    ),
    "deepspeed3-nvme": (3, {"offload_optimizer": {"device": "nvme"}}),
}


def add_systems() -> list[str]:
    """Adds the offloaded systems to `SYSTEMS`; the names of all that this benchmark compares."""
    path = os.environ.get(PATH_VARIABLE) or tempfile.gettempdir()
    names = ["ddp", "zero2", "zero3"]
    for name, (stage, settings) in OFFLOADS.items():
        for suffix, overlaps in (("", False), ("-overlap", True)):
            names.append(name + suffix)
            SYSTEMS[name + suffix] = partial(
                LightningZero, stage=stage, settings={**settings, "overlap_step": overlaps}
            )
    for name, (stage, settings) in DEEPSPEED.items():
        if "nvme" not in name:
            names.append(name)
        settings = {
            key: {**value, **({"nvme_path": path} if value["device"] == "nvme" else {})}
            for key, value in settings.items()
        }
        SYSTEMS[name] = make_available(
            "deepspeed", partial(DeepSpeed, stage=stage, settings=settings)
        )
    return names


NAMES = add_systems()  # in the ranks too, which import this file anew


def main() -> None:
    """Takes `--nvme-path`, and hands the rest of the command line to `step_time`."""
    arguments = sys.argv[1:]
    if "--nvme-path" in arguments:
        index = arguments.index("--nvme-path")
        os.environ[PATH_VARIABLE] = arguments[index + 1]
        del arguments[index : index + 2]
        add_systems()
    if "--systems" not in arguments:
        arguments += ["--systems", *NAMES]
    if "--steps-per-turn" not in arguments:
        arguments += ["--steps-per-turn", STEPS_PER_TURN]
    sys.argv[1:] = arguments
    step_time.main()


if __name__ == "__main__":
    main()
