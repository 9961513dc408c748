# What lightning_zero uses of Fabric's package; `fabric.py` imports from this list.
# ruff: noqa: I001 (one import for each module)

from lightning.fabric.accelerators.accelerator import Accelerator as Accelerator
from lightning.fabric.loggers.logger import rank_zero_experiment as rank_zero_experiment
from lightning.fabric.plugins import (
    CheckpointIO as CheckpointIO,
    ClusterEnvironment as ClusterEnvironment,
    TorchCheckpointIO as TorchCheckpointIO,
)
from lightning.fabric.plugins.environments.lightning import (
    LightningEnvironment as LightningEnvironment,
)
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment as SLURMEnvironment
from lightning.fabric.plugins.precision import (
    DoublePrecision as DoublePrecision,
    HalfPrecision as HalfPrecision,
    MixedPrecision as MixedPrecision,
    Precision as Precision,
)
from lightning.fabric.strategies.launchers.subprocess_script import (
    _basic_subprocess_cmd as _basic_subprocess_cmd,
)
from lightning.fabric.strategies.parallel import ParallelStrategy as ParallelStrategy
from lightning.fabric.strategies.strategy import (
    _apply_filter as _apply_filter,
    _BackwardSyncControl as _BackwardSyncControl,
    _validate_keys_for_strict_loading as _validate_keys_for_strict_loading,
)
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol as _is_local_file_protocol
from lightning.fabric.utilities.data import sized_len as sized_len
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device as _get_default_process_group_backend_for_device,
    _init_dist_connection as _init_dist_connection,
    _set_num_threads_if_needed as _set_num_threads_if_needed,
    _sync_ddp_if_available as _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import _get_rank as _get_rank
from lightning.fabric.utilities.seed import (
    pl_worker_init_function as pl_worker_init_function,
    reset_seed as reset_seed,
)
from lightning.fabric.utilities.throughput import get_available_flops as get_available_flops
from lightning.fabric.utilities.types import (
    _PATH as _PATH,
    Optimizable as Optimizable,
    _Stateful as _Stateful,
)
