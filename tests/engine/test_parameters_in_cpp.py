"""Parameters that reach C++ without `__torch_function__`, beside DistributedDataParallel.

An all-gather of these tests transfers nothing before the engine waits for it. So a parameter that
is read too early has the old values of the other rank's shard.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from lightning_zero import Engine, ZeroConfig, gathered
from lightning_zero.comm.communicator import Communicator
from lightning_zero.record.spans import Kind
from lightning_zero.tensors.freed import can_raise
from tests.support.cells import SHARDED_STAGE, slow_but
from tests.support.warm import run_ranks

WIDTH = 4
ADAPTED = "functional_call of a part with the gradient of its parameters"
SMALL = {"reduce_bucket_size": 24}  # a layer has its own bucket


@torch.jit.script
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


TRACED = torch.jit.trace(
    lambda x, w: torch.tanh(x @ w), (torch.zeros(2, WIDTH), torch.zeros(WIDTH, WIDTH))
)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch._C._VariableFunctions.mm(x, w)

    @staticmethod
    def backward(ctx, mean):
        x, w = ctx.saved_tensors
        return mean @ w.t(), x.t() @ mean


@torch.library.custom_op("lightning_zero_tests::product", mutates_args=())
def operator(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


@operator.register_fake
def _(x, w):
    return x.new_empty(x.shape)


def _save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


operator.register_autograd(Product.backward, setup_context=_save_inputs)


# ---------------------------------------------------------------- ways to hand over a parameter


def by_script(x, w):
    return product(x, w)


def by_trace(x, w):
    return TRACED(x, w)


def by_vmap(x, w):
    return vmap(lambda row, x: x @ row, (1, None), 1)(w, x)


def by_grad(x, w):
    return x @ grad(lambda w: (x @ w).pow(2).sum() / 2)(w) * 0.1


def by_function(x, w):
    return Product.apply(x, w)


def by_operator(x, w):
    return operator(x, w)


def by_copy(x, w):
    return x @ torch.tensor(w) + x @ w


def by_numpy(x, w):
    return x @ w * float(w.detach().numpy().sum())


def by_compiled_function(x, w):
    return COMPILED(x, w)


COMPILED = torch.compile(lambda x, w: torch.tanh(x @ w), backend="eager")
WAYS = [
    by_script,
    by_trace,
    by_vmap,
    by_grad,
    by_function,
    by_operator,
    by_copy,
    by_numpy,
    by_compiled_function,
]


# ---------------------------------------------------------------- who holds it, and who uses it


class Own(nn.Module):
    """Uses its own parameter."""

    def __init__(self, way):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.way = way

    def forward(self, x):
        return self.way(x, self.w)


class Listed(nn.Module):
    """Uses a parameter of a container."""

    def __init__(self, way):
        super().__init__()
        self.ws = nn.ParameterList([torch.randn(WIDTH, WIDTH)])
        self.way = way

    def forward(self, x):
        return self.way(x, self.ws[0])


class OfChild(nn.Module):
    """Uses the weight of a layer that it never calls."""

    def __init__(self, way):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.way = way

    def forward(self, x):
        return self.way(x, self.layer.weight)


class Between(nn.Module):
    """A layer, what the case is about, and a layer."""

    def __init__(self, part):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.last(self.part(self.first(x)))


class Borrowing(nn.Module):
    """The module itself uses the weight of a layer that nothing calls, before all layers."""

    def __init__(self, way):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.kept = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
        self.way = way

    def forward(self, x):
        return self.last(self.first(self.way(x, self.kept[0].weight)))


class Functional(nn.Module):
    """Calls a part with values that torch.func.grad differentiates."""

    def __init__(self, *_):
        super().__init__()
        self.last = nn.Linear(WIDTH, 2)
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        values = dict(self.part.named_parameters())
        loss = lambda values: functional_call(self.part, values, (x,)).pow(2).mean()  # noqa: E731
        slopes = grad(loss)(values)
        adapted = {name: values[name] - 0.1 * slopes[name] for name in values}
        return self.last(functional_call(self.part, adapted, (x,)))


class Penalized(nn.Module):
    """A term over all weights, before they are used."""

    def __init__(self, *_):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x):
        penalty = sum(p.norm() for p in self.parameters())
        return self.last(self.first(x)) * penalty


class Changing(nn.Module):
    """Calls a layer in some forwards, and uses its weight in the others."""

    def __init__(self, way, calls):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.way, self.calls, self.number = way, calls, 0

    def forward(self, x):
        self.number += self.training
        if not self.training or self.number in self.calls:
            return self.layer(x)
        return self.way(x, self.layer.weight)


class Scripted(nn.Module):
    """Passes a parametrized weight through a scripted function."""

    def forward(self, w):
        return product(torch.eye(WIDTH), w)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x[None], x[None], x[None])[0][0]


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, num_layers=2)

    def forward(self, x):
        return self.cells(x)[0]


class Encoder(nn.Module):
    """The encoder layer's own kernel runs without gradients."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        self.layer.eval()
        with torch.no_grad():
            fast = self.layer(x[None])[0]
        self.layer.train()
        return self.layer(x[None])[0] + fast


