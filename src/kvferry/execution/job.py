"""Jobs: what the transfer thread advances, and how a job ended. A load, an awaited push and a write are jobs."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from kvferry.errors import KVFerryError
from kvferry.execution.device import OVER, Mark
from kvferry.execution.guard_words import Scratch


class Phase(Enum):
    """What a job waits for, as far as the transfer thread must know."""

    PREPARING = "for something else than a transfer, such as a handshake"
    MOVING = "for its transfers"
    BETWEEN_ROUNDS = "for its turn: other jobs go first"
    STOPPING = "for the end of its transfers, since it was given up"
    DONE = "for nothing"


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended: ``error`` is None for a commit. Times are seconds.

    ``num_bytes`` are the committed ones, of which ``num_staged_bytes`` went by way of the stage: none of a failed job,
    whatever had landed. ``num_descriptors`` counts what transports were asked for.
    """

    job_id: str
    error: KVFerryError | None
    num_bytes: int = 0
    num_staged_bytes: int = 0
    num_descriptors: int = 0
    num_sources: int = 0
    transport: str = ""
    wait_seconds: float = 0.0
    transfer_seconds: float = 0.0
    landing: Mark = OVER
    """Behind the last copy into the cache, on a GPU: the engine's stream must wait for it."""
    events: Mapping[str, Any] | None = None
    """Of a push, where they were asked for: what happened when, ready for JSON."""


class Job(Protocol):
    """One thing that the transfer thread advances."""

    @property
    def job_id(self) -> str:
        """Names the job; no two at a time have one name."""

    @property
    def fills_blocks(self) -> bool:
        """Whether it fills blocks of this engine, which must be kept until its transfers have ended."""

    @property
    def phase(self) -> Phase:
        """What the job waits for."""

    @property
    def error(self) -> KVFerryError | None:
        """Why it was given up."""

    @property
    def given_up_at(self) -> float | None:
        """When it was given up."""

    def advance(self, scratch: Scratch, now: float) -> bool:
        """Make bounded progress; return whether anything moved."""

    def is_ending(self, now: float) -> bool:
        """Return whether it is past its deadline or being stopped."""

    def cancel(self, error: KVFerryError) -> None:
        """Give up; done once its transfers have ended."""

    def result(self, finished_at: float) -> JobResult:
        """Return how it ended."""
