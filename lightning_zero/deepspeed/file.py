"""Parses a DeepSpeed configuration into typed sections, with a rule for every key of DeepSpeed.

Source of the keys: DeepSpeed's configuration page (https://www.deepspeed.ai/docs/config-json) and
the classes that read the file, up to release 0.19.8. Keys that DeepSpeed has removed are still
read, because files may be older.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["STAGE3_PREFIX", "Section", "check_keys", "is_unset", "plain", "read"]

_ZERO = "zero_optimization"


def is_unset(value: object) -> bool:
    """Whether a setting has no value: null, or "auto", which Hugging Face's Trainer replaces."""
    return value is None or value == "auto"


@dataclass(frozen=True)
class Section:
    """One section of the file. A getter returns None for a key that is absent, null or "auto".

    Attributes:
        values: Plain dicts, lists and scalars; never shared with the caller.
        name: Dotted path from the top of the file; empty for the top.
        ignored: Settings of the entire file without effect, and the reasons.
    """

    values: dict[str, Any]
    name: str = ""
    ignored: dict[str, str] = field(default_factory=dict)

    def path(self, key: str) -> str:
        """The key with its path in the file, such as "fp16.loss_scale"."""
        return f"{self.name}.{key}" if self.name else key

    def get(self, key: str) -> Any:
        value = self.values.get(key)
        return None if is_unset(value) else value

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self.error(key, "true or false")

    def number(self, key: str) -> float | None:
        """A finite number that is not negative."""
        value = self.get(key)
        if value is None:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            raise self.error(key, "a number that is not negative")
        return float(value)

    def integer(self, key: str, *, minimum: int = 0) -> int | None:
        """An integer of at least `minimum`; 5e8 is one, too."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"an integer of at least {minimum}")
        return value

    def section(self, key: str) -> Section:
        """A section inside this one, empty if absent; its keys are checked if there are rules."""
        value = self.get(key) if self.has(key) else {}
        if not isinstance(value, dict):
            raise self.error(key, "a section in braces")
        return Section(value, self.path(key), self.ignored).checked()

    def checked(self) -> Section:
        """Returns the section itself.

        Raises:
            ValueError: A key is unknown to DeepSpeed, or a value would change the training.
        """
        rules, removed = self._key_rules(), _REMOVED.get(self.name, ())
        if rules:
            check_keys(self, rules)
        for key, rule in rules.items():
            if isinstance(rule, tuple) and key in self.values and rule[0](self.values[key]):
                too = " DeepSpeed refuses this key since 0.19.8." if key in removed else ""
                raise ValueError(
                    f"{self.path(key)} = {self.values[key]!r} would change the training and is not "
                    f"supported: {rule[1]}{too}"
                )
        return self

    def removed_keys(self) -> list[str]:
        """Keys of this section that DeepSpeed no longer reads, with their paths."""
        return [self.path(key) for key in self.values if key in _REMOVED.get(self.name, ())]

    def note_ignored_keys(self) -> None:
        """Adds the keys that never have an effect to `ignored`."""
        for key, rule in self._key_rules().items():
            if isinstance(rule, str) and self.has(key):
                self.ignore(key, rule)

    def ignore(self, key: str, why: str) -> None:
        """Adds a key to `ignored`; only the first reason is kept."""
        self.ignored.setdefault(self.path(key).removeprefix(f"{_ZERO}."), why)

    def error(self, key: str, expected: str) -> ValueError:
        return ValueError(
            f"{self.path(key)} must be {expected}, got {self.values[key]!r}; correct or remove it."
        )

    def _key_rules(self) -> Mapping[str, KeyRule]:
        return _KEYS.get(self.name.rpartition(".")[2], {})


def check_keys(section: Section, known: Iterable[str]) -> None:
    """Raises a ValueError for a key that is not `known`, and suggests a similar one."""
    known = sorted(known)
    for key in section.values:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
        hint = f" (did you mean {section.path(near[0])}?)" if near else ""
        raise ValueError(
            f"{section.path(str(key))} is not a DeepSpeed setting{hint}; correct or remove it."
        )


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> Section:
    """Reads the file; returns its top section, with checked keys."""
    if isinstance(source, (str, os.PathLike)):
        values = _parse(Path(source))
    elif isinstance(source, Mapping):
        values = source
    else:
        raise TypeError(f"expected a path or a mapping, got {source!r} ({type(source).__name__}).")
    if not isinstance(values, Mapping):
        raise ValueError(f"{source} must be one section in braces, got {type(values).__name__}.")
    return Section(plain(values)).checked()


def _parse(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not valid JSON: {error}. Remove comments and trailing commas, which "
            "DeepSpeed accepts."
        ) from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        duplicates = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"{', '.join(duplicates)} appears twice in one section; remove one.")
    return values


def plain(value: Any) -> Any:
    """A copy in which mappings are dicts and sequences are lists."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(part) for part in value]
    return value


# -------------------------------------------------------------------- when a key is refused