def layers():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def parametrized():
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Scripted())
    return layer


def checkpointed():
    return Checkpointed(Own(by_vmap))


class Checkpointed(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False)


PARTS = {
    "layers": layers,
    "a scripted child": lambda: torch.jit.script(layers()),
    "a traced child": lambda: torch.jit.trace(layers(), torch.zeros(2, WIDTH)),
    "a scripted child of a list": lambda: nn.Sequential(torch.jit.script(layers())),
    "a compiled child": lambda: torch.compile(layers(), backend="eager"),
    "a child compiled in place": lambda: _compiled(layers()),
    "parametrize": parametrized,
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm of hooks": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "MultiheadAttention": Attention,
    "TransformerEncoderLayer": Encoder,
    "checkpoint": checkpointed,
}


def _compiled(module):
    module.compile(backend="eager")
    return module


def cases():
    """By name: makes the module to train."""
    found = {name: lambda make=make: Between(make()) for name, make in PARTS.items()}
    for way in WAYS:
        for holder in (Own, Listed, OfChild):
            found[f"{holder.__name__} {way.__name__}"] = lambda holder=holder, way=way: Between(
                holder(way)
            )
        found[f"Borrowing {way.__name__}"] = partial(Borrowing, way)
        found[f"the module itself {way.__name__}"] = partial(Rooted, way)
        found[f"alternating {way.__name__}"] = lambda way=way: Between(Changing(way, {2, 4}))
        found[f"evaluated otherwise {way.__name__}"] = lambda way=way: Between(Changing(way, ()))
    return found | {ADAPTED: Functional, "Penalized": Penalized}


class Rooted(nn.Module):
    """The module itself holds the parameter."""

    def __init__(self, way):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.way = way

    def forward(self, x):
        return self.last(self.way(self.first(x), self.w))


# ---------------------------------------------------------------- training


class LateGather:
    """All-gather that transfers nothing before `wait`."""

    def __init__(self, issue, name, events):
        self._issue, self._name, self._events = issue, name, events

    def wait(self):
        if self._issue is not None:
            self._issue().wait()
            self._issue = None
            if self._events is not None:
                self._events.append(self._name)


@contextlib.contextmanager
def delayed_gathers(events=None):
    """Delays all all-gathers; `events` receives their names when they are waited for."""
    issue = Communicator._issue

    def delayed(comm, kind, name, *args):
        issue_now = partial(issue, comm, kind, name, *args)
        return LateGather(issue_now, name, events) if kind is Kind.ALL_GATHER else issue_now()

    with mock.patch.object(Communicator, "_issue", delayed):
        yield


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, WIDTH, generator=generator) for _ in range(4)]


