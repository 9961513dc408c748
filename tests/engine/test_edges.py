"""Regression tests: uses of the engine in a few lines that a user may write."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zero import Engine, ZeroConfig, full_grad, gathered
from lightning_zero.core.coordinator import TrainingState
from tests.support.cells import ANY_STAGE, SHARDED_STAGE
from tests.support.warm import run_ranks


def start(module, stage, optimizer=None, **settings):
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    return Engine(module, [optimizer], ZeroConfig(stage=stage, **settings)), optimizer


def run(case, *args):
    return run_ranks(2, case, *args)


class Pair(nn.Module):
    """Two layers that can be used by themselves."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, name):
        return getattr(self, name)(x).sum()


def _keep_mean(rank, world_size, stage):
    torch.manual_seed(0)
    module = Pair()
    engine, _ = start(module, stage)
    x = torch.ones(2, 4)
    engine.backward(module(x, "b"))
    expected = full_grad(module.b.weight)
    with engine.no_sync():
        engine.backward(module(x, "a"))
    engine.backward(module(x, "a"))
    torch.testing.assert_close(full_grad(module.b.weight), expected)


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", range(4))
def test_a_mean_survives_backwards_that_do_not_touch_it(stage):
    run(_keep_mean, stage)


def _zero_local(rank, world_size, stage):
    module = nn.Linear(4, 3)
    engine, _ = start(module, stage)
    with gathered(module):
        before = module.weight.detach().clone()
    with engine.no_sync():
        engine.backward(module(torch.ones(2, 4)).sum())
    engine.zero_grad()
    engine.step()
    with gathered(module):
        torch.testing.assert_close(module.weight.detach(), before, rtol=0, atol=0)


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", range(4))
def test_zeroed_local_gradients_are_not_stepped(stage):
    run(_zero_local, stage)


class Table(nn.Module):
    """A module of its own unit whose output is a view of its parameter."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(1024, 512))

    def forward(self, count):
        return self.table[:count]


class WithTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = Table(), nn.Linear(512, 2)

    def forward(self, x):
        return self.head(x + self.table(len(x)))


def _view(rank, world_size):
    torch.manual_seed(0)
    module = WithTable()
    reference = copy.deepcopy(module)
    engine, _ = start(module, 3)
    for _ in range(2):
        engine.zero_grad()
        engine.backward(module(torch.zeros(8, 512)).sum())
    reference(torch.zeros(8, 512)).sum().backward()
    for ours, expected in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full_grad(ours), expected.grad)


@pytest.mark.filterwarnings("ignore:module table returns")
def test_a_unit_may_return_a_view_of_its_parameter():
    run(_view)


class SideChain(nn.Module):
    """A chain of layers that its input does not feed, computed before the rest."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(2, 8))

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(self.table)))


def _reentrant(rank, world_size, block):
    torch.manual_seed(0)
    module = nn.ModuleList(block() for _ in range(2))
    reference = copy.deepcopy(module)
    engine, _ = start(module, 3)

    def loss(layers):
        x = torch.ones(2, 8, requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x.square().sum()

    with engine.forward_context():
        value = loss(module)
    engine.backward(value)
    loss(reference).backward()
    for ours, expected in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full_grad(ours), expected.grad)


@pytest.mark.default_cases("linear")
@pytest.mark.parametrize("block", [SideChain, partial(nn.Linear, 8, 8)], ids=["chain", "linear"])
def test_reentrant_checkpoints_with_any_block(block):
    run(_reentrant, block)


class GlobalNorm(torch.optim.SGD):
    """Clips by the norm of all gradients, of which a rank has only its shard."""

    def step(self, closure=None):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm() if grads else 1
        for grad in grads:
            grad.div_(norm)
        return super().step(closure)


