"""The destinations of a source rank: who has introduced itself, the route to it, and the connection of writes to it.

:class:`Destinations` has all of a rank. A :class:`Meeting`, a job of the transfer thread, connects to one before any
prompt is announced, so that the destination knows that it can be written to.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.execution.guard_words import Scratch
from kvferry.execution.job import JobResult, Phase
from kvferry.execution.own_rank import OwnRank
from kvferry.execution.digests import PartCells
from kvferry.execution.route import Route
from kvferry.handoff.handshake import compare_identities
from kvferry.handoff.messages import Bounded, EndPoint, Introduce, Met, WriteKey
from kvferry.handoff.versions import Versions, agree
from kvferry.layout.shard import decode_shard
from kvferry.peer_log import PeerLog
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.match import selector_of
from kvferry.plan.planner import PairPlan
from kvferry.transport.registry import Connecting, Link

logger = PeerLog(logging.getLogger(__name__))

MAX_DESTINATIONS = 4096
MAX_INTRODUCED_BYTES = 256 << 20
"""Of all introductions that are remembered: each may have as many as a question."""
MAX_MEETINGS = 1024
"""Destinations to which a rank connects at a time because they have introduced themselves."""
LOOK_SECONDS = 0.02
"""Between two looks at the connection of a meeting, so that destinations that do not answer hold up no transfers."""
TELL_SECONDS = 10.0
"""How long a destination is told again that this rank reaches it, and the time between two meetings with it."""


class Meeting:
    """Connects to a destination that was introduced, and then tells it so: before, nothing need be announced.

    It goes before the transfers, which may never pause: loads wait for it, for a short time.
    """

    fills_blocks = False
    is_for_log = True
    can_wait = False
    given_up_at = None

    def __init__(
        self,
        job_id: str,
        link: Connecting | Link,
        num_bytes: int,
        tell: Callable[[], None],
        connect_anew: Callable[[], Connecting | Link],
    ) -> None:
        """``num_bytes`` are those of the destination's introduction."""
        self.job_id, self.num_bytes = job_id, num_bytes
        self.phase = Phase.PREPARING
        self.error: KVFerryError | None = None
        self.began_at = time.monotonic()
        self._link, self._tell, self._connect_anew = link, tell, connect_anew
        self._look_at = 0.0

    def advance(self, scratch: Scratch, now: float) -> bool:
        """Go on connecting, every :data:`LOOK_SECONDS`."""
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_SECONDS
        try:
            if self._link.poll() is None:
                return False
        except KVFerryError as error:
            if error.reason is Reason.CLOSED:
                # A fence of this rank's own has closed the transport, and opened another on this thread since.
                self._link = self._connect_anew()
                return True
            logger.warning("kvferry: %s failed, so it reads: %s", self.job_id, error, peer=self.job_id)
            self.cancel(error)
        else:
            self._tell()
            self.phase = Phase.DONE
        return True

    def is_ending(self, now: float) -> bool:
        """Return that the meeting goes first."""
        return True

    def cancel(self, error: KVFerryError) -> None:
        """Give up."""
        if self.phase is not Phase.DONE:
            self.error, self.phase = error.without_traceback(), Phase.DONE

    def result(self, finished_at: float) -> JobResult:
        """Return how the meeting ended."""
        return JobResult(self.job_id, self.error, transport=self._link.name)


@dataclass
class DestinationRank:
    """A destination rank in one epoch: the route to the rank, connected by the first write of this rank's part."""

    answers_at: EndPoint
    end_points: dict[str, bytes]
    route: Route
    source_index: int
    registration: int
    version: int
    """Of the handshake."""
    num_bytes: int
    """Of its introduction."""
    num_fences: int
    """Of this rank's transports, before the connection."""
    num_open: int = 0
    """Its open pushes, each of which keeps it."""
    meeting: Meeting | None = None
    _cells: dict[tuple[PairPlan, Integrity, bool], PartCells] = field(default_factory=dict)

    def cells(self, plan: PairPlan, wanted: Integrity, *, is_sliced: bool) -> PartCells:
        """Return the cells of a plan whose digests the destination compares, made once. Raises :class:`PlanError`."""
        if (plan, wanted, is_sliced) not in self._cells:
            self._cells[plan, wanted, is_sliced] = PartCells(plan, wanted, at_source=True, is_sliced=is_sliced)
        return self._cells[plan, wanted, is_sliced]

    @property
    def link(self) -> Connecting | Link:
        """The connection, or the attempt to connect, for the next push."""
        return self.route.links[self.source_index]

    def plan(self, transfer_id: str) -> PairPlan:
        """Return this rank's plan for a transfer. Raises :class:`HandoffError` (missing-source) where there is none."""
        for plan in self.route.own_plans(selector_of(transfer_id)):
            return plan
        raise HandoffError(
            Reason.MISSING_SOURCE,
            f"source rank {self.source_index} has no part in {transfer_id}, but got an announcement.",
            "Run the same kvferry version on both sides.",
        )


