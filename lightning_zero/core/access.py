"""Looks at whole parameters and gradients from outside the training step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from lightning_zero.comm.world import failing_together
from lightning_zero.core.bucket import Bucket, bucket_of
from lightning_zero.core.building import partial_of
from lightning_zero.core.writes import Fingerprint, is_same_memory, require_full_shape
from lightning_zero.tensors.guarded import data_of, has_placement, placement_of

__all__ = ["full_grad", "gathered"]


@contextmanager
def gathered(
    module_or_parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter],
    writeback: bool = False,
    from_rank: int = 0,
) -> Iterator[None]:
    """Shows whole parameters on every rank, n-D, while the context lasts. Collective: every rank.

    Parameters come with their bucket, so the whole bucket is gathered. Parameters that no engine
    holds are whole anyway.

    Args:
        module_or_parameters: A module (all its parameters), one parameter or several.
        writeback: Keep changes: at the end the values of one rank go to every rank, into masters
            and parameters. Other ranks may change nothing, or the same in the same way. The
            parameters show their masters, in full precision. Without `writeback` they show what
            the module computes with, and must not be changed.
        from_rank: With `writeback`, the rank whose values count; the same on every rank.

    Raises:
        RuntimeError: In the middle of an optimizer step; or changes without `writeback`, which are
            dropped where parameters rest as shards; elsewhere nobody has the old values.
        ValueError: There is no rank `from_rank`. With `writeback`, another rank has changed a
            parameter to other values than `from_rank`, or ranks say different `from_rank`: all
            changes are dropped, on every rank. Or data of another shape was put into a parameter;
            a RuntimeError on other ranks.
    """
    buckets = _buckets_of(module_or_parameters)
    if buckets:
        buckets[0].lockstep.barrier("lightning_zero.gathered(...)")
    with ExitStack() as stack:
        if writeback:
            stack.enter_context(_writable(buckets, from_rank))
        else:
            for bucket in buckets:
                stack.enter_context(_readable(bucket))
        yield


def full_grad(parameter: nn.Parameter) -> Tensor | None:
    """The whole mean gradient of `parameter`, on every rank. Collective: every rank.

    Returns:
        A new tensor of the parameter's shape in the reduce dtype; None where `parameter.grad` is
        None, the same on every rank.
    """
    if not has_placement(parameter):
        return None if parameter.grad is None else parameter.grad.clone()
    placement = placement_of(parameter)
    bucket = bucket_of(placement)
    bucket.lockstep.barrier(f"lightning_zero.full_grad() of {placement.name}")
    if bucket.grads.fetch(placement.index) is None:
        return None
    mean = bucket.grads.main_grad
    assert mean is not None
    if bucket.replicates_optim:
        return bucket.grads.slices[placement.index].clone()
    return bucket.masters.all_gather_values(mean).views[placement.index].clone()


def _buckets_of(
    module_or_parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter],
) -> list[Bucket]:
    """Buckets in a rank-independent order: that of the first parameter of each."""
    parameters: Iterable[nn.Parameter]
    if isinstance(module_or_parameters, nn.Module):
        parameters = module_or_parameters.parameters()
    elif isinstance(module_or_parameters, nn.Parameter):
        parameters = [module_or_parameters]
    else:
        parameters = module_or_parameters
    found: dict[Bucket, None] = {}
    for parameter in parameters:
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(
                "gathered() expects a module or its parameters, got "
                f"{type(parameter).__name__}; pass module.parameters() or one nn.Parameter."
            )
        if (piece := partial_of(parameter)) is not None:
            piece.sharded_data(0)  # whole until it is cut again
        elif has_placement(parameter):
            found[bucket_of(placement_of(parameter))] = None
    return list(found)


@contextmanager
def _readable(bucket: Bucket) -> Iterator[None]:
    if bucket.masters.has_views_installed:
        yield  # an outer context shows it, to be written to
        return
    bucket.wait_for_all_steps()
    was_whole = bucket.is_unsharded
    if bucket.shards_params:
        bucket.unshard()
    bucket.wait_for_unshard()
    num_holders_before = bucket.num_holders(num_params=len(bucket.parameters))
    bucket.num_pins += 1
    is_first = bucket.fingerprints is None
    if is_first:
        bucket.fingerprints = [Fingerprint(data_of(p).reshape(-1)) for p in bucket.parameters]
    is_kept = False
    try:
        yield
        if is_first:
            _check_unchanged(bucket)
        is_kept = True
    finally:
        bucket.fingerprints = None if is_first else bucket.fingerprints
        bucket.num_pins -= 1
        if not is_kept:
            bucket.discard_unsharded()
        elif not was_whole:
            bucket.reshard(num_holders_before=num_holders_before)


def _check_unchanged(bucket: Bucket) -> None:
    """Raises where somebody has written to what `gathered` shows without `writeback`."""
    for index, seen in enumerate(bucket.fingerprints or ()):
        if not seen.matches(data_of(bucket.parameters[index]).reshape(-1)):
            raise RuntimeError(
                f"parameter {bucket.plan.layout.slots[index].name} was changed inside "
                "lightning_zero.gathered(...), which shows values; use gathered(..., "
                "writeback=True), which keeps the changes of one rank. The change "
                f"{'is dropped' if bucket.shards_params else 'stays on this rank'}."
            )


# Digests of changed parameters, by bucket and name: averages have the names of their model.
_Changes = dict[tuple[int, str], bytes]


class _Shown:
    """A bucket whose parameters show their masters, whole, to be written to. Collective."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._exact = bucket.masters.all_gather()
        self._prints = [Fingerprint(view.reshape(-1)) for view in self._exact.views]
        self._data: list[Tensor] = []  # what the parameters had in the end
        bucket.masters.install_views(self._exact.views)

    def hide(self) -> None:
        pairs = zip(map(data_of, self._bucket.parameters), self._exact.views, strict=True)
        # Copies: what was put in may be the memory of another parameter that is shown.
        self._data = [data if is_same_memory(data, view) else data.clone() for data, view in pairs]
        self._bucket.masters.uninstall_views()

    def changes(self) -> dict[str, bytes]:
        """By name, a digest of every parameter whose values or data this rank has changed."""
        changed: dict[str, bytes] = {}
        for index, slot in enumerate(self._bucket.plan.layout.slots):
            view, data = self._exact.views[index], self._data[index]
            if not is_same_memory(data, view):  # something was put in its place
                view.copy_(require_full_shape(data, slot))
            flat = view.reshape(-1)
            if not self._prints[index].matches(flat):
                changed[slot.name] = Fingerprint(flat).digest()
        return changed

    def keep(self, from_rank: int) -> None:
        """Takes the values of rank `from_rank`. Collective."""
        self._bucket.masters.broadcast_from(self._exact, from_rank)


