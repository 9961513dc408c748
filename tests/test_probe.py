"""What a probe finds out about optimizers, on toys shaped like their parameters."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_zero.optim.trial import CannotShardError, Findings, StepKind, probe
from tests.whole_tensors import Lamb, MuonAndAdam, NormedLamb, Rows

CPU = torch.device("cpu")
ELEMENTWISE = Findings(StepKind.BY_BUCKET, is_elementwise=True)
OF_TENSORS = Findings(StepKind.BY_BUCKET, is_elementwise=False)
AT_ONCE = Findings(StepKind.AT_ONCE, is_elementwise=False)
SHAPE = st.lists(st.integers(2, 300), min_size=1, max_size=2).map(tuple)
SHAPES = st.lists(SHAPE, min_size=1, max_size=4)


def parameters(*shapes):
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def found(optimizer):
    return probe(optimizer, CPU)


@settings(deadline=None, max_examples=15)
@given(SHAPES)
def test_what_an_optimizer_looks_at_does_not_depend_on_the_shapes(shapes):
    assert found(torch.optim.AdamW(parameters(*shapes))) == ELEMENTWISE
    assert found(Lamb(parameters(*shapes))) == OF_TENSORS
    assert found(torch.optim.Adafactor(parameters(*shapes))) == OF_TENSORS


@pytest.mark.parametrize(
    ("build", "shapes", "expected"),
    [
        (torch.optim.Muon, [(300, 40), (8, 8)], OF_TENSORS),
        (partial(torch.optim.Adafactor, foreach=True), [(8, 3, 3, 3), (7,)], OF_TENSORS),
        (torch.optim.SGD, [(), (1, 1, 40)], ELEMENTWISE),
        (Rows, [(4, 5), (3,)], AT_ONCE),
    ],
)
def test_toys_have_the_dimensions_of_the_parameters(build, shapes, expected):
    assert found(build(parameters(*shapes))) == expected


def test_groups_are_tried_with_shapes_of_their_own():
    groups = [
        {"params": parameters((6, 4)), "use_muon": True},
        {"params": parameters((6,)), "use_muon": False},
    ]
    assert found(MuonAndAdam(groups)) == OF_TENSORS


class FactoredFrom(torch.optim.SGD):
    """Elementwise below 128 columns."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() == 2 and min(p.shape) >= 128:
                    p.grad.div_(p.grad.norm(dim=1, keepdim=True))
        return super().step(closure)


def test_what_begins_at_a_size_is_seen_where_parameters_have_that_size():
    assert found(FactoredFrom(parameters((100, 300)))) == ELEMENTWISE
    assert found(FactoredFrom(parameters((129, 300)))) == OF_TENSORS
    groups = [{"params": parameters((6, 4))}, {"params": parameters((129, 300))}]
    assert found(FactoredFrom(groups)) == OF_TENSORS


class InBlocks(torch.optim.SGD):
    """Scales each block of elements, where a tensor has at least 4096 in whole blocks."""

    def __init__(self, params, block):
        super().__init__(params, lr=0.1)
        self.block = block

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel() >= 4096 and p.numel() % self.block == 0:
                    blocks = p.grad.view(-1, self.block)
                    blocks.div_(blocks.abs().amax(dim=1, keepdim=True))
        return super().step(closure)


@pytest.mark.parametrize("block", [32, 256, 2048, 4096])
@pytest.mark.parametrize("shape", [(5000,), (300, 200), (63, 127), (3, 2000), (64, 3, 7, 7)])
def test_blocks_of_elements_are_seen_whatever_the_shape(shape, block):
    assert found(InBlocks(parameters(shape, (40, 9)), block)) == OF_TENSORS


def test_what_is_too_small_for_blocks_is_elementwise():
    assert found(InBlocks(parameters((40, 100), (300,)), 256)) == ELEMENTWISE


def test_a_step_that_is_compiled_is_tried_without_compiling():
    class Compiled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    torch.compile(_subtract, fullgraph=True)(p, p.grad)

    torch._dynamo.utils.counters.clear()
    assert found(Compiled(parameters((3, 4)), lr=0.1)) == ELEMENTWISE
    assert not torch._dynamo.utils.counters["stats"]


def _subtract(p, grad):
    p.sub_(grad, alpha=0.1)


def test_states_of_other_shapes_do_not_hinder_an_optimizer_that_has_stepped():
    held = parameters((300, 20), (4,))
    optimizer = torch.optim.Adafactor(held)
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert found(optimizer) == OF_TENSORS


class NormAbove(NormedLamb):
    """Looks at all gradients where their norm is above a bound."""

    def begin(self, parameters):
        if parameters and torch.stack([p.grad.norm() for p in parameters]).norm() > 50:
            super().begin(parameters)


class Impatient(Lamb):
    """Wants a gradient for each of its tensors."""

    def begin(self, parameters):
        if len(parameters) < sum(len(group["params"]) for group in self.param_groups):
            raise RuntimeError("a gradient is missing")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (NormedLamb, "it looks at all tensors together"),
        (NormAbove, "it looks at all tensors together"),
        (Impatient, "the others are empty and have no gradients (RuntimeError: a gradient is"),
    ],
)
def test_what_looks_at_all_tensors_is_refused_with_its_name_and_the_reason(build, reason):
    expected = f"optimizer {build.__name__} cannot be sharded: "
    with pytest.raises(CannotShardError, match=re.escape(expected)) as caught:
        found(build(parameters((8, 9), (5,))))
    assert reason in str(caught.value)


def test_what_needs_a_closure_is_refused_by_name():
    with pytest.raises(ValueError, match=r"LBFGS cannot be stepped .*missing.*closure"):
        found(torch.optim.LBFGS(parameters((3, 4))))