class CallsParent(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class NoClosure(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(group["lr"] * parameter.grad)


class AssignsData(NoClosure):
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


def _step_with(rank, world_size, optimizer, stage):
    torch.manual_seed(0)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # hooks are on the class by now
    module = nn.Linear(4, 3)
    reference = copy.deepcopy(module)
    engine, _ = start(module, stage, optimizer(module.parameters()))
    engine.backward(module(torch.ones(2, 4)).sum())
    engine.step()
    engine.close()
    expected = optimizer(reference.parameters())
    reference(torch.ones(2, 4)).sum().backward()
    expected.step()
    torch.testing.assert_close(module.weight, reference.weight)


@pytest.mark.default_cases("CallsParent-3", "AssignsData-1", "AssignsData-3")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("optimizer", [CallsParent, NoClosure, AssignsData])
def test_optimizers_of_any_kind_step_as_without_an_engine(optimizer, stage):
    run(_step_with, optimizer, stage)


def _refuse(rank, world_size, optimizer, stage):
    module = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=optimizer.__name__):
        start(module, stage, optimizer(module.parameters(), lr=0.1))


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_that_needs_a_global_norm_is_refused(stage):
    run(_refuse, GlobalNorm, stage)


@pytest.mark.default_cases("3")
@pytest.mark.refuses("LBFGS", because="it looks at all parameters at once")
@pytest.mark.parametrize("stage", range(4))
def test_lbfgs_is_refused_in_every_stage(stage):
    run(_refuse, torch.optim.LBFGS, stage)


def _scale(rank, world_size, stage):
    module = nn.Linear(4, 3)
    engine, optimizer = start(module, stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for bad in (False, True):
        loss = module(torch.ones(2, 4)).sum()
        engine.backward(scaler.scale(loss))
        if bad and rank == 0:
            part = getattr(module.weight.grad, "local", module.weight.grad)
            part.view(-1)[:1].fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        engine.zero_grad()
    return scaler.get_scale()


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loss_scaler_in_a_hand_written_loop_skips_on_all_ranks(stage):
    assert run(_scale, stage) == [2.0, 2.0]


def _nest(rank, world_size, stage):
    module = nn.Linear(4, 3)
    engine, _ = start(module, stage)
    with gathered(module, writeback=True):
        with gathered(module.weight):
            assert module.weight.shape == (3, 4)
        module.weight.data.fill_(7)
    with gathered(module):
        assert (module.weight == 7).all()
    engine.close()
    assert (module.weight == 7).all()


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", range(4))
def test_gathered_may_be_nested(stage):
    run(_nest, stage)


def _infinite_norm(rank, world_size, stage):
    module = Pair()
    engine, _ = start(module, stage)
    engine.backward(module(torch.ones(2, 4), "a"))
    assert engine.clip_grad_norm_(1.0, norm_type=torch.inf).item() == 2.0


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", range(4))
def test_the_infinity_norm_skips_what_a_rank_does_not_own(stage):
    run(_infinite_norm, stage)


def _foreign_group(rank, world_size, stage):
    module = nn.Linear(4, 3)
    engine, optimizer = start(module, stage)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
    engine.backward(module(torch.ones(2, 4)).sum())
    with pytest.raises(ValueError, match=r"\(5,\)"):
        engine.step()


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", range(4))
def test_a_foreign_parameter_added_later_is_refused_at_the_step(stage):
    run(_foreign_group, stage)


class Scalar(nn.Module):
    """A parameter that is one number, as CLIP's temperature."""

    def __init__(self):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(2.0)), nn.Linear(4, 3)

    def forward(self, x):
        return (self.layer(x) * self.scale).sum()


def _scalar(rank, world_size, stage, optimizer):
    from lightning_zero.optim.state import load_optimizer_state_dict, optimizer_state_dict

    module = Scalar()
    engine, _ = start(module, stage, optimizer(module.parameters(), lr=0.1))
    states = []
    for _ in range(2):
        engine.backward(module(torch.ones(2, 4)))
        engine.step()
        engine.zero_grad()
        (own,) = engine.optimizers
        states.append(optimizer_state_dict(own, engine.buckets, is_recipient=True))
        load_optimizer_state_dict(own, states[-1])
    key = "sum" if optimizer is torch.optim.Adagrad else "exp_avg"
    assert states[-1]["state"][0][key].shape == ()
    assert states[-1]["state"][0]["step"].item() == 2


@pytest.mark.default_cases("Adagrad-1")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_parameter_of_one_number_keeps_its_state(optimizer, stage):
    run(_scalar, stage, optimizer)


def _load_between(stage):
    from lightning_zero.optim.state import load_optimizer_state_dict, optimizer_state_dict

    module = nn.Linear(4, 3)
    engine, _ = start(module, stage, torch.optim.AdamW(module.parameters(), lr=0.1))
    (own,) = engine.optimizers

    def load():
        state = optimizer_state_dict(own, engine.buckets, is_recipient=True)
        load_optimizer_state_dict(own, state)

    engine.backward(module(torch.ones(2, 4)).sum())
    engine.step()
    engine.zero_grad()
    load()
    assert all(parameter.grad is None for parameter in module.parameters()), stage
    for _ in range(2):
        with engine.no_sync():
            engine.backward(module(torch.ones(2, 4)).sum())
        load()
    engine.backward(module(torch.ones(2, 4)).sum())
    load()
    assert engine.grad_norm().item() == pytest.approx(15**0.5 * 6), stage
    engine.close()


def _load_between_in_all_stages(rank, world_size):
    for stage in range(4):
        _load_between(stage)


def test_optimizer_states_that_are_loaded_leave_gradients_as_they_are():
    run(_load_between_in_all_stages)


class Detour(nn.Module):
    """Layers in pairs; `order` and `detours` select the order and the use of second layers."""

    def __init__(self):
        super().__init__()
        self.pairs = nn.ModuleList(
            nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(3)
        )

    def forward(self, x, order, detours):
        for index in order:
            first, second = self.pairs[index]
            x = first(second(x).tanh() if index in detours else x)
        return x.square().sum()


# By step: arguments on ranks 0 and 1. A gradient that no earlier step had comes late, when its
# bucket is being reduced, and on one rank only.
DETOURS = [
    [((0, 1, 2), ()), ((0, 1, 2), ())],
    [((0, 1, 2), ()), ((0, 1, 2), (0,))],
    [((0, 1, 2), (1,)), ((2, 1, 0), (0,))],
    [((2, 0, 1), ()), ((0, 1, 2), (0, 1, 2))],
    [((1, 2, 0), (2,)), ((0, 2, 1), ())],
]


def _complete_differently(rank, world_size, stage):
    torch.manual_seed(0)
    module = Detour()
    expected = copy.deepcopy(module)
    engine, _ = start(module, stage, reduce_bucket_size=40)
    x = torch.linspace(-1, 1, 8).view(2, 4)
    for ways in DETOURS:
        engine.zero_grad()
        expected.zero_grad()
        engine.backward(module(x, *ways[rank]))
        (torch.stack([expected(x, *way) for way in ways]).mean()).backward()
        for ours, reference in zip(module.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(full_grad(ours), reference.grad)


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", range(4))
def test_ranks_whose_gradients_complete_in_different_orders_do_not_wait_for_each_other(stage):
    run_ranks(2, _complete_differently, stage)


def _freeze_on_one(rank, world_size, stage):
    module = Detour()
    engine, _ = start(module, stage, reduce_bucket_size=40)
    x, order = torch.ones(2, 4), (0, 1, 2)
    for _ in range(2):
        engine.backward(module(x, order, order))
        engine.zero_grad()
    for index in order:
        module.pairs[index][0].requires_grad_(rank == 0 or index != 1)
    expected = r"requires_grad of parameter pairs\.1\.0\.weight differs by rank: \[True, False\]"
    with pytest.raises(RuntimeError, match=expected):
        engine.backward(module(x, order, order))


@pytest.mark.parametrize("stage", ANY_STAGE)
def test_a_parameter_that_is_frozen_on_one_rank_only_is_an_error_on_all(stage):
    run_ranks(2, _freeze_on_one, stage)


def _freeze_last_on_one(rank, world_size):
    """All parameters are unsharded before backward, whose first event is a reduction."""
    for overlap in (False, True):
        module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 16), nn.Linear(16, 4))
        engine, _ = start(module, 3, reshard_after_forward=False, overlap_comm=overlap)
        x = torch.ones(2, 4)
        engine.backward(module(x).sum())
        engine.zero_grad()
        module[2].requires_grad_(rank == 0)
        with pytest.raises(RuntimeError, match=r"requires_grad of parameter 2\.weight differs"):
            engine.backward(module(x).sum())
        module[2].requires_grad_(True)
        engine.backward(module(x).sum())
        engine.close()


