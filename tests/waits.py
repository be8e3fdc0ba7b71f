"""Waits for what other threads do."""

import time
from collections.abc import Callable
from typing import TypeVar

from kvferry.handoff.wire.client import Client, Exchange

SECONDS = 30.0
PAUSE_SECONDS = 0.0005
Found = TypeVar("Found")


def wait_until(
    condition: Callable[[], Found | None],
    what: object = "it did not come to pass",
    *,
    seconds: float = SECONDS,
    each: Callable[[], object] = lambda: None,
) -> Found:
    """Call ``condition``, and ``each`` between two calls, until it returns something true; return that."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, what
        each()
        time.sleep(PAUSE_SECONDS)
    return found


def collect(client: Client, number: int = 1, seconds: float = SECONDS) -> list[Exchange]:
    """Return the exchanges of a client that end, fewer than ``number`` where ``seconds`` are over."""
    exchanges: list[Exchange] = []
    end = time.monotonic() + seconds
    while len(exchanges) < number and time.monotonic() < end:
        exchanges += client.collect()
        time.sleep(PAUSE_SECONDS)
    return exchanges
