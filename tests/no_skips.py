"""Lets a run fail in which a test was skipped: where every package is installed, a skipped test hides a missing one."""

import os

import pytest

VARIABLE = "KVFERRY_NO_SKIPS"
OF_THE_MACHINE = "this machine cannot run it: "
"""A reason that begins so is shown, and the run does not fail: no package is missing, but a privilege or a device."""


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """With ``KVFERRY_NO_SKIPS`` set, fail and name the tests and modules that were skipped."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = [] if reporter is None else reporter.stats.get("skipped", [])
    if skipped and os.environ.get(VARIABLE):
        for report in skipped:
            reporter.write_line(f"{VARIABLE}: {report.nodeid} was skipped: {report.longrepr[-1]}", red=True)
        is_of_the_machine = all(OF_THE_MACHINE in report.longrepr[-1] for report in skipped)
        if exitstatus == pytest.ExitCode.OK and not is_of_the_machine:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
