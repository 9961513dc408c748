"""ZeRO stages 1-3 for PyTorch Lightning, without DeepSpeed."""

from lightning_zero.access import full_grad, gathered
from lightning_zero.config import ZeroConfig
from lightning_zero.engine import Engine
from lightning_zero.memory import MemoryReport

__version__ = "0.1.0.dev0"

__all__ = ["Engine", "MemoryReport", "ZeroConfig", "__version__", "full_grad", "gathered"]
