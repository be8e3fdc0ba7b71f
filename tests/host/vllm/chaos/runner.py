"""Runs one event: a load, the deed, and what must hold after it. Each event is a row of the table."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .events import Event
from .load import CONNECTION_LOST, NO_ANSWER, RIGHT, WRONG, Load, Response, counted
from .scene import AT_ONCE, BYTES_PER_SECOND, DEADLINE_SECONDS, NOBODY_CAME, PROMPTS, RENEWED_SECONDS, Scene

NUM_AFTERWARDS = 20


@dataclass
class Row:
    """What an event did."""

    flow: str
    event: str
    responses: list[Response] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    free_after: float | None = None
    ended: Counter[str] = field(default_factory=Counter)
    """Holds that the prefill engine has ended by itself, by reason; none of an engine that was killed."""
    served_after: float | None = None
    afterwards: list[Response] = field(default_factory=list)
    left: str = "?"
    seconds: float = 0.0

    def cells(self) -> list[str]:
        """Return the row's texts, in the order of :data:`COLUMNS`."""
        outcomes = counted(self.responses)
        errors = {name: number for name, number in sorted(outcomes.items()) if name != RIGHT}
        longest = max((response.seconds for response in self.responses), default=0.0)
        return [
            self.flow,
            self.event,
            str(len(self.responses)),
            str(outcomes[RIGHT]),
            in_words(errors),
            in_words(self.reasons),
            f"{longest:.1f} s",
            _seconds(self.free_after),
            in_words(self.ended),
            self.left,
            _seconds(self.served_after),
            f"{counted(self.afterwards)[RIGHT]} of {len(self.afterwards)}",
            f"{self.seconds:.0f} s",
        ]


COLUMNS = (
    "flow", "event", "requests", "right", "errors by status", "failed loads by reason", "longest wait",
    "blocks free after", "holds ended by the prefill engine", "blocks left", "served again after", "right afterwards",
    "took",
)  # fmt: skip


def run(event: Event, scene: Scene, row: Row) -> None:
    """Let the event happen, and note in ``row`` what it did. Asserts all that must hold."""
    began_at = time.monotonic()
    try:
        _harm(event, scene, row)
        _recover(event, scene, row)
    except BaseException as error:
        print(f"\n{row.event}: {str(error)[:2000]}")
        raise
    finally:
        row.seconds = time.monotonic() - began_at
        print(f"\n| {' | '.join(row.cells())} |")


def _harm(event: Event, scene: Scene, row: Row) -> None:
    scene.restore()
    failed_before, ended_before = scene.failed_loads(), scene.ended_holds()
    if event.bytes_per_second is not None:
        scene.set_speed(event.bytes_per_second)
    load = Load(scene.clients, event.prompts, event.max_tokens, event.deadline_seconds, event.at_once, event.times)
    row.responses = load.responses
    with load:
        event.deed(scene, load)
    row.reasons = scene.failed_loads() - failed_before
    check(row.responses, event)
    row.free_after = scene.wait_until_unused()
    if scene.prefill.is_alive:
        row.ended = scene.ended_holds() - ended_before
        # Nobody tells a prefill engine that the router has given up a prompt for which no decode engine has come.
        is_unclaimed = row.ended[NOBODY_CAME] > 0
        assert is_unclaimed or row.free_after < RENEWED_SECONDS, f"held too long, ended: {row.ended}"


def _recover(event: Event, scene: Scene, row: Row) -> None:
    if event.bytes_per_second is not None:
        scene.set_speed(BYTES_PER_SECOND)
    scene.restore()
    row.served_after = scene.wait_until_served()
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(NUM_AFTERWARDS)]
    row.afterwards = scene.clients.send_all(prompts, event.max_tokens, DEADLINE_SECONDS, AT_ONCE)
    wrong = [str(response) for response in row.afterwards if response.outcome != RIGHT]
    assert not wrong, "\n".join(wrong)
    scene.wait_until_unused()
    row.left = "not 0"
    scene.check_nothing_is_left()
    row.left = "0"


def check(responses: Sequence[Response], event: Event) -> None:
    """Every response must be right, or an error that the event may cause, in time."""
    bad = {WRONG, NO_ANSWER} | ({CONNECTION_LOST} if not event.may_lose_connections else set())
    found = [str(response) for response in responses if response.outcome in bad]
    assert not found, "\n".join(found)
    failed = [str(response) for response in responses if response.outcome != RIGHT]
    assert event.may_fail or not failed, "\n".join(failed)
    assert responses, "no request was sent"


def table(rows: Sequence[Row]) -> str:
    """Return the rows in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def in_words(counts: dict[str, int] | Counter[str]) -> str:
    """Return counts by name, those of the most first.

    >>> in_words({"500": 7, "502": 9}), in_words({})
    ('502: 9, 500: 7', 'none')
    """
    return ", ".join(f"{name}: {number}" for name, number in Counter(counts).most_common()) or "none"


def _seconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.1f} s"
