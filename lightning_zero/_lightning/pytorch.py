"""Names of `lightning.pytorch`, or of `pytorch_lightning`: see the list in `pytorch.pyi`."""

from lightning_zero._lightning import lookup

__getattr__ = lookup(__file__)
