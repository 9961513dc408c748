"""Linear layers that multiply in float8, by torchao, before the module is sharded.

A converted layer keeps its parameters: they are sharded, stepped and saved as before, and cast to
float8 where the layer multiplies. The scale is that of all elements of a weight, in every stage.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_zero._lightning.pytorch import MixedPrecision
from lightning_zero.layout.config import Modules, as_modules
from lightning_zero.layout.names import matches_module, no_match_message

__all__ = ["Float8Precision"]

_ALIGNMENT = 16  # the matrix product of a GPU in float8 needs sizes that are multiples of it


class Float8Precision(MixedPrecision):
    """The Trainer's `bf16-mixed`, with linear layers in float8: `Trainer(plugins=...)`.

    Converts each `nn.Linear` to torchao's `Float8Linear` when a run is set up, after
    `configure_model`; also under DDP. Layers with a number of features that is no multiple of 16,
    and subclasses of `nn.Linear`, stay as they are. Needs `pip install torchao`, and a GPU with
    float8, such as an H100; with `Float8LinearConfig(emulate=True)` any device.

    Args:
        config: torchao's `Float8LinearConfig`; None: its defaults, one scale per tensor.
        exclude: Layers that stay as they are: names, patterns of names, classes, or class names.

    Raises:
        ModuleNotFoundError: torchao is not installed.
        TypeError: `config` or `exclude` has another type.
        ValueError: At set-up: an item of `exclude` matches no module.
    """

    def __init__(self, config: Any = None, exclude: Modules = ()) -> None:
        from torchao.float8 import Float8LinearConfig

        super().__init__("bf16-mixed", "cuda" if torch.cuda.is_available() else "cpu")
        self._config = Float8LinearConfig() if config is None else config
        if not isinstance(self._config, Float8LinearConfig):
            raise TypeError(
                f"config must be torchao's Float8LinearConfig, got {config!r}; for a recipe pass "
                'Float8LinearConfig.from_recipe_name("rowwise").'
            )
        self._exclude = as_modules("exclude", exclude)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        from torchao.float8 import convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        modules = dict(module.named_modules())
        for item in self._exclude:
            if not any(matches_module(path, layer, item) for path, layer in modules.items()):
                raise ValueError(no_match_message("Float8Precision(exclude)", modules, item))
        module = convert_to_float8_training(
            module, config=self._config, module_filter_fn=self._is_converted
        )
        if not any(isinstance(layer, Float8Linear) for layer in module.modules()):
            rank_zero_warn(
                f"Float8Precision has converted no layer of {type(module).__name__}: expected an "
                f"nn.Linear whose numbers of features are multiples of {_ALIGNMENT}, and that is "
                'not in exclude; use precision="bf16-mixed" if there is none.'
            )
        return module

    def _is_converted(self, layer: nn.Module, path: str) -> bool:
        return (
            type(layer) is nn.Linear
            and layer.in_features % _ALIGNMENT == layer.out_features % _ALIGNMENT == 0
            and not any(matches_module(path, layer, item) for item in self._exclude)
        )
