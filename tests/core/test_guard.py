"""NaN and infinity in a gradient are named on all ranks, and a step with them can be left out."""

from __future__ import annotations

import contextlib
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from lightning_zero import Engine, NonfiniteGradientError, NonfiniteGradientWarning, ZeroConfig
from lightning_zero.core import guard
from tests.support.fitting import arrays
from tests.support.warm import run_ranks

NAN, INF = float("nan"), float("inf")
ACCUMULATION = 4
NVME = {"device": "nvme", "nvme_path": "."}
TIERS = {
    "device": ({}, {}),
    "cpu": ({"offload_optimizer": "cpu"}, {"offload_param": "cpu"}),
    "nvme": ({"offload_optimizer": NVME}, {"offload_param": NVME}),
}
CELLS = [(0, "device")] + [(stage, tier) for stage in (1, 2, 3) for tier in TIERS]


class _Poison(torch.autograd.Function):
    """The identity; sets the first elements of the gradient."""

    @staticmethod
    def forward(ctx, weight, values):
        ctx.values = values
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad.view(-1)[: len(ctx.values)] = torch.tensor(ctx.values)
        return grad, None


class Layer(nn.Linear):
    poison = ()

    def forward(self, x):
        weight = _Poison.apply(self.weight, self.poison) if self.poison else self.weight
        return torch.tanh(nn.functional.linear(x, weight, self.bias))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer(6, 6) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def options_of(stage, tier):
    optimizer, param = TIERS[tier]
    return {"stage": stage, "reduce_bucket_size": 50} | optimizer | (param if stage == 3 else {})


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def engine_for(options, make_optimizer=adamw):
    torch.manual_seed(0)
    module = Net()
    optimizer = make_optimizer(module.parameters())
    return module, optimizer, Engine(module, optimizers=[optimizer], config=ZeroConfig(**options))


def micro_batch(rank, step, number):
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    return torch.randn(2, 6, generator=generator)


def backward(engine, module, rank, step, poison=(), at=2):
    """All micro-batches of a step. Rank 1 has `poison` in a weight of micro-batch `at`."""
    for number in range(ACCUMULATION):
        module.blocks[1].poison = poison if rank == 1 and number == at else ()
        is_last = number == ACCUMULATION - 1
        with contextlib.nullcontext() if is_last else engine.no_sync():
            engine.backward(module(micro_batch(rank, step, number)) / ACCUMULATION)


def states(engine, module, optimizer):
    """Full parameters and optimizer states, on rank 0."""
    from lightning_zero import gathered

    with gathered(module), torch.no_grad():
        found = {name: p.detach().clone().numpy() for name, p in module.named_parameters()}
    for index, state in engine.optimizer_state(optimizer).get("state", {}).items():
        found |= {f"{index} {key}": np.array(value) for key, value in state.items()}
    return found


def assert_equal(some, others):
    assert list(some) == list(others)
    for name, value in some.items():
        np.testing.assert_array_equal(value, others[name], err_msg=name)


def _warn(rank, world_size, stage, tier, policy):
    module, _, engine = engine_for(options_of(stage, tier) | {"on_nonfinite": policy})
    texts, reports = [], []
    for step in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            backward(engine, module, rank, step, (NAN, INF, NAN) if step == 1 else ())
        texts.append([str(w.message) for w in caught if w.category is NonfiniteGradientWarning])
        reports.append(engine.guard.last_report)
        engine.step()
        engine.zero_grad()
    engine.close()
    return texts, reports[1], arrays(module.state_dict())


@pytest.mark.default_cases("3-device")
@pytest.mark.shows("`on_nonfinite`")
@pytest.mark.parametrize(("stage", "tier"), CELLS)
def test_a_nan_is_named_on_all_ranks_in_its_step(stage, tier):
    warned = run_ranks(2, _warn, stage, tier, "warn")
    assert warned[1][0] == [[], [], []]  # warnings on rank 0 only
    (before, text, _), report, _ = warned[0]
    assert before == []
    assert len(text) == 1
    assert "rank 1, micro-batch 2: blocks.1.weight: 2 NaN and 1 infinity in 36 elements" in text[0]
    assert "in step 1, before their reduction" in text[0]
    assert report.found[0].rank == 1
    assert report == warned[1][1]
    silent = run_ranks(2, _warn, stage, tier, None)
    assert silent[0][:2] == ([[], [], []], None)
    assert_equal(warned[0][2], silent[0][2])  # "warn" changes no value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [8, guard._LARGE_NUMEL])
