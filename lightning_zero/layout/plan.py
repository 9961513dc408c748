"""Divides a module into units and buckets, from names, shapes and dtypes alone.

A *unit* is unsharded and resharded together: a module whose forward contains all uses of its
parameters. A *bucket* is communicated in one collective. A unit has one bucket for each combination
of dtype, trainability and optimizer, and more if a size limit divides it. Parameters of full
optimizers are not divided: each has an owner, which is assigned over the entire module.

Stages that replicate parameters have one unit, the root, whose buckets are divided by size. Stages
that shard parameters have those of units.py. With 16-bit parameters, a block's vectors that keep
float32 (keep_float32.py) would need collectives of their own, as many as its matrices. They are
replicated instead, in the root, as are all parameters below `param_persistence_threshold`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.flat import FlatLayout, StateBlocks, assign_owners
from lightning_zero.layout.keep_float32 import float32_parameters
from lightning_zero.layout.names import saved_name
from lightning_zero.layout.offload import BucketTiers, Budgets, ShardBytes, Tier, assign_tiers
from lightning_zero.layout.stage import STAGES, Stage, State
from lightning_zero.layout.units import ROOT, find_blocks, find_units

__all__ = [
    "BucketPlan",
    "Master",
    "Plan",
    "UnitPlan",
    "check_has_parameters",
    "make_plan",
    "nvme_bytes",
]

_BUCKET_NUMEL = 2**22
_BUCKET_NUMEL_PER_RANK = 2**18  # keeps every rank's share of a collective above its latency
_EXCESS_DIVISOR = 16  # a bucket may exceed its limit by this part of it
_REPLICATED_NUMEL = 2**16  # smaller parameters that keep float32 are replicated


class Master(Enum):
    """Tensor of the main parameters of a bucket, which the optimizer steps."""

    PARAM = "the parameters or their shard: the dtypes agree"
    SHARD = "the only shard of the parameters, of which an all-gather sends a cast"
    SEPARATE = "a tensor beside the parameters or their shard"
    DEFERRED = "as SEPARATE, made when the bucket is first stepped"

    @property
    def is_separate(self) -> bool:
        """Whether it is, or will be, a tensor beside the parameters or their shard."""
        return self in (Master.SEPARATE, Master.DEFERRED)


@dataclass(frozen=True)
class BucketPlan:
    """Parameters that are communicated together."""

    name: str  # for messages and profiler ranges, such as blocks.3 or blocks.3/frozen
    layout: FlatLayout
    dtype: torch.dtype  # of the unsharded parameters, in which the module computes
    master_dtype: torch.dtype  # of the main parameters, which the optimizer steps
    stage: Stage  # which states are sharded
    is_trainable: bool = True  # the optimizer steps it
    loses_bits: bool = False  # `dtype` is narrower than the original dtype of a parameter
    tiers: BucketTiers = field(default_factory=BucketTiers)  # of the shards
    blocks: StateBlocks = field(default_factory=StateBlocks)  # no shard divides one

    @property
    def master(self) -> Master:
        """Tensor of the main parameters."""
        if self.master_dtype == self.dtype:
            return Master.PARAM
        if not self.is_trainable and not self.loses_bits:
            return Master.DEFERRED
        # A narrower shard is faster to copy from another tier.
        is_on_device = self.tiers.param is self.tiers.optim is Tier.DEVICE
        if self.stage.has_shard(State.PARAM) and is_on_device:
            return Master.SHARD
        return Master.SEPARATE

    @property
    def shard_dtype(self) -> torch.dtype:
        """Dtype of the shard of parameters that are sharded."""
        return self.master_dtype if self.master is Master.SHARD else self.dtype


@dataclass(frozen=True)
class UnitPlan:
    """Buckets that are unsharded and resharded together."""

    name: str  # qualified name of the module whose forward uses them; empty for the root
    buckets: tuple[BucketPlan, ...]  # empty only for a root without parameters of its own

    @property
    def numel(self) -> int:
        """Elements of all buckets, padding included."""
        return sum(bucket.layout.numel for bucket in self.buckets)


@dataclass(frozen=True)
class Plan:
    """All units of a module: the root, then the others in the order of registration.

    Every parameter is in exactly one bucket of one unit.
    """

    units: tuple[UnitPlan, ...]
    world_size: int  # number of shards
    reduce_dtype: torch.dtype | None  # of reduced gradients; None: the master dtype of each bucket

    @property
    def buckets(self) -> list[BucketPlan]:
        """All buckets in layout order."""
        return [bucket for unit in self.units for bucket in unit.buckets]

    def grad_dtype(self, bucket: BucketPlan) -> torch.dtype:
        """Dtype of the reduced gradients of `bucket`."""
        return self.reduce_dtype or bucket.master_dtype


class _Kind(NamedTuple):
    """Properties that all parameters of a bucket share."""

    dtype: torch.dtype  # unsharded
    master_dtype: torch.dtype
    is_trainable: bool
    optimizer: int | None
    is_persistent: bool
    has_owner: bool  # a full optimizer steps it, or may do so later


def make_plan(
    module: nn.Module,
    config: ZeroConfig,
    *,
    world_size: int,
    optimizer_of: Mapping[nn.Parameter, int] | None = None,
    full_optimizers: Collection[int] = (),
    state_blocks: Mapping[int, StateBlocks] | None = None,
    budgets: Budgets | None = None,
) -> Plan:
    """Plans units and buckets of `module`. Pure: it reads no values, so meta tensors suffice.

    Args:
        module: The module; a parameter that is registered several times counts once.
        config: Stage and sizes.
        world_size: Number of shards.
        optimizer_of: Index of the optimizer that steps a parameter; parameters of two optimizers do
            not share a bucket.
        full_optimizers: Indices of optimizers that must step full tensors. Parameters of no
            optimizer may be added to these later, so they get owners, too.
        state_blocks: Blocks of the states of an optimizer, by its index. They are those of
            parameters of no optimizer, too, which may be added to it later.
        budgets: Memory for offload "auto"; None: NVMe only.

    Raises:
        ValueError: The module has no parameters, or some that cannot be sharded; or an item of
            `keep_float32` or `unit_classes` matches nothing.
    """
    named = dict(module.named_parameters())
    _check_parameters(module, named)
    blocks = find_blocks(module, config.unit_kinds)
    unit_of = find_units(module, named, blocks) if config.states.shards_params else {}
    modules = {saved_name(n): m for n, m in module.named_modules(remove_duplicate=False)}
    assert not isinstance(config.param_dtype, str)
    kept = float32_parameters(modules, config.keep_float32_items, config.param_dtype)
    bucketizer = _Bucketizer(
        named, config, world_size, optimizer_of or {}, full_optimizers, state_blocks or {}
    )
    members: dict[str, dict[_Kind, list[str]]] = {ROOT: {}}
    for name, parameter in named.items():
        kind = bucketizer.kind(name, keeps_dtype=parameter in kept)
        unit = ROOT if kind.is_persistent else unit_of.get(name, ROOT)
        members.setdefault(unit, {}).setdefault(kind, []).append(name)
    units = []
    for unit, kinds in members.items():
        buckets = [
            bucket
            for kind, members_of_kind in kinds.items()
            for bucket in bucketizer.bucketize(
                unit or "root", kind, members_of_kind, is_block=unit in blocks
            )
        ]
        units.append(UnitPlan(unit, tuple(buckets)))
    reduce_dtype = config.reduce_dtype
    assert not isinstance(reduce_dtype, str)
    plan = Plan(tuple(units), world_size, reduce_dtype)
    return _with_tiers(plan, config, budgets or Budgets())


def _with_tiers(plan: Plan, config: ZeroConfig, budgets: Budgets) -> Plan:
    """A copy of the plan with a tier for every shard."""
    shards = [_shard_bytes(plan, bucket) for bucket in plan.buckets]
    tiers = iter(assign_tiers(shards, *config.offloads, budgets))
    units = []
    for unit in plan.units:
        buckets = tuple(dataclasses.replace(b, tiers=next(tiers)) for b in unit.buckets)
        units.append(UnitPlan(unit.name, buckets))
    return dataclasses.replace(plan, units=tuple(units))


def nvme_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes of one rank on NVMe: of parameters, and of main parameters and gradients.

    Other states of an optimizer are not known before its first step.
    """
    params = others = 0
    for bucket in plan.buckets:
        shard, numel = _shard_bytes(plan, bucket), bucket.layout.shard_numel
        if bucket.tiers.param is Tier.NVME:
            params += shard.param
        if bucket.is_trainable and bucket.tiers.grad is Tier.NVME:
            others += shard.grad
        if bucket.master is Master.SEPARATE and bucket.tiers.optim is Tier.NVME:
            others += numel * bucket.master_dtype.itemsize
    return params, others


