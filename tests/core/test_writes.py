"""Data that is not the view of a parameter is detected."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.core.writes import replaced


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
