# What lightning_zero uses of the Trainer's package; `pytorch.py` imports from this list.
# ruff: noqa: I001 (one import for each module)

from lightning.pytorch import (
    Callback as Callback,
    LightningDataModule as LightningDataModule,
    LightningModule as LightningModule,
    Trainer as Trainer,
)
from lightning.pytorch import __version__ as __version__  # type: ignore[attr-defined]
from lightning.pytorch.accelerators import (
    Accelerator as Accelerator,
    MPSAccelerator as MPSAccelerator,
)
from lightning.pytorch.callbacks import (
    Checkpoint as Checkpoint,
    LearningRateMonitor as LearningRateMonitor,
    ModelCheckpoint as ModelCheckpoint,
    ModelPruning as ModelPruning,
    OnExceptionCheckpoint as OnExceptionCheckpoint,
    ProgressBar as ProgressBar,
    StochasticWeightAveraging as StochasticWeightAveraging,
    WeightAveraging as WeightAveraging,
)
from lightning.pytorch.callbacks.throughput_monitor import (
    _plugin_to_compute_dtype as _plugin_to_compute_dtype,
)
from lightning.pytorch.core.optimizer import (
    LightningOptimizer as LightningOptimizer,
    _MockOptimizer as _MockOptimizer,
)
from lightning.pytorch.core.saving import (
    _load_state as _load_state,
    load_hparams_from_tags_csv as load_hparams_from_tags_csv,
    load_hparams_from_yaml as load_hparams_from_yaml,
)
from lightning.pytorch.loggers import (
    CSVLogger as CSVLogger,
    TensorBoardLogger as TensorBoardLogger,
    WandbLogger as WandbLogger,
)
from lightning.pytorch.loggers.csv_logs import ExperimentWriter as ExperimentWriter
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import (
    DoublePrecision as DoublePrecision,
    HalfPrecision as HalfPrecision,
    MixedPrecision as MixedPrecision,
    Precision as Precision,
)
from lightning.pytorch.strategies import (
    ParallelStrategy as ParallelStrategy,
    DDPStrategy as DDPStrategy,
    SingleDeviceStrategy as SingleDeviceStrategy,
    Strategy as Strategy,
    StrategyRegistry as StrategyRegistry,
)
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher as _MultiProcessingLauncher,
    _SubprocessScriptLauncher as _SubprocessScriptLauncher,
    subprocess_script as subprocess_script,
)
from lightning.pytorch.strategies.strategy import TBroadcast as TBroadcast
from lightning.pytorch.trainer.connectors.signal_connector import (
    _SignalConnector as _SignalConnector,
)
from lightning.pytorch.trainer.states import (
    TrainerFn as TrainerFn,
    TrainerState as TrainerState,
    TrainerStatus as TrainerStatus,
)
from lightning.pytorch.utilities import (
    GradClipAlgorithmType as GradClipAlgorithmType,
)
from lightning.pytorch.utilities.data import _extract_batch_size as _extract_batch_size
from lightning.pytorch.utilities.exceptions import (
    SIGTERMException as SIGTERMException,
    _TunerExitException as _TunerExitException,
)
from lightning.pytorch.utilities.migration.utils import migrate_checkpoint as migrate_checkpoint
from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden
from lightning.pytorch.utilities.types import STEP_OUTPUT as STEP_OUTPUT
