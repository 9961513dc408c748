"""Sharded tensors that the user holds when an engine closes."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch

from lightning_zero.tensors.shard_spec import ShardSpec
from tests.support.loops import batch, build, engine_for
from tests.support.ranks import run_ranks

ENDED = "its engine is closed; it did not become a full tensor, because"


def _trained(rank, stage, **options):
    module, optimizer = build()
    engine = engine_for(module, [optimizer], stage, **options)
    engine.backward(module(batch(rank, 0)))
    engine.step()
    return module, optimizer, engine


def _errors(tensor):
    """Error texts of uses of a tensor by this rank alone."""
    texts = []
    for use in (
        lambda: tensor + 1,
        lambda: tensor.view(-1).mul_(2),
        tensor.full_tensor,
        tensor.sum,
        tensor.tolist,
        lambda: tensor[0],
        lambda: torch.zeros(tensor.shape).copy_(tensor),
        lambda: pickle.dumps(tensor),
        lambda: copy.deepcopy(tensor),
    ):
        with pytest.raises(RuntimeError) as raised:
            use()
        texts.append(str(raised.value))
    return texts


def _hold_some(rank, world_size):
    """What some ranks have kept or created alone cannot be gathered."""
    module, _, engine = _trained(rank, 3)
    head, first = module.gpt.head.weight, next(module.parameters())
    last = list(module.parameters())[-2]
    held = head.detach().clone()
    kept = [head.detach() * 2, head.detach() * 3][min(rank, 1) :]  # the first is dropped on rank 1
    created = [first.detach() * 2] if rank == 0 else []
    created.append(first.detach() * 3)
    referred = last.detach().clone()
    reference = weakref.ref(referred)
    engine.close()
    assert type(held) is type(kept[-1]) is torch.Tensor
    assert torch.equal(held, head)
    assert torch.equal(kept[-1], head * 3)
    for tensor in [*kept[:-1], *created, referred]:
        texts = _errors(tensor)
        assert all(ENDED in text for text in texts), texts
        assert ("weak reference" if tensor is reference() else "some rank") in texts[0]


def _share_memory(rank, world_size):
    module, _, engine = _trained(rank, 3)
    head = module.gpt.head.weight
    held = head.detach().clone()
    flat, other = held.view(-1), head.detach().clone()
    data, same = head.data, head.data.detach()
    own = torch.nn.Parameter(head.detach() * 2, requires_grad=False)
    trained = (head.detach() * 2).requires_grad_()
    engine.close()
    assert type(own) is torch.nn.Parameter
    assert (own.requires_grad, trained.requires_grad) == (False, True)
    assert torch.equal(own, trained)
    assert {type(t) for t in (held, flat, other, data, same)} == {torch.Tensor}
    held.zero_()
    same.fill_(2)
    assert not flat.any()
    assert torch.equal(other, head)
    assert (data == 2).all()
    assert flat.untyped_storage().nbytes() == flat.nbytes


def _hold_nothing(rank, world_size):
    """Tensors of the engine itself, and those that the user has dropped, are not gathered."""
    all_gather = ShardSpec.all_gather
    for stage in (1, 2, 3):
        module, optimizer, engine = _trained(rank, stage)
        engine.zero_grad()
        engine.backward(module(batch(rank, 1)))
        engine.step()
        for parameter in module.parameters():
            parameter.grad.abs().sum()
            (parameter.data * 2).max()
            optimizer.state[parameter]["exp_avg"].norm()
        gathers = []
        ShardSpec.all_gather = lambda spec, *args: gathers.append(args)  # noqa: B023
        engine.close()
        assert gathers == []
        ShardSpec.all_gather = all_gather


def _drop(rank, world_size):
    module, _, engine = _trained(rank, 3)
    held = module.gpt.head.weight.detach().clone()
    engine.close(keep_parameters=False)
    assert "the parameters were dropped" in _errors(held)[0]


def _leave_no_memory(rank, world_size):
    from lightning_zero.engine import held as ends

    module, _, engine = _trained(rank, 3)
    held = module.gpt.head.weight.detach().clone()
    available, ends.available_memory_bytes = (
        ends.available_memory_bytes,
        lambda: 0 if rank else 2**40,
    )
    engine.close()
    ends.available_memory_bytes = available
    assert "more than half of the free CPU memory" in _errors(held)[0]


def _abort(rank, world_size):
    module, _, engine = _trained(rank, 3)
    held = module.gpt.head.weight.detach().clone()
    engine.abandon("a rank failed")
    assert "a rank failed" in _errors(held)[0]


def _share_on_one_rank(rank, world_size):
    module, _, engine = _trained(rank, 3)
    held = module.gpt.head.weight.detach().clone()
    other = held.clone() if rank else held.detach()
    engine.close()
    assert type(held) is torch.Tensor
    with pytest.raises(RuntimeError, match="some rank does not hold it"):
        other.sum()


CASES = (
    _share_memory,
    _share_on_one_rank,
    _hold_nothing,
    _hold_some,
    _drop,
    _leave_no_memory,
    _abort,
)


def _run_cases(rank, world_size):
    for case in CASES:
        case(rank, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_all_ranks_hold_becomes_full_at_the_end_and_anything_else_is_an_error(world_size):
    run_ranks(world_size, _run_cases)
