"""Loads at their destination rank, whose sources are the test: what is kept, fenced and forgotten, and when."""

import time
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.execution import destination
from kvferry.execution.destination import Announcement, Announcer, AwaitedLoad, SourceRank
from kvferry.execution.device import HOST, DeviceOrder
from kvferry.execution.executor import Phase
from kvferry.execution.peers import OwnRank
from kvferry.handoff.destination import ASK_AGAIN_SECONDS
from kvferry.handoff.messages import (
    PROTOCOL_VERSION,
    Announce,
    Announced,
    Answer,
    EndPoint,
    Identity,
    Introduce,
    Noted,
    Question,
    Refusal,
    Revoke,
    Revoked,
    WriteFailed,
    WriteSeconds,
    Written,
    decode_question,
    encode,
)
from kvferry.handoff.wire.client import Exchange
from kvferry.handoff.wire.trust import THIS_MACHINE
from kvferry.transport.protocol import ProcessIdentity, own_identity

IDENTITY = Identity("m", "w", "a", "float32", 2, 4, 8, "none", "float32")
ENGINE_EPOCH = 9
HERE = own_identity()
ELSEWHERE = msgspec.structs.replace(HERE, boot_id="of another host")
IN_ANOTHER_CONTAINER = msgspec.structs.replace(HERE, pid_namespace=HERE.pid_namespace + 1)
ABORTED = HandoffError(Reason.ABORTED, "the client went away.")
UNKNOWN = HandoffError(Reason.UNKNOWN_REQUEST, "who is that?")
GONE = Reason.PEER_DIED
CUDA: Any = Mock(device="cuda:0", is_immediate=False)


class Sources:
    """Source ranks of one destination rank: what they were asked, and what they answer."""

    def __init__(
        self,
        *processes: ProcessIdentity | None,
        holes: tuple[str, ...] = (),
        order: DeviceOrder = HOST,
        host: str = "10.0.0.2",
    ) -> None:
        """Each has its process; ``holes`` are those of a fence of the destination, which answers at ``host`` and whose
        cache is in the memory that ``order`` names.
        """
        self.client, self.transports = Mock(knows_peers=False, trust=THIS_MACHINE), Mock()
        self.client.collect.return_value = ()
        self.transports.renew.return_value = {"nixl": b"anew"}
        self.transports.close_former.return_value = holes
        parts: list[Any] = [self.transports, Mock(), order, self.client]
        self.announcer = Announcer(
            OwnRank("d/0", b"shard", IDENTITY, {"nixl": b"before"}, *parts),
            EndPoint(host, 1, 7),
            1.0,
            0.0,
        )
        self.announcer.peers = Mock(wraps=self.announcer.peers)
        self.announcer.peers.refuses = Mock(return_value=False)
        self.ranks = [
            SourceRank(
                index, EndPoint("127.0.0.1", 100 + index, 40 + index), part(index), (b"s",), PROTOCOL_VERSION, process
            )
            for index, process in enumerate(processes)
        ]

    @property
    def num_fences(self) -> int:
        return int(self.transports.renew.call_count)

    def load(self, seconds: float = 1000.0) -> AwaitedLoad:
        request = Announcement("r", "x", 4, "prompt", time.monotonic() + seconds, ENGINE_EPOCH)
        return self.announcer.load(request, lambda: self.ranks)

    def announced(self) -> AwaitedLoad:
        """Return a load that all sources know."""
        load = self.load()
        self.advance(load)
        self.answer(Introduce, *[Noted(rank.answers_at.epoch) for rank in self.ranks])
        self.advance(load)
        self.answer(Announce, *[Announced(rank.answers_at.epoch, "nixl") for rank in self.ranks])
        self.advance(load)
        assert not self.advance(load)
        return load

    def advance(self, load: AwaitedLoad) -> bool:
        return load.advance(time.monotonic()) and load.advance(time.monotonic())

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
    load = sources.announced()
    load.cancel(ABORTED)
    for _ in range(3):
        sources.advance(load)
    assert sources.num_fences == 1
    assert load.phase is Phase.STOPPING
    assert "the nixl transport could not be closed" in caplog.text
    sources.answer(Revoke, Revoked(40, is_quiet=True))
    sources.advance(load)
    assert load.phase is Phase.DONE, "what the source itself says counts all the same"


