"""Save state dicts of full tensors from shards, and load them; read checkpoints of many formats.

Imports the engine and all packages below it, and the reader of DeepSpeed's checkpoints.

    states            full tensors on rank 0, or this rank's elements in torch's DCP format
    checkpoint_shard  hooks through which DCP saves flat shards of n-D tensors
    dcp_writer        writes DCP directories atomically
    dcp_reader        opens DCP directories and reads any part of them
    dcp_metadata      reads their file `.metadata`, and runs nothing in it
    dcp_chunks        checks that every element is stored exactly once
    rank_states       random generators and data loaders of each rank
    save_record       identifies the save that each file belongs to
    modules           modules among the hyperparameters of a checkpoint
    torch_file        reads and writes files of `torch.save`, tensor by tensor
    engine_checkpoint saves and loads all states of an engine, without Lightning
    load              loads any checkpoint into modules, masters and optimizer states
    source            opens a checkpoint of any format, verifies and summarizes it
    hugging_face      Hugging Face's format
    newest            finds the newest checkpoint in a folder
    storage           files and directories, local or at addresses such as s3://bucket/run
    atomic            atomic replacement of local ones
    new_file          local files that are on the disk when they are closed, and errors of disks
    checksums         SHA256SUMS of a directory
    export            converts one format into another, for the command line

Begin with `states`.
"""

from lightning_zero.checkpoint.engine_checkpoint import load_checkpoint, save_checkpoint
from lightning_zero.checkpoint.load import (
    load_masters,
    load_module,
    load_optimizer,
    load_weights,
)
from lightning_zero.checkpoint.newest import newest_checkpoint
from lightning_zero.checkpoint.source import open_checkpoint
from lightning_zero.checkpoint.states import full_state_dict, narrow_masters

__all__ = [
    "full_state_dict",
    "load_checkpoint",
    "load_masters",
    "load_module",
    "load_optimizer",
    "load_weights",
    "narrow_masters",
    "newest_checkpoint",
    "open_checkpoint",
    "save_checkpoint",
]
