"""Cuts a module into units and buckets, from names, shapes and dtypes alone.

A *unit* is what the schedule gathers and releases together: a module whose forward brackets the use
of its parameters. A *bucket* is what travels in one collective. A unit has one bucket for each
combination of dtype, trainability and optimizer, and more where a size limit cuts it: beside
parameters in 16 bits, all that keep float32 (keep_float32.py) are one more. Parameters of
optimizers that look at whole tensors are placed whole, each with an owner that is chosen over the
whole module.

Stages that keep parameters whole have one unit, the root, whose buckets are cut by size. Stages
that shard parameters have those of units.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.flat import FlatLayout, assign_owners
from lightning_zero.layout.keep_float32 import float32_parameters
from lightning_zero.layout.names import saved_name
from lightning_zero.layout.offload import BucketTiers, Budgets, ShardBytes, Tier, assign_tiers
from lightning_zero.layout.stage import STAGES, Stage, State
from lightning_zero.layout.units import ROOT, find_blocks, find_units

__all__ = ["BucketPlan", "Plan", "UnitPlan", "make_plan", "nvme_bytes"]

_BUCKET_NUMEL = 2**22
_BUCKET_NUMEL_PER_RANK = 2**18  # keeps every rank's share of a collective above its latency


@dataclass(frozen=True)
class BucketPlan:
    """Parameters that travel together."""

    name: str  # for messages and profiler ranges, such as blocks.3 or blocks.3/frozen
    layout: FlatLayout
    dtype: torch.dtype  # of the whole parameters while the module computes
    master_dtype: torch.dtype  # in which they are stepped
    stage: Stage  # which states rest as shards
    is_trainable: bool = True  # the optimizer steps it
    loses_bits: bool = False  # `dtype` does not hold all of a parameter as it was given
    tiers: BucketTiers = field(default_factory=BucketTiers)  # where the shards rest

    @property
    def has_own_master(self) -> bool:
        """The master is another tensor than the parameters, in another dtype."""
        return self.master_dtype != self.dtype

    @property
    def begins_with_master(self) -> bool:
        """There is one from the beginning: of what is trained, and where bits would be lost."""
        return self.has_own_master and (self.is_trainable or self.loses_bits)


@dataclass(frozen=True)
class UnitPlan:
    """Buckets that are gathered and released together."""

    name: str  # qualified, of the module whose forward uses them; empty for the root
    buckets: tuple[BucketPlan, ...]  # not empty, but for a root without parameters of its own

    @property
    def numel(self) -> int:
        """Elements of all buckets, padding included."""
        return sum(bucket.layout.numel for bucket in self.buckets)


@dataclass(frozen=True)
class Plan:
    """Every unit of a module, the root first, then in the order of registration.

    Every parameter is in exactly one bucket of one unit.
    """

    units: tuple[UnitPlan, ...]
    world_size: int  # number of shards
    reduce_dtype: torch.dtype | None  # of summed gradients; None: each bucket's master dtype

    @property
    def buckets(self) -> list[BucketPlan]:
        """All buckets in layout order."""
        return [bucket for unit in self.units for bucket in unit.buckets]

    def grad_dtype(self, bucket: BucketPlan) -> torch.dtype:
        """Dtype of the reduced gradients of `bucket`."""
        return self.reduce_dtype or bucket.master_dtype


class _Kind(NamedTuple):
    """What parameters of one bucket have in common."""

    dtype: torch.dtype  # whole
    master_dtype: torch.dtype
    is_trainable: bool
    optimizer: int | None
    is_persistent: bool
    is_whole: bool  # an optimizer may look at whole tensors


def make_plan(
    module: nn.Module,
    config: ZeroConfig,
    *,
    world_size: int,
    optimizer_of: Mapping[nn.Parameter, int] | None = None,
    full_optimizers: Collection[int] = (),
    budgets: Budgets | None = None,
) -> Plan:
    """Plans units and buckets of `module`. Pure: no tensor is touched, meta tensors will do.

    Args:
        module: Its parameters, each counted once however often it is registered.
        config: Stage and sizes.
        world_size: Number of shards.
        optimizer_of: Index of the optimizer that steps a parameter; parameters of two optimizers do
            not share a bucket.
        full_optimizers: Optimizers that must step whole tensors. Parameters of no optimizer may be
            given to these later, and are placed whole as well.
        budgets: What offload "auto" may use; None: nothing but NVMe.

    Raises:
        ValueError: The module has no parameters, or some that cannot be sharded; `keep_float32`
            or `unit_classes` names what is not there.
    """
    named = dict(module.named_parameters())
    _check_parameters(module, named)
    blocks = find_blocks(module, config.unit_kinds)
    unit_of = find_units(module, named, blocks) if config.states.shards_params else {}
    members: dict[str, list[str]] = {ROOT: []}
    for name in named:
        members.setdefault(unit_of.get(name, ROOT), []).append(name)
    modules = {saved_name(n): m for n, m in module.named_modules(remove_duplicate=False)}
    assert not isinstance(config.param_dtype, str)
    kept = float32_parameters(modules, config.keep_float32_items, config.param_dtype)
    cutter = _Cutter(named, config, world_size, optimizer_of or {}, full_optimizers)
    units = []
    for unit, names in members.items():
        kinds: dict[_Kind, list[str]] = {}
        for name in names:
            kind = cutter.kind(name, keeps_dtype=named[name] in kept)
            kinds.setdefault(kind, []).append(name)
        buckets = [
            bucket
            for kind, of_kind in kinds.items()
            for bucket in cutter.cut(unit or "root", kind, of_kind, is_block=unit in blocks)
        ]
        units.append(UnitPlan(unit, tuple(buckets)))
    reduce_dtype = config.reduce_dtype
    assert not isinstance(reduce_dtype, str)
    plan = Plan(tuple(units), world_size, reduce_dtype)
    return _with_tiers(plan, config, budgets or Budgets())


def _with_tiers(plan: Plan, config: ZeroConfig, budgets: Budgets) -> Plan:
    """The plan with a tier for every shard."""
    shards = [_shard_bytes(plan, bucket) for bucket in plan.buckets]
    tiers = iter(assign_tiers(shards, *config.offloads, budgets))
    units = []
    for unit in plan.units:
        buckets = tuple(dataclasses.replace(b, tiers=next(tiers)) for b in unit.buckets)
        units.append(UnitPlan(unit.name, buckets))
    return dataclasses.replace(plan, units=tuple(units))


def nvme_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes that one rank keeps on NVMe for sure: of parameters, and of masters and gradients.

    What an optimizer keeps besides comes with its first step.
    """
    params = others = 0
    for bucket in plan.buckets:
        shard, numel = _shard_bytes(plan, bucket), bucket.layout.shard_numel
        params += shard.param * (bucket.tiers.param is Tier.NVME)
        if bucket.is_trainable:
            others += shard.grad * (bucket.tiers.grad is Tier.NVME)
        if bucket.begins_with_master and bucket.tiers.optim is Tier.NVME:
            others += numel * bucket.master_dtype.itemsize
    return params, others


