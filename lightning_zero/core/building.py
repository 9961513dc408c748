"""Parameters that are sharded while the module that owns them is still being built.

[Note: Sharded as built] Constructors run unchanged, on every rank, on the device. Whenever a
parameter is registered, others that have not been used for a while are reduced to this rank's part,
in CPU memory: each rank cuts its own values, so nothing travels. A parameter in parts is guarded
(tensors/guarded.py): whoever uses it, an `apply(init)` over the whole module say, gets it whole
again, which is a gather in a round of `GlooControlPlane.agree`; ranks that do not ask take part when they
leave the context. Values are those that the constructors set.

[Note: What may be cut] A parameter that nobody else looks at: its storage has no other user, and
it is no argument of the call under way. So views, `.data` and arrays that a constructor keeps stay
valid.

[Note: Equal values] Cut parts make one tensor only where all ranks have built the same values. So
they draw the same random numbers while they build, and compare sums over the bits at the end. What
they have registered, in which order and of which shape, is compared before anything is gathered
whose size depends on it: see [Note: Consistency] in comm/consistency.py.

Alternatives considered: building on the meta device and calling `reset_parameters` gives other
values than constructors that initialise in their own way; taking rank 0's values for each
parameter as it is cut would wait for rank 0 at every layer.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.consistency import compare
from lightning_zero.comm.watchdog import Watchdog
from lightning_zero.core.writes import sum_of_bits
from lightning_zero.tensors.guarded import (
    Placement,
    guard,
    has_placement,
    placement_of,
    set_placement,
    unguard,
)

__all__ = ["Building", "PartialParameter", "move_all_but_parameters", "partial_of"]


class PartialParameter:
    """One parameter that is being built: whole, or this rank's part of it."""

    def __init__(self, building: Building, name: str, index: int, parameter: nn.Parameter) -> None:
        self.name = name  # for messages, such as `Linear.weight`
        self.index = index  # in the order of registration, the same on every rank
        self.shape = parameter.shape  # of the whole
        # 1-D, ceil(numel / ranks), on the CPU, zeros at the end; None while it is whole.
        self.part: Tensor | None = None
        self.bits = 0  # sum over those of the whole values that were cut last
        # By which ranks compare that they have built alike.
        self.facts = (
            f"{name}, number {index + 1} of what configure_model has built",
            {"shape": str(tuple(parameter.shape)), "dtype": str(parameter.dtype)},
        )
        self._building = building
        self._parameter = weakref.ref(parameter)

    @property
    def parameter(self) -> nn.Parameter | None:
        return self._parameter()  # unless nobody has it any more

    # What a guarded parameter asks of what holds it:

    @property
    def device(self) -> torch.device:
        return self._building.device

    def sharded_data(self, index: int) -> Tensor:
        """`parameter.data`: the whole values, gathered. Collective."""
        self._building.unshard(self)
        parameter = self.parameter
        assert parameter is not None
        return parameter.data

    def wait_for_update(self) -> None:
        """`parameter.data` is about to be set, perhaps to itself. Collective."""
        self._building.unshard(self)

    def assign_data(self, index: int, values: Tensor) -> None:
        """`parameter.data = values`. Collective."""
        self.sharded_data(index).copy_(values)

    def copy_plain(self, index: int, *, is_for_file: bool) -> nn.Parameter:
        """A copy of the parameter. Collective."""
        values = self.sharded_data(index)
        parameter = self.parameter
        assert parameter is not None
        return nn.Parameter(values.detach().clone(), parameter.requires_grad)

    def equals(self, one: Tensor, other: Tensor) -> bool:
        """Not reached: who compares values uses them first, and they are whole then."""
        raise AssertionError(self.name)

    def read_into(self, view: Tensor) -> None:
        """Copies the whole values into `view`; the part is freed. Collective."""
        view.copy_(self._building.gather(self).view(self.shape))
        self._building.free(self)


def partial_of(parameter: Tensor) -> PartialParameter | None:
    """The piece of a parameter that is in parts; None where it is whole or an engine holds it."""
    holder = placement_of(parameter).bucket if has_placement(parameter) else None
    return holder if isinstance(holder, PartialParameter) else None


def move_all_but_parameters(root: nn.Module, device: torch.device) -> None:
    """Moves what has memory: buffers, and what modules move in an `_apply` of their own."""

    def move(tensor: Tensor) -> Tensor:
        stays = tensor.is_meta or isinstance(tensor, nn.Parameter)
        return tensor if stays else tensor.to(device)

    # Metrics keep their state in plain attributes.
    with _hidden_pieces(root):
        root._apply(move)


