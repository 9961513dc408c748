"""What must be the same on every rank before anything is sharded: model, optimizers, settings.

[Note: Alike] Ranks that differ would train wrongly without a word, or end in the middle of a
collective whose sizes differ. So each rank writes down *facts*, one collective of two integers
compares a hash of them, and only where hashes differ are the facts themselves exchanged. That comes
before any group is made and any tensor travels that depends on them.

What may differ is no fact: values of parameters and buffers (rank 0's are taken), devices, seeds
and ranks in the options of an optimizer, tensors in them but for single numbers, timeouts, folders,
and modules without parameters, such as metrics of one rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_zero.comm.control import Control
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.layout.plan import saved_name
from lightning_zero.optim.trial import Findings
from lightning_zero.tensors.awaited import awaited_values

__all__ = [
    "Facts",
    "check_alike",
    "compare",
    "config_facts",
    "module_facts",
    "optimizer_facts",
]

Facts = Mapping[str, Mapping[str, str]]  # by subject, such as "parameter 0.weight": what it is

_OF_ONE_RANK = {"device", "generator", "global_rank", "local_rank", "rank", "seed"}  # group options
_NOT_COMPARED = {"params", "param_names"}  # told by parameter
_OF_ONE_NODE = {"nvme_path", "pin_memory", "buffer_count", "buffer_size"}  # of an OffloadConfig


def compare(control: Control, facts: Facts, failure: Exception | None = None) -> None:
    """Raises on every rank where facts differ, or where any rank has failed. Collective.

    Args:
        control: Between the ranks.
        facts: This rank's.
        failure: Why this rank cannot go on by itself; raised here, after the others know it.

    Raises:
        ValueError: Facts differ; names the first difference, by rank.
        RuntimeError: Another rank has failed; says which and how.
    """
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    own = _hash(facts, text)
    least, minus_most = control.min_ints([own, -own])
    if least == -minus_most:
        if failure is not None:
            raise failure
        return
    everyone = control.gather_objects((text, facts))
    if failure is not None:
        raise failure
    for rank, (text, _) in enumerate(everyone):
        if text is not None:
            raise RuntimeError(f"rank {rank} failed where all must succeed: {text}")
    check_alike([facts for _, facts in everyone])


def check_alike(everyone: Sequence[Facts]) -> None:
    """Raises a ValueError that names the first difference between facts, if there is one.

    Args:
        everyone: The facts of every rank, by rank.
    """
    difference = _first_difference(everyone)
    if difference is not None:
        raise ValueError(
            f"ranks differ in {difference}. Every rank must build the same model and optimizers, "
            "with the same settings; only values of parameters may differ, of which rank 0's are "
            "taken."
        )


def _hash(facts: Facts, failure: str | None) -> int:
    ordered = [(subject, sorted(fields.items())) for subject, fields in facts.items()]
    digest = hashlib.sha256(repr((ordered, failure)).encode()).digest()
    return int.from_bytes(digest[:7], "big")  # it and its negative are int64


def _first_difference(everyone: Sequence[Facts]) -> str | None:
    for place in zip_longest(*everyone):
        for subject in dict.fromkeys(subject for subject in place if subject is not None):
            found = [facts.get(subject) for facts in everyone]
            if any(fields != found[0] for fields in found):
                return _told(subject, found)
        if len(set(place)) > 1:
            return f"the order of their parameters: {_by_rank(place)} comes first"
    return None


def _told(subject: str, found: Sequence[Mapping[str, str] | None]) -> str:
    present = [fields for fields in found if fields is not None]
    if len(present) < len(found):
        having = ["is there" if fields is not None else "is missing" for fields in found]
        return f"{subject}: it {_by_rank(having)}"
    names = dict.fromkeys(name for fields in present for name in fields)
    for name in names:
        values = [fields.get(name, "not set") for fields in present]
        if len(set(values)) > 1:
            return f"{subject}: {name} is {_by_rank(values)}"
    raise AssertionError("equal mappings")


def _by_rank(values: Sequence[str | None]) -> str:
    """Such as `(3, 4) on ranks 0, 1, (3, 5) on rank 2`."""
    ranks: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    parts = []
    for value, those in ranks.items():
        plural = "s" if len(those) > 1 else ""
        parts.append(f"{value} on rank{plural} {', '.join(map(str, those))}")
    return " and ".join(parts)


# -------------------------------------------------------------------- facts


def module_facts(module: nn.Module, config: ZeroConfig) -> dict[str, dict[str, str]]:
    """Of parameters, of the modules that hold them, and of the buffers that ranks share."""
    facts: dict[str, dict[str, str]] = {}
    first_names: dict[Tensor, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        name = saved_name(name)
        if parameter in first_names:
            facts[f"parameter {name}"] = {"tensor": f"that of {first_names[parameter]}"}
            continue
        first_names[parameter] = name
        requires_grad = str(parameter.requires_grad)
        facts[f"parameter {name}"] = {**_tensor_facts(parameter), "requires_grad": requires_grad}
    holders = {holder for name, _ in module.named_parameters() for holder in _holders(name)}
    for name, child in module.named_modules(remove_duplicate=False):
        if name in holders and not isinstance(child, OptimizedModule):
            own_name = saved_name(f"{name}.").removesuffix(".")
            subject = f"module {own_name}" if own_name else "the whole module"
            facts[subject] = {"class": type(child).__qualname__}
    for name, buffer in module.named_buffers():
        if config.broadcast_buffers or buffer.is_meta:
            facts[f"buffer {saved_name(name)}"] = _tensor_facts(buffer)
    return facts


def _holders(name: str) -> Iterator[str]:
    """Names of all modules around the parameter `name`."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _tensor_facts(tensor: Tensor) -> dict[str, str]:
    if is_lazy(tensor):
        return {"shape": "lazy"}
    if awaited_values(tensor) is not None:
        values = "to be loaded"
    else:
        values = "none yet (meta device)" if tensor.is_meta else "there"
    return {"shape": str(tuple(tensor.shape)), "dtype": str(tensor.dtype), "values": values}


