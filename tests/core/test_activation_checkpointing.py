"""Modules that run again in backward: the same values, in every stage, and nothing left behind."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from functools import partial
from inspect import signature

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_zero import Engine, ZeroConfig
from lightning_zero.core.recompute import (
    _contexts,
    apply_checkpointing,
    find_checkpointed,
    outermost,
)
from tests.support.cells import SHARDED_STAGE
from tests.support.fitting import assert_same, fit_ranks, fit_reference, settings
from tests.support.hugging_face import gpt2, llama
from tests.support.models import GPTModule
from tests.support.warm import run_ranks


class Block(nn.Module):
    num_calls = 0

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x, *, scale=1.0):
        Block.num_calls += 1
        hidden = nn.functional.dropout(self.up(x).relu(), 0.5, self.training)
        return x + scale * self.down(hidden)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.square().mean()


def _train(rank, world_size, stage, again):
    torch.manual_seed(0)
    net = Net()
    config = ZeroConfig(stage=stage, activation_checkpointing=again)
    engine = Engine(net, [torch.optim.AdamW(net.parameters(), lr=0.1)], config)
    Block.num_calls = 0
    torch.manual_seed(rank)
    for _ in range(3):
        engine.backward(net(torch.randn(4, 8)))
        engine.step()
        engine.zero_grad()
    with torch.no_grad():
        net(torch.randn(4, 8))
    engine.close()
    assert not any("forward" in module.__dict__ for module in net.modules())
    return [p.detach() for p in net.parameters()], Block.num_calls


def _compare(rank, world_size, stage):
    expected, num_calls = _train(rank, world_size, stage, False)
    for again in (True, "selective", [Block, "selective"]):
        found, num_again = _train(rank, world_size, stage, again)
        assert (num_calls, num_again) == (4 * 3, 7 * 3)
        assert all(map(torch.equal, expected, found))


@pytest.mark.default_cases("3")
@pytest.mark.shows("`activation_checkpointing`")
@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_blocks_run_again_in_backward_with_the_same_values_and_random_numbers(stage):
    run_ranks(2, _compare, stage)


def test_a_run_of_the_trainer_equals_ddp():
    factory = partial(GPTModule, ranks=2)
    ours = fit_ranks(2, settings(3, activation_checkpointing=True), factory)
    assert_same(ours, fit_reference(2, factory))


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (True, ["blocks.0", "blocks.1", "blocks.2"]),
        (["first", Block], ["first", "blocks.0", "blocks.1", "blocks.2"]),
        ({Block, nn.Linear}, ["blocks.0", "blocks.1", "blocks.2", "first"]),  # none inside another
        ("blocks.[02]", ["blocks.0", "blocks.2"]),
        (False, []),
    ],
)
def test_what_runs_again_is_chosen_as_units_are(wanted, names):
    config = ZeroConfig(activation_checkpointing=wanted)
    assert find_checkpointed(Net(), config.checkpointed_modules) == names


def test_what_cannot_run_again_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"name classes: activation_checkpointing=\[Block\]"):
        Engine(nn.Linear(2, 2), config=ZeroConfig(activation_checkpointing=True))
    with pytest.raises(ValueError, match=r"activation_checkpointing has 'Blok', which matches no"):
        Engine(Net(), config=ZeroConfig(activation_checkpointing="Blok"))
    for misspelt in ("Selective", "selectiv"):
        with pytest.raises(ValueError, match=r"The nearest: selective, \w+, \w+\.") as error:
            Engine(Net(), config=ZeroConfig(activation_checkpointing=misspelt))
        near = str(error.value).rpartition(": ")[2].rstrip(".").split(", ")
        assert len(set(near)) == 3
    with pytest.raises(
        TypeError, match='activation_checkpointing must be True, False, "selective"'
    ):
        ZeroConfig(activation_checkpointing=3)


def test_lists_stand_for_their_members_and_nothing_for_none():
    for wanted in ("blocks", [nn.Module], ["blocks", Block]):
        found = find_checkpointed(
            Net(), ZeroConfig(activation_checkpointing=wanted).checkpointed_modules
        )
        assert [name for name in found if name != "first"] == ["blocks.0", "blocks.1", "blocks.2"]
    for nothing in (None, [], set(), False):
        assert ZeroConfig(activation_checkpointing=nothing).checkpointed_modules is False
    many = [f"layers.{i}.experts.{j}" for i in range(100) for j in range(60)]
    assert outermost([*many, "layers.7"])[-1] == "layers.7"
    assert len(outermost([*many, "layers.7"])) == len(many) - 60 + 1


class NormBlock(nn.Module):
    """A layer with running statistics, and one that runs under a checkpoint of its own."""

    def __init__(self, is_reentrant):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.is_reentrant = is_reentrant

    def forward(self, x, scale=1.0):
        x = self.norm(self.up(x)).tanh() * scale
        if self.is_reentrant is None:
            return self.down(x)
        return checkpoint(self.down, x, use_reentrant=self.is_reentrant)


def _two_backwards(again, stage, is_reentrant, how):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), *(NormBlock(is_reentrant) for _ in range(3)))
    wanted = [NormBlock] if again else False
    config = ZeroConfig(stage=stage, activation_checkpointing=wanted)
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], config)
    for _ in range(2):
        x = torch.randn(8, 4, requires_grad=True)
        loss = net(x).square().mean()
        if how == "twice":
            engine.backward(0.3 * loss, retain_graph=True)
        elif how == "grad":
            (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        elif how == "penalty":
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + grad.square().sum()
        engine.backward(0.7 * loss)
        engine.step()
        engine.zero_grad()
    engine.close()
    return [p.detach() for p in net.parameters()], [b.clone() for b in net.buffers()]


def _compare_two_backwards(rank, world_size, stage):
    for is_reentrant, how in [(None, "twice"), (None, "grad"), (None, "penalty"), (False, "twice")]:
        expected = _two_backwards(False, stage, is_reentrant, how)
        found = _two_backwards(True, stage, is_reentrant, how)
        for ours, reference in zip(found, expected, strict=True):
            assert all(map(torch.equal, ours, reference)), (is_reentrant, how)


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_blocks_with_running_statistics_run_again_in_every_backward_of_a_graph(stage):
    run_ranks(2, _compare_two_backwards, stage)


class Activated(nn.Sequential):
    def __init__(self, inplace):
        super().__init__(nn.Linear(4, 4), nn.ReLU(inplace))


class InnerGrad(nn.Linear):
    """Computes a gradient in its forward."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
        return x - grad