def _is_enabled(value: object) -> bool:
    """Whether a switch or a section is on; anything that is not clearly off counts as on."""
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


def _is_several(value: object) -> bool:
    """Whether a number of ranks is more than one."""
    return value > 1 if isinstance(value, (int, float)) else not is_unset(value)


def _is_parallel(value: object) -> bool:
    """Whether a tensor_parallel or expert_parallel section asks for more than one rank."""
    if not isinstance(value, Mapping):
        return _is_given(value)
    sizes = (value.get(key) for key in ("autotp_size", "tp_size", "autoep_size", "ep_size"))
    return _is_enabled(value) or any(map(_is_several, sizes))


def _is_false(value: object) -> bool:
    return not is_unset(value) and value is not True


def _is_not_mean(value: object) -> bool:
    return not is_unset(value) and str(value).lower() != "mean"


# -------------------------------------------------------------------- a rule for each key

# None: the key is translated. A text: the training is the same without it, for this reason. A pair:
# the training would differ if the function returns True; the text states what to do.
KeyRule = str | tuple[Callable[[object], bool], str] | None


def _each(keys: str, rule: KeyRule = None) -> dict[str, KeyRule]:
    return dict.fromkeys(keys.split(), rule)


_CHECKPOINT = "checkpoints are written by Lightning's ModelCheckpoint"
_DATA = (
    "the training data would differ; choose the samples in your own sampler and remove the section."
)
_MODEL = "the model would differ; build it into the module and remove the section."
_TOP_KEYS: dict[str, KeyRule] = {
    **_each("train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"),
    **_each("gradient_clipping zero_optimization allgather_size optimizer scheduler"),
    **_each("fp16 bf16 bfloat16 torch_autocast communication_data_type data_types"),
    **_each(
        "steps_per_print dump_state tensorboard wandb comet csv_monitor",
        "Lightning's loggers and progress bar report the run",
    ),
    **_each("comms_logger flops_profiler wall_clock_breakdown timers", "use Trainer(profiler=...)"),
    **_each("checkpoint nebula datastates_ckpt", _CHECKPOINT),
    "log_level": "use Python's logging",
    "memory_breakdown": "use strategy.memory_report()",
    "aio": "the NVMe tier chooses block sizes and threads itself",
    "zero_force_ds_cpu_optimizer": "any torch optimizer can step offloaded states; use fused=True",
    "zero_allow_untested_optimizer": "every optimizer is checked when training starts",
    **_each(
        "prescale_gradients gradient_predivide_factor",
        "the mean is the same; only rounding of a 16-bit sum may differ",
    ),
    "disable_allgather": "parameters are always all-gathered",
    "seq_parallel_communication_data_type": "sequence parallelism is not supported",
    "use_data_before_expert_parallelism": "expert parallelism is not supported",
    "activation_checkpointing": (
        "use activation_checkpointing=True, or torch.utils.checkpoint in the module; the results "
        "are the same"
    ),
    "compile": "call torch.compile on the module",
    "graph_harvesting": "no CUDA graphs are recorded",
    "dataloader_drop_last": "pass drop_last to your DataLoader",
    "vocabulary_size": "it only prints a hint",
    "amp": (_is_enabled, "NVIDIA Apex is not supported; use the fp16 or bf16 section."),
    "sparse_gradients": (_is_enabled, "gradients are in dense flat buffers; set it to false."),
    "gradient_allreduce_op": (_is_not_mean, 'gradients are averaged; set it to "mean".'),
    "managed_gradient_accumulation": (
        _is_false,
        "the Trainer decides when to step; set it to true and set gradient_accumulation_steps.",
    ),
    "curriculum_learning": (_is_enabled, _DATA),
    "data_efficiency": (_is_anything_enabled, _DATA),
    "elasticity": (_is_enabled, "it chooses the batch size; set train_batch_size instead."),
    "autotuning": (_is_enabled, "it chooses the batch size; set the tuned values instead."),
    "compression_training": (_is_anything_enabled, _MODEL),
    **_each("quantize_training weight_quantization sparse_attention", (_is_given, _MODEL)),
    **_each("progressive_layer_drop eigenvalue", (_is_enabled, _MODEL)),
    "pipeline": (_is_given, "there is no pipeline parallelism; remove the section."),
    "tensor_parallel": (_is_parallel, "there is no tensor parallelism; remove the section."),
    "expert_parallel": (_is_parallel, "there is no expert parallelism; remove the section."),
    "sequence_parallel_size": (_is_several, "there is no sequence parallelism; use 1."),
    "hybrid_engine": (_is_enabled, "there is no inference engine; remove the section."),
}

