"""Calls of the user that concern all ranks: full parameters and gradients, uneven forwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from lightning_zero.core.bucket import Bucket
from lightning_zero.core.bucket_access import BucketAccess, access_of, bucket_of, lockstep_of
from lightning_zero.core.lockstep import Lockstep
from lightning_zero.core.writes import is_same_memory, require_full_shape
from lightning_zero.health.together import run_on_all_ranks
from lightning_zero.layout.stage import State
from lightning_zero.tensors.guarded import data_of, has_placement, placement_of
from lightning_zero.tensors.lazy import LazyTensor

__all__ = ["before_collective", "full_grad", "gathered", "uneven_calls"]


@contextmanager
def gathered(
    module_or_parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter],
    writeback: bool = False,
    from_rank: int = 0,
) -> Iterator[None]:
    """Context in which parameters are unsharded, n-D, on every rank. Collective: every rank.

    A bucket is always unsharded with all its parameters. Parameters that no engine holds are left
    unchanged.

    Args:
        module_or_parameters: A module (all its parameters), one parameter or several.
        writeback: Keep changes: at the end the values of one rank are broadcast to every rank, into
            main parameters and parameters. Other ranks may change nothing, or make the same
            changes. The parameters are views of the main parameters, in full precision. Without
            `writeback` they have the values that the module computes with, and must not be changed.
            Inside another such context, the changes are broadcast when the outer one ends. The
            module may be called inside; an optimizer that steps there raises an error.
        from_rank: Rank whose values are kept with `writeback`; the same on every rank.

    Raises:
        RuntimeError: An optimizer step is in progress. Or parameters were changed without
            `writeback`: such changes are dropped if parameters are sharded; otherwise they stay on
            this rank.
        ValueError: There is no rank `from_rank`. With `writeback`, another rank has changed a
            parameter to other values than `from_rank`, or `from_rank` differs by rank: all
            changes are dropped, on every rank. Or data of another shape was assigned to a
            parameter; a RuntimeError on other ranks.
    """
    accesses = _accesses_to(module_or_parameters)
    if accesses:
        accesses[0].lockstep.barrier("lightning_zero.gathered(...)")
    with ExitStack() as stack:
        if writeback:
            buckets = [
                access.bucket for access in accesses if not access.bucket.params.has_views_installed
            ]
            stack.enter_context(_writable(buckets, from_rank))
        else:
            stack.enter_context(_reading(accesses))
        yield


@contextmanager
def _reading(accesses: Sequence[BucketAccess]) -> Iterator[None]:
    """Unshards the buckets; raises on all ranks if one of them was written to. Collective."""
    # By this context: an outer one that pins them finds its own writes.
    watched = [access for access in accesses if not access.bucket.params.num_pins]
    with ExitStack() as stack:
        for access in accesses:
            stack.enter_context(access.reading())
        numbers = [access.bucket.shards.num_writes for access in watched]
        yield

        def check() -> None:
            for access, number in zip(watched, numbers, strict=True):
                if access.bucket.shards.num_writes == number:  # else the engine has written
                    access.check_unchanged()

        if watched:
            lockstep = watched[0].lockstep
            lockstep.barrier("the end of lightning_zero.gathered(...)")
            run_on_all_ranks(check, gather=lockstep.gather_objects)


def full_grad(parameter: nn.Parameter) -> Tensor | None:
    """The full averaged gradient of `parameter`, on every rank. Collective: every rank.

    Returns:
        A new tensor of the parameter's shape in the reduce dtype, the same on every rank; None if
        `parameter.grad` is None.
    """
    if not has_placement(parameter):
        return None if parameter.grad is None else parameter.grad.clone()
    placement = placement_of(parameter)
    bucket = bucket_of(placement)
    lockstep_of(parameter).barrier(f"lightning_zero.full_grad() of {placement.name}")
    bucket.shards.storage.state_offload.check(State.GRAD)
    own = bucket.grads.fetch(placement.index)
    if own is None or bucket.shards.replicates_optim:
        return own if own is None else own.clone()
    own = own.read() if isinstance(own, LazyTensor) else own
    spec = bucket.shard_specs[placement.index]
    return spec.all_gather(own, bucket.plan.name).view(placement.shape)


@contextmanager
def uneven_calls(module: nn.Module) -> Iterator[None]:
    """Context in which ranks may call `module` or its parts a different number of times, or never.

    It is for generation, sampling and the like: no gradients are recorded. A rank that leaves early
    serves the others until all have left. An exception on one rank ends the context on every rank.
    Collective: every rank enters and leaves it, equally often.

    Args:
        module: The trained module or a part of it. Without an engine the context has no effect.

    Raises:
        RuntimeError: The context is entered during a backward.
        PeerFailedError: Another rank failed inside; the text has its error.
    """
    found: dict[Lockstep, None] = {}
    for parameter in module.parameters():
        if has_placement(parameter):
            found[lockstep_of(parameter)] = None
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for access in found:
            stack.enter_context(access.uneven_step())
        yield


def before_collective(module: nn.Module) -> None:
    """Synchronizes all ranks before a collective of your own, in which all take part.

    If ranks use different parts of `module` before a collective in the same forward or backward,
    such as experts that depend on data, stage 3 must first complete their all-gathers. The
    collectives of Lightning do so themselves, those of `torch.distributed` do not. Collective:
    every rank.

    Args:
        module: The trained module or a part of it. Without an engine the call has no effect.

    Raises:
        RuntimeError: Another rank has reached a different call.
    """
    for parameter in module.parameters():
        if has_placement(parameter):
            lockstep_of(parameter).barrier("before_collective()")
            return


def _accesses_to(
    module_or_parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter],
) -> list[BucketAccess]:
    """Access to the buckets of the parameters, in one order on every rank.

    That is the order of their first parameters.
    """
    parameters: Iterable[nn.Parameter]
    if isinstance(module_or_parameters, nn.Module):
        parameters = module_or_parameters.parameters()
    elif isinstance(module_or_parameters, nn.Parameter):
        parameters = [module_or_parameters]
    else:
        parameters = module_or_parameters
    found: dict[BucketAccess, None] = {}
    for parameter in parameters:
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(
                "gathered() expects a module or its parameters, got "
                f"{type(parameter).__name__}; pass module.parameters() or one nn.Parameter."
            )
        if has_placement(parameter):
            found[access_of(placement_of(parameter))] = None
    return list(found)


_DIGESTED = 2**22  # bytes at a time: their places take eight times as much memory
# Digests of changed parameters, by bucket and name: averages have the names of their model, too.
_Digest = tuple[int, int]
_Changes = dict[tuple[int, str], _Digest]


class _WritableBucket:
    """A bucket whose parameters are views of its full main parameters. Collective."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._full = full = bucket.masters.all_gather()
        self._data: list[Tensor] = []  # of the parameters at the end
        self._written: set[int] = set()
        bucket.params.install_views(full.views)

    def uninstall_views(self) -> None:
        pairs = zip(map(data_of, self._bucket.parameters), self._full.views, strict=True)
        # Copies: assigned data may be the memory of another of these parameters.
        self._data = [data if is_same_memory(data, view) else data.clone() for data, view in pairs]
        self._written = self._bucket.writes.counted()
        self._bucket.params.uninstall_views()

    def changes(self) -> dict[str, _Digest]:
        """Digests of the parameters that this rank has changed, by name."""
        views, found = self._full.views, dict[str, _Digest]()
        for index, slot in enumerate(self._bucket.plan.layout.slots):
            if not is_same_memory(self._data[index], views[index]):  # other data was assigned
                views[index].copy_(require_full_shape(self._data[index], slot))
            elif index not in self._written:
                continue
            found[slot.name] = _digest(views[index])
        return found

    def broadcast_from(self, from_rank: int) -> None:
        """Broadcasts the values of rank `from_rank`. Collective."""
        self._bucket.masters.broadcast_from(self._full, from_rank)