@pytest.mark.parametrize("how", ["in place", "inner", "twice"])
def test_what_a_selective_block_cannot_do_names_it_and_the_setting_that_can(how):
    def train(setting):
        torch.manual_seed(0)
        blocks = [InnerGrad(4, 4) if how == "inner" else Activated(how == "in place") for _ in "ab"]
        net = nn.ModuleDict({"blocks": nn.Sequential(*blocks)})
        config = ZeroConfig(stage=1, activation_checkpointing=setting)
        engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], config)
        loss = net["blocks"](torch.ones(2, 4)).square().sum()
        if how == "twice":
            engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
        engine.close()
        return list(net.parameters())

    assert all(map(torch.equal, train(False), train(True)))
    text = r"blocks\.\d \((Activated|InnerGrad)\) .*activation_checkpointing=True"
    with pytest.raises(RuntimeError, match=text) as error:
        train("selective")
    assert "selective activation checkpoint" in str(error.value.__cause__)


def test_running_statistics_are_updated_once():
    def train(again):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
        config = ZeroConfig(stage=1, activation_checkpointing=again)
        engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], config)
        for _ in range(3):
            engine.backward(net(torch.randn(8, 4)).square().mean())
            engine.step()
            engine.zero_grad()
        engine.close()
        return [*net.parameters(), *net.buffers()]

    assert all(map(torch.equal, train(False), train(["0", "1"])))


@pytest.mark.parametrize("build", [llama, gpt2])  # cache as a keyword and, in 5.0, by position
def test_a_model_that_keeps_keys_and_values_keeps_none_while_it_trains(build):
    pytest.importorskip("transformers")
    ids = torch.arange(16).reshape(2, 8) % 30
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0

    def train(again):
        torch.manual_seed(0)
        model = build()
        config = ZeroConfig(stage=3, activation_checkpointing=again)
        engine = Engine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], config)
        for _ in range(2):
            engine.backward(model(input_ids=ids, attention_mask=mask, labels=ids).loss)
            engine.step()
            engine.zero_grad()
        engine.close()
        return list(model.parameters())

    for one, other in zip(train(False), train(True), strict=True):
        torch.testing.assert_close(one, other)