def test_a_later_fence_gives_no_block_back_that_a_former_one_could_not_close() -> None:
    """It closes the memory that was registered anew; what was announced before has other end points."""
    sources = Sources(ELSEWHERE, holes=("the nixl transport could not be closed",))
    former = sources.announced()
    former.cancel(ABORTED)
    sources.advance(former)
    assert sources.num_fences == 1
    sources.transports.renew.return_value = {"nixl": b"once more"}
    sources.transports.close_former.return_value = ()
    sources.asked(Announce)
    later = sources.announced()
    later.cancel(ABORTED)
    for _ in range(3):
        sources.advance(later)
    assert sources.num_fences == 2
    assert later.phase is Phase.DONE
    for _ in range(3):
        sources.advance(former)
    assert former.phase is Phase.STOPPING
    assert sources.num_fences == 2, "one more would only fail the loads of others"


def test_a_process_of_this_host_that_ends_behind_a_fence_needs_no_other() -> None:
    """While it ran, no fence kept it out; what it has sent was for memory that is closed."""
    sources = Sources(ELSEWHERE, HERE)
    load = sources.announced()
    load.cancel(ABORTED)
    for _ in range(3):
        sources.advance(load)
    sources.announcer.peers.has_ended = Mock(return_value=True)  # type: ignore[method-assign]
    sources.transports.ends_with_process.return_value = False
    for seconds in (2.0, 4.0, 6.0):
        load.advance(time.monotonic() + seconds)
    assert load.phase is Phase.DONE
    assert sources.num_fences == 1


def test_a_fence_for_one_source_gives_no_block_back_that_another_may_still_write() -> None:
    """A process of this host may write without any transport of this rank."""
    sources = Sources(ELSEWHERE, HERE)
    load = sources.announced()
    load.cancel(ABORTED)
    for _ in range(3):
        sources.advance(load)
    assert sources.num_fences == 1
    assert load._load is not None
    assert load._load.may_land == [1]
    assert load.phase is Phase.STOPPING


