"""One training step on fake tensors: the order in which units are used, and activation memory.

[Note: Live bytes] Fake tensors have storages of the right size without memory. A dispatch mode
counts the storage of every result; a finalizer subtracts it when the last tensor on it is freed,
whether a local variable or autograd held it. The count is thus what an allocator would be asked
for, without its rounding and without the workspace inside kernels. Attention counts as one fused
kernel. Parameters are not counted: they are model states, which the engine allocates.

[Note: Extrapolated trace] A language model repeats one block dozens of times, and the time of a
step on fake tensors grows with their number. If all blocks of a container have the same class and
equal parameters, only the first four are run. The second and the third must have the same moments,
with activations that differ by a constant; the moments of the third are then repeated. Otherwise,
or if the model cannot run with fewer blocks, all blocks are run.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_zero.core.recompute import apply_checkpointing
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.plan import Plan, UnitPlan

__all__ = [
    "Event",
    "TraceMoment",
    "RepeatedBlocks",
    "StepTrace",
    "find_repeated_blocks",
    "trace_without_activations",
    "extrapolate_trace",
    "trace_step",
]


class Event(Enum):
    """Event of a step, of a unit or of a parameter."""

    PRE_FORWARD = "a unit's forward begins"
    POST_FORWARD = "a unit's forward has ended"
    BEGIN_BACKWARD = "backward begins"
    PRE_BACKWARD = "backward reaches an output of a unit"
    POST_BACKWARD = "the gradients of all inputs of a unit are computed"
    GRAD = "the gradient of a parameter is computed"
    FINALIZE_BACKWARD = "backward has ended"


@dataclass(frozen=True)
class TraceMoment:
    """An event, with the activation memory at its time.

    Attributes:
        event: Kind of event.
        name: Name of the unit or parameter; empty if the event has neither.
        live_bytes: Bytes of activations, and of gradients not yet copied to a bucket.
        high_bytes: Maximum of `live_bytes` since the previous moment.
        is_awaited: For PRE_FORWARD: whether a POST_BACKWARD will follow.
    """

    event: Event
    name: str = ""
    live_bytes: int = 0
    high_bytes: int = 0
    is_awaited: bool = False


@dataclass(frozen=True)
class StepTrace:
    """Recorded step.

    Attributes:
        moments: Events in the order of time.
        peak_bytes: Peak of the bytes of activations.
        saved_bytes: Bytes of activations that are saved for backward when it begins.
    """

    moments: tuple[TraceMoment, ...]
    peak_bytes: int = 0
    saved_bytes: int = 0


def trace_step(
    module: nn.Module,
    step: Callable[[nn.Module], Tensor],
    *,
    units: Collection[str],
    dtypes: Mapping[str, torch.dtype] | None = None,
    autocast: torch.dtype | None = None,
    checkpointed: Collection[str] = (),
) -> StepTrace:
    """Runs forward and backward on fake CPU tensors, and leaves the module unchanged.

    Args:
        module: Module on any device, also on meta; its values are not read.
        step: Function of the module that returns the loss. All tensors that it creates are fake.
        units: Qualified names of the modules to record.
        dtypes: Dtype of computation by parameter; None: the parameters' own.
        autocast: Dtype of autocast; None: no autocast.
        checkpointed: Qualified names of the modules under activation checkpointing.

    Raises:
        ValueError: The step cannot run on fake tensors, for example because it reads values.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = _TraceRecorder()
    under = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    was_training = {m: m.training for m in module.modules()}
    with fake, _fake_tensors(module, dtypes or {}), torch.random.fork_rng(devices=[]):
        try:
            with _hooked(module, units, checkpointed, recorder), recorder.counter:
                with under, torch.enable_grad():
                    loss = step(module.train())
                saved_bytes = recorder.counter.live
                recorder.record(Event.BEGIN_BACKWARD)
                loss.backward()
                del loss
                recorder.record(Event.FINALIZE_BACKWARD)
        except Exception as error:
            text = " ".join(str(error).split())
            raise ValueError(
                f"one step of {type(module).__name__} cannot be traced on fake tensors "
                f"({type(error).__name__}: {text[:300]}); pass inputs of the right "
                "shape, or plan without activations."
            ) from error
        finally:
            for child, mode in was_training.items():
                child.training = mode
    return StepTrace(tuple(recorder.moments), recorder.counter.peak, saved_bytes)