def _shard_bytes(plan: Plan, bucket: BucketPlan) -> ShardBytes:
    numel = bucket.layout.shard_numel
    # A frozen bucket may be unfrozen, so it counts. Tiers are not known yet: on the device, main
    # parameters may turn out to be the only shard.
    is_stepped = bucket.stage.has_shard(State.OPTIM)
    master_bytes = numel * bucket.master_dtype.itemsize
    state_bytes = 2 * master_bytes  # as for Adam
    if bucket.blocks.nbytes:
        state_bytes = numel // bucket.blocks.numel * bucket.blocks.nbytes
    if bucket.master_dtype != bucket.dtype:
        state_bytes += master_bytes
    return ShardBytes(
        param=numel * bucket.dtype.itemsize if bucket.stage.has_shard(State.PARAM) else 0,
        optim=state_bytes if is_stepped else 0,
        grad=numel * plan.grad_dtype(bucket).itemsize if is_stepped else 0,
        is_trainable=bucket.is_trainable,
    )


def check_has_parameters(module: nn.Module) -> None:
    if next(module.parameters(), None) is None:
        raise ValueError(
            f"{type(module).__name__} has no parameters, so there is nothing to shard; build its "
            "layers in __init__, setup() or configure_model()."
        )


def _check_parameters(module: nn.Module, named: Mapping[str, nn.Parameter]) -> None:
    check_has_parameters(module)
    for name, parameter in named.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"Parameter {name} is lazy and has no shape yet; run one batch through "
                "the module first."
            )
        if parameter.is_complex():
            raise ValueError(
                f"Parameter {name} is complex ({parameter.dtype}), which flat buffers do not "
                "support; store real and imaginary parts, nn.Parameter(torch.view_as_real(values)),"
                " and call torch.view_as_complex on them in the forward."
            )
        if hasattr(parameter, "fsdp_pre_all_gather"):
            kind, remedy = type(parameter).__name__, "train this module with FSDP2"
            if kind == "WeightWithDynamicFloat8CastTensor":
                remedy = "pass Float8LinearConfig(enable_fsdp_float8_all_gather=False)"
            raise ValueError(
                f"Parameter {name} must be an ordinary one, got {kind}, which FSDP alone can "
                f"all-gather; {remedy}."
            )