@pytest.mark.parametrize(
    ("process", "is_kept_out"), [(ELSEWHERE, True), (IN_ANOTHER_CONTAINER, False)], ids=["host", "container"]
)
def test_a_fence_gives_no_block_of_a_gpu_back_that_another_process_of_this_host_may_have_mapped(
    process: ProcessIdentity, is_kept_out: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA IPC outlives the agent that a fence closes. By its end point a process of another container is elsewhere."""
    sources = Sources(process, order=CUDA)
    load = sources.announced()
    load.cancel(ABORTED)
    for _ in range(3):
        sources.advance(load)
    assert (load.phase is Phase.DONE, sources.num_fences) == (is_kept_out, is_kept_out)
    assert ("then restart this engine" in caplog.text) is not is_kept_out
    if not is_kept_out:
        sources.announcer.fence("another source")
        sources.advance(load)
        assert load.phase is Phase.STOPPING


def test_a_fence_gives_host_memory_back_that_a_process_of_another_container_was_told_of() -> None:
    """It writes there through a transport of this rank only."""
    sources = Sources(IN_ANOTHER_CONTAINER)
    load = sources.announced()
    load.cancel(ABORTED)
    for _ in range(3):
        sources.advance(load)
    assert load.phase is Phase.DONE


def test_one_fence_is_enough_for_all_sources_of_a_load() -> None:
    """Each fence fails all transfers of the rank, and takes seconds."""
    sources = Sources(ELSEWHERE, ELSEWHERE)
    load = sources.announced()
    load.cancel(ABORTED)
    for _ in range(3):
        sources.advance(load)
    assert load.phase is Phase.DONE
    assert sources.num_fences == 1


def test_a_fence_waits_for_the_loads_of_other_sources_and_closes_then() -> None:
    """No load of a source that lives fails for one that is dead; new loads are announced in the new registration."""
    sources = Sources(ELSEWHERE, ELSEWHERE)
    both = sources.ranks
    sources.ranks = both[:1]
    of_the_dead = sources.announced()
    sources.ranks = both[1:]
    of_the_living = sources.announced()
    of_the_dead.cancel(ABORTED)
    sources.advance(of_the_dead)
    assert (sources.num_fences, sources.transports.close_former.call_count) == (1, 0)
    sources.advance(of_the_dead)
    assert of_the_dead.phase is Phase.STOPPING, "its source may still write over the former connections"
    sources.ranks = both[1:]
    new = sources.load()
    sources.advance(new)
    sources.answer(Introduce, Noted(both[1].answers_at.epoch))
    sources.advance(new)
    [(_, _, announcement)] = sources.asked(Announce)
    assert announcement.registration == 1
    for load in (of_the_living, new):
        assert load.error is None
    report = Written(of_the_living._key, 1, "part 1", 4, 1, "nixl", WriteSeconds())
    of_the_living.inbox.put(report)
    sources.advance(of_the_living)
    assert (of_the_living.phase, of_the_living.error) == (Phase.DONE, None)
    sources.advance(of_the_dead)
    assert sources.transports.close_former.call_count == 1
    assert of_the_dead.phase is Phase.DONE
    assert new.error is None, "its blocks are in the new registration"


def test_a_fence_that_is_asked_for_while_another_drains_follows_it() -> None:
    sources = Sources(ELSEWHERE, ELSEWHERE)
    both = sources.ranks
    sources.ranks = both[:1]
    first = sources.announced()
    sources.ranks = both[1:]
    living = sources.announced()
    first.cancel(ABORTED)
    sources.advance(first)
    sources.ranks = both[:1]
    second = sources.announced()
    second.cancel(ABORTED)
    sources.advance(second)
    assert (sources.num_fences, sources.transports.close_former.call_count) == (1, 0)
    living.inbox.put(Written(living._key, 1, "part 1", 4, 1, "nixl", WriteSeconds()))
    for _ in range(2):
        for load in (living, first, second):
            sources.advance(load)
    assert (sources.num_fences, sources.transports.close_former.call_count) == (2, 2)
    assert {first.phase, second.phase, living.phase} == {Phase.DONE}
    assert living.error is None


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


# Writes that failed.


def failed_write(sources: Sources, load: AwaitedLoad, may_land: bool, index: int = 0, reason: Reason = GONE) -> None:
    """Let a source report that it gave the write up."""
    error = HandoffError(reason, "the connection is lost.")
    report = WriteFailed.of(error, key=load._key, source_index=index, may_land=may_land)
    sources.announcer.answer(report)


@pytest.mark.parametrize("process", [HERE, ELSEWHERE])
@pytest.mark.parametrize("may_land", [True, False])
def test_a_write_that_failed_gives_the_blocks_back_behind_a_fence(may_land: bool, process: ProcessIdentity) -> None:
    """Also where the source lives on this host: it writes no more, and what it has sent comes through a connection."""
    sources = Sources(process)
    load = sources.announced()
    failed_write(sources, load, may_land)
    load.advance(time.monotonic())
    assert load.error is not None
    assert load.error.reason is GONE
    assert sources.num_fences == (1 if may_land else 0)
    load.advance(time.monotonic())
    assert load.phase is Phase.DONE


@pytest.mark.parametrize("is_fenced_before", [False, True])
def test_a_write_into_a_gpu_that_failed_keeps_its_blocks_until_its_process_has_ended(
    is_fenced_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A process of this host may have the memory mapped, which no fence ends: not one for another source either."""
    sources = Sources(HERE, order=CUDA)
    sources.transports.ends_with_process.return_value = True
    load = sources.announced()
    if is_fenced_before:
        sources.announcer.fence("another host")
    failed_write(sources, load, True)
    now = time.monotonic()
    for seconds in (0.0, 2.0, 4.0):
        load.advance(now + seconds)
    assert load.phase is Phase.STOPPING
    assert sources.num_fences == (1 if is_fenced_before else 0)
    [told] = [line for line in caplog.messages if "stay quarantined" in line]
    assert told.endswith("keeps its bytes out: end its process.")
    sources.announcer.peers.has_ended = Mock(return_value=True)  # type: ignore[method-assign]
    for seconds in (6.0, 8.0):
        load.advance(now + seconds)
    assert load.phase is Phase.DONE
    assert sources.num_fences == 1


@pytest.mark.parametrize("process", [None, IN_ANOTHER_CONTAINER])
def test_the_log_names_a_restart_where_no_end_of_the_process_would_be_seen(
    process: ProcessIdentity | None, caplog: pytest.LogCaptureFixture
) -> None:
    sources = Sources(process, order=CUDA)
    load = sources.announced()
    failed_write(sources, load, True)
    for _ in range(3):
        load.advance(time.monotonic())
    assert load.phase is Phase.STOPPING
    [told] = [line for line in caplog.messages if "stay quarantined" in line]
    assert told.endswith("end its process, then restart this engine.")


def test_a_write_that_failed_while_it_was_revoked_is_fenced_too() -> None:
    sources = Sources(HERE)
    sources.announcer.fence_seconds = 1000.0
    load = sources.announced()
    load.cancel(ABORTED)
    sources.advance(load)
    sources.answer(Revoke, Revoked(40, is_quiet=False, may_land=True))
    sources.advance(load)
    assert load.phase is Phase.DONE
    assert sources.num_fences == 1
    assert load.error is not None
    assert load.error.reason is Reason.ABORTED


def test_a_write_that_failed_at_a_source_behind_a_hole_keeps_its_blocks() -> None:
    sources = Sources(HERE, holes=("the nixl transport could not be closed",))
    load = sources.announced()
    failed_write(sources, load, True)
    for _ in range(3):
        load.advance(time.monotonic())
    assert sources.num_fences == 1
    assert load.phase is Phase.STOPPING


def test_writes_that_fail_one_after_the_other_cost_a_fence_each_fence_seconds() -> None:
    """Each fence fails the loads of others, and a connection may break over and over."""
    sources = Sources(HERE, HERE)
    first = sources.announced()
    failed_write(sources, first, True)
    failed_write(sources, first, True, index=1)
    sources.announcer.fence_seconds = 50.0
    first.advance(time.monotonic())
    first.advance(time.monotonic())
    assert (first.phase, sources.num_fences) == (Phase.DONE, 1)
    later = sources.announced()
    failed_write(sources, later, True)
    failed_write(sources, later, False, index=1)
    now = time.monotonic()
    later.advance(now + 45.0)
    assert (later.phase, sources.num_fences) == (Phase.STOPPING, 1)
    later.advance(now + 51.0)
    later.advance(now + 51.0)
    assert (later.phase, sources.num_fences) == (Phase.DONE, 2)


def test_a_write_that_failed_because_of_a_fence_costs_no_other() -> None:
    """It was for memory that is closed. Its source lives on this host, and no fence ends its load."""
    sources = Sources(HERE)
    load = sources.announced()
    sources.announcer.fence_seconds = 1000.0
    sources.announcer.fence("of another load")
    assert load.advance(time.monotonic()) is False
    failed_write(sources, load, True)
    sources.advance(load)
    assert load.phase is Phase.DONE
    assert (sources.num_fences, sources.transports.close_former.call_count) == (1, 1)


def test_a_report_of_a_source_that_the_plan_does_not_name_fails_the_load_only() -> None:
    sources = Sources(HERE)
    load = sources.announced()
    failed_write(sources, load, True, index=7)
    load.advance(time.monotonic())
    assert load.error is not None
    assert load._load is not None
    assert load._load.may_land == [0]


# Ends.


@pytest.mark.parametrize("end", ["quiet", "before its sources are known", "no source is found"])
def test_nothing_is_kept_of_a_load_that_is_over(end: str) -> None:
    """A rank has millions of them."""
    sources = Sources(ELSEWHERE)
    if end == "quiet":
        load = sources.announced()
        load.cancel(ABORTED)
        sources.advance(load)
        sources.answer(Revoke, Revoked(40, is_quiet=True))
        sources.advance(load)
    elif end == "no source is found":
        load = sources.announcer.load(Announcement("r", "x", 4, "prompt", 0.0, ENGINE_EPOCH), lambda: None)
        sources.advance(load)
    else:
        load = sources.load()
        load.cancel(ABORTED)
    assert load.phase is Phase.DONE
    assert load.error is not None
    assert (sources.announcer._loads, sources.announcer._pending) == ({}, {})


def test_a_load_whose_sources_do_not_become_known_ends_at_its_deadline() -> None:
    sources = Sources()
    load = sources.announcer.load(
        Announcement("r", "x", 4, "prompt", time.monotonic() + 100.0, ENGINE_EPOCH), lambda: None
    )
    assert not load.advance(time.monotonic())
    assert load.advance(time.monotonic() + 100.0)
    assert load.phase is Phase.DONE
    assert load.error is not None
    assert load.error.reason is Reason.DEADLINE_EXCEEDED


def test_a_load_past_its_deadline_goes_first() -> None:
    """Else a transfer thread that has much to do would notice late."""
    load = Sources(ELSEWHERE).load(seconds=100.0)
    now = time.monotonic()
    assert [load.is_ending(now), load.is_ending(now + 100.0)] == [False, True]


def test_an_announcement_that_is_not_answered_fails_the_load_and_keeps_its_blocks() -> None:
    """It may have arrived."""
    sources = Sources(ELSEWHERE)
    sources.announcer.fence_seconds = 1000.0
    load = sources.load()
    sources.advance(load)
    sources.answer(Introduce, Noted(40))
    sources.advance(load)
    sources.answer(Announce, None)
    sources.advance(load)
    assert load.error is not None
    assert (load.error.reason, load.phase) == (Reason.PEER_UNREACHABLE, Phase.STOPPING)


def test_nothing_is_announced_once_a_source_has_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same turn: a later source would begin to write for a load that has failed."""
    sources = Sources(ELSEWHERE, ELSEWHERE)
    monkeypatch.setattr(destination, "MAX_ANNOUNCED_BLOCKS", 1)
    sources.ranks[0].part.announced = (Mock(block_ids=(1, 2)),)  # type: ignore[misc]
    load = sources.load()
    sources.advance(load)
    sources.advance(load)
    assert load.phase is Phase.DONE
    assert load.error is not None
    assert load.error.reason is Reason.UNSUPPORTED
    assert not sources.client.send.called


def test_a_revocation_that_is_not_answered_in_time_is_sent_again() -> None:
    sources = Sources(HERE)
    load = sources.announced()
    load.cancel(ABORTED)
    for answer in (None, Revoked(40, is_quiet=False), Refusal.of(UNKNOWN)):
        sources.advance(load)
        sources.answer(Revoke, answer)
        load.advance(time.monotonic())
        assert not sources.asked(Revoke), "not at once"
        load.advance(time.monotonic() + 0.1)
        assert load.phase is Phase.STOPPING
    assert len(sources.asked(Revoke)) == 1


# Introductions.


def test_a_source_that_refused_the_introduction_is_asked_again_by_the_next_load() -> None:
    sources = Sources(ELSEWHERE)
    for number in range(2):
        load = sources.load()
        sources.advance(load)
        sources.answer(Introduce, Refusal.of(UNKNOWN))
        sources.advance(load)
        assert load.phase is Phase.DONE, number
        assert load.error is not None
        assert load.error.reason is Reason.UNKNOWN_REQUEST


def test_a_source_whose_engine_is_a_stranger_is_not_trusted() -> None:
    """Without keys anybody can name any address for a rank."""
    sources = Sources(ELSEWHERE)
    sources.advance(sources.load())
    [call] = sources.client.send.call_args_list
    assert call.kwargs["is_trusted"] is False


def test_each_source_has_a_token_of_its_own_that_nobody_else_can_compute() -> None:
    """With another's token a source could introduce itself there in this rank's name; all the rest is public."""
    both = [Sources(ELSEWHERE, ELSEWHERE) for _ in range(2)]
    tokens = [each.announcer.introductions.token(rank.answers_at) for each in both for rank in each.ranks]
    assert len(set(tokens)) == 4
    sources = both[0]
    sources.advance(sources.load())
    assert [question.token for _, _, question in sources.asked(Introduce)] == tokens[:2]


@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_a_token_is_no_zero_and_fits_into_a_message(byte: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest_of(*_: object, digest_size: int, key: bytes) -> Any:
        return Mock(digest=lambda: byte * digest_size)

    monkeypatch.setattr(destination, "hashlib", Mock(blake2b=digest_of))
    sources = Sources(ELSEWHERE)
    sources.advance(sources.load())
    [(_, _, question)] = sources.asked(Introduce)
    assert question.token
    assert decode_question(encode(question)) == question


@pytest.mark.parametrize("wrong", [{"receiver": "d/1"}, {"receiver_epoch": 8}])
def test_a_report_for_another_rank_or_epoch_is_refused(wrong: dict[str, Any]) -> None:
    sources = Sources(ELSEWHERE)
    load = sources.announced()
    report = done(load)
    with pytest.raises(HandoffError) as refused:
        sources.announcer.answer(msgspec.structs.replace(report, key=msgspec.structs.replace(report.key, **wrong)))
    assert refused.value.reason is Reason.PEER_CHANGED
    sources.advance(load)
    assert load.phase is not Phase.DONE


@pytest.mark.parametrize(
    ("host", "process", "is_refused"),
    [
        ("127.0.0.1", ELSEWHERE, True),
        ("127.0.0.1", HERE, False),
        ("127.0.0.1", None, False),
        ("10.0.0.2", ELSEWHERE, False),
    ],
)
def test_a_rank_at_loopback_announces_nothing_to_a_source_on_another_host(
    host: str, process: ProcessIdentity | None, is_refused: bool
) -> None:
    """The source could not report there. Where its own address is a real one, it may still be on this host."""
    sources = Sources(process, host=host)
    load = sources.load()
    sources.advance(load)
    assert (load.phase is Phase.DONE) is is_refused
    assert len(sources.asked(Introduce)) == (0 if is_refused else 1)
    if is_refused:
        assert load.error is not None
        assert load.error.reason is Reason.PEER_UNREACHABLE
        assert '"host"' in load.error.remedy


# Announcements that are asked again.


def done(load: AwaitedLoad, index: int = 0, transport: str = "nixl") -> Written:
    return Written(load._key, index, f"part {index}", 512, 3, transport, WriteSeconds(0.25, 0.5, 0.125))


def asked_again(sources: Sources, load: AwaitedLoad) -> Announce:
    """Let two seconds pass without a report; return what the first source is asked."""
    assert not load.advance(time.monotonic() + ASK_AGAIN_SECONDS - 0.5)
    assert sources.asked(Announce) == []
    load.advance(time.monotonic() + ASK_AGAIN_SECONDS)
    [(_, _, question), *_] = asked = [call.args[:3] for call in sources.client.send.call_args_list]
    assert {type(each[2]) for each in asked} == {Announce}
    assert isinstance(question, Announce)
    return question


def test_an_announcement_says_in_which_epoch_the_engine_is_known() -> None:
    sources = Sources(ELSEWHERE)
    load = sources.load()
    sources.advance(load)
    sources.answer(Introduce, Noted(40))
    sources.advance(load)
    [(_, _, question)] = sources.asked(Announce)
    assert (question.epoch, question.engine_epoch) == (40, ENGINE_EPOCH)


def test_a_report_that_was_lost_costs_two_seconds_and_not_the_deadline() -> None:
    sources = Sources(ELSEWHERE)
    load = sources.announced()
    first = load._announcements[0]
    assert asked_again(sources, load) == first, "the same: the source knows it by its key"
    sources.answer(Announce, Announced(40, "", done(load)))
    sources.advance(load)
    assert (load.phase, load.error) == (Phase.DONE, None)
    assert load.result(0.0).num_bytes == 512


@pytest.mark.parametrize("may_land", [False, True])
def test_a_failure_that_was_lost_is_learnt_and_what_may_land_too(may_land: bool) -> None:
    sources = Sources(ELSEWHERE)
    load = sources.announced()
    asked_again(sources, load)
    error = HandoffError(GONE, "the connection is lost.")
    report = WriteFailed.of(error, key=load._key, source_index=0, may_land=may_land)
    sources.answer(Announce, Announced(40, "", report))
    for _ in range(2):
        sources.advance(load)
    assert load.phase is Phase.DONE
    assert load.error is not None
    assert load.error.reason is GONE
    assert sources.num_fences == (1 if may_land else 0)


def test_a_source_that_still_writes_is_asked_again_and_again_one_question_at_a_time() -> None:
    sources = Sources(ELSEWHERE)
    load = sources.announced()
    for _ in range(3):
        asked_again(sources, load)
        load.advance(time.monotonic() + 3 * ASK_AGAIN_SECONDS)
        sources.answer(Announce, Announced(40, ""))
        sources.advance(load)
    assert load.phase is not Phase.DONE


def test_a_repeated_answer_does_not_overwrite_the_transport_that_was_noted_first() -> None:
    """Of a source that has ended, the transport says whether what it has sent may still land."""
    sources = Sources(HERE)
    load = sources.announced()
    for again in ("", "cma"):
        asked_again(sources, load)
        sources.answer(Announce, Announced(40, again))
        sources.advance(load)
    sources.announcer.peers.has_ended = Mock(return_value=True)  # type: ignore[method-assign]
    sources.transports.ends_with_process.return_value = True
    load.advance(time.monotonic() + 60.0)
    assert [call.args for call in sources.transports.ends_with_process.call_args_list] == [("nixl",)]


@pytest.mark.parametrize("wrong", ["key", "source"])
def test_a_report_of_another_write_in_an_answer_counts_for_nothing(wrong: str) -> None:
    """The answer comes from one source: it can speak for no other."""
    sources = Sources(ELSEWHERE, ELSEWHERE)
    load = sources.announced()
    asked_again(sources, load)
    report = done(load, index=1)
    if wrong == "key":
        report = msgspec.structs.replace(done(load), key=msgspec.structs.replace(load._key, number=1))
    sources.answer(Announce, Announced(40, "", report), Announced(41, ""))
    sources.advance(load)
    assert load._load is not None
    assert load._load.writers == [0, 1]
