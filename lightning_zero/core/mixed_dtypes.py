"""Explanation of dtype errors that follow from the cast of parameters to `param_dtype`.

It is a module of its own because hooks on a module and contexts of the engine both need it.
"""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence

from torch import nn

from lightning_zero.core.bucket import Bucket
from lightning_zero.health.failures import DesynchronizedError
from lightning_zero.layout.keep_float32 import CAST_LAYERS
from lightning_zero.layout.names import saved_name

__all__ = ["explain_dtype_error"]

_OF_DTYPES = re.compile(r"dtype|scalar ?type|bfloat16|float16", re.IGNORECASE)
_MARK = "keep_float32="
_NUM_NAMED = 3


def explain_dtype_error(error: BaseException, root: nn.Module, buckets: Sequence[Bucket]) -> None:
    """Adds a note to `error`: the module that raised it, its cast parameters and the setting.

    Python prints notes below the traceback. Before Python 3.11, which has none, this is a warning.
    Errors that do not mention dtypes get no note, and no error does if no parameter was cast.

    Args:
        error: The error, while it is being handled, with its traceback.
        root: The root module.
        buckets: Buckets of all parameters of `root`.
    """
    may_be_of_torch = isinstance(error, (RuntimeError, TypeError, ValueError))
    if not may_be_of_torch or isinstance(error, DesynchronizedError) or _has_note(error):
        return
    cast = {
        slot.name: str(bucket.plan.dtype).removeprefix("torch.")
        for bucket in buckets
        for slot, own in zip(bucket.plan.layout.slots, bucket.orig_dtypes, strict=True)
        if own != bucket.plan.dtype
    }
    if not cast or not _OF_DTYPES.search(str(error)):
        return
    found = (
        (path, module, [name for name in _suspects(path, module) if name in cast])
        for path, module in _modules_inside_out(error, root)
    )
    path, module, names = next((each for each in found if each[2]), ("", root, []))
    if not names:
        return
    named, num_more = names[:_NUM_NAMED], len(names) - _NUM_NAMED
    where = f"module {path}" if path else "the module"
    more = f" and {num_more} more" if num_more > 0 else ""
    _add_note(
        error,
        f"This error came from {where} ({type(module).__name__}), where these parameters are "
        f"{cast[names[0]]} but would be float32 under DDP: {', '.join(named)}{more}. To keep "
        "parameters in float32, name them by parameter, module, pattern or class: "
        f"{_MARK}{named!r}; param_dtype='float32' keeps all parameters.",
    )


def _has_note(error: BaseException) -> bool:
    return any(_MARK in str(note) for note in getattr(error, "__notes__", ()))


def _add_note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        warnings.warn(note, stacklevel=3)


def _modules_inside_out(error: BaseException, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose code was running when `error` was raised, with names; the root comes last."""
    paths = {module: saved_name(name) for name, module in root.named_modules()}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in paths:
            yield paths[module], module
    yield "", root


def _suspects(path: str, module: nn.Module) -> Iterator[str]:
    """Parameters of `module`, then of modules below it that are not cast; embeddings first."""
    below = [(n, m) for n, m in module.named_modules(prefix=path) if m is not module]
    below = [(n, m) for n, m in below if not isinstance(m, CAST_LAYERS)]
    below.sort(key=lambda item: not isinstance(item[1], nn.Embedding))
    for name, part in [(path, module), *below]:
        yield from (saved_name(n) for n, _ in part.named_parameters(name, recurse=False))
