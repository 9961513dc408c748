"""A plain replica of the model that trains beside the engine, to compare the two.

[Note: Phases of a comparison] Each rank has a full copy of the module and of its optimizer, without
an engine. On the same batch, with the same random numbers, it computes what plain data parallel
computes. The phases of a step are compared one by one, and each begins with the same input on both
sides, so that a difference belongs to its phase and is not one that has grown:

    forward     the loss of this rank
    reduction   the gradient of each parameter, averaged over ranks
    clipping    the gradient after clipping, from the engine's own mean
    step        parameters, optimizer states and settings, from the engine's own clipped gradient

Each rank compares its own elements. A gradient is compared with the largest element of the
parameter's gradient, since single elements near zero are rounding errors; so are the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_zero._lightning import pytorch as pl
from lightning_zero._lightning.pytorch import (
    GradClipAlgorithmType,
    _init_optimizers_and_lr_schedulers,
    is_overridden,
)
from lightning_zero.checkpoint.rank_states import random_state, set_random_state
from lightning_zero.core.access import full_grad
from lightning_zero.core.bucket import Bucket
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.optim.state_view import raw_states
from lightning_zero.strategy.strategy import ZeroStrategy
from lightning_zero.tensors.lazy import LazyTensor

__all__ = [
    "SILENT",
    "PhaseDifference",
    "Replica",
    "allocated",
    "cast",
    "copy_of",
    "copy_values",
    "own_random_numbers",
]

_CPU = torch.device("cpu")

# Largest relative difference by the dtype in which the module computes. Sums of ranks and of fused
# kernels are rounded in another order.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_STEP_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}  # of elementwise operations
_COMPILED_METHODS = ("forward", "training_step", "validation_step", "test_step", "predict_step")
_SCHEDULED = {"lr", "initial_lr", "momentum", "betas", "weight_decay", "max_lr", "min_lr"}


@dataclass(frozen=True)
class PhaseDifference:
    """The first difference between the engine and plain data parallel.

    Attributes:
        step: `Trainer.global_step`.
        phase: "forward", "reduction", "clipping" or "step".
        name: The value that differs.
        index: Its first element that differs, in the flat parameter; None: it is one number.
        ours: Value of the engine.
        plain: Value of plain data parallel.
        rank: Rank that has found it.
    """

    step: int
    phase: str
    name: str
    index: int | None
    ours: float
    plain: float
    rank: int

    def __str__(self) -> str:
        element = "" if self.index is None else f", element {self.index}"
        return (
            f"step {self.step}, {self.phase}: {self.name}{element} on rank {self.rank}: "
            f"{self.ours:.9g} with the engine, {self.plain:.9g} with plain data parallel"
        )


def copy_of(module: pl.LightningModule, *, on_meta: bool = False) -> pl.LightningModule:
    """A copy of a module that no engine holds yet; it belongs to the same Trainer and logs nothing.

    Call it in a callback's `setup`. `on_meta`: parameters and buffers have shapes only.
    """
    memo = _memo_of(module, partial(torch.empty_like, device="meta")) if on_meta else {}
    replica = copy.deepcopy(module, memo)  # which has no Trainer
    _share_memory(replica, _sharing_memory(module))
    if replica._compiler_ctx is not None:  # `torch.compile(module)`, whose methods are the module's
        replica._compiler_ctx = None
        for name in _COMPILED_METHODS:
            replica.__dict__.pop(name, None)
    replica.trainer = module.trainer
    replica.__dict__.update(SILENT)
    on_device = torch.device("meta") if on_meta else nullcontext()
    forked = torch.random.fork_rng(range(torch.cuda.device_count()))
    with forked, own_random_numbers(_CPU), on_device:  # values are copied later
        if is_overridden("setup", replica):
            replica.setup("fit")
        replica.configure_model()
    return replica


@contextmanager
def own_random_numbers(
    device: torch.device, states: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Context that restores the generators of torch, NumPy and Python at its end. Local.

    Args:
        device: Device of this rank, whose generator is restored, too.
        states: States with which it begins, of `random_state`; None: the current ones.
    """
    before = random_state(device)
    try:
        if states is not None:
            set_random_state(states, device)
        yield
    finally:
        set_random_state(before, device)