def values_of(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def _evaluate(module, x):
    """For modules that evaluate in another way than they train."""
    if isinstance(getattr(module, "part", None), Changing):
        with torch.no_grad():
            module.eval()(x)
        module.train()


def _by_ddp(rank, make):
    torch.manual_seed(0)
    module = make()
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for x in batches(rank):
        _evaluate(module, x)
        loss = functional.mse_loss(ddp(x), x[:, :2])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, values_of(module)


def _by_engine(rank, make, stage):
    torch.manual_seed(0)
    module = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    engine = Engine(module, [optimizer], ZeroConfig(stage=stage, **SMALL))
    losses = []
    for x in batches(rank):
        _evaluate(module, x)
        loss = functional.mse_loss(module(x), x[:, :2])
        engine.backward(loss)
        engine.step()
        engine.zero_grad()
        losses.append(loss.item())
    engine.close()
    return losses, values_of(module)


RARE = ("compiled", "by_grad", "by_function", "by_operator", "by_trace", "by_numpy")


@delayed_gathers()
def _train_all(rank, world_size, stage, has_rare):
    """By case: an empty text, or how it differs from DistributedDataParallel."""
    found = {}
    for name, make in cases().items():
        if not has_rare and any(part in name for part in RARE):
            continue
        torch._dynamo.reset()
        expected = _by_ddp(rank, make)
        torch._dynamo.reset()
        try:
            got = _by_engine(rank, make, stage)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
            found[name] = ""
        except (AssertionError, RuntimeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"[:600]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("has_rare", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_a_parameter_in_cpp_has_the_values_that_it_has_under_ddp(stage, has_rare):
    for found in run_ranks(2, _train_all, stage, has_rare, timeout_s=200):
        differing = {name: text for name, text in found.items() if text}
        if stage == 3:
            assert "inside `with lightning_zero.gathered(module)" in differing.pop(ADAPTED)
        assert differing == {}


# ---------------------------------------------------------------- who waits, and when


def _events_of_a_forward(rank, world_size, part):
    """Calls of layers and waits for all-gathers in a forward after a step."""
    with delayed_gathers(events := []):
        return _forwards(part, events)


def _forwards(part, events):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), PARTS[part](), nn.Linear(WIDTH, WIDTH))
    for name, child in module.named_children():
        child.register_forward_hook(lambda *_, name=name: events.append(f"end of {name}"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], ZeroConfig(stage=1, **SMALL))
    for _ in range(3):
        events.clear()
        engine.backward(module(torch.ones(2, WIDTH)).sum())
        engine.step()
        engine.zero_grad()
    engine.close()
    return events


@pytest.mark.default_cases("layers")
@pytest.mark.parametrize("part", ["layers", "MultiheadAttention", "a compiled child"])
def test_each_layer_waits_for_its_own_parameters_only(part):
    """So the all-gathers of later layers overlap with the forward of this one."""
    for events in run_ranks(2, _events_of_a_forward, part):
        moments = [event if event.startswith("end") else "wait" for event in events]
        first, second, last = (moments.index(f"end of {number}") for number in range(3))
        assert set(moments[:first]) == {"wait"}
        assert "wait" in moments[first:second]
        assert "wait" in moments[second:last]


@delayed_gathers()
def _step_inside_a_step(rank, world_size, stage):
    torch.manual_seed(0)
    module = Rooted(by_script)
    reference = copy.deepcopy(module)
    losses = {}
    for name, trained in (("plain", reference), ("engine", module)):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        losses[name] = []

        def step(trained, backward, step, losses):
            for _ in range(3):
                loss = (
                    product(torch.ones(2, WIDTH), trained.w).sum()
                    + trained(torch.ones(2, WIDTH)).square().sum()
                )
                backward(loss)
                step()
                trained.zero_grad()
                losses.append(loss.item())

        if name == "plain":
            step(trained, torch.Tensor.backward, optimizer.step, losses[name])
        else:
            engine = Engine(trained, [optimizer], ZeroConfig(stage=stage, **SMALL))
            with engine.forward_context():
                step(trained, engine.backward, engine.step, losses[name])
            engine.close()
    return losses


@pytest.mark.parametrize("stage", slow_but((1,), (1, 2)))
def test_with_manual_optimization_the_root_waits_after_each_step(stage):
    for losses in run_ranks(2, _step_inside_a_step, stage):
        assert losses["engine"] == pytest.approx(losses["plain"], rel=1e-6)


class Early(nn.Module):
    """C++ reads the weight of a layer before this is called."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, early=None):
        if early is None:
            return self.layer(x)
        read = product(x, self.layer.weight)
        return read if early == "instead" else self.layer(x) + read


class Several(nn.Module):
    """Blocks, each of which is a unit in stage 3."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Early() for _ in range(3))

    def forward(self, x, early=None):
        for number, block in enumerate(self.blocks):
            x = block(x, early=early if number == 1 else None)
        return x


