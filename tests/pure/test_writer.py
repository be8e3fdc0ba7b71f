"""Writes at their source rank, whose engine, transport and destination are the test: what is written, stopped, told."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from kvferry.errors import HandoffError, Reason, TransportError
from kvferry.execution import source as source_module
from kvferry.execution.device import HOST
from kvferry.execution.executor import Phase
from kvferry.execution.peers import OwnRank
from kvferry.execution.source import CHECK_ALIVE_SECONDS, LATE_SECONDS, Write, Writer
from kvferry.handoff import source as writes_module
from kvferry.handoff.holds import transfer_of
from kvferry.handoff.messages import (
    Announce,
    Announced,
    AnnouncedBlocks,
    EndPoint,
    Handle,
    Question,
    Release,
    Revoke,
    Revoked,
    WriteFailed,
    WriteKey,
    WriteSeconds,
    Written,
)
from kvferry.handoff.source import END, MOST_KEPT_TEXT, BlockList, Part, Prompt, announced_blocks
from kvferry.handoff.wire.trust import THIS_MACHINE
from kvferry.layout.shard import encode_shard
from kvferry.plan.match import GroupBlocks, selector_of
from kvferry.plan.planner import LayerSpans, Planner
from kvferry.transport.protocol import Direction, Status, Transfer
from kvferry.transport.registry import Link

from .test_destinations import EPOCH, IDENTITY, INTRODUCTION, SOURCES, WHERE, shard

KEY = WriteKey("d/0", WHERE.epoch, 1)
ENGINE = EndPoint("127.0.0.1", 9, 3)
HOLD = transfer_of(Handle("r", 43))
NUM_TOKENS = 32
FAILED = TransportError(Reason.TRANSFER_FAILED, "a write failed.")
BLOCKS = {"full": BlockList(0, [2, 1])}
PROMPT = Prompt(NUM_TOKENS, "prompt", BLOCKS, END)


class Wire:
    """A transport whose writes end when the test says so; without ``can_revoke`` a cancelled one goes on."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self.can_revoke = True
        self.fails: Exception | None = None

    def submit(self, peer: object, direction: Direction, rows: np.ndarray) -> Transfer:
        if self.fails is not None:
            raise self.fails
        assert direction is Direction.WRITE
        self.transfers.append(Transfer(Mock(), direction, len(rows), int(rows[:, 2].sum())))
        return self.transfers[-1]

    def poll(self, transfer: Transfer) -> Status:
        return transfer.status

    def cancel(self, transfer: Transfer) -> Status:
        return transfer.cancel() if self.can_revoke else transfer.status


class Source:
    """The second of two source ranks; its client has no keys."""

    def __init__(self) -> None:
        self.executor, self.client, self.wire = Mock(), Mock(knows_peers=False, trust=THIS_MACHINE), Wire()
        self.links = [Link("cma", self.wire, Mock())]  # type: ignore[arg-type]
        parts: list[Any] = [Mock(connect=lambda _: self.links[-1]), self.executor, HOST, self.client]
        rank = OwnRank("p", encode_shard(SOURCES[1]), IDENTITY, {}, *parts)
        self.writer = Writer(rank, EPOCH, LayerSpans({}), keeps_events=False)
        self.writer.engine = ENGINE
        self.refuses = Mock(return_value=False)
        self.writer._peers = Mock(refuses=self.refuses)
        self.writer.answer(INTRODUCTION)
        self.executor.reset_mock()
        self.client.reset_mock()

    def announce(self, **changed: Any) -> Write:
        """Announce blocks; return the job that writes."""
        before = len(self.executor.submit.call_args_list)
        answer = self.writer.answer(msgspec.structs.replace(ANNOUNCEMENT, **changed))
        assert isinstance(answer, Announced)
        submitted = self.executor.submit.call_args_list[before:]
        [job] = [call.args[0] for call in submitted]
        assert isinstance(job, Write)
        return job

    def compute(self, num_final: int = END, transfer_id: str = "x") -> None:
        self.writer.compute([(transfer_id, Prompt(NUM_TOKENS, "prompt", BLOCKS, num_final))])

    def writing(self, **changed: Any) -> Write:
        """Return a write whose one batch is in flight."""
        self.compute()
        job = self.announce(**changed)
        advance(job)
        assert len(self.wire.transfers) == 1
        assert job.phase is Phase.MOVING
        return job

    @property
    def told(self) -> list[tuple[str, int, Question, bool]]:
        """What other processes were told: where, what, and whether a trusted engine has named the place."""
        calls = self.client.tell.call_args_list
        return [(*call.args[:3], call.kwargs["is_trusted"]) for call in calls]

    @property
    def reports(self) -> list[Written | WriteFailed]:
        return [told for _, _, told, _ in self.told if isinstance(told, Written | WriteFailed)]

    def wakes(self, call: Callable[[], object]) -> bool:
        before = self.executor.wake.call_count
        call()
        return bool(self.executor.wake.call_count > before)

    def is_quiet_after_revocation(self) -> bool:
        answer = self.writer.answer(Revoke(EPOCH, KEY))
        assert isinstance(answer, Revoked)
        return answer.is_quiet


