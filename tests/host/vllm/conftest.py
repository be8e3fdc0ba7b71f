"""Order of the engine tests, and the engines they share."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from .chaos.load import IS_WHOLE
from .engine_pool import STAGES, EnginePool, Reference, obstacle, stage_of
from .handoffs import ALL_PAIRS

FOLDER = Path(__file__).parent
collect_ignore = ["fault_campaign/program.py"]  # imports vLLM
TIMEOUT_SECONDS = 600
LOG_LINES = 30
OBSTACLES = pytest.StashKey[dict[str, str]]()
"""The tests that are left out since the release's own vLLM cannot run them, and why."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engines(*names): the shared engines that a test needs")
    config.addinivalue_line("markers", "matrix: only make test-matrix runs it")
    config.addinivalue_line("markers", "chaos: only make test-chaos runs it")
    config.addinivalue_line("markers", "versions: only make test-versions runs it")
    config.addinivalue_line("markers", "ends_engines: the test kills an engine, so it is the last of its stage")


def engine_names(item: pytest.Item) -> tuple[str, ...]:
    """Return the engines that a test names, those of its parameters included."""
    return tuple(name for mark in item.iter_markers("engines") for name in mark.args)


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bring the tests of a stage together, so that every engine starts once."""
    kinds = {"matrix": ALL_PAIRS, "chaos": IS_WHOLE, "versions": "KVFERRY_VLLM_ENVIRONMENTS" in os.environ}
    absent = [name for name, runs in kinds.items() if not runs]
    left_out = [item for item in items if any(item.get_closest_marker(name) is not None for name in absent)]
    found = {item: next(filter(None, map(obstacle, engine_names(item))), "") for item in items if item not in left_out}
    config.stash[OBSTACLES] = {item.name: why for item, why in found.items() if why}
    left_out += [item for item, why in found.items() if why]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    ours = [item for item in items if FOLDER in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))
    # Tests that start engines of their own come last, when the shared ones are gone.
    order = {item: stage_of(engine_names(item)) if engine_names(item) else len(STAGES) for item in ours}
    victims = {item: item.get_closest_marker("ends_engines") is not None for item in ours}
    in_order = iter(sorted(ours, key=lambda item: (order[item], victims[item])))
    items[:] = [next(in_order) if item in order else item for item in items]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, why in config.stash.get(OBSTACLES, {}).items():
        terminalreporter.write_line(f"left out: {name}: {why}")


@pytest.fixture(scope="session")
def engine_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    folder, models = tmp_path_factory.mktemp("engines"), tmp_path_factory.getbasetemp().parent / "kvferry-models"
    with closing(EnginePool(folder, models)) as pool:
        yield pool


@pytest.fixture(scope="session")
def reference(engine_pool: EnginePool) -> Reference:
    return Reference(engine_pool)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Show with a failure what the engines it names last said of importance."""
    report = yield
    pool = getattr(item, "funcargs", {}).get("engine_pool")
    if report.failed and isinstance(pool, EnginePool):
        for name in engine_names(item):
            if name in pool.running:
                lines = [line for line in pool.running[name].log().splitlines() if is_important(line)]
                report.sections.append((f"end of the log of {name}", "\n".join(lines[-LOG_LINES:])))
    return report


def is_important(line: str) -> bool:
    """Return whether a line of an engine's log tells of trouble or of a transfer."""
    return any(word in line for word in ("kvferry", "ERROR", "WARNING", "Error"))


@pytest.fixture(autouse=True)
def shared_engines(request: pytest.FixtureRequest) -> None:
    """Start what this test needs together with what the rest of its stage needs; stop what no longer is needed."""
    pool: EnginePool = request.getfixturevalue("engine_pool")
    names = engine_names(request.node)
    if not names:
        pool.stop_all_but(())
        return
    stage = stage_of(names)
    remaining = request.session.items[request.session.items.index(request.node) :]
    users = [item for item in remaining if engine_names(item)]
    wanted = {name for item in users if stage_of(engine_names(item)) == stage for name in engine_names(item)}
    if any("reference" in item.fixturenames for item in users if stage_of(engine_names(item)) == stage):
        wanted |= {name for name in STAGES[stage] if name.endswith("-reference")}
    pool.stop_all_but(wanted)
    pool.need(sorted(wanted))
