"""A decode rank's source engines: real handshakes, real bytes, and every refusal."""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.execution import route
from kvferry.execution import source_engines as module
from kvferry.execution.guard_words import Held
from kvferry.execution.job import Phase
from kvferry.execution.read import Read
from kvferry.handoff.messages import FIRST_WEIGHTS, PROTOCOL_VERSION, Directory, Handle, Noted
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.wire import background
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import encode_shard
from kvferry.plan.planner import PairPlan
from kvferry.plan.request import GroupBlocks
from kvferry.plan.staging.scatter import Merge, StagedBlocks
from kvferry.plan.staging.strategy import TYPICAL_COSTS, Strategy
from kvferry.testing.transport_peer import PeerProcess, start_peer
from kvferry.transport.memcpy import MemcpyTransfer, MemcpyTransport
from kvferry.transport.protocol import Status, Transfer

from ..waits import wait_until
from .engines_in_process import (
    EPOCH,
    GENERATION,
    HEADS,
    HELD,
    HOST,
    IDENTITY,
    ROW_BYTES,
    SLOT,
    WORD,
    DecodeRank,
    PrefillEngine,
    Rank,
    filled_ranks,
    whole_blocks,
)

WRONG = (Reason.WRONG_SOURCE, Reason.BYTES_MISSING, Reason.OUT_OF_REGION)
ONE_BLOCK = [whole_blocks("full", [2], [1])]


@pytest.fixture(params=["memcpy", "cma"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def prefill() -> Iterator[PrefillEngine]:
    engine = PrefillEngine("memcpy", filled_ranks())
    yield engine
    engine.close()


@pytest.fixture
def decode() -> Iterator[DecodeRank]:
    rank = DecodeRank("memcpy", Rank(0, 1))
    yield rank
    rank.transports.close()


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_labelled_bytes_arrive_exactly(transport: str, tp_size: int, strategy: Strategy) -> None:
    prefill = PrefillEngine(transport, filled_ranks(tp_size))
    decode = DecodeRank(transport, Rank(0, 1), strategy=strategy)
    try:
        result = decode.load(prefill.hold(), [5, 0, 3], [1, 2, 4])
        assert result.error is None
        assert (result.num_sources, result.num_bytes, result.transport) == (tp_size, 3 * ROW_BYTES, transport)
        rows = np.concatenate([rank.cache for rank in prefill.ranks], axis=1)
        np.testing.assert_array_equal(decode.rank.cache[[1, 2, 4]], rows[[5, 0, 3]])
        assert not decode.rank.cache[[0, 3, 5]].any(), "no other block is touched"
        assert prefill.num_handshakes == 1
        assert decode.load(prefill.hold(), [1], [0]).error is None
        assert prefill.num_handshakes == 1, "handshaken once"
    finally:
        prefill.close()
        decode.transports.close()


@pytest.mark.parametrize("strategy", Strategy)
def test_a_hold_that_has_ended_is_not_read(prefill: PrefillEngine, strategy: Strategy) -> None:
    decode = DecodeRank("memcpy", Rank(0, 1), strategy=strategy)
    prefill.words[0].clear(SLOT)
    result = decode.load(prefill.hold(), [5], [1])
    assert result.error is not None
    assert result.error.reason is Reason.SOURCE_CHANGED
    assert not decode.rank.cache.any()
    decode.close()


def test_a_slot_beyond_the_words_is_refused(prefill: PrefillEngine, decode: DecodeRank) -> None:
    engine = decode.engine(prefill.hold())
    for slot in (4, 1 << 40):
        with pytest.raises(HandoffError) as caught:
            engine.reads(prefill.hold(), Held(slot, WORD), [])
        assert caught.value.reason is Reason.WRONG_PARAMETERS


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("model", "other", Reason.MODEL_MISMATCH),
        ("weights", "other", Reason.MODEL_MISMATCH),
        ("architecture", "other", Reason.MODEL_MISMATCH),
        ("kv_dtype", "bfloat16", Reason.DTYPE_MISMATCH),
        ("num_layers", 3, Reason.MODEL_MISMATCH),
        ("num_kv_heads", 8, Reason.MODEL_MISMATCH),
        ("head_size", 16, Reason.HEAD_SIZE_MISMATCH),
        ("quantization", "fp8", Reason.MODEL_MISMATCH),
        ("compute_dtype", "bfloat16", Reason.DTYPE_MISMATCH),
    ],
)
def test_another_model_is_refused_by_field(
    prefill: PrefillEngine, decode: DecodeRank, field: str, value: str | int, reason: Reason
) -> None:
    prefill.answer = lambda question: prefill.directory(identity=msgspec.structs.replace(IDENTITY, **{field: value}))
    error = decode.refusal(prefill.hold())
    assert error.reason is reason
    assert field in error.message