def _sharing_memory(module: nn.Module) -> list[list[str]]:
    """Names of parameters that are different objects with the same memory."""
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, parameter in module.named_parameters():
        if parameter.numel() and not parameter.is_meta:
            key = (parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride())
            names.setdefault(key, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _share_memory(module: nn.Module, groups: list[list[str]]) -> None:
    """Makes parameters share memory, as neither a deep copy nor `to` does."""
    own = dict(module.named_parameters())
    for first, *others in groups:
        for name in others:
            own[name].data = own[first].data


def allocated(
    replica: pl.LightningModule, like: nn.Module, device: torch.device
) -> pl.LightningModule:
    """A copy of a replica on the meta device that has memory, without values.

    Args:
        replica: Result of `copy_of(..., on_meta=True)`, which stays as it is.
        like: Module with the same names, of which it gets the dtypes of parameters and buffers,
            which parameters are trainable, and which modules are in training mode.
        device: Device of the memory.

    Raises:
        KeyError: `like` lacks a parameter or a module of `replica`.
    """
    memo = _memo_of(replica, partial(torch.empty_like, device=device))
    made = copy.deepcopy(replica, memo)
    made.trainer = replica.trainer
    ours, modules = dict(like.named_parameters()), dict(like.named_modules())
    cast(made, {name: one.dtype for name, one in (*ours.items(), *like.named_buffers())})
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(ours[name].requires_grad)
    for name, module in made.named_modules():
        module.training = modules[name].training
    _copy_attributes(made, like)
    return made


def cast(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Casts parameters and buffers in place, by name; others stay."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in dtypes:
            tensor.data = tensor.data.to(dtypes[name])


def _copy_attributes(replica: nn.Module, like: nn.Module) -> None:
    """Copies numbers, texts and plain tensors that are attributes of `like` and its modules. Local.

    Hooks such as `on_train_epoch_start` set them, and they are no buffers: a temperature that
    changes with the epoch, weights of classes.
    """
    modules = dict(like.named_modules())
    for name, module in replica.named_modules():
        for key, value in vars(modules[name]).items() if name in modules else ():
            if key.startswith("_") or key == "training":
                continue
            if type(value) is Tensor:
                vars(module)[key] = value.detach().clone()
            elif isinstance(value, (bool, int, float, str)):
                vars(module)[key] = value


def _memo_of(module: nn.Module, make: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
    """A memo for `deepcopy` with which `make` makes the tensors of the copy; ties stay.

    Tensors of other classes, such as quantized ones, are copied.
    """
    memo: dict[int, Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if type(tensor) is nn.Parameter:
            memo[id(tensor)] = nn.Parameter(make(tensor.detach()), tensor.requires_grad)
        elif type(tensor) is Tensor:
            memo[id(tensor)] = make(tensor)
    return memo


def copy_values(engine: Engine, module: nn.Module | None) -> None:
    """Copies the engine's parameters and buffers, in full precision, to `module`. Collective.

    Args:
        engine: The engine, outside of a forward and a backward.
        module: A module with the same names and with memory; None: this rank needs no values, but
            takes part.
    """
    own = {} if module is None else parameters_by_name(module)
    engine.lockstep.barrier("a copy of all parameters")
    with torch.no_grad():
        for bucket in engine.buckets:
            slots, full = bucket.plan.layout.slots, bucket.masters.full_tensors()
            for slot, value in zip(slots, full, strict=True):
                if module is not None:
                    own[slot.name].copy_(value)
        buffers = {} if module is None else dict(module.named_buffers())
        for name, buffer in engine.module.named_buffers() if module is not None else ():
            buffers[name].copy_(buffer)


def _copy_of_batch(batch: Any) -> Any:
    """A copy of `batch`, which `training_step` may change in place."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # such as a generator in it, or a tensor with a graph
        return tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, batch)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Replaces `log` of a module whose metrics do not count."""


SILENT = {"log": _ignore, "log_dict": _ignore}  # attributes of such a module


class Replica:
    """Trains a full copy of the module beside the engine. Every rank has one.

    Args:
        module: Copy of the module, of `copy_of`.
        strategy: Strategy whose engine holds the original.

    Attributes:
        difference: The first difference that this rank has found; None: none.
        num_steps: Steps that were compared.
    """

    def __init__(self, module: pl.LightningModule, strategy: ZeroStrategy) -> None:
        self.difference: PhaseDifference | None = None
        self._module = module
        self.strategy = strategy
        self._engine = engine = strategy.engine
        self._trainer = trainer = module.trainer
        shared = _sharing_memory(module)
        module.to(engine.device)
        dtypes = {name: buffer.dtype for name, buffer in engine.module.named_buffers()}
        for bucket in engine.buckets:
            names = [slot.name for slot in bucket.plan.layout.slots]
            dtypes.update(zip(names, bucket.orig_dtypes, strict=True))
        cast(module, dtypes)
        _share_memory(module, shared)
        copy_values(engine, self._module)
        optimizers, _ = _init_optimizers_and_lr_schedulers(module)
        if len(optimizers) != 1 or len(engine.optimizers) != 1:
            raise ValueError(
                "the comparison with plain data parallel needs one optimizer, got "
                f"{len(engine.optimizers)}; remove against_data_parallel."
            )
        self._optimizer: Optimizer = optimizers[0]
        self._main: Optimizer = engine.optimizers[0]
        self._match_groups()
        state = engine.comm.control.broadcast_object(engine.optimizer_state(self._main))
        if state.get("state"):
            self._optimizer.load_state_dict(copy.deepcopy(state))  # it would share step counters
        self._loss: Tensor | None = None
        self._step = trainer.global_step
        self._has_step = False
        self.num_steps = 0
        plans = [bucket.plan for bucket in engine.buckets]
        dtype = min((plan.dtype for plan in plans), key=lambda one: one.itemsize)
        self._tolerance = TOLERANCES[dtype]
        masters = min((plan.master_dtype for plan in plans), key=lambda one: one.itemsize)
        self._step_tolerance = _STEP_TOLERANCES.get(masters, TOLERANCES[masters])

    def _match_groups(self) -> None:
        """Gives the copy's optimizer the groups of the engine's, to which a callback may add."""
        own = parameters_by_name(self._module)
        names = {p: name for name, p in parameters_by_name(self._engine.module).items()}
        groups = self._main.param_groups
        if any(p not in names for group in groups for p in group["params"]):
            return  # tied after the optimizer was made
        wanted = [[own[names[p]] for p in group["params"]] for group in groups]
        held = [group["params"] for group in self._optimizer.param_groups]
        if [list(map(id, one)) for one in wanted] == [list(map(id, one)) for one in held]:
            return
        self._optimizer.param_groups.clear()
        for params, group in zip(wanted, groups, strict=True):
            self._optimizer.add_param_group({**group, "params": params})

    @property
    def _pairs(self) -> Iterator[tuple[Bucket, int, str, nn.Parameter]]:
        own = parameters_by_name(self._module)
        for bucket in self._engine.buckets:
            for index, slot in enumerate(bucket.plan.layout.slots):
                yield bucket, index, slot.name, own[slot.name]

    # ---------------------------------------------------------------- phases

    def run_micro_batch(self, *args: Any) -> None:
        """Forward and backward of the copy, before those of the module. Local.

        `args`: arguments of `training_step`, which may change them.
        """
        device = self._engine.device
        self._step = self._trainer.global_step
        for (_, parameter), ours in zip(
            self._module.named_parameters(), self._engine.module.parameters(), strict=True
        ):
            parameter.requires_grad_(ours.requires_grad)
        _copy_attributes(self._module, self._engine.module)
        plugin = self.strategy.precision_plugin
        args = _copy_of_batch(args)
        with own_random_numbers(device), torch.enable_grad(), plugin.train_step_context():
            output = self._module.training_step(*args)
        loss = output["loss"] if isinstance(output, Mapping) else output
        self._loss = None if loss is None else loss / self._trainer.accumulate_grad_batches
        if self._loss is not None:
            self.strategy.scaled_loss(self._loss).backward()

    def compare_loss(self, loss: Tensor) -> None:
        """Compares the loss of this rank, before its backward. Local."""
        if self._loss is not None:
            self._compare("forward", "the loss", loss, self._loss, self._tolerance)

    def compare_gradients(self) -> None:
        """Compares the mean gradients, after the last backward of a step. Collective."""
        chosen = [pair for pair in self._pairs if pair[-1].requires_grad]
        if not chosen:
            return
        with torch.no_grad():
            local = [torch.zeros_like(p) if p.grad is None else p.grad for *_, p in chosen]
            flat = torch.cat([grad.reshape(-1) for grad in local])
            mean = self.strategy.reduce(flat, reduce_op="mean")
            parts = mean.split([grad.numel() for grad in local])
            for (bucket, index, name, _), part in zip(chosen, parts, strict=True):
                self._compare_gradient("reduction", bucket, index, name, part)

    def prepare_step(self) -> None:
        """Copies the engine's gradients and settings, and clips them. Collective."""
        for parameter, ours in zip(
            self._module.parameters(), self._engine.module.parameters(), strict=True
        ):
            grad = full_grad(ours)
            parameter.grad = None if grad is None else grad.to(parameter.dtype)
        self._match_groups()
        groups = zip(self._optimizer.param_groups, self._main.param_groups, strict=True)
        for group, other in groups:
            group.update({key: other[key] for key in _SCHEDULED & other.keys()})
        limit = self._trainer.gradient_clip_val
        if limit:
            parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
            if self._trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
                nn.utils.clip_grad_value_(parameters, limit)
            else:
                nn.utils.clip_grad_norm_(parameters, limit)
        self._has_step = True

    def compare_step(self) -> None:
        """Steps the copy and compares, after the step of the engine. Local."""
        if not self._has_step:
            return
        self._has_step = False
        self.num_steps += 1
        self._engine.worker.drain()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if self._trainer.gradient_clip_val:
                for bucket, index, name, parameter in self._pairs:
                    if parameter.grad is not None:
                        self._compare_gradient("clipping", bucket, index, name, parameter.grad)
            self._optimizer.step()
            self._optimizer.zero_grad()
            for bucket, index, name, parameter in self._pairs:
                ours = bucket.masters.shard_views()[index]
                self._compare_slice("step", name, ours, bucket, index, parameter, wide=True)
                self._compare_states(bucket, index, name, parameter)
        self._compare_settings()

    def _compare_states(
        self, bucket: Bucket, index: int, name: str, parameter: nn.Parameter
    ) -> None:
        ours = raw_states(self._main).get(bucket.parameters[index], {})
        for key, plain in self._optimizer.state.get(parameter, {}).items():
            value = ours.get(key)
            if not isinstance(plain, Tensor) or not isinstance(value, Tensor):
                continue
            if plain.shape == parameter.shape and parameter.dim():
                self._compare_slice(
                    "step", f"{key} of {name}", value, bucket, index, plain, wide=True
                )
            elif plain.numel() == 1 and value.numel() == 1:
                self._compare("step", f"{key} of {name}", value, plain, self._step_tolerance)

    def _compare_settings(self) -> None:
        groups = zip(self._optimizer.param_groups, self._main.param_groups, strict=True)
        for number, (plain, ours) in enumerate(groups):
            for key, value in plain.items():
                if key in _SCHEDULED or isinstance(value, bool):
                    continue
                if isinstance(value, (int, float)) and isinstance(ours.get(key), (int, float)):
                    self._compare(
                        "step",
                        f"{key} of parameter group {number}",
                        torch.tensor(float(ours[key]), dtype=torch.float64),
                        torch.tensor(float(value), dtype=torch.float64),
                        self._tolerance,
                    )

    # ---------------------------------------------------------------- comparison

    def _compare_gradient(
        self, phase: str, bucket: Bucket, index: int, name: str, plain: Tensor
    ) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            ours = bucket.grads.fetch(index)
        if ours is None:
            ours = plain.new_zeros(len(bucket.owned(index)))
        self._compare_slice(phase, f"the gradient of {name}", ours, bucket, index, plain)

    def _compare_slice(
        self,
        phase: str,
        name: str,
        ours: Tensor,
        bucket: Bucket,
        index: int,
        plain: Tensor,
        *,
        wide: bool = False,
    ) -> None:
        """Compares this rank's elements with those of the full tensor `plain`."""
        if self.difference is not None:
            return
        values = ours.read() if isinstance(ours, LazyTensor) else ours
        own = bucket.owned(index)
        flat = plain.detach().reshape(-1)
        part = flat[own.start : own.stop]
        values = values.detach().reshape(-1)
        if not part.numel() or values.numel() != part.numel():
            return
        tolerance = self._step_tolerance if wide else self._tolerance
        scale = float(flat.abs().nan_to_num(nan=0.0, posinf=0.0).max())
        self._compare(phase, name, values, part, tolerance, scale=scale, start=own.start)

    def _compare(
        self,
        phase: str,
        name: str,
        ours: Tensor,
        plain: Tensor,
        tolerance: float,
        *,
        scale: float | None = None,
        start: int | None = None,
    ) -> None:
        if self.difference is not None:
            return
        one = ours.detach().to(device="cpu", dtype=torch.float64).reshape(-1)
        other = plain.detach().to(device="cpu", dtype=torch.float64).reshape(-1)
        limit = tolerance * (float(other.abs().nan_to_num().max()) if scale is None else scale)
        is_same = ((one - other).abs() <= limit + 1e-12) | (one == other)
        is_same |= one.isnan() & other.isnan()
        if bool(is_same.all()):
            return
        index = int((~is_same).nonzero()[0])
        self.difference = PhaseDifference(
            self._step,
            phase,
            name,
            None if start is None else start + index,
            float(one[index]),
            float(other[index]),
            self._engine.comm.rank,
        )