class Destinations:
    """The destination ranks that have introduced themselves to one rank in its ``epoch``.

    A rank that ``meets`` them connects to each at once and tells it so. Else the first write connects.

    The server's thread calls :meth:`introduce` and :meth:`announced`, the transfer thread :meth:`connect_anew`.
    """

    def __init__(self, rank: OwnRank, epoch: int, *, meets: bool) -> None:
        self._rank, self._epoch, self._meets = rank, epoch, meets
        self.known: Bounded[tuple[str, int, int], DestinationRank] = Bounded(MAX_DESTINATIONS)
        self._meetings: list[Meeting] = []

    def introduce(self, question: Introduce) -> None:
        """Know a destination from now on, in place of its former registration. Raises :class:`KVFerryError` for one
        that this rank cannot write to.
        """
        agree(decode=Versions(question.version, question.version))
        compare_identities(self._rank.identity, question.identity)
        key = question.receiver, question.answers_at.epoch, question.token
        before = self.known.get(key)
        if before is not None and before.registration >= question.registration:
            self._meet(question.receiver, before)
            return
        if self._rank.shard not in question.sources:
            raise HandoffError(
                Reason.PEER_CHANGED,
                f"{question.receiver} names {len(question.sources)} source shards, and none of them is this rank's.",
                "Send the prompt again.",
            )
        index = question.sources.index(self._rank.shard)
        num_fences = self._rank.transports.num_fences
        links = {index: self._rank.transports.connect(question.end_points)}
        route = Route([decode_shard(source) for source in question.sources], decode_shard(question.shard), links)
        # The connection to a former registration is not closed: it ends with the last batch in flight over it.
        self.known[key] = destination = DestinationRank(
            question.answers_at,
            question.end_points,
            route,
            index,
            question.registration,
            question.version,
            _num_bytes(question),
            num_fences,
        )
        self.known.move_to_end(key)
        self._make_room()
        self._meet(question.receiver, destination)

    def announced(self, key: WriteKey, registration: int, token: int) -> DestinationRank:
        """Return the destination of an announcement, which names its registration and its introduction. Raises
        :class:`HandoffError`: unknown-request, and fenced for a registration that has ended.
        """
        introduced = key.receiver, key.receiver_epoch, token
        destination = self.known.get(introduced)
        if destination is None:
            raise HandoffError(
                Reason.UNKNOWN_REQUEST, f"{key.receiver} has not introduced itself.", "Introduce it first."
            )
        if registration != destination.registration:
            is_late = registration < destination.registration
            raise HandoffError(
                Reason.FENCED if is_late else Reason.UNKNOWN_REQUEST,
                f"{key.receiver} announced blocks of its registration {registration}; known here is "
                f"{destination.registration}.",
                "Send the prompt again." if is_late else "Introduce it first.",
            )
        self.known.move_to_end(introduced)
        return destination

    def _make_room(self) -> None:
        """Forget those that have announced nothing for longest: where they live, they introduce themselves again."""
        num_bytes = sum(each.num_bytes for each in self.known.values())
        while num_bytes > MAX_INTRODUCED_BYTES and len(self.known) > 1:
            _, forgotten = self.known.popitem(last=False)
            num_bytes -= forgotten.num_bytes

    def link(self, destination: DestinationRank) -> Connecting | Link:
        """Return the connection for the next push: a new one where this rank's own fence has closed a transport."""
        if destination.num_fences != self._rank.transports.num_fences:
            return self.connect_anew(destination)
        return destination.link

    def connect_anew(self, destination: DestinationRank) -> Connecting | Link:
        """Connect for the next push; running pushes keep their connection."""
        num_fences = self._rank.transports.num_fences
        destination.route.links[destination.source_index] = self._rank.transports.connect(destination.end_points)
        # Last: another thread takes the link where the number is that of the transports.
        destination.num_fences = num_fences
        return destination.link

    def _meet(self, receiver: str, destination: DestinationRank) -> None:
        """Connect to a destination and tell it so; anew where it introduces itself again, as one does that was not told
        in time.
        """
        self._meetings = [each for each in self._meetings if each.phase is not Phase.DONE]
        before, where = destination.meeting, destination.answers_at
        if not self._meets or before in self._meetings:
            return
        if before is not None and time.monotonic() < before.began_at + TELL_SECONDS:
            return
        num_bytes = destination.num_bytes + sum(each.num_bytes for each in self._meetings)
        if len(self._meetings) >= MAX_MEETINGS or num_bytes > MAX_INTRODUCED_BYTES:
            told = "kvferry: %s is not met: %d meetings are under way."
            logger.warning(told, receiver, len(self._meetings), peer=receiver)
            return
        if before is not None and before.error is not None:
            self.connect_anew(destination)
        met = Met(self._epoch, receiver, where.epoch, destination.registration)
        job_id = f"meeting {receiver} {where.epoch} {destination.registration}"
        tell = partial(self._tell_met, where, met)
        anew = partial(self.connect_anew, destination)
        destination.meeting = meeting = Meeting(job_id, destination.link, destination.num_bytes, tell, anew)
        self._meetings.append(meeting)
        self._rank.executor.submit(meeting)

    def _tell_met(self, where: EndPoint, met: Met) -> None:
        self._rank.client.tell(where.host, where.port, met, TELL_SECONDS, is_trusted=self._rank.client.knows_peers)


def _num_bytes(question: Introduce) -> int:
    return sum(map(len, (question.shard, *question.sources, *question.end_points.values())))
