"""A decode rank's source engines: real handshakes, real plans, and every refusal."""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from kvferry.errors import KVFerryError, Reason
from kvferry.execution import destination as module
from kvferry.handoff.messages import FIRST_WEIGHTS, PROTOCOL_VERSION, Directory, Handle, Noted
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.source import END
from kvferry.handoff.wire import client
from kvferry.handoff.wire.client import BackgroundCall
from kvferry.layout.shard import encode_shard
from kvferry.plan.match import GroupBlocks
from kvferry.plan.planner import PairPlan

from ..waits import wait_until
from .engines_in_process import (
    EPOCH,
    GENERATION,
    HEADS,
    HOST,
    IDENTITY,
    DecodeRank,
    PrefillEngine,
    Rank,
    filled_ranks,
    whole_blocks,
)
from .engines_that_write import Pairs, check_arrived, engines

__all__ = ["engines"]

ONE_BLOCK = [whole_blocks("full", [0], [1])]


@pytest.fixture
def prefill() -> Iterator[PrefillEngine]:
    engine = PrefillEngine(filled_ranks())
    yield engine
    engine.close()


@pytest.fixture
def decode() -> DecodeRank:
    return DecodeRank(Rank(0, 1))


def test_an_engine_is_handshaken_once(prefill: PrefillEngine, decode: DecodeRank) -> None:
    engine = decode.engine(prefill.hold())
    assert decode.engine(prefill.hold()) is engine
    assert prefill.num_handshakes == 1


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
    monkeypatch.setattr(client, "FAILURE_SECONDS", 60.0)
    prefill.answer = lambda question: prefill.directory(ranks=prefill.directory().ranks[:1])
    first, second = decode.refusal(prefill.hold()), decode.refusal(prefill.hold())
    assert first.reason is Reason.MISSING_SOURCE
    assert (str(second), prefill.num_handshakes) == (str(first), 1)
    monkeypatch.setattr(client, "FAILURE_SECONDS", 0.1)
    prefill.answer = lambda question: prefill.directory()
    time.sleep(0.15)
    assert decode.engine(prefill.hold())


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
    monkeypatch.setattr(client, "FAILURE_SECONDS", 60.0)
    num_plans = 0

    def plan_without_end(*_: object) -> None:
        nonlocal num_plans
        num_plans += 1
        raise MemoryError

    monkeypatch.setattr(module, "Planner", plan_without_end)
    first, second = decode.refusal(prefill.hold()), decode.refusal(prefill.hold())
    assert str(first) == str(second)
    assert "MemoryError" in first.message
    assert (num_plans, prefill.num_handshakes) == (1, 1)


def test_a_listener_that_never_answers_is_unreachable_in_time(prefill: PrefillEngine) -> None:
    decode = DecodeRank(Rank(0, 1), timeout_seconds=1.0)
    prefill.may_answer.clear()
    started_at = time.monotonic()
    assert decode.engines.get(prefill.hold()) is None
    assert time.monotonic() - started_at < 0.9, "the thread of the loads waits for no handshake"
    error = decode.refusal(prefill.hold())
    assert error.reason is Reason.PEER_UNREACHABLE
    assert 0.99 < time.monotonic() - started_at < 10