def test_a_parameter_frozen_on_one_rank_is_an_error_before_the_first_reduction():
    run(_freeze_last_on_one)


def _put_wrong_data(rank, world_size):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine, _ = start(module, 2)
    x = torch.ones(2, 4)

    def use_context():
        with engine.forward_context():
            return module(x).sum()

    for use in (use_context, lambda: module(x).sum()):
        use()
        module[0].weight.data = torch.zeros(3)
        with pytest.raises(ValueError, match=r"0\.weight"):
            use()
        assert engine.coordinator.training_state is TrainingState.IDLE
        with gathered(module, writeback=True):  # refused in the middle of a step
            nn.init.constant_(module[0].weight, 0.5)
        engine.backward(use())
        engine.step()
        engine.zero_grad()
        assert engine.coordinator.training_state is TrainingState.IDLE
        module[0].weight.data = torch.zeros(4, 4)  # taken when the next step begins
        use()
        assert engine.buckets[0].params.unsharded.aliases(module[0].weight.data)
    engine.close()


def test_data_of_a_wrong_shape_is_an_error_of_the_step_that_begins_and_the_next_one_succeeds():
    run(_put_wrong_data)


def _freeze_in_turn(rank, world_size, stage):
    """Freezes during a backward that is not reduced, and so not compared."""
    module = Pair()
    engine, _ = start(module, stage, reduce_bucket_size=12)
    x = torch.ones(2, 4)
    for trains_both in (rank == 0, rank == 1):  # each rank knows one kind of the next two
        module.b.requires_grad_(trains_both)
        with engine.no_sync():
            engine.backward(module(x, "a"))
        engine.finish_reductions()
        engine.zero_grad()
        module.b.requires_grad_(True)
        engine.backward(module(x, "ab"[rank]))
        engine.zero_grad()


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [0, 1])
def test_what_is_trainable_may_differ_in_a_backward_that_is_not_reduced(stage):
    run(_freeze_in_turn, stage)


