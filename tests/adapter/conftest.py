"""Fixtures for tests of the adapter, which import vLLM into this process, and the tests that a release cannot run.

kvferry refuses to offload with vLLM 0.30. A test that ends with this refusal there is left out, and the summary says
how many are.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.errors import KVFerryError, Reason
from kvferry.integrations.vllm.versions import installed_version

from .planner_oracle import Oracle, vllm_oracle

REFUSES_OFFLOAD = "0.30."
LEFT_OUT = pytest.StashKey[list[str]]()
"""The refusals with which tests have ended."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    error = None if call.excinfo is None else call.excinfo.value
    is_refused = isinstance(error, KVFerryError) and error.reason is Reason.UNSUPPORTED_VERSION
    if is_refused and report.failed and installed_version().startswith(REFUSES_OFFLOAD):
        item.config.stash[LEFT_OUT].append(str(error))
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"left out: {error}")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for refusal in dict.fromkeys(refusals := config.stash[LEFT_OUT]):
        terminalreporter.write_line(f"left out: {refusals.count(refusal)} tests of offload: {refusal}")


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """One process answers for all modules, and for all processes of the tests."""
    own = tmp_path_factory.getbasetemp()
    with vllm_oracle((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "oracle") as found:
        yield found


@pytest.fixture
def make_role(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that makes a scheduler's role for a model of these cache groups."""
    pytest.importorskip("vllm")
    from .scheduler_requests import scheduler_roles  # vLLM is imported by those who need it

    yield from scheduler_roles(monkeypatch)
