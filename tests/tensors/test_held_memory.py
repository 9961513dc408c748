"""Views of unsharded parameters that a user keeps: their memory is not reused or freed."""

from __future__ import annotations

import io
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zero import Engine, ZeroConfig, gathered
from lightning_zero.health.failures import DESYNC_HINT
from tests.core.test_swapped_data import Net, nothing
from tests.support.ranks import RankError
from tests.support.warm import run_ranks

_reads_freed_memory = pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="needs a newer torch than 2.11"
)
X = torch.linspace(-1, 1, 24).view(2, 12)


def _built(stage, **settings):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    engine = Engine(net, [optimizer], ZeroConfig(stage=stage, reduce_bucket_size=100, **settings))
    return net, engine


def _train(net, engine, **kwargs):
    loss = net(X)
    engine.backward(loss, **kwargs)
    engine.step()
    engine.zero_grad()
    return loss


def _values(net):
    with gathered(net):
        return {name: value.clone() for name, value in net.state_dict().items()}


def _alias(rank, world_size, stage, overlaps):
    net, engine = _built(stage, overlap_step=overlaps)
    aliases = {name: p.detach() for name, p in net.named_parameters()}
    state, row = net.state_dict(), net.blocks[1].weight[0]
    for _ in range(3):
        _train(net, engine)
        seen = {name: alias.clone() for name, alias in aliases.items()}
        seen_row, seen_state = row.detach().clone(), {n: v.clone() for n, v in state.items()}
        values = _values(net)
        assert torch.equal(seen_row, values["blocks.1.weight"][0])
        for name, value in values.items():
            assert torch.equal(seen[name], value), name
            assert torch.equal(seen_state[name], value), name
    engine.close()
    assert torch.equal(state["blocks.1.weight"], values["blocks.1.weight"])


@pytest.mark.default_cases("1-True")
@pytest.mark.parametrize(("stage", "overlaps"), [(1, False), (2, False), (1, True)])
def test_views_of_an_unsharded_parameter_show_the_new_values_when_the_step_returns(stage, overlaps):
    run_ranks(2, _alias, stage, overlaps)


def _keep_views_of_a_step(rank, world_size):
    net, engine = _built(3)
    before = _values(net)
    kept = {}

    def keep(block):
        kept.update(
            detached=block.weight.detach(),
            data=block.weight.data,
            row=block.weight[3],
            array=net.blocks[2].bias.detach().numpy() if kept else None,
        )

    net.blocks[1].after = keep
    loss = net(X)
    net.blocks[1].after = nothing
    between = [kept[key].sum().item() for key in ("detached", "data", "row")]
    with pytest.warns(
        UserWarning, match=r"a view of parameter blocks\.1\.weight outlives the step"
    ):
        engine.backward(loss)
    engine.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            _train(net, engine)
    assert torch.equal(kept["detached"], before["blocks.1.weight"])
    assert torch.equal(kept["data"], before["blocks.1.weight"])
    assert torch.equal(kept["row"], before["blocks.1.weight"][3])
    engine.close()
    assert torch.equal(kept["detached"], before["blocks.1.weight"])
    return between


@_reads_freed_memory
def test_views_of_a_unit_keep_the_values_of_their_step_with_one_warning():
    for between in run_ranks(2, _keep_views_of_a_step):
        assert not any(value == 0 for value in between)  # values or NaN


def _keep_views_of_gathered(rank, world_size, is_in_step):
    net, engine = _built(3)
    before = _values(net)
    _train(net, engine)
    _train(net, engine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if is_in_step else "error")
        if is_in_step:
            loss = net(X)
        with gathered(net):
            kept = {name: p.detach() for name, p in net.named_parameters()}
            state = net.state_dict()
            now = {name: value.clone() for name, value in state.items()}
            data = net.blocks[1].weight.data
        file = io.BytesIO()
        torch.save(state, file)
        if is_in_step:
            engine.backward(loss)
            engine.step()
        _train(net, engine)
    engine.close()
    saved = torch.load(io.BytesIO(file.getvalue()))
    for name, value in now.items():
        assert not torch.equal(value, before[name])
        assert torch.equal(saved[name], value), name
        assert torch.equal(kept[name], value), name
    assert torch.equal(data, now["blocks.1.weight"])


@pytest.mark.parametrize("is_in_step", [False, True])
def test_views_taken_inside_gathered_keep_their_values_and_can_be_saved(is_in_step):
    run_ranks(2, _keep_views_of_gathered, is_in_step)


class Checkpointed(Net):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False).tanh()
        return x.square().sum()