def _put_parameter(rank, world_size, stage):
    """Between two steps, the first of which has micro-batches and no backward that ends it."""
    module = Pair()
    engine, _ = start(module, stage)
    x = torch.ones(2, 4)
    for _ in range(2):
        with engine.no_sync():
            engine.backward(module(x, "a"))
    assert engine.coordinator.reducer.is_mid_step
    engine.step()
    module.c = nn.Linear(4, 3)
    with engine.no_sync(), pytest.raises(RuntimeError, match=r"c\.weight was added to the module"):
        engine.backward(module(x, "a"))


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_that_comes_after_set_up_is_found_in_the_first_micro_batch(stage):
    run(_put_parameter, stage)


def _fail_with_wrong_data(rank, world_size):
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    engine, _ = start(module, 3, reshard_after_forward=False)
    x = torch.ones(2, 4)

    def use_and_spoil():
        with engine.forward_context():
            module(x)
            for layer in module[:3]:
                layer.weight.data, layer.bias.data = torch.zeros(3), torch.zeros(2)
            raise ArithmeticError("out of luck")

    def spoil_later():
        with engine.forward_context():
            module(x)
            module[1].weight.data = torch.zeros(3)

    for _ in range(2):
        with pytest.raises(ArithmeticError):
            use_and_spoil()
        with pytest.warns(UserWarning, match=r"after an exception: .*0\.weight"):
            engine.ensure_run()
        assert engine.coordinator.training_state is TrainingState.IDLE
        assert not any(bucket.params.is_unsharded for bucket in engine.buckets)
        engine.backward(module(x).sum())
        engine.step()
        engine.zero_grad()
    spoil_later()
    with pytest.raises(ValueError, match=r"1\.weight"):
        engine.close()
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert module(x).shape == x.shape


def test_data_of_a_wrong_shape_does_not_prevent_resharding_after_an_exception_or_at_the_end():
    run(_fail_with_wrong_data)


class Scaled(nn.Parameter):
    """A parameter of a class of the user's own."""

    @property
    def doubled(self):
        return 2 * self


def _use_own_class(rank, world_size, stage):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in module:
        layer.weight = Scaled(layer.weight.data)
    plain = copy.deepcopy(module)
    engine, _ = start(module, stage)
    x = torch.ones(2, 4)
    for _ in range(3):
        assert [isinstance(p, Scaled) for p in module.parameters()] == [True, False] * 3
        with engine.forward_context():
            loss = module(x).sum() + sum(layer.weight.doubled.sum() for layer in module)
        engine.backward(loss)
        (plain(x).sum() + sum(layer.weight.doubled.sum() for layer in plain)).backward()
        engine.step()
        engine.zero_grad()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        plain.zero_grad()
    engine.close()
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert type(p) is type(q)
        torch.testing.assert_close(p.detach(), q.detach())


