"""Where the recordings of a run lie: `zero/recordings/step_<n>_rank_<r>.json`, one for each rank.

Each is {"recording": Recording.to_dict()}.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from lightning_zero.record.spans import Recording

__all__ = ["find_recordings", "read_step", "steps_in", "write_recording"]

_NAME = re.compile(r"step_(\d+)_rank_(\d+)\.json")
_HOW_TO_RECORD = "record some steps with the callback ZeroMonitor(trace_steps=[10])"


def write_recording(folder: Path, recording: Recording) -> Path:
    """Writes one rank's recording below `<folder>/recordings`, and says where.

    Args:
        folder: `<run>/zero`.
        recording: Of one step.
    """
    path = folder / "recordings" / f"step_{recording.step}_rank_{recording.rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"recording": recording.to_dict()}))
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


def read_step(folder: Path, step: int) -> list[Recording]:
    """One step, by rank.

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
    sizes = {recording.world_size for recording in read.values()}
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
    return list(read.values())


def _read(path: Path) -> Recording:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is no JSON ({error}); it was cut off while it was written, or edited."
        ) from error
    try:
        return Recording.from_dict(content["recording"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no recording of this version: {error}") from error
