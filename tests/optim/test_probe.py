"""Results of probes of optimizers, on small tensors shaped like their parameters."""

from __future__ import annotations

import gc
import re
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_zero import Engine, ZeroConfig
from lightning_zero.optim.known import known_elementwise
from lightning_zero.optim.probe import CannotShardError, ProbeResult, StepKind, probe
from tests.support.full_tensors import Lamb, MuonAndAdam, NormedLamb, Rows

CPU = torch.device("cpu")
ELEMENTWISE = ProbeResult(StepKind.BY_BUCKET, is_elementwise=True)
OF_TENSORS = ProbeResult(StepKind.BY_BUCKET, is_elementwise=False)
AT_ONCE = ProbeResult(StepKind.AT_ONCE, is_elementwise=False)
SHAPE = st.lists(st.integers(2, 300), min_size=1, max_size=2).map(tuple)
SHAPES = st.lists(SHAPE, min_size=1, max_size=4)


def parameters(*shapes):
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def found(optimizer):
    return probe(optimizer, CPU)


@settings(max_examples=6)
@given(SHAPES)
def test_the_result_does_not_depend_on_the_shapes(shapes):
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
def test_probe_tensors_have_the_dimensions_of_the_parameters(build, shapes, expected):
    assert found(build(parameters(*shapes))) == expected


def test_the_tensors_of_a_probe_are_freed_without_the_garbage_collector():
    optimizer = torch.optim.AdamW(parameters((300, 40)))
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
        found(optimizer)
        assert sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()) == before
    finally:
        gc.enable()


def test_each_group_is_probed_with_its_own_shapes():
    groups = [
        {"params": parameters((6, 4)), "use_muon": True},
        {"params": parameters((6,)), "use_muon": False},
    ]
    assert found(MuonAndAdam(groups)) == OF_TENSORS


def test_a_compiled_step_is_probed_without_compiling():
    class Compiled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    torch.compile(_subtract, fullgraph=True)(p, p.grad)

    torch._dynamo.utils.counters.clear()
    assert found(Compiled(parameters((3, 4)), lr=0.1)) == OF_TENSORS
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
    """Clips by the norm of all gradients, if it exceeds a bound."""

    def begin(self, parameters):
        if parameters and torch.stack([p.grad.norm() for p in parameters]).norm() > 50:
            super().begin(parameters)


class Impatient(Lamb):
    """Raises if one of its tensors has no gradient."""

    def begin(self, parameters):
        if len(parameters) < sum(len(group["params"]) for group in self.param_groups):
            raise RuntimeError("a gradient is missing")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (NormedLamb, "each parameter depends on the gradients of other parameters"),
        (NormAbove, "each parameter depends on the gradients of other parameters"),
        (Impatient, "tensors are empty and have no gradients (RuntimeError: a gradient is"),
    ],
)
def test_a_step_that_couples_all_tensors_is_refused_with_name_and_reason(build, reason):
    expected = f"optimizer {build.__name__} cannot be sharded: "
    with pytest.raises(CannotShardError, match=re.escape(expected)) as caught:
        found(build(parameters((8, 9), (5,))))
    assert reason in str(caught.value)


def test_an_optimizer_that_needs_sparse_gradients_is_refused_with_what_to_use():
    for assumed in (False, True):
        for stage in (0, 1, 3):
            module = torch.nn.Embedding(5, 3, sparse=True)
            optimizer = torch.optim.SparseAdam(module.parameters())
            config = ZeroConfig(stage=stage, assume_elementwise=assumed)
            with pytest.raises(ValueError, match=r"SparseAdam cannot .* sparse .*Use .*Adagrad"):
                Engine(module, [optimizer], config)


def test_an_optimizer_that_needs_a_closure_is_refused_by_name():
    with pytest.raises(ValueError, match=r"LBFGS cannot be stepped .*needs a closure.*missing"):
        found(torch.optim.LBFGS(parameters((3, 4))))


class Followed(torch.optim.SGD):
    """SGD that calls `prepare` for each gradient, with the norms of all."""

    def __init__(self, params, prepare, lr=0.1, **options):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.update({"d": 1.0, **options})
        self.prepare = prepare

    @torch.no_grad()
    def step(self, closure=None):
        held = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        norms = torch.stack([p.grad.norm() for _, p in held]) if held else torch.zeros(1)
        for group, p in held:
            self.prepare(self, group, p, norms)
        super().step()


def _clip(self, group, p, norms):
    p.grad.mul_((1.0 / norms.norm()).clamp(max=1.0))


def _clip_by_number(self, group, p, norms):
    p.grad.mul_(min(1.0, 40.0 / norms.norm().item()))


def _estimate(self, group, p, norms):
    group["d"] = max(group["d"], float(p.grad.norm()))


def _remember(self, group, p, norms):
    self.largest = max(getattr(self, "largest", 0.0), p.grad.max().item())


def _add_noise(self, group, p, norms):
    p.grad.add_(torch.randn_like(p), alpha=1e-3)


def _normalize(self, group, p, norms):
    p.grad.div_(p.grad.norm())


def _count(self, group, p, norms):
    group["d"] += 1


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (_clip, "depends on the gradients of other parameters"),
        (_clip_by_number, "depends on the gradients of other parameters"),
        (_estimate, "parameter group number d depends on the gradients of its parameters"),
        (_remember, "attribute largest depends on the gradients"),
        (_add_noise, "it draws random numbers"),
    ],
)
def test_a_step_that_combines_tensors_is_refused_with_the_reason(prepare, reason):
    with pytest.raises(CannotShardError, match=re.escape(reason)):
        found(Followed(parameters((8, 9), (5,)), prepare))


