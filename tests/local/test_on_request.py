"""Held prompts that are written on request: bytes, ends of holds, faults, the choice between reading and writing."""

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NoReturn

import msgspec
import numpy as np
import pytest

from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError, helps_to_repeat
from kvferry.execution import introductions, on_request, source_engines, write
from kvferry.execution.device import CudaOrder
from kvferry.execution.guard_words import Held, StepWords
from kvferry.execution.job import JobResult
from kvferry.handoff.guard_word import HeldPrompt
from kvferry.handoff.messages import PROTOCOL_VERSION, Announce, Answer, Introduce, Met, Question, Revoke
from kvferry.layout.named_layouts import NamedLayout
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.request import GroupBlocks
from kvferry.transport.faults import FaultPlan

from ..waits import wait_until
from .engines_in_process import BLOCK_SIZE, SLOT, Rank, filled_ranks, whole_blocks
from .engines_on_request import Engines, HoldingEngine, HoldingRank, LoadingRank, engines, prompt_in
from .engines_that_write import recorded_questions
from .fake_cuda import FakeCuda
from .test_pipeline_reads import HALVES, THIRDS, WHOLE, Stages, filled, ranks_of
from .test_push_proofs import Breaking, elsewhere, running_process

__all__ = ["engines"]

SOURCE, TARGET = [5, 1, 4], [0, 3, 2]
IN_STAGES = [whole_blocks("0", [5, 2], [1, 2]), whole_blocks("1", [3], [4]), whole_blocks("2", [4, 1], [0, 3])]
"""Blocks of three groups. Block 0 is the null block of an engine, which no prompt has."""
SLOW = "it has no operation that reads"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls must not look like a source that cannot reach this rank."""
    monkeypatch.setattr(introductions, "MEET_SECONDS", 15.0)


def held_by(engine: HoldingEngine) -> Held:
    """Let the engine hold the prompt in :data:`SOURCE`."""
    held = engine.held(prompt_in(SOURCE))
    engine.step([held])
    return held


def load(
    rank: LoadingRank, engine: HoldingEngine, held: Held, seconds: float = 20.0, late_seconds: float = 0.0
) -> None:
    rank.load(engine.hold(), held, [whole_blocks("full", SOURCE, TARGET)], "r", seconds, late_seconds)


def check_arrived(engine: HoldingEngine, ranks: Sequence[LoadingRank]) -> None:
    """Ranks' rows of a block join to the model's row, since heads lie one after the other; nothing else is touched."""
    sent = np.concatenate([rank.rank.cache[SOURCE] for rank in engine.ranks], axis=1)
    arrived = np.concatenate([rank.rank.cache[TARGET] for rank in ranks], axis=1)
    assert np.array_equal(arrived, sent)
    assert not np.concatenate([rank.rank.cache[[1, 4, 5]] for rank in ranks], axis=1).any()


def reason_of(result: JobResult) -> Reason:
    assert result.error is not None
    return result.error.reason


@pytest.mark.parametrize("integrity", [Integrity.OFF, Integrity.SAMPLE, Integrity.FULL])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_a_held_prompt_is_written(source_tp: int, target_tp: int, integrity: Integrity, engines: Engines) -> None:
    targets = [Rank(rank, target_tp) for rank in range(target_tp)]
    engine, ranks = engines.open(filled_ranks(source_tp), targets, integrity=integrity)
    held = held_by(engine)
    for rank in ranks:
        load(rank, engine, held)
    for rank in ranks:
        result = rank.result()
        assert (result.error, result.way, result.transport) == (None, "written", "cma")
        assert result.num_bytes == rank.rank.cache[:3].nbytes
        assert (result.num_compared_bytes > 0) == (integrity is not Integrity.OFF)
    check_arrived(engine, ranks)


def test_another_layout_and_a_prefix_that_is_there(engines: Engines) -> None:
    """Of the last block only the prompt's tokens move, and of the first block none."""
    engine, [rank] = engines.open([Rank(0, 1, layout=NamedLayout.BLHNC).fill()], [Rank(0, 1)])
    num_tokens = 3 * BLOCK_SIZE - 1
    held = engine.held(HeldPrompt("prompt", num_tokens, [BLOCK_SIZE], [np.array(SOURCE)]))
    engine.step([held])
    blocks = GroupBlocks(
        group="full",
        first_token=BLOCK_SIZE,
        last_token=num_tokens,
        source_block_ids=SOURCE[1:],
        source_first_token=BLOCK_SIZE,
        destination_block_ids=TARGET[1:],
        destination_first_token=BLOCK_SIZE,
    )
    rank.load(engine.hold(), held, [blocks])
    assert rank.result().error is None
    read = LoadingRank(Rank(0, 1), is_forced=False)
    engines.opened.append(read)
    read.load(engine.hold(), held, [blocks])
    assert read.result().way == "read"
    assert np.array_equal(rank.rank.cache, read.rank.cache)
    assert rank.rank.cache[TARGET[1:]].any()
    assert not rank.rank.cache[TARGET[0]].any()


