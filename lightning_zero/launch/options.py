"""Hydra's schema of the options of `ZeroStrategy`, without torch and Lightning.

Written by `python -m tests.tools.option_docs --write`; a test compares it with `ZeroStrategy`.
"""

from dataclasses import dataclass
from typing import Any

__all__ = ["ZeroStrategySettings"]


@dataclass
class ZeroStrategySettings:
    """Options whose default YAML can express; Any: the strategy checks the value itself."""

    _target_: str = "lightning_zero.ZeroStrategy"
    stage: int | str = 3
    reduce_bucket_size: int | float | str | None = None
    allgather_bucket_size: int | float | str | None = None
    prefetch_bucket_size: int | float | str | None = None
    param_persistence_threshold: int | float | str | None = None
    unit_classes: Any = None
    reshard_after_forward: bool | None = None
    overlap_comm: bool = True
    reduce_dtype: str | None = None
    param_dtype: str | None = None
    keep_float32: Any = None
    activation_checkpointing: Any = False
    broadcast_buffers: bool = True
    assume_elementwise: Any = False
    offload_optimizer: Any = None
    offload_param: Any = None
    overlap_step: bool = False
    sharding_group_size: int | str | None = None
    batch_group_size: int = 1
    on_nonfinite: str | None = "warn"
    checkpoint: Any = "auto"
    async_save: bool = False
    unshard_after_fit: Any = "auto"
    checkpoint_io: Any = None
    process_group_backend: str | None = None
    start_method: Any = "popen"