class _Counter(TorchDispatchMode):
    """Counts bytes of storages that are created under this mode. See [Note: Live bytes]."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.high = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._watch(leaf.untyped_storage())
        return result

    def ignore(self, tensor: Tensor) -> None:
        """Excludes an existing tensor from the count."""
        self._known.add(tensor.untyped_storage()._cdata)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += nbytes
        self.high = max(self.high, self.live)
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._subtract, key, nbytes)

    def _subtract(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


class _TraceRecorder:
    def __init__(self) -> None:
        self.moments: list[TraceMoment] = []
        self.counter = _Counter()

    def record(self, event: Event, name: str = "", *, is_awaited: bool = False) -> None:
        """Records an event at this moment."""
        counter = self.counter
        moment = TraceMoment(event, name, counter.live, counter.high, is_awaited)
        self.moments.append(moment)
        counter.high = counter.live


@contextmanager
def _fake_tensors(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Replaces parameters and buffers of the module by fake tensors; ties are preserved."""
    made: dict[Tensor, Tensor] = {}
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    named = {parameter: name for name, parameter in parameters_by_name(module).items()}

    def fake_of(tensor: Tensor) -> Tensor:
        if tensor not in made:
            dtype = dtypes.get(named.get(tensor, ""), tensor.dtype)  # type: ignore[call-overload]
            like = torch.empty(tensor.shape, dtype=dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(like, tensor.requires_grad) if is_parameter else like
        return made[tensor]

    try:
        for child in module.modules():
            for own in (child._parameters, child._buffers):
                kept.append((own, dict(own)))
                for name, tensor in own.items():
                    if tensor is not None:
                        own[name] = fake_of(tensor)  # type: ignore[assignment]
        yield
    finally:
        for own_dict, before in kept:
            own_dict.update(before)


@contextmanager
def _hooked(
    module: nn.Module,
    units: Collection[str],
    checkpointed: Collection[str],
    recorder: _TraceRecorder,
) -> Iterator[None]:
    """Installs the hooks of `Schedule`, but they record instead of unsharding."""
    handles: list[Any] = []
    for name in units:
        if name:
            child = module.get_submodule(name)
            pre = _pre_forward_hook(name, recorder)
            handles.append(child.register_forward_pre_hook(pre, prepend=True, with_kwargs=True))
            handles.append(child.register_forward_hook(_post_forward_hook(name, recorder)))
    for name, parameter in parameters_by_name(module).items():
        recorder.counter.ignore(parameter)
        if parameter.requires_grad:
            hook = _gradient_hook(name, recorder)
            handles.append(parameter.register_post_accumulate_grad_hook(hook))
    for buffer in module.buffers():
        recorder.counter.ignore(buffer)
    end = apply_checkpointing(module, checkpointed, preserve_rng_state=False)
    try:
        yield
    finally:
        end()
        for handle in handles:
            handle.remove()


def _pre_forward_hook(name: str, recorder: _TraceRecorder) -> Any:
    def hook(child: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        inputs = [t for t in leaves if _requires_grad(t) and not t.is_leaf]
        recorder.record(Event.PRE_FORWARD, name, is_awaited=bool(inputs))
        if inputs:
            register_multi_grad_hook(inputs, lambda _: recorder.record(Event.POST_BACKWARD, name))

    return hook


def _post_forward_hook(name: str, recorder: _TraceRecorder) -> Any:
    def hook(child: nn.Module, args: Any, output: Any) -> None:
        recorder.record(Event.POST_FORWARD, name)
        for leaf in tree_leaves(output):
            if _requires_grad(leaf) and not leaf.is_leaf:
                leaf.register_hook(lambda _: recorder.record(Event.PRE_BACKWARD, name))

    return hook


def _gradient_hook(name: str, recorder: _TraceRecorder) -> Any:
    def hook(parameter: nn.Parameter) -> None:
        recorder.record(Event.GRAD, name)
        parameter.grad = None  # the engine copies it to a bucket
        recorder.counter.high = recorder.counter.live

    return hook


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def trace_without_activations(plan: Plan) -> StepTrace:
    """Trace in the order of registration, without activations, for a module that cannot run."""
    units = [unit for unit in plan.units if unit.name]
    moments = []
    for unit in units:
        moments.append(TraceMoment(Event.PRE_FORWARD, unit.name, is_awaited=True))
        moments.append(TraceMoment(Event.POST_FORWARD, unit.name))
    moments.append(TraceMoment(Event.BEGIN_BACKWARD))
    for unit in reversed(units):
        moments.append(TraceMoment(Event.PRE_BACKWARD, unit.name))
        moments += _gradient_moments(unit)
        moments.append(TraceMoment(Event.POST_BACKWARD, unit.name))
    for unit in plan.units:
        if not unit.name:
            moments += _gradient_moments(unit)
    return StepTrace((*moments, TraceMoment(Event.FINALIZE_BACKWARD)))


def _gradient_moments(unit: UnitPlan) -> list[TraceMoment]:
    return [
        TraceMoment(Event.GRAD, slot.name)
        for bucket in reversed(unit.buckets)
        if bucket.is_trainable
        for slot in reversed(bucket.layout.slots)
    ]


_NUM_RUN = 4  # first, two to compare, last
_MIN_BLOCKS = 8  # with fewer, all blocks are run


@dataclass(frozen=True)
class RepeatedBlocks:
    """Equal blocks of one container.

    Attributes:
        container: Qualified name of the container.
        children: Names of the blocks in the container, in order.
    """

    container: str
    children: tuple[str, ...]

    def name(self, index: int) -> str:
        """Qualified name of a block."""
        child = self.children[index]
        return f"{self.container}.{child}" if self.container else child


def find_repeated_blocks(module: nn.Module, units: Sequence[str]) -> RepeatedBlocks | None:
    """First container with at least `_MIN_BLOCKS` units that are all equal; None: there is none."""
    known = set(units)
    for name, container in module.named_modules():
        children = dict(container.named_children())
        prefix = f"{name}." if name else ""
        if len(children) < _MIN_BLOCKS or not all(
            f"{prefix}{child}" in known for child in children
        ):
            continue
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        if len({_signature(child) for child in children.values()}) == 1:
            return RepeatedBlocks(name, tuple(children))
    return None


def _signature(module: nn.Module) -> tuple[object, ...]:
    parameters = [
        (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()
    ]
    return type(module), tuple(parameters)


def extrapolate_trace(
    module: nn.Module, repeats: RepeatedBlocks, run: Callable[[Sequence[str]], StepTrace]
) -> StepTrace | None:
    """Extrapolates the trace of all blocks from a run of four; None: their moments differ.

    Args:
        module: Module with the blocks.
        repeats: The repeated blocks.
        run: Function that traces the module without the blocks whose names it is given.
    """
    count = len(repeats.children)
    gone = [repeats.name(index) for index in range(_NUM_RUN, count)]
    with _without_children(module.get_submodule(repeats.container), repeats.children[_NUM_RUN:]):
        try:
            trace = run(gone)
        except ValueError:
            return None
    split = next(i for i, m in enumerate(trace.moments) if m.event is Event.BEGIN_BACKWARD)
    forward, backward = trace.moments[:split], trace.moments[split:]
    forward_starts = [_first(forward, Event.PRE_FORWARD, repeats.name(i)) for i in (1, 2, 3)]
    backward_starts = [_first(backward, Event.PRE_BACKWARD, repeats.name(i)) for i in (2, 1, 0)]
    growth = _growth(forward, forward_starts, repeats, 1)
    if growth is None or _growth(backward, backward_starts, repeats, -1) != -growth:
        return None
    more = count - _NUM_RUN
    moments = list(forward[: forward_starts[2]])
    for shift in range(1, more + 1):
        moments += _shifted(forward[forward_starts[1] : forward_starts[2]], repeats, shift, growth)
    moments += _shifted(forward[forward_starts[2] :], repeats, more, growth)
    moments += _shifted(backward[: backward_starts[0]], repeats, more, growth)
    for shift in range(more, 0, -1):
        moments += _shifted(
            backward[backward_starts[0] : backward_starts[1]], repeats, shift, growth
        )
    moments += backward[backward_starts[0] :]
    peak = max(moment.high_bytes for moment in moments)
    return StepTrace(tuple(moments), peak, trace.saved_bytes + more * growth)


def _first(moments: Sequence[TraceMoment], event: Event, name: str) -> int:
    """Index of the first such moment; the number of moments if there is none."""
    found = (i for i, m in enumerate(moments) if m.event is event and m.name == name)
    return next(found, len(moments))


def _growth(
    moments: Sequence[TraceMoment], starts: Sequence[int], repeats: RepeatedBlocks, shift: int
) -> int | None:
    """Bytes by which the moments of two adjacent blocks differ; None: they differ in other ways.

    Args:
        moments: Moments of forward, or of backward.
        starts: Index of the first moment of the two blocks, and of the block after them.
        repeats: The repeated blocks.
        shift: Index of the second block less that of the first.
    """
    start, middle, stop = starts
    if not start < middle < stop < len(moments):
        return None
    growth = moments[middle].live_bytes - moments[start].live_bytes
    if moments[stop].live_bytes - moments[middle].live_bytes != growth:
        return None
    expected = _shifted(moments[start:middle], repeats, shift, growth * shift)
    second = moments[middle:stop]
    if _without_leading_peak(expected) != _without_leading_peak(second):
        return None
    return growth


def _without_leading_peak(moments: Sequence[TraceMoment]) -> list[TraceMoment]:
    """Moments of a block, without the peak before its first moment."""
    return [dataclasses.replace(moments[0], high_bytes=0), *moments[1:]]


def _shifted(
    moments: Sequence[TraceMoment], repeats: RepeatedBlocks, shift: int, growth: int
) -> list[TraceMoment]:
    """Moments of blocks, turned into those of the blocks with an index larger by `shift`.

    Args:
        moments: Moments of blocks and of other modules; the latter keep their names.
        repeats: The repeated blocks.
        shift: Number added to the blocks' indices.
        growth: Bytes of activations per block.
    """
    return [
        dataclasses.replace(
            moment,
            name=_renamed(moment.name, repeats, shift),
            live_bytes=moment.live_bytes + shift * growth,
            high_bytes=moment.high_bytes + shift * growth,
        )
        for moment in moments
    ]


def _renamed(name: str, repeats: RepeatedBlocks, shift: int) -> str:
    for index in range(_NUM_RUN):
        old = repeats.name(index)
        if name == old or name.startswith(f"{old}."):
            return repeats.name(index + shift) + name[len(old) :]
    return name


@contextmanager
def _without_children(container: nn.Module, children: Sequence[str]) -> Iterator[None]:
    """Removes children from a container inside the block."""
    saved = dict(container._modules)
    try:
        for name in children:
            del container._modules[name]
        yield
    finally:
        container._modules.clear()
        container._modules.update(saved)
