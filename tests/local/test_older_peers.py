"""An engine of version 9 and one of today push to each other, and refuse each other in words that both sides log."""

import time
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvferry.errors import Reason
from kvferry.handoff.adapters import Adapter
from kvferry.handoff.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Directory,
    DirectoryRequest,
    Handle,
    Question,
)
from kvferry.handoff.source import END
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.versions import Versions, agree
from kvferry.handoff.wire.server import Server
from kvferry.layout.shard import encode_shard
from kvferry.transport.cma import CmaTransport
from kvferry.transport.faults import FaultPlan, FaultyTransport

from .. import version_9 as nine
from ..waits import wait_until
from .engines_in_process import EPOCH, HOST, IDENTITY, DecodeRank, PrefillEngine, Rank
from .engines_that_push import Batches, ReceivingRank, SendingEngine

SECONDS = 20.0
ADAPTER = "0a" * 16
THEIRS = nine.Identity(*msgspec.structs.astuple(IDENTITY))


def memory_like(rank: Rank) -> nine.Memory:
    """Return memory of a rank of version 9 whose caches are like those of this rank."""
    return nine.Memory(msgspec.msgpack.decode(encode_shard(rank.shard), type=nine.Shard))


def rows(memory: nine.Memory) -> np.ndarray:
    """Return the memory by blocks, as :class:`Rank` has them."""
    [region] = memory.regions
    [component] = memory.shard.groups[0].components
    return region.reshape(-1, component.block_stride)


def answering_handshakes(engine: SendingEngine) -> Server:
    """Return the engine's listener, in place of one that knows this version only."""

    def answer(question: Question) -> Directory:
        """Answer a handshake as the engine's scheduler does."""
        assert isinstance(question, DirectoryRequest)
        version = agree(decode=Versions.said(question.version, question.newest))
        return Directory(version, "p", EPOCH, IDENTITY, tuple(rank.entry for rank in engine.ranks))

    engine.listener.close()
    return Server(HOST, 0, answer)


@pytest.fixture
def sender() -> Iterator[SendingEngine]:
    engine = SendingEngine(1, None, Batches.CHUNKS)
    engine.listener = answering_handshakes(engine)
    yield engine
    engine.close()


@pytest.fixture
def decode_of_9() -> Iterator[nine.DecodeEngine]:
    engine = nine.DecodeEngine(THEIRS)
    yield engine
    engine.close()


@pytest.fixture
def receiver() -> Iterator[ReceivingRank]:
    rank = ReceivingRank(Rank(0, 1))
    yield rank
    rank.close()


def test_this_version_pushes_to_version_9(sender: SendingEngine, decode_of_9: nine.DecodeEngine) -> None:
    memory = memory_like(sender.ranks[0].rank)
    answer = decode_of_9.announce(sender.listener.port, EPOCH, memory, [4, 2], "x", "prompt")
    assert isinstance(answer, nine.Announced), answer
    assert answer.epoch == sender.ranks[0].epoch
    sender.compute(END, [5, 1])
    assert decode_of_9.has_report.wait(SECONDS)
    [report] = decode_of_9.reports
    assert isinstance(report, nine.Pushed)
    assert report.num_bytes == 2 * rows(memory)[0].nbytes
    np.testing.assert_array_equal(rows(memory)[[4, 2]], sender.ranks[0].rank.cache[[5, 1]])
    assert not rows(memory)[[0, 1, 3, 5]].any()
    assert sender.pushed(1)[0].error is None, "version 9 has acknowledged the report"


def test_this_version_stops_a_push_that_version_9_revokes(
    sender: SendingEngine, decode_of_9: nine.DecodeEngine
) -> None:
    memory = memory_like(sender.ranks[0].rank)
    decode_of_9.announce(sender.listener.port, EPOCH, memory, [4, 2], "x", "prompt")
    where = sender.ranks[0].answers_at
    wait_until(lambda: decode_of_9.revoke(where.port, where.epoch) == nine.Revoked(where.epoch, True))
    sender.compute(END, [5, 1])
    time.sleep(0.2)
    assert not rows(memory).any()


