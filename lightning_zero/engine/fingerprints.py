"""Fingerprints of values that several ranks hold, compared between them.

[Note: What is compared] Values that every rank has: parameters where they are replicated (stages 0
to 2), the settings of optimizers, learning rates included, and states with one number for a
parameter, such as step counters. In stage 0 all optimizer states. Between the groups of
`sharding_group_size`: all shards with the same place in their group. Other shards exist once; the
newest checkpoint has a second copy of them (`differs_from_checkpoint`).

A buffer may differ between ranks without a fault, as BatchNorm's statistics do after a forward. It
is reported if it was the same on all ranks in the audit before, and has changed on some ranks only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.bucket_access import bucket_of
from lightning_zero.core.shards import is_elementwise_state
from lightning_zero.engine.engine import Engine
from lightning_zero.optim.state_view import raw_states
from lightning_zero.tensors.composite import plain_tensors
from lightning_zero.tensors.guarded import has_placement, placement_of
from lightning_zero.tensors.lazy import LazyTensor, read_flat
from lightning_zero.tiers.storage import ShardStore

__all__ = [
    "AuditError",
    "Difference",
    "Key",
    "RankAudit",
    "differs_from_checkpoint",
    "fingerprint",
    "fingerprints",
    "own_fingerprints",
]

_CHUNK = 2**18  # words that are summed in one call
_FACTOR = 6364136223846793005  # of Knuth's linear congruential generator
_MASK = 2**64 - 1


class AuditError(RuntimeError):
    """Ranks hold different values of something that is to be equal."""


class Key(NamedTuple):
    """Identity of a compared value."""

    kind: str  # "parameter", "buffer", "exp_avg of", "setting"
    name: str
    shard: int | None = None  # its index in the shard group; None: all ranks hold the same


@dataclass(frozen=True)
class Difference:
    """A value that differs between ranks.

    Attributes:
        key: The value.
        groups: Ranks by equal value, the largest group first.
    """

    key: Key
    groups: tuple[tuple[int, ...], ...]

    @property
    def odd_ranks(self) -> tuple[int, ...]:
        """Ranks outside of the largest group; all ranks if there is no largest."""
        first, *others = self.groups
        if len(first) == len(others[0]):
            return tuple(sorted(rank for group in self.groups for rank in group))
        return tuple(sorted(rank for group in others for rank in group))

    def __str__(self) -> str:
        groups = " and ".join(_ranks_text(group) for group in self.groups)
        where = "" if self.key.shard is None else f", shard {self.key.shard}"
        text = f"{self.key.kind} {self.key.name}{where}: {groups} differ"
        if len(self.odd_ranks) < sum(map(len, self.groups)):
            text += f"; the value of {_ranks_text(self.odd_ranks)} is wrong by majority"
        return text


def _ranks_text(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 3} more" if len(ranks) > 4 else ""
    shown = ranks[:3] if more else ranks
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, shown)) + more


def fingerprint(tensor: Tensor) -> int:
    """A number of 64 bits from all bits of `tensor`; any single flipped bit changes it.

    Words are summed with odd weights modulo 2^64, so positions count, too. -0.0 and 0.0 differ, and
    NaNs are compared by their bits.
    """
    flat = tensor.detach().reshape(-1).contiguous()
    nbytes = flat.numel() * flat.element_size()
    if flat.storage_offset() * flat.element_size() % 4:
        flat = flat.clone()  # a view of wider words must begin at one
    words = flat.view(torch.int32 if nbytes % 4 == 0 and flat.element_size() != 1 else torch.uint8)
    weights = torch.arange(1, 2 * min(_CHUNK, words.numel()) + 1, 2, device=flat.device)
    total = flat.numel()
    for chunk in words.split(_CHUNK):
        part = int((chunk.to(torch.int64) * weights[: chunk.numel()]).sum())
        total = (total * _FACTOR + part) & _MASK
    return total


def fingerprints(engine: Engine) -> dict[Key, int | str]:
    """Fingerprints of all that this rank has in common with others. Local, between two steps."""
    engine.worker.drain()
    found: dict[Key, int | str] = {}
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for bucket in engine.buckets:
            found.update(_parameter_fingerprints(bucket))
        for number, optimizer in enumerate(engine.optimizers):
            found.update(_state_fingerprints(optimizer))
            found.update(_setting_fingerprints(optimizer, number))
        found.update(_buffer_fingerprints(engine.module))
    return found


def _parameter_fingerprints(bucket: Bucket) -> Iterator[tuple[Key, int]]:
    bucket.wait_for_all_steps()
    bucket.wait_for_unshard()
    names = [slot.name for slot in bucket.plan.layout.slots]
    if not bucket.shards_params:
        for name, view in zip(names, bucket.unsharded_params.views, strict=True):
            yield Key("parameter", name), fingerprint(view)
    shards, shard = bucket.shards, _shard_of(bucket)
    if shard is None and not bucket.replicates_optim:
        return  # these shards exist once
    stores: dict[str, ShardStore | None] = {"main parameter": shards.separate_master}
    if bucket.shards_params:
        stores["shard of parameter"] = shards.param_shard
    for kind, store in stores.items():
        if store is not None:
            for name, own in zip(names, shards.layout.ranges, strict=True):
                yield Key(kind, name, shard), fingerprint(store.fetch(own.start, own.stop))


def _shard_of(bucket: Bucket) -> int | None:
    """Index of the shard that this rank holds; None if there is one group, or no shards."""
    mesh = bucket.comm.mesh
    return None if bucket.replicates_optim or mesh.num_replicas == 1 else mesh.shard_rank


def _state_fingerprints(optimizer: Optimizer) -> Iterator[tuple[Key, int | str]]:
    for parameter, state in list(raw_states(optimizer).items()):
        if not isinstance(parameter, Tensor) or not has_placement(parameter):
            continue
        placement = placement_of(parameter)
        bucket = bucket_of(placement)
        name = bucket.plan.layout.slots[placement.index].name
        numel = len(bucket.owned(placement.index))
        shard = _shard_of(bucket)
        if not numel and placement.shape:
            continue  # another rank steps it
        for key, value in state.items():
            if isinstance(value, (bool, int, float, str)):
                yield Key(f"{key} of", name), repr(value)
            elif isinstance(value, Tensor) and not value.dim() and not _is_slice(value, numel):
                yield Key(f"{key} of", name), repr(value.item())
            elif shard is not None or bucket.replicates_optim:
                parts = [
                    one.read() if isinstance(one, LazyTensor) else one for one in _parts(value)
                ]
                yield Key(f"{key} of", name, shard), str([fingerprint(one) for one in parts])


def _is_slice(value: Tensor, numel: int) -> bool:
    return isinstance(value, LazyTensor) or is_elementwise_state(value, numel)


def _parts(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, LazyTensor) else list(plain_tensors(value))


def _setting_fingerprints(optimizer: Optimizer, number: int) -> Iterator[tuple[Key, str]]:
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                known = value.tolist() if isinstance(value, Tensor) else value
                if isinstance(known, (bool, int, float, str, tuple, list, type(None))):
                    name = f"{key} of group {index} of {type(optimizer).__name__} {number}"
                    yield Key("setting", name), repr(known)


def _buffer_fingerprints(module: nn.Module) -> Iterator[tuple[Key, int]]:
    for name, buffer in module.named_buffers():
        if buffer.layout is torch.strided and not buffer.is_meta and not buffer.is_quantized:
            yield Key("buffer", name), fingerprint(buffer)


class RankAudit:
    """Compares the ranks of one engine, audit by audit."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffers: list[Mapping[Key, int | str]] = []  # of the audit before, by rank

    def run(self, more: Mapping[Key, int | str] | None = None) -> list[Difference]:
        """Compares fingerprints between ranks, between two steps. Collective: every rank.

        Args:
            more: Further values of this rank, as text or fingerprints.

        Returns:
            The differences, the same on every rank.
        """
        self._engine.lockstep.barrier("an audit")
        own = fingerprints(self._engine) | dict(more or {})
        by_rank: list[dict[Key, int | str]] = self._engine.comm.control.gather_objects(own)
        keys = dict.fromkeys(key for found in by_rank for key in found)
        differences = []
        for key in keys:
            groups = _groups({r: found[key] for r, found in enumerate(by_rank) if key in found})
            if len(groups) > 1 and (key.kind != "buffer" or self._has_changed_alone(key, by_rank)):
                differences.append(Difference(key, groups))
        self._buffers = [{k: v for k, v in one.items() if k.kind == "buffer"} for one in by_rank]
        return differences

    def _has_changed_alone(self, key: Key, by_rank: Sequence[Mapping[Key, int | str]]) -> bool:
        """Whether a buffer was equal in the audit before, and has changed on some ranks only."""
        before = [found.get(key) for found in self._buffers]
        if not before or len(set(before)) > 1:
            return False
        return any(found.get(key) == before[0] for found in by_rank)