@contextmanager
def _hidden_pieces(root: nn.Module) -> Iterator[None]:
    """Around `Module._apply` of what is no parameter: it would set `.data` of every one."""
    taken = [
        (module, name, parameter)
        for module in root.modules()
        if type(module)._apply is nn.Module._apply  # recurrent ones keep lists of their parameters
        for name, parameter in module._parameters.items()
        if parameter is not None and partial_of(parameter) is not None
    ]
    for module, name, _ in taken:
        module._parameters[name] = None
    try:
        yield
    finally:
        for module, name, parameter in taken:
            module._parameters[name] = parameter


_ATTRIBUTE = "_zero_piece"
_WHOLE_NUMEL = 2**20  # whole at a time, besides the module that is being built
_SMALL_NUMEL = 2**12  # not worth cutting
_DONE = 2**31  # the request of a rank that asks for nothing


class Building:
    """The parameters of a module that is being built, until an engine takes them over.

    Every rank makes it, at the same point. Collective. The module is built on `device`, where it
    will compute.
    """

    def __init__(
        self,
        device: torch.device,
        timeout: timedelta | None = None,
        *,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.device = device
        self._comm = Communicator(device, timeout=timeout, watchdog=watchdog)
        self._pieces: list[PartialParameter] = []
        self._whole: dict[PartialParameter, None] = {}  # the last used at the end
        self._current: nn.Module | None = None  # the module that registers parameters
        self._is_busy = False  # calls of torch are our own

    # ---------------------------------------------------------------- contexts

    @contextmanager
    def track_parameters(self) -> Iterator[None]:
        """Around constructors. Collective."""
        handles = [
            torch_module.register_module_parameter_registration_hook(self._on_parameter),
            torch_module.register_module_module_registration_hook(self._on_module),
        ]
        try:
            with self._same_random_numbers(), self.resharding():
                yield
            self._meet()
        except BaseException:
            self.abort()
            raise
        finally:
            self._current = None
            for handle in handles:
                handle.remove()

    def resharding(self) -> AbstractContextManager[object]:
        """Around code that uses parameters one after another: what it has used is cut again."""
        return _Uses(self)

    @contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        own = _random_states(self.device)
        first = self._comm.control.broadcast_object(own)
        differs = any(not torch.equal(a, b) for a, b in zip(own, first, strict=True))
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=differs):
            if differs:
                torch.set_rng_state(first[0])
                for state in first[1:]:
                    torch.cuda.set_rng_state(state, self.device)
            yield

    def finalize(self) -> None:
        """Before an engine takes over: the same parameters are in parts on every rank. Collective.

        Raises where ranks have built different parameters or values.
        """
        self._meet()
        compare(self._comm.control, dict(piece.facts for piece in self._pieces))
        in_parts = self._comm.control.union([piece.part is not None for piece in self._pieces])
        for piece, is_in_parts in zip(self._pieces, in_parts, strict=True):
            if is_in_parts and piece.part is None and piece.parameter is not None:
                self._cut(piece, piece.parameter)
        bits = [piece.bits * is_in for piece, is_in in zip(self._pieces, in_parts, strict=True)]
        lowest = self._comm.control.min_ints([*bits, *(-value for value in bits)])
        for piece, low, high in zip(self._pieces, lowest, lowest[len(bits) :], strict=False):
            if low != -high:
                raise ValueError(
                    f"configure_model has built different values on different ranks, first in "
                    f"{piece.name} of shape {tuple(piece.shape)}; let it do the same on every "
                    "rank (random numbers of torch are the same by themselves)."
                )
        self._is_busy = True  # nothing is cut any more
        for piece in self._pieces:
            if piece.parameter is not None:
                piece.parameter.__dict__.pop(_ATTRIBUTE, None)

    def close(self) -> None:
        """The engine has taken all over, or there was nothing to cut. Local."""
        self._comm.close()

    def abort(self) -> None:
        """Makes the other ranks fail where they wait for this one. Local."""
        self._comm.abort(sys.exc_info()[1])

    # ---------------------------------------------------------------- registration

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        self._current = module
        self._track(f"{type(module).__name__}.{name}", parameter)
        self._cut_the_rest(module._parameters.values())

    def _on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None:
            return
        for key, parameter in child.named_parameters():  # copies have not been registered
            self._track(f"{type(child).__name__}.{key}", parameter)
        self._cut_the_rest(self._current._parameters.values() if self._current else ())

    def _track(self, name: str, parameter: nn.Parameter) -> None:
        if (
            type(parameter) is not nn.Parameter
            or _ATTRIBUTE in parameter.__dict__
            or parameter.is_meta
            or not parameter.is_floating_point()
            or parameter.layout is not torch.strided
            or parameter.numel() < _SMALL_NUMEL
        ):
            return
        piece = PartialParameter(self, name, len(self._pieces), parameter)
        parameter.__dict__[_ATTRIBUTE] = piece
        self._pieces.append(piece)
        self._whole[piece] = None

    # ---------------------------------------------------------------- cutting

    def _cut_the_rest(self, kept: Any) -> None:
        """Cuts what was used longest ago, beyond what may be whole, but none of `kept`."""
        if self._is_busy:
            return
        spared = {id(parameter) for parameter in kept}
        numel = sum(piece.shape.numel() for piece in self._whole)
        with self._busy():
            for piece in list(self._whole):
                if numel <= _WHOLE_NUMEL:
                    return
                parameter = piece.parameter
                if parameter is None:
                    del self._whole[piece]
                elif id(parameter) in spared or not _is_ours_alone(parameter):
                    continue
                else:
                    self._cut(piece, parameter)
                numel -= piece.shape.numel()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        was_busy, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = was_busy

    def _cut(self, piece: PartialParameter, parameter: nn.Parameter) -> None:
        piece.shape = parameter.shape
        flat = parameter.detach().reshape(-1)
        piece.bits = int(sum_of_bits(flat))
        piece.part = self._part_of(flat)
        placement = Placement(
            piece.name,
            parameter.shape,
            parameter.dtype,
            type(parameter),
            piece,
            0,
            lambda _: self.unshard(piece),
        )
        set_placement(parameter, placement)
        parameter.data = piece.part
        guard([parameter])
        self._whole.pop(piece, None)

    def _part_of(self, flat: Tensor) -> Tensor:
        numel = -(-flat.numel() // self._comm.size)
        own = flat[numel * self._comm.rank :][:numel]
        part = torch.zeros(numel, dtype=flat.dtype)
        part[: own.numel()].copy_(own)
        return part

    # ---------------------------------------------------------------- use

    def unshard(self, piece: PartialParameter) -> None:
        """Gathers `piece`, and what other ranks ask for before. Collective."""
        with self._busy():
            while piece.part is not None:
                self._round(piece.index)

    def used(self, parameters: list[nn.Parameter]) -> None:
        """Before a call with `parameters`, which must stay whole in it."""
        for parameter in parameters:
            piece = parameter.__dict__.get(_ATTRIBUTE)
            if piece in self._whole:
                self._whole[piece] = self._whole.pop(piece)
        current = self._current._parameters.values() if self._current is not None else ()
        self._cut_the_rest([*parameters, *current])

    def free(self, piece: PartialParameter) -> None:
        """Its values are elsewhere now. Local."""
        parameter = piece.parameter
        assert parameter is not None
        piece.part = None
        set_placement(parameter, None)
        unguard(parameter)
        self._whole[piece] = None

    def gather(self, piece: PartialParameter) -> Tensor:
        """All values of `piece`: 1-D, new, on the device. Collective."""
        part, parameter = piece.part, piece.parameter
        if part is None:
            if parameter is None:
                raise RuntimeError(f"another rank uses {piece.name}, which this one has dropped.")
            part = self._part_of(parameter.detach().reshape(-1))
        numel = self._comm.size * part.numel()
        whole = torch.empty(numel, dtype=part.dtype, device=self.device)
        self._comm.all_gather(whole, piece.name, source=part).wait()
        return whole[: piece.shape.numel()]

    def _round(self, request: int) -> int:
        agreed = self._comm.control.agree(request)
        if agreed < _DONE:
            # Before a gather: it has the same shape on every rank, where it exists.
            compare(self._comm.control, dict(piece.facts for piece in self._pieces[agreed:][:1]))
            piece = self._pieces[agreed]
            values, parameter = self.gather(piece), piece.parameter
            if piece.part is not None and parameter is not None:
                self.free(piece)
                parameter.data = values.view(piece.shape)
        return agreed

    def _meet(self) -> None:
        """Takes part in what other ranks still ask for, until all are done."""
        while self._round(_DONE) != _DONE:
            pass


class _Uses(TorchFunctionMode):
    """Sees every call of torch, and so which parameters must not be cut before it ends."""

    def __init__(self, building: Building) -> None:
        super().__init__()
        self._building = building

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, nn.Parameter)]
        if used:
            self._building.used(used)
        return func(*args, **kwargs)


def _is_ours_alone(parameter: nn.Parameter) -> bool:
    """Nobody else looks at its storage. See [Note: What may be cut]."""
    if parameter.grad is not None or parameter.layout is not torch.strided:
        return False
    storage = parameter.untyped_storage()
    num_users: int = torch._C._storage_Use_Count(storage._cdata)
    return num_users <= 2  # the parameter, and `storage` here


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states
