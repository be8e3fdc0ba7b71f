"""Fixtures for several tests of the adapter. They import vLLM into this process."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def make_role(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that makes a scheduler's role for a model of these cache groups."""
    pytest.importorskip("vllm")
    from .scheduler_requests import scheduler_roles  # vLLM is imported by those who need it

    yield from scheduler_roles(monkeypatch)
