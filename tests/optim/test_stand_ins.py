"""What the user's optimizer sees of the steps of its copies, on two ranks, against plain torch."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

from lightning_zero import Engine, ZeroConfig
from lightning_zero.optim.clone import copy_back, copy_of, settings_of
from lightning_zero.optim.probe import CannotStepError, probe
from lightning_zero.strategy.announce import announce
from tests.support.warm import run_ranks


class Net(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(6, 6) for _ in range(3)))


class ByPosition(torch.optim.SGD):
    """Finds the rate of a parameter by its place in the group; counts its calls."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for number, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.01 * (number + 1))


class Restarting(torch.optim.SGD):
    """Counts the steps of a parameter, and begins again after every third."""

    num_calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_calls += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                self.state[p]["n"] = self.state[p].get("n", 0) + 1
                p.sub_(p.grad, alpha=0.01 * self.state[p]["n"])
                if self.state[p]["n"] == 3:
                    del self.state[p]


def _train(net, optimizer, engine, rank):
    for number in range(7):
        net[1].requires_grad_(number % 2 == 0)
        x = torch.linspace(-1, 1, 24).view(4, 6) * (1 + number)
        if engine is None:
            net(x).square().mean().backward()
        else:
            engine.backward(net(x[2 * rank : 2 * rank + 2]).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _trained(rank, world_size, stage, kind, assumed):
    net = Net()
    optimizer = kind(net.parameters(), lr=0.1)
    config = ZeroConfig(stage=stage, assume_elementwise=assumed, reduce_bucket_size=50)
    engine = Engine(net, [optimizer], config)
    _train(net, optimizer, engine, rank)
    engine.close()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("assumed", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", [ByPosition, Restarting])
def test_groups_keep_their_order_and_deleted_states_stay_deleted(kind, stage, assumed):
    net = Net()
    optimizer = kind(net.parameters(), lr=0.1)
    _train(net, optimizer, None, None)
    for found in run_ranks(2, _trained, stage, kind, assumed):
        torch.testing.assert_close(found, list(net.parameters()), rtol=1e-5, atol=1e-6)


def _wrapped_before(rank, world_size):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own_step = optimizer.step
    optimizer.step = lambda *args: own_step(*args)
    with pytest.raises(ValueError, match=r"SGD.step has been replaced by .*lambda.*afterwards"):
        Engine(net, [optimizer], ZeroConfig(stage=3))
    del optimizer.step
    engine = Engine(net, [optimizer], ZeroConfig(stage=3))
    calls, own_step = [], optimizer.step
    optimizer.step = lambda *args: (calls.append(1), own_step(*args))
    engine.backward(net(torch.ones(2, 6)).sum())
    optimizer.step()
    engine.close()
    assert calls == [1]
    assert type(optimizer.state) is not dict


def test_a_step_that_is_replaced_before_the_engine_is_an_error_that_changes_nothing():
    run_ranks(2, _wrapped_before)


class Restored(torch.optim.SGD):
    """Has counters of all kinds, and an override that looks like the parent's."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.counts, self.history, self.numbers = {"n": 0}, [], itertools.count()
        self.total, self.phase, self.scaled = torch.zeros(3), "warm", self._scaled

    def _scaled(self, grad):
        return grad * (1 + 0.01 * self.counts["n"])

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure=None):
        self.counts["n"] += 1
        self.history.append(next(self.numbers))
        self.total.add_(1)
        self.phase = "main"
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.num_steps = getattr(p, "num_steps", 0) + 1
                if p.grad is not None:
                    p.grad.copy_(self.scaled(p.grad).sign())
        super().step()
        return self.counts["n"]

    def train(self):
        return self


def _counted(rank, world_size, stage):
    net, options = Net(), {"assume_elementwise": ["Restored"]} if stage == 3 else {}
    optimizer = Restored(net.parameters(), lr=0.1)
    config = ZeroConfig(stage=stage, reduce_bucket_size=50, **options)
    engine = Engine(net, [optimizer], config)
    announce(engine, num_micro_batches=1)
    for number in range(3):
        engine.backward(net(torch.ones(2, 6)).square().mean())
        assert optimizer.step() == number + 1
        optimizer.zero_grad()
        assert optimizer.train() is optimizer
    found = [optimizer.counts, optimizer.history, optimizer.total.tolist(), optimizer.phase]
    assert found == [{"n": 3}, [0, 1, 2], [3.0] * 3, "main"]
    with pytest.raises(TypeError, match=r"Restored.step\(\) takes only a closure .* got scale"):
        optimizer.step(scale=2)
    assert optimizer.scaled.__self__ is optimizer
    assert {p.num_steps for p in net.parameters()} == {3}
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_attributes_change_as_often_as_the_user_steps(stage):
    run_ranks(2, _counted, stage)


def _snapshot(rank, world_size):
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    engine = Engine(net, [optimizer], ZeroConfig(stage=1))
    for _ in range(2):
        saved = engine.optimizer_state(optimizer)
        engine.backward(net(torch.ones(2, 6)).sum())
        optimizer.step()
    assert not saved or {float(s["step"]) for s in saved["state"].values()} == {1.0}
    engine.close()


def test_a_saved_state_does_not_change_with_later_steps():
    run_ranks(2, _snapshot)


def _after_close(rank, world_size):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = Engine(net, [optimizer], ZeroConfig(stage=3))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine.backward(net(torch.ones(2, 6)).sum())
    optimizer.step()
    scheduler.step()
    bucket = weakref.ref(engine.buckets[0])
    engine.close()
    del engine
    gc.collect()
    assert bucket() is None
    before = net[0].weight.detach().clone()
    net(torch.ones(2, 6)).sum().backward()
    assert optimizer.step(lambda: "loss") == "loss"
    assert not torch.equal(net[0].weight, before)


def test_a_scheduler_made_after_the_engine_keeps_nothing_of_it():
    run_ranks(1, _after_close)


def _with_hooks(rank, world_size):
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    seen = []
    engine = Engine(net, [optimizer], ZeroConfig(stage=3))
    engine.backward(net(torch.ones(2, 6)).sum())
    optimizer.step()
    optimizer.register_state_dict_post_hook(lambda own, state: seen.append(own))
    optimizer.register_load_state_dict_pre_hook(lambda own, state: seen.append(own))
    optimizer.register_load_state_dict_post_hook(seen.append)
    optimizer.register_step_pre_hook(lambda own, args, kwargs: seen.append(own))
    optimizer.register_step_post_hook(lambda own, args, kwargs: seen.append(own))
    optimizer.load_state_dict(optimizer.state_dict())
    engine.backward(net(torch.ones(2, 6)).sum())
    optimizer.step()
    engine.optimizer_state(optimizer)
    assert len(seen) == 6
    assert all(own is optimizer for own in seen)
    engine.close()


def test_hooks_get_the_users_optimizer():
    run_ranks(1, _with_hooks)


class Keyed(torch.optim.SGD):
    """Has a rate for each parameter."""

    def __init__(self, parameters, lr):
        parameters = list(parameters)
        self.rates = dict.fromkeys(parameters, 0.5)
        super().__init__(parameters, lr)


class Around(torch.optim.Optimizer):
    """Steps another optimizer, like Lookahead."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


def _refuse_wrapper(rank, world_size):
    for options in ({}, {"assume_elementwise": True}):
        net = Net().bfloat16()
        optimizer = Around(torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises(CannotStepError, match=r"Around .* in any stage: it wraps another"):
            Engine(net, [optimizer], ZeroConfig(stage=0, **options))


def test_an_optimizer_with_parameters_as_keys_of_an_attribute_is_refused():
    optimizer = Keyed(Net().parameters(), lr=0.1)
    with pytest.raises(CannotStepError, match=r"Keyed .* its attribute 'rates' has param"):
        probe(optimizer, torch.device("cpu"))


def test_an_optimizer_around_another_one_is_refused_in_stage_0_too():
    run_ranks(1, _refuse_wrapper)


class Zeroing(torch.optim.SGD):
    """Drops the gradients in its step, from a given step on."""

    set_to_none, num_kept = True, 0

    def step(self, closure=None):
        super().step()
        if self.num_kept == 0:
            self.zero_grad(self.set_to_none)
        self.num_kept -= 1


def _refuse_zeroing(rank, world_size):
    for stage, set_to_none in ((0, True), (3, False)):
        net = Net()
        optimizer = Zeroing(net.parameters(), lr=0.1)
        optimizer.set_to_none = set_to_none
        with pytest.raises(CannotStepError, match=r"Zeroing .* sets gradients to None or zero.*"):
            Engine(net, [optimizer], ZeroConfig(stage=stage))
    for assumed in (False, True):
        net = Net()
        optimizer = Zeroing(net.parameters(), lr=0.1)
        optimizer.num_kept = 50  # more than the probe steps
        engine = Engine(net, [optimizer], ZeroConfig(stage=3, assume_elementwise=assumed))
        optimizer.num_kept = 0
        engine.backward(net(torch.ones(2, 6)).sum())
        with pytest.raises(ValueError, match=r"call optimizer.zero_grad\(\) after it"):
            optimizer.step()
        engine.close()


def test_a_step_that_sets_gradients_to_none_or_zero_is_an_error():
    run_ranks(2, _refuse_zeroing)


class Rated(torch.optim.SGD):
    """Changes a setting that is a tensor, in place."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["rate"].mul_(0.5)


def _step_rated(rank, world_size):
    net = Net()
    optimizer = Rated(net.parameters(), lr=0.1)
    for group in optimizer.param_groups:
        group["rate"] = torch.ones(())
    engine = Engine(net, [optimizer], ZeroConfig(stage=1, assume_elementwise=True))
    engine.backward(net(torch.ones(2, 6)).sum())
    own = optimizer.param_groups[0]["rate"]
    optimizer.step()
    engine.close()
    return float(own)


def test_a_setting_that_is_a_tensor_is_changed_in_place():
    assert run_ranks(1, _step_rated) == [0.5]


def test_an_attribute_that_is_deleted_during_a_step_stays_deleted():
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    optimizer.grad_scale = torch.ones(())  # of a loss scaler
    groups = [settings_of(group) for group in optimizer.param_groups]
    made = copy_of(optimizer, groups)
    given = dict(vars(made))
    made.grad_scale.mul_(2)
    del optimizer.grad_scale
    copy_back(optimizer, made, groups, given)
    assert not hasattr(optimizer, "grad_scale")


class NotConstructed(torch.optim.Optimizer):
    """Steps another optimizer, and has its groups, without torch's constructor."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_optimizer_without_torchs_constructor_is_refused():
    optimizer = NotConstructed(torch.optim.SGD(Net().parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"NotConstructed has no .*wraps another.*pass that one"):
        Engine(Net(), [optimizer])


def test_a_name_in_assume_elementwise_that_is_no_optimizers_class_is_a_warning():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"names Lion, but the optimizers are of SGD"):
        Engine(net, [optimizer], ZeroConfig(assume_elementwise=["Lion"])).close()
