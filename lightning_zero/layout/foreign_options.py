"""Unknown options: similar names, and what replaces removed options and those of other strategies.

`FOREIGN_OPTIONS` has the options of Lightning's FSDPStrategy, ModelParallelStrategy, DDPStrategy
and DeepSpeedStrategy, and of the torch functions that these pass them to, for which there is
another name here, or which are not needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import TypeVar

__all__ = ["FOREIGN_OPTIONS", "REMOVED_OPTIONS", "explain_unknown_options", "unknown_option_error"]

_T = TypeVar("_T")

_FILES = 'use lightning_zero.OffloadConfig("nvme", {}=...) as offload_param or offload_optimizer'
# Names by what to do instead.
_REPLACED = {
    # all
    "leave it out: the Trainer chooses the device": "device_id device_ids output_device",
    "leave it out: all ranks get the values of rank 0": "sync_module_states init_sync",
    'use offload_optimizer="cpu", with offload_param="cpu" in stage 3': (
        "cpu_offload offload_policy"
    ),
    # FSDP
    "use the Trainer's precision, or param_dtype and reduce_dtype": "mixed_precision mp_policy",
    "use unit_classes, or leave it out: repeated blocks are found": "auto_wrap_policy",
    "use activation_checkpointing": "activation_checkpointing_policy",
    "use stage=3 (FULL_SHARD), stage=2 (SHARD_GRAD_OP), stage=0 (NO_SHARD), "
    'or stage=3 with sharding_group_size="node" (HYBRID_SHARD)': "sharding_strategy",
    'use checkpoint="full" or checkpoint="sharded"': "state_dict_type save_distributed_checkpoint",
    'use sharding_group_size, such as sharding_group_size="node"': (
        "device_mesh mesh process_group data_parallel_size dp_mesh_dims"
    ),
    "tensor parallelism is not supported": "tensor_parallel_size",
    "leave it out: parameters are sharded as flat ranges": "shard_placement_fn",
    "use prefetch_bucket_size (elements), or leave it out: the next unit is prefetched": (
        "backward_prefetch forward_prefetch limit_all_gathers"
    ),
    "leave it out: all parameters are sharded; param_persistence_threshold replicates small ones": (
        "ignored_modules ignored_states ignored_params"
    ),
    "leave it out: reset_parameters() initializes modules on the meta device": "param_init_fn",
    "leave it out: parameters always stay the same objects": "use_orig_params",
    # DDP
    'use reduce_dtype, such as reduce_dtype="bf16", to reduce in fewer bytes': (
        "ddp_comm_state ddp_comm_hook ddp_comm_wrapper"
    ),
    "use reduce_bucket_size (elements)": "bucket_cap_mb bucket_cap_mb_list",
    "leave it out: parameters may be unused, on any rank and in any step": (
        "find_unused_parameters skip_all_reduce_unused_params static_graph"
    ),
    "leave it out: gradients are always views of a bucket": (
        "gradient_as_bucket_view batched_grad_copy contiguous_gradients"
    ),
    "use broadcast_buffers": "forward_sync_buffers",
    # DeepSpeed
    "use stage=0 to shard nothing": "zero_optimization",
    'use offload_param="cpu" or "nvme"': "remote_device offload_parameters offload_params_device",
    'use offload_optimizer="cpu" or "nvme"': "offload_optimizer_device",
    _FILES.format("nvme_path"): "nvme_path",
    _FILES.format("buffer_count"): "params_buffer_count optimizer_buffer_count",
    _FILES.format("buffer_size"): "params_buffer_size",
    _FILES.format("max_in_cpu_bytes"): "max_in_cpu",
    _FILES.format("pin_memory"): "pin_memory",
    "leave it out: offloaded optimizers step bucket by bucket": "sub_group_size",
    "leave it out: every optimizer is probed": "zero_allow_untested_optimizer",
    "use ZeroStrategy.from_deepspeed(config)": "config",
    'use precision="16-mixed"; MixedPrecision(scaler=GradScaler(...)) sets the scale': (
        "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale"
    ),
    "use lightning_zero.offload_activations() around the forward": (
        "partition_activations cpu_checkpointing"
    ),
    "leave it out: ckpt_path accepts every format": "load_full_weights",
    "leave it out: checkpoints have all parameters": "exclude_frozen_parameters",
}
FOREIGN_OPTIONS = {name: text for text, names in _REPLACED.items() for name in names.split()}
# Options that earlier versions had.
REMOVED_OPTIONS = {
    "check_memory": "leave it out: states that exceed the memory are always refused",
    "heartbeat_timeout_s": "use timeout, which ends a wait for a silent rank",
    "max_live_parameters": "use prefetch_bucket_size, the elements to unshard before their use",
    "max_skips": "leave it out: after 10 skipped steps in a row, one more is an error",
    "separate_reduce_scatter_group": "leave it out: collectives use one communicator",
    "wait_report_s": "leave it out: a wait of 30 s for other ranks is reported",
}


def unknown_option_error(owner: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for option `name`, which `owner` does not have; `known` are the ones it has."""
    known = sorted(known)
    if name in REMOVED_OPTIONS:
        return TypeError(f"{owner} has no option {name} any more; {REMOVED_OPTIONS[name]}.")
    if name in FOREIGN_OPTIONS:
        return TypeError(f"{owner} has no option {name}; {FOREIGN_OPTIONS[name]}.")
    if near := get_close_matches(name, known, n=1):
        return TypeError(f"{owner} has no option {name}; did you mean {near[0]}?")
    return TypeError(f"{owner} has no option {name}; it has {', '.join(known)}.")


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
