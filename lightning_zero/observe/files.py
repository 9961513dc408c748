"""Where the recordings of a run lie: `zero/recordings/step_<n>_rank_<r>.json`, one for each rank.

Each is {"clock_offset_s": float, "recording": Recording.to_dict()}. The offset is when this rank's
window began, in seconds on a clock that all ranks share; where that clock has its zero is of no
importance.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from lightning_zero.record.spans import Recording

__all__ = ["Recorded", "find_recordings", "read_step", "steps_in", "write_recording"]

_NAME = re.compile(r"step_(\d+)_rank_(\d+)\.json")
_HOW_TO_RECORD = "record some steps with the callback ZeroMonitor(trace_steps=[10])"


@dataclass(frozen=True)
class Recorded:
    """One step of all ranks.

    Attributes:
        recordings: By rank.
        offsets_s: When the window of each began, in seconds after that of rank 0.
    """

    recordings: tuple[Recording, ...]
    offsets_s: tuple[float, ...]


def write_recording(folder: Path, recording: Recording, clock_offset_s: float = 0.0) -> Path:
    """Writes one rank's recording below `<folder>/recordings`, and says where.

    Args:
        folder: `<run>/zero`.
        recording: Of one step.
        clock_offset_s: See the top of this file.
    """
    path = folder / "recordings" / f"step_{recording.step}_rank_{recording.rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"clock_offset_s": clock_offset_s, "recording": recording.to_dict()}
    path.write_text(json.dumps(content))
    return path


def find_recordings(run: Path) -> Path:
    """The one folder of recordings at or below `run`.

    Raises:
        FileNotFoundError: There is no such directory, or there are no recordings in it.
        ValueError: There are several folders of recordings.
    """
    if not run.is_dir():
        raise FileNotFoundError(f"{run} is no directory; give the directory of a run.")
    found = [run, run / "recordings", *sorted(run.rglob("zero/recordings"))]
    found = [path for path in dict.fromkeys(found) if path.is_dir() and steps_in(path)]
    if not found:
        raise FileNotFoundError(f"{run} holds no zero/recordings; {_HOW_TO_RECORD}.")
    if len(found) > 1:
        shown = ", ".join(str(path.parent) for path in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ValueError(f"{run} holds recordings of {len(found)} runs; give one: {shown}{more}.")
    return found[0]


def steps_in(folder: Path) -> list[int]:
    """Numbers of the steps of which some rank has a recording, in order."""
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted({int(match[1]) for match in matches if match})


def read_step(folder: Path, step: int) -> Recorded:
    """One step of all ranks.

    Args:
        folder: As `find_recordings` gives it.
        step: One of `steps_in(folder)`.

    Raises:
        FileNotFoundError: Of some ranks, or of all, there is none.
        ValueError: A file is broken, or the files are not of one run.
    """
    paths = {
        int(match[2]): path
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) == step
    }
    if not paths:
        there_are = ", ".join(map(str, steps_in(folder)))
        raise FileNotFoundError(f"{folder} holds no step {step}; there are {there_are}.")
    read = {rank: _read(paths[rank]) for rank in sorted(paths)}
    sizes = {recording.world_size for recording, _ in read.values()}
    if len(sizes) > 1:
        raise ValueError(
            f"{folder} holds step {step} of runs on {' and '.join(map(str, sorted(sizes)))} ranks; "
            "delete the files of the older one."
        )
    if missing := [rank for rank in range(sizes.pop()) if rank not in read]:
        raise FileNotFoundError(
            f"{folder / f'step_{step}_rank_{missing[0]}.json'} does not exist (missing ranks: "
            f"{', '.join(map(str, missing))}). Where ranks write to disks of their own, copy their "
            "files together; a rank that ended before the step was over has written none."
        )
    recordings, clocks = zip(*read.values(), strict=True)
    return Recorded(recordings, tuple(clock - clocks[0] for clock in clocks))


def _read(path: Path) -> tuple[Recording, float]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is no JSON ({error}); it was cut off while it was written, or edited."
        ) from error
    try:
        return Recording.from_dict(content["recording"]), float(content["clock_offset_s"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no recording of this version: {error}") from error
