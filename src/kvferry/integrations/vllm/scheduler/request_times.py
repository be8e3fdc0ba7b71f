"""The scheduler's part of the transfer log: a line for each hold, and one for each request that loads its prompt.

Ranks do not know when a hold ends, when a request is scheduled first, and when it has its first token.
"""

import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.execution.executor import clock
from kvferry.handoff.holds import Ended, Hold
from kvferry.integrations.vllm.worker.records import LineLog

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Times:
    """When a request was scheduled first, and when it had its first token."""

    first_step_at: float | None = None
    first_token_at: float | None = None


@dataclass(slots=True)
class _Running:
    """A request without a token; ``load`` is the transfer id of its load, and when it was ordered."""

    request: "Request"
    times: _Times
    load: tuple[str, float] | None = None


class RequestTimes:
    """Appends to ``<path>.scheduler`` one line when a hold ends, and one when a request that loads has its first token,
    or ends without one.

    Times are seconds of the monotonic clock. Only the scheduler's thread may call it. What is remembered is bounded by
    the engine's requests and holds.
    """

    def __init__(self, path: str) -> None:
        self._lines = LineLog(f"{path}.scheduler")
        self._running: dict[str, _Running] = {}
        self._holds: dict[str, tuple[float, _Times]] = {}
        """When each open or held hold began, by transfer id, and its request's times."""

    def begin_hold(self, request: "Request", hold: Hold | None) -> None:
        """The engine has given blocks to a request, whose hold is this one, if any; of a preempted request, again."""
        if hold is not None and hold.transfer_id not in self._holds:
            # A second hold of a preempted request has times of its own.
            self._running.pop(request.request_id, None)
            self._holds[hold.transfer_id] = time.monotonic(), self._run(request).times

    def begin_load(self, request: "Request", transfer_id: str) -> None:
        """A request's load is ordered."""
        self._run(request).load = transfer_id, time.monotonic()

    def begin_step(self, scheduled: Container[str]) -> None:
        """These requests run in the next step."""
        now = time.monotonic()
        for request_id, running in self._running.items():
            if running.times.first_step_at is None and request_id in scheduled:
                running.times.first_step_at = now

    def end_step(self) -> None:
        """The engine has taken the tokens of a step."""
        for running in [each for each in self._running.values() if _has_token(each.request)]:
            self.end(running.request)

    def end(self, request: "Request") -> None:
        """A request has its first token, or has ended; twice is fine."""
        if (running := self._running.pop(request.request_id, None)) is None:
            return
        times = running.times
        times.first_token_at = time.monotonic() if _has_token(request) else None
        if running.load is not None:
            transfer_id, ordered_at = running.load
            line = {"loaded": transfer_id, "request_id": request.request_id, "ordered_at": ordered_at}
            self._append(line | _as_json(times))

    def end_hold(self, ended: Ended) -> None:
        """A hold has ended. One of an answer, which nothing has begun, began when its request ended."""
        if (hold := ended.hold) is None:
            return
        began_at, times = self._holds.pop(hold.transfer_id, (hold.held_at or time.monotonic(), _Times()))
        line = {"hold": hold.transfer_id, "request_id": hold.request_id, "began_at": began_at}
        self._append(line | _as_json(times) | {"held_at": hold.held_at, "ending": ended.ending.value})

    def close(self) -> None:
        """Close the file; twice is fine."""
        self._lines.close()

    def _run(self, request: "Request") -> _Running:
        return self._running.setdefault(request.request_id, _Running(request, _Times()))

    def _append(self, line: Mapping[str, Any]) -> None:
        self._lines.append({**line, "clock": clock()})


def _has_token(request: "Request") -> bool:
    return request.num_tokens > request.num_prompt_tokens


def _as_json(times: _Times) -> dict[str, float | None]:
    return {"first_step_at": times.first_step_at, "first_token_at": times.first_token_at}
