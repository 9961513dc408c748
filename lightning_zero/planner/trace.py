"""One training step on fake tensors: when which unit is used, and what activations take meanwhile.

[Note: Live bytes] Fake tensors have storages of the right size without memory. A dispatch mode sees
every result that is made, counts its storage, and is told by a finalizer when the last tensor on it
has gone, whoever held it: a local variable, or autograd for backward. So the count is what an
allocator would be asked for, without its rounding, but for the inside of kernels. Attention counts
as one fused kernel. Parameters are not counted; the engine holds them elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
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
from torch.utils.checkpoint import checkpoint

from lightning_zero.layout.plan import parameters_by_name

__all__ = ["Event", "Moment", "StepTrace", "trace_step"]


class Event(Enum):
    """What happens in a step, to a unit or to a parameter."""

    FORWARD = "a unit's forward begins"
    FORWARD_END = "a unit's forward has ended"
    TURN = "backward begins"
    BACKWARD = "backward reaches an output of a unit"
    BACKWARD_END = "the gradients of all inputs of a unit are there"
    GRAD = "the gradient of a parameter is there"
    END = "backward has ended"


@dataclass(frozen=True)
class Moment:
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

    moments: tuple[Moment, ...]
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
    recorder = _Recorder()
    under = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    was_training = {m: m.training for m in module.modules()}
    with fake, _fake_tensors(module, dtypes or {}), torch.random.fork_rng(devices=[]):
        try:
            with _hooked(module, units, checkpointed, recorder), recorder.counter:
                with under, torch.enable_grad():
                    loss = step(module.train())
                saved_bytes = recorder.counter.live
                recorder.take(Event.TURN)
                loss.backward()
                del loss
                recorder.take(Event.END)
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


class _Recorder:
    """Writes down moments."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.counter = _Counter()

    def take(self, event: Event, name: str = "", *, is_awaited: bool = False) -> None:
        """Something happens now."""
        counter = self.counter
        moment = Moment(event, name, counter.live, counter.high, is_awaited)
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
    module: nn.Module, units: Collection[str], checkpointed: Collection[str], recorder: _Recorder
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
    patched = [module.get_submodule(name) for name in checkpointed]
    for child in patched:
        child.__dict__["forward"] = _checkpointed(child.forward)
    try:
        yield
    finally:
        for child in patched:
            del child.__dict__["forward"]
        for handle in handles:
            handle.remove()


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def _before(name: str, recorder: _Recorder) -> Any:
    def hook(child: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        inputs = [t for t in leaves if _wants_grad(t) and not t.is_leaf]
        recorder.take(Event.FORWARD, name, is_awaited=bool(inputs))
        if inputs:
            register_multi_grad_hook(inputs, lambda _: recorder.take(Event.BACKWARD_END, name))

    return hook


def _after(name: str, recorder: _Recorder) -> Any:
    def hook(child: nn.Module, args: Any, output: Any) -> None:
        recorder.take(Event.FORWARD_END, name)
        for leaf in tree_leaves(output):
            if _wants_grad(leaf) and not leaf.is_leaf:
                leaf.register_hook(lambda _: recorder.take(Event.BACKWARD, name))

    return hook


def _on_gradient(name: str, recorder: _Recorder) -> Any:
    def hook(parameter: nn.Parameter) -> None:
        recorder.take(Event.GRAD, name)
        parameter.grad = None  # the engine takes it over
        recorder.counter.high = recorder.counter.live

    return hook


def _wants_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