def _keep_buffers(rank, world_size):
    """By kind of training: whether each unit still has its first buffer, freed."""
    found = {}

    def measure(kind, net, engine, train):
        buffers = [bucket.unsharded_params.tensor for bucket in engine.buckets]
        held = [train() for _ in range(3)]
        pairs = zip(buffers, engine.buckets, strict=True)
        found[kind] = [one is bucket.unsharded_params.tensor for one, bucket in pairs]
        found[kind] += [not bucket.unsharded_params.is_allocated for bucket in engine.buckets]
        del held
        engine.close()

    net, engine = _built(3)
    measure("losses kept", net, engine, lambda: _train(net, engine))

    def twice(net, engine):
        loss = net(X)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
        engine.zero_grad()

    net, engine = _built(3)
    measure("two backwards", net, engine, lambda: twice(net, engine))
    torch.manual_seed(0)
    net = Checkpointed()
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], ZeroConfig(stage=3))
    measure("checkpointed", net, engine, lambda: _train(net, engine))

    def two_forwards(net, engine):
        with torch.no_grad():
            net(X)
        loss = net(X) + net(X)
        engine.backward(loss)
        engine.step()
        engine.zero_grad()

    net, engine = _built(3)
    measure("two forwards", net, engine, lambda: two_forwards(net, engine))
    return found


def test_training_frees_and_reuses_each_unsharded_buffer():
    for found in run_ranks(2, _keep_buffers):
        for kind, kept in found.items():
            assert all(kept), kind


def _set_between(rank, world_size):
    net, engine = _built(3)
    loss = net(X)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.weight was set between a forward and its"):
        net.blocks[1].weight.data = torch.zeros(12, 12)
    engine.backward(loss)
    engine.step()
    net.blocks[1].weight.data = torch.zeros(12, 12)
    engine.close()
    return net.blocks[1].weight.any().item()


def test_data_that_is_set_between_a_forward_and_its_backward_is_an_error():
    assert run_ranks(2, _set_between) == [False, False]


def _read_freed(rank, world_size):
    """Reads and writes freed memory in every way: an error or NaN, and the process survives."""
    net, engine = _built(3)
    taken = []
    net.blocks[0].after = lambda block: taken.append(block.weight.view(-1))
    loss = net(X)
    (freed,) = (one.detach() for one in taken)
    other = torch.ones(144)
    outcomes = []
    for use in (
        lambda: freed.sum().item(),
        lambda: (freed * 2).sum().item(),
        lambda: torch.dot(freed, other).item(),
        lambda: freed.clone()[0].item(),
        lambda: freed.numpy().sum(),
        lambda: freed.add_(1).sum().item(),
        lambda: freed.data_ptr(),
        lambda: torch.save(freed, io.BytesIO()),
        lambda: nn.functional.linear(X, freed.view(12, 12)).sum().item(),
    ):
        try:
            outcomes.append(use())
        except RuntimeError:
            outcomes.append("error")
    engine.backward(loss)
    engine.step()
    engine.close()
    return [one if isinstance(one, str) else str(float(one)) for one in outcomes]


@_reads_freed_memory
def test_a_read_of_freed_memory_is_an_error_or_not_a_number():
    for outcomes in run_ranks(2, _read_freed):
        assert set(outcomes) == {"nan", "error"}


def _set_on_one_rank(rank, world_size, is_undone):
    net, engine = _built(3)
    _train(net, engine)
    if rank == 0:
        backup = {name: p.data for name, p in net.named_parameters()}
        for p in net.parameters():
            p.data = p.data * 2
        for name, p in net.named_parameters():
            if is_undone:
                p.data = backup[name]
    for _ in range(2):
        _train(net, engine)
    engine.close()
    return _values(net)


def test_data_that_one_rank_sets_alone_is_an_error_unless_it_is_set_back():
    first, second = run_ranks(2, _set_on_one_rank, True)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    with pytest.raises(
        RankError,
        match=r"this rank reached a forward and its backward, and another rank reached a different "
        rf"call\.\n{re.escape(DESYNC_HINT)}\nOtherwise one rank .*p\.data = values",
    ):
        run_ranks(2, _set_on_one_rank, False)


def _swap_and_compare(rank, world_size, stage):
    """Weights in 16 bits are swapped out and back while their masters stay."""
    torch.manual_seed(0)
    net = Net()
    config = ZeroConfig(stage=stage, param_dtype=torch.bfloat16)
    engine = Engine(net, [torch.optim.AdamW(net.parameters(), lr=0.01)], config)
    engine.backward(net(X.bfloat16()))
    engine.step()
    before = [bucket.masters.fetch().clone() for bucket in engine.buckets]
    backup = {name: p.data for name, p in net.named_parameters()}
    for p in net.parameters():
        p.data = p.data * 0.7
    with torch.no_grad():
        net(X.bfloat16())
    for name, p in net.named_parameters():
        p.data = backup[name]
    is_same = [
        torch.equal(b.masters.fetch(), m) for b, m in zip(engine.buckets, before, strict=True)
    ]
    engine.close()
    return all(is_same)


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_that_are_swapped_out_and_back_keep_their_masters_to_the_last_bit(stage):
    assert run_ranks(2, _swap_and_compare, stage) == [True, True]
