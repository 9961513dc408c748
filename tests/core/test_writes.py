"""A fingerprint detects writes to any element, at any offset; other `.data` is detected, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.core.writes import Fingerprint, replaced


def _values(numel, offset, dtype):
    generator = torch.Generator().manual_seed(numel)
    words = torch.randint(-(2**15), 2**15, (numel + offset + 16,), generator=generator)
    return words.to(dtype)[offset : offset + numel]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("offset", range(5))
@pytest.mark.parametrize("numel", [0, 1, 3, 8, 17, 1000])
def test_a_fingerprint_sees_a_change_of_any_element(numel, offset, dtype):
    values = _values(numel, offset, dtype)
    seen = Fingerprint(values)
    assert seen.matches(values)
    assert seen.digest() == Fingerprint(_values(numel, offset, dtype)).digest()
    for index in {0, 1, numel // 2, numel - 1} & set(range(numel)):
        before = values[index].clone()
        values[index] = 1 if before != 1 else 2
        assert not seen.matches(values)
        assert seen.digest() != Fingerprint(values).digest()
        values[index] = before
    assert seen.matches(values)


def test_a_fingerprint_sees_elements_that_change_places():
    values = _values(10_000, 1, torch.bfloat16)
    seen = Fingerprint(values)
    for index in range(1, 10_000, 97):
        if values[0] != values[index]:
            values[[0, index]] = values[[index, 0]]
            assert not seen.matches(values)
            values[[0, index]] = values[[index, 0]]


@pytest.mark.parametrize("numel", [1000, 10_000_000])
def test_a_fingerprint_takes_a_few_calls_whatever_the_size(numel):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        Fingerprint(torch.zeros(numel, dtype=torch.bfloat16))
    names = [event.name for event in profiler.events()]
    assert names.count("aten::sum") == 2
    assert len(names) < 60


@pytest.mark.parametrize(
    "other",
    [
        lambda data: data.clone(),
        lambda data: data.view(torch.int32),  # the same elements of the same memory
        lambda data: data.double(),
    ],
)
def test_data_that_is_not_the_view_is_detected_whatever_its_dtype(other):
    views = list(torch.zeros(2, 3))
    parameters = [nn.Parameter(view, requires_grad=False) for view in views]
    assert replaced(parameters, views) == []
    parameters[1].data = other(views[1])
    assert replaced(parameters, views) == [1]