@delayed_gathers()
def _read_early(rank, world_size, stage):
    """What C++ finds between steps, in a forward before the layer is called, and instead of it."""
    found = []
    for early in (None, "before", "instead"):
        module = Several()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine = Engine(module, [optimizer], ZeroConfig(stage=stage, **SMALL))
        for _ in range(2):
            engine.backward(module(torch.ones(2, WIDTH)).sum())
            engine.step()
            engine.zero_grad()
        try:
            if early is None:
                out = product(torch.ones(2, WIDTH), module.blocks[0].layer.weight)
            else:
                out = module(torch.ones(2, WIDTH), early)
                engine.backward(out.sum())
            found.append(["values", "NaN"][out.isnan().all().item()])
        except RuntimeError as error:
            found.append(next(p for p in NAMES if f"parameter {p} was read by C++" in str(error)))
        engine.close()
    return found


NAMES = [f"blocks.{number}.layer.weight" for number in range(3)]


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_cpp_finds_no_values_before_a_parameter_is_unsharded(stage):
    first, second, _ = NAMES
    if not can_raise():
        first, second = "NaN", "NaN"
    # In stage 3 the unit of the block is unsharded.
    expected = [first, *(["values"] * 2 if stage == 3 else [second, NAMES[1]])]
    assert run_ranks(2, _read_early, stage) == [expected] * 2


# ---------------------------------------------------------------- scripted modules


@delayed_gathers()
def _with_scripted_children(rank, world_size, stage):
    torch.manual_seed(0)
    module = Between(nn.Sequential(torch.jit.script(layers()), nn.Tanh()))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(module, [optimizer], ZeroConfig(stage=stage, **SMALL))
    engine.backward(module(torch.ones(2, WIDTH)).sum())
    engine.step()
    saved = {name: value.detach().clone() for name, value in module.state_dict().items()}
    if stage == 3:
        with pytest.raises(
            RuntimeError, match=r"scripted module with parameter part\.0\.0\.weight"
        ):
            copy.deepcopy(module)
    with gathered(module):
        copied = {name: p.detach().clone() for name, p in copy.deepcopy(module).named_parameters()}
        for name, p in module.named_parameters():
            torch.testing.assert_close(copied[name], p.detach())
            torch.testing.assert_close(saved[name], p.detach())
    module.load_state_dict({name: torch.zeros_like(value) for name, value in saved.items()})
    assert not module(torch.ones(2, WIDTH)).any()
    engine.close()
    assert not any(p.any() for p in module.parameters())


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_scripted_children_are_saved_loaded_and_copied(stage):
    run_ranks(2, _with_scripted_children, stage)


def test_a_scripted_root_is_refused():
    scripted = torch.jit.script(layers())
    with pytest.raises(TypeError, match=r"put it into an nn\.Module"):
        Engine(scripted, [torch.optim.SGD(scripted.parameters(), lr=0.1)], ZeroConfig(stage=1))


# ---------------------------------------------------------------- a parameter of a parameter


@delayed_gathers()
def _make_parameter(rank, world_size, stage):
    of_values = Rooted(lambda x, w: x @ nn.Parameter(w.detach()) + x @ w)
    refused = Rooted(lambda x, w: x @ nn.Parameter(w))
    notes = []
    for module in (of_values, refused):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine = Engine(module, [optimizer], ZeroConfig(stage=stage, **SMALL))
        try:
            for _ in range(2):
                engine.backward(module(torch.ones(2, WIDTH)).sum())
                engine.step()
        except RuntimeError as error:
            notes += getattr(error, "__notes__", [])
        engine.close()
    return notes


@pytest.mark.default_cases("3")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_a_parameter_of_a_parameter_is_refused_with_a_cure(stage):
    for notes in run_ranks(2, _make_parameter, stage):
        assert len(notes) == 1
        assert "nn.Parameter(parameter.detach())" in notes[0]


def _data_in_vmap(rank, world_size):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], ZeroConfig(stage=3))
    weight = net[1].weight

    def read_and_set(x):
        weight.data = torch.full_like(weight.data, 2.0)
        return x

    engine.buckets[-1].params.unshard()  # as a prefetch does
    torch.vmap(read_and_set)(torch.ones(2))
    engine.close()
    return weight.detach().unique().tolist()


def test_data_of_a_parameter_in_flight_is_read_and_set_inside_vmap():
    assert run_ranks(2, _data_in_vmap) == [[2.0], [2.0]]