def test_a_failed_handshake_fails_every_request_that_waits_for_it(
    prefill: PrefillEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty loads for a dead engine must not each wait for a handshake of their own, one after the other."""
    monkeypatch.setattr(client, "FAILURE_SECONDS", 60.0)
    decode = DecodeRank(Rank(0, 1), timeout_seconds=0.2)
    prefill.may_answer.clear()
    errors = {str(decode.refusal(prefill.hold())) for _ in range(30)}
    assert len(errors) == 1
    assert prefill.num_handshakes == 1


def test_a_failed_handshake_is_tried_again_by_a_later_request(
    decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FAILURE_SECONDS", 0.1)
    decode.engines._timeout_seconds = 0.1
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    hold = RemoteHold("p", EPOCH, HOST, port, Handle("a", GENERATION))
    assert decode.refusal(hold).reason is Reason.PEER_UNREACHABLE
    decode.engines._timeout_seconds = 20.0
    prefill = PrefillEngine(filled_ranks(), port)
    try:
        time.sleep(0.15)
        assert decode.engine(hold)
    finally:
        prefill.close()


def await_end(handshake: BackgroundCall[Directory]) -> None:
    wait_until(lambda: not handshake.is_running)


def test_a_failure_without_a_waiting_request_does_not_affect_a_later_request(
    prefill: PrefillEngine, decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request was aborted before the handshake failed; an hour later the engine is well."""
    monkeypatch.setattr(client, "FAILURE_SECONDS", 0.1)
    prefill.answer = lambda question: Noted(EPOCH)
    prefill.may_answer.clear()
    assert decode.engines.get(prefill.hold()) is None
    prefill.may_answer.set()
    handshake = decode.engines._handshakes._known[(*prefill.hold().engine, FIRST_WEIGHTS)]
    await_end(handshake)
    prefill.answer = lambda question: prefill.directory()
    time.sleep(0.15)
    assert decode.engine(prefill.hold())


def test_forgotten_failures_do_not_gather(decode: DecodeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FAILURE_SECONDS", 0.0)
    for number in range(20):
        hold = RemoteHold("p", EPOCH, "no such host", 5600 + number, Handle("a", GENERATION))
        with suppress(KVFerryError):
            decode.engines.get(hold)
        handshake = decode.engines._handshakes._known[(*hold.engine, FIRST_WEIGHTS)]
        await_end(handshake)
        time.sleep(0.001)
    assert len(decode.engines._handshakes) == 1


def test_an_abandoned_handshake_is_dropped(
    prefill: PrefillEngine, decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request was aborted; the published facts of the engine can be long."""
    other = PrefillEngine(filled_ranks())
    for engine in (prefill, other):
        engine.may_answer.clear()
    try:
        assert decode.engines.get(prefill.hold()) is None
        prefill.may_answer.set()
        handshake = decode.engines._handshakes._known[(*prefill.hold().engine, FIRST_WEIGHTS)]
        await_end(handshake)
        monkeypatch.setattr(client, "UNCLAIMED_SECONDS", 0.0)
        time.sleep(0.001)
        assert decode.engines.get(other.hold()) is None
        assert list(decode.engines._handshakes._known) == [(*other.hold().engine, FIRST_WEIGHTS)]
    finally:
        other.close()


def test_only_so_many_handshakes_run_and_the_next_ones_wait(
    prefill: PrefillEngine, decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_RUNNING", 1)
    other = PrefillEngine(filled_ranks())
    prefill.may_answer.clear()
    try:
        assert decode.engines.get(prefill.hold()) is None
        for _ in range(20):
            assert decode.engines.get(other.hold()) is None
        assert other.num_handshakes == 0
        prefill.may_answer.set()
        assert decode.engine(other.hold())
        assert decode.engine(prefill.hold())
    finally:
        other.close()


def test_a_restarted_engine_replaces_its_earlier_epoch(prefill: PrefillEngine, decode: DecodeRank) -> None:
    former = decode.engine(prefill.hold())
    prefill.epoch += 1
    assert decode.engine(prefill.hold())
    assert list(decode.engines._engines) == [prefill.hold().engine]
    assert decode.engines.get(prefill.hold()) is not former
    assert decode.refusal(prefill.hold(epoch=EPOCH)).reason is Reason.PEER_CHANGED


def test_the_number_of_engines_is_bounded(decode: DecodeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENGINES", 2)
    prefills = [PrefillEngine(filled_ranks()) for _ in range(4)]
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
    prefills = [PrefillEngine(filled_ranks()) for _ in range(5)]
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
        assert decode.engine(prefills[0].hold())
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


def handshake_ended(decode: DecodeRank, prefill: PrefillEngine) -> BackgroundCall[Directory]:
    """Begin a handshake and wait for its end, as a request that was aborted would have it end."""
    prefill.may_answer.clear()
    assert decode.engines.get(prefill.hold()) is None
    prefill.may_answer.set()
    handshake = decode.engines._handshakes._known[(*prefill.hold().engine, FIRST_WEIGHTS)]
    assert decode.engines._has_ended.wait(20)
    return handshake


def test_directories_of_engines_whose_requests_were_aborted_are_bounded_in_bytes(
    decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty of strangers held 900 MB. The largest goes first, so that an engine with an honest directory is kept."""
    monkeypatch.setattr(module, "MAX_DIRECTORY_BYTES", 3_000_000)
    honest = PrefillEngine(filled_ranks())
    large = [with_large_directory(PrefillEngine(filled_ranks())) for _ in range(4)]
    last = PrefillEngine(filled_ranks())
    try:
        handshakes = [handshake_ended(decode, prefill) for prefill in (honest, *large)]
        decode.engine(last.hold())
        kept = [handshake for handshake in handshakes if handshake._result is not None]
        assert len(kept) == 3
        assert kept[0] is handshakes[0]
        refused = [error for prefill in large if (error := error_of_get(decode, prefill)) is not None]
        assert [error.reason for error in refused] == [Reason.INVALID_REQUEST] * 2
        assert decode.engine(honest.hold())
        assert honest.num_handshakes == 1
    finally:
        for prefill in (honest, *large, last):
            prefill.close()


def error_of_get(decode: DecodeRank, prefill: PrefillEngine) -> KVFerryError | None:
    try:
        decode.engines.get(prefill.hold())
    except KVFerryError as error:
        return error
    return None


def test_ranks_that_only_later_requests_need_are_proved_too(
    decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ranks hold four heads twice; what the handshake's sample moves is right, the others' list is not."""
    lower, proved, refused = PairPlan.lower, [], []

    def lower_wrongly(plan: PairPlan, blocks: Sequence[GroupBlocks]) -> np.ndarray:
        rows = lower(plan, blocks)
        if plan.assignment.source_index % 2:
            rows[[0, 1], 0] = rows[[1, 0], 0]
        return rows

    monkeypatch.setattr(PairPlan, "lower", lower_wrongly)
    prefill = PrefillEngine(filled_ranks(8))
    try:
        engine = decode.engine(prefill.hold())
        for number in range(16):
            try:
                proved.append(engine.sources(f"r{number}", ONE_BLOCK))
            except KVFerryError as error:
                refused.append(error.reason)
        assert set(refused) == {Reason.WRONG_SOURCE}
        assert proved
        assert all(len({source.answers_at for source in sources}) == HEADS for sources in proved)
    finally:
        prefill.close()


def test_requests_spread_over_replicas(decode: DecodeRank) -> None:
    """Eight ranks hold four heads twice: which of the two writes depends on the request."""
    prefill = PrefillEngine(filled_ranks(8))
    try:
        engine = decode.engine(prefill.hold())
        chosen = set()
        for number in range(16):
            sources = engine.sources(f"r{number}", ONE_BLOCK)
            assert len(sources) == HEADS
            chosen.add(tuple(source.index for source in sources))
        assert len(chosen) > 1
    finally:
        prefill.close()


def test_nothing_is_kept_of_the_directory_of_an_engine_that_was_refused(
    prefill: PrefillEngine, decode: DecodeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure answers for its key until another engine is asked for, which may be never."""
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(module, "tell_refusal", lambda *about, is_trusted: told.append(about))
    prefill.answer = lambda question: prefill.directory(ranks=prefill.directory().ranks[:1])
    assert decode.refusal(prefill.hold()).reason is Reason.MISSING_SOURCE
    [handshake] = decode.engines._handshakes._known.values()
    assert handshake._result is None
    wait_until(lambda: bool(told))
    assert not any(isinstance(each, Directory) for each in told[0])


def test_running_loads_from_an_engine_that_is_forgotten_finish(engines: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load was under way when so many others came that its engine was forgotten."""
    monkeypatch.setattr(module, "MAX_ENGINES", 1)
    sender, [receiver] = engines.open()
    other = PrefillEngine(filled_ranks())
    try:
        receiver.receive(sender.hold(), [0, 3])
        wait_until(lambda: sender.ranks[0].writer._writes.num_open)
        wait_until(lambda: receiver.engines.get(other.hold()))
        assert list(receiver.engines._engines) == [other.hold().engine]
        sender.compute(END, [5, 1])
        assert receiver.result().error is None
        check_arrived(sender, [receiver], [5, 1], [0, 3])
    finally:
        other.close()


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
