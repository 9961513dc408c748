"""`lightning-zero audit`: checks the values of a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.checkpoint.atomic import locate
from lightning_zero.checkpoint.source import find_damage, has_checksums
from lightning_zero.layout.foreign_names import printable
from lightning_zero.tensors.lazy import read_flat

__all__ = ["run"]

_CHUNK = 2**22  # elements that are read at once
_MASTERS = "lightning_zero_masters"


def run(args: argparse.Namespace) -> int:
    """Prints what is wrong with the values of a checkpoint; returns 1 if anything is."""
    name: str = args.checkpoint
    path = locate(name)
    if not path.exists():
        raise FileNotFoundError(f"{name} does not exist.")
    found = find_damage(name)
    num_tensors = 0
    if not found:
        opened = open_checkpoint(name, weights_only=False if args.trust else None)
        for title, tensor in _tensors(opened):
            num_tensors += 1
            found += _nonfinite(title, tensor)
        found += _masters_that_differ(opened) + _steps_that_differ(opened)
    for line in found:
        print(printable(line))
    if found:
        print(f"{name}: {len(found)} finding(s)")
        return 1
    checksums = "checksums match" if has_checksums(path) else "it has no checksums"
    print(f"{name}: {num_tensors} tensors are finite and consistent; {checksums}")
    return 0


def _tensors(tree: Any, title: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating tensors of a checkpoint with their places in it."""
    if isinstance(tree, Tensor):
        if tree.is_floating_point() or tree.is_complex():
            yield title, tree
        return
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        items = list(enumerate(tree))
    for key, value in items:
        yield from _tensors(value, f"{title}/{key}" if title else str(key))


def _nonfinite(title: str, tensor: Tensor) -> list[str]:
    num_nan = num_inf = 0
    for part in _chunks(tensor):
        num_nan += int(part.isnan().sum())
        num_inf += int(part.isinf().sum())
    if num_nan or num_inf:
        return [f"{title}: {num_nan} NaN and {num_inf} infinite of {tensor.numel()} elements"]
    return []


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    for start in range(0, tensor.numel(), _CHUNK):
        yield read_flat(tensor, start, min(start + _CHUNK, tensor.numel()))


def _masters_that_differ(opened: Mapping[str, Any]) -> list[str]:
    """Parameters that are not their main parameters rounded to their dtype."""
    lines = []
    weights = opened.get("current_model_state", opened.get("state_dict", {}))
    for name, master in opened.get(_MASTERS, {}).items():
        weight = weights.get(name)
        if not isinstance(weight, Tensor) or weight.numel() != master.numel():
            continue
        num_different = sum(
            int((one.to(other.dtype) != other).sum())
            for one, other in zip(_chunks(master), _chunks(weight), strict=True)
        )
        if num_different:
            lines.append(f"{name}: {num_different} elements differ from the main parameter")
    return lines


def _steps_that_differ(opened: Mapping[str, Any]) -> list[str]:
    """Step counters of one optimizer that are not equal."""
    lines = []
    for number, optimizer in enumerate(opened.get("optimizer_states", [])):
        states = optimizer.get("state", {}) if isinstance(optimizer, Mapping) else {}
        steps = {
            float(read_flat(step, 0, 1)[0]) if isinstance(step, Tensor) else float(step)
            for state in states.values()
            if isinstance(state, Mapping) and (step := state.get("step")) is not None
        }
        if len(steps) > 1:
            known = ", ".join(f"{step:g}" for step in sorted(steps))
            lines.append(f"optimizer {number}: parameters have different step counts: {known}")
    return lines