def _shard_bytes(plan: Plan, bucket: BucketPlan) -> ShardBytes:
    numel = bucket.layout.shard_numel
    is_stepped = bucket.stage.has_shard(State.OPTIM)  # what is frozen may be unfrozen
    master = bucket.master_dtype.itemsize
    return ShardBytes(
        param=numel * bucket.dtype.itemsize if bucket.stage.has_shard(State.PARAM) else 0,
        optim=numel * master * (2 + bucket.has_own_master) if is_stepped else 0,
        grad=numel * plan.grad_dtype(bucket).itemsize if is_stepped else 0,
        is_trainable=bucket.is_trainable,
    )


def _check_parameters(module: nn.Module, named: Mapping[str, nn.Parameter]) -> None:
    if not named:
        raise ValueError(
            f"{type(module).__name__} has no parameters, so there is nothing to shard; build its "
            "layers in __init__, setup() or configure_model()."
        )
    for name, parameter in named.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"Parameter {name} is lazy and has no shape yet; run one batch through "
                "the module first."
            )
        if parameter.is_complex():
            raise ValueError(
                f"Parameter {name} is complex, which is not supported; store its parts."
            )


class _Cutter:
    """Cuts units into buckets; see `make_plan` for what it goes by."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        config: ZeroConfig,
        world_size: int,
        optimizer_of: Mapping[nn.Parameter, int],
        full_optimizers: Collection[int],
    ) -> None:
        self._named = named
        self._config = config
        self._world_size = world_size
        self._optimizer_of = optimizer_of
        self._full_optimizers = full_optimizers
        default = max(_BUCKET_NUMEL, _BUCKET_NUMEL_PER_RANK * world_size)
        limit = config.reduce_bucket_size or default
        self._limit = min(limit, config.allgather_bucket_size or limit)  # elements
        self._owners: dict[str, int] = {}  # of parameters that are placed whole
        if not config.states.has_shard(State.OPTIM):
            return  # every rank steps everything
        for is_trainable in (True, False):  # what is frozen weighs less: each evens out by itself
            names = [
                name
                for name, parameter in named.items()
                if self._wants_whole(parameter) and parameter.requires_grad is is_trainable
            ]
            owners = assign_owners([named[name].numel() for name in names], world_size)
            self._owners.update(zip(names, owners, strict=True))

    def _wants_whole(self, parameter: nn.Parameter) -> bool:
        """Whether an optimizer steps `parameter`, or may do so later, as a whole tensor only."""
        optimizer = self._optimizer_of.get(parameter)
        return (
            bool(self._full_optimizers) if optimizer is None else optimizer in self._full_optimizers
        )

    def kind(self, name: str, *, keeps_dtype: bool) -> _Kind:
        """Of a parameter."""
        parameter, config = self._named[name], self._config
        dtype = master = own = parameter.dtype
        # Codes of bitsandbytes' 4 bits may lie in a storage of any dtype: they are no numbers.
        if own.is_floating_point and not hasattr(parameter, "quant_state"):
            wanted = None if keeps_dtype else config.param_dtype
            assert not isinstance(wanted, str)
            dtype = wanted or own
            master = torch.promote_types(dtype, torch.promote_types(own, torch.float32))
        threshold = config.param_persistence_threshold or 0
        return _Kind(
            dtype,
            master,
            parameter.requires_grad,
            self._optimizer_of.get(parameter),
            is_persistent=config.states.shards_params and parameter.numel() < threshold,
            is_whole=name in self._owners,
        )

    def cut(
        self, label: str, kind: _Kind, names: Sequence[str], *, is_block: bool
    ) -> Iterator[BucketPlan]:
        """Buckets of one kind within a unit; a repeated block is never cut."""
        runs: list[list[str]] = []
        run_numel = 0
        for name in names:
            numel = self._named[name].numel()
            if not runs or (not is_block and run_numel + numel > self._limit):
                runs.append([])
                run_numel = 0
            runs[-1].append(name)
            run_numel += numel
        # Where parameters stay whole in a stage that shards them, the next lower stage tells what
        # rests.
        stage = STAGES[2] if kind.is_persistent else self._config.states
        label += "" if kind.is_trainable else "/frozen"
        label += "/persistent" if kind.is_persistent else ""
        for number, run in enumerate(runs):
            shapes = [(saved_name(name), tuple(self._named[name].shape)) for name in run]
            if kind.is_whole:
                owners = [self._owners[name] for name in run]
                layout = FlatLayout.of_owned_tensors(shapes, owners, self._world_size)
            else:
                layout = FlatLayout.of(shapes, self._world_size)
            own = [self._named[name].dtype.itemsize for name in run]
            yield BucketPlan(
                label + (f"[{number}]" if len(runs) > 1 else ""),
                layout,
                kind.dtype,
                kind.master_dtype,
                stage,
                is_trainable=kind.is_trainable,
                loses_bits=max(own) > kind.dtype.itemsize,
            )
