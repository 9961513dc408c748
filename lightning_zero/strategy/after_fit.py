"""Whether every rank gets the whole module when the Trainer's run has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.core.bucket import Bucket
from lightning_zero.engine.counting import held_bytes, whole_bytes
from lightning_zero.engine.engine import Engine
from lightning_zero.tiers.budget import available_memory_bytes, local_world_size

__all__ = ["WholeAfterFit", "check_whole_after_fit", "keeps_whole", "save_unsaved"]

WholeAfterFit = bool | Literal["auto"]

_GIB = 2**30


def check_whole_after_fit(value: object) -> None:
    """Raises a ValueError where `value` is no choice."""
    if not isinstance(value, bool) and value != "auto":
        raise ValueError(f'whole_after_fit must be True, False or "auto", got {value!r}.')


def keeps_whole(choice: bool | str, engine: Engine, *, num_averages: int = 0) -> bool:
    """Whether each rank gets the module, and averages of it, whole in CPU memory. Collective.

    By "auto": where that takes at most half of what is free for each rank of a node, on all nodes.
    Warns, once, where it does not.

    Args:
        choice: True, False or "auto".
        engine: Holds the module.
        num_averages: Averages of it that callbacks hold.
    """
    if isinstance(choice, bool):
        return choice
    needed = (1 + num_averages) * sum(whole_bytes(bucket) for bucket in engine.buckets)
    needed -= sum(held_bytes(bucket) for bucket in engine.buckets)
    if engine.comm.rank == 0:
        needed += sum(_masters_bytes(bucket) for bucket in engine.buckets)
    room = available_memory_bytes() // (2 * local_world_size())
    fits = bool(engine.comm.control.min_ints([room - needed])[0] >= 0)
    if not fits:
        rank_zero_warn(
            f'whole_after_fit="auto": each of {local_world_size()} rank(s) of a node would hold '
            f"{needed / _GIB:.3g} GiB more with the whole module, and less than twice that is free "
            "for each: its parameters are left out. Load them from a checkpoint, by "
            "Model.load_from_checkpoint(path) or ckpt_path=path; whole_after_fit=True keeps them."
        )
    return fits


def _masters_bytes(bucket: Bucket) -> int:
    """Of masters that a late checkpoint needs beside narrow parameters; rank 0 keeps them."""
    dtype = bucket.plan.master_dtype
    is_narrow = any(own.itemsize < dtype.itemsize for own in bucket.own_dtypes)
    return bucket.plan.layout.numel * dtype.itemsize if is_narrow else 0


def save_unsaved(trainer: Trainer) -> None:
    """Saves what would be lost with the parameters, unless a callback has just done so. Collective.

    To `last-step=N.ckpt` in the Trainer's `default_root_dir`.
    """
    callbacks: list[Any] = list(trainer.checkpoint_callbacks)
    saved = [getattr(callback, "_last_global_step_saved", None) for callback in callbacks]
    if trainer.global_step in (0, *saved) or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    path = Path(trainer.default_root_dir) / f"last-step={trainer.global_step}.ckpt"
    rank_zero_warn(f"no checkpoint has the last step, so it is saved to {path}.")
    trainer.save_checkpoint(path)