def test_another_epoch_version_or_kind_of_answer_is_refused(prefill: PrefillEngine, decode: DecodeRank) -> None:
    assert decode.refusal(prefill.hold(epoch=EPOCH - 1)).reason is Reason.PEER_CHANGED
    decode.forget_failures()
    prefill.answer = lambda question: prefill.directory(version=PROTOCOL_VERSION + 1)
    assert decode.refusal(prefill.hold()).reason is Reason.PROTOCOL_MISMATCH
    decode.forget_failures()
    prefill.answer = lambda question: Noted(EPOCH)
    assert decode.refusal(prefill.hold()).reason is Reason.PROTOCOL_MISMATCH


def test_llm_d_2433_a_shard_that_does_not_fit_or_decode_is_refused_before_a_transfer(
    prefill: PrefillEngine, decode: DecodeRank
) -> None:
    right = prefill.directory().ranks
    garbage = msgspec.structs.replace(right[0], shard=b"garbage")
    prefill.answer = lambda question: prefill.directory(ranks=(garbage, right[1]))
    assert decode.refusal(prefill.hold()).reason is Reason.MALFORMED_MESSAGE
    decode.forget_failures()
    prefill.answer = lambda question: prefill.directory(ranks=right[:1])
    assert decode.refusal(prefill.hold()).reason is Reason.MISSING_SOURCE
    other_layers = msgspec.structs.replace(right[0], shard=encode_shard(Rank(0, 1, layers=["0", "7"]).shard))
    decode.forget_failures()
    prefill.answer = lambda question: prefill.directory(ranks=(other_layers,))
    assert decode.refusal(prefill.hold()).reason is Reason.LAYER_MISMATCH


def test_a_refused_plan_is_remembered_like_a_failed_handshake(
    prefill: PrefillEngine, decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "FAILURE_SECONDS", 60.0)
    prefill.answer = lambda question: prefill.directory(ranks=prefill.directory().ranks[:1])
    first, second = decode.refusal(prefill.hold()), decode.refusal(prefill.hold())
    assert first.reason is Reason.MISSING_SOURCE
    assert (str(second), prefill.num_handshakes) == (str(first), 1)
    monkeypatch.setattr(background, "FAILURE_SECONDS", 0.1)
    prefill.answer = lambda question: prefill.directory()
    time.sleep(0.15)
    assert decode.load(prefill.hold(), [5], [1]).error is None