@contextmanager
def _writable(buckets: Sequence[Bucket], from_rank: int) -> Iterator[None]:
    if not buckets:
        yield
        return
    control = buckets[0].comm.control
    with ExitStack() as stack:
        writable: list[_WritableBucket] = []
        for bucket in buckets:
            writable.append(_WritableBucket(bucket))
            stack.callback(writable[-1].uninstall_views)
        yield

    def changes() -> tuple[int, _Changes]:
        found = {
            (number, name): digest
            for number, access in enumerate(writable)
            for name, digest in access.changes().items()
        }
        return from_rank, found

    gather = control.gather_objects
    _check_one_writer(run_on_all_ranks(changes, gather=gather, what="take the new values"))
    for access in writable:
        access.broadcast_from(from_rank)
    for bucket in buckets:
        bucket.params.reshard()  # a forward has unsharded it


def _digest(tensor: Tensor) -> _Digest:
    """Sum of the bytes of a contiguous tensor, and their sum weighted by place.

    Equal for equal bits on any device and rank. Synchronizes with the device.
    """
    octets = tensor.detach().reshape(-1).view(torch.uint8)
    places = torch.arange(1, min(octets.numel(), _DIGESTED) + 1, device=octets.device)
    total = weighted = 0
    for number, part in enumerate(octets.split(_DIGESTED)):
        sum_of_part = int(part.sum())
        weighted += int((places[: part.numel()] * part).sum()) + number * _DIGESTED * sum_of_part
        total += sum_of_part
    return total, weighted


def _check_one_writer(by_rank: Sequence[tuple[int, _Changes]]) -> None:
    """Raises on every rank if ranks have made different changes.

    `by_rank`: `from_rank` and the changes of each rank.
    """
    from_ranks = [from_rank for from_rank, _ in by_rank]
    if len(set(from_ranks)) > 1:
        raise ValueError(
            f"gathered(..., writeback=True) was called with different from_rank: {from_ranks} by "
            "rank; give the same on every rank. All changes were dropped."
        )
    if not 0 <= from_ranks[0] < len(by_rank):
        raise ValueError(
            f"gathered() expects a from_rank of 0 to {len(by_rank) - 1}, got {from_ranks[0]}. All "
            "changes were dropped."
        )
    kept = by_rank[from_ranks[0]][1]
    lost: dict[str, list[int]] = {}
    for rank, (_, changes) in enumerate(by_rank):
        for key, digest in changes.items():
            if kept.get(key) != digest:
                lost.setdefault(key[1], []).append(rank)
    if lost:
        first = [f"{name} on {_ranks(ranks)}" for name, ranks in list(lost.items())[:4]]
        more = f" and {len(lost) - len(first)} more" if len(lost) > len(first) else ""
        raise ValueError(
            "parameters were changed inside lightning_zero.gathered(..., writeback=True) to other "
            f"values than those of rank {from_ranks[0]}, which are kept: {', '.join(first)}{more}. "
            "Change them on that rank only, or in the same way on every rank (with the same random "
            "numbers), or name the rank whose values to keep: from_rank=... All changes were "
            "dropped."
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