STAGE3_PREFIX = "stage3_"
_QUANTIZED = "collectives are not quantized; set it to false."
_UNITS = "units follow from the module, and each is all-gathered at once"
_ZERO3_KEYS: dict[str, KeyRule] = {
    **_each("prefetch_bucket_size param_persistence_threshold"),
    "max_live_parameters": "prefetch_bucket_size alone limits what is unsharded before its use",
    "max_reuse_distance": "reshard_after_forward decides whether a unit stays unsharded",
    "model_persistence_threshold": "param_persistence_threshold alone decides",
    **_each("module_granularity_threshold use_all_reduce_for_fetch_params", _UNITS),
    **_each("allgather_sequential partition_stream_chunk_size", _UNITS),
    **_each(
        "gather_16bit_weights_on_model_save gather_fp16_weights_on_model_save",
        'ZeroStrategy(checkpoint="full") writes one file with full weights',
    ),
}
_ZERO_KEYS: dict[str, KeyRule] = {
    **_each("stage reduce_bucket_size allgather_bucket_size overlap_comm mics_shard_size"),
    **_each("offload_optimizer offload_param cpu_offload cpu_offload_param cpu_offload_params"),
    **_each("cpu_offload_use_pin_memory"),
    **_ZERO3_KEYS,
    **{STAGE3_PREFIX + key: rule for key, rule in _ZERO3_KEYS.items()},
    **_each(
        "contiguous_gradients round_robin_gradients",
        "gradients are always in one flat buffer per bucket",
    ),
    **_each(
        "reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce",
        "the stage and the backend decide which collective is used",
    ),
    "grad_hooks": "gradients are reduced as they arrive",
    "legacy_stage1": "there is one engine for all stages",
    "sub_group_size": "the optimizer steps one bucket at a time, on NVMe one buffer",
    "save_muon_momentum_buffer_in_memory": "Muon is not supported",
    "leaf_module": _UNITS,
    "memory_efficient_linear": "autograd keeps views, not copies of weights",
    "override_module_apply": "Module.apply is not replaced",
    "ignore_unused_parameters": "unused parameters are always accepted",
    "load_from_fp32_weights": "checkpoints contain the float32 masters",
    "elastic_checkpoint": "checkpoints load at any world size",
    "pipeline_loading_checkpoint": _CHECKPOINT,
    "mics_hierarchical_params_gather": "one all-gather spans a group; make a group one node",
    "log_trace_cache_warnings": "it only prints",
    "enable_sanity_checks": "the engine's own checks are always on",
    "zero_quantized_weights": (_is_enabled, _QUANTIZED),
    "zero_quantized_nontrainable_weights": (_is_enabled, _QUANTIZED),
    "zero_quantized_gradients": (_is_enabled, _QUANTIZED),
    "zeropp_loco_param": (_is_given, _QUANTIZED.replace("set it to false", "remove it")),
    "zero_hpz_partition_size": (
        _is_several,
        "parameters have no secondary shards; use 1, or mics_shard_size if one group of ranks can "
        "hold all states.",
    ),
    "zenflow": (_is_given, "its delayed updates change the result; remove the section."),
}

# Keys that DeepSpeed refuses since release 0.19.8, whatever their value
# (https://github.com/deepspeedai/DeepSpeed/issues/8489), by section.
_REMOVED = {
    "": (
        *("nebula", "compression_training", "amp", "quantize_training", "sparse_gradients"),
        *("eigenvalue", "sparse_attention", "elasticity", "graph_harvesting"),
        *("curriculum_learning", "progressive_layer_drop"),
    ),
    _ZERO: ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"),
}

_FP16: dict[str, KeyRule] = {
    **_each("enabled loss_scale initial_scale_power loss_scale_window"),
    "auto_cast": "inputs of matrix products are cast by autocast",
    **_each(
        "hysteresis consecutive_hysteresis", "GradScaler lowers the scale at the first overflow"
    ),
    "min_loss_scale": "GradScaler has no minimum scale",
    "fp16_master_weights_and_grads": None,
}
_BF16: dict[str, KeyRule] = {
    **_each("enabled check_grad_overflow check_overflow"),
    **_each("bf16_master_weights_and_grads bf16_optimizer_states"),
    "immediate_grad_update": "gradients are added as they arrive",
}
_OFFLOAD: dict[str, KeyRule] = {
    **_each("device nvme_path pin_memory buffer_count"),
    "fast_init": "files are written when the engine wraps the parameters, with all threads",
}
_KEYS: dict[str, dict[str, KeyRule]] = {
    "": _TOP_KEYS,
    _ZERO: _ZERO_KEYS,
    "fp16": _FP16,
    "bf16": _BF16,
    "bfloat16": _BF16,
    "torch_autocast": {
        **_each("enabled dtype"),
        "lower_precision_safe_modules": "torch's autocast list of operations decides",
    },
    "data_types": _each("grad_accum_dtype param_dtype buffer_dtype"),
    "offload_optimizer": {
        **_OFFLOAD,
        "ratio": None,
        "super_offload": "ZeroStrategy(overlap_step=True) overlaps the step and the next forward",
        "cpuadam_cores_perc": "the step uses torch's number of threads",
        **_each("pipeline pipeline_read pipeline_write", "reads, steps and writes always overlap"),
    },
    "offload_param": {**_OFFLOAD, **_each("buffer_size max_in_cpu")},
}
