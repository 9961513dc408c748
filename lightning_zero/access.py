"""Looks at whole parameters and gradients from outside the training step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from lightning_zero.bucket import Bucket
from lightning_zero.guard import has_placement, placement_of
from lightning_zero.piece import piece_of
from lightning_zero.stage import State
from lightning_zero.written import Fingerprint, is_same_memory, whole_values

__all__ = ["full_grad", "gathered"]


@contextmanager
def gathered(
    module_or_parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter],
    writeback: bool = False,
) -> Iterator[None]:
    """Shows whole parameters on every rank, n-D, while the context lasts. Collective: every rank.

    Parameters come with their bucket, so the whole bucket is gathered. Parameters that no engine
    holds are whole anyway.

    Args:
        module_or_parameters: A module (all its parameters), one parameter or several.
        writeback: Keep changes: at the end rank 0's values go to every rank, into masters and
            parameters. The parameters then show their masters, in full precision. Without it they
            show what the module computes with, and must not be changed.

    Raises:
        RuntimeError: In the middle of an optimizer step; or changes without `writeback`, which are
            dropped where parameters rest as shards; elsewhere nobody has the old values.
        ValueError: Data of another shape was put into a parameter; a RuntimeError on other ranks.
    """
    buckets = _buckets_of(module_or_parameters)
    if buckets:
        buckets[0].lockstep.meet_in_loop("lightning_zero.gathered(...)")
    with ExitStack() as stack:
        for bucket in buckets:
            stack.enter_context(_writable(bucket) if writeback else _readable(bucket))
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
    bucket: Bucket = placement.bucket
    if bucket.grads.fetch(placement.index) is None:
        return None
    mean = bucket.grads.shard
    assert mean is not None
    if not bucket.plan.stage.has_shard(State.OPTIM):
        return bucket.grads.slices[placement.index].clone()
    return bucket.masters.gather_parts(mean).views[placement.index].clone()


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
        if (piece := piece_of(parameter)) is not None:
            piece.look_at_rest(0)  # whole until it is cut again
        elif has_placement(parameter):
            found[placement_of(parameter).bucket] = None
    return list(found)


@contextmanager
def _readable(bucket: Bucket) -> Iterator[None]:
    if bucket.masters.is_shown:
        yield  # an outer context shows it, to be written to
        return
    bucket.wait_for_all_steps()
    was_whole = bucket.is_whole
    if bucket.is_gathered_before_use:
        bucket.gather()
    bucket.finish_gather()
    bucket.pins += 1
    is_first = bucket.prints is None
    if is_first:
        bucket.prints = [Fingerprint(p.data.reshape(-1)) for p in bucket.parameters]
    is_kept = False
    try:
        yield
        if is_first:
            _check_unchanged(bucket)
        is_kept = True
    finally:
        bucket.prints = None if is_first else bucket.prints
        bucket.pins -= 1
        if not is_kept:
            bucket.drop_whole()
        elif not was_whole:
            bucket.release()


def _check_unchanged(bucket: Bucket) -> None:
    """Raises where somebody has written to what `gathered` shows without `writeback`."""
    for index, seen in enumerate(bucket.prints or ()):
        if not seen.matches(bucket.parameters[index].data.reshape(-1)):
            raise RuntimeError(
                f"parameter {bucket.plan.layout.slots[index].name} was changed inside "
                "lightning_zero.gathered(...), which shows values; use gathered(..., "
                "writeback=True), which keeps the changes of rank 0. The change "
                f"{'is dropped' if bucket.is_gathered_before_use else 'stays on this rank'}."
            )


@contextmanager
def _writable(bucket: Bucket) -> Iterator[None]:
    exact = bucket.masters.gather_whole()
    bucket.masters.show(exact.views)
    try:
        yield
    except BaseException:
        bucket.masters.hide()
        raise
    shown = [parameter.data for parameter in bucket.parameters]
    bucket.masters.hide()
    with bucket.comm.control.failing_together():
        for slot, view, data in zip(bucket.plan.layout.slots, exact.views, shown, strict=True):
            if not is_same_memory(data, view):
                view.copy_(whole_values(data, slot))
    bucket.masters.accept(exact)