@pytest.mark.filterwarnings("ignore:parameter .* used outside")
@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_stay_of_their_own_class_while_they_are_sharded(stage):
    run(_use_own_class, stage)


def _want_some(rank, world_size, stage):
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    plain = copy.deepcopy(module)
    engine, _ = start(module, stage)
    for _ in range(3):
        engine.backward(module(torch.ones(2, 4)).sum(), inputs=[module[1].weight, module[2].bias])
        plain(torch.ones(2, 4)).sum().backward(inputs=[plain[1].weight, plain[2].bias])
        found = [p.grad is not None for p in module.parameters()]
        assert found == [False, False, True, False, False, True, False, False]
        for p, q in ((module[1].weight, plain[1].weight), (module[2].bias, plain[2].bias)):
            torch.testing.assert_close(full_grad(p), q.grad)
        params = [bucket.params for bucket in engine.buckets]
        assert not any(own.is_unsharded for own in params if own.are_sharded)
        engine.zero_grad()
        plain.zero_grad()
        assert not any(unit.stays_unsharded for unit in engine.coordinator.units[1:])


@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_a_backward_to_chosen_parameters_gives_these_gradients_and_reshards_everything(stage):
    torch.manual_seed(0)
    run(_want_some, stage)


def _differentiate_twice(rank, world_size, stage):
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    engine, _ = start(module, stage)
    loss = module(torch.ones(2, 4)).sum()
    with pytest.raises(RuntimeError, match="has a graph, because backward"):
        engine.backward(loss, create_graph=True)
    engine.close()


@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_a_gradient_with_a_graph_is_refused(stage):
    run(_differentiate_twice, stage)


def _with_earlier_gradients(rank, world_size, stage):
    """A gradient from before the engine on both ranks, on one, and on none."""
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    earlier = {"0.weight": rank + 1.0} | ({"1.bias": 4.0} if rank else {})
    for name, value in earlier.items():
        net.get_parameter(name).grad = torch.full_like(net.get_parameter(name), value)
    net[2].weight.grad = torch.full((3, 3), 6.0 * rank).to_sparse()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    engine = Engine(net, [optimizer], ZeroConfig(stage=stage))
    engine.backward(net(torch.ones(1, 3)).sum() * 0)
    engine.step()
    engine.close()
    return {name: (before[name] - p.detach()).mean().item() for name, p in net.named_parameters()}


@pytest.mark.parametrize("stage", ANY_STAGE)
def test_gradients_from_before_the_engine_are_averaged_as_by_ddp(stage):
    mean = {"0.weight": 1.5, "1.bias": 2.0, "2.weight": 3.0}
    for steps in run_ranks(2, _with_earlier_gradients, stage):
        assert steps == pytest.approx({name: 0.1 * mean.get(name, 0) for name in steps}, abs=1e-6)


class Complex(nn.Module):
    """Multiplies by a complex weight, stored as one parameter or as real and imaginary parts."""

    def __init__(self, is_split):
        super().__init__()
        torch.manual_seed(0)
        w = torch.randn(4, dtype=torch.complex64)
        self.w = nn.Parameter(torch.view_as_real(w) if is_split else w)
        self.register_buffer("phase", torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        w = self.w if self.w.is_complex() else torch.view_as_complex(self.w)
        return (x * self.phase * w).abs().square().sum()


def _train_complex(rank, world_size):
    for stage in range(4):
        refused = Complex(is_split=False)
        with pytest.raises(ValueError, match=r"Parameter w is complex .*complex64.*view_as_real"):
            Engine(refused, [torch.optim.SGD(refused.parameters(), 0.1)], ZeroConfig(stage=stage))
        split, joined = Complex(is_split=True), Complex(is_split=False)
        if rank:
            split.phase.zero_()  # the engine copies rank 0's
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (split, joined)]
        engine = Engine(split, optimizers[:1], ZeroConfig(stage=stage))
        xs = torch.randn(2, world_size, 4)
        for x in xs:
            engine.backward(split(x[rank]))
            (sum(joined(each) for each in x) / world_size).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        engine.close()
        torch.testing.assert_close(torch.view_as_complex(split.w.detach()), joined.w.detach())


def test_complex_parameters_are_refused_and_train_as_real_and_imaginary_parts():
    run_ranks(2, _train_complex)
