"""One training step on fake tensors: when which unit is used, and what activations take meanwhile.

[Note: Live bytes] Fake tensors have storages of the right size without memory. A dispatch mode sees
every result that is made, counts its storage, and is told by a finalizer when the last tensor on it
has gone, whoever held it: a local variable, or autograd for backward. So the count is what an
allocator would be asked for, without its rounding, but for the inside of kernels. Attention counts
as one fused kernel. Parameters are not counted; the engine holds them elsewhere.

[Note: Extrapolated] A language model repeats one block dozens of times, and a step of it on fake
tensors takes as many times as long. Where all blocks of a container have one class and equal
parameters, only the first four are run. The second and the third must have the same moments, with
activations that differ by a constant; then those of the third are repeated. Else, or where a model
cannot run with fewer blocks, all of them are run.
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

from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.plan import Plan, UnitPlan
from lightning_zero.layout.recompute import apply_checkpointing

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
    """What happens in a step, to a unit or to a parameter."""

    PRE_FORWARD = "a unit's forward begins"
    POST_FORWARD = "a unit's forward has ended"
    BEGIN_BACKWARD = "backward begins"
    PRE_BACKWARD = "backward reaches an output of a unit"
    POST_BACKWARD = "the gradients of all inputs of a unit are there"
    GRAD = "the gradient of a parameter is there"
    FINALIZE_BACKWARD = "backward has ended"


@dataclass(frozen=True)
class TraceMoment:
    """One event.

    Attributes:
        event: What happens.
        name: Of the unit or parameter; empty where it is neither.
        live_bytes: Of activations and of gradients that nobody has taken over, at this moment.
        high_bytes: The most of them since the moment before.
        is_awaited: FORWARD: a BACKWARD_END will follow.
    """

    event: Event
    name: str = ""
    live_bytes: int = 0
    high_bytes: int = 0
    is_awaited: bool = False


@dataclass(frozen=True)
class StepTrace:
    """A step in moments.

    Attributes:
        moments: In order.
        peak_bytes: The most that activations take at any moment.
        saved_bytes: Kept for backward, when it begins.
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
    """Runs forward and backward on fake tensors of the CPU. The module is left as it was.

    Args:
        module: On any device, meta too; its values are not read.
        step: Given the module, computes the loss. Tensors that it makes are fake.
        units: Qualified names of the modules whose uses are wanted.
        dtypes: By parameter, in which the module computes; None: as they are.
        autocast: Compute under autocast in this dtype.
        checkpointed: Names of modules that keep their inputs only, and run again in backward.

    Raises:
        ValueError: The step failed on fake tensors: it reads values, say.
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
                recorder.take(Event.BEGIN_BACKWARD)
                loss.backward()
                del loss
                recorder.take(Event.FINALIZE_BACKWARD)
        except Exception as error:
            text = " ".join(str(error).split())
            raise ValueError(
                f"one step of {type(module).__name__} cannot be traced on fake tensors "
                f"({type(error).__name__}: {text[:300]}); plan without activations, or give "
                "inputs of the right shape."
            ) from error
        finally:
            for child, mode in was_training.items():
                child.training = mode
    return StepTrace(tuple(recorder.moments), recorder.counter.peak, saved_bytes)


class _Counter(TorchDispatchMode):
    """Counts bytes of storages that were made inside. See [Note: Live bytes]."""

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
        """Does not count what was there before."""
        self._known.add(tensor.untyped_storage()._cdata)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += nbytes
        self.high = max(self.high, self.live)
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


class _TraceRecorder:
    def __init__(self) -> None:
        self.moments: list[TraceMoment] = []
        self.counter = _Counter()

    def take(self, event: Event, name: str = "", *, is_awaited: bool = False) -> None:
        """Something happens now."""
        counter = self.counter
        moment = TraceMoment(event, name, counter.live, counter.high, is_awaited)
        self.moments.append(moment)
        counter.high = counter.live


@contextmanager
def _fake_tensors(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Puts fake parameters and buffers in place of the module's own; one for each, ties too."""
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
    """Hooks as `Schedule` has them, which record instead of gathering."""
    handles: list[Any] = []
    for name in units:
        if name:
            child = module.get_submodule(name)
            before, after = _before(name, recorder), _after(name, recorder)
            handles.append(child.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            handles.append(child.register_forward_hook(after))
    for name, parameter in parameters_by_name(module).items():
        recorder.counter.ignore(parameter)
        if parameter.requires_grad:
            hook = _on_gradient(name, recorder)
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


def _before(name: str, recorder: _TraceRecorder) -> Any:
    def hook(child: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        inputs = [t for t in leaves if _wants_grad(t) and not t.is_leaf]
        recorder.take(Event.PRE_FORWARD, name, is_awaited=bool(inputs))
        if inputs:
            register_multi_grad_hook(inputs, lambda _: recorder.take(Event.POST_BACKWARD, name))

    return hook


def _after(name: str, recorder: _TraceRecorder) -> Any:
    def hook(child: nn.Module, args: Any, output: Any) -> None:
        recorder.take(Event.POST_FORWARD, name)
        for leaf in tree_leaves(output):
            if _wants_grad(leaf) and not leaf.is_leaf:
                leaf.register_hook(lambda _: recorder.take(Event.PRE_BACKWARD, name))

    return hook


def _on_gradient(name: str, recorder: _TraceRecorder) -> Any:
    def hook(parameter: nn.Parameter) -> None:
        recorder.take(Event.GRAD, name)
        parameter.grad = None  # the engine takes it over
        recorder.counter.high = recorder.counter.live

    return hook


def _wants_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def trace_without_activations(plan: Plan) -> StepTrace:
    """A step in the order of registration, without activations, for a module that cannot be run."""
    units = [unit for unit in plan.units if unit.name]
    moments = []
    for unit in units:
        moments.append(TraceMoment(Event.PRE_FORWARD, unit.name, is_awaited=True))
        moments.append(TraceMoment(Event.POST_FORWARD, unit.name))
    moments.append(TraceMoment(Event.BEGIN_BACKWARD))
    for unit in reversed(units):
        moments.append(TraceMoment(Event.PRE_BACKWARD, unit.name))
        moments += _gradients_of(unit)
        moments.append(TraceMoment(Event.POST_BACKWARD, unit.name))
    for unit in plan.units:
        if not unit.name:
            moments += _gradients_of(unit)
    return StepTrace((*moments, TraceMoment(Event.FINALIZE_BACKWARD)))


def _gradients_of(unit: UnitPlan) -> list[TraceMoment]:
    return [
        TraceMoment(Event.GRAD, slot.name)
        for bucket in reversed(unit.buckets)
        if bucket.is_trainable
        for slot in reversed(bucket.layout.slots)
    ]


_KEPT = 4  # first, two to compare, last
_LEAST = 8  # below this the whole is run at once


@dataclass(frozen=True)
class RepeatedBlocks:
    """Blocks that are alike.

    Attributes:
        container: Qualified name.
        children: Their names in it, in order.
    """

    container: str
    children: tuple[str, ...]

    def name(self, index: int) -> str:
        """Qualified name of a block."""
        return (
            f"{self.container}.{self.children[index]}" if self.container else self.children[index]
        )


def find_repeated_blocks(module: nn.Module, units: Sequence[str]) -> RepeatedBlocks | None:
    """The one container of units that are all alike, if it is deep."""
    known = set(units)
    for name, container in module.named_modules():
        children = dict(container.named_children())
        prefix = f"{name}." if name else ""
        if len(children) < _LEAST or not all(f"{prefix}{child}" in known for child in children):
            continue
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        if len({_likeness(child) for child in children.values()}) == 1:
            return RepeatedBlocks(name, tuple(children))
    return None


def _likeness(module: nn.Module) -> tuple[object, ...]:
    parameters = [
        (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()
    ]
    return type(module), tuple(parameters)


def extrapolate_trace(
    module: nn.Module, repeats: RepeatedBlocks, run: Callable[[Sequence[str]], StepTrace]
) -> StepTrace | None:
    """The trace of all blocks from a run of four; None where they are not alike in it.

    Args:
        module: Has the blocks.
        repeats: Which they are.
        run: Traces the module as it is then, with the units and modules that are left; given the
            names of those that are gone.
    """
    count = len(repeats.children)
    gone = [repeats.name(index) for index in range(_KEPT, count)]
    with _without(module.get_submodule(repeats.container), repeats.children[_KEPT:]):
        try:
            trace = run(gone)
        except ValueError:
            return None
    turn = next(i for i, m in enumerate(trace.moments) if m.event is Event.BEGIN_BACKWARD)
    forward, backward = trace.moments[:turn], trace.moments[turn:]
    begins = [_first(forward, Event.PRE_FORWARD, repeats.name(i)) for i in (1, 2, 3)]
    returns = [_first(backward, Event.PRE_BACKWARD, repeats.name(i)) for i in (2, 1, 0)]
    growth = _growth(forward, begins, repeats, 1)
    if growth is None or _growth(backward, returns, repeats, -1) != -growth:
        return None
    more = count - _KEPT
    moments = list(forward[: begins[2]])
    for shift in range(1, more + 1):
        moments += _moved(forward[begins[1] : begins[2]], repeats, shift, growth)
    moments += _moved(forward[begins[2] :], repeats, more, growth)
    moments += _moved(backward[: returns[0]], repeats, more, growth)
    for shift in range(more, 0, -1):
        moments += _moved(backward[returns[0] : returns[1]], repeats, shift, growth)
    moments += backward[returns[0] :]
    peak = max(moment.high_bytes for moment in moments)
    return StepTrace(tuple(moments), peak, trace.saved_bytes + more * growth)


def _first(moments: Sequence[TraceMoment], event: Event, name: str) -> int:
    """Index of the first such moment; the end where there is none."""
    found = (i for i, m in enumerate(moments) if m.event is event and m.name == name)
    return next(found, len(moments))


def _growth(
    moments: Sequence[TraceMoment], cuts: Sequence[int], repeats: RepeatedBlocks, shift: int
) -> int | None:
    """Bytes by which two neighbouring blocks differ in all their moments; None: in more than that.

    Args:
        moments: Of one direction.
        cuts: Where the two blocks begin, and the one after them.
        repeats: Names them.
        shift: From the index of the first to that of the second.
    """
    start, middle, stop = cuts
    if not start < middle < stop < len(moments):
        return None
    growth = moments[middle].live_bytes - moments[start].live_bytes
    if moments[stop].live_bytes - moments[middle].live_bytes != growth:
        return None
    expected = _moved(moments[start:middle], repeats, shift, growth * shift)
    return growth if _tails(expected) == _tails(moments[middle:stop]) else None


def _tails(moments: Sequence[TraceMoment]) -> list[TraceMoment]:
    """What was the most before a block began is of the block before it."""
    return [dataclasses.replace(moments[0], high_bytes=0), *moments[1:]]


def _moved(
    moments: Sequence[TraceMoment], repeats: RepeatedBlocks, shift: int, growth: int
) -> list[TraceMoment]:
    """The moments of blocks as those of the blocks `shift` places behind them.

    Args:
        moments: Of blocks or of others, whose names stay.
        repeats: Names them.
        shift: Added to their indices.
        growth: Bytes more for each place.
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
    for index in range(_KEPT):
        old = repeats.name(index)
        if name == old or name.startswith(f"{old}."):
            return repeats.name(index + shift) + name[len(old) :]
    return name


@contextmanager
def _without(container: nn.Module, children: Sequence[str]) -> Iterator[None]:
    """Takes children out of a container for a while."""
    kept = dict(container._modules)
    try:
        for name in children:
            del container._modules[name]
        yield
    finally:
        container._modules.clear()
        container._modules.update(kept)
