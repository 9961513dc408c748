"""Trains scenarios, each in a process that is forked from this one, which has imported torch.

    LD_PRELOAD=FOLDER/libaccelerator.so python -m tests.streams.server FOLDER

reads a scenario from each line and answers with a line, both in JSON.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from time import process_time
from typing import Any

from tests.streams.scenarios import Scenario

__all__ = ["Outcome"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the clocks have seen of one scenario.

    Attributes:
        num_checks: Pairs of uses of memory that were compared.
        problems: How often each was found.
        syncs: Waits of the host in a step, by why and where.
        num_launches: In a step.
        beside: Operations of compute in a step that ran beside each other stream, by its name.
        copied: Bytes of copies in a step, by kind, and elements that the CPU has "stepped"; only
            for a scenario that is "recorded".
        seconds: Processor time.
        error: Error of the training itself.
    """

    num_checks: int = 0
    problems: dict[str, int] = dataclasses.field(default_factory=dict)
    syncs: dict[str, int] = dataclasses.field(default_factory=dict)
    num_launches: int = 0
    beside: dict[str, int] = dataclasses.field(default_factory=dict)
    copied: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


def _preload() -> None:
    """What is imported here is not imported by each fork."""
    import torch._subclasses.schema_check_mode
    import torch.distributed.fsdp
    import torch.profiler._cupti_monitor
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    import tests.streams.training  # noqa: F401

    gc.collect()
    gc.freeze()  # a fork does not walk what it has from here


def _run(scenario: Scenario, libraries: Path) -> Outcome:
    from tests.streams.fake_cuda import FakeCuda
    from tests.streams.training import train

    cuda = FakeCuda(libraries)
    with cuda.on(scenario.num_ranks):
        *seen, copied = train(scenario, cuda.clocks)
    clocks = cuda.clocks
    return Outcome(clocks.num_checks, dict(clocks.problems), *seen, copied, process_time())


def _in_fork(scenario: Scenario, libraries: Path) -> str:
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                outcome = _run(scenario, libraries)
        except BaseException:
            outcome = Outcome(error=traceback.format_exc())
        with os.fdopen(writer, "w") as answer:
            json.dump(dataclasses.asdict(outcome), answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.wait()
    return text or json.dumps(dataclasses.asdict(Outcome(error="the process has died")))


def _main() -> None:
    libraries = Path(sys.argv[1])
    _preload()
    for line in sys.stdin:
        given: dict[str, Any] = json.loads(line)
        given["options"] = tuple(given["options"])
        print(_in_fork(Scenario(**given), libraries), flush=True)


if __name__ == "__main__":
    _main()
