"""One push as its destination rank decides it: which sources must have written, and which may still be writing.

Pure: messages and the time are inputs, :meth:`Receiving.due` returns what to do now. A push commits when every source
that the plan names has said "done" with the digest of exactly what was announced to it. Every other outcome is
terminal: each source that may have learned of the blocks is asked to stop until it says that it has, has said that it
gave up, or is known to be dead. Only then is the push over, and only then may the engine have the blocks back.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from kvferry.errors import HandoffError, KVFerryError, Reason

REVOKE_SECONDS = 0.05
"""From the answer to a revocation that a source is still writing to the next revocation."""
WATCH_SECONDS = 1.0
"""Between two looks whether a source that may be writing still lives."""


class Step(Enum):
    """What a destination does about one source."""

    ANNOUNCE = "announce the blocks"
    REVOKE = "ask the source to write no more"
    LOOK = "look whether the source lives"


class Action(NamedTuple):
    """A step, and the index of the source rank."""

    step: Step
    source: int


class Source(Enum):
    """What the destination knows of one source rank."""

    UNTOLD = "has not been told of the blocks"
    TOLD = "may be writing"
    DONE = "has written all of its part"
    QUIET = "will write no more"


class Receiving:
    """``expected`` are the source ranks, by index, and the digest of what each is to write.

    >>> push = Receiving("r", {0: "a", 1: "b"}, deadline=30.0)
    >>> [(action.step.name, action.source) for action in push.due(now=0.0)]
    [('ANNOUNCE', 0), ('ANNOUNCE', 1)]
    >>> [push.telling(source) for source in (0, 1)] and push.done(0, "a")
    >>> push.is_over, push.done(1, "b"), push.is_over, push.error
    (False, None, True, None)
    """

    def __init__(self, request_id: str, expected: Mapping[int, str], deadline: float) -> None:
        self._request_id = request_id
        self._expected = dict(expected)
        self._deadline = deadline
        self._sources = dict.fromkeys(expected, Source.UNTOLD)
        self._revoke_at: dict[int, float] = {}
        self._watch_at = 0.0
        self.error: KVFerryError | None = None

    @property
    def is_over(self) -> bool:
        """Whether the engine may have the blocks: filled, or untouched from now on."""
        if self.error is None:
            return all(source is Source.DONE for source in self._sources.values())
        return Source.TOLD not in self._sources.values()

    @property
    def writers(self) -> list[int]:
        """Sources that may be writing; once the push has failed, those to be asked to stop."""
        return [index for index, source in self._sources.items() if source is Source.TOLD]

    def due(self, now: float) -> list[Action]:
        """Return what to do now, in order; gives up first if the deadline has passed.

        A source is to be announced to until :meth:`telling` says that it is being told. A revocation is repeated only
        after :meth:`still_writing` has said that the last one was answered.
        """
        self._tick(now)
        if self.error is None:
            actions = [Action(Step.ANNOUNCE, i) for i, source in self._sources.items() if source is Source.UNTOLD]
        else:
            actions = [Action(Step.REVOKE, i) for i in self.writers if now >= self._revoke_at.get(i, 0.0)]
            self._revoke_at |= {action.source: float("inf") for action in actions}
        if now >= self._watch_at:
            self._watch_at = now + WATCH_SECONDS
            actions += [Action(Step.LOOK, index) for index in self.writers]
        return actions

    def still_writing(self, source: int, now: float) -> None:
        """A revocation was answered, or was not in time, and the source may still be writing: ask again."""
        self._revoke_at[source] = now + REVOKE_SECONDS

    def telling(self, source: int) -> None:
        """The source is about to be told: from now on it may write, whatever becomes of the message."""
        if self._sources[source] is Source.UNTOLD:
            self._sources[source] = Source.TOLD

    def done(self, source: int, digest: str) -> None:
        """The source says that its part has landed. Of anything but what it was asked for, that is a failure."""
        if self._sources.get(source) is not Source.TOLD:
            return
        if digest != self._expected[source]:
            self.fail(_wrong_part(self._request_id, source, self._expected[source], digest))
            self.quiet(source)
            return
        self._sources[source] = Source.DONE

    def refused(self, source: int, error: KVFerryError) -> None:
        """The source writes no more, and why: it refused, gave up or died."""
        if self._sources.get(source) is Source.DONE:
            return
        self.fail(error)
        self.quiet(source)

    def quiet(self, source: int) -> None:
        """The source says that it writes no more, or is known to be dead."""
        if self._sources.get(source) in (Source.UNTOLD, Source.TOLD):
            self._sources[source] = Source.QUIET
            if self.error is None:
                self.fail(_stopped(self._request_id, source))

    def fail(self, error: KVFerryError) -> None:
        """Give up, for the first reason there is; a push that has been committed is not harmed."""
        if self.error is None and not self.is_over:
            self.error = error.without_traceback()

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the state as plain data, times relative to ``now``, the error as its reason code."""
        return {
            "sources": {index: source.name.lower() for index, source in self._sources.items()},
            "error": None if self.error is None else self.error.reason.value,
            "deadline_in": self._deadline - now,
            "revoke_in": {index: max(0.0, at - now) for index, at in self._revoke_at.items()},
        }

    def _tick(self, now: float) -> None:
        if now >= self._deadline and not self.is_over:
            self.fail(_late(self._request_id, self.writers))


def _wrong_part(request_id: str, source: int, expected: str, found: str) -> HandoffError:
    return HandoffError(
        Reason.WRONG_SOURCE,
        f"source rank {source} pushed part {found} of {request_id}, but was asked for {expected}.",
        "Run the same kvferry version on both sides.",
    )


def _stopped(request_id: str, source: int) -> HandoffError:
    return HandoffError(
        Reason.ABORTED,
        f"source rank {source} stopped pushing {request_id} before it was done.",
        "Send the prompt again; the prefill engine's log says why it stopped.",
    )


def _late(request_id: str, writers: list[int]) -> HandoffError:
    return HandoffError(
        Reason.DEADLINE_EXCEEDED,
        f"{request_id} was not pushed in time by source ranks {writers}.",
        "Check that the router sent the prompt to the prefill engine too; push_timeout_seconds sets the limit.",
    )