def test_version_9_pushes_to_this_version(receiver: ReceivingRank) -> None:
    engine = nine.PrefillEngine(memory_like(receiver.rank), THEIRS)
    try:
        rows(engine.memory)[:] = np.random.default_rng(9).integers(0, 256, rows(engine.memory).shape, dtype=np.uint8)
        engine.pushed["x"] = [5, 1]
        hold = RemoteHold("nine", engine.epoch, HOST, engine.server.port, Handle("x", 0))
        receiver.receive(hold, [0, 3])
        result = receiver.result()
        assert result.error is None
        assert result.num_bytes == 2 * receiver.rank.cache[0].nbytes
        np.testing.assert_array_equal(receiver.rank.cache[[0, 3]], rows(engine.memory)[[5, 1]])
        assert [each.get("version") for each in engine.server.raw] == [9, 9, None], "a handshake and an introduction"
        assert engine.server.refused == []
    finally:
        engine.close()


@pytest.mark.parametrize("may_land", [True, False])
def test_hole_1_a_write_that_failed_is_not_told_to_version_9_which_would_free_blocks_that_it_may_reach(
    may_land: bool, decode_of_9: nine.DecodeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is its revocation ever acknowledged: version 9 keeps its blocks until its own fence."""
    engine = SendingEngine(1, FaultPlan(fail_after=1 if may_land else 0), Batches.CHUNKS)
    in_a_connection = replace(CmaTransport.capabilities, ends_with_process=False)
    monkeypatch.setattr(FaultyTransport, "capabilities", in_a_connection)
    engine.listener = answering_handshakes(engine)
    try:
        memory = memory_like(engine.ranks[0].rank)
        decode_of_9.announce(engine.listener.port, EPOCH, memory, [4, 2], "x", "prompt")
        engine.compute(END, [5, 1])
        assert engine.pushed(1)[0].error is not None
        where = engine.ranks[0].answers_at
        assert decode_of_9.has_report.wait(0.5 if may_land else SECONDS) is not may_land
        revoked = [decode_of_9.revoke(where.port, where.epoch) for _ in range(2)]
        assert revoked == [nine.Revoked(where.epoch, not may_land)] * 2
    finally:
        engine.close()


class BreakingEngine(nine.PrefillEngine):
    """A prefill engine of version 9 whose write fails; the report says so by its reason alone."""

    transport = "nixl"
    reason = "transfer-failed"

    def _answer(self, question: nine.Question) -> nine.Answer:
        answer = super()._answer(question)
        return nine.Announced(self.epoch, self.transport) if isinstance(answer, nine.Announced) else answer

    def _push(self, announce: nine.Announce, destination: nine.Introduce) -> None:
        time.sleep(0.2)  # the announcement is answered first
        report = nine.WriteFailed(reason=self.reason, message="it failed.", key=announce.key, source_index=0)
        nine.ask(destination.answers_at.port, report, None)


@pytest.mark.parametrize(
    ("transport", "reason", "num_fences"),
    [("nixl", "transfer-failed", 1), ("nixl", "aborted", 0), ("cma", "transfer-failed", 0)],
)
def test_hole_1_a_write_of_version_9_that_failed_is_fenced_where_it_may_land(
    transport: str, reason: str, num_fences: int, receiver: ReceivingRank
) -> None:
    engine = BreakingEngine(memory_like(receiver.rank), THEIRS)
    engine.transport, engine.reason = transport, reason
    try:
        hold = RemoteHold("nine", engine.epoch, HOST, engine.server.port, Handle("x", 0))
        receiver.receive(hold, [0, 3])
        error = receiver.result().error
        assert error is not None
        assert error.reason.value == reason
        assert receiver.announcer.num_fences == num_fences
        assert engine.server.refused == []
    finally:
        engine.close()


def test_this_version_does_not_push_a_prompt_of_an_adapter_to_version_9(
    sender: SendingEngine, decode_of_9: nine.DecodeEngine
) -> None:
    """Version 9 says no digest: the weights that it has under this name may be others."""
    memory = memory_like(sender.ranks[0].rank)
    assert isinstance(decode_of_9.announce(sender.listener.port, EPOCH, memory, [4, 2], "x", "prompt"), nine.Announced)
    sender.compute(END, [5, 1], adapter=Adapter("sql", ADAPTER))
    assert decode_of_9.has_report.wait(SECONDS)
    [report] = decode_of_9.reports
    assert isinstance(report, nine.WriteFailed)
    assert report.reason == Reason.ADAPTER_MISMATCH
    assert not rows(memory).any()


def test_this_version_does_not_load_a_prompt_of_an_adapter_that_version_9_has_pushed(receiver: ReceivingRank) -> None:
    """Version 9 ignores the digest of the announcement, and writes. A decode engine announces such a prompt only where
    somebody has changed the offer of version 9.
    """
    engine = nine.PrefillEngine(memory_like(receiver.rank), THEIRS)
    try:
        engine.pushed["x"] = [5, 1]
        hold = RemoteHold("nine", engine.epoch, HOST, engine.server.port, Handle("x", 0))
        receiver.receive(hold, [0, 3], adapter=ADAPTER)
        error = receiver.result().error
        assert error is not None
        assert error.reason is Reason.ADAPTER_MISMATCH
        assert engine.server.refused == []
    finally:
        engine.close()


def test_two_engines_of_today_push_a_prompt_of_an_adapter(sender: SendingEngine, receiver: ReceivingRank) -> None:
    """The control."""
    receiver.receive(sender.hold(), [0, 3], adapter=ADAPTER)
    sender.compute(END, [5, 1], adapter=Adapter("sql", ADAPTER))
    assert receiver.result().error is None
    np.testing.assert_array_equal(receiver.rank.cache[[0, 3]], sender.ranks[0].rank.cache[[5, 1]])


def test_version_9_is_told_nothing_that_it_does_not_know(caplog: pytest.LogCaptureFixture) -> None:
    """The decode rank refuses the engine's model, and has a message for that, which only version 10 knows."""
    engine = nine.PrefillEngine(memory_like(Rank(0, 1)), msgspec.structs.replace(THEIRS, weights="others"))
    decode = DecodeRank("cma", Rank(0, 1))
    try:
        error = decode.refusal(RemoteHold("nine", engine.epoch, HOST, engine.server.port, Handle("x", 0)))
        assert "weights: prefill has 'others', decode has 'weights'" in str(error)
        time.sleep(0.2)
        assert [each["type"] for each in engine.server.raw] == ["directory-request"]
    finally:
        engine.close()
        decode.close()


class OlderEngine:
    """A prefill engine that speaks one version only, and says so as kvferry has always done."""

    def __init__(self, version: int) -> None:
        def answer(question: nine.Question) -> nine.Answer:
            assert isinstance(question, nine.DirectoryRequest)
            told = f"the peer speaks protocol version {question.version}, this side {version}."
            raise nine.Refused("protocol-mismatch", told)

        self.server = nine.Server(answer)


def test_an_engine_that_is_too_old_refuses_in_both_logs() -> None:
    older, decode = OlderEngine(8), DecodeRank("cma", Rank(0, 1))
    try:
        error = str(decode.refusal(RemoteHold("eight", 7, HOST, older.server.port, Handle("x", 0))))
        [refused] = older.server.refused
        for told in (error, f"{refused.message} {refused.remedy}"):
            assert f"version {OLDEST_PROTOCOL_VERSION}" in told
            assert "this side 8" in told
            assert "Run the same kvferry version" in told
        assert "[protocol-mismatch]" in error
    finally:
        older.server.close()
        decode.close()


def test_two_engines_of_today_speak_todays_version() -> None:
    prefill, decode = PrefillEngine("cma", [Rank(0, 1).fill()]), DecodeRank("cma", Rank(0, 1))
    asked: list[DirectoryRequest] = []

    def answer(question: Question) -> Directory:
        assert isinstance(question, DirectoryRequest)
        asked.append(question)
        return prefill.directory(version=agree(decode=Versions.said(question.version, question.newest)))

    prefill.answer = answer
    try:
        assert decode.engine(prefill.hold())._directory.version == PROTOCOL_VERSION
        assert asked == [DirectoryRequest(OLDEST_PROTOCOL_VERSION, "d/0", PROTOCOL_VERSION)]
    finally:
        prefill.close()
        decode.close()
