"""Pushes at their destination rank, whose sources are the test: what is kept, fenced and forgotten, and when."""

import time
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.execution import announce, introductions
from kvferry.execution.destination import Announcer, AwaitedLoad, Announcement, SourceRank
from kvferry.execution.device import HOST, DeviceOrder
from kvferry.execution.guard_words import Scratch
from kvferry.execution.job import Phase
from kvferry.execution.own_rank import OwnRank
from kvferry.handoff.messages import (
    PROTOCOL_VERSION,
    Announce,
    Announced,
    Answer,
    EndPoint,
    Identity,
    Introduce,
    Met,
    Noted,
    WriteFailed,
    Question,
    Refusal,
    Revoke,
    Revoked,
    decode_question,
    encode,
)
from kvferry.handoff.wire.client import Exchange
from kvferry.transport.end_points import ProcessIdentity, own_identity
from kvferry.transport.registry import Fence

IDENTITY = Identity("m", "w", "a", "float32", 2, 4, 8, "none", "float32")
HERE = own_identity()
ELSEWHERE = msgspec.structs.replace(HERE, boot_id="of another host")
IN_ANOTHER_CONTAINER = msgspec.structs.replace(HERE, pid_namespace=HERE.pid_namespace + 1)
ABORTED = HandoffError(Reason.ABORTED, "the client went away.")
UNKNOWN = HandoffError(Reason.UNKNOWN_REQUEST, "who is that?")
GONE = Reason.PEER_DIED
SCRATCH = Scratch(num_words=4)
CUDA: Any = Mock(device="cuda:0", is_immediate=False)


class Sources:
    """Source ranks of one destination rank: what they were asked, and what they answer."""

    def __init__(
        self, *processes: ProcessIdentity | None, holes: tuple[str, ...] = (), order: DeviceOrder = HOST
    ) -> None:
        """Each has its process; ``holes`` are those of a fence of the destination, whose cache is in the memory that
        ``order`` names.
        """
        self.client, self.transports = Mock(knows_peers=False), Mock()
        self.client.collect.return_value = ()
        self.transports.fence.return_value = Fence({"nixl": b"anew"}, holes)
        self.fences: list[tuple[int, dict[str, bytes]]] = []
        parts: list[Any] = [self.transports, Mock(), order, self.client]
        self.announcer = Announcer(
            OwnRank("d/0", b"shard", IDENTITY, {"nixl": b"before"}, *parts),
            EndPoint("127.0.0.1", 1, 7),
            1.0,
            fence_seconds=0.0,
            on_fence=lambda *fence: self.fences.append(fence),
        )
        self.announcer.peers = Mock(wraps=self.announcer.peers)
        self.announcer.peers.refuses = Mock(return_value=False)
        self.ranks = [
            SourceRank(
                index, EndPoint("127.0.0.1", 100 + index, 40 + index), part(index), (b"s",), PROTOCOL_VERSION, process
            )
            for index, process in enumerate(processes)
        ]

    def push(self, seconds: float = 1000.0) -> AwaitedLoad:
        request = Announcement("r", "x", 4, "prompt", time.monotonic() + seconds)
        return self.announcer.push(request, lambda: self.ranks)

    def announced(self) -> AwaitedLoad:
        """Return a push that all sources know."""
        push = self.push()
        self.advance(push)
        self.answer(Introduce, *[Noted(rank.answers_at.epoch) for rank in self.ranks])
        self.advance(push)
        self.answer(Announce, *[Announced(rank.answers_at.epoch, "nixl") for rank in self.ranks])
        self.advance(push)
        assert not self.advance(push)
        return push

    def advance(self, push: AwaitedLoad) -> bool:
        return push.advance(SCRATCH, time.monotonic()) and push.advance(SCRATCH, time.monotonic())

    def asked(self, kind: type[Question]) -> list[tuple[str, int, Any]]:
        """Return the questions of this kind since the last call, with their addresses."""
        asked = [call.args[:3] for call in self.client.send.call_args_list]
        self.client.send.call_args_list = [
            call for call in self.client.send.call_args_list if not isinstance(call.args[2], kind)
        ]
        return [each for each in asked if isinstance(each[2], kind)]

    def answer(self, kind: type[Question], *answers: Answer | None) -> None:
        """Answer the questions of this kind, which must be as many; None is an answer that came too late."""
        asked = self.asked(kind)
        exchanges = [Exchange(*question, 0.0, answer=answer) for question, answer in zip(asked, answers, strict=True)]
        self.client.collect.return_value = exchanges
        self.announcer.collect()
        self.client.collect.return_value = ()


