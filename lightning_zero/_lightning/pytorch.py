"""Names of the Trainer's package that this package uses, of either distribution."""

import importlib
from typing import TYPE_CHECKING

from lightning_zero._lightning import chosen

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import lightning.pytorch.plugins.io.wrapper
    import lightning.pytorch.trainer.connectors.signal_connector  # noqa: F401
else:
    pl = importlib.import_module(chosen().pytorch)

Callback = pl.Callback
LightningDataModule = pl.LightningDataModule
LightningModule = pl.LightningModule
Trainer = pl.Trainer
__version__ = pl.__version__  # type: ignore[attr-defined]
Accelerator = pl.accelerators.Accelerator
MPSAccelerator = pl.accelerators.MPSAccelerator
Checkpoint = pl.callbacks.Checkpoint
LearningRateMonitor = pl.callbacks.LearningRateMonitor
ModelCheckpoint = pl.callbacks.ModelCheckpoint
ModelPruning = pl.callbacks.ModelPruning
OnExceptionCheckpoint = pl.callbacks.OnExceptionCheckpoint
ProgressBar = pl.callbacks.ProgressBar
StochasticWeightAveraging = pl.callbacks.StochasticWeightAveraging
WeightAveraging = pl.callbacks.WeightAveraging
_plugin_to_compute_dtype = pl.callbacks.throughput_monitor._plugin_to_compute_dtype
LightningOptimizer = pl.core.optimizer.LightningOptimizer
_MockOptimizer = pl.core.optimizer._MockOptimizer
_load_state = pl.core.saving._load_state
load_hparams_from_tags_csv = pl.core.saving.load_hparams_from_tags_csv
load_hparams_from_yaml = pl.core.saving.load_hparams_from_yaml
CSVLogger = pl.loggers.CSVLogger
TensorBoardLogger = pl.loggers.TensorBoardLogger
WandbLogger = pl.loggers.WandbLogger
ExperimentWriter = pl.loggers.csv_logs.ExperimentWriter
_WrappingCheckpointIO = pl.plugins.io.wrapper._WrappingCheckpointIO
DoublePrecision = pl.plugins.precision.DoublePrecision
HalfPrecision = pl.plugins.precision.HalfPrecision
MixedPrecision = pl.plugins.precision.MixedPrecision
Precision = pl.plugins.precision.Precision
ParallelStrategy = pl.strategies.ParallelStrategy
DDPStrategy = pl.strategies.DDPStrategy
SingleDeviceStrategy = pl.strategies.SingleDeviceStrategy
Strategy = pl.strategies.Strategy
StrategyRegistry = pl.strategies.StrategyRegistry
_MultiProcessingLauncher = pl.strategies.launchers._MultiProcessingLauncher
_SubprocessScriptLauncher = pl.strategies.launchers._SubprocessScriptLauncher
subprocess_script = pl.strategies.launchers.subprocess_script
_SignalConnector = pl.trainer.connectors.signal_connector._SignalConnector
TrainerFn = pl.trainer.states.TrainerFn
TrainerState = pl.trainer.states.TrainerState
TrainerStatus = pl.trainer.states.TrainerStatus
GradClipAlgorithmType = pl.utilities.GradClipAlgorithmType
_extract_batch_size = pl.utilities.data._extract_batch_size
SIGTERMException = pl.utilities.exceptions.SIGTERMException
_TunerExitException = pl.utilities.exceptions._TunerExitException
migrate_checkpoint = pl.utilities.migration.utils.migrate_checkpoint
is_overridden = pl.utilities.model_helpers.is_overridden
STEP_OUTPUT = pl.utilities.types.STEP_OUTPUT
