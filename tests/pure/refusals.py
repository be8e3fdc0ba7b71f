"""Errors that a test expects."""

from collections.abc import Callable

import pytest

from kvferry.errors import KVFerryError, Reason


def refused(reason: Reason, work: Callable[[], object]) -> str:
    """Return the text of the error with which ``work`` fails, for this reason."""
    with pytest.raises(KVFerryError) as error:
        work()
    assert error.value.reason is reason, error.value
    return str(error.value)