def part(index: int) -> Any:
    return Mock(announced=(), digest=f"part {index}")


# Fences.


def test_a_fence_with_holes_gives_no_block_back(caplog: pytest.LogCaptureFixture) -> None:
    """A byte may still land through the hole: only an engine that is restarted has the blocks again."""
    sources = Sources(ELSEWHERE, holes=("the nixl transport could not be closed",))
    push = sources.announced()
    push.cancel(ABORTED)
    for _ in range(3):
        sources.advance(push)
    assert len(sources.fences) == 1
    assert push.phase is Phase.STOPPING
    assert "the nixl transport could not be closed" in caplog.text
    sources.answer(Revoke, Revoked(40, is_quiet=True))
    sources.advance(push)
    assert push.phase is Phase.DONE, "what the source itself says counts all the same"


def test_a_later_fence_gives_no_block_back_that_a_former_one_could_not_close() -> None:
    """It closes the memory that was registered anew; what was announced before has other end points."""
    sources = Sources(ELSEWHERE, holes=("the nixl transport could not be closed",))
    former = sources.announced()
    sources.announcer.fence("the first")
    sources.transports.fence.return_value = Fence({"nixl": b"once more"}, ())
    sources.asked(Announce)
    later = sources.announced()
    later.cancel(ABORTED)
    for _ in range(3):
        sources.advance(later)
    assert len(sources.fences) == 2
    assert later.phase is Phase.DONE
    former.cancel(ABORTED)
    for _ in range(3):
        sources.advance(former)
    assert former.phase is Phase.STOPPING
    assert len(sources.fences) == 2, "one more would only fail the loads of others"


def test_a_process_of_this_host_that_ends_behind_a_fence_needs_no_other() -> None:
    """While it ran, no fence kept it out; what it has sent was for memory that is closed."""
    sources = Sources(ELSEWHERE, HERE)
    push = sources.announced()
    push.cancel(ABORTED)
    for _ in range(3):
        sources.advance(push)
    sources.announcer.peers.has_ended = Mock(return_value=True)  # type: ignore[method-assign]
    sources.transports.ends_with_process.return_value = False
    for seconds in (2.0, 4.0, 6.0):
        push.advance(SCRATCH, time.monotonic() + seconds)
    assert push.phase is Phase.DONE
    assert len(sources.fences) == 1


def test_a_fence_for_one_source_gives_no_block_back_that_another_may_still_write() -> None:
    """A process of this host may write without any transport of this rank."""
    sources = Sources(ELSEWHERE, HERE)
    push = sources.announced()
    push.cancel(ABORTED)
    for _ in range(3):
        sources.advance(push)
    assert len(sources.fences) == 1
    assert push._receiving is not None
    assert push._receiving.may_land == [1]
    assert push.phase is Phase.STOPPING


