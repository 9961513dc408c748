"""Views of unsharded parameters that a user keeps: new values, or none, and no other memory."""

from __future__ import annotations

import io
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zero import Engine, ZeroConfig, gathered
from lightning_zero.health.failures import DESYNC_HINT
from tests.support.ranks import RankError
from tests.support.warm import run_ranks

_reads_freed_memory = pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="needs a newer torch than 2.11"
)
X = torch.linspace(-1, 1, 24).view(2, 12)


def nothing(block):
    pass


class Block(nn.Linear):
    def __init__(self):
        super().__init__(12, 12)
        self.after = nothing  # called after the forward's use of the parameters

    def forward(self, x):
        x = super().forward(x)
        self.after(self)
        return x


class Net(nn.Module):
    """In stage 3 each block is a unit that is unsharded for its own forward only."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().sum()


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


def _read(tensor):
    """The sum of `tensor`, if it can be read."""
    try:
        return tensor.sum().item()
    except RuntimeError as error:
        return str(error)


def _keep_views(rank, world_size):
    """Reads views that were taken in a step and in `gathered`, while their parameters are sharded.

    Returns the results, and those of reading entries of state dicts.
    """
    net, engine = _built(3)
    kept = []

    def keep(block):
        weight = block.weight
        kept.extend([weight.detach(), weight.data, weight[3], block.bias.detach().view(-1)])

    net.blocks[1].after = keep
    loss = net(X)
    net.blocks[1].after = nothing
    with gathered(net):
        kept += [p.detach() for p in net.blocks[1].parameters()]
        state = net.state_dict()
        expected = {name: value.clone() for name, value in net.named_parameters()}
        with torch.no_grad():
            assert all(torch.equal(state[name], value) for name, value in expected.items())
    found = [_read(view) for view in kept]
    engine.backward(loss)
    found += [_read(view) for view in kept]
    engine.step()
    for _ in range(2):
        _train(net, engine)
    found += [_read(view) for view in kept]
    engine.close()
    found += [_read(view) for view in kept]
    torch.save(state, io.BytesIO())
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    return found


@_reads_freed_memory
def test_views_that_are_kept_have_no_values_while_the_parameter_is_sharded_and_copies_have_theirs():
    for found in run_ranks(2, _keep_views):
        assert all(value != value or "view of a parameter" in str(value) for value in found)


class Checkpointed(Net):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False).tanh()
        return x.square().sum()


def _keep_buffers(rank, world_size):
    """By kind of training: whether each unit still has its first buffer, freed."""
    found = {}

    def measure(kind, net, engine, train):
        buffers = [bucket.params.unsharded.tensor for bucket in engine.buckets]
        held = [train() for _ in range(3)]
        pairs = zip(buffers, engine.buckets, strict=True)
        found[kind] = [one is bucket.params.unsharded.tensor for one, bucket in pairs]
        found[kind] += [not bucket.params.unsharded.is_allocated for bucket in engine.buckets]
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


def _count_holders(rank, world_size, settings, dtype):
    torch.manual_seed(0)
    net = Net().to(dtype)
    engine = Engine(net, [torch.optim.AdamW(net.parameters())], ZeroConfig(**settings))
    counts = []
    for _ in range(2):
        with gathered(net):  # unsharded: each parameter is a view
            for bucket in engine.buckets:
                num_known = len(bucket.parameters) + bucket.shards.num_views
                counts.append(bucket.params.unsharded.num_holders(num_known))
        engine.backward(net(X.to(dtype)))
        engine.step()
        engine.zero_grad()
    engine.close()
    return counts


NVME = {"device": "nvme", "nvme_path": "."}


@pytest.mark.default_cases(
    "settings0-dtype1",
    "settings1-dtype1",
    "settings2-dtype1",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {"stage": 1},
        {"stage": 1, "offload_optimizer": "cpu"},
        {"stage": 2, "offload_optimizer": NVME},
    ],
)
def test_only_known_tensors_hold_the_unsharded_buffers(settings, dtype):
    for counts in run_ranks(2, _count_holders, settings, dtype):
        assert set(counts) == {0}, counts
