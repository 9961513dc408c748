"""Unknown options: similar names, and what replaces the options of other strategies.

`FOREIGN_OPTIONS` has the options of Lightning's FSDPStrategy, ModelParallelStrategy, DDPStrategy
and DeepSpeedStrategy, and of the torch functions that these pass them to, if we have no option of
that name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import TypeVar

__all__ = ["FOREIGN_OPTIONS", "explain_unknown_options", "unknown_option_error"]

_T = TypeVar("_T")

_NONE = "nothing replaces it: leave it out"
_SHARDING = 'use sharding_group_size, such as sharding_group_size="node"'
_PREFETCH = "use prefetch_bucket_size (elements), or leave it out: the next unit is prefetched"
_PRECISION = "use the Trainer's precision, or param_dtype and reduce_dtype"
_UNUSED = "leave it out: parameters may be unused, on any rank and in any step"
_IGNORED = (
    "leave it out: all parameters are sharded; param_persistence_threshold replicates small ones"
)
_OFFLOAD_PARAM = 'use offload_param="cpu" or "nvme"'
_OFFLOAD_OPTIMIZER = 'use offload_optimizer="cpu" or "nvme"'
_FILES = 'use lightning_zero.OffloadConfig("nvme", {}=...) as offload_param or offload_optimizer'
_SCALER = 'use precision="16-mixed"; MixedPrecision(scaler=GradScaler(...)) sets the scale'
_OFFLOAD_ACTIVATIONS = "use lightning_zero.offload_activations() around the forward"
_REDUCE_DTYPE = 'use reduce_dtype, such as reduce_dtype="bf16", to reduce in fewer bytes'

_FSDP = {
    "cpu_offload": 'use offload_optimizer="cpu", with offload_param="cpu" in stage 3',
    "offload_policy": 'use offload_optimizer="cpu", with offload_param="cpu" in stage 3',
    "mixed_precision": _PRECISION,
    "mp_policy": _PRECISION,
    "auto_wrap_policy": "use unit_classes, or leave it out: repeated blocks are found",
    "activation_checkpointing_policy": "use activation_checkpointing",
    "sharding_strategy": "use stage=3 (FULL_SHARD), stage=2 (SHARD_GRAD_OP), stage=0 (NO_SHARD), "
    'or stage=3 with sharding_group_size="node" (HYBRID_SHARD)',
    "state_dict_type": 'use checkpoint="full" or checkpoint="sharded"',
    "save_distributed_checkpoint": 'use checkpoint="full" or checkpoint="sharded"',
    "device_mesh": _SHARDING,
    "mesh": _SHARDING,
    "process_group": _SHARDING,
    "data_parallel_size": _SHARDING,
    "dp_mesh_dims": _SHARDING,
    "tensor_parallel_size": "tensor parallelism is not supported",
    "shard_placement_fn": "leave it out: parameters are sharded as flat ranges",
    "backward_prefetch": _PREFETCH,
    "forward_prefetch": _PREFETCH,
    "limit_all_gathers": "use max_live_parameters (elements)",
    "ignored_modules": _IGNORED,
    "ignored_states": _IGNORED,
    "ignored_params": _IGNORED,
    "param_init_fn": "leave it out: reset_parameters() initializes modules on the meta device",
    "device_id": "leave it out: the Trainer chooses the device",
    "sync_module_states": "leave it out: all ranks get the values of rank 0",
    "use_orig_params": "leave it out: parameters always stay the same objects",
}
_DDP = {
    "ddp_comm_state": _REDUCE_DTYPE,
    "ddp_comm_hook": _REDUCE_DTYPE,
    "ddp_comm_wrapper": _REDUCE_DTYPE,
    "model_averaging_period": _NONE,
    "device_ids": "leave it out: the Trainer chooses the device",
    "output_device": "leave it out: the Trainer chooses the device",
    "dim": _NONE,
    "init_sync": "leave it out: all ranks get the values of rank 0",
    "bucket_cap_mb": "use reduce_bucket_size (elements)",
    "bucket_cap_mb_list": "use reduce_bucket_size (elements)",
    "find_unused_parameters": _UNUSED,
    "skip_all_reduce_unused_params": _UNUSED,
    "static_graph": _UNUSED,
    "check_reduction": _NONE,
    "gradient_as_bucket_view": "leave it out: gradients are always views of a bucket",
    "batched_grad_copy": "leave it out: gradients are always views of a bucket",
    "delay_all_reduce_named_params": _NONE,
    "param_to_hook_all_reduce": _NONE,
    "forward_sync_buffers": "use broadcast_buffers",
}
_DEEPSPEED = {
    "zero_optimization": "use stage=0 to shard nothing",
    "remote_device": _OFFLOAD_PARAM,
    "offload_parameters": _OFFLOAD_PARAM,
    "offload_params_device": _OFFLOAD_PARAM,
    "offload_optimizer_device": _OFFLOAD_OPTIMIZER,
    "nvme_path": _FILES.format("nvme_path"),
    "params_buffer_count": _FILES.format("buffer_count"),
    "params_buffer_size": _FILES.format("buffer_size"),
    "optimizer_buffer_count": _FILES.format("buffer_count"),
    "max_in_cpu": _FILES.format("max_in_cpu_bytes"),
    "pin_memory": _FILES.format("pin_memory"),
    "block_size": _NONE,
    "queue_depth": _NONE,
    "single_submit": _NONE,
    "overlap_events": _NONE,
    "thread_count": _NONE,
    "sub_group_size": "leave it out: offloaded optimizers step bucket by bucket",
    "contiguous_gradients": "leave it out: gradients are always in one buffer for each bucket",
    "allgather_partitions": _NONE,
    "reduce_scatter": _NONE,
    "zero_allow_untested_optimizer": "leave it out: every optimizer is probed",
    "logging_batch_size_per_gpu": _NONE,
    "config": "use ZeroStrategy.from_deepspeed(config)",
    "logging_level": _NONE,
    "loss_scale": _SCALER,
    "initial_scale_power": _SCALER,
    "loss_scale_window": _SCALER,
    "hysteresis": _SCALER,
    "min_loss_scale": _SCALER,
    "partition_activations": _OFFLOAD_ACTIVATIONS,
    "cpu_checkpointing": _OFFLOAD_ACTIVATIONS,
    "contiguous_memory_optimization": _NONE,
    "synchronize_checkpoint_boundary": _NONE,
    "load_full_weights": "leave it out: ckpt_path accepts every format",
    "exclude_frozen_parameters": "leave it out: checkpoints have all parameters",
}
# What to do instead, by name.
FOREIGN_OPTIONS = {**_DEEPSPEED, **_DDP, **_FSDP}


def unknown_option_error(owner: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for option `name`, which `owner` does not have; `known` are the ones it has."""
    known = sorted(known)
    near = get_close_matches(name, known, n=1)
    if name in FOREIGN_OPTIONS:
        hint = f"; {FOREIGN_OPTIONS[name]}"
    elif near:
        hint = f"; did you mean {near[0]}?"
    else:
        hint = f"; it has {', '.join(known)}"
    return TypeError(f"{owner} has no option {name}{hint}{'' if hint.endswith('?') else '.'}")


def explain_unknown_options(cls: type[_T]) -> type[_T]:
    """Class decorator: `cls(unknown=...)` raises an error that names a similar option.

    The class keeps its signature.
    """
    init: Callable[..., None] = cls.__init__
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @wraps(init)
    def checked(self: _T, *args: object, **kwargs: object) -> None:
        for name in kwargs:
            if name not in known:
                raise unknown_option_error(type(self).__name__, name, known)
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[assignment,method-assign]
    return cls
