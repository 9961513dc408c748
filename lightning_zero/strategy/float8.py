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
from lightning_zero.layout.names import matches_module, no_match_message, saved_name

__all__ = ["Float8Precision"]

_ALIGNMENT = 16  # the matrix product of a GPU in float8 needs sizes that are multiples of it


class Float8Precision(MixedPrecision):
    """The Trainer's `bf16-mixed`, with linear layers in float8: `Trainer(plugins=...)`.

    Makes each `nn.Linear` torchao's `Float8Linear` when a run is set up, after `configure_model`;
    also under DDP. Layers stay the same objects, with their parameters, hooks and attributes.
    Layers with a number of features that is no multiple of 16, subclasses of `nn.Linear`, and
    layers with a `forward` of their own stay as they are. Needs `pip install torchao`, and a GPU
    with float8, such as an H100; with `Float8LinearConfig(emulate=True)` any device.

    Args:
        config: torchao's `Float8LinearConfig`; None: its defaults, one scale per tensor.
        exclude: Layers that stay as they are, or modules for all layers below them: names, patterns
            of names, classes, or class names.

    Raises:
        ModuleNotFoundError: torchao is not installed.
        TypeError: `config` or `exclude` has another type.
        ValueError: `config` has `enable_fsdp_float8_all_gather=True`. At set-up: an item of
            `exclude` keeps no `nn.Linear`, a layer has an attribute that `Float8Linear` needs, or
            an earlier run has converted it with another `config` or `exclude`.
    """

    def __init__(self, config: Any = None, exclude: Modules = ()) -> None:
        try:
            from torchao.float8 import Float8LinearConfig
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'Float8Precision needs torchao: pip install "lightning-zero[float8]".'
            ) from error

        # For modules without a Trainer; see convert_module.
        super().__init__("bf16-mixed", "cuda" if torch.cuda.is_available() else "cpu")
        self._config = Float8LinearConfig() if config is None else config
        if not isinstance(self._config, Float8LinearConfig):
            raise TypeError(
                f"config must be torchao's Float8LinearConfig, got {config!r}; for a recipe pass "
                'Float8LinearConfig.from_recipe_name("rowwise").'
            )
        if self._config.enable_fsdp_float8_all_gather:
            raise ValueError(
                "config must have enable_fsdp_float8_all_gather=False, got True, with which FSDP "
                "alone can all-gather the weights; leave it out."
            )
        self._is_default = self._config == Float8LinearConfig()
        expected = "names or patterns of modules, classes of modules"
        self._exclude = as_modules("exclude", exclude, expected)

    def __repr__(self) -> str:
        items = [item.__name__ if isinstance(item, type) else f'"{item}"' for item in self._exclude]
        arguments = [] if self._is_default else ["config=..."]
        arguments += [f"exclude=[{', '.join(items)}]"] if items else []
        return f"{type(self).__name__}({', '.join(arguments)})"

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        from torchao.float8 import convert_to_float8_training

        trainer = getattr(module, "_trainer", None)
        if trainer is not None:  # strategies move the module to its device later
            self.device = trainer.strategy.root_device.type
        excluded = self._excluded(module)
        layers = {
            path: layer
            for path, layer in module.named_modules()
            if layer not in excluded and _is_convertible(layer)
        }
        sample = nn.Linear(_ALIGNMENT, _ALIGNMENT, device="meta")
        plain = set(vars(sample))
        float8 = convert_to_float8_training(sample, config=self._config)
        added = {name: value for name, value in vars(float8).items() if name not in plain}
        for path, layer in module.named_modules():
            is_float8 = isinstance(layer, type(float8))
            if is_float8 and (layer in excluded or layer.config != float8.config):
                raise ValueError(
                    f"{path} is in float8 since an earlier run, with another config or exclude; "
                    "use a new module, or the same Float8Precision."
                )
        for path, layer in layers.items():
            if taken := added.keys() & vars(layer).keys():
                raise ValueError(
                    f"{path} has the attribute {min(taken)}, which torchao's Float8Linear uses; "
                    "rename it, or add the layer to Float8Precision(exclude)."
                )
        for layer in layers.values():  # in place: callbacks may hold the layers
            vars(layer).update(added)
            layer.__class__ = type(float8)
        if not any(isinstance(layer, type(float8)) for layer in module.modules()):
            rank_zero_warn(
                f"Float8Precision has converted no layer of {type(module).__name__}: expected an "
                f"nn.Linear whose numbers of features are multiples of {_ALIGNMENT}, and that is "
                'not in exclude; use precision="bf16-mixed" if there is none.'
            )
        return module

    def _excluded(self, module: nn.Module) -> set[nn.Module]:
        """Modules that `exclude` matches, and all below them."""
        modules = {saved_name(path): m for path, m in module.named_modules(remove_duplicate=False)}
        modules = {path: m for path, m in modules.items() if _has_linear(m)}
        excluded: set[nn.Module] = set()
        for item in self._exclude:
            roots = [m for path, m in modules.items() if matches_module(path, m, item)]
            if not roots:
                option, kind = "Float8Precision(exclude)", "nn.Linear, or module that contains one"
                raise ValueError(no_match_message(option, modules, item, kind=kind))
            excluded.update(layer for root in roots for layer in root.modules())
        return excluded


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.Linear) for layer in module.modules())


def _is_convertible(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and layer.in_features % _ALIGNMENT == layer.out_features % _ALIGNMENT == 0
    )
