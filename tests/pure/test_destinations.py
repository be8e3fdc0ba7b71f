"""The destinations of a source rank, without messages and bytes: who is known, refused and connected."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from kvferry.errors import HandoffError, Reason, TransportError
from kvferry.execution.device import HOST
from kvferry.execution.digests import Integrity
from kvferry.execution.peers import OwnRank
from kvferry.execution.source import DestinationRank, Destinations
from kvferry.handoff.messages import PROTOCOL_VERSION, EndPoint, Identity, Introduce, WriteKey
from kvferry.handoff.wire.trust import THIS_MACHINE, Trust
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard, encode_shard

from ..support.dense import shard_for

IDENTITY = Identity("m", "w", "a", "float32", 2, 4, 8, "none", "float32")
EPOCH = 40
WHERE = EndPoint("127.0.0.1", 1, 7)
KEY = WriteKey("d/0", 7, 1)


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

    def __init__(self, *, source: Shard = SOURCES[1], trust: Trust = THIS_MACHINE, knows_peers: bool = False) -> None:
        self.ways: list[Way] = []
        self.transports = Mock(connect=self._connect)
        parts: list[Any] = [self.transports, Mock(), HOST, Mock(knows_peers=knows_peers, trust=trust)]
        self.destinations = Destinations(OwnRank("p", encode_shard(source), IDENTITY, {}, *parts))

    def _connect(self, end_points: dict[str, bytes]) -> Way:
        self.ways.append(Way(end_points))
        return self.ways[-1]

    def introduce(self, **changed: Any) -> None:
        self.destinations.introduce(msgspec.structs.replace(INTRODUCTION, **changed))


INTRODUCTION = Introduce(
    version=PROTOCOL_VERSION,
    epoch=EPOCH,
    receiver="d/0",
    identity=IDENTITY,
    sources=tuple(encode_shard(source) for source in SOURCES),
    shard=encode_shard(shard()),
    end_points={"cma": b"0"},
    answers_at=WHERE,
    registration=0,
    token=0,
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
    assert (len(rank.destinations.known), rank.ways) == (0, [])


def test_only_a_later_registration_replaces_a_destination() -> None:
    """Writes under way keep the route that they have; the memory of a later registration is elsewhere."""
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


def test_after_a_fence_of_this_rank_the_next_write_has_a_new_connection() -> None:
    rank = Rank()
    rank.transports.num_fences = 0
    rank.introduce()
    known = rank.destinations.announced(KEY, 0, 0)
    assert rank.destinations.link(known) is rank.ways[0]
    rank.transports.num_fences = 1
    assert rank.destinations.link(known) is rank.ways[1]
    assert rank.destinations.link(known) is rank.ways[1]


def test_a_connection_that_begins_while_this_rank_fences_serves_no_later_write() -> None:
    """The server's thread connects while the transfer thread closes the transports."""
    rank = Rank()
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


def test_the_compared_cells_are_made_once_for_each_value_of_integrity() -> None:
    rank = Rank()
    rank.introduce()
    [known] = rank.destinations.known.values()
    plan = known.plan("x")
    found = [known.cells(plan, wanted) for wanted in (Integrity.SAMPLE, Integrity.FULL)]
    assert [cells.wanted for cells in found] == [Integrity.SAMPLE, Integrity.FULL]
    assert [known.cells(plan, cells.wanted) for cells in found] == found


@pytest.mark.parametrize(
    ("host", "allowed_hosts", "knows_peers", "is_refused"),
    [
        ("10.9.0.1", [], False, True),
        ("10.9.0.1", ["10.9.0.0/16"], False, False),
        ("10.9.0.1", [], True, False),
        ("127.0.0.1", [], False, False),
    ],
)
def test_a_destination_to_which_this_engine_may_not_connect_is_refused_at_once(
    host: str, allowed_hosts: list[str], knows_peers: bool, is_refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its loads would wait for reports until their deadlines. With keys an introduction comes from a trusted engine."""
    rank = Rank(trust=Trust(allowed_hosts=allowed_hosts), knows_peers=knows_peers)
    where = EndPoint(host, 5601, WHERE.epoch)
    if not is_refused:
        rank.introduce(answers_at=where)
        assert rank.destinations.announced(KEY, 0, 0).answers_at == where
        return
    with pytest.raises(HandoffError) as refused:
        rank.introduce(answers_at=where)
    assert refused.value.reason is Reason.PERMISSION_DENIED
    assert "10.9.0.1:5601" in refused.value.message
    assert '"allowed_hosts"' in refused.value.remedy
    assert "10.9.0.1:5601" in caplog.text, "both logs say so"
    assert (len(rank.destinations.known), rank.ways) == (0, [])