@pytest.mark.parametrize(
    ("sources", "targets", "tp_size"), [(HALVES, WHOLE, 1), (WHOLE, HALVES, 1), (HALVES, THIRDS, 1), (HALVES, WHOLE, 2)]
)
def test_stages_of_a_pipeline_write_their_layers(
    sources: Stages, targets: Stages, tp_size: int, engines: Engines
) -> None:
    names = [blocks.group for blocks in IN_STAGES]
    engine, ranks = engines.open(
        filled(ranks_of(sources, tp_size)), ranks_of(targets, 1), transport="memcpy", source_group_names=names
    )
    ids = [np.array(blocks.source_ids) for blocks in IN_STAGES]
    held = engine.held(HeldPrompt("prompt", max(map(len, ids)) * BLOCK_SIZE, [BLOCK_SIZE] * len(ids), ids))
    engine.step([held])
    moved = {blocks.group: dict(zip(blocks.source_ids, blocks.destination_ids, strict=True)) for blocks in IN_STAGES}
    for rank in ranks:
        rank.load(engine.hold(), held, IN_STAGES)
        result = rank.result()
        assert (result.error, result.way) == (None, "written")
        for group, labels in rank.rank.labelled(moved).items():
            np.testing.assert_array_equal(rank.rank.cache[group], labels, f"{rank.rank.shard.rank_name}, group {group}")


# Ends of holds.


def test_a_released_hold_is_not_written(engines: Engines) -> None:
    engine, [rank] = engines.open(filled_ranks(2), [Rank(0, 1)])
    held = held_by(engine)
    engine.step(ended=[SLOT])
    load(rank, engine, held)
    assert reason_of(rank.result()) is Reason.SOURCE_CHANGED
    assert not rank.rank.cache.any()


@pytest.mark.parametrize("is_forced", [True, False])
def test_hole_13_a_source_tells_parameters_of_no_hold_from_a_hold_that_has_ended(
    is_forced: bool, engines: Engines
) -> None:
    """Once both were "source-changed", to be sent again, with the advice to raise ``lease_seconds``."""
    engine, rank = choosing(engines, target_is_forced=is_forced)
    held = held_by(engine)
    forged = engine.held(prompt_in(SOURCE[::-1]))
    told = []
    for each in (forged, held, forged):
        load(rank, engine, each)
        if each is held:
            assert rank.result().error is None
            rank.rank.cache[:] = 0
            engine.step(ended=[SLOT])
            load(rank, engine, held)
        result = rank.result()
        assert result.error is not None
        assert result.way != "read", "a read would fail too"
        told.append((result.error.reason, "lease_seconds" in result.error.remedy, "router" in result.error.remedy))
    wrong, ended = (Reason.WRONG_PARAMETERS, False, True), (Reason.SOURCE_CHANGED, True, False)
    assert told == [wrong, ended, wrong]
    assert not helps_to_repeat(Reason.WRONG_PARAMETERS)
    assert not rank.rank.cache.any()


