"""Whatever dies, stalls or is lost under load: right tokens or an error in time, no block left, and it goes on.

``make test-chaos`` runs every event with every flow and prints a table. ``KVFERRY_CHAOS=1`` with ``-k`` runs one.
"""

from typing import Any

import pytest

from .events import BY_FLOW, EVENTS, Event
from .runner import Row, run
from .scene import Scene

pytestmark = [pytest.mark.vllm, pytest.mark.chaos]


def cases() -> list[Any]:
    """Return each event with each of its flows."""
    found = []
    for flow, names in BY_FLOW.items():
        for event in EVENTS:
            if event.name in names:
                defect = event.defects.get(flow)
                marks = [pytest.mark.xfail(strict=True, reason=defect)] if defect else []
                found.append(pytest.param(flow, event, id=f"{flow}-{event.name.replace(' ', '-')}", marks=marks))
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("flow", "event"), cases())
def test_chaos(flow: str, event: Event, scene: Scene, row: Row) -> None:
    run(event, scene, row)
