"""Data flow of optimizers, on small tensors shaped like their parameters."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lightning_zero.optim.known import known_elementwise
from lightning_zero.optim.probe import CannotShardError, ProbeResult, StepKind, probe
from tests.tools.data_flow.probe import trace

slow = pytest.mark.slow  # they test this tool alone
CPU = torch.device("cpu")
ELEMENTWISE = ProbeResult(StepKind.BY_BUCKET, is_elementwise=True)
OF_TENSORS = ProbeResult(StepKind.BY_BUCKET, is_elementwise=False)


def parameters(*shapes):
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def found(optimizer):
    return trace(optimizer, CPU)


class FactoredFrom(torch.optim.SGD):
    """Elementwise below 128 columns."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() == 2 and min(p.shape) >= 128:
                    p.grad.div_(p.grad.norm(dim=1, keepdim=True))
        return super().step(closure)


@slow
def test_a_size_threshold_is_detected_where_parameters_reach_it():
    assert found(FactoredFrom(parameters((100, 300)))) == ELEMENTWISE
    assert found(FactoredFrom(parameters((129, 300)))) == OF_TENSORS
    groups = [{"params": parameters((6, 4))}, {"params": parameters((129, 300))}]
    assert found(FactoredFrom(groups)) == OF_TENSORS


class InBlocks(torch.optim.SGD):
    """Scales each block of elements, if a tensor is a multiple of the block with at least 4096."""

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
@slow
def test_blockwise_steps_are_detected_for_every_shape(shape, block):
    assert found(InBlocks(parameters(shape, (40, 9)), block)) == OF_TENSORS


@slow
def test_tensors_too_small_for_blocks_are_elementwise():
    assert found(InBlocks(parameters((40, 100), (300,)), 256)) == ELEMENTWISE


# ---------------------------------------------------------------- dependence not visible in values


class Followed(torch.optim.SGD):
    """SGD that calls `prepare` for each gradient, with a number shared by all."""

    def __init__(self, params, prepare, lr=0.1, **options):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.update({"d": 1.0, **options})
        self.prepare = prepare

    @torch.no_grad()
    def step(self, closure=None):
        held = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        numbers = {"norms": [p.grad.norm() for _, p in held]} if held else {}
        for group, p in held:
            self.prepare(self, group, p, numbers)
        super().step()


def _scale_where_huge(self, group, p, numbers):
    if p.grad.abs().max() > 1e30:
        p.grad.mul_(0.5)


def _scale_where_huge_by_number(self, group, p, numbers):
    p.grad.mul_(1.0 if p.grad.norm().item() < 1e30 else 0.5)


def _clip_far_above(self, group, p, numbers):
    p.grad.mul_((1e30 / torch.stack(numbers["norms"]).norm()).clamp(max=1.0))


def _clip_far_above_by_number(self, group, p, numbers):
    p.grad.mul_(min(1.0, 1e30 / sum(norm.item() for norm in numbers["norms"])))


def _estimate(self, group, p, numbers):
    group["d"] = max(group["d"], 1e-30 * float(p.grad.norm()))
    p.grad.mul_(group["d"])


def _estimate_as_tensor(self, group, p, numbers):
    group["lr"] = 0.1 + 0.0 * p.grad.sum()


def _remember(self, group, p, numbers):
    self.largest = max(getattr(self, "largest", 0.0), p.grad.max().item() * 1e-30)


def _add_noise(self, group, p, numbers):
    p.grad.add_(torch.randn_like(p), alpha=0.0)


def _through_numpy(self, group, p, numbers):
    p.grad.copy_(torch.from_numpy(p.grad.numpy().copy()))


def _write_memory(self, group, p, numbers):
    torch.from_numpy(p.detach().numpy())[:1] += 1.0


def _zero_where_small(self, group, p, numbers):
    p.grad[p.grad.abs() < 1e-30] = 0.0
    p.grad = torch.where(p.grad > 1e30, -p.grad, p.grad.clone()).clamp(-1e30, 1e30)


def _move(self, group, p, numbers):
    p.grad = p.grad.flip(0)


def _count(self, group, p, numbers):
    group["d"] += 1


def _raise_on_nan(self, group, p, numbers):
    if torch.isnan(p.grad).any():
        raise RuntimeError("a gradient is not a number")


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (_zero_where_small, ELEMENTWISE),
        (_scale_where_huge, OF_TENSORS),
        (_scale_where_huge_by_number, OF_TENSORS),
        (_raise_on_nan, OF_TENSORS),
        (_move, OF_TENSORS),
        (_count, ProbeResult(StepKind.AT_ONCE, is_elementwise=True)),
    ],
)
@slow
def test_dependence_is_detected_for_all_values(prepare, expected):
    assert found(Followed(parameters((8, 9), (5,)), prepare)) == expected


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (_clip_far_above, "depends on the gradients of other parameters"),
        (_clip_far_above_by_number, "depends on numbers of the gradients of other parameters"),
        (_estimate, "parameter group number d depends on the gradients of its parameters"),
        (_estimate_as_tensor, "parameter group number lr depends on the gradients"),
        (_remember, "attribute largest depends on the gradients"),
        (_add_noise, "it draws random numbers"),
        (_through_numpy, "its step uses Tensor.numpy()"),
        (_write_memory, "its step uses Tensor.numpy()"),
    ],
)
@slow
def test_dependence_across_parameters_is_refused_for_all_values(prepare, reason):
    with pytest.raises(CannotShardError, match=re.escape(reason)):
        found(Followed(parameters((8, 9), (5,)), prepare))


ALL_OF_TORCH = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
]
OTHERS = {"Muon": OF_TENSORS, "Adafactor": OF_TENSORS, "Optimizer": None, "LBFGS": None}


@pytest.mark.parametrize("kind", ALL_OF_TORCH, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("foreach", [False, pytest.param(True, marks=slow)])
def test_torch_optimizers_are_known_as_what_they_are(kind, foreach):
    expected = OTHERS.get(kind.__name__, ELEMENTWISE)
    if expected is None or kind is torch.optim.SparseAdam:
        pytest.skip("needs a closure or sparse gradients")
    shapes = [(9, 8)] if kind is torch.optim.Muon else [(9, 8), (4, 3, 2, 2), (5,), ()]
    options = {} if kind is torch.optim.Muon else {"foreach": foreach}
    optimizer = kind(parameters(*shapes), lr=0.1, **options)
    assert found(optimizer) == probe(optimizer, CPU) == expected
    assert known_elementwise(kind) == expected.is_elementwise
