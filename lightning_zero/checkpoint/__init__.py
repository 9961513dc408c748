"""State dicts of whole tensors from shards, and back; files of many formats.

Imports the engine and all below it.

    full          whole tensors, gathered bucket by bucket
    sharded       each rank its own elements, as `ShardTensor`s for torch's format (DCP)
    shard_tensor  the hooks by which DCP saves and loads flat shards of n-D tensors
    dcp_writer    files of that format, written all or nothing
    dcp_reader    and read, whole or in part
    torch_file    one file of `torch.save`, tensor after tensor
    load, optimizer  into modules, masters and optimizer states, whatever wrote them
    source        opens any form, and finds what is damaged
    deepspeed, hugging_face  the forms of others
    atomic        files and directories that are there whole or not at all
    remote        the same at addresses such as s3://bucket/run/last.ckpt
    export, summary  for the command line

Begin with `full`, then `sharded`.
"""

from lightning_zero.checkpoint.full import full_state_dict, narrow_masters
from lightning_zero.checkpoint.load import (
    load_masters,
    load_module,
    load_weights,
)
from lightning_zero.checkpoint.optimizer import load_optimizer
from lightning_zero.checkpoint.source import open_checkpoint

__all__ = [
    "full_state_dict",
    "load_masters",
    "load_module",
    "load_optimizer",
    "load_weights",
    "narrow_masters",
    "open_checkpoint",
]
