"""Errors that are explained as dtype errors."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_zero.core.mixed_dtypes import explain_dtype_error
from lightning_zero.health.failures import PeerFailedError
from tests.support.notes import text_of_error


def _explained(error):
    module = nn.Linear(2, 2)
    slots = [SimpleNamespace(name="weight"), SimpleNamespace(name="bias")]
    plan = SimpleNamespace(dtype=torch.bfloat16, layout=SimpleNamespace(slots=slots))
    bucket = SimpleNamespace(plan=plan, orig_dtypes=[torch.float32] * 2)

    def explain():
        try:
            raise error
        except Exception as caught:
            explain_dtype_error(caught, module, [bucket])
            explain_dtype_error(caught, module, [bucket])  # as from a call inside another one
            raise

    return text_of_error(type(error), explain)


def test_a_note_names_the_module_and_the_setting_and_the_error_is_unchanged():
    error = RuntimeError("expected scalar type Float but found BFloat16")
    text = _explained(error)
    assert "keep_float32=['weight', 'bias']" in text
    assert sys.version_info < (3, 11) or len(text.splitlines()) == 2
    assert error.args == ("expected scalar type Float but found BFloat16",)


@pytest.mark.parametrize(
    "error",
    [
        PeerFailedError("rank 0 stops because rank 1 raised RuntimeError: mixed dtype"),
        ValueError("the second half of the data is empty"),
    ],
)
def test_errors_of_other_ranks_and_other_errors_get_no_note(error):
    assert _explained(error) == str(error)
