"""Whatever dies, stalls or is lost under load: right tokens or an error in time, no block left, and it goes on.

``make test`` has a short form; ``make test-chaos`` runs every event in every mode and prints a table.
``KVFERRY_CHAOS=1`` with ``-k`` runs one.
"""

from typing import Any

import pytest

from .events import BY_MODE, EVENTS, Event
from .load import IS_WHOLE
from .runner import Row, run
from .scene import Scene

pytestmark = pytest.mark.vllm


def cases() -> list[Any]:
    """Return each event in each of its modes; without ``make test-chaos`` those of the short form."""
    found = []
    for mode, names in BY_MODE.items():
        for event in EVENTS:
            if event.name in names and (IS_WHOLE or event.short_in == mode):
                defect = event.defects.get(mode)
                marks = [pytest.mark.xfail(strict=True, reason=defect)] if defect else []
                found.append(pytest.param(mode, event, id=f"{mode}-{event.name.replace(' ', '-')}", marks=marks))
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mode", "event"), cases())
def test_chaos(mode: str, event: Event, scene: Scene, row: Row) -> None:
    run(event, scene, row)