def optimizer_facts(
    number: int, optimizer: Optimizer, found: Findings, names: Mapping[nn.Parameter, str]
) -> dict[str, dict[str, str]]:
    """Of one optimizer and its groups.

    Args:
        number: Among all of the engine.
        optimizer: The user's.
        found: How it can be stepped.
        names: Of parameters, in the order of the module.
    """
    title = f"optimizer {number}"
    kind = "elementwise" if found.is_elementwise else "whole tensors"
    facts = {
        title: {
            "class": type(optimizer).__qualname__,
            "number of groups": str(len(optimizer.param_groups)),
            "way of stepping": f"{kind}, {found.kind.value}",
        }
    }
    group_of: dict[nn.Parameter, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        group_of.update(dict.fromkeys(group["params"], index))
        facts[f"group {index} of {title} ({type(optimizer).__qualname__})"] = {
            str(key): _text(value)
            for key, value in group.items()
            if key not in _OF_ONE_RANK | _NOT_COMPARED
        }
    for parameter, name in names.items():  # a group may be made of a set, in any order
        if parameter in group_of:
            facts[f"parameter {name} in {title}"] = {"group": str(group_of[parameter])}
    return facts


def config_facts(config: ZeroConfig) -> dict[str, str]:
    """Of the engine's settings."""
    return {
        field.name: _setting(getattr(config, field.name)) for field in dataclasses.fields(config)
    }


def _setting(value: object) -> str:
    if isinstance(value, OffloadConfig):
        kept = {k: v for k, v in dataclasses.asdict(value).items() if k not in _OF_ONE_NODE}
        return ", ".join(f"{name}={part!r}" for name, part in kept.items() if part is not None)
    return repr(value)


def _text(value: Any) -> str:
    """`value` in the same words on every rank where it is the same."""
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_meta:
            return f"tensor({value.item()})"
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, torch.device):
        return "a device"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(_text, value)) + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
