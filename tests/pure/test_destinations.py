"""The destinations of a source rank, without messages and bytes: who is known, refused, connected and met."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from kvferry.errors import HandoffError, Reason, TransportError
from kvferry.execution import destinations
from kvferry.execution.destinations import DestinationRank, Destinations, Meeting
from kvferry.execution.device import HOST
from kvferry.execution.guard_words import Scratch
from kvferry.execution.job import Phase
from kvferry.execution.own_rank import OwnRank
from kvferry.handoff.messages import PROTOCOL_VERSION, EndPoint, Identity, Introduce, Met, WriteKey
from kvferry.layout.dense import shard_for
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard, encode_shard
from kvferry.plan.digest_cells import Integrity

IDENTITY = Identity("m", "w", "a", "float32", 2, 4, 8, "none", "float32")
EPOCH = 40
WHERE = EndPoint("127.0.0.1", 1, 7)
KEY = WriteKey("d/0", 7, 1)
SCRATCH = Scratch(num_words=4)
UNREACHABLE = TransportError(Reason.PEER_UNREACHABLE, "no way there.")


def shard(tp_rank: int = 0, tp_size: int = 1, num_kv_heads: int = 4) -> Shard:
    return shard_for(
        layers=["0", "1"],
        num_kv_heads=num_kv_heads,
        head_size=16,
        itemsize=2,
        block_size=16,
        num_blocks=4,
        layout=NamedLayout.LBHNC,
        tp_size=tp_size,
        tp_rank=tp_rank,
    )


SOURCES = [shard(rank, 2) for rank in range(2)]


class Way:
    """A connection that is made, or fails, when the test says so."""

    name = "cma"

    def __init__(self, end_points: dict[str, bytes]) -> None:
        self.end_points = end_points
        self.is_made = False
        self.error: TransportError | None = None

    def poll(self) -> object | None:
        if self.error is not None:
            raise self.error
        return self if self.is_made else None


class Rank:
    """The second of two source ranks, or one of others, and what it has begun."""

    def __init__(self, *, meets: bool = True, source: Shard = SOURCES[1]) -> None:
        self.executor, self.client = Mock(), Mock(knows_peers=False)
        self.ways: list[Way] = []
        self.now = 0.0
        self.transports = Mock(connect=self._connect)
        parts: list[Any] = [self.transports, self.executor, HOST, self.client]
        self.destinations = Destinations(OwnRank("p", encode_shard(source), IDENTITY, {}, *parts), EPOCH, meets=meets)

    def _connect(self, end_points: dict[str, bytes]) -> Way:
        self.ways.append(Way(end_points))
        return self.ways[-1]

    @property
    def meetings(self) -> list[Meeting]:
        return [call.args[0] for call in self.executor.submit.call_args_list]

    @property
    def told(self) -> list[Met]:
        return [call.args[2] for call in self.client.tell.call_args_list]

    def introduce(self, **changed: Any) -> None:
        self.destinations.introduce(msgspec.structs.replace(INTRODUCTION, **changed))

    def advance(self) -> None:
        self.now += 1.0
        for meeting in self.meetings:
            if meeting.phase is not Phase.DONE:
                meeting.advance(SCRATCH, self.now)


INTRODUCTION = Introduce(
    version=PROTOCOL_VERSION,
    epoch=EPOCH,
    receiver="d/0",
    identity=IDENTITY,
    sources=tuple(encode_shard(source) for source in SOURCES),
    shard=encode_shard(shard()),
    end_points={"cma": b"0"},
    answers_at=WHERE,
)


def reason_of(call: Callable[[], object]) -> Reason:
    with pytest.raises(HandoffError) as refused:
        call()
    return refused.value.reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": PROTOCOL_VERSION + 1}, Reason.PROTOCOL_MISMATCH),
        ({"identity": msgspec.structs.replace(IDENTITY, weights="others")}, Reason.MODEL_MISMATCH),
        ({"sources": INTRODUCTION.sources[:1]}, Reason.PEER_CHANGED),
    ],
    ids=["version", "weights", "the shards of other ranks"],
)
def test_a_destination_that_this_rank_cannot_write_to_is_refused(changed: dict[str, Any], reason: Reason) -> None:
    rank = Rank()
    assert reason_of(lambda: rank.introduce(**changed)) is reason
    assert (len(rank.destinations.known), rank.ways, rank.meetings) == (0, [], [])


def test_only_a_later_registration_replaces_a_destination() -> None:
    """Pushes under way keep the route that they have; the memory of a later registration is elsewhere."""
    rank = Rank()
    rank.introduce(registration=1)
    [first] = rank.destinations.known.values()
    for registration in (1, 0):
        rank.introduce(registration=registration)
        assert list(rank.destinations.known.values()) == [first]
    rank.introduce(registration=2, end_points={"cma": b"2"})
    [second] = rank.destinations.known.values()
    assert second.link is rank.ways[-1]
    assert [way.end_points for way in rank.ways] == [{"cma": b"0"}, {"cma": b"2"}]
    assert first.link is rank.ways[0]


def test_hole_16_an_introduction_in_the_name_of_another_rank_takes_nobodys_place() -> None:
    """A name and an epoch are in an engine's public directory; the token is for one source alone."""
    rank = Rank()
    elsewhere = EndPoint("127.0.0.1", 2, WHERE.epoch)
    rank.introduce(answers_at=elsewhere)
    rank.introduce(token=5)
    rank.introduce(answers_at=elsewhere, registration=1 << 40)
    rank.introduce(answers_at=elsewhere, registration=1 << 40, token=6)
    known = rank.destinations.announced(KEY, 0, 5)
    assert (known.answers_at, known.registration) == (WHERE, 0)
    assert reason_of(lambda: rank.destinations.announced(KEY, 0, 7)) is Reason.UNKNOWN_REQUEST


