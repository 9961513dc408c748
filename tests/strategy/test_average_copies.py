"""A copy of a module that cannot be averaged is refused by name."""

import pytest
import torch
from torch import nn

from lightning_zero.strategy.averages import _check_copy


def test_a_copy_with_wrapped_or_empty_submodules_is_refused_by_name():
    wrapped = nn.ModuleDict({"net": torch.compile(nn.Linear(2, 2))})
    with pytest.raises(ValueError, match=r"net._orig_mod.weight .* compile it in place"):
        _check_copy(wrapped)
    with pytest.raises(ValueError, match="weight was on the meta device"):
        _check_copy(nn.Linear(2, 2, device="meta"))
    _check_copy(nn.Linear(2, 2))
