"""One load as its destination rank decides it: which sources have written, and which may still be writing.

Pure: messages and the time are inputs, :meth:`DestinationLoad.due` returns what to do now. A load commits when every
source that the plan names has reported "done" with the digest of its announcement, and the bytes of every source, where
the rank compares them, are right. A source that has answered and not reported is asked again: its report may be lost.
Every other outcome is a failure. Then the destination asks each source that may have seen the announcement to stop. The
load is over, and the engine may have the blocks back, when each of these sources has acknowledged that it stopped, has
reported "done" or that it gave up, has provably ended together with all that it had sent, or is behind a *fence*: the
destination's memory is closed for it.

A connection that is refused, and another process that answers at a source's address, prove nothing: a firewall answers
the same, and bytes of a process that has ended may still lie in the buffers of a connection. So may those of a write
that has failed: the source's word that it writes no more says nothing of them, and only a fence keeps them out.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff.holds import is_of_hold
from kvferry.handoff.messages import EndPoint
from kvferry.handoff.wire.trust import in_url

REVOKE_SECONDS = 0.05
"""Seconds from an answer that says "still writing" to the next revocation."""
ASK_AGAIN_SECONDS = 2.0
"""Seconds from an answer to an announcement to the next question whether the write is over."""
LATE_REPORT_SECONDS = 1.0
"""A report for which a destination still asks so long after its source has sent it has probably found no way."""
CHECK_ALIVE_SECONDS = 1.0
"""Seconds between two checks that a source which may be writing is alive."""


class Step(Enum):
    """What a destination does about one source."""

    ANNOUNCE = "announce the blocks"
    ASK_AGAIN = "announce the same blocks again, to learn whether the write is over"
    REVOKE = "ask the source to write no more"
    CHECK_ALIVE = "check that the source is alive"
    FENCE = "close this rank's memory for the source"


class Action(NamedTuple):
    """A step, and the index of the source rank."""

    step: Step
    source: int


class Source(Enum):
    """What the destination knows of one source rank."""

    UNANNOUNCED = "has no announcement"
    ANNOUNCED = "may be writing"
    BROKEN = "lives and writes no more, but what a failed write has sent may still land"
    ENDED = "its process has ended, but what it has sent may still land"
    LANDED = "has written all of its part, which is being compared"
    DONE = "has written all of its part"
    QUIET = "will write no more"


OPEN_TO = frozenset({Source.ANNOUNCED, Source.BROKEN, Source.ENDED})
"""The states of a source of which bytes may still land."""


class DestinationLoad:
    """One load of the hold ``transfer_id``; ``expected`` has, by the index of each source rank, the digest of the part
    that the source writes, and ``answers_at`` where each of them answers.

    A load that has failed asks for a fence against each source that has not confirmed that it stopped: after
    ``fence_seconds``, at once where its process has ended, and from a time that :meth:`broke` names where its write has
    failed. A fence that the driver refuses is asked for again only where the source breaks or ends later.

    >>> where = EndPoint("10.0.0.1", 5601, 7)
    >>> load = DestinationLoad("r", "x", {0: "a", 1: "b"}, {0: where, 1: where}, deadline=30.0, fence_seconds=15.0)
    >>> [(action.step.name, action.source) for action in load.due(now=0.0)]
    [('ANNOUNCE', 0), ('ANNOUNCE', 1)]
    >>> [load.announcing(source) for source in (0, 1)] and load.done(0, "a")
    >>> load.is_over, load.done(1, "b"), load.is_over, load.error
    (False, None, True, None)
    """

    def __init__(
        self,
        request_id: str,
        transfer_id: str,
        expected: Mapping[int, str],
        answers_at: Mapping[int, EndPoint],
        deadline: float,
        fence_seconds: float,
    ) -> None:
        self._request_id, self._transfer_id = request_id, transfer_id
        self._expected, self._answers_at = dict(expected), dict(answers_at)
        self._deadline, self._fence_seconds = deadline, fence_seconds
        self._sources = dict.fromkeys(expected, Source.UNANNOUNCED)
        self._check_alive_at = 0.0
        self._ask_again_at: dict[int, float] = {}
        self._revoke_at: dict[int, float] = {}
        self._fence_at: dict[int, float] = {}
        self.error: KVFerryError | None = None

    @property
    def is_over(self) -> bool:
        """Whether the engine may have the blocks: filled, or untouched from now on."""
        if self.error is None:
            return all(source is Source.DONE for source in self._sources.values())
        return not self.may_land

    @property
    def writers(self) -> list[int]:
        """Sources that may be writing; once the load has failed, each is asked to stop."""
        return [index for index, source in self._sources.items() if source is Source.ANNOUNCED]

    @property
    def may_land(self) -> list[int]:
        """Sources of which bytes may still land."""
        return [index for index, source in self._sources.items() if source in OPEN_TO]

    def due(self, now: float) -> list[Action]:
        """Return what to do now, in order; gives up first if the deadline has passed.

        ``ANNOUNCE`` is repeated until :meth:`announcing` is called, ``ASK_AGAIN`` comes after each :meth:`answered`,
        ``REVOKE`` after each :meth:`still_writing`; ``FENCE`` names each source that may still write, or whose bytes
        may still land, ``CHECK_ALIVE`` those of them that are not known to have ended.
        """
        if now >= self._deadline and not self.is_over:
            self.fail(self._late())
        if self.error is None:
            actions = [Action(Step.ANNOUNCE, i) for i, source in self._sources.items() if source is Source.UNANNOUNCED]
            due = [i for i in self.writers if now >= self._ask_again_at.get(i, float("inf"))]
            self._ask_again_at |= dict.fromkeys(due, float("inf"))
            actions += [Action(Step.ASK_AGAIN, i) for i in due]
        else:
            actions = [Action(Step.REVOKE, i) for i in self.writers if now >= self._revoke_at.get(i, 0.0)]
            self._revoke_at |= {action.source: float("inf") for action in actions}
            due = [i for i in self.may_land if now >= self._fence_at.setdefault(i, now + self._fence_seconds)]
            self._fence_at |= dict.fromkeys(due, float("inf"))
            actions += [Action(Step.FENCE, i) for i in due]
        if now >= self._check_alive_at:
            self._check_alive_at = now + CHECK_ALIVE_SECONDS
            actions += [Action(Step.CHECK_ALIVE, i) for i in self.may_land if self._sources[i] is not Source.ENDED]
        return actions

    def still_writing(self, source: int, now: float) -> None:
        """A revocation was answered, or timed out, and the source may still be writing: ask again."""
        self._revoke_at[source] = now + REVOKE_SECONDS

    def announcing(self, source: int) -> None:
        """The announcement is about to be sent: from now on the source may write, even if no answer comes."""
        if self._sources[source] is Source.UNANNOUNCED:
            self._sources[source] = Source.ANNOUNCED

    def answered(self, source: int, now: float) -> None:
        """The source has taken the announcement, and has not reported: ask again."""
        self._ask_again_at[source] = now + ASK_AGAIN_SECONDS

    def landed(self, source: int, digest: str) -> bool:
        """The source reports that its part has landed; return whether that is news.

        The load counts the part with :meth:`done`; where the bytes are wrong, :meth:`fail` ends the load. A part other
        than the announced one fails the load.
        """
        if self._sources.get(source) not in OPEN_TO:
            return False
        if digest != self._expected[source]:
            expected = f"but part {self._expected[source]} was announced"
            problem = f"source rank {source} wrote part {digest} of {self._request_id}, {expected}."
            self.fail(HandoffError(Reason.WRONG_SOURCE, problem, "Run the same kvferry version on both sides."))
            self._sources[source] = Source.QUIET
            return False
        self._sources[source] = Source.LANDED
        return True

    def done(self, source: int, digest: str) -> None:
        """The source's part has landed, as :meth:`landed`, and is right."""
        if self._sources.get(source) is Source.LANDED or self.landed(source, digest):
            self._sources[source] = Source.DONE

    def broke(self, source: int, error: KVFerryError, *, fence_at: float) -> None:
        """The source writes no more, since a write failed with ``error``, and what it has sent may still land.

        A fence is due at ``fence_at``. No word of the source counts any more, only that all of its part has landed.
        """
        if self._sources.get(source) is Source.ANNOUNCED:
            self.fail(error)
            self._sources[source] = Source.BROKEN
            self._fence_at[source] = min(fence_at, self._fence_at.get(source, fence_at))
        else:
            self.refused(source, error)

    def ended(self, source: int, error: KVFerryError, *, may_land: bool) -> None:
        """The source's process has provably ended. With ``may_land`` what it has sent may still land, and so may what a
        failed write has sent: a fence is due at once.
        """
        known = self._sources.get(source)
        if known is Source.BROKEN or (known is Source.ANNOUNCED and may_land):
            self.fail(error)
            self._sources[source] = Source.ENDED
            self._fence_at[source] = 0.0
        else:
            self.refused(source, error)

    def is_broken(self, source: int) -> bool:
        """Return whether the source lives and writes no more, but what a failed write has sent may still land."""
        return self._sources.get(source) is Source.BROKEN

    def fenced(self, source: int, error: KVFerryError) -> None:
        """A fence keeps the source out: nothing lands any more of what the source was told before."""
        if self._sources.get(source) in OPEN_TO:
            self.fail(error)
            self._sources[source] = Source.QUIET

    def refused(self, source: int, error: KVFerryError) -> None:
        """The source has written nothing that may still land, because of ``error``: it refused or gave up."""
        if self._sources.get(source) not in (Source.LANDED, Source.DONE):
            self.fail(error)
            self.quiet(source)

    def quiet(self, source: int) -> None:
        """The source has acknowledged that nothing of it lands any more."""
        if self._sources.get(source) in (Source.UNANNOUNCED, Source.ANNOUNCED):
            self._sources[source] = Source.QUIET
            problem = f"source rank {source} stopped writing {self._request_id} before it was done."
            remedy = "Send the prompt again; the prefill engine's log says why it stopped."
            self.fail(HandoffError(Reason.ABORTED, problem, remedy))

    def fail(self, error: KVFerryError) -> None:
        """Give up; the first error stays, and a committed load stays committed."""
        if self.error is None and not self.is_over:
            self.error = error.without_traceback()

    def _late(self) -> HandoffError:
        places = [self._answers_at[index] for index, source in self._sources.items() if source is not Source.DONE]
        where = ", ".join(f"{in_url(place.host)}:{place.port}" for place in places)
        remedy = (
            "Check the prefill engine's log, and that a firewall lets its hosts and this one reach each other: these "
            "ports, this rank's own and those of the transport must be open."
        )
        if not is_of_hold(self._transfer_id):
            remedy = f"Check that the router sent the prompt to the prefill engine too. {remedy}"
        return HandoffError(
            Reason.DEADLINE_EXCEEDED,
            f"{self._request_id} was not written in time by the prefill ranks at {where}.",
            f"{remedy} load_timeout_seconds sets the limit.",
        )
