"""The scenes of the chaos suite, and its table at the end of a run."""

from collections.abc import Iterator

import pytest

from ..engine_pool import EnginePool
from .runner import Row, table
from .scene import FLOWS, Scene

ROWS: list[Row] = []


@pytest.fixture(scope="module")
def scenes(engine_pool: EnginePool) -> Iterator[dict[str, Scene]]:
    """Scenes by the name of their flow; one of them runs at a time."""
    found: dict[str, Scene] = {}
    try:
        yield found
    finally:
        for scene in found.values():
            scene.stop()


@pytest.fixture
def scene(request: pytest.FixtureRequest, scenes: dict[str, Scene], engine_pool: EnginePool) -> Scene:
    """The scene of the test's flow; its engines start with its first event."""
    flow = next(flow for flow in FLOWS if flow.name == request.getfixturevalue("flow"))
    for name, other in scenes.items():
        if name != flow.name:
            other.stop()
    if flow.name not in scenes:
        scenes[flow.name] = Scene.of(flow, engine_pool, engine_pool.folder / f"chaos-{flow.name}")
    return scenes[flow.name]


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    """The row of the test in the table."""
    row = Row(request.getfixturevalue("flow"), request.getfixturevalue("event").name)
    ROWS.append(row)
    return row


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    """Show with a failure what the processes last said of importance."""
    report = yield
    arguments = getattr(item, "funcargs", {})
    scene = arguments.get("scene") or arguments.get("deployment")
    if report.failed and scene is not None:
        report.sections.append(("ends of the logs", "\n".join(scene.log_lines())))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table."""
    if ROWS:
        terminalreporter.section("chaos")
        terminalreporter.write_line(table(ROWS))
