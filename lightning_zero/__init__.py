"""ZeRO stages 1-3 for PyTorch Lightning, without DeepSpeed."""

from lightning_zero.config import ZeroConfig

__version__ = "0.1.0.dev0"

__all__ = ["ZeroConfig", "__version__"]