@pytest.mark.parametrize(
    ("process", "is_kept_out"), [(ELSEWHERE, True), (IN_ANOTHER_CONTAINER, False)], ids=["host", "container"]
)
def test_a_fence_gives_no_block_of_a_gpu_back_that_another_process_of_this_host_may_have_mapped(
    process: ProcessIdentity, is_kept_out: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA IPC outlives the agent that a fence closes. By its end point a process of another container is elsewhere."""
    sources = Sources(process, order=CUDA)
    push = sources.announced()
    push.cancel(ABORTED)
    for _ in range(3):
        sources.advance(push)
    assert (push.phase is Phase.DONE, len(sources.fences)) == (is_kept_out, is_kept_out)
    assert ("then restart this engine" in caplog.text) is not is_kept_out
    if not is_kept_out:
        sources.announcer.fence("another source")
        sources.advance(push)
        assert push.phase is Phase.STOPPING


def test_a_fence_gives_host_memory_back_that_a_process_of_another_container_was_told_of() -> None:
    """It writes there through a transport of this rank only."""
    sources = Sources(IN_ANOTHER_CONTAINER)
    push = sources.announced()
    push.cancel(ABORTED)
    for _ in range(3):
        sources.advance(push)
    assert push.phase is Phase.DONE


def test_one_fence_is_enough_for_all_sources_of_a_push() -> None:
    """Each fence fails all transfers of the rank, and takes seconds."""
    sources = Sources(ELSEWHERE, ELSEWHERE)
    push = sources.announced()
    push.cancel(ABORTED)
    for _ in range(3):
        sources.advance(push)
    assert push.phase is Phase.DONE
    assert sources.fences == [(1, {"nixl": b"anew"})]


def test_what_was_said_before_a_fence_does_not_count_behind_it() -> None:
    """Introductions and connections before the fence name end points that are closed."""
    sources = Sources(ELSEWHERE)
    [rank] = sources.ranks
    where, announcer = rank.answers_at, sources.announcer

    def is_introduced() -> bool:
        return announcer.introductions.is_introduced(where, rank.engine, rank.version)

    assert not is_introduced()
    [former] = sources.asked(Introduce)
    announcer.fence("a test")
    assert not is_introduced()
    sources.client.collect.return_value = [Exchange(*former, 0.0, answer=Noted(where.epoch))]
    announcer.collect()
    assert not is_introduced(), "it is the former introduction that was noted"
    [(_, _, introduction)] = sources.asked(Introduce)
    assert (introduction.registration, introduction.end_points) == (1, {"nixl": b"anew"})
    sources.client.collect.return_value = [Exchange(where.host, where.port, introduction, 0.0, answer=Noted(40))]
    announcer.collect()
    assert is_introduced()
    # A message that is sent again may come after a later one.
    for registration, meets in ((0, None), (1, True), (0, True), (2, True)):
        announcer.answer(Met(where.epoch, "d/0", 7, registration))
        assert announcer.introductions.meets(where, rank.engine, rank.version, now=5.0) is meets, registration


# Writes that failed.


def failed_write(sources: Sources, push: AwaitedLoad, may_land: str, index: int = 0, reason: Reason = GONE) -> None:
    """Let a source report that it gave the push up."""
    error = HandoffError(reason, "the connection is lost.")
    report = WriteFailed.of(error, key=push._key, source_index=index, may_land=may_land)
    sources.announcer.answer(report)


@pytest.mark.parametrize("process", [HERE, ELSEWHERE])
@pytest.mark.parametrize("may_land", ["yes", "no"])
def test_a_write_that_failed_gives_the_blocks_back_behind_a_fence(may_land: str, process: ProcessIdentity) -> None:
    """Also where the source lives on this host: it writes no more, and what it has sent comes through a connection."""
    sources = Sources(process)
    push = sources.announced()
    failed_write(sources, push, may_land)
    push.advance(SCRATCH, time.monotonic())
    assert push.error is not None
    assert push.error.reason is GONE
    assert len(sources.fences) == (1 if may_land == "yes" else 0)
    push.advance(SCRATCH, time.monotonic())
    assert push.phase is Phase.DONE


@pytest.mark.parametrize("is_fenced_before", [False, True])
def test_a_write_into_a_gpu_that_failed_keeps_its_blocks_until_its_process_has_ended(
    is_fenced_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A process of this host may have the memory mapped, which no fence ends: not one for another source either."""
    sources = Sources(HERE, order=CUDA)
    sources.transports.ends_with_process.return_value = True
    push = sources.announced()
    if is_fenced_before:
        sources.announcer.fence("another host")
    failed_write(sources, push, "yes")
    now = time.monotonic()
    for seconds in (0.0, 2.0, 4.0):
        push.advance(SCRATCH, now + seconds)
    assert push.phase is Phase.STOPPING
    assert len(sources.fences) == (1 if is_fenced_before else 0)
    [told] = [line for line in caplog.messages if "stay quarantined" in line]
    assert told.endswith("keeps its bytes out: end its process.")
    sources.announcer.peers.has_ended = Mock(return_value=True)  # type: ignore[method-assign]
    for seconds in (6.0, 8.0):
        push.advance(SCRATCH, now + seconds)
    assert push.phase is Phase.DONE
    assert len(sources.fences) == 1


@pytest.mark.parametrize("process", [None, IN_ANOTHER_CONTAINER])
def test_the_log_names_a_restart_where_no_end_of_the_process_would_be_seen(
    process: ProcessIdentity | None, caplog: pytest.LogCaptureFixture
) -> None:
    sources = Sources(process, order=CUDA)
    push = sources.announced()
    failed_write(sources, push, "yes")
    for _ in range(3):
        push.advance(SCRATCH, time.monotonic())
    assert push.phase is Phase.STOPPING
    [told] = [line for line in caplog.messages if "stay quarantined" in line]
    assert told.endswith("end its process, then restart this engine.")


def test_a_write_that_failed_while_it_was_revoked_is_fenced_too() -> None:
    sources = Sources(HERE)
    sources.announcer.fence_seconds = 1000.0
    push = sources.announced()
    push.cancel(ABORTED)
    sources.advance(push)
    sources.answer(Revoke, Revoked(40, is_quiet=False, may_land=True))
    sources.advance(push)
    assert push.phase is Phase.DONE
    assert len(sources.fences) == 1
    assert push.error is not None
    assert push.error.reason is Reason.ABORTED


def test_a_write_that_failed_at_a_source_behind_a_hole_keeps_its_blocks() -> None:
    sources = Sources(HERE, holes=("the nixl transport could not be closed",))
    push = sources.announced()
    failed_write(sources, push, "yes")
    for _ in range(3):
        push.advance(SCRATCH, time.monotonic())
    assert len(sources.fences) == 1
    assert push.phase is Phase.STOPPING


def test_writes_that_fail_one_after_the_other_cost_a_fence_each_fence_seconds() -> None:
    """Each fence fails the loads of others, and a connection may break over and over."""
    sources = Sources(HERE, HERE)
    first = sources.announced()
    failed_write(sources, first, "yes")
    failed_write(sources, first, "yes", index=1)
    sources.announcer.fence_seconds = 50.0
    first.advance(SCRATCH, time.monotonic())
    first.advance(SCRATCH, time.monotonic())
    assert (first.phase, len(sources.fences)) == (Phase.DONE, 1)
    later = sources.announced()
    failed_write(sources, later, "yes")
    failed_write(sources, later, "no", index=1)
    now = time.monotonic()
    later.advance(SCRATCH, now + 45.0)
    assert (later.phase, len(sources.fences)) == (Phase.STOPPING, 1)
    later.advance(SCRATCH, now + 51.0)
    later.advance(SCRATCH, now + 51.0)
    assert (later.phase, len(sources.fences)) == (Phase.DONE, 2)


def test_a_write_that_failed_because_of_a_fence_costs_no_other() -> None:
    """It was for memory that is closed. Its source lives on this host, and no fence ends its push."""
    sources = Sources(HERE)
    push = sources.announced()
    sources.announcer.fence_seconds = 1000.0
    sources.announcer.fence("of another push")
    assert push.advance(SCRATCH, time.monotonic()) is False
    failed_write(sources, push, "yes")
    push.advance(SCRATCH, time.monotonic())
    assert push.phase is Phase.DONE
    assert len(sources.fences) == 1


@pytest.mark.parametrize("reason", [Reason.TRANSFER_FAILED, Reason.ABORTED, Reason.PEER_UNREACHABLE])
@pytest.mark.parametrize("ends_with_process", [True, False])
def test_of_a_report_of_version_9_the_reason_says_whether_bytes_may_still_land(
    ends_with_process: bool, reason: Reason
) -> None:
    """It names no bytes. A prompt that was aborted, or a destination out of reach, was not being written."""
    sources = Sources(HERE)
    sources.transports.ends_with_process.return_value = ends_with_process
    push = sources.announced()
    failed_write(sources, push, "unsaid", reason=reason)
    sources.announcer.answer(Met(40, "d/0", 7, 0))
    push.advance(SCRATCH, time.monotonic())
    push.advance(SCRATCH, time.monotonic())
    assert push.phase is Phase.DONE
    is_fenced = not ends_with_process and reason is Reason.TRANSFER_FAILED
    assert len(sources.fences) == (1 if is_fenced else 0)
    assert [call.args for call in sources.transports.ends_with_process.call_args_list] == [("nixl",)]


def test_a_report_of_a_source_that_the_plan_does_not_name_fails_the_push_only() -> None:
    sources = Sources(HERE)
    push = sources.announced()
    failed_write(sources, push, "yes", index=7)
    push.advance(SCRATCH, time.monotonic())
    assert push.error is not None
    assert push._receiving is not None
    assert push._receiving.may_land == [0]


# Ends.


@pytest.mark.parametrize("end", ["quiet", "before its sources are known", "no source is found"])
def test_nothing_is_kept_of_a_push_that_is_over(end: str) -> None:
    """A rank has millions of them."""
    sources = Sources(ELSEWHERE)
    if end == "quiet":
        push = sources.announced()
        push.cancel(ABORTED)
        sources.advance(push)
        sources.answer(Revoke, Revoked(40, is_quiet=True))
        sources.advance(push)
    elif end == "no source is found":
        push = sources.announcer.push(Announcement("r", "x", 4, "prompt", 0.0), lambda: None)
        sources.advance(push)
    else:
        push = sources.push()
        push.cancel(ABORTED)
    assert push.phase is Phase.DONE
    assert push.error is not None
    assert (sources.announcer._pushes, sources.announcer._pending) == ({}, {})


def test_a_push_whose_sources_do_not_become_known_ends_at_its_deadline() -> None:
    sources = Sources()
    push = sources.announcer.push(Announcement("r", "x", 4, "prompt", time.monotonic() + 100.0), lambda: None)
    assert not push.advance(SCRATCH, time.monotonic())
    assert push.advance(SCRATCH, time.monotonic() + 100.0)
    assert push.phase is Phase.DONE
    assert push.error is not None
    assert push.error.reason is Reason.DEADLINE_EXCEEDED


def test_a_push_past_its_deadline_goes_first() -> None:
    """Else a transfer thread that has much to do would notice late."""
    push = Sources(ELSEWHERE).push(seconds=100.0)
    now = time.monotonic()
    assert [push.is_ending(now), push.is_ending(now + 100.0)] == [False, True]


def test_an_announcement_that_is_not_answered_fails_the_push_and_keeps_its_blocks() -> None:
    """It may have arrived."""
    sources = Sources(ELSEWHERE)
    sources.announcer.fence_seconds = 1000.0
    push = sources.push()
    sources.advance(push)
    sources.answer(Introduce, Noted(40))
    sources.advance(push)
    sources.answer(Announce, None)
    sources.advance(push)
    assert push.error is not None
    assert (push.error.reason, push.phase) == (Reason.PEER_UNREACHABLE, Phase.STOPPING)


def test_nothing_is_announced_once_a_source_has_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same turn: a later source would begin to write for a load that has failed."""
    sources = Sources(ELSEWHERE, ELSEWHERE)
    monkeypatch.setattr(announce, "MAX_ANNOUNCED_BLOCKS", 1)
    sources.ranks[0].part.announced = (Mock(block_ids=(1, 2)),)  # type: ignore[misc]
    push = sources.push()
    sources.advance(push)
    sources.advance(push)
    assert push.phase is Phase.DONE
    assert push.error is not None
    assert push.error.reason is Reason.UNSUPPORTED
    assert not sources.client.send.called


def test_a_revocation_that_is_not_answered_in_time_is_sent_again() -> None:
    sources = Sources(HERE)
    push = sources.announced()
    push.cancel(ABORTED)
    for answer in (None, Revoked(40, is_quiet=False), Refusal.of(UNKNOWN)):
        sources.advance(push)
        sources.answer(Revoke, answer)
        push.advance(SCRATCH, time.monotonic())
        assert not sources.asked(Revoke), "not at once"
        push.advance(SCRATCH, time.monotonic() + 0.1)
        assert push.phase is Phase.STOPPING
    assert len(sources.asked(Revoke)) == 1


# Introductions.


def test_a_source_that_refused_the_introduction_is_asked_again_by_the_next_push() -> None:
    sources = Sources(ELSEWHERE)
    for number in range(2):
        push = sources.push()
        sources.advance(push)
        sources.answer(Introduce, Refusal.of(UNKNOWN))
        sources.advance(push)
        assert push.phase is Phase.DONE, number
        assert push.error is not None
        assert push.error.reason is Reason.UNKNOWN_REQUEST


def test_a_source_whose_engine_is_a_stranger_is_not_trusted() -> None:
    """Without keys anybody can name any address for a rank."""
    sources = Sources(ELSEWHERE)
    sources.advance(sources.push())
    [call] = sources.client.send.call_args_list
    assert call.kwargs["is_trusted"] is False


def test_a_source_that_is_avoided_is_introduced_and_must_connect_anew() -> None:
    sources = Sources(ELSEWHERE)
    [rank] = sources.ranks
    where, announcer = rank.answers_at, sources.announcer
    now = time.monotonic()

    def meets(now: float) -> bool | None:
        return announcer.introductions.meets(where, rank.engine, rank.version, now)

    assert meets(now) is None
    sources.answer(Introduce, Noted(40))
    announcer.answer(Met(40, "d/0", 7, 0))
    assert meets(now) is True
    announcer.introductions.avoid(where, UNKNOWN, now)
    assert meets(now + introductions.AVOID_SECONDS - 1.0) is False
    assert not sources.asked(Introduce)
    later = now + introductions.AVOID_SECONDS
    assert meets(later) is None
    sources.answer(Introduce, Noted(40))
    assert meets(later) is None, "it has not connected since"
    announcer.answer(Met(40, "d/0", 7, 0))
    assert meets(later) is True
    announcer.introductions.forget(where)
    assert meets(later + introductions.MEET_SECONDS) is None, "the time counts from the new introduction"


def test_a_source_that_says_too_late_that_it_connected_writes_the_next_load_and_not_in_ten_minutes() -> None:
    """What it said before it was avoided is forgotten, so its word is of later."""
    sources = Sources(ELSEWHERE)
    [rank] = sources.ranks
    where, announcer = rank.answers_at, sources.announcer
    now = time.monotonic()

    def meets(seconds: float) -> bool | None:
        return announcer.introductions.meets(where, rank.engine, rank.version, now + seconds)

    def introduced(seconds: float) -> bool | None:
        assert meets(seconds) is None
        sources.answer(Introduce, Noted(40))
        return meets(seconds)

    assert introduced(0.0) is None
    assert meets(introductions.MEET_SECONDS) is False
    assert meets(introductions.MEET_SECONDS + 1.0) is False
    announcer.answer(Met(40, "d/0", 7, 0))
    assert introduced(introductions.MEET_SECONDS + 2.0) is True
    announcer.fence("a test")
    assert introduced(introductions.MEET_SECONDS + 3.0) is None, "it writes again: it is awaited behind a fence"


def test_each_source_has_a_token_of_its_own_that_nobody_else_can_compute() -> None:
    """With another's token a source could introduce itself there in this rank's name; all the rest is public."""
    both = [Sources(ELSEWHERE, ELSEWHERE) for _ in range(2)]
    tokens = [each.announcer.introductions.token(rank.answers_at) for each in both for rank in each.ranks]
    assert len(set(tokens)) == 4
    sources = both[0]
    sources.advance(sources.push())
    assert [question.token for _, _, question in sources.asked(Introduce)] == tokens[:2]


@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_a_token_is_not_that_of_an_earlier_version_and_fits_into_a_message(
    byte: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest_of(*_: object, digest_size: int, key: bytes) -> Any:
        return Mock(digest=lambda: byte * digest_size)

    monkeypatch.setattr(introductions, "hashlib", Mock(blake2b=digest_of))
    sources = Sources(ELSEWHERE)
    sources.advance(sources.push())
    [(_, _, question)] = sources.asked(Introduce)
    assert question.token
    assert decode_question(encode(question)) == question


@pytest.mark.parametrize("wrong", [{"receiver": "d/1"}, {"receiver_epoch": 8}])
def test_a_message_for_another_rank_or_epoch_is_refused(wrong: dict[str, Any]) -> None:
    sources = Sources(ELSEWHERE)
    met = msgspec.structs.replace(Met(40, "d/0", 7, 0), **wrong)
    with pytest.raises(HandoffError) as refused:
        sources.announcer.answer(met)
    assert refused.value.reason is Reason.PEER_CHANGED
    assert not sources.announcer.introductions._met
