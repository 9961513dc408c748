"""A trace of a deep model from one of a few of its blocks.

[Note: Stretched] A language model repeats one block dozens of times, and a step of it on fake
tensors takes as many times as long. Where all blocks of a container have one class and equal
parameters, only the first four are run. The second and the third must have the same moments, with
activations that differ by a constant; then those of the third are repeated. Else, or where a model
cannot run with fewer blocks, all of them are run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from lightning_zero.planner.trace import Event, Moment, StepTrace

__all__ = ["Repeats", "find_repeats", "stretched"]

_KEPT = 4  # first, two to compare, last
_LEAST = 8  # below this the whole is run at once


@dataclass(frozen=True)
class Repeats:
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


def find_repeats(module: nn.Module, units: Sequence[str]) -> Repeats | None:
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
            return Repeats(name, tuple(children))
    return None


def _likeness(module: nn.Module) -> tuple[object, ...]:
    parameters = [
        (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()
    ]
    return type(module), tuple(parameters)


def stretched(
    module: nn.Module, repeats: Repeats, run: Callable[[Sequence[str]], StepTrace]
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
    turn = next(i for i, m in enumerate(trace.moments) if m.event is Event.TURN)
    forward, backward = trace.moments[:turn], trace.moments[turn:]
    begins = [_first(forward, Event.FORWARD, repeats.name(i)) for i in (1, 2, 3)]
    returns = [_first(backward, Event.BACKWARD, repeats.name(i)) for i in (2, 1, 0)]
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


def _first(moments: Sequence[Moment], event: Event, name: str) -> int:
    """Index of the first such moment; the end where there is none."""
    found = (i for i, m in enumerate(moments) if m.event is event and m.name == name)
    return next(found, len(moments))


def _growth(
    moments: Sequence[Moment], cuts: Sequence[int], repeats: Repeats, shift: int
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


def _tails(moments: Sequence[Moment]) -> list[Moment]:
    """What was the most before a block began is of the block before it."""
    return [dataclasses.replace(moments[0], high_bytes=0), *moments[1:]]


def _moved(moments: Sequence[Moment], repeats: Repeats, shift: int, growth: int) -> list[Moment]:
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


def _renamed(name: str, repeats: Repeats, shift: int) -> str:
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