def test_after_a_fence_of_this_rank_the_next_push_has_a_new_connection() -> None:
    rank = Rank(meets=False)
    rank.transports.num_fences = 0
    rank.introduce()
    known = rank.destinations.announced(KEY, 0, 0)
    assert rank.destinations.link(known) is rank.ways[0]
    rank.transports.num_fences = 1
    assert rank.destinations.link(known) is rank.ways[1]
    assert rank.destinations.link(known) is rank.ways[1]


def test_a_connection_that_begins_while_this_rank_fences_serves_no_later_push() -> None:
    """The server's thread connects while the transfer thread closes the transports."""
    rank = Rank(meets=False)
    rank.transports.num_fences = 0

    def connect_in_a_fence(end_points: dict[str, bytes]) -> Way:
        rank.transports.num_fences += 1
        return rank._connect(end_points)

    rank.transports.connect = connect_in_a_fence
    rank.introduce()
    known = rank.destinations.announced(KEY, 0, 0)
    assert rank.destinations.link(known) is rank.ways[1], "that of the introduction is over"
    rank.transports.connect = rank._connect
    assert rank.destinations.link(known) is rank.ways[2], "and so is the next one"
    assert rank.destinations.link(known) is rank.ways[2]


def test_an_announcement_counts_for_the_epoch_and_the_registration_that_are_known() -> None:
    rank = Rank()
    rank.introduce(registration=1)
    announced = rank.destinations.announced
    assert announced(KEY, 1, 0).registration == 1
    assert reason_of(lambda: announced(KEY, 0, 0)) is Reason.FENCED
    assert reason_of(lambda: announced(KEY, 2, 0)) is Reason.UNKNOWN_REQUEST
    for other in ({"receiver": "d/1"}, {"receiver_epoch": 8}):
        key = msgspec.structs.replace(KEY, **other)
        assert reason_of(lambda key=key: announced(key, 1, 0)) is Reason.UNKNOWN_REQUEST


def test_a_transfer_of_which_this_rank_has_no_part_is_refused() -> None:
    """Where ranks hold the same heads, one of them writes."""
    replicas = [shard(rank, 2, num_kv_heads=1) for rank in range(2)]
    sources = tuple(encode_shard(source) for source in replicas)
    found: list[set[str]] = []
    for source in replicas:
        rank = Rank(source=source)
        rank.introduce(sources=sources, shard=encode_shard(shard(num_kv_heads=1)))
        [known] = rank.destinations.known.values()
        found.append({f"x{number}" for number in range(20) if has_part(known, f"x{number}")})
    first, second = found
    assert first
    assert second
    assert first | second == {f"x{number}" for number in range(20)}
    assert not first & second


def has_part(destination: DestinationRank, transfer_id: str) -> bool:
    try:
        return bool(destination.plan(transfer_id))
    except HandoffError as error:
        if error.reason is not Reason.MISSING_SOURCE:
            raise
        return False