def advance(job: Write, seconds: float = 0.0) -> bool:
    """Advance a write as it will be after some seconds."""
    return job.advance(time.monotonic() + seconds)


[PLAN] = [plan for plan in Planner(SOURCES, shard()).plans(selector_of("x")) if plan.assignment.source_index == 1]


def announcement() -> Announce:
    blocks = announced_blocks(PLAN, [blocks_of([0, 3])])
    return Announce(
        epoch=EPOCH,
        engine_epoch=ENGINE.epoch,
        key=KEY,
        registration=0,
        token=0,
        transfer_id="x",
        num_tokens=NUM_TOKENS,
        prompt_digest="prompt",
        blocks=blocks,
        digest=Part(PLAN, blocks).digest,
        seconds=100.0,
        integrity="off",
        adapter="",
        late_seconds=0.0,
    )


def blocks_of(ids: Sequence[int]) -> GroupBlocks:
    return GroupBlocks(
        group="full",
        first_token=0,
        last_token=NUM_TOKENS,
        source_block_ids=BLOCKS["full"].block_ids,
        destination_block_ids=ids,
        source_first_token=0,
        destination_first_token=0,
    )


ANNOUNCEMENT = announcement()


def test_a_write_that_has_landed_is_reported_by_the_index_of_this_rank() -> None:
    source = Source()
    job = source.writing()
    [transfer] = source.wire.transfers
    transfer.status = Status.DONE
    assert advance(job)
    assert not source.reports, "the outcome is taken in a turn of its own"
    assert advance(job)
    assert job.phase is Phase.DONE
    [report] = source.reports
    assert isinstance(report, Written)
    assert (report.key, report.source_index, report.digest) == (KEY, 1, ANNOUNCEMENT.digest)
    assert (report.num_bytes, report.transport) == (transfer.num_bytes, "cma")


