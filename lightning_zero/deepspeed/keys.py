"""The keys of a DeepSpeed configuration and what becomes of each.

Source: DeepSpeed's configuration page (https://www.deepspeed.ai/docs/config-json) and the classes
that read the file, up to release 0.19. There are three kinds of key: translated (read by
`translate`), ignored (training gives the same without it: the table says why) and refused (training
would differ: the table says when, and what to do). A key in no table is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = [
    "BLOCKS",
    "IGNORED",
    "KNOWN",
    "REFUSED",
    "STAGE3_PREFIX",
    "ZERO_IGNORED",
    "ZERO_KNOWN",
    "ZERO_REFUSED",
    "Rule",
    "is_unset",
]

STAGE3_PREFIX = "stage3_"


def is_unset(value: object) -> bool:
    """Whether a setting is left open: null, or "auto", which Hugging Face's Trainer fills in."""
    return value is None or value == "auto"


def _is_enabled(value: object) -> bool:
    """Whether a switch or section is on; what is not clearly off counts as on."""
    if isinstance(value, Mapping):
        value = value.get("enabled", False)
    return not is_unset(value) and value is not False


def _is_anything_enabled(value: object) -> bool:
    """Whether a section or any section inside it is enabled."""
    if not isinstance(value, Mapping):
        return _is_enabled(value)
    inner = (part for part in value.values() if isinstance(part, Mapping))
    return _is_enabled(value) or any(_is_anything_enabled(part) for part in inner)


def _is_given(value: object) -> bool:
    return not is_unset(value) and value is not False and value != {}


def _is_above(least: int) -> Callable[[object], bool]:
    def is_above(value: object) -> bool:
        if isinstance(value, (int, float)):
            return value > least
        return not is_unset(value)

    return is_above


def _is_parallel(value: object) -> bool:
    """Whether a tensor_parallel or expert_parallel section asks for more than one rank."""
    if not isinstance(value, Mapping):
        return _is_given(value)
    sizes = (value.get(key) for key in ("autotp_size", "tp_size", "autoep_size", "ep_size"))
    return _is_enabled(value) or any(map(_is_above(1), sizes))


def _is_false(value: object) -> bool:
    return not is_unset(value) and value is not True


def _is_not_mean(value: object) -> bool:
    return not is_unset(value) and str(value).lower() != "mean"


Rule = tuple[Callable[[object], bool], str]

_DATA = (
    "the training data would differ; choose the samples in your own sampler and remove the section."
)
_MODEL = "the model would differ; build it into the module and remove the section."
_QUANTIZED = "every collective here carries what was computed; set it to false."

REFUSED: dict[str, Rule] = {
    "amp": (_is_enabled, "NVIDIA Apex is not used here; use the fp16 or bf16 section."),
    "sparse_gradients": (_is_enabled, "gradients are flat, dense buffers here; set it to false."),
    "gradient_allreduce_op": (_is_not_mean, 'gradients are averaged here; write "mean".'),
    "managed_gradient_accumulation": (
        _is_false,
        "the Trainer decides when to step; set it to true and write gradient_accumulation_steps.",
    ),
    "curriculum_learning": (_is_enabled, _DATA),
    "data_efficiency": (_is_anything_enabled, _DATA),
    "elasticity": (_is_enabled, "it chooses the batch size; write train_batch_size instead."),
    "autotuning": (_is_enabled, "it chooses the batch size; write the tuned values instead."),
    "compression_training": (_is_anything_enabled, _MODEL),
    "quantize_training": (_is_given, _MODEL),
    "weight_quantization": (_is_given, _MODEL),
    "progressive_layer_drop": (_is_enabled, _MODEL),
    "eigenvalue": (_is_enabled, _MODEL),
    "sparse_attention": (_is_given, _MODEL),
    "pipeline": (_is_given, "there is no pipeline parallelism here; remove the section."),
    "tensor_parallel": (_is_parallel, "there is no tensor parallelism here; remove the section."),
    "expert_parallel": (_is_parallel, "there is no expert parallelism here; remove the section."),
    "sequence_parallel_size": (_is_above(1), "there is no sequence parallelism here; use 1."),
    "hybrid_engine": (_is_enabled, "there is no inference engine here; remove the section."),
}

_LIGHTNING_LOGS = "Lightning's loggers and progress bar report the run"
_PROFILER = "use Trainer(profiler=...)"
_CHECKPOINT = "checkpoints are written by Lightning's ModelCheckpoint"

IGNORED: dict[str, str] = {
    "steps_per_print": _LIGHTNING_LOGS,
    "dump_state": _LIGHTNING_LOGS,
    "log_level": "use Python's logging",
    "tensorboard": _LIGHTNING_LOGS,
    "wandb": _LIGHTNING_LOGS,
    "comet": _LIGHTNING_LOGS,
    "csv_monitor": _LIGHTNING_LOGS,
    "comms_logger": _PROFILER,
    "flops_profiler": _PROFILER,
    "wall_clock_breakdown": _PROFILER,
    "memory_breakdown": "use strategy.memory_report()",
    "timers": _PROFILER,
    "checkpoint": _CHECKPOINT,
    "nebula": _CHECKPOINT,
    "datastates_ckpt": _CHECKPOINT,
    "aio": "the NVMe tier has block sizes and threads of its own",
    "zero_force_ds_cpu_optimizer": "any torch optimizer steps offloaded states, fused=True fast",
    "zero_allow_untested_optimizer": "every optimizer is checked when training starts",
    "prescale_gradients": "the mean is the same; only rounding in a 16-bit sum could differ",
    "gradient_predivide_factor": "the mean is the same; only rounding in a 16-bit sum could differ",
    "disable_allgather": "parameters are always gathered",
    "seq_parallel_communication_data_type": "there is no sequence parallelism here",
    "use_data_before_expert_parallelism": "there is no expert parallelism here",
    "activation_checkpointing": (
        "set activation_checkpointing=True, or call torch.utils.checkpoint in the module; results "
        "are the same"
    ),
    "compile": "call torch.compile on the module",
    "graph_harvesting": "no CUDA graphs are recorded",
    "dataloader_drop_last": "pass drop_last to your DataLoader",
    "vocabulary_size": "it only prints a hint",
}