@pytest.mark.parametrize("ends", ["release", "reset", "shutdown"])
def test_a_hold_that_ends_in_the_middle_ends_the_write(ends: str, engines: Engines) -> None:
    """The batch in flight does not count, whatever it has written."""
    engine, [rank] = engines.open(filled_ranks(2), [Rank(0, 1)], source_faults={0: FaultPlan(delay_seconds=2.0)})
    held = held_by(engine)
    load(rank, engine, held)
    wait_until(lambda: engine.ranks[0].writer._sender.num_open)
    assert rank.is_waiting(0.1)
    match ends:
        case "release":
            engine.step(ended=[SLOT])
        case "reset":
            for each in engine.ranks:
                each.step_words.clear_all()
        case _:
            for each in engine.ranks:
                each.step_words.close()
    assert reason_of(rank.result()) is Reason.SOURCE_CHANGED


def test_the_slot_of_an_ended_hold_writes_its_next_prompt_only(engines: Engines) -> None:
    engine, [rank] = engines.open(filled_ranks(1), [Rank(0, 1)])
    former = held_by(engine)
    latter = engine.held(prompt_in([2, 3, 4], "another"), request_id="b")
    engine.step([latter], ended=[SLOT])
    load(rank, engine, former)
    assert reason_of(rank.result()) is Reason.SOURCE_CHANGED
    rank.load(engine.hold("b"), latter, [whole_blocks("full", [2, 3, 4], TARGET)])
    assert rank.result().error is None
    assert np.array_equal(rank.rank.cache[TARGET], engine.ranks[0].rank.cache[[2, 3, 4]])


def test_a_hold_that_comes_again_in_the_same_blocks_is_written(engines: Engines) -> None:
    """A preempted prompt may get its blocks again, and with them the same word."""
    engine, [rank] = engines.open(filled_ranks(1), [Rank(0, 1)])
    held = held_by(engine)
    engine.step(ended=[SLOT])
    engine.step([held])
    load(rank, engine, held)
    assert rank.result().error is None
    check_arrived(engine, [rank])


def test_a_word_that_comes_late_is_awaited(engines: Engines) -> None:
    engine, [rank] = engines.open(filled_ranks(2), [Rank(0, 1)])
    held = engine.held(prompt_in(SOURCE))
    load(rank, engine, held, late_seconds=5.0)
    assert rank.is_waiting(0.3)
    engine.step(late=[held])
    assert rank.result().error is None
    check_arrived(engine, [rank])


