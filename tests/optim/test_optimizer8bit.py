"""Optimizers with moments of 8 bits, alone: their values, their states, and what they load."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from lightning_zero.optim import AdamW8bit, Lion8bit, SGD8bit
from lightning_zero.optim.blocks import unpacked_bytes
from lightning_zero.optim.dynamic8 import BLOCK_NUMEL, decode, encode_
from tests.support.lion import Lion

SIZES = [(70, 61), (5001,), (64, 64), (3, 5), (2, 3, 1025)]  # two of at most 4,096 elements
FULL = {
    AdamW8bit: torch.optim.AdamW,
    Lion8bit: Lion,
    SGD8bit: partial(torch.optim.SGD, momentum=0.9),
}  # with float32 moments
kinds = pytest.mark.parametrize("kind", FULL)


def _parameters(sizes=SIZES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def _train(parameters, optimizer, steps):
    for number in steps:
        generator = torch.Generator().manual_seed(1 + number)
        for parameter in parameters:
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.grad = drawn.to(parameter.dtype) * 0.1
        optimizer.step()


def _coded(values, is_signed):
    codes = torch.zeros(values.shape, dtype=torch.uint8)
    scales = torch.zeros(len(values))
    encode_(values.clone(), codes, scales, is_signed=is_signed)
    return codes, scales


def _assert_same(state, other):
    assert state.keys() == other.keys()
    for key, value in state.items():
        assert (value.dtype, value.shape) == (other[key].dtype, other[key].shape), key
        assert torch.equal(value, other[key]), key


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_near_and_of_decoded_values_the_same(is_signed):
    values = torch.randn(500, BLOCK_NUMEL) * torch.logspace(-18, 3, 500).unsqueeze(1)
    values = values if is_signed else values.abs()
    values[7], values[8, 1:] = 0.0, 0.0
    codes, scales = _coded(values, is_signed)
    decoded = decode(codes, scales, is_signed=is_signed)
    # Relative to the largest number of a block: half of the distance in the topmost decade.
    worst = (decoded - values).abs().amax(1) / values.abs().amax(1).clamp(min=1e-30)
    assert worst.max() < (0.0076 if is_signed else 0.0041)
    assert torch.equal(decoded.abs().amax(1), values.abs().amax(1))
    again = _coded(decoded, is_signed)
    assert torch.equal(codes, again[0])
    assert torch.equal(scales, again[1])
    if not is_signed:
        assert torch.equal(decoded == 0, values == 0)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_makes_its_block_not_finite_and_no_other(number):
    values = torch.randn(3, BLOCK_NUMEL)
    values[1, 5] = number
    decoded = decode(*_coded(values, is_signed=True), is_signed=True)
    assert not decoded[1].isfinite().any()
    assert decoded[[0, 2]].isfinite().all()


@kinds
def test_moments_of_large_tensors_have_a_byte_per_element_and_of_small_ones_float32(kind):
    parameters = _parameters()
    optimizer = kind(parameters)
    _train(parameters, optimizer, range(1))
    for parameter in parameters:
        numel, state = parameter.numel(), optimizer.state[parameter]
        nbytes = sum(value.nbytes for value in state.values() if value.dim())
        blocks = -(-numel // 256)
        of_moment = 4 * numel if numel <= 4096 else numel + 4 * blocks
        assert nbytes == {AdamW8bit: 2}.get(kind, 1) * of_moment


def test_small_tensors_are_stepped_as_by_adamw():
    (mine, own), options = (_parameters([(64, 64)]) for _ in range(2)), {"lr": 0.1, "eps": 1e-5}
    _train(mine, AdamW8bit(mine, weight_decay=0.1, **options), range(20))
    _train(own, torch.optim.AdamW(own, weight_decay=0.1, **options), range(20))
    assert torch.allclose(mine[0], own[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Lion8bit, {"betas": (0.75, 0.9), "weight_decay": 0.1}),
        (SGD8bit, {"momentum": 0.75, "weight_decay": 0.125}),
        (SGD8bit, {"momentum": 0.5, "weight_decay": 0.125, "nesterov": True}),
    ],
)
def test_small_tensors_have_the_bits_of_float32_moments(kind, options):
    """Powers of two: torch may multiply and add in one rounding, which then is the same."""
    (mine, own), options = (_parameters([(64, 64)]) for _ in range(2)), {"lr": 0.25, **options}
    for parameters, made in ((mine, kind), (own, FULL[kind])):
        _train(parameters, made(parameters, **options), range(5))
    assert torch.equal(mine[0], own[0])


@pytest.mark.parametrize("kind", [Lion8bit, SGD8bit])
def test_the_moment_differs_from_float32_by_the_error_of_its_codes(kind):
    """In each step, the error of before is decayed, and one of at most 0.0076 is added."""
    mine, own = _parameters([(20000,)]), _parameters([(20000,)])
    optimizer, other = kind(mine), FULL[kind](own)
    _train(mine, optimizer, range(10))
    _train(own, other, range(10))
    ((moment, expected),) = other.state[own[0]].items()
    found = optimizer.unpack_state(optimizer.state[mine[0]])[moment]
    largest = expected.abs().max()
    assert 0 < (found - expected).abs().max() < 10 * 0.0076 * largest
    assert (found - expected).square().mean() < (0.01 * largest) ** 2
    moved = (own[0] - _parameters([(20000,)])[0]).abs().mean()
    assert (mine[0] - own[0]).abs().mean() < 0.05 * moved


def test_it_trains_like_adamw():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 67), nn.Linear(67, 1))
    teacher = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))
    losses = []
    for kind in (AdamW8bit, torch.optim.AdamW):
        module, generator, last = copy.deepcopy(network), torch.Generator().manual_seed(1), []
        optimizer = kind(module.parameters(), lr=1e-3)
        for _ in range(400):  # new samples in each step
            x = torch.randn(256, 64, generator=generator)
            optimizer.zero_grad()
            loss = (module(x) - teacher(x).detach()).square().mean()
            loss.backward()
            optimizer.step()
            last.append(loss.item())
        losses.append(sum(last[-50:]) / 50)
    assert losses[0] == pytest.approx(losses[1], rel=0.02), losses
    assert losses[0] < 0.1 * last[0]


@kinds
def test_a_block_does_not_depend_on_the_rest_of_its_tensor(kind):
    full = _parameters([(20, 1024)])
    _train(full, kind(full), range(5))
    generators = [torch.Generator().manual_seed(1 + number) for number in range(5)]
    grads = [torch.randn((20, 1024), generator=generator) * 0.1 for generator in generators]
    start = _parameters([(20, 1024)])[0].detach().view(-1)
    for first, last in ((0, 5120), (5120, 15616), (15616, 20480)):
        part = nn.Parameter(start[first:last].clone())
        optimizer = kind([part])
        for grad in grads:
            part.grad = grad.view(-1)[first:last].clone()
            optimizer.step()
        assert torch.equal(part, full[0].view(-1)[first:last])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@kinds
def test_a_gradient_that_is_not_finite_is_in_all_of_its_block_within_two_steps(kind, number):
    (parameter,) = _parameters([(5001,)])
    optimizer = kind([parameter])
    for step in range(2):
        parameter.grad = torch.full_like(parameter, 0.1)
        parameter.grad[700] = 0.1 if step else number
        optimizer.step()
    assert not parameter[512:768].isfinite().any()
    assert parameter[:512].isfinite().all()
    assert parameter[768:].isfinite().all()


@kinds
def test_resuming_its_own_state_or_one_in_float32_gives_the_same_bits(kind):
    parameters = _parameters()
    optimizer = kind(parameters)
    _train(parameters, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    unpacked = {n: optimizer.unpack_state(state) for n, state in saved["state"].items()}
    for state in (saved["state"], unpacked):
        mine = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        resumed = kind(mine)
        resumed.load_state_dict(copy.deepcopy({**saved, "state": state}))
        expected, given = copy.deepcopy(parameters), copy.deepcopy(saved)
        again = kind(expected)
        again.load_state_dict(given)
        _train(mine, resumed, range(3, 6))
        _train(expected, again, range(3, 6))
        for one, other in zip(mine, expected, strict=True):
            assert torch.equal(one, other)
            _assert_same(resumed.state[one], again.state[other])


@pytest.mark.parametrize("saves_codes", [True, False])
@kinds
def test_bytes_of_unpacked_states_are_known_before_they_are_made(kind, saves_codes):
    parameters = _parameters()
    optimizer = kind(parameters, saves_codes=saves_codes)
    _train(parameters, optimizer, range(1))
    for state in optimizer.state.values():
        unpacked = optimizer.unpack_state(state)
        assert unpacked_bytes(optimizer, state) == sum(value.nbytes for value in unpacked.values())


@pytest.mark.parametrize("kind", [AdamW8bit, Lion8bit])
def test_the_full_class_resumes_an_unpacked_state_and_fails_on_a_packed_one(kind):
    parameters = _parameters()
    optimizer = kind(parameters)
    _train(parameters, optimizer, range(3))
    saved = optimizer.state_dict()
    other = FULL[kind](parameters)
    unpacked = {n: optimizer.unpack_state(state) for n, state in saved["state"].items()}
    other.load_state_dict(copy.deepcopy({**saved, "state": unpacked}))
    _train(parameters, other, range(3, 5))
    other.load_state_dict(saved)
    with pytest.raises(KeyError, match="exp_avg"):
        _train(parameters, other, range(1))


@kinds
def test_it_resumes_a_state_of_the_full_class(kind):
    mine, own = _parameters(), _parameters()
    other = FULL[kind](own)
    _train(own, other, range(5))
    with torch.no_grad():
        for one, theirs in zip(mine, own, strict=True):
            one.copy_(theirs)
    optimizer = kind(mine)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    _train(own, other, range(5, 7))
    _train(mine, optimizer, range(5, 7))
    for one, theirs in zip(mine, own, strict=True):
        atol = 4.1e-4 if kind is Lion8bit else 2e-4  # a step of another sign, or two
        assert torch.allclose(one, theirs, atol=atol)


def test_sgd_of_torch_resumes_an_unpacked_state():
    mine, own = _parameters(), _parameters()
    optimizer, other = SGD8bit(mine, nesterov=True), torch.optim.SGD(own)
    _train(mine, optimizer, range(3))
    states = optimizer.state_dict()
    unpacked = {n: optimizer.unpack_state(state) for n, state in states["state"].items()}
    other.load_state_dict(copy.deepcopy({**states, "state": unpacked}))
    with torch.no_grad():
        for one, theirs in zip(mine, own, strict=True):
            theirs.copy_(one)
    _train(mine, optimizer, range(3, 5))
    _train(own, other, range(3, 5))
    for one, theirs in zip(mine, own, strict=True):
        assert torch.allclose(one, theirs, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@kinds
def test_parameters_of_any_dtype_have_float32_scales(kind, dtype):
    parameters = [nn.Parameter(torch.randn(5000).to(dtype))]
    optimizer = kind(parameters, weight_decay=0.1)
    _train(parameters, optimizer, range(2))
    resumed = kind(parameters)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _assert_same(resumed.state[parameters[0]], optimizer.state[parameters[0]])
    for moment in kind.moments:
        assert resumed.state[parameters[0]][f"{moment}_scales"].dtype == torch.float32


def test_a_parameter_that_is_not_contiguous_is_stepped_by_its_row_major_elements():
    (mine, other) = (_parameters([(70, 61)])[0] for _ in range(2))
    transposed = nn.Parameter(mine.detach().t().contiguous().t())
    assert not transposed.is_contiguous()
    for parameter in (transposed, other):
        _train([parameter], AdamW8bit([parameter]), range(3))
    assert torch.equal(transposed, other)


def test_states_of_parameters_that_are_not_contiguous_are_resumed_row_major():
    start = _parameters([(8, 8)])[0].detach()
    mine, own = (nn.Parameter(start.t().contiguous().t()) for _ in range(2))
    other = torch.optim.AdamW([own])
    _train([own], other, range(2))
    with torch.no_grad():
        mine.copy_(own)
    optimizer = AdamW8bit([mine])
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    _train([mine], optimizer, range(2, 4))
    _train([own], other, range(2, 4))
    assert torch.allclose(mine, own, atol=1e-6)


def test_a_copy_has_the_settings_and_states():
    parameters = _parameters([(5000,)])
    optimizer = AdamW8bit(parameters, saves_codes=True)
    _train(parameters, optimizer, range(1))
    copied = copy.deepcopy(optimizer)
    assert copied.saves_codes
    assert copied.unpack_state(next(iter(copied.state.values()))).keys() >= {"exp_avg_codes"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr must not be negative, got -1.0"),
        ({"eps": float("nan")}, "eps must not be negative, got nan"),
        (
            {"betas": (0.9, 0.99, 0.5)},
            r"betas must be two numbers in \[0, 1\), got \(0.9, 0.99, 0.5",
        ),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(options, words):
    with pytest.raises(ValueError, match=words):
        AdamW8bit(_parameters(), **options)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Lion8bit, {"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9"),
        (Lion8bit, {"weight_decay": -0.1}, "weight_decay must not be negative, got -0.1"),
        (SGD8bit, {"momentum": 0}, "momentum must be positive, got 0; else use torch.optim.SGD"),
        (SGD8bit, {"lr": -1.0}, "lr must not be negative, got -1.0"),
    ],
)
def test_a_wrong_option_of_lion_or_sgd_is_an_error_that_names_it(kind, options, words):
    with pytest.raises(ValueError, match=words):
        kind(_parameters(), **options)


def test_a_wrong_option_of_a_group_is_an_error():
    with pytest.raises(
        ValueError, match=r"betas must be two numbers in \[0, 1\), got \(1.0, 2.0\)"
    ):
        AdamW8bit([{"params": _parameters(), "betas": (1.0, 2.0)}])


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_an_option_that_adamw8bit_does_not_have_is_an_error_and_is_not_ignored(option):
    parameters = _parameters([(5000,)])
    other = torch.optim.AdamW(parameters, **{option: True})
    _train(parameters, other, range(1))
    optimizer = AdamW8bit(parameters, lr=0.5)
    with pytest.raises(ValueError, match=f"has only {option}=False, got True; use torch"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match=f"has only {option}=False, got True; use torch"):
        AdamW8bit([{"params": parameters, option: True}])


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (SGD8bit, {"dampening": 0.5}, "has only dampening=0, got 0.5; use torch.optim.SGD"),
        (SGD8bit, {"maximize": True}, "has only maximize=False, got True; use torch.optim.SGD"),
        (SGD8bit, {"momentum": 0}, "momentum must be positive, got 0; else use torch.optim.SGD"),
        (Lion8bit, {"cautious_factor": 0.5}, "has only cautious_factor=1.0, got 0.5; use lion_"),
    ],
)
def test_options_that_lion_and_sgd_do_not_have_are_errors_and_are_not_resumed(kind, given, words):
    parameters = _parameters([(5000,)])
    optimizer, saved = kind(parameters, lr=0.5), FULL[kind](parameters).state_dict()
    saved["param_groups"][0] |= given
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match=words):
        kind([{"params": parameters, **given}])


def test_weight_decay_is_not_resumed_as_that_of_adam():
    parameters = _parameters([(50,)])
    optimizer, other = AdamW8bit(parameters), torch.optim.Adam(parameters, weight_decay=0.1)
    with pytest.raises(ValueError, match="has only decoupled_weight_decay=True, got False"):
        optimizer.load_state_dict(other.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["decoupled_weight_decay"]
    optimizer.load_state_dict(torch.optim.Adam(parameters).state_dict())


def test_a_state_that_does_not_fit_is_an_error_that_names_it():
    parameters, others = _parameters([(5000,)]), _parameters([(6000,)])
    for kind in (*FULL, *FULL.values()):
        saved = kind(others)
        _train(others, saved, range(1))
        words = r"(exp_avg|momentum_buffer).* of shape \(6000,\) for a parameter of shape \(5000,\)"
        resuming = next(key for key in FULL if kind in (key, FULL[key]))
        with pytest.raises(ValueError, match=words):
            resuming(parameters).load_state_dict(saved.state_dict())
    for kind, resuming, words in (
        (FULL[SGD8bit], AdamW8bit, "with momentum_buffer and without step"),
        (torch.optim.Adagrad, AdamW8bit, "with sum; resume with the optimizer that saved it"),
        (Lion8bit, AdamW8bit, "with exp_avg_codes, exp_avg_scales and without step"),
        (AdamW8bit, Lion8bit, "with exp_avg_sq_codes, exp_avg_sq_scales, step; resume"),
        (torch.optim.AdamW, SGD8bit, "with exp_avg, exp_avg_sq, step; resume"),
    ):
        saved = kind(parameters)
        _train(parameters, saved, range(1))
        with pytest.raises(ValueError, match=f"{resuming.__name__} cannot resume a state {words}"):
            resuming(parameters).load_state_dict(saved.state_dict())


def test_an_empty_state_is_resumed_as_none():
    parameters = _parameters([(5000,)])
    saved, optimizer = torch.optim.AdamW(parameters), AdamW8bit(parameters)
    assert saved.state[parameters[0]] == {}  # creates it
    optimizer.load_state_dict(saved.state_dict())
    _train(parameters, optimizer, range(1))
    assert optimizer.state[parameters[0]]["step"] == 1


def test_hooks_of_loading_see_and_change_all_states():
    parameters = _parameters([(5000,)])
    saved = AdamW8bit(parameters)
    _train(parameters, saved, range(1))
    optimizer, seen = AdamW8bit(parameters), []
    optimizer.register_load_state_dict_pre_hook(
        lambda _, given: {**given, "state": {0: {**given["state"][0], "step": torch.tensor(7.0)}}}
    )
    optimizer.register_load_state_dict_post_hook(lambda loaded: seen.append(dict(loaded.state)))
    for _ in range(2):  # what the first call has registered is gone
        optimizer.load_state_dict(saved.state_dict())
    assert [found[parameters[0]]["step"] for found in seen] == [7.0, 7.0]


@pytest.mark.parametrize(
    "grad", [torch.randn(5000).to_sparse(), torch.randn(5000, dtype=torch.complex64)]
)
def test_gradients_that_are_sparse_or_complex_are_an_error(grad):
    parameter = nn.Parameter(torch.zeros(5000, dtype=grad.dtype))
    parameter.grad = grad
    with pytest.raises(
        RuntimeError, match="needs dense gradients of real numbers, got one of torch"
    ):
        AdamW8bit([parameter]).step()


def test_a_compiled_step_has_the_same_bits():
    mine, own = _parameters([(5001,), (3, 5)]), _parameters([(5001,), (3, 5)])
    optimizer, other = AdamW8bit(mine), AdamW8bit(own)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    _train(mine, optimizer, range(3))
    _train(own, other, range(3))
    for value, expected in zip(mine, own, strict=True):
        assert torch.equal(value, expected)
