"""Errors that are explained as dtype errors."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_zero.core.mixed_dtypes import explain_dtype_error
from lightning_zero.health.failures import PeerAbortedError


class _OfTwo(ValueError):
    def __str__(self):
        return f"dtype {self.args[1]}"


def _explained(error):
    module = nn.Linear(2, 2)
    slots = [SimpleNamespace(name="weight"), SimpleNamespace(name="bias")]
    plan = SimpleNamespace(dtype=torch.bfloat16, layout=SimpleNamespace(slots=slots))
    bucket = SimpleNamespace(plan=plan, orig_dtypes=[torch.float32] * 2)
    try:
        raise error
    except Exception as caught:
        explain_dtype_error(caught, module, [bucket])
        return str(caught)


def test_an_error_of_torch_names_the_module_and_the_setting():
    text = _explained(RuntimeError("expected scalar type Float but found BFloat16"))
    assert "keep_float32=['weight', 'bias']" in text


@pytest.mark.parametrize(
    "error",
    [
        PeerAbortedError("rank 0 stops because rank 1 raised RuntimeError: mixed dtype"),
        ValueError("the second half of the data is empty"),
        _OfTwo("a", "b"),
    ],
)
def test_errors_of_other_ranks_and_other_errors_are_unchanged(error):
    before = str(error)
    assert _explained(error) == before
