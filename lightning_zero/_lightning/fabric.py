"""Names of Fabric's package that this package uses, of either distribution."""

import importlib
from typing import TYPE_CHECKING

from lightning_zero._lightning import chosen

if TYPE_CHECKING:
    import lightning.fabric as fabric
else:
    fabric = importlib.import_module(chosen().fabric)

Accelerator = fabric.accelerators.accelerator.Accelerator
rank_zero_experiment = fabric.loggers.logger.rank_zero_experiment
CheckpointIO = fabric.plugins.CheckpointIO
ClusterEnvironment = fabric.plugins.ClusterEnvironment
TorchCheckpointIO = fabric.plugins.TorchCheckpointIO
LightningEnvironment = fabric.plugins.environments.lightning.LightningEnvironment
SLURMEnvironment = fabric.plugins.environments.slurm.SLURMEnvironment
DoublePrecision = fabric.plugins.precision.DoublePrecision
HalfPrecision = fabric.plugins.precision.HalfPrecision
MixedPrecision = fabric.plugins.precision.MixedPrecision
Precision = fabric.plugins.precision.Precision
_basic_subprocess_cmd = fabric.strategies.launchers.subprocess_script._basic_subprocess_cmd
ParallelStrategy = fabric.strategies.parallel.ParallelStrategy
_apply_filter = fabric.strategies.strategy._apply_filter
_BackwardSyncControl = fabric.strategies.strategy._BackwardSyncControl
_validate_keys_for_strict_loading = fabric.strategies.strategy._validate_keys_for_strict_loading
_is_local_file_protocol = fabric.utilities.cloud_io._is_local_file_protocol
sized_len = fabric.utilities.data.sized_len
_get_default_process_group_backend_for_device = (
    fabric.utilities.distributed._get_default_process_group_backend_for_device
)
_init_dist_connection = fabric.utilities.distributed._init_dist_connection
_set_num_threads_if_needed = fabric.utilities.distributed._set_num_threads_if_needed
_sync_ddp_if_available = fabric.utilities.distributed._sync_ddp_if_available
_get_rank = fabric.utilities.rank_zero._get_rank
pl_worker_init_function = fabric.utilities.seed.pl_worker_init_function
reset_seed = fabric.utilities.seed.reset_seed
get_available_flops = fabric.utilities.throughput.get_available_flops
_PATH = fabric.utilities.types._PATH
Optimizable = fabric.utilities.types.Optimizable
_Stateful = fabric.utilities.types._Stateful
