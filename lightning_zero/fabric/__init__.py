"""`Fabric(strategy="zero3")`: engines for training loops of the user's own, with Fabric's launch.

Imports strategy, for what the Trainer's strategy and this one share, and all below it.

    strategy    `ZeroStrategy` for Fabric: an engine for each `setup`, its steps and its states
    module      a module that was set up, and the engines in the graph of a loss
    objects     the modules, optimizers and values that `fabric.save` and `fabric.load` name
    precision   Fabric's precisions on sharded parameters

Begin with `strategy`.
"""

from lightning_zero.fabric.strategy import ZeroStrategy

__all__ = ["ZeroStrategy"]
