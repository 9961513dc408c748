"""Names of `lightning.fabric`, or of `lightning_fabric`: see the list in `fabric.pyi`."""

from lightning_zero._lightning import lookup

__getattr__ = lookup(__file__)