def test_a_device_finds_nan_and_infinity_in_small_and_large_gradients(numel, dtype):
    grads = [torch.full((numel,), -3.0, dtype=dtype) for _ in range(3)] + [torch.zeros(4)]
    grads[1][-1] = -INF
    grads[2][:2] = torch.tensor([INF, NAN])
    found = torch.stack(guard._maxima(grads))
    assert found.dtype == (dtype if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.float(), torch.tensor([3.0, INF, NAN, 0.0]), equal_nan=True)


def _stop(rank, world_size, stage, tier):
    module, optimizer, engine = engine_for(options_of(stage, tier) | {"on_nonfinite": "stop"})
    backward(engine, module, rank, 0)
    engine.step()
    engine.zero_grad()
    before = states(engine, module, optimizer)
    with pytest.raises(NonfiniteGradientError, match=r"rank 1, micro-batch 2: blocks\.1\.weight"):
        backward(engine, module, rank, 1, (NAN,))
    after = states(engine, module, optimizer)
    for step in (2, 3):  # and training can continue
        engine.zero_grad()
        backward(engine, module, rank, step)
        engine.step()
    later = states(engine, module, optimizer)
    engine.close()
    return before, after, later


@pytest.mark.default_cases("3-cpu")
@pytest.mark.parametrize(("stage", "tier"), CELLS)
def test_stop_leaves_parameters_and_optimizer_as_before_the_step(stage, tier):
    ranks = run_ranks(2, _stop, stage, tier)
    for before, after, later in ranks:
        assert_equal(before, after)
        assert any((later[name] != value).any() for name, value in before.items())


