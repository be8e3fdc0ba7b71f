"""For all tests: each begins with an unused limit of log lines.

Where KVFERRY_MATRIX names a folder, the results of the tests of pairs and of refusals are written to it.
"""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from kvferry import peer_log

from . import mooncake_libraries
from .matrix_results import Results, results_folder
from .no_skips import pytest_sessionfinish as pytest_sessionfinish

mooncake_libraries.make_loadable()
# A busy machine is slow, and that is no failure.
settings.register_profile("kvferry", deadline=None)
settings.load_profile("kvferry")


# Imports and the tests themselves are a million objects, which stay: nothing is gained by looking through them again.
gc.disable()
# Nor may a fork end what its parent's threads still use, such as an agent of NIXL: the process would abort.
os.register_at_fork(after_in_child=gc.freeze)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else nanobind takes what is left at the end for leaks


@pytest.fixture(autouse=True)
def unused_limit_of_log_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test its own limit: else the lines of one test would leave out those of the next."""
    monkeypatch.setattr(peer_log, "lines", lines := peer_log._Lines())
    yield
    lines.close()


def check_of(item: pytest.Item) -> tuple[str, str] | None:
    """Return the pair that a test is about and what it checks; None for a test that is not about a pair."""
    params = dict(getattr(getattr(item, "callspec", None), "params", {}))
    pair = params.pop("pair", None)
    if pair is None:
        return None
    others = [str(value) for value in params.values()]
    return pair.name, f"{item.originalname}[{'-'.join(others)}]" if others else item.originalname  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    folder = results_folder()
    if folder is not None and (report.when == "call" or report.failed):
        results = Results(folder)
        message = str(call.excinfo.value) if call.excinfo is not None else ""
        if check := check_of(item):
            measured = {name: value for name, value in item.user_properties if name != "refused"}
            results.add_check(*check, outcome=report.outcome, message=message, measured=measured)
        for name, value in item.user_properties:
            if name == "refused":
                results.add_refusal(**value)
    return report