def test_a_word_that_never_comes_is_awaited_for_a_bounded_time(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever time the destination asks for."""
    monkeypatch.setattr("kvferry.execution.source.LATE_WORD_SECONDS", 0.4)
    engine, [rank] = engines.open(filled_ranks(2), [Rank(0, 1)])
    held = engine.held(prompt_in(SOURCE))
    load(rank, engine, held, late_seconds=1e5)
    assert rank.is_waiting(0.2)
    assert reason_of(rank.result()) is Reason.SOURCE_CHANGED


def test_a_word_that_the_device_has_not_done_is_awaited(engines: Engines) -> None:
    """As a read would: the decode engine may know the hold before the digests are kept."""
    engine, [rank] = engines.open(filled_ranks(1), [Rank(0, 1)])
    cuda = FakeCuda.of_this_thread("cpu")
    order, [source] = CudaOrder("cpu", cuda), engine.ranks
    later = StepWords(source.words, order)
    later.prompts, source.step_words = source.step_words.prompts, later
    held = held_by(engine)
    load(rank, engine, held)
    assert rank.is_waiting(0.3)
    assert not rank.rank.cache.any()
    cuda.current_stream("cpu").run()
    assert rank.result().error is None
    check_arrived(engine, [rank])


def test_a_hold_that_ends_before_the_device_has_done_it_ends_its_write(engines: Engines) -> None:
    engine, [rank] = engines.open(filled_ranks(1), [Rank(0, 1)])
    cuda = FakeCuda.of_this_thread("cpu")
    [source] = engine.ranks
    later = StepWords(source.words, CudaOrder("cpu", cuda))
    later.prompts, source.step_words = source.step_words.prompts, later
    load(rank, engine, held_by(engine))
    assert rank.is_waiting(0.2)
    engine.step(ended=[SLOT])
    assert reason_of(rank.result()) is Reason.SOURCE_CHANGED
    cuda.current_stream("cpu").run()
    assert not source.writer._sender._prompts
    assert not rank.rank.cache.any()


# Faults.


def test_a_destination_that_gives_up_in_the_middle_has_its_blocks_back_when_all_is_quiet(engines: Engines) -> None:
    engine, [rank] = engines.open(filled_ranks(2), [Rank(0, 1)], source_faults={1: FaultPlan(delay_seconds=2.0)})
    load(rank, engine, held_by(engine))
    wait_until(lambda: engine.ranks[1].writer._sender.num_open)
    rank.executor.cancel("r", HandoffError(Reason.ABORTED, "the client went away."))
    assert reason_of(rank.result()) is Reason.ABORTED
    assert not any(each.writer._sender.num_open for each in engine.ranks)
    rank.rank.cache[:] = 7
    time.sleep(0.6)
    assert (rank.rank.cache == 7).all()


def test_a_write_that_hangs_keeps_the_blocks_until_it_is_quiet(engines: Engines) -> None:
    engine, [rank] = engines.open(filled_ranks(1), [Rank(0, 1)], source_faults={0: FaultPlan(hang=True)})
    load(rank, engine, held_by(engine), seconds=0.3)
    result = rank.result()
    assert reason_of(result) is Reason.DEADLINE_EXCEEDED
    assert not engine.ranks[0].writer._sender.num_open


def test_a_write_that_is_lost_is_found_by_its_digests(engines: Engines) -> None:
    engine, [rank] = engines.open(
        filled_ranks(1), [Rank(0, 1)], source_faults={0: FaultPlan(drop=0)}, integrity=Integrity.FULL
    )
    load(rank, engine, held_by(engine))
    assert reason_of(rank.result()) is Reason.INTEGRITY_MISMATCH


def test_a_source_that_dies_in_the_middle_fails_the_load_and_no_other_source_writes_on(engines: Engines) -> None:
    with running_process() as (process, child):
        engine, [rank] = engines.open(
            filled_ranks(2), [Rank(0, 1)], source_faults={0: FaultPlan(hang=True)}, source_process=process
        )
        load(rank, engine, held_by(engine))
        wait_until(lambda: engine.ranks[0].writer._sender.num_open)
        engine.ranks[0].listener.close()
        child.kill()
        child.wait()
        assert reason_of(rank.result()) in (Reason.PEER_DIED, Reason.PEER_UNREACHABLE)
    assert not engine.ranks[1].writer._sender.num_open


def test_after_a_fence_the_rank_is_introduced_anew_and_says_its_new_end_points(engines: Engines) -> None:
    engine, [rank] = engines.open(
        filled_ranks(1),
        [Rank(0, 1)],
        transport="nixl",
        source_faults={0: FaultPlan(hang=True)},
        source_process=elsewhere(),
        target_fence_seconds=0.3,
    )
    [source] = engine.ranks
    load(rank, engine, held_by(engine))
    wait_until(lambda: source.writer._sender.num_open)
    answerer, source.answerer = source.answerer, silent()
    rank.executor.cancel("r", HandoffError(Reason.ABORTED, "the client went away."))
    assert reason_of(rank.result(15.0)) is Reason.ABORTED
    source.answerer = answerer
    assert [set(end_points) for end_points in rank.fences] == [{"nixl"}]
    assert rank.fences[0]["nixl"] != rank.end_points["nixl"]
    source.transports.transports["nixl"]._plan = FaultPlan()  # type: ignore[attr-defined]
    load(rank, engine, held_by(engine))
    assert rank.result().error is None
    check_arrived(engine, [rank])


def silent() -> SimpleNamespace:
    """Answer nothing in time."""

    def answer(question: Question) -> Answer:
        time.sleep(0.2)
        raise HandoffError(Reason.DEADLINE_EXCEEDED, "no answer.")

    return SimpleNamespace(answer=answer)


# Messages.


@pytest.fixture
def announced(engines: Engines) -> tuple[HoldingEngine, LoadingRank, Announce]:
    """Return two engines between which a prompt was written, and its announcement."""
    engine, [rank] = engines.open(filled_ranks(1), [Rank(0, 1)])
    asked = recorded_questions(engine.ranks[0])
    load(rank, engine, held_by(engine))
    assert rank.result().error is None
    assert {type(question) for question in asked} == {Introduce, Announce}
    [found] = [question for question in asked if isinstance(question, Announce)]
    return engine, rank, found


def refusal(rank: HoldingRank, question: Question) -> Reason:
    with pytest.raises(KVFerryError) as refused:
        rank.writer.answer(question)
    return refused.value.reason


def test_announcements_of_another_hold_epoch_or_part_are_refused(
    announced: tuple[HoldingEngine, LoadingRank, Announce],
) -> None:
    """Another slot, generation or prompt is another word; nobody can guess one."""
    engine, rank, right = announced
    [source] = engine.ranks
    key = msgspec.structs.replace(right.key, number=right.key.number + 1)
    fresh = msgspec.structs.replace(right, key=key)
    other = engine.held(prompt_in(SOURCE), request_id="b")
    rank.rank.cache[:] = 0
    refused = {
        "word": refusal(source, msgspec.structs.replace(fresh, transfer_id=on_request.transfer_id_of(other.word))),
        "forged": refusal(source, msgspec.structs.replace(fresh, transfer_id="f" * 32)),
        "router's": refusal(source, msgspec.structs.replace(fresh, transfer_id="x")),
        "epoch": refusal(source, msgspec.structs.replace(fresh, epoch=fresh.epoch + 1)),
        "part": refusal(source, msgspec.structs.replace(fresh, digest="another")),
        "registration": refusal(source, msgspec.structs.replace(fresh, registration=5)),
    }
    assert refused == {
        "word": Reason.WRONG_PARAMETERS,
        "forged": Reason.WRONG_PARAMETERS,
        "router's": Reason.WRONG_PARAMETERS,
        "epoch": Reason.PEER_CHANGED,
        "part": Reason.PROTOCOL_MISMATCH,
        "registration": Reason.UNKNOWN_REQUEST,
    }
    time.sleep(0.1)
    assert not source.writer._sender.num_open
    assert not rank.rank.cache.any()


def test_an_announcement_of_another_prompt_fails(announced: tuple[HoldingEngine, LoadingRank, Announce]) -> None:
    engine, rank, right = announced
    key = msgspec.structs.replace(right.key, number=right.key.number + 1)
    rank.rank.cache[:] = 0
    engine.ranks[0].writer.answer(msgspec.structs.replace(right, key=key, prompt_digest="another"))
    wait_until(lambda: not engine.ranks[0].writer._sender.num_open)
    time.sleep(0.1)
    assert not rank.rank.cache.any()


def test_a_doubled_announcement_writes_once_and_one_after_its_revocation_never(
    announced: tuple[HoldingEngine, LoadingRank, Announce],
) -> None:
    engine, rank, right = announced
    [source] = engine.ranks
    rank.rank.cache[:] = 7
    source.writer.answer(right)
    engine.step(ended=[SLOT])
    source.writer.answer(right)
    held_by(engine)
    revoked = msgspec.structs.replace(right, key=msgspec.structs.replace(right.key, number=99))
    source.writer.answer(Revoke(source.epoch, revoked.key))
    assert refusal(source, revoked) is Reason.ABORTED
    time.sleep(0.1)
    assert (rank.rank.cache == 7).all()


# The choice.


def choosing(engines: Engines, is_device: bool = True, **more: object) -> tuple[HoldingEngine, LoadingRank]:
    """Return an engine that seems to be on another host, and a rank whose transport says that its reads are slow; their
    memory counts as a device's.
    """
    if is_device:
        engines.patch.setattr(source_engines, "HOST_DEVICE", "")
    given: dict[str, object] = {
        "source_process": elsewhere(),
        "target_is_forced": False,
        "target_slow_reads": SLOW,
        **more,
    }
    engine, [rank] = engines.open(filled_ranks(2), [Rank(0, 1)], **given)
    return engine, rank


@pytest.mark.parametrize(
    ("more", "way"),
    [
        ({}, "written"),
        ({"target_slow_reads": ""}, "read"),
        ({"is_device": False}, "read"),
        ({"source_only_read": True}, "read"),
    ],
    ids=["slow", "fast", "host memory", "an earlier version, or set to read"],
)
def test_auto_writes_device_memory_where_reads_are_slow(more: dict[str, object], way: str, engines: Engines) -> None:
    engine, rank = choosing(engines, **more)
    load(rank, engine, held_by(engine))
    result = rank.result()
    assert (result.error, result.way) == (None, way)
    check_arrived(engine, [rank])


def test_a_source_that_does_not_reach_this_rank_is_read_and_not_asked_again_soon(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a NAT: the introduction arrives, and nothing comes back."""
    engine, rank = choosing(engines)
    for each in engine.ranks:
        monkeypatch.setattr(each.client, "tell", lambda *_, **__: None)
    held = held_by(engine)
    for seconds in (0.3, 1000.0):  # the second load waits for nothing
        monkeypatch.setattr(introductions, "MEET_SECONDS", seconds)
        load(rank, engine, held)
        result = rank.result()
        assert (result.error, result.way) == (None, "read")
    assert "it has not connected to this rank" in caplog.text
    check_arrived(engine, [rank])


def test_a_source_that_refuses_the_introduction_is_read(engines: Engines) -> None:
    engine, rank = choosing(engines)

    def answer(question: Question) -> Answer:
        raise HandoffError(Reason.PERMISSION_DENIED, "no.")

    engine.ranks[1].answerer = SimpleNamespace(answer=answer)
    load(rank, engine, held_by(engine))
    assert rank.result().way == "read"
    check_arrived(engine, [rank])


def test_a_source_whose_transport_does_not_connect_is_read(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where messages reach this rank, and bytes do not."""
    monkeypatch.setattr(introductions, "MEET_SECONDS", 0.3)
    engine, rank = choosing(engines)
    monkeypatch.setattr(engine.ranks[1].transports, "connect", lambda _: unreachable())
    load(rank, engine, held_by(engine))
    assert rank.result().way == "read"
    assert "meeting d/0" in caplog.text
    check_arrived(engine, [rank])


def unreachable() -> SimpleNamespace:
    def poll() -> None:
        raise TransportError(Reason.PEER_UNREACHABLE, "no way there.", "Build one.")

    return SimpleNamespace(name="", poll=poll)


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_source_that_has_lost_the_way_is_read_unless_writing_is_forced(
    is_forced: bool, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    engine, rank = choosing(engines, target_is_forced=is_forced)
    held = held_by(engine)
    load(rank, engine, held)
    assert rank.result().way == "written"
    rank.rank.cache[:] = 0
    for each in engine.ranks:
        for known in each.writer.destinations.known.values():
            known.route.links[known.source_index] = unreachable()  # type: ignore[assignment]
    load(rank, engine, held)
    result = rank.result()
    if is_forced:
        assert reason_of(result) is Reason.PEER_UNREACHABLE
        return
    assert (result.error, result.way) == (None, "read")
    assert "could not be written by its source and is read: no way there." in caplog.text
    check_arrived(engine, [rank])
    caplog.clear()
    load(rank, engine, held)
    assert rank.result().way == "read"
    assert "could not be written" not in caplog.text


@pytest.mark.parametrize("is_reported", [True, False], ids=["given up", "refused"])
@pytest.mark.parametrize("reason", [Reason.PEER_DIED, Reason.TRANSFER_FAILED, Reason.PROTOCOL_MISMATCH, Reason.CLOSED])
def test_a_write_that_fails_where_a_read_need_not_is_read(
    reason: Reason, is_reported: bool, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL says of a lost connection that the peer died; the plans of two versions may differ; a fence closes."""
    engine, rank = choosing(engines)
    held = held_by(engine)

    def fail(*_: object) -> NoReturn:
        raise HandoffError(reason, "it cannot be written.")

    for each in engine.ranks:
        monkeypatch.setattr(*((write.Write, "_begin_batch") if is_reported else (each.writer, "_announce")), fail)
    load(rank, engine, held)
    result = rank.result()
    assert (result.error, result.way) == (None, "read")
    check_arrived(engine, [rank])


def test_hole_1_a_held_prompt_whose_write_failed_is_read_behind_a_fence_only(engines: Engines) -> None:
    """What lies in the connection would land in blocks that the read has filled, or in those of the next request."""
    engine, rank = choosing(engines, transport="nixl", source_faults={0: FaultPlan(fail_after=1)})
    breaking = Breaking(engine.ranks[0], engines.patch)
    load(rank, engine, held_by(engine))
    result = rank.result(30.0)
    assert (result.error, result.way, len(rank.fences)) == (None, "read", 1)
    check_arrived(engine, [rank])
    rank.rank.cache[:] = 7
    breaking.deliver()
    assert (rank.rank.cache == 7).all()


@pytest.mark.parametrize("reason", [Reason.SOURCE_CHANGED, Reason.INTEGRITY_MISMATCH])
def test_a_write_that_fails_as_a_read_would_is_the_end(
    reason: Reason, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rank = choosing(engines)

    def fail(*_: object) -> NoReturn:
        raise HandoffError(reason, "it is not held, or the bytes are wrong.")

    monkeypatch.setattr(write.Write, "_begin_batch", fail)
    load(rank, engine, held_by(engine))
    assert reason_of(rank.result()) is reason


def test_a_rank_at_loopback_is_not_written_from_elsewhere(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody there reaches it, so nothing is waited for. The log says once why a GPU's memory is read slowly."""
    monkeypatch.setattr(introductions, "is_loopback", lambda host: host == "here")
    engine, rank = choosing(engines)
    known = rank.announcer.introductions
    known._answers_at = msgspec.structs.replace(known._answers_at, host="here")
    asked = recorded_questions(engine.ranks[0])
    held = held_by(engine)
    for _ in range(2):
        load(rank, engine, held)
        assert rank.result().way == "read"
    assert not asked
    told = [record.getMessage() for record in caplog.records if "since it cannot write here" in record.message]
    assert ['Set "host"' in each for each in told] == [True] * 2, "of each source rank"


def test_a_rank_that_was_given_up_is_not_read_instead(engines: Engines) -> None:
    engine, rank = choosing(engines, source_faults={0: FaultPlan(delay_seconds=2.0)})
    load(rank, engine, held_by(engine))
    wait_until(lambda: engine.ranks[0].writer._sender.num_open)
    rank.executor.cancel("r", HandoffError(Reason.PEER_UNREACHABLE, "given up."))
    result = rank.result()
    assert (reason_of(result), result.way) == (Reason.PEER_UNREACHABLE, "")


def test_a_source_that_forgot_this_rank_is_read_and_writes_the_next(engines: Engines) -> None:
    engine, rank = choosing(engines)
    held = held_by(engine)
    ways = []
    for number in range(3):
        load(rank, engine, held)
        ways.append(rank.result().way)
        if not number:
            for each in engine.ranks:
                each.writer.destinations.known.clear()
            # The time to meet counts from the new introduction.
            meets_by = rank.announcer.introductions._meets_by
            meets_by |= dict.fromkeys(meets_by, time.monotonic() - 1.0)
    assert ways == ["written", "read", "written"]


def test_a_source_that_did_not_reach_this_rank_writes_once_it_does(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is introduced anew, and connects anew."""
    monkeypatch.setattr(introductions, "MEET_SECONDS", 0.3)
    monkeypatch.setattr(introductions, "AVOID_SECONDS", 0.5)
    monkeypatch.setattr("kvferry.execution.destinations.TELL_SECONDS", 0.5)
    engine, rank = choosing(engines)
    [first, second] = engine.ranks
    connect, tell = first.transports.connect, second.client.tell
    monkeypatch.setattr(first.transports, "connect", lambda _: unreachable())
    monkeypatch.setattr(second.client, "tell", lambda *_, **__: None)
    held = held_by(engine)
    load(rank, engine, held)
    assert rank.result().way == "read"
    monkeypatch.setattr(first.transports, "connect", connect)
    monkeypatch.setattr(second.client, "tell", tell)
    monkeypatch.setattr(introductions, "MEET_SECONDS", 15.0)
    load(rank, engine, held)
    assert rank.result().way == "read"
    time.sleep(0.6)
    load(rank, engine, held)
    assert rank.result().way == "written"
    check_arrived(engine, [rank])


def test_writing_that_is_forced_is_refused_where_the_source_does_not_write(engines: Engines) -> None:
    engine, rank = choosing(engines, target_is_forced=True, source_only_read=True)
    load(rank, engine, held_by(engine))
    error = rank.result().error
    assert error is not None
    assert error.reason is Reason.UNSUPPORTED
    assert "held_prompts" in str(error)


def test_introductions_of_strangers_begin_few_meetings(
    announced: tuple[HoldingEngine, LoadingRank, Announce], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever names they give themselves, and however often."""
    engine, rank, _ = announced
    [source] = engine.ranks
    monkeypatch.setattr("kvferry.execution.destinations.MAX_MEETINGS", 3)
    never = SimpleNamespace(name="", poll=lambda: None)
    monkeypatch.setattr(source.transports, "connect", lambda _: never)
    introduction = rank.announcer.introductions._introduction(
        source.answers_at, (source.entry.shard,), PROTOCOL_VERSION
    )
    monkeypatch.setattr("kvferry.execution.destinations.TELL_SECONDS", 0.0)
    for number in range(10):
        for _ in range(2):
            source.writer.answer(msgspec.structs.replace(introduction, receiver=f"stranger/{number}"))
            assert len(source.writer.destinations._meetings) == min(number + 1, 3)
    wait_until(lambda: sum("stranger" in job.job_id for job in source.executor._active) == 3)


def test_a_destination_that_introduces_itself_over_and_over_is_met_once(
    announced: tuple[HoldingEngine, LoadingRank, Announce],
) -> None:
    engine, rank, _ = announced
    [source] = engine.ranks
    told = recorded_questions(rank)
    introduction = rank.announcer.introductions._introduction(
        source.answers_at, (source.entry.shard,), PROTOCOL_VERSION
    )
    for _ in range(20):
        source.writer.answer(introduction)
    time.sleep(0.2)
    assert not told


def test_a_message_that_says_that_a_rank_was_met_is_for_one_epoch_of_it(engines: Engines) -> None:
    _, rank = choosing(engines)
    with pytest.raises(HandoffError) as refused:
        rank.announcer.answer(Met(1, "d/0", rank.epoch + 1, 0))
    assert refused.value.reason is Reason.PEER_CHANGED