class _Bucketizer:
    """Divides units into buckets, by the arguments of `make_plan`."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        config: ZeroConfig,
        world_size: int,
        optimizer_of: Mapping[nn.Parameter, int],
        full_optimizers: Collection[int],
        state_blocks: Mapping[int, StateBlocks],
    ) -> None:
        self._named = named
        self._config = config
        self._world_size = world_size
        self._optimizer_of = optimizer_of
        self._full_optimizers = full_optimizers
        self._state_blocks = state_blocks
        default = max(_BUCKET_NUMEL, _BUCKET_NUMEL_PER_RANK * world_size)
        limit = config.reduce_bucket_size or default
        self._limit = min(limit, config.allgather_bucket_size or limit)  # elements
        self._owners: dict[str, int] = {}  # ranks, by parameter
        if not config.states.has_shard(State.OPTIM):
            return  # every rank steps everything
        # Frozen parameters need less memory: trained and frozen ones are balanced separately.
        for is_trainable in (True, False):
            names = [
                name
                for name, parameter in named.items()
                if self._needs_owner(parameter) and parameter.requires_grad is is_trainable
            ]
            owners = assign_owners([named[name].numel() for name in names], world_size)
            self._owners.update(zip(names, owners, strict=True))

    def _needs_owner(self, parameter: nn.Parameter) -> bool:
        """Whether a full optimizer steps `parameter`, or may do so later."""
        optimizer = self._optimizer_of.get(parameter)
        return (
            bool(self._full_optimizers) if optimizer is None else optimizer in self._full_optimizers
        )

    def _blocks_of(self, kind: _Kind) -> StateBlocks:
        if kind.has_owner:
            return StateBlocks()  # its states are not sharded
        if kind.optimizer is None:
            return next(iter(self._state_blocks.values()), StateBlocks())
        return self._state_blocks.get(kind.optimizer, StateBlocks())

    def kind(self, name: str, *, keeps_dtype: bool) -> _Kind:
        """Properties of a parameter that decide its bucket."""
        parameter, config = self._named[name], self._config
        dtype = master = own = parameter.dtype
        # 4-bit codes of bitsandbytes may be stored in any dtype: they are no numbers.
        if own.is_floating_point and not hasattr(parameter, "quant_state"):
            wanted = None if keeps_dtype else config.param_dtype
            assert not isinstance(wanted, str)
            dtype = wanted or own
            master = torch.promote_types(dtype, torch.promote_types(own, torch.float32))
        threshold = config.param_persistence_threshold
        if threshold is None:
            is_kept = keeps_dtype and own != (config.param_dtype or own)
            threshold = _REPLICATED_NUMEL if is_kept else 0
        return _Kind(
            dtype,
            master,
            parameter.requires_grad,
            self._optimizer_of.get(parameter),
            is_persistent=config.states.shards_params and parameter.numel() < threshold,
            has_owner=name in self._owners,
        )

    def bucketize(
        self, label: str, kind: _Kind, names: Sequence[str], *, is_block: bool
    ) -> Iterator[BucketPlan]:
        """Yields the buckets of one kind within a unit; a repeated block is never divided."""
        runs: list[list[str]] = []
        run_numel = excess = 0
        for name in names:
            numel = self._named[name].numel()
            # A vector between two matrices is no bucket of its own.
            if run_numel + numel > self._limit:
                excess += min(run_numel, numel)
            if not runs or (not is_block and excess > self._limit // _EXCESS_DIVISOR):
                runs.append([])
                run_numel = excess = 0
            runs[-1].append(name)
            run_numel += numel
        # Persistent parameters are replicated, as in the next lower stage.
        stage = STAGES[2] if kind.is_persistent else self._config.states
        if not kind.is_trainable:
            label += "/frozen"
        if kind.is_persistent:
            label += "/persistent"
        blocks = self._blocks_of(kind)
        for number, run in enumerate(runs):
            shapes = [(saved_name(name), tuple(self._named[name].shape)) for name in run]
            owners = [self._owners[name] for name in run] if kind.has_owner else None
            own = [self._named[name].dtype.itemsize for name in run]
            yield BucketPlan(
                f"{label}[{number}]" if len(runs) > 1 else label,
                FlatLayout.of(shapes, self._world_size, owners, blocks.numel),
                kind.dtype,
                kind.master_dtype,
                stage,
                is_trainable=kind.is_trainable,
                loses_bits=max(own) > kind.dtype.itemsize,
                blocks=blocks,
            )