def test_the_compared_cells_are_made_once_for_each_wish_of_a_destination() -> None:
    rank = Rank()
    rank.introduce()
    [known] = rank.destinations.known.values()
    plan = known.plan("x")
    asked = [(Integrity.SAMPLE, True), (Integrity.SAMPLE, False), (Integrity.FULL, False)]
    found = [known.cells(plan, wanted, is_sliced=is_sliced) for wanted, is_sliced in asked]
    assert [(cells.wanted, cells.is_sliced) for cells in found] == asked
    assert [known.cells(plan, each.wanted, is_sliced=each.is_sliced) for each in found] == found


# Meetings.


def test_a_destination_is_told_that_it_was_met_once_it_can_be_written_to_and_not_before() -> None:
    rank = Rank()
    rank.introduce(registration=3)
    rank.advance()
    assert rank.told == []
    rank.ways[0].is_made = True
    rank.advance()
    assert rank.told == [Met(EPOCH, "d/0", WHERE.epoch, 3)]
    assert [meeting.phase for meeting in rank.meetings] == [Phase.DONE]
    assert rank.meetings[0].result(0.0).transport == "cma"
    [call] = rank.client.tell.call_args_list
    assert (call.args[:2], call.kwargs["is_trusted"]) == ((WHERE.host, WHERE.port), False), "a stranger's address"


def test_a_rank_that_is_pushed_for_connects_when_it_writes() -> None:
    rank = Rank(meets=False)
    rank.introduce()
    assert rank.meetings == []


def test_a_destination_that_was_not_met_is_met_anew_over_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it introduces itself again, though not at every introduction."""
    rank = Rank()
    rank.introduce()
    rank.ways[0].error = UNREACHABLE
    rank.advance()
    rank.introduce()
    assert (len(rank.meetings), len(rank.ways)) == (1, 1)
    assert rank.meetings[0].result(0.0).error is not None
    monkeypatch.setattr(destinations, "TELL_SECONDS", 0.0)
    rank.introduce()
    rank.introduce()
    assert (len(rank.meetings), len(rank.ways)) == (2, 2)
    rank.ways[1].is_made = True
    rank.advance()
    assert len(rank.told) == 1
    rank.introduce()
    assert (len(rank.meetings), len(rank.ways)) == (3, 2), "told again: the word may be lost, the connection is not"


def test_a_meeting_that_a_fence_of_this_rank_has_interrupted_goes_on_over_the_transport_that_it_has_opened() -> None:
    """Else the destination would not be told, and read for ten minutes."""
    rank = Rank()
    rank.introduce()
    rank.ways[0].error = TransportError(Reason.CLOSED, "this nixl transport is closed.")
    rank.advance()
    assert len(rank.ways) == 2
    assert rank.destinations.known["d/0", WHERE.epoch, 0].link is rank.ways[1]
    rank.ways[1].is_made = True
    rank.advance()
    assert len(rank.told) == 1
    [meeting] = rank.meetings
    assert meeting.result(0.0).error is None


def test_meetings_that_are_over_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destinations, "MAX_MEETINGS", 1)
    rank = Rank()
    for number in range(3):
        rank.introduce(receiver=f"d/{number}")
        assert len(rank.meetings) == number + 1
        rank.introduce(receiver="one more")
        assert len(rank.meetings) == number + 1
        way = rank.destinations.known[f"d/{number}", WHERE.epoch, 0].link
        assert isinstance(way, Way)
        way.is_made = True
        rank.advance()
    assert [met.receiver for met in rank.told] == ["d/0", "d/1", "d/2"]


def test_meetings_keep_no_more_of_forgotten_introductions_than_a_rank_remembers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of 1,024 meetings could keep end points of 4 MB until a peer that does not answer is given up."""
    monkeypatch.setattr(destinations, "MAX_INTRODUCED_BYTES", 3_000_000)
    rank = Rank()
    for name in "abcd":
        rank.introduce(receiver=name, end_points={"none": bytes(1_400_000)})
    assert len(rank.meetings) == 2
    for way in rank.ways:
        way.is_made = True
    rank.advance()
    rank.introduce(receiver="e")
    assert len(rank.meetings) == 3


def test_a_meeting_that_is_cancelled_is_over_and_tells_nothing() -> None:
    """As when the engine ends."""
    rank = Rank()
    rank.introduce()
    [meeting] = rank.meetings
    meeting.cancel(HandoffError(Reason.CLOSED, "the executor stops."))
    assert meeting.phase is Phase.DONE
    assert meeting.result(0.0).error is not None
    assert rank.told == []