def test_copies_have_their_own_forward_alone():
    net = Net()
    config = ZeroConfig(stage=1, activation_checkpointing=True)
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], config)
    assert str(signature(net.blocks[0].forward)) == "(x, *, scale=1.0)"
    other = copy.deepcopy(Net())
    end = apply_checkpointing(other, find_checkpointed(other, True))
    other = copy.deepcopy(other)
    engine.close()
    again = Engine(other, [torch.optim.SGD(other.parameters(), lr=0.1)], config)
    again.backward(other(torch.ones(2, 8)))
    again.close()
    end()
    end = apply_checkpointing(net, ["blocks.0"])
    apply_checkpointing(net, ["blocks.0"])
    loaded = pickle.loads(pickle.dumps(net))
    Block.num_calls = 0
    loaded(torch.ones(1, 8)).backward()
    assert Block.num_calls == 3
    end()
    assert "forward" not in net.blocks[0].__dict__


def test_a_copy_runs_its_own_forward_and_a_forward_of_the_users_comes_back():
    net = Net()
    net.blocks[0].forward = own = lambda x, scale: 2 * x
    end = apply_checkpointing(net, find_checkpointed(net, True))
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    with torch.no_grad():
        assert other(torch.ones(1, 8)) == 0
        assert net(torch.ones(1, 8)) > 0
    end()
    end()
    assert net.blocks[0].forward is own
    assert "forward" not in net.blocks[1].__dict__


@pytest.mark.parametrize("is_selective", [False, True])
def test_a_compiled_block_runs_again(is_selective):
    net = Net()
    x = torch.randn(4, 8)
    torch.manual_seed(0)
    net(x).backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    end = apply_checkpointing(net, find_checkpointed(net, True), is_selective=is_selective)
    for block in net.blocks:
        block.compile(backend="aot_eager")
    torch.manual_seed(0)
    net(x).backward()
    end()
    for parameter, grad in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_a_selective_forward_saves_products_in_float8():
    x, one, expected = torch.eye(16).to(torch.float8_e4m3fn), torch.ones(()), torch.eye(16)
    for context in _contexts(True, [], "")():
        with Operations() as operations, context:
            product = torch._scaled_mm(x, x.t(), one, one, out_dtype=torch.float32)
        assert torch.equal(product, expected)
    assert not operations.counts["_scaled_mm"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.norm(self.out(attended).squeeze(1).transpose(1, 2)).transpose(1, 2)


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def _count_operations(again, x):
    torch.manual_seed(0)
    net = nn.Sequential(*(Attention() for _ in range(3)))
    end = apply_checkpointing(
        net, find_checkpointed(net, bool(again)), is_selective=again == "some"
    )
    loss = net(x).sum()
    with Operations() as operations:
        loss.backward()
    end()
    return operations.counts, [p.grad for p in net.parameters()], net[0].norm.running_mean


def test_attention_and_every_second_matrix_product_are_not_computed_again():
    x = torch.randn(4, 8, 8).requires_grad_()
    found = {again: _count_operations(again, x) for again in (False, "all", "some")}
    plain, every, some = (counts for counts, *_ in found.values())
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert plain[attention] == some[attention] == 0
    assert every[attention] == 3
    assert every["addmm"] - plain["addmm"] == 6
    assert some["addmm"] - plain["addmm"] == 3
    for _, grads, statistics in found.values():
        assert all(map(torch.equal, grads, found[False][1]))
        assert torch.equal(statistics, found[False][2])


def _norm_blocks(again, is_compiled, *, breaks=False):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(*((BrokenBlock if breaks else NormBlock)(None) for _ in range(3)))
    end = apply_checkpointing(
        net, find_checkpointed(net, bool(again)), is_selective=again == "some"
    )
    if is_compiled:
        for block in net:
            block.compile(backend="aot_eager", fullgraph=not breaks)
    x = torch.randn(8, 4).requires_grad_()
    for _ in range(2):
        y = x
        for block in net:
            y = block(y, scale=0.5)
        with Operations() as operations:
            y.square().sum().backward()
    end()
    values = [x.grad, *(p.grad for p in net.parameters()), *net.buffers()]
    return values, operations.counts["addmm"]


def test_compiled_blocks_save_the_same_and_update_their_running_statistics_once():
    expected, _ = _norm_blocks(None, False)
    for again in ("all", "some"):
        found, num_matmuls = _norm_blocks(again, True)
        assert num_matmuls == _norm_blocks(again, False)[1] == 3 * (again == "all")
        torch.testing.assert_close(found, expected)


class BrokenBlock(NormBlock):
    def forward(self, x, **arguments):
        torch._dynamo.graph_break()
        return super().forward(x, **arguments)


def test_compiled_blocks_that_break_their_graph_update_their_running_statistics_once():
    expected, _ = _norm_blocks(None, False, breaks=True)
    for again in ("all", "some"):
        torch.testing.assert_close(_norm_blocks(again, True, breaks=True)[0], expected)