_UNITS = "units are found from the module and travel whole"
_ONE_BUFFER = "gradients always lie in one flat buffer per bucket"

ZERO_IGNORED: dict[str, str] = {
    "contiguous_gradients": _ONE_BUFFER,
    "reduce_scatter": "the stage and the backend decide which collective is used",
    "allgather_partitions": "the stage and the backend decide which collective is used",
    "use_multi_rank_bucket_allreduce": "the stage and the backend decide which collective is used",
    "round_robin_gradients": _ONE_BUFFER,
    "grad_hooks": "gradients are reduced as they arrive",
    "legacy_stage1": "there is one engine for all stages",
    "sub_group_size": "a bucket is what is stepped at once, or a buffer where it is on NVMe",
    "save_muon_momentum_buffer_in_memory": "Muon is not supported",
    "max_reuse_distance": "reshard_after_forward says whether a unit stays for its backward",
    "model_persistence_threshold": "param_persistence_threshold alone decides",
    "module_granularity_threshold": _UNITS,
    "use_all_reduce_for_fetch_params": _UNITS,
    "allgather_sequential": _UNITS,
    "partition_stream_chunk_size": _UNITS,
    "leaf_module": _UNITS,
    "memory_efficient_linear": "autograd keeps views, so no copy of a weight is held",
    "override_module_apply": "Module.apply is not replaced",
    "ignore_unused_parameters": "unused parameters are always accepted",
    "gather_16bit_weights_on_model_save": "the default checkpoint is one whole file",
    "gather_fp16_weights_on_model_save": "the default checkpoint is one whole file",
    "load_from_fp32_weights": "checkpoints hold the float32 masters",
    "elastic_checkpoint": "checkpoints load at any world size",
    "pipeline_loading_checkpoint": _CHECKPOINT,
    "mics_hierarchical_params_gather": "a group is gathered at once; let a group be a node",
    "log_trace_cache_warnings": "it only prints",
    "enable_sanity_checks": "the engine's own checks are always on",
}

ZERO_REFUSED: dict[str, Rule] = {
    "zero_quantized_weights": (_is_enabled, _QUANTIZED),
    "zero_quantized_nontrainable_weights": (_is_enabled, _QUANTIZED),
    "zero_quantized_gradients": (_is_enabled, _QUANTIZED),
    "zeropp_loco_param": (_is_given, _QUANTIZED.replace("set it to false", "remove it")),
    "zero_hpz_partition_size": (
        _is_above(1),
        "there are no second shards of parameters beside those over all ranks; use 1, or "
        "mics_shard_size where one group of ranks can hold all states.",
    ),
    "zenflow": (_is_given, "its late updates change the result; remove the section."),
}

_TRANSLATED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "communication_data_type",
    "data_types",
    "fp16",
    "bf16",
    "bfloat16",
    "torch_autocast",
    "zero_optimization",
    "allgather_size",
    "optimizer",
    "scheduler",
)
_ZERO_TRANSLATED = (
    "stage",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "overlap_comm",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "max_live_parameters",
    "mics_shard_size",
    "offload_optimizer",
    "offload_param",
    "cpu_offload",
    "cpu_offload_param",
    "cpu_offload_params",
    "cpu_offload_use_pin_memory",
)
_WITH_STAGE3_PREFIX = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "model_persistence_threshold",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
    "partition_stream_chunk_size",
    "gather_16bit_weights_on_model_save",
    "gather_fp16_weights_on_model_save",
)

KNOWN = frozenset((*_TRANSLATED, *IGNORED, *REFUSED))
ZERO_KNOWN = frozenset(
    (
        *_ZERO_TRANSLATED,
        *ZERO_IGNORED,
        *ZERO_REFUSED,
        *(STAGE3_PREFIX + key for key in _WITH_STAGE3_PREFIX),
    )
)

_OFFLOAD = ("device", "nvme_path", "pin_memory", "buffer_count", "fast_init")
_OFFLOAD_PARAM = ("buffer_size", "max_in_cpu")
_OFFLOAD_OPTIMIZER = (
    "ratio",
    "super_offload",
    "cpuadam_cores_perc",
    "pipeline",
    "pipeline_read",
    "pipeline_write",
)
_FP16 = (
    "enabled",
    "auto_cast",
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
    "fp16_master_weights_and_grads",
)
_BF16 = (
    "enabled",
    "immediate_grad_update",
    "check_grad_overflow",
    "check_overflow",
    "bf16_master_weights_and_grads",
    "bf16_optimizer_states",
)
BLOCKS: dict[str, tuple[str, ...]] = {
    "fp16": _FP16,
    "bf16": _BF16,
    "bfloat16": _BF16,
    "torch_autocast": ("enabled", "dtype", "lower_precision_safe_modules"),
    "data_types": ("grad_accum_dtype", "param_dtype", "buffer_dtype"),
    "offload_optimizer": _OFFLOAD + _OFFLOAD_OPTIMIZER,
    "offload_param": _OFFLOAD + _OFFLOAD_PARAM,
    "optimizer": ("type", "params", "legacy_fusion"),
    "scheduler": ("type", "params"),
}