def _groups(values: Mapping[int, object]) -> tuple[tuple[int, ...], ...]:
    """Ranks by equal value, the largest group first."""
    found: dict[object, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return tuple(sorted(map(tuple, found.values()), key=lambda ranks: (-len(ranks), ranks)))


def own_fingerprints(engine: Engine) -> dict[str, int]:
    """Fingerprints of this rank's elements of the parameters, by name. Local, between two steps.

    In the dtype in which a checkpoint has them.
    """
    engine.worker.drain()
    found = {}
    for bucket in engine.buckets:
        views = bucket.masters.shard_views()
        slots = bucket.plan.layout.slots
        for slot, dtype, view in zip(slots, bucket.orig_dtypes, views, strict=True):
            held = view.read() if isinstance(view, LazyTensor) else view
            found[slot.name] = fingerprint(held.detach().to(dtype).cpu())
    return found


def differs_from_checkpoint(
    engine: Engine,
    path: str | os.PathLike[str],
    state_dict: Mapping[str, Any],
    saved: Mapping[str, int],
) -> list[str]:
    """Compares this rank's elements of the parameters with those of a checkpoint. Local.

    Parameters whose shape or dtype the user has changed in the checkpoint are left out.

    Args:
        engine: The engine.
        path: Path of the checkpoint.
        state_dict: The module's entries in it.
        saved: `own_fingerprints` of when it was saved.

    Returns:
        One line for each parameter whose elements differ.
    """
    lines = []
    for bucket in engine.buckets:
        slots = bucket.plan.layout.slots
        for index, (slot, dtype) in enumerate(zip(slots, bucket.orig_dtypes, strict=True)):
            value = state_dict.get(slot.name)
            if not isinstance(value, Tensor) or (value.shape, value.dtype) != (slot.shape, dtype):
                continue
            own = bucket.owned(index)
            if fingerprint(read_flat(value, own.start, own.stop).cpu()) != saved[slot.name]:
                lines.append(
                    f"parameter {slot.name}: elements {own.start} to {own.stop} of rank "
                    f"{engine.comm.rank} differ from {os.fspath(path)}"
                )
    return lines
