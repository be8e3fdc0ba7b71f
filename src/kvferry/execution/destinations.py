"""The destinations of a source rank: who has introduced itself, the route to it, and the connection of writes to it."""

import logging
from dataclasses import dataclass, field

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.execution.digests import PartCells
from kvferry.execution.own_rank import OwnRank
from kvferry.handoff.handshake import Versions, agree, compare_identities
from kvferry.handoff.messages import Bounded, EndPoint, Introduce, WriteKey
from kvferry.layout.shard import decode_shard
from kvferry.peer_log import PeerLog
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.match import selector_of
from kvferry.plan.planner import PairPlan, Route
from kvferry.transport.registry import Connecting, Link

logger = PeerLog(logging.getLogger(__name__))

MAX_DESTINATIONS = 4096
MAX_INTRODUCED_BYTES = 256 << 20
"""Of all introductions that are remembered: each may have as many as a question."""


@dataclass
class DestinationRank:
    """A destination rank in one epoch: the route to the rank, connected by the first write of this rank's part."""

    answers_at: EndPoint
    end_points: dict[str, bytes]
    route: Route
    link: Connecting | Link
    """The connection, or the attempt to connect, for the next write."""
    source_index: int
    registration: int
    num_bytes: int
    """Of its introduction."""
    num_fences: int
    """Of this rank's transports, before the connection."""
    num_open: int = 0
    """Its open writes, each of which keeps it."""
    _cells: dict[tuple[PairPlan, Integrity], PartCells] = field(default_factory=dict)

    def cells(self, plan: PairPlan, wanted: Integrity) -> PartCells:
        """Return the cells of a plan whose digests the destination compares, made once. Raises :class:`PlanError`."""
        if (plan, wanted) not in self._cells:
            self._cells[plan, wanted] = PartCells(plan, wanted, at_source=True)
        return self._cells[plan, wanted]

    def plan(self, transfer_id: str) -> PairPlan:
        """Return this rank's plan for a transfer. Raises :class:`HandoffError` (missing-source) where there is none."""
        for plan in self.route.plans(selector_of(transfer_id)):
            if plan.assignment.source_index == self.source_index:
                return plan
        raise HandoffError(
            Reason.MISSING_SOURCE,
            f"source rank {self.source_index} has no part in {transfer_id}, but got an announcement.",
            "Run the same kvferry version on both sides.",
        )


class Destinations:
    """The destination ranks that have introduced themselves to one rank.

    The server's thread calls :meth:`introduce` and :meth:`announced`, the transfer thread :meth:`connect_anew`.
    """

    def __init__(self, rank: OwnRank) -> None:
        self._rank = rank
        self.known: Bounded[tuple[str, int, int], DestinationRank] = Bounded(MAX_DESTINATIONS)

    def introduce(self, question: Introduce) -> None:
        """Know a destination from now on, in place of its former registration. Raises :class:`KVFerryError` for one
        that this rank cannot write to.
        """
        agree(decode=Versions(question.version, question.version))
        self._check_allowed(question)
        compare_identities(self._rank.identity, question.identity)
        key = question.receiver, question.answers_at.epoch, question.token
        before = self.known.get(key)
        if before is not None and before.registration >= question.registration:
            return
        if self._rank.shard not in question.sources:
            raise HandoffError(
                Reason.PEER_CHANGED,
                f"{question.receiver} names {len(question.sources)} source shards, and none of them is this rank's.",
                "Send the prompt again.",
            )
        index = question.sources.index(self._rank.shard)
        num_fences = self._rank.transports.num_fences
        link = self._rank.transports.connect(question.end_points)
        route = Route([decode_shard(source) for source in question.sources], decode_shard(question.shard))
        # The connection to a former registration is not closed: it ends with the last batch in flight over it.
        self.known[key] = DestinationRank(
            question.answers_at,
            question.end_points,
            route,
            link,
            index,
            question.registration,
            _num_bytes(question),
            num_fences,
        )
        self.known.move_to_end(key)
        self._make_room()

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

    def _check_allowed(self, question: Introduce) -> None:
        """Refuse a destination to which this engine may not connect: its loads would wait for reports until their
        deadlines. Raises :class:`HandoffError` (permission-denied).
        """
        client = self._rank.client
        if client.knows_peers:
            return
        try:
            client.trust.refuse_numeric(question.answers_at.host)
        except KVFerryError as error:
            refused = _may_not_connect(question, error)
            logger.warning("kvferry: %s", refused, peer=question.receiver)
            raise refused from error

    def _make_room(self) -> None:
        """Forget those that have announced nothing for longest: where they live, they introduce themselves again."""
        num_bytes = sum(each.num_bytes for each in self.known.values())
        while num_bytes > MAX_INTRODUCED_BYTES and len(self.known) > 1:
            _, forgotten = self.known.popitem(last=False)
            num_bytes -= forgotten.num_bytes

    def link(self, destination: DestinationRank) -> Connecting | Link:
        """Return the connection for the next write: a new one where this rank's own fence has closed a transport."""
        if destination.num_fences != self._rank.transports.num_fences:
            return self.connect_anew(destination)
        return destination.link

    def connect_anew(self, destination: DestinationRank) -> Connecting | Link:
        """Connect for the next write; running ones keep their connection."""
        num_fences = self._rank.transports.num_fences
        destination.link = self._rank.transports.connect(destination.end_points)
        # Last: another thread takes the link where the number is that of the transports.
        destination.num_fences = num_fences
        return destination.link


def _num_bytes(question: Introduce) -> int:
    return sum(map(len, (question.shard, *question.sources, *question.end_points.values())))


def _may_not_connect(question: Introduce, error: KVFerryError) -> HandoffError:
    where = question.answers_at
    return HandoffError(
        Reason.PERMISSION_DENIED,
        f"the prefill engine may not connect to the decode rank {question.receiver} at {where.host}:{where.port}, "
        f"where it reports what it has written: {error.message}",
        'Add the decode engine\'s host to "allowed_hosts" of the prefill engine.',
    )