class CountingAdam(torch.optim.Adam):
    """Counts its calls in its settings, as Prodigy and schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.01 / group["k"]
        return super().step(closure)


def counting(parameters):
    return CountingAdam(parameters, lr=0.01)


def _skip(rank, world_size, options, make_optimizer, poison):
    module, optimizer, engine = engine_for(options | {"on_nonfinite": "skip"}, make_optimizer)
    for step in range(4):
        if step == 1 and not poison:
            continue
        if step == 1:
            warns = pytest.warns(NonfiniteGradientWarning, match=r"is skipped \(1 so far\)")
            with warns if rank == 0 else contextlib.nullcontext():
                backward(engine, module, rank, step, poison)
        else:
            backward(engine, module, rank, step)
        engine.step()
        engine.zero_grad()
    result = states(engine, module, optimizer)
    settings = {
        key: optimizer.param_groups[0][key] for key in ("lr", "k") if make_optimizer is counting
    }
    num_skipped = engine.guard.num_skipped
    engine.close()
    return result, settings, num_skipped


@pytest.mark.default_cases("3-nvme")
@pytest.mark.parametrize(("stage", "tier"), CELLS)
def test_skip_equals_a_run_without_the_batch(stage, tier):
    _assert_skips(options_of(stage, tier), adamw)


@pytest.mark.parametrize("options", [{"stage": 2, "overlap_step": True}, {"stage": 3}])
@pytest.mark.parametrize("make_optimizer", [adamw, counting])
@pytest.mark.slow
def test_skip_with_other_steps_equals_a_run_without_the_batch(options, make_optimizer):
    _assert_skips(options, make_optimizer)


def test_an_optimizer_that_counts_its_calls_does_not_count_a_skipped_one():
    _assert_skips({"stage": 1}, counting)


def _assert_skips(options, make_optimizer):
    skipped = run_ranks(2, _skip, options, make_optimizer, (INF,))
    expected = run_ranks(2, _skip, options, make_optimizer, ())
    for (state, settings, num_skipped), (other, other_settings, _) in zip(
        skipped, expected, strict=True
    ):
        assert_equal(state, other)
        assert settings == other_settings
        assert num_skipped == 1


def _with_two_skips(rank, world_size, program):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "_MAX_SKIPS", 2)
        return program(rank, world_size)


def _skip_on(rank, world_size):
    module, _, engine = engine_for({"stage": 2, "on_nonfinite": "skip"})
    texts = []
    for step, poison in enumerate([(NAN,), (NAN,), (), (NAN,), (NAN,), (NAN,)]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            backward(engine, module, rank, step, poison)
        try:
            engine.step()
        except NonfiniteGradientError as error:
            texts.append((step, str(error)))
        engine.zero_grad()
    engine.close()
    return texts


def test_too_many_skips_in_a_row_are_an_error():
    for texts in run_ranks(2, _with_two_skips, _skip_on):
        [(step, text)] = texts
        assert step == 5
        assert "More than 2 steps in a row of AdamW" in text
        assert "blocks.1.weight" in text


def _skip_one_of_two(rank, world_size):
    """The gradients of the first of two optimizers, which step in turn, are never finite."""
    torch.manual_seed(0)
    module = Net()
    optimizers = [torch.optim.SGD(module.blocks[:2].parameters(), lr=0.1)]
    optimizers.append(adamw(module.blocks[2:].parameters()))
    config = ZeroConfig(stage=2, on_nonfinite="skip")
    engine = Engine(module, optimizers=optimizers, config=config)
    for step in range(8):
        chosen = optimizers[step % 2]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.requires_grad_(optimizer is chosen)
        module.blocks[1].poison = (NAN,) if rank == 1 and chosen is optimizers[0] else ()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.backward(module(micro_batch(rank, step, 0)))
        try:
            chosen.step()
        except NonfiniteGradientError as error:
            return step, str(error)
        chosen.zero_grad()
    return None


def test_skips_of_one_optimizer_are_counted_beside_good_steps_of_another():
    for step, text in run_ranks(2, _with_two_skips, _skip_one_of_two):
        assert step == 4
        assert "in a row of SGD" in text


def _leave_out(rank, world_size, stage):
    """The caller steps neither of two non-finite steps; rank 0 zeroes no gradients before one."""
    module, optimizer, engine = engine_for({"stage": stage, "on_nonfinite": "skip"})
    reports = []
    for step in range(3):
        poison = (NAN,) if step < 2 else ()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            backward(engine, module, rank, step, poison)
        reports.append((engine.guard.last_report.step, engine.guard.last_report.found))
        if step < 2:
            engine.zero_grad()
    before = states(engine, module, optimizer)
    skips_step = engine.guard.skips_step
    engine.step()
    after = states(engine, module, optimizer)
    engine.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backward(engine, module, rank, 3, (NAN,))
    if rank == 0:
        engine.zero_grad()  # no rank may leave the skip alone
    backward(engine, module, rank, 4)
    assert engine.guard.skips_step
    engine.close()
    return reports, skips_step, before, after


@pytest.mark.default_cases("2")
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_that_the_caller_leaves_out_is_a_step(stage):
    for reports, skips_step, before, after in run_ranks(2, _leave_out, stage):
        assert [step for step, _ in reports] == [0, 1, 1]
        assert [found[0].micro_batch for _, found in reports] == [2, 2, 2]
        assert not skips_step
        assert not before or any((after[name] != value).any() for name, value in before.items())


def _zero_and_go_on(rank, world_size, options, syncs, zero_):
    """A step whose gradients are zeroed without a step, then a clean one, then one on rank 0."""
    module, _, engine = engine_for(options | {"on_nonfinite": "skip"})
    module.blocks[1].poison = (NAN,) if rank == 1 else ()
    with contextlib.nullcontext() if syncs else engine.no_sync():
        warned = pytest.warns(NonfiniteGradientWarning) if rank == 0 else contextlib.nullcontext()
        with warned if syncs else contextlib.nullcontext():
            engine.backward(module(micro_batch(rank, 0, 0)))
    skipped = [engine.guard.skips_step]
    engine.zero_grad(set_to_none=not zero_)
    module.blocks[1].poison = ()
    with contextlib.nullcontext() if syncs or rank != 0 else pytest.warns(match="No step is"):
        engine.backward(module(micro_batch(rank, 1, 0)))
    skipped.append(engine.guard.skips_step)
    assert (engine.guard.last_report.step, engine.guard.last_report.is_current) == (0, syncs)
    engine.close()
    return skipped


@pytest.mark.parametrize(
    ("options", "syncs", "zero_"),
    [
        ({"stage": 1}, True, True),
        ({"stage": 3, "offload_optimizer": "cpu"}, True, True),
        ({"stage": 1}, False, False),
    ],
)
def test_gradients_that_are_zeroed_without_a_step_skip_no_later_step(options, syncs, zero_):
    found = run_ranks(2, _zero_and_go_on, options, syncs, zero_)
    assert found == 2 * [[syncs, False]]


def _dropped_alone(rank, stage):
    """Rank 0 alone has dropped its gradients within a step, and will have a NaN."""
    module, optimizer, engine = engine_for({"stage": stage, "on_nonfinite": "skip"})
    engine.backward(module(micro_batch(rank, 0, 0)))
    for parameter in module.parameters() if rank == 0 else ():
        parameter.grad = None
    module.blocks[1].poison = (NAN,) if rank == 0 else ()
    return module, optimizer, engine, states(engine, module, optimizer)


def _zero_alone(rank, world_size):
    """The NaN is in that step, and in the next."""
    module, optimizer, engine, before = _dropped_alone(rank, 3)
    reports = []
    for step in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.backward(module(micro_batch(rank, step, 1)))
        report = engine.guard.last_report
        reports.append((report.step, report.found[0].step, report.found[0].micro_batch))
        assert engine.guard.skips_step
        engine.step()
        engine.zero_grad()
    assert_equal(states(engine, module, optimizer), before)
    engine.close()
    return reports


def test_a_rank_that_zeroes_alone_finds_its_nan_in_the_step_of_all():
    assert run_ranks(2, _zero_alone) == 2 * [[(0, 0, 1), (1, 1, 0)]]


def _zero_alone_without_a_round(rank, world_size):
    """The NaN is in a backward that ends without a round."""
    module, optimizer, engine, before = _dropped_alone(rank, 1)
    with engine.no_sync():
        engine.backward(module(micro_batch(rank, 0, 1)))
    module.blocks[1].poison = ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.backward(module(micro_batch(rank, 0, 2)))
    engine.step()
    assert_equal(states(engine, module, optimizer), before)
    found = engine.guard.last_report.found[0]
    engine.close()
    return found.step, found.micro_batch


def test_a_rank_that_zeroes_alone_finds_its_nan_before_the_round_in_the_step_of_all():
    assert run_ranks(2, _zero_alone_without_a_round) == 2 * [(0, 1)]


def _end(rank, world_size):
    module, _, engine = engine_for({"stage": 1})
    module.blocks[1].poison = (NAN,) if rank == 1 else ()
    with engine.no_sync():
        engine.backward(module(micro_batch(rank, 0, 0)))
    with pytest.warns(match="rank 1, micro-batch 0") if rank == 0 else contextlib.nullcontext():
        engine.guard.finish()
    engine.guard.finish()
    engine.close()


def test_what_is_not_reported_yet_is_reported_at_the_end_of_training():
    run_ranks(2, _end)


def _two_backwards_then_two_steps(rank, world_size):
    """As in a GAN: the second backward does not end the skip of the first."""
    module, _, engine = engine_for(
        {"stage": 2, "on_nonfinite": "skip"}, lambda ps: torch.optim.SGD(list(ps)[:2], lr=0.1)
    )
    engine.attach(torch.optim.SGD(list(module.parameters())[2:], lr=0.1))
    parts = list(module.parameters())
    for trained, poison in ((parts[2:], (NAN,)), (parts[:2], ())):
        for p in parts:
            p.requires_grad_(any(p is one for one in trained))
        module.blocks[1].poison = poison if rank == 1 else ()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.backward(module(micro_batch(rank, 0, 0)))
    skips_step = engine.guard.skips_step
    engine.close()
    return skips_step


def test_a_second_backward_before_the_steps_keeps_the_skip():
    assert all(run_ranks(2, _two_backwards_then_two_steps))


def _an_optimizer_that_steps_later(rank, world_size, stage):
    module, first, engine = engine_for(
        {"stage": stage, "on_nonfinite": "skip"}, lambda ps: torch.optim.SGD(list(ps)[:2], lr=0.1)
    )
    second = torch.optim.SGD(list(module.parameters())[2:], lr=0.1)
    engine.attach(second)
    for step, poison in enumerate([(NAN,), ()]):
        module.blocks[1].poison = poison if rank == 1 else ()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.backward(module(micro_batch(rank, step, 0)))
        first.step()
        first.zero_grad()
    second.step()
    engine.close()
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_skip_drops_the_gradients_of_an_optimizer_that_steps_later(stage):
    run_ranks(2, _an_optimizer_that_steps_later, stage)


class SAM(torch.optim.SGD):
    """Evaluates its closure twice in one step."""

    def step(self, closure):
        closure()
        super().step()
        return super().step(closure)


def _retry(rank, world_size):
    """SAM is refused before the module is changed."""
    module = Net()
    optimizer = SAM(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"SAM cannot be stepped .* needs a closure"):
        Engine(module, [optimizer], ZeroConfig(stage=3))
    other = torch.optim.SGD(module.parameters(), lr=0.1)
    Engine(module, [other], ZeroConfig(stage=3)).close()


def test_after_a_refused_optimizer_the_module_can_be_used():
    run_ranks(1, _retry)


def _step_after_no_sync(rank, world_size, options):
    module, optimizer, engine = engine_for({"on_nonfinite": "skip"} | options)
    before = states(engine, module, optimizer)
    for step, poison in enumerate([(NAN,), ()]):
        module.blocks[1].poison = poison if rank == 1 else ()
        with warnings.catch_warnings(), engine.no_sync():
            warnings.simplefilter("ignore")
            engine.backward(module(micro_batch(rank, step, 0)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.step()
        engine.zero_grad()
        if step == 0:
            assert_equal(before, states(engine, module, optimizer))
    after = states(engine, module, optimizer)
    assert not before or any((after[name] != value).any() for name, value in before.items())
    assert engine.guard.num_skipped == 1
    engine.close()


@pytest.mark.default_cases("2-options0")
@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, {"stage": 1}), (2, {"stage": 2}), (4, {"stage": 2, "sharding_group_size": 2})],
)
def test_a_step_after_micro_batches_in_no_sync_is_skipped(world_size, options):
    run_ranks(world_size, _step_after_no_sync, options)


def _clip_skipped(rank, world_size):
    module, _, engine = engine_for({"stage": 2, "on_nonfinite": "skip"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backward(engine, module, rank, 0, (NAN,))
    assert not engine.clip_grad_norm_(1.0, error_if_nonfinite=True).isfinite()
    engine.step()
    assert engine.guard.num_skipped == 1
    engine.close()


def test_clipping_a_skipped_step_is_no_error():
    run_ranks(2, _clip_skipped)


def _everything(rank, world_size):
    """A NaN in the loss makes all gradients NaN."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    optimizer = adamw(module.parameters())
    engine = Engine(module, optimizers=[optimizer], config=ZeroConfig(stage=1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.backward(module(torch.ones(1, 2)).sum() * NAN)
    report = engine.guard.last_report
    engine.close()
    return len(report.found), report.num_more, str(report)


def test_a_report_names_a_bounded_number_of_gradients():
    for num_found, num_more, text in run_ranks(2, _everything):
        assert (num_found, num_more) == (2 * 64, 2 * 16)
        assert text.endswith("\n  and 152 more")


def _huge(rank, world_size):
    """Finite values whose sum is infinite; and a parameter whose gradient comes late."""
    module, _, engine = engine_for({"stage": 2, "on_nonfinite": "stop"})
    backward(engine, module, rank, 0, (3e38, 3e38))
    engine.close()


def test_huge_finite_gradients_are_not_reported():
    run_ranks(2, _huge)


def _branches(rank, world_size, stage):
    """A parameter that only rank 1 uses is reduced after the end of the backward."""
    torch.manual_seed(0)
    module = Net()
    module.blocks.append(Layer(6, 6))
    engine = Engine(
        module,
        optimizers=[adamw(module.parameters())],
        config=ZeroConfig(stage=stage, on_nonfinite="stop"),
    )
    last = module.blocks[3]
    for step in range(3):
        del module.blocks[3:]
        if rank == 1 and step == 2:
            module.blocks.append(last)
            last.poison = (NAN,)
        loss = module(micro_batch(rank, step, 0))
        if step < 2:
            engine.backward(loss)
            engine.step()
            engine.zero_grad()
            continue
        with pytest.raises(NonfiniteGradientError, match=r"rank 1, micro-batch 0: blocks\.3"):
            engine.backward(loss)
    engine.close()


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_of_one_rank_only_is_named(stage):
    run_ranks(2, _branches, stage)


def test_unknown_reactions_are_refused():
    with pytest.raises(ValueError, match="on_nonfinite must be"):
        ZeroConfig(on_nonfinite="raise")


class _Wide(torch.autograd.Function):
    """The identity; its gradient is float32, and finite only there."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full(grad.shape, 1e5)


def _overflow(rank, world_size, stage):
    module = nn.Linear(8, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    config = ZeroConfig(stage=stage, param_dtype=torch.float16, on_nonfinite="skip")
    engine = Engine(module, [optimizer], config)
    with warnings.catch_warnings(), engine.forward_context():
        warnings.simplefilter("ignore")
        engine.backward(_Wide.apply(module.weight).float().sum())
    engine.step()
    return engine.guard.num_skipped


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_gradient_that_overflows_in_the_dtype_in_which_it_is_sent_is_found(stage):
    assert run_ranks(2, _overflow, stage) == [1, 1]
