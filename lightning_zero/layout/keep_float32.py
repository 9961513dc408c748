"""Parameters that keep their own dtype while the others become `param_dtype`.

[Note: What autocast casts] `torch.autocast` casts all arguments of matrix products and
convolutions, so their parameters may already be in 16 bits. Other operations use parameters without
a cast: many kernels need them in the dtype of the input or in float32, and under autocast a float32
input is common. So under autocast the following parameters stay in float32:

1. vectors and scalars: at most one dimension is larger than 1. This excludes biases of torch's own
   linear, convolutional, recurrent and attention layers: autocast casts all parameters of these
   layers, and parameters of one kernel keep one dtype;
2. every parameter of the layers in `_UNCAST_LAYERS`, which autocast does not cast, and of layers
   whose weight torch.nn.utils.spectral_norm or weight_norm computes.

`AUTOCAST` in `ZeroConfig.keep_float32` selects these; a mixed precision of the Trainer adds it.
Without autocast only equal dtypes work together, so only modules with running statistics keep
theirs.

[Note: Kept by their model] Models of transformers name the modules that need float32 in 16-bit
training, and cast inputs there: `_keep_in_fp32_modules_strict` for both 16-bit dtypes,
`_keep_in_fp32_modules` for float16. The names are patterns as transformers reads them: since
version 5 they match anywhere in the name of a parameter, before that only entire components of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_zero.layout.names import matches_module, no_match_message

__all__ = ["AUTOCAST", "CAST_LAYERS", "float32_names_of", "float32_parameters"]

AUTOCAST = "autocast"

_HAS_STATISTICS = nn.modules.batchnorm._NormBase  # kernels need the dtype of the statistics
CAST_LAYERS = (
    nn.Linear,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)
_UNCAST_LAYERS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.Bilinear,
    nn.EmbeddingBag,  # takes per-sample weights in the dtype of its own weight
    ParametrizationList,  # decompositions and power iterations need float32
)
_DECOMPOSED = (SpectralNorm, WeightNorm)  # hooks of torch's older functions for the same


def float32_parameters(
    modules: Mapping[str, nn.Module],
    wanted: Sequence[str | type[nn.Module]],
    dtype: torch.dtype | None = None,
) -> set[nn.Parameter]:
    """Parameters that keep their dtype; a shared parameter does if any of its uses needs it.

    Args:
        modules: The root and all modules below it by qualified name; shared ones under every name.
        wanted: `ZeroConfig.keep_float32_items`.
        dtype: Dtype of the other parameters; None: they keep theirs, too.

    Raises:
        ValueError: An item of `wanted` matches nothing.
    """
    kept = {p for m in modules.values() if isinstance(m, _HAS_STATISTICS) for p in _own(m)}
    if dtype is not None and AUTOCAST not in wanted:
        for module in modules.values():
            named = dict(module.named_parameters())
            kept.update(named[name] for name in float32_names_of(module, named, dtype))
    for item in wanted:
        if item == AUTOCAST:
            kept.update(p for m in modules.values() for p in _own(m) if _is_not_cast(m, p))
            continue
        matching = set(_matching(modules, item))
        if not matching:
            names = [n for path, m in modules.items() for n, _ in m.named_parameters(path, False)]
            raise ValueError(no_match_message("keep_float32", modules, item, parameters=names))
        kept |= matching
    return kept


def float32_names_of(module: nn.Module, names: Iterable[str], dtype: torch.dtype) -> list[str]:
    """Names of the parameters or buffers that `module` needs in float32 if others are in `dtype`.

    See [Note: Kept by their model]. Requirements of its submodules are not included.
    """
    patterns: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        patterns.update(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        patterns.update(getattr(module, "_keep_in_fp32_modules", None) or ())
    if not patterns:
        return []
    body = "|".join(pattern.replace("*", ".*") for pattern in sorted(patterns))
    is_anywhere = hasattr(module, "_get_dtype_plan")  # version 5
    found = re.compile(body if is_anywhere else rf"(^|\.)({body})($|\.)")
    return [name for name in names if found.search(name)]


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def _is_not_cast(module: nn.Module, parameter: nn.Parameter) -> bool:
    """See [Note: What autocast casts]."""
    hooks = module._forward_pre_hooks.values()
    if isinstance(module, _UNCAST_LAYERS) or any(isinstance(h, _DECOMPOSED) for h in hooks):
        return True
    is_vector = sum(size > 1 for size in parameter.shape) < 2
    return is_vector and not isinstance(module, CAST_LAYERS)


def _matching(
    modules: Mapping[str, nn.Module], item: str | type[nn.Module]
) -> Iterator[nn.Parameter]:
    for path, module in modules.items():
        if matches_module(path, module, item):
            yield from module.parameters()
        elif isinstance(item, str):
            for name, parameter in module.named_parameters(path, recurse=False):
                if fnmatchcase(name, item):
                    yield parameter