def test_a_plan_that_lowers_wrongly_is_found_before_any_byte_moves(
    prefill: PrefillEngine, decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower = PairPlan.lower

    def lower_wrongly(plan: PairPlan, blocks: Sequence[GroupBlocks]) -> np.ndarray:
        rows = lower(plan, blocks)
        rows[[0, 1], 0] = rows[[1, 0], 0]
        return rows

    monkeypatch.setattr(PairPlan, "lower", lower_wrongly)
    assert decode.refusal(prefill.hold()).reason is Reason.WRONG_SOURCE


def test_an_unexpected_error_is_remembered_too(
    prefill: PrefillEngine, decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "FAILURE_SECONDS", 60.0)
    num_plans = 0

    def plan_without_end(*_: object) -> None:
        nonlocal num_plans
        num_plans += 1
        raise MemoryError

    monkeypatch.setattr(route, "Planner", plan_without_end)
    first, second = decode.refusal(prefill.hold()), decode.refusal(prefill.hold())
    assert str(first) == str(second)
    assert "MemoryError" in first.message
    assert (num_plans, prefill.num_handshakes) == (1, 1)


def test_ranks_that_only_later_requests_read_are_proved_too(
    decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ranks hold four heads twice; what the handshake's sample reads is right, the others' list is not."""
    lower, proved, refused = PairPlan.lower, [], []

    def lower_wrongly(plan: PairPlan, blocks: Sequence[GroupBlocks]) -> np.ndarray:
        rows = lower(plan, blocks)
        if plan.assignment.source_index % 2:
            rows[[0, 1], 0] = rows[[1, 0], 0]
        return rows

    monkeypatch.setattr(PairPlan, "lower", lower_wrongly)
    prefill = PrefillEngine("memcpy", filled_ranks(8))
    try:
        engine = decode.engine(prefill.hold())
        for number in range(16):
            hold = msgspec.structs.replace(prefill.hold(), handle=Handle(f"r{number}", 1))
            try:
                proved.append(engine.reads(hold, HELD, ONE_BLOCK))
            except KVFerryError as error:
                refused.append(error.reason)
        assert set(refused) == {Reason.WRONG_SOURCE}
        assert proved
        assert all(len({int(read.descriptors[0, 0]) for read in reads}) == HEADS for reads in proved)
    finally:
        prefill.close()


def test_requests_spread_over_replicas(decode: DecodeRank) -> None:
    """Eight ranks hold four heads twice: which of the two is read depends on the request."""
    prefill = PrefillEngine("memcpy", filled_ranks(8))
    try:
        hold = prefill.hold()
        engine = decode.engine(hold)
        chosen = set()
        for number in range(16):
            reads = engine.reads(msgspec.structs.replace(hold, handle=Handle(f"r{number}", 1)), HELD, ONE_BLOCK)
            assert len(reads) == HEADS
            chosen.add(tuple(int(read.descriptors[0, 0]) for read in reads))
        assert len(chosen) > 1
    finally:
        prefill.close()


def test_a_stage_smaller_than_a_block_is_refused_at_the_handshake(prefill: PrefillEngine) -> None:
    decode = DecodeRank("memcpy", Rank(0, 1), strategy=Strategy.SCATTER, stage_bytes=ROW_BYTES // 2)
    error = decode.refusal(prefill.hold())
    decode.close()
    assert error.reason is Reason.UNSUPPORTED
    assert "one block needs a stage of" in error.message


@pytest.mark.parametrize(("seconds_per_descriptor", "is_staged"), [(1e-3, True), (1e-9, False)])
def test_without_a_strategy_typical_costs_of_the_transport_decide(
    seconds_per_descriptor: float, is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = replace(TYPICAL_COSTS["memcpy"], seconds_per_descriptor=seconds_per_descriptor)
    monkeypatch.setitem(TYPICAL_COSTS, "memcpy", costs)
    layout = NamedLayout.LBNHC
    prefill = PrefillEngine("memcpy", filled_ranks(2, layout))
    decode = DecodeRank("memcpy", Rank(0, 1, layout=layout), strategy=None)
    try:
        result = decode.load(prefill.hold(), [5, 0, 3], [1, 2, 4])
        assert result.error is None
        assert result.num_staged_bytes == (result.num_bytes if is_staged else 0)
    finally:
        prefill.close()
        decode.close()


def test_a_scatter_plan_that_is_wrong_is_refused_at_the_handshake(
    prefill: PrefillEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    merges = StagedBlocks.merges

    def shifted(blocks: StagedBlocks, offset: int) -> list[Merge]:
        return [replace(merge, stage_offset=merge.stage_offset ^ 64) for merge in merges(blocks, offset)]

    monkeypatch.setattr(StagedBlocks, "merges", shifted)
    decode = DecodeRank("memcpy", Rank(0, 1), strategy=Strategy.SCATTER)
    assert decode.refusal(prefill.hold()).reason in WRONG
    decode.close()


def test_no_connection_is_left_of_an_engine_that_is_refused(
    prefill: PrefillEngine, decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr("kvferry.transport.memcpy.MemcpyPeer.close", lambda peer: closed.append(peer.name))
    right = prefill.directory().ranks
    unreachable = msgspec.structs.replace(right[1], end_points={"carrier pigeon": b""})
    prefill.answer = lambda question: prefill.directory(ranks=(right[0], unreachable))
    assert decode.refusal(prefill.hold()).reason is Reason.TRANSPORT_UNAVAILABLE
    assert closed == ["memcpy"]


def test_nothing_is_left_of_engines_that_are_refused_or_given_up_over_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl")
    monkeypatch.setattr("kvferry.transport.nixl.MAX_UNUSED", 0)
    prefill, decode = PrefillEngine("nixl", filled_ranks()), DecodeRank("nixl", Rank(0, 1))
    transport = decode.transports.transports["nixl"]
    try:
        right = prefill.directory().ranks
        unreachable = msgspec.structs.replace(right[1], end_points={"carrier pigeon": b""})
        prefill.answer = lambda question: prefill.directory(ranks=(right[0], unreachable))
        assert decode.refusal(prefill.hold()).reason is Reason.TRANSPORT_UNAVAILABLE
        assert agents_left(transport) == 0
        decode.forget_failures()
        prefill.answer = lambda question: prefill.directory()
        assert decode.load(prefill.hold(), [5], [1]).error is None
        assert len(transport._remote_agents._metadata) == 1
        decode.engines.suspect(prefill.hold())
        decode.engines._drop_suspects()
        assert agents_left(transport) == 0
        assert decode.load(prefill.hold(), [5], [1]).error is None
    finally:
        decode.transports.close()
        prefill.close()


def agents_left(transport: Any) -> int:
    """Return how many agents a NIXL transport knows when what it had posted has ended."""
    end = time.monotonic() + 20
    while transport._connections and time.monotonic() < end:
        transport._check_answered("nobody")
        time.sleep(0.002)
    transport._remote_agents.let_go()
    return len(transport._remote_agents._metadata)


def test_sglang_12779_a_stopped_prefill_worker_holds_no_other_load() -> None:
    """Its engine answers the handshake; the process of the rank itself is stopped."""
    pytest.importorskip("nixl")
    decode = DecodeRank("nixl", Rank(0, 1))
    well, ill = (PrefillEngine("nixl", filled_ranks(1)) for _ in range(2))
    with start_peer("kvferry.transport.nixl:NixlTransport", ROW_BYTES, in_process=False) as worker:
        try:
            assert isinstance(worker, PeerProcess)
            worker.stop()
            ill.end_points = {"nixl": worker.end_point}
            longest, end = 0.0, time.monotonic() + 30
            while not decode.engines._connecting:
                longest = max(longest, seconds_to(lambda: decode.engines.get(ill.hold())))
                assert time.monotonic() < end, "the handshake does not end"
                time.sleep(0.002)
            assert decode.load(well.hold(), [5], [1]).error is None
            longest = max(longest, seconds_to(lambda: decode.engines.get(ill.hold())))
            assert longest < 1.0
            assert len(decode.engines._connecting), "the other load need not wait for its end"
            for connection in decode.transports.transports["nixl"]._connections:  # type: ignore[attr-defined]
                connection.deadline = 0.0
            error = decode.refusal(ill.hold())
            assert error.reason is Reason.PEER_UNREACHABLE
            again = decode.refusal(ill.hold())
            assert (str(again), ill.num_handshakes) == (str(error), 1), "remembered, as all that is refused"
        finally:
            worker.resume()
            decode.transports.close()
            well.close()
            ill.close()


def seconds_to(call: Callable[[], object]) -> float:
    started_at = time.monotonic()
    call()
    return time.monotonic() - started_at


class SlowToConnect(MemcpyTransport):
    """Reaches a peer when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_connect = True

    def connect(self, end_point: bytes) -> Transfer:
        connecting = super().connect(end_point)
        connecting.status = Status.PENDING
        return connecting

    def poll(self, transfer: Transfer) -> Status:
        if isinstance(transfer, MemcpyTransfer):
            return super().poll(transfer)
        if self.may_connect:
            transfer.status = Status.DONE
        return transfer.status


def test_ranks_that_only_later_requests_read_are_connected_without_waiting(decode: DecodeRank) -> None:
    """Eight ranks hold four heads twice: a request waits until those that it reads are connected."""
    transport = SlowToConnect()
    transport.register([*decode.rank.regions, decode.scratch.region])
    decode.transports.transports["memcpy"] = transport
    prefill = PrefillEngine("memcpy", filled_ranks(8))
    try:
        engine, known = decode.engine(prefill.hold()), set()
        transport.may_connect = False
        holds = [msgspec.structs.replace(prefill.hold(), handle=Handle(f"r{n}", GENERATION)) for n in range(16)]
        waiting = [hold for hold in holds if engine.reads(hold, HELD, ONE_BLOCK) is None]
        assert 0 < len(waiting) < len(holds)
        assert all(engine.reads(hold, HELD, ONE_BLOCK) is None for hold in waiting)
        transport.may_connect = True
        for hold in waiting:
            reads = engine.reads(hold, HELD, ONE_BLOCK)
            assert reads is not None
            known.add(tuple(int(read.descriptors[0, 0]) for read in reads))
        assert len(known) == 1
    finally:
        prefill.close()


def test_a_listener_that_never_answers_is_unreachable_in_time(prefill: PrefillEngine) -> None:
    decode = DecodeRank("memcpy", Rank(0, 1), timeout_seconds=1.0)
    prefill.may_answer.clear()
    started_at = time.monotonic()
    try:
        assert decode.engines.get(prefill.hold()) is None
        assert time.monotonic() - started_at < 0.9, "the thread of the loads waits for no handshake"
        error = decode.refusal(prefill.hold())
        assert error.reason is Reason.PEER_UNREACHABLE
        assert 0.99 < time.monotonic() - started_at < 10
    finally:
        decode.transports.close()


def test_a_failed_handshake_fails_every_request_that_waits_for_it(
    prefill: PrefillEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty loads for a dead engine must not each wait for a handshake of their own, one after the other."""
    monkeypatch.setattr(background, "FAILURE_SECONDS", 60.0)
    decode = DecodeRank("memcpy", Rank(0, 1), timeout_seconds=0.2)
    prefill.may_answer.clear()
    try:
        errors = {str(decode.refusal(prefill.hold())) for _ in range(30)}
        assert len(errors) == 1
        assert prefill.num_handshakes == 1
    finally:
        decode.transports.close()


def test_a_failed_handshake_is_tried_again_by_a_later_request(
    decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "FAILURE_SECONDS", 0.1)
    decode.engines._timeout_seconds = 0.1
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    hold = RemoteHold("p", EPOCH, HOST, port, Handle("a", GENERATION))
    assert decode.refusal(hold).reason is Reason.PEER_UNREACHABLE
    decode.engines._timeout_seconds = 20.0
    prefill = PrefillEngine("memcpy", filled_ranks(), port)
    try:
        time.sleep(0.15)
        assert decode.load(hold, [5], [1]).error is None
    finally:
        prefill.close()


def test_a_failure_without_a_waiting_request_does_not_affect_a_later_request(
    prefill: PrefillEngine, decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request was aborted before the handshake failed; an hour later the engine is well."""
    monkeypatch.setattr(background, "FAILURE_SECONDS", 0.1)
    prefill.answer = lambda question: Noted(EPOCH)
    prefill.may_answer.clear()
    assert decode.engines.get(prefill.hold()) is None
    prefill.may_answer.set()
    handshake = decode.engines._handshakes._known[(*prefill.hold().engine, FIRST_WEIGHTS)]
    handshake._thread.join(20)
    prefill.answer = lambda question: prefill.directory()
    time.sleep(0.15)
    assert decode.load(prefill.hold(), [5], [1]).error is None


def test_forgotten_failures_do_not_gather(decode: DecodeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "FAILURE_SECONDS", 0.0)
    for number in range(20):
        hold = RemoteHold("p", EPOCH, "no such host", 5600 + number, Handle("a", GENERATION))
        with suppress(KVFerryError):
            decode.engines.get(hold)
        decode.engines._handshakes._known[(*hold.engine, FIRST_WEIGHTS)]._thread.join(20)
        time.sleep(0.001)
    assert len(decode.engines._handshakes) == 1


def test_an_abandoned_handshake_is_dropped(
    prefill: PrefillEngine, decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request was aborted; the published facts of the engine can be long."""
    other = PrefillEngine("memcpy", filled_ranks())
    for engine in (prefill, other):
        engine.may_answer.clear()
    try:
        assert decode.engines.get(prefill.hold()) is None
        prefill.may_answer.set()
        decode.engines._handshakes._known[(*prefill.hold().engine, FIRST_WEIGHTS)]._thread.join(20)
        monkeypatch.setattr(background, "UNCLAIMED_SECONDS", 0.0)
        time.sleep(0.001)
        assert decode.engines.get(other.hold()) is None
        assert list(decode.engines._handshakes._known) == [(*other.hold().engine, FIRST_WEIGHTS)]
    finally:
        other.close()


def test_only_so_many_handshakes_run_and_the_next_ones_wait(
    prefill: PrefillEngine, decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MAX_RUNNING", 1)
    other = PrefillEngine("memcpy", filled_ranks())
    prefill.may_answer.clear()
    try:
        assert decode.engines.get(prefill.hold()) is None
        for _ in range(20):
            assert decode.engines.get(other.hold()) is None
        assert other.num_handshakes == 0
        prefill.may_answer.set()
        assert decode.load(other.hold(), [5], [1]).error is None
        assert decode.load(prefill.hold(), [5], [1]).error is None
    finally:
        other.close()


def test_a_restarted_engine_replaces_its_earlier_epoch(prefill: PrefillEngine, decode: DecodeRank) -> None:
    former = decode.engine(prefill.hold())
    prefill.epoch += 1
    prefill.begin_hold()
    assert decode.load(prefill.hold(), [5], [1]).error is None
    assert list(decode.engines._engines) == [prefill.hold().engine]
    assert decode.engines.get(prefill.hold()) is not former
    assert decode.refusal(prefill.hold(epoch=EPOCH)).reason is Reason.PEER_CHANGED


def test_the_number_of_engines_is_bounded(decode: DecodeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENGINES", 2)
    prefills = [PrefillEngine("memcpy", filled_ranks()) for _ in range(4)]
    try:
        for prefill in prefills[:2]:
            decode.engine(prefill.hold())
        decode.engine(prefills[0].hold())
        for prefill in prefills[2:]:
            decode.engine(prefill.hold())
            decode.engine(prefills[0].hold())
        assert set(decode.engines._engines) == {prefill.hold().engine for prefill in (prefills[0], prefills[3])}
        assert [prefill.num_handshakes for prefill in prefills] == [1] * 4
    finally:
        for prefill in prefills:
            prefill.close()


def test_what_engines_make_a_rank_keep_is_bounded_in_bytes(decode: DecodeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory may have 16 MB: where strangers are heard, 1,024 of them would fill the memory."""
    monkeypatch.setattr(module, "MAX_DIRECTORY_BYTES", 3_000_000)
    prefills = [PrefillEngine("memcpy", filled_ranks()) for _ in range(5)]
    try:
        for prefill in prefills:
            directory = prefill.directory()
            first, second = directory.ranks
            first = msgspec.structs.replace(first, end_points={**first.end_points, "none": bytes(1_400_000)})
            large = msgspec.structs.replace(directory, ranks=(first, second))
            prefill.answer = lambda _, large=large: large
            decode.engine(prefill.hold())
        assert list(decode.engines._engines) == [prefill.hold().engine for prefill in prefills[3:]]
        monkeypatch.setattr(module, "MAX_DIRECTORY_BYTES", 1)
        decode.engine(prefills[0].hold())
        assert list(decode.engines._engines) == [prefills[0].hold().engine], "one may have as many as a message"
        assert decode.load(prefills[0].hold(), [5], [1]).error is None
    finally:
        for prefill in prefills:
            prefill.close()


def with_large_directory(prefill: PrefillEngine) -> PrefillEngine:
    """Give the engine a directory of 1.4 MB."""
    directory = prefill.directory()
    first, second = directory.ranks
    first = msgspec.structs.replace(first, end_points={**first.end_points, "none": bytes(1_400_000)})
    large = msgspec.structs.replace(directory, ranks=(first, second))
    prefill.answer = lambda _: large
    return prefill


def handshake_ended(decode: DecodeRank, prefill: PrefillEngine) -> background.BackgroundCall[Directory]:
    """Begin a handshake and wait for its end, as a request that was aborted would have it end."""
    prefill.may_answer.clear()
    assert decode.engines.get(prefill.hold()) is None
    prefill.may_answer.set()
    handshake = decode.engines._handshakes._known[(*prefill.hold().engine, FIRST_WEIGHTS)]
    handshake._thread.join(20)
    return handshake


@pytest.mark.parametrize("end", ["connecting", "unclaimed"])
def test_directories_of_engines_that_do_not_connect_or_whose_requests_were_aborted_are_bounded_in_bytes(
    decode: DecodeRank, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Sixty of strangers held 900 MB. The largest goes first, so that an engine with an honest directory is loaded."""
    monkeypatch.setattr(module, "MAX_DIRECTORY_BYTES", 3_000_000)
    transport = SlowToConnect()
    transport.register([*decode.rank.regions, decode.scratch.region])
    transport.may_connect = False
    decode.transports.transports["memcpy"] = transport
    honest = PrefillEngine("memcpy", filled_ranks())
    large = [with_large_directory(PrefillEngine("memcpy", filled_ranks())) for _ in range(4)]
    try:
        handshakes = [handshake_ended(decode, honest)]
        assert decode.engines.get(honest.hold()) is None
        for prefill in large:
            handshakes.append(handshake_ended(decode, prefill))
            if end == "connecting":
                with suppress(KVFerryError):
                    assert decode.engines.get(prefill.hold()) is None
        assert decode.engines.get(honest.hold()) is None
        kept = [handshake for handshake in handshakes if handshake._result is not None]
        assert len(kept) == 3
        assert kept[0] is handshakes[0]
        assert len(decode.engines._connecting) == (3 if end == "connecting" else 1)
        refused = [error for prefill in large if (error := error_of_get(decode, prefill)) is not None]
        assert [error.reason for error in refused] == [Reason.INVALID_REQUEST] * 2
        transport.may_connect = True
        assert decode.load(honest.hold(), [5], [1]).error is None
    finally:
        for prefill in (honest, *large):
            prefill.close()


def error_of_get(decode: DecodeRank, prefill: PrefillEngine) -> KVFerryError | None:
    try:
        decode.engines.get(prefill.hold())
    except KVFerryError as error:
        return error
    return None


def test_nothing_is_kept_of_the_directory_of_an_engine_that_was_refused(
    prefill: PrefillEngine, decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure answers for its key until another engine is asked for, which may be never."""
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(module, "tell_refusal", lambda *about, is_trusted: told.append(about))
    right = prefill.directory().ranks
    unreachable = msgspec.structs.replace(right[1], end_points={"carrier pigeon": b""})
    prefill.answer = lambda question: prefill.directory(ranks=(right[0], unreachable))
    assert decode.refusal(prefill.hold()).reason is Reason.TRANSPORT_UNAVAILABLE
    [handshake] = decode.engines._handshakes._known.values()
    assert handshake._result is None
    wait_until(lambda: bool(told))
    assert not any(isinstance(each, Directory) for each in told[0])


def test_running_loads_from_an_engine_that_is_forgotten_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load was under way when so many others came that its engine was forgotten."""
    monkeypatch.setattr(module, "MAX_ENGINES", 1)
    decode = DecodeRank("cma", Rank(0, 1))
    prefills = [PrefillEngine("cma", filled_ranks()) for _ in range(2)]
    try:
        reads = decode.engine(prefills[0].hold()).reads(prefills[0].hold(), HELD, ONE_BLOCK)
        decode.engine(prefills[1].hold())
        assert list(decode.engines._engines) == [prefills[1].hold().engine]
        load = Read("a", lambda: reads, deadline=time.monotonic() + 30)
        while load.phase is not Phase.DONE:
            load.advance(decode.scratch, time.monotonic())
        assert load.error is None
        rows = np.concatenate([rank.cache for rank in prefills[0].ranks], axis=1)
        np.testing.assert_array_equal(decode.rank.cache[1], rows[2])
    finally:
        for prefill in prefills:
            prefill.close()
        decode.transports.close()


def test_a_suspected_engine_is_handshaken_anew(prefill: PrefillEngine, decode: DecodeRank) -> None:
    former = decode.engine(prefill.hold())
    decode.engines.suspect(prefill.hold())
    assert decode.engine(prefill.hold()) is not former
    assert prefill.num_handshakes == 2


def test_a_handshake_that_runs_during_a_reset_does_not_count_for_the_new_weights(
    prefill: PrefillEngine, decode: DecodeRank
) -> None:
    """It has compared the prefill engine's weights with those of before."""
    prefill.may_answer.clear()
    assert decode.engines.get(prefill.hold()) is None
    decode.engines.forget_all("step-12")
    prefill.may_answer.set()
    refused = decode.refusal(prefill.hold())
    assert refused.reason is Reason.MODEL_MISMATCH
    assert "prefill has 'default', decode has 'step-12'" in str(refused)
