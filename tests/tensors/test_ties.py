"""Parameters are tied by object; parameters that share memory are refused."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig
from lightning_zero.tensors.ties import alias_texts, check_memory
from tests.support.cells import SHARDED_STAGE
from tests.support.fitting import assert_same, fit_ranks, fit_reference, settings
from tests.support.models import Recorder
from tests.support.ranks import RankError


class Net(nn.Module):
    """An embedding, a layer, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.between = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.head(self.between(x @ self.embedding.weight))


def by_object(net):
    net.head.weight = net.embedding.weight


def by_data(net):
    net.head.weight.data = net.embedding.weight.data


def anew(net):
    net.head.weight = nn.Parameter(net.embedding.weight.data)


def of_three(net):
    by_data(net)
    net.between.weight = nn.Parameter(net.embedding.weight.detach())


def from_one_array(net):
    array = torch.randn(8, 8).numpy()
    net.head.weight.data = torch.from_numpy(array)
    net.embedding.weight.data = torch.from_numpy(array)


def transposed(net):
    net.head.weight.data = net.embedding.weight.data.T


def in_part(net):
    net.between.bias.data = net.embedding.weight.data[0]


def crossing(net):
    memory = torch.zeros(8, 12)
    net.head.weight.data, net.embedding.weight.data = memory[:, :8], memory[:, 4:]


def of_another_dtype(net):
    net.head.weight.data = net.embedding.weight.data.view(torch.int32).view(torch.float32)[:4]


def as_buffer(net):
    net.register_buffer("shown", net.embedding.weight.data[:2], persistent=False)


def expanded(net):
    net.between.bias = nn.Parameter(torch.zeros(1).expand(8))


def frozen_in_one(net):
    by_data(net)
    net.head.weight.requires_grad_(False)


REFUSED = [
    (by_data, "cpu"),
    (by_data, "meta"),
    (anew, "meta"),
    (of_three, "cpu"),
    (from_one_array, "cpu"),
    (transposed, "cpu"),
    (in_part, "cpu"),
    (crossing, "cpu"),
    (of_another_dtype, "cpu"),
    (as_buffer, "cpu"),
    (expanded, "cpu"),
    (frozen_in_one, "cpu"),
]


@pytest.mark.parametrize(("tie", "device"), REFUSED)
def test_shared_memory_is_refused_with_names_and_remedy(tie, device):
    with torch.device(device):
        net = Net()
    tie(net)
    with pytest.raises(ValueError, match=r"parameter (embedding|between)\.") as raised:
        check_memory(net)
    assert "head.weight = embedding.weight" in str(raised.value) or tie is expanded


def test_an_engine_and_a_trainer_refuse_shared_memory():
    net = Tied(by_data)
    with pytest.raises(ValueError, match=r"head\.weight shares memory with .*embedding\.weight"):
        Engine(net.net, config=ZeroConfig(stage=1))
    with pytest.raises(RankError, match=r"head\.weight shares memory with .*embedding\.weight"):
        fit_reference(1, partial(Tied, by_data), spec="zero1")


def test_parameters_side_by_side_in_one_memory_stay_separate():
    net = Net()
    memory = torch.zeros(8, 16)
    net.head.weight.data, net.embedding.weight.data = memory[:, :8], memory[:, 8:]
    frozen = torch.zeros(1).expand(8)
    net.between.bias = nn.Parameter(frozen, requires_grad=False)
    copied = copy.deepcopy(nn.LSTM(8, 8))
    net.add_module("lstm", copied)
    check_memory(net)


def test_an_attribute_that_views_a_parameter_is_named_in_a_warning():
    net = Net()
    net.between.shown = [net.embedding.weight.data[1:]]
    net.holders = [net.embedding.weight]
    net.copied = net.embedding.weight.detach().clone()
    (text,) = alias_texts(net)
    assert "attribute between.shown" in text
    assert "embedding.weight" in text
    with pytest.warns(UserWarning, match=r"attribute between\.shown"):
        Engine(net, config=ZeroConfig(stage=1)).close()


class Tied(Recorder):
    """Ties parameters in the constructor or in `configure_model`."""

    def __init__(self, tie, is_built_later=False, **options):
        super().__init__(**options)
        self.tie = tie
        self.net = None
        if not is_built_later:
            self.configure_model()

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(0)
            self.net = Net()
            self.tie(self.net)

    def part_loss(self, part, rank):
        return (self.net(part[0])[:, :3] - part[1]).square().mean()


@pytest.mark.default_cases("3-True")
@pytest.mark.parametrize("is_built_later", [False, True])
@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_a_tie_by_object_trains_as_under_ddp(stage, is_built_later):
    factory = partial(Tied, by_object, is_built_later, ranks=2)
    assert_same(fit_ranks(2, settings(stage), factory), fit_reference(2, factory))
