"""Saves and loads all states of an engine, in the forms of `ZeroStrategy` and without Lightning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning_zero.checkpoint.dcp_writer import ShardedSave
from lightning_zero.checkpoint.load import load_masters, load_module, load_optimizer
from lightning_zero.checkpoint.modules import replace_sharded_parameters
from lightning_zero.checkpoint.source import open_on_all_ranks
from lightning_zero.checkpoint.states import (
    MASTERS_KEY,
    METADATA_KEY,
    describe_save,
    full_optimizer_state,
    full_state_dict,
    narrow_masters,
    sharded_masters,
    sharded_optimizer_state,
    sharded_state_dict,
    shards_in,
)
from lightning_zero.checkpoint.storage import check_shared, locate
from lightning_zero.checkpoint.torch_file import write_torch_file
from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.engine import Engine
from lightning_zero.health.together import failing_together
from lightning_zero.layout.names import with_saved_names

__all__ = [
    "load_checkpoint",
    "save_checkpoint",
    "write_full_together",
    "write_sharded",
]

_RESERVED = {"state_dict", "optimizer_states", MASTERS_KEY, METADATA_KEY}


def save_checkpoint(
    engine: Engine,
    path: str | os.PathLike[str],
    entries: Mapping[str, Any] | None = None,
    *,
    is_sharded: bool = False,
) -> None:
    """Saves the module and the optimizers of an engine. Collective: every rank.

    The checkpoint has the form of `ZeroStrategy`: any stage and number of ranks can resume from it,
    and so can `Trainer.fit(ckpt_path=...)`. The path gets its new content when that is complete.

    Args:
        engine: Engine that holds the states.
        path: Path or address of the checkpoint; rank 0's is used.
        entries: More entries, such as the step or the state of a scheduler. Rank 0's are saved.
        is_sharded: Whether to write a directory, to which every rank writes its shards, instead of
            one file of full tensors, which rank 0 writes.

    Raises:
        ValueError: A key of `entries` is one of the checkpoint's own.
        RuntimeError: A full checkpoint does not fit into the free CPU memory of rank 0.
        OSError: The checkpoint cannot be written; on every rank.
    """
    entries = {} if entries is None else entries
    if reserved := sorted(_RESERVED & entries.keys()):
        raise ValueError(f"entries must not have the key {reserved[0]!r}, which holds a state.")
    engine.lockstep.barrier("a checkpoint")
    if (lost := engine.coordinator.find_lost_write()) is not None:
        raise lost
    optimizers = list(engine.optimizers)
    checkpoint: dict[str, Any] = {"lr_schedulers": [], **entries}  # the Trainer requires that key
    replace_sharded_parameters(checkpoint, [engine])
    if is_sharded:
        checkpoint["state_dict"] = sharded_state_dict(engine.module, "parameter")
        states = [sharded_optimizer_state(optimizer, engine) for optimizer in optimizers]
        masters: Mapping[str, Any] = sharded_masters(engine)
    else:
        checkpoint["state_dict"] = full_state_dict(engine)
        states = [full_optimizer_state(optimizer, engine) for optimizer in optimizers]
        masters = narrow_masters(engine)
    checkpoint["state_dict"] = with_saved_names(checkpoint["state_dict"])
    checkpoint["optimizer_states"] = states
    if masters:
        checkpoint[MASTERS_KEY] = dict(masters)
    checkpoint[METADATA_KEY] = describe_save(engine)
    (write_sharded if is_sharded else write_full_together)(checkpoint, path, engine.comm)


def load_checkpoint(
    engine: Engine,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Loads a checkpoint of any format into the module and the optimizers of an engine.

    Collective: every rank, which reads its own part. A checkpoint without optimizer states leaves
    the optimizers as they are.

    Args:
        engine: Engine to load into.
        path: Path or address of the checkpoint, for formats see `open_checkpoint`; rank 0's is
            used.
        strict: Missing or unexpected names of the module are an error.
        weights_only: As for `torch.load`.

    Returns:
        The other entries of the checkpoint.

    Raises:
        RuntimeError: Names or shapes do not match; the module is unchanged.
        ValueError: The checkpoint is damaged, its format is unknown, or it has the states of more
            or fewer optimizers; the module is unchanged.
        OSError: A rank cannot read it.
    """
    comm = engine.comm
    engine.lockstep.barrier("loading a checkpoint")
    gather = comm.control.gather_objects
    path = gather(os.fspath(path))[0]
    checkpoint = open_on_all_ranks(
        path, comm.rank, comm.size, lambda name: gather, weights_only=weights_only
    )
    states = checkpoint.pop("optimizer_states", None)
    if states is not None and len(states) != len(engine.optimizers):
        raise ValueError(
            f"expected the states of {len(engine.optimizers)} optimizers, got {len(states)} in "
            f"{path}; attach the optimizers of the saved run, or load the weights only: "
            "lightning_zero.load_weights(module, path)."
        )
    load_module(engine.module, checkpoint.pop("state_dict"), strict=strict)
    load_masters(engine, checkpoint.pop(MASTERS_KEY, {}))
    for optimizer, state in zip(engine.optimizers, states or (), strict=False):
        load_optimizer(engine, optimizer, state)
    return checkpoint


# ----------------------------------------------------------------------------------------- writing


def write_full_together(
    checkpoint: dict[str, Any], path: str | os.PathLike[str], comm: Communicator
) -> None:
    """Writes rank 0's full checkpoint; every rank raises if rank 0 fails. Collective."""
    with failing_together(f"save {path}", gather=comm.control.gather_objects):
        check_shared(path, comm.size)
        if comm.rank == 0:
            write_torch_file(checkpoint, locate(path))


def write_sharded(
    checkpoint: dict[str, Any], path: str | os.PathLike[str], comm: Communicator
) -> None:
    """Writes a checkpoint with shards as a directory. Collective."""
    channel = comm.control.open_channel()
    check_shared(path, channel.size)
    try:
        with channel.session():
            ShardedSave.prepare(checkpoint, locate(path), shards_in(checkpoint), channel).run()
    finally:
        channel.close()