def test_a_report_says_where_the_time_of_the_write_went(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(source_module.time, "monotonic", lambda: now)
    source = Source()
    job = source.announce()
    now += 4
    source.compute()
    assert advance(job)
    [transfer] = source.wire.transfers
    now += 2
    transfer.status = Status.DONE
    assert advance(job)
    now += 1
    assert advance(job)
    [report] = source.reports
    assert isinstance(report, Written)
    assert report.seconds == WriteSeconds(post=4, move=2, confirm=1)


# Revocations.


def test_a_revocation_is_quiet_only_once_the_write_in_flight_has_ended() -> None:
    """Until then the destination keeps its blocks: a write that cannot be revoked may still land."""
    source = Source()
    job = source.writing()
    source.wire.can_revoke = False
    assert not source.is_quiet_after_revocation()
    assert job.is_ending(0.0)
    advance(job)
    assert (job.phase, job.given_up_at is not None) == (Phase.STOPPING, True)
    given_up_at = job.given_up_at
    advance(job)
    assert job.given_up_at == given_up_at
    assert not source.is_quiet_after_revocation()
    assert not source.reports
    assert not source.writer.is_quiet
    source.wire.can_revoke = True
    advance(job)
    assert source.is_quiet_after_revocation()
    assert source.writer.is_quiet


@pytest.mark.parametrize("status", [Status.DONE, Status.CANCELLED, Status.FAILED])
def test_a_write_that_ends_after_the_revocation_does_not_count(status: Status) -> None:
    """The destination has given the load up: a report that it landed would be about blocks of another request."""
    source = Source()
    job = source.writing()
    source.is_quiet_after_revocation()
    source.wire.transfers[0].status = status
    source.wire.transfers[0].error = FAILED if status is Status.FAILED else None
    advance(job)
    advance(job)
    assert job.phase is Phase.DONE
    [report] = source.reports
    assert isinstance(report, WriteFailed)
    assert (report.key, report.source_index, report.reason) == (KEY, 1, Reason.ABORTED.value)
    assert job.result(0.0).num_bytes == 0
    assert (source.writer._open, source.writer._num_open_blocks) == ({}, 0), "others may announce as many"


def test_a_write_of_another_life_of_this_rank_is_not_revoked_here() -> None:
    source = Source()
    job = source.announce()
    with pytest.raises(HandoffError) as refused:
        source.writer.answer(Revoke(EPOCH - 1, KEY))
    assert refused.value.reason is Reason.PEER_CHANGED
    assert not job.is_ending(0.0)


def test_what_a_write_waits_for_wakes_the_transfer_thread() -> None:
    """Else it would be noticed at the next look at the jobs."""
    source = Source()
    job = source.announce(transfer_id=HOLD, late_seconds=5.0)
    assert source.wakes(lambda: source.writer.hold([(HOLD, PROMPT)]))
    assert source.wakes(lambda: source.writer.end([HOLD]))
    assert source.wakes(source.is_quiet_after_revocation)
    advance(job)
    assert source.wakes(source.compute)
    assert source.wakes(lambda: source.writer.end_epoch(9))


def test_after_a_fence_of_this_rank_a_write_goes_over_a_new_connection() -> None:
    source, other = Source(), Wire()
    source.compute()
    source.links.append(Link("cma", other, Mock()))  # type: ignore[arg-type]
    source.writer._rank.transports.num_fences = 1
    advance(source.announce())
    assert (len(source.wire.transfers), len(other.transfers)) == (0, 1)


# Announcements.


def test_hole_17_little_of_a_refused_announcement_is_kept() -> None:
    """A stranger may have 65,536 refused, each of which names 256 groups of 512 characters: 2 MB in an error."""
    source = Source()
    source.announce()
    blocks = tuple(AnnouncedBlocks(f"\N{GRINNING FACE}{number:0511}", 0, 16, 0, (1,)) for number in range(256))
    key = msgspec.structs.replace(KEY, number=2)
    with pytest.raises(HandoffError) as refused:
        source.writer.answer(msgspec.structs.replace(ANNOUNCEMENT, key=key, blocks=blocks))
    assert refused.value.reason is Reason.GROUP_MISMATCH
    assert len(refused.value.message) < 1000
    outcome = source.writer._writes.outcome(key)
    assert outcome is not None
    assert outcome.error is not None
    assert outcome.error.reason is Reason.GROUP_MISMATCH
    assert max(map(len, (outcome.error.message, outcome.error.remedy))) <= MOST_KEPT_TEXT


def test_hole_19_tokens_that_end_before_they_begin_are_refused() -> None:
    """Such a write would be open until its deadline, an hour, and give way to nobody."""
    source = Source()
    source.announce()
    blocks = tuple(msgspec.structs.replace(each, first_token=8, end_token=4) for each in ANNOUNCEMENT.blocks)
    key = msgspec.structs.replace(KEY, number=2)
    with pytest.raises(HandoffError) as refused:
        source.writer.answer(msgspec.structs.replace(ANNOUNCEMENT, key=key, blocks=blocks))
    assert refused.value.reason is Reason.INVALID_REQUEST
    assert "tokens 8 to 4" in refused.value.message
    assert len(source.writer._open) == 1


def test_little_is_kept_of_both_texts_of_a_refusal() -> None:
    source = Source()
    source.writer._writes.refuse(KEY, HandoffError(Reason.UNSUPPORTED, "m" * 4096, "r" * 4096))
    outcome = source.writer._writes.outcome(KEY)
    assert outcome is not None
    assert outcome.error is not None
    assert (outcome.error.message, outcome.error.remedy) == ("m" * MOST_KEPT_TEXT, "r" * MOST_KEPT_TEXT)


def test_an_announcement_of_no_tokens_is_over_at_once() -> None:
    """A destination names a group of which it wants no tokens, too."""
    source = Source()
    blocks = tuple(msgspec.structs.replace(each, first_token=8, end_token=8) for each in ANNOUNCEMENT.blocks)
    job = source.announce(blocks=blocks, digest=Part(PLAN, blocks).digest)
    advance(job)
    assert job.phase is Phase.DONE
    assert [type(report) for report in source.reports] == [Written]


@pytest.mark.parametrize(
    "wrong", [{"digest": "of another part"}, {"registration": 7}, {"transfer_id": HOLD}], ids=lambda wrong: str(*wrong)
)
def test_a_refused_announcement_takes_no_room_of_those_that_come_after_their_revocation(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it was refused for. The last is for a prompt that is not held."""
    monkeypatch.setattr(writes_module, "MAX_REVOKED", 1)
    source = Source()
    for number in range(3):
        key = msgspec.structs.replace(KEY, number=100 + number)
        with pytest.raises(HandoffError):
            source.writer.answer(msgspec.structs.replace(ANNOUNCEMENT, key=key, **wrong))
        assert source.writer.answer(Revoke(EPOCH, key)) == Revoked(EPOCH, is_quiet=True)
    assert source.is_quiet_after_revocation()


def test_an_announcement_that_comes_twice_is_written_once() -> None:
    source = Source()
    job = source.writing()
    answer = source.writer.answer(ANNOUNCEMENT)
    assert answer == Announced(EPOCH, "")
    assert [call.args[0] for call in source.executor.submit.call_args_list] == [job]


def test_a_write_goes_over_the_connection_that_the_announcement_was_answered_with() -> None:
    """The destination was told its transport: whether the writes end with this process depends on it."""
    source = Source()
    job = source.announce()
    source.links.append(Link("nixl", Wire(), Mock()))  # type: ignore[arg-type]
    [known] = source.writer.destinations.known.values()
    source.writer.destinations.connect_anew(known)
    source.compute()
    advance(job)
    assert len(source.wire.transfers) == 1
    assert job.result(0.0).transport == "cma"


def test_a_hold_is_awaited_for_a_short_time_only() -> None:
    """Whatever its destination asks for; a router's transfer may come until the deadline."""
    source = Source()
    with pytest.raises(HandoffError) as refused:
        source.announce(transfer_id=HOLD, late_seconds=0.0, key=msgspec.structs.replace(KEY, number=2))
    assert refused.value.reason is Reason.WRONG_PARAMETERS
    job = source.announce(transfer_id=HOLD, late_seconds=1e5)
    router = source.announce(key=msgspec.structs.replace(KEY, number=3))
    for each in (job, router):
        advance(each, LATE_SECONDS - 1.0)
        assert each.phase is Phase.PREPARING
        advance(each, LATE_SECONDS)
    assert (job.phase, router.phase) == (Phase.DONE, Phase.PREPARING)
    assert job.error is not None
    assert job.error.reason is Reason.SOURCE_CHANGED


def test_a_hold_that_is_told_in_time_is_written() -> None:
    source = Source()
    job = source.announce(transfer_id=HOLD, late_seconds=5.0)
    advance(job)
    assert not source.wire.transfers
    source.writer.hold([(HOLD, PROMPT)])
    advance(job, 6.0)
    assert len(source.wire.transfers) == 1


# Announcements that come again.


def test_a_report_that_was_lost_is_in_the_answer_to_an_announcement_that_comes_again() -> None:
    source = Source()
    job = source.writing()
    assert source.writer.answer(ANNOUNCEMENT) == Announced(EPOCH, "", None), "while it is written"
    source.wire.transfers[0].status = Status.DONE
    advance(job)
    advance(job)
    [report] = source.reports
    assert isinstance(report, Written)
    assert source.writer.answer(ANNOUNCEMENT) == Announced(EPOCH, "", report)
    assert source.writer.answer(ANNOUNCEMENT) == Announced(EPOCH, "", report), "as often as it comes"
    assert len(source.executor.submit.call_args_list) == 1


def test_a_failure_that_was_lost_is_in_the_answer_too() -> None:
    source = Source()
    job = source.writing()
    source.wire.transfers[0].fail(FAILED)
    source.wire.transfers[0].may_land = True
    advance(job)
    advance(job)
    [report] = source.reports
    assert isinstance(report, WriteFailed)
    assert report.may_land
    assert source.writer.answer(ANNOUNCEMENT) == Announced(EPOCH, "", report)


def test_an_announcement_that_comes_again_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes every two seconds, and may name 262,144 blocks."""
    source = Source()
    source.announce()
    monkeypatch.setattr(source_module, "Part", Mock(side_effect=AssertionError("planned again")))
    assert source.writer.answer(ANNOUNCEMENT) == Announced(EPOCH, "")


def test_reports_that_are_kept_are_bounded_by_number_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "MAX_REPORTS", 3)
    monkeypatch.setattr(source_module, "MAX_REPORT_BYTES", 100)
    writer = Source().writer
    for number, num_bytes in enumerate((10, 10, 10, 10, 90, 40)):
        key = msgspec.structs.replace(KEY, number=number)
        writer._keep(Written(key, 1, "part", 1, 1, "cma", WriteSeconds(), bytes(num_bytes)))
        kept = [report.key.number for report in writer._reports.values()]
        expected = [[0], [0, 1], [0, 1, 2], [1, 2, 3], [3, 4], [5]][number]
        assert (kept, writer._num_report_bytes <= 100) == (expected, True)


# Resets of the engine.


def test_a_reset_fails_the_write_in_flight_and_refuses_what_is_announced_for_the_former_epoch() -> None:
    """The destination knows the engine in an epoch; the blocks of a prompt of that epoch have other bytes now."""
    source = Source()
    job = source.writing()
    source.writer.end_epoch(ENGINE.epoch + 1)
    advance(job)
    advance(job)
    [report] = source.reports
    assert isinstance(report, WriteFailed)
    assert report.reason == Reason.WEIGHTS_CHANGED.value
    assert source.wire.transfers[0].status is Status.CANCELLED
    for transfer_id in ("x", "to come"):
        key = msgspec.structs.replace(KEY, number=90 + len(transfer_id))
        with pytest.raises(HandoffError) as refused:
            source.announce(key=key, transfer_id=transfer_id)
        assert refused.value.reason is Reason.PEER_CHANGED
    later = source.announce(
        key=msgspec.structs.replace(KEY, number=99), transfer_id="new", engine_epoch=ENGINE.epoch + 1
    )
    source.compute(transfer_id="new")
    advance(later)
    assert len(source.wire.transfers) == 2


@pytest.mark.parametrize("asked", [5.0, 1e9])
def test_a_write_ends_at_the_deadline_of_its_destination_and_at_this_ranks_own(
    asked: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "MAX_SECONDS", 50.0)
    source = Source()
    job = source.announce(seconds=asked)
    limit = min(asked, 50.0)
    advance(job, limit - 1.0)
    assert job.phase is Phase.PREPARING
    advance(job, limit)
    assert job.phase is Phase.DONE
    [report] = source.reports
    assert isinstance(report, WriteFailed)
    assert report.reason == Reason.DEADLINE_EXCEEDED


@pytest.mark.parametrize("ids", [(0, 0), (0, 4), (0, 1, 2, 3, 1)], ids=["twice", "beyond the cache", "too many"])
def test_blocks_that_no_cache_has_are_refused(ids: tuple[int, ...]) -> None:
    """Their announcement would be kept until its deadline, with up to 262,144 ids."""
    [blocks] = ANNOUNCEMENT.blocks
    with pytest.raises(HandoffError) as refused:
        Part(PLAN, [msgspec.structs.replace(blocks, block_ids=ids)])
    assert refused.value.reason is Reason.INVALID_REQUEST


# Room.


def announced_by(source: Source, name: str, number: int = 1, ids: Sequence[int] = (0, 3), size: int = 1) -> Write:
    """Return a write to a rank that introduces itself with so many bytes, for a prompt that is not known."""
    source.writer.answer(msgspec.structs.replace(INTRODUCTION, receiver=name, end_points={"none": bytes(size)}))
    blocks = announced_blocks(PLAN, [blocks_of(ids)])
    key = WriteKey(name, WHERE.epoch, number)
    return source.announce(key=key, transfer_id="unknown", blocks=blocks, digest=Part(PLAN, blocks).digest)


def given_up(*writes: Write) -> list[bool]:
    for write in writes:
        if write.is_ending(0.0):
            advance(write)
    return [write.phase is Phase.DONE for write in writes]


def test_of_too_many_writes_the_one_that_came_first_and_whose_prompt_is_unknown_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stranger's announcements for prompts that never come would keep all others out for an hour."""
    monkeypatch.setattr(source_module, "MAX_OPEN", 2)
    source = Source()
    source.compute()
    honest = source.announce()
    first, second = (announced_by(source, name) for name in "ab")
    assert given_up(honest, first, second) == [False, True, False]
    [report] = source.reports
    assert isinstance(report, WriteFailed)
    assert (report.key.receiver, report.reason) == ("a", Reason.INVALID_REQUEST.value)
    third = announced_by(source, "c")
    assert given_up(honest, second, third) == [False, True, False]
    assert not source.writer._given_up


def test_where_all_prompts_are_known_one_write_more_than_a_rank_takes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_module, "MAX_OPEN", 1)
    source = Source()
    source.compute()
    job = source.announce()
    with pytest.raises(HandoffError) as refused:
        source.announce(key=msgspec.structs.replace(KEY, number=2))
    assert refused.value.reason is Reason.INVALID_REQUEST
    assert given_up(job) == [False]
    assert len(source.executor.submit.call_args_list) == 1


def test_a_write_that_was_preempted_in_the_middle_of_a_write_makes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt is computed again, and its write does not end at once."""
    monkeypatch.setattr(source_module, "MAX_OPEN", 1)
    source = Source()
    job = source.writing()
    source.writer.preempt(["x"])
    with pytest.raises(HandoffError):
        announced_by(source, "a")
    assert not job.is_ending(0.0)


def test_a_write_with_few_blocks_takes_the_place_of_one_with_many_and_not_the_other_way_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_module, "MAX_OPEN_BLOCKS", 9)
    source = Source()
    honest = announced_by(source, "honest", 1)
    forged = [announced_by(source, "forged", 1, (0, 1, 2, 3)), announced_by(source, "another", 2, (0, 1, 2))]
    assert given_up(honest, *forged) == [False, False, False]
    more = announced_by(source, "honest", 2, (1, 2))
    assert given_up(honest, more, *forged) == [False, False, True, False]
    with pytest.raises(HandoffError) as refused:
        announced_by(source, "forged", 3, (0, 1, 2, 3))
    assert refused.value.reason is Reason.INVALID_REQUEST
    assert given_up(honest, more, forged[1]) == [False, False, False]
    assert source.writer._num_open_blocks == 7


def test_writes_keep_no_more_of_forgotten_introductions_than_a_rank_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 16,384 writes that wait for a prompt could keep 4 MB of a name that was forgotten since. The largest
    introduction goes, with all writes that wait for their prompts.
    """
    monkeypatch.setattr(source_module, "MAX_INTRODUCED_BYTES", 3_000_000)
    monkeypatch.setattr(source_module, "MAX_OPEN_BYTES", 3_000_000)
    monkeypatch.setattr(source_module, "MAX_GIVEN_UP", 1)
    source = Source()
    honest = announced_by(source, "honest")
    first = announced_by(source, "a", 1, size=1_500_000), announced_by(source, "a", 2, size=1_500_000)
    second = announced_by(source, "b", size=1_400_000)
    assert given_up(honest, *first, second) == [False, False, False, False]
    third = announced_by(source, "c", size=1_300_000)
    assert given_up(honest, *first, second, third) == [False, True, True, False, False]
    with pytest.raises(HandoffError) as refused:
        announced_by(source, "d", size=1_450_000)
    assert refused.value.reason is Reason.INVALID_REQUEST
    again = announced_by(source, "b", 2, size=1_400_000)  # keeps no more
    for job, name in ((second, "b"), (third, "c"), (honest, "honest"), (again, "b")):
        source.writer.answer(Revoke(EPOCH, WriteKey(name, WHERE.epoch, 2 if job is again else 1)))
        advance(job)
        assert job.phase is Phase.DONE
    assert source.writer._num_open_bytes == 0


def test_writes_that_were_given_up_and_have_not_ended_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps its blocks until the transfer thread has a turn, which may take seconds."""
    monkeypatch.setattr(source_module, "MAX_OPEN", 1)
    monkeypatch.setattr(source_module, "MAX_GIVEN_UP", 2)
    source = Source()
    writes = [announced_by(source, name) for name in "abc"]
    with pytest.raises(HandoffError) as refused:
        announced_by(source, "d")
    assert refused.value.reason is Reason.INVALID_REQUEST
    assert given_up(*writes) == [True, True, False]
    assert given_up(writes[2], announced_by(source, "e")) == [True, False]


# Failures.


def test_a_destination_that_refuses_connections_while_its_write_waits_ends_the_write_and_the_hold() -> None:
    """No write would fail: there is nothing to write yet."""
    source = Source()
    job = source.announce()
    advance(job)
    source.refuses.return_value = True
    advance(job)
    assert job.phase is Phase.PREPARING, "it is looked at once in a while"
    advance(job, CHECK_ALIVE_SECONDS)
    advance(job, CHECK_ALIVE_SECONDS)
    assert job.phase is Phase.DONE
    [release, report] = [told for _, _, told, _ in source.told]
    assert isinstance(release, Release)
    assert isinstance(report, WriteFailed)
    assert report.reason == Reason.PEER_UNREACHABLE
    assert [call.args for call in source.refuses.call_args_list] == [(WHERE,)] * 2


@pytest.mark.parametrize("error", [FAILED, ValueError("a defect")], ids=["of the transport", "unexpected"])
def test_a_write_whose_batch_could_not_be_submitted_is_over(error: Exception) -> None:
    """The batch counts as in flight until then, and the destination's blocks with it."""
    source = Source()
    source.compute()
    job = source.announce()
    source.wire.fails = error
    with suppress(ValueError):
        advance(job)
    if not isinstance(error, TransportError):
        job.cancel(HandoffError(Reason.TRANSFER_FAILED, "the job failed unexpectedly."))  # as the executor does
    advance(job)
    assert job.phase is Phase.DONE
    [report] = source.reports
    assert isinstance(report, WriteFailed)
    assert report.reason == Reason.TRANSFER_FAILED
    assert source.is_quiet_after_revocation()


def test_a_write_that_the_executor_gives_up_stops_its_write_and_is_reported() -> None:
    source = Source()
    job = source.writing()
    job.cancel(HandoffError(Reason.CLOSED, "the executor stops."))
    assert job.is_ending(0.0)
    advance(job)
    assert source.wire.transfers[0].status is Status.CANCELLED
    advance(job)
    assert job.phase is Phase.DONE
    [report] = source.reports
    assert isinstance(report, WriteFailed)
    assert report.reason == Reason.CLOSED


def test_a_write_that_failed_ends_the_hold_and_the_next_write_connects_anew() -> None:
    """The destination, which would end the hold, may be dead."""
    source = Source()
    job = source.writing()
    source.wire.transfers[0].fail(FAILED)
    source.links.append(Link("nixl", Wire(), Mock()))  # type: ignore[arg-type]
    advance(job)
    advance(job)
    [known] = source.writer.destinations.known.values()
    assert known.link is source.links[-1]
    [(host, port, release, is_trusted)] = [told for told in source.told if isinstance(told[2], Release)]
    assert ((host, port), is_trusted) == ((ENGINE.host, ENGINE.port), True)
    assert release.epoch == ENGINE.epoch


@pytest.mark.parametrize("is_revoked", [True, False])
@pytest.mark.parametrize("may_land", [True, False])
def test_a_write_that_failed_is_reported_with_what_may_still_land(may_land: bool, is_revoked: bool) -> None:
    """The destination has nothing but this word: a connection that broke looks to it like one that is idle."""
    source = Source()
    job = source.writing()
    if is_revoked:
        assert source.writer.answer(Revoke(EPOCH, KEY)) == Revoked(EPOCH, is_quiet=False)
    source.wire.transfers[0].fail(FAILED)
    source.wire.transfers[0].may_land = may_land
    advance(job)
    advance(job)
    assert job.phase is Phase.DONE
    [report] = source.reports
    assert isinstance(report, WriteFailed)
    assert report.may_land is may_land
    expected = Revoked(EPOCH, is_quiet=not may_land, may_land=may_land)
    assert [source.writer.answer(Revoke(EPOCH, KEY)) for _ in range(2)] == [expected] * 2


@pytest.mark.parametrize("status", [Status.CANCELLED, Status.DONE])
def test_a_write_that_was_revoked_and_ended_well_leaves_nothing_that_may_land(status: Status) -> None:
    source = Source()
    job = source.writing()
    assert not source.is_quiet_after_revocation()
    source.wire.transfers[0].status = status
    advance(job)
    advance(job)
    [report] = source.reports
    assert isinstance(report, WriteFailed)
    assert report.may_land is False
    assert source.is_quiet_after_revocation()


def test_a_report_to_an_address_that_a_stranger_named_is_not_trusted() -> None:
    """Without keys anybody can introduce itself under any address: this rank would connect to any port of any host."""
    source = Source()
    job = source.announce()
    source.is_quiet_after_revocation()
    advance(job)
    [(host, port, _, is_trusted)] = source.told
    assert ((host, port), is_trusted) == ((WHERE.host, WHERE.port), False)
