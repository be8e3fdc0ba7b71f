"""Runs the tests of this folder in child processes: a touch of device memory ends the child, and that is the failure.

The tests of a class, or the others of a module, share a child until one of them ends the child.
"""

import json
import os
import select
import signal
import time
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from . import device

FOLDER = Path(__file__).parent
TEST_SECONDS = 120.0


class Child:
    """A fork of this process that runs tests of ``scope``, each on command: two numbers of the session's items."""

    def __init__(self, session: pytest.Session, scope: str) -> None:
        self.scope = scope
        reading, answering = os.pipe()
        asked, self._asking = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(reading)
            os.close(self._asking)
            _serve(session, asked, answering)
            os._exit(0)
        os.close(answering)
        os.close(asked)
        self._answers = reading

    def run(self, session: pytest.Session, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        """Return the reports of a test; one failure where the child has ended, or is ended since it takes too long."""
        numbers = session.items.index(item), -1 if nextitem is None else session.items.index(nextitem)
        os.write(self._asking, b"%d %d\n" % numbers)
        line, deadline = b"", time.monotonic() + TEST_SECONDS
        while not line.endswith(b"\n"):
            is_ready = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]
            chunk = os.read(self._answers, 1 << 16) if is_ready else b""
            if not chunk:
                return [pytest.TestReport(item.nodeid, item.location, {}, "failed", self._end(bool(is_ready)), "call")]
            line += chunk
        load = item.config.hook.pytest_report_from_serializable
        return [load(config=item.config, data=each) for each in json.loads(line)]

    def close(self) -> None:
        os.close(self._asking)
        os.close(self._answers)
        os.waitpid(self._pid, 0)

    def _end(self, has_ended: bool) -> str:
        if not has_ended:
            os.kill(self._pid, signal.SIGKILL)
        os.close(self._asking)
        os.close(self._answers)
        _, status = os.waitpid(self._pid, 0)
        self.scope = ""
        if not has_ended:
            return f"the test did not end within {TEST_SECONDS:.0f} s"
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return f"{name}: the product has touched device memory; the traceback is on standard error"
        return f"the test's process ended with {os.waitstatus_to_exitcode(status)}"


def _serve(session: pytest.Session, asked: int, answering: int) -> None:
    for line in os.fdopen(asked):
        number, following = map(int, line.split())
        item, nextitem = session.items[number], None if following < 0 else session.items[following]
        if nextitem is not None and _scope(nextitem) != _scope(item):
            nextitem = None
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        plain = [item.config.hook.pytest_report_to_serializable(config=item.config, report=each) for each in reports]
        message = memoryview(json.dumps(plain).encode() + b"\n")
        while message:
            message = message[os.write(answering, message) :]


def _scope(item: pytest.Item) -> str:
    parent = item.getparent(pytest.Class) or item.getparent(pytest.Module)
    return "" if parent is None else parent.nodeid


_running: list[Child] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test of this folder in a child; with ``--reruns`` a failed test once more, since no plugin sees it run."""
    if FOLDER not in item.path.parents:
        return None  # pytest calls this for the tests of other folders, too
    session = item.session
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = _reports(session, item, nextitem)
    if item.config.getoption("reruns", None) and any(report.failed for report in reports):
        for report in reports:
            report.outcome = "rerun" if report.failed else report.outcome  # type: ignore[assignment]
            item.ihook.pytest_runtest_logreport(report=report)
        reports = _reports(session, item, nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    if _running and (nextitem is None or _scope(nextitem) != _running[0].scope):
        _running.pop().close()
    session._setupstate.teardown_exact(nextitem)
    return True


def _reports(session: pytest.Session, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
    if _running and _running[0].scope != _scope(item):
        _running.pop().close()
    if not _running:
        _running.append(Child(session, _scope(item)))
    reports = _running[0].run(session, item, nextitem)
    if not _running[0].scope:
        _running.clear()
    return reports


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-ins take the places of NIXL's bindings and of the device."""
    device.install(monkeypatch)
