"""Jobs, which the transfer thread advances, and their results. A write, an awaited load, a copy are jobs."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from kvferry.errors import KVFerryError


class Phase(Enum):
    """What a job waits for."""

    PREPARING = "for a handshake, a connection or a prompt, not for a transfer"
    MOVING = "for its transfers"
    STOPPING = "for the end of its transfers, since the job was given up"
    DONE = "for nothing"


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended: ``error`` is None for a commit. Times are seconds.

    ``num_bytes`` are the committed bytes; a failed job has none, even where bytes have landed. ``num_compared_bytes``
    are those whose digests were compared, in ``compare_seconds``. ``num_descriptors`` counts what the transports got
    for the cache.
    """

    job_id: str
    error: KVFerryError | None
    num_bytes: int = 0
    num_compared_bytes: int = 0
    num_descriptors: int = 0
    num_sources: int = 0
    transport: str = ""
    wait_seconds: float = 0.0
    transfer_seconds: float = 0.0
    compare_seconds: float = 0.0
    events: Mapping[str, Any] | None = None
    """Events of a write or a load, ready for JSON; None unless the settings ask for them."""


class Job(Protocol):
    """A write, an awaited load or a local copy."""

    @property
    def job_id(self) -> str:
        """Names the job; no two jobs at a time have the same id."""

    @property
    def fills_blocks(self) -> bool:
        """Whether the job fills blocks of this engine, which must be kept until its transfers have ended."""

    @property
    def is_for_log(self) -> bool:
        """Whether the job's result is for the log alone: peers cause such jobs, and nobody waits for their end."""

    @property
    def can_wait(self) -> bool:
        """Whether other jobs go first: no request waits for this one."""

    @property
    def phase(self) -> Phase:
        """What the job waits for."""

    @property
    def error(self) -> KVFerryError | None:
        """Why the job was given up."""

    @property
    def given_up_at(self) -> float | None:
        """When the job was given up."""

    def advance(self, now: float) -> bool:
        """Make bounded progress; return whether there was any."""

    def is_ending(self, now: float) -> bool:
        """Return whether the job goes first: it is past its deadline or being stopped, or holds up no other."""

    def cancel(self, error: KVFerryError) -> None:
        """Give the job up; it is done once its transfers have ended."""

    def result(self, finished_at: float) -> JobResult:
        """Return how the job ended."""


def clock() -> dict[str, float]:
    """Return the time of day and the monotonic time of one moment, so that logs of two hosts can be compared.

    >>> sorted(clock())
    ['monotonic', 'wall']
    """
    return {"wall": time.time(), "monotonic": time.monotonic()}
