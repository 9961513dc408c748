"""Texts of errors with their notes."""

import warnings

import pytest


def text_of_error(kind, function, *args):
    """Text of the error of `kind` that `function` raises, with its notes.

    Before Python 3.11, which has no notes, the package warns of them.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(kind) as raised:
            function(*args)
    error = raised.value
    notes = getattr(error, "__notes__", None) or [str(warning.message) for warning in caught]
    return "\n".join([str(error), *notes])