def test_a_class_that_is_not_known_steps_full_tensors():
    assert known_elementwise(Followed) is None
    assert found(Followed(parameters((8, 9), (5,)), _normalize)) == OF_TENSORS
    assert found(Followed(parameters((8, 9), (5,)), _count)) == AT_ONCE


def test_a_subclass_counts_as_its_parent_unless_it_overrides_the_step():
    class Named(torch.optim.AdamW):
        def __init__(self, params):
            super().__init__(params, lr=0.1)

        def describe(self):
            return "AdamW"

    class Other(Named):
        def step(self, closure=None):
            return super().step(closure)

    assert known_elementwise(Named) is True
    assert found(Named(parameters((8, 9)))) == ELEMENTWISE
    assert known_elementwise(Other) is None
    assert known_elementwise(torch.optim.Muon) is False


def test_an_option_that_combines_the_elements_of_a_tensor_is_found():
    class RMSprop(torch.optim.RMSprop):
        """Has the name of a known class, and another option."""

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                if p.grad is not None and self.param_groups[0]["momentum"]:
                    p.grad.div_(p.grad.norm())
            return super().step(closure)

    RMSprop.__module__ = "timm.optim.rmsprop"
    RMSprop.__name__ = "RMSpropTF"
    assert found(RMSprop(parameters((8, 9)), momentum=0.9)) == OF_TENSORS
    assert found(RMSprop(parameters((8, 9)))) == ELEMENTWISE


def test_the_option_that_couples_all_gradients_is_named():
    def prepare(self, group, p, norms):
        if group["max_grad_norm"] is not None:
            _clip(self, group, p, norms)

    optimizer = Followed(parameters((8, 9), (5,)), prepare, max_grad_norm=2.0)
    text = r"max_grad_norm=2.0 makes it do so: pass max_grad_norm=None.*gradient_clip_val=2.0"
    with pytest.raises(CannotShardError, match=text):
        found(optimizer)
    optimizer.param_groups[0]["max_grad_norm"] = None
    assert found(optimizer) == OF_TENSORS


class Late(torch.optim.SGD):
    """Changes nothing in its first four steps, and counts the steps in an attribute."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.state["number"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.state["number"] += 1
        if self.state["number"] > 4:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm())


def test_an_optimizer_that_begins_late_is_followed_until_it_moves():
    assert found(Late(parameters((3, 4)))) == AT_ONCE


class Closing(torch.optim.SGD):
    """SGD that uses the loss of its closure, or calls the closure like SAM."""

    def __init__(self, params, way):
        super().__init__(params, lr=0.1)
        self.way = way

    @torch.no_grad()
    def step(self, closure=None):
        loss = 1.0
        if closure is not None and self.way == "again":
            closure()
        if closure is not None and self.way == "after a change":
            torch._foreach_add_(self.param_groups[0]["params"], 1.0)
        if closure is not None:
            loss = closure()
        held = self.param_groups[0]["params"]
        if self.way == "number":
            loss = float(loss)
        for p in held if self.way in ("number", "tensor") else ():
            if p.grad is not None:
                p.grad.mul_(loss)
        super().step()


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("again", "it calls its closure more than once in a step, or after"),
        ("after a change", "it calls its closure more than once in a step, or after"),
        ("number", "it uses the loss of its closure"),
        ("tensor", "it uses the loss of its closure"),
    ],
)
def test_unsupported_uses_of_a_closure_are_refused(way, reason):
    assert found(Closing(parameters((3, 4)), "once")) == OF_TENSORS
    with pytest.raises(CannotShardError, match=reason):
        found(Closing(parameters((3, 4)), way))


class Around(torch.optim.Optimizer):
    """Wraps another optimizer, like Lookahead and SAM."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step()


def test_a_wrapper_optimizer_is_refused_and_the_inner_one_is_not_stepped():
    (p,) = held = parameters((3, 4))
    p.grad = torch.ones_like(p)
    with pytest.raises(CannotShardError, match=r"Around .* wraps another optimizer \(SGD, in its"):
        found(Around(torch.optim.SGD(held, lr=1.0)))
    assert not p.any()


def test_a_probe_changes_nothing_of_the_optimizer():
    class Remembering(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            self.seen, self.number = [], torch.zeros(())

        def step(self, closure=None):
            self.seen.append(1)
            self.number.add_(1)
            super().step()

    optimizer = Remembering(parameters((3, 4)))
    assert found(optimizer) == AT_ONCE
    assert (optimizer.seen, float(optimizer.number)) == ([], 0.0)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_probes_have_the_dtype_of_the_parameters_and_no_states_of_the_run(options):
    held = [p.double() for p in parameters((4, 5), (3,), ())]
    held = [nn.Parameter(p.detach()) for p in held]
    optimizer = torch.optim.Adagrad(held, lr=0.1, **options)
    assert found(optimizer) == ELEMENTWISE
    for parameter in held:
        parameter.grad = torch.full_like(parameter, torch.inf)
    optimizer.step()
    for parameter in held[:1]:  # as this rank's slice of it
        optimizer.state[parameter]["sum"] = optimizer.state[parameter]["sum"].view(-1)[:7]
    assert found(optimizer) == ELEMENTWISE