@contextmanager
def _writable(buckets: Sequence[Bucket], from_rank: int) -> Iterator[None]:
    if not buckets:
        yield
        return
    control = buckets[0].comm.control
    with ExitStack() as hiding:
        shown: list[_Shown] = []
        for bucket in buckets:
            shown.append(_Shown(bucket))
            hiding.callback(shown[-1].hide)
        yield
    changes: _Changes = {}
    with failing_together("take the new values", control.gather_objects):
        for number, one in enumerate(shown):
            changes.update({(number, name): of for name, of in one.changes().items()})
    _check_one_writer(control.gather_objects((from_rank, changes)))
    for one in shown:
        one.keep(from_rank)


def _check_one_writer(told: Sequence[tuple[int, _Changes]]) -> None:
    """Raises, alike on every rank, where more than the changes of one rank would be kept.

    `told`: by rank, its `from_rank` and what it has changed.
    """
    asked = [from_rank for from_rank, _ in told]
    if len(set(asked)) > 1:
        raise ValueError(
            f"gathered(..., writeback=True) was called with different from_rank: {asked} by rank; "
            "say the same on every rank. All changes were dropped."
        )
    if not 0 <= asked[0] < len(told):
        raise ValueError(
            f"gathered() expects a from_rank of 0 to {len(told) - 1}, got {asked[0]}. All changes "
            "were dropped."
        )
    kept = told[asked[0]][1]
    lost: dict[str, list[int]] = {}
    for rank, (_, changes) in enumerate(told):
        for key, digest in changes.items():
            if kept.get(key) != digest:
                lost.setdefault(key[1], []).append(rank)
    if lost:
        first = [f"{name} on {_ranks(ranks)}" for name, ranks in list(lost.items())[:4]]
        more = f" and {len(lost) - len(first)} more" if len(lost) > len(first) else ""
        raise ValueError(
            "parameters were changed inside lightning_zero.gathered(..., writeback=True) to other "
            f"values than those of rank {asked[0]}, which count: {', '.join(first)}{more}. Change "
            "them on that rank only, or alike on every rank (with the same random numbers), or say "
            "whose values count: from_rank=... All changes were dropped."
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
