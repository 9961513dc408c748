"""State dicts of whole tensors from shards, and back; files of many formats.

Imports the engine and all below it.

    states        whole tensors, or each rank its own elements for torch's format (DCP)
    checkpoint_shard  the hooks by which DCP saves and loads flat shards of n-D tensors
    dcp_writer    files of that format, written all or nothing
    dcp_reader    opens directories of that format, whole or in part
    dcp_metadata  their file `.metadata`, of which nothing is run
    dcp_chunks    whether every element is stored, and stored once
    save_record   which save each of their files belongs to
    modules       modules among the hyperparameters of a checkpoint
    torch_file    one file of `torch.save`, tensor after tensor
    load          into modules, masters and optimizer states, whatever wrote them
    source        opens any form, finds what is damaged, and says what is there
    deepspeed, hugging_face  the forms of others
    newest        the checkpoint of a folder from which training goes on
    atomic        files and directories that are there whole or not at all
    remote        the same at addresses such as s3://bucket/run/last.ckpt
    export        one form into another, for the command line

Begin with `states`.
"""

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
    "load_masters",
    "load_module",
    "load_optimizer",
    "load_weights",
    "narrow_masters",
    "newest_checkpoint",
    "open_checkpoint",
]
