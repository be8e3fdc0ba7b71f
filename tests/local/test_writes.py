"""Writes between ranks in this process: real listeners, messages, plans and writes, no vLLM."""

import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from kvferry.errors import HandoffError, Reason, TransportError
from kvferry.execution import destination, peers
from kvferry.execution import source as source_module
from kvferry.execution.destination import Announcer
from kvferry.execution.executor import JobResult
from kvferry.execution.peers import OwnRank, Peers
from kvferry.execution.source import Writer
from kvferry.handoff import destination as handoff_destination
from kvferry.handoff.holds import handle_of_transfer, transfer_of
from kvferry.handoff.messages import (
    PROTOCOL_VERSION,
    Announce,
    Answer,
    EndPoint,
    Handle,
    Introduce,
    Noted,
    Question,
    Release,
    Revoke,
    WriteKey,
    Written,
)
from kvferry.handoff.source import END, BlockList, Prompt
from kvferry.handoff.wire.client import Exchange
from kvferry.handoff.wire.server import Server
from kvferry.handoff.wire.trust import Trust, nothing_listens
from kvferry.layout.shard import encode_shard
from kvferry.transport.protocol import is_on_this_host, own_identity

from ..support.faults import FaultPlan
from ..waits import wait_until
from .engines_in_process import BLOCK_SIZE, EPOCH, HEADS, HOST, IDENTITY, LAYERS, Rank
from .engines_that_write import (
    HELD,
    SECONDS,
    Batches,
    Pairs,
    ReceivingRank,
    SendingEngine,
    SendingRank,
    check_arrived,
    engines,
    questions_to_own_engine,
    recorded_questions,
)

__all__ = ["engines"]


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
def test_chunks_are_written_while_the_prompt_is_computed(source_tp: int, target_tp: int, engines: Pairs) -> None:
    sender, receivers = engines.open(source_tp, target_tp)
    for receiver in receivers:
        receiver.receive(sender.hold(), [0, 3, 2])
    for num_final in (5, 9, END):
        assert all(receiver.is_waiting(0.05) for receiver in receivers)
        sender.compute(num_final, [5, 1, 4])
    for receiver in receivers:
        result = receiver.result()
        assert result.error is None
        assert (result.num_bytes, result.transport) == (receiver.rank.cache[:3].nbytes, "cma")
        assert 0 < result.num_sources <= result.num_descriptors
    check_arrived(sender, receivers, [5, 1, 4], [0, 3, 2])
    untouched = [receiver.rank.cache[[1, 4, 5]] for receiver in receivers]
    assert not np.concatenate(untouched).any()


def test_a_chunk_arrives_before_the_next_is_computed(engines: Pairs) -> None:
    sender, [receiver] = engines.open()
    receiver.receive(sender.hold(), [0, 3])
    sender.compute(BLOCK_SIZE + 1, [5, 1])
    wait_until(lambda: np.array_equal(receiver.rank.cache[0], sender.ranks[0].rank.cache[5]))
    assert receiver.is_waiting()
    assert not receiver.rank.cache[3].any()


def test_an_announcement_after_the_prompt_has_ended_catches_up(engines: Pairs) -> None:
    sender, receivers = engines.open(2, 1)
    sender.compute(END, [5, 1])
    receivers[0].receive(sender.hold(), [2, 4])
    assert receivers[0].result().error is None
    check_arrived(sender, receivers, [5, 1], [2, 4])


def test_an_aborted_prompt_fails_the_load_at_once(engines: Pairs) -> None:
    sender, [receiver] = engines.open(2, 1)
    receiver.receive(sender.hold(), [0, 3])
    sender.compute(BLOCK_SIZE, [5, 1])
    assert receiver.is_waiting()
    sender.ranks[1].writer.end(["x"])
    error = receiver.result(5.0).error
    assert error is not None
    assert error.reason is Reason.LEASE_EXPIRED


def test_an_aborted_receiver_has_its_blocks_back_when_all_sources_are_quiet(engines: Pairs) -> None:
    sender, [receiver] = engines.open(2, 1)
    receiver.receive(sender.hold(), [0, 3])
    sender.compute(BLOCK_SIZE, [5, 1])
    assert receiver.is_waiting()
    receiver.executor.cancel("r", HandoffError(Reason.ABORTED, "the client went away."))
    error = receiver.result(5.0).error
    assert error is not None
    assert error.reason is Reason.ABORTED
    receiver.rank.cache[:] = 7
    sender.compute(END, [5, 1])
    time.sleep(0.1)
    assert (receiver.rank.cache == 7).all()


def test_a_write_that_hangs_keeps_the_receivers_blocks_until_it_is_quiet(engines: Pairs) -> None:
    """The sender answers a revocation only once its write has ended; a deadline does not give blocks back."""
    sender, [receiver] = engines.open(faults=FaultPlan(delay_seconds=1.0))
    receiver.receive(sender.hold(), [0, 3], seconds=0.3)
    sender.compute(END, [5, 1])
    error = receiver.result().error
    assert error is not None
    assert error.reason is Reason.DEADLINE_EXCEEDED


def test_a_failed_write_is_reported_at_once(engines: Pairs) -> None:
    sender, [receiver] = engines.open(faults=FaultPlan(fail_after=1))
    receiver.receive(sender.hold(), [0, 3])
    sender.compute(END, [5, 1])
    error = receiver.result(5.0).error
    assert error is not None
    assert error.reason is Reason.TRANSFER_FAILED


@pytest.mark.parametrize(("bound", "most"), [("MAX_OPEN", 2), ("MAX_OPEN_BLOCKS", 5)])
def test_writes_that_are_asked_for_are_bounded(
    bound: str, most: int, engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In number, and in blocks: one announcement may have 4 MB of them, which its write keeps."""
    monkeypatch.setattr(source_module, bound, most)
    monkeypatch.setattr(source_module, "MAX_SECONDS", 0.2)
    sender, [receiver] = engines.open()
    for number in range(2):
        receiver.receive(sender.hold(), [0, 3], f"x{number}", f"r{number}")
    wait_until(lambda: sender.ranks[0].writer._writes.num_open == 2)
    receiver.receive(sender.hold(), [0, 3], "y", "s")
    refused = receiver.result(5.0).error
    assert refused is not None
    assert refused.reason is Reason.INVALID_REQUEST
    late: list[JobResult] = []
    wait_until(lambda: late.extend(receiver.executor.collect()) or len(late) == 2)  # type: ignore[func-returns-value]
    assert [each.error is not None and each.error.reason for each in late] == [Reason.DEADLINE_EXCEEDED] * 2
    sender.compute(END, [5, 1], "z")
    receiver.receive(sender.hold(), [0, 3], "z", "t")
    assert receiver.result().error is None


@pytest.mark.parametrize("fails", [True, False], ids=["a write fails", "the prompt ends"])
def test_the_sender_releases_the_hold_of_a_dead_receiver(fails: bool, engines: Pairs) -> None:
    """Another push of the same prompt may go on where only the prompt's end is the reason."""
    sender, [receiver] = engines.open(faults=FaultPlan(fail_after=1) if fails else None)
    [source] = sender.ranks
    with questions_to_own_engine(source) as asked:
        receiver.receive(sender.hold(), [0, 3])
        assert receiver.is_waiting()
        if fails:
            sender.compute(END, [5, 1])
        else:
            source.writer.end(["x"])
        assert receiver.result(5.0).error is not None
        if fails:
            wait_until(lambda: bool(asked))
    assert asked == ([Release(7, (handle_of_transfer("x"),))] if fails else [])


def test_nixl_1983_a_receiver_out_of_reach_is_reported_and_the_next_push_connects_anew(
    engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, [receiver] = engines.open()
    [source] = sender.ranks
    unreachable = TransportError(Reason.PEER_UNREACHABLE, "no way there.", "Build one.")
    attempts = []

    class Failing:
        name = ""

        def poll(self) -> None:
            attempts.append(time.monotonic())
            raise unreachable

    connect, first = source.transports.connect, iter([Failing()])
    monkeypatch.setattr(source.transports, "connect", lambda end_points: next(first, None) or connect(end_points))
    receiver.receive(sender.hold(), [0, 3])
    error = receiver.result(5.0).error
    assert error is not None
    assert (error.reason, error.message, error.remedy) == (Reason.PEER_UNREACHABLE, "no way there.", "Build one.")
    wait_until(lambda: not source.executor._active)
    assert len(attempts) == 1
    sender.compute(END, [5, 1], "y")
    receiver.receive(sender.hold(), [0, 3], "y")
    assert receiver.result(5.0).error is None


def test_a_receiver_that_is_slow_to_reach_holds_no_push_but_its_own(
    engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, [slow] = engines.open()
    quick = ReceivingRank(Rank(0, 1), "e")
    engines.receivers.append(quick)
    [source] = sender.ranks
    connect, may_reach = source.transports.connect, threading.Event()

    def connect_late(end_points: Mapping[str, bytes]) -> object:
        link = connect(end_points)
        if end_points != slow.end_points:
            return link
        return SimpleNamespace(name="", poll=lambda: link.poll() if may_reach.is_set() else None)

    monkeypatch.setattr(source.transports, "connect", connect_late)
    sender.compute(END, [5, 1])
    slow.receive(sender.hold(), [0, 3])
    assert slow.is_waiting()
    quick.receive(sender.hold(), [2, 4])
    assert quick.result(5.0).error is None
    assert slow.is_waiting(0.05)
    may_reach.set()
    assert slow.result(5.0).error is None
    check_arrived(sender, [slow], [5, 1], [0, 3])


def test_a_push_that_fails_for_another_reason_keeps_the_connection(engines: Pairs) -> None:
    """Of all pushes to this receiver, some of which may be using it."""
    sender, [receiver] = engines.open()
    [source] = sender.ranks
    sender.compute(END, [5, 1])
    receiver.receive(sender.hold(), [0, 3])
    assert receiver.result().error is None
    [known] = source.writer.destinations.known.values()
    link = known.link
    assert link.name == "cma"
    receiver.receive(sender.hold(), [0, 3], "y", "s")
    assert receiver.is_waiting()
    source.writer.end(["y"])
    assert receiver.result().error is not None
    wait_until(lambda: not source.executor._active)
    assert known.link is link


def test_a_receiver_introduces_itself_again_to_a_sender_that_forgot_the_receiver(engines: Pairs) -> None:
    sender, [receiver] = engines.open()
    [source] = sender.ranks
    sender.compute(END, [5, 1])
    receiver.receive(sender.hold(), [0, 3])
    assert receiver.result().error is None
    source.writer.destinations.known.clear()
    receiver.receive(sender.hold(), [0, 3])
    error = receiver.result().error
    assert error is not None
    assert error.reason is Reason.UNKNOWN_REQUEST
    receiver.receive(sender.hold(), [0, 3])
    assert receiver.result().error is None


def test_hole_5_two_decode_replicas_with_one_engine_id_do_not_end_each_others_writes(engines: Pairs) -> None:
    """They introduce themselves under one name: only the epoch tells their processes apart."""
    sender, [one] = engines.open()
    other = ReceivingRank(Rank(0, 1))
    engines.receivers.append(other)
    [source] = sender.ranks
    for number, receiver in enumerate((one, other, one, other)):
        receiver.receive(sender.hold(), [number], f"x{number}", f"r{number}")
        assert receiver.is_waiting()
    assert [epoch for _, epoch, _ in source.writer.destinations.known] == [one.epoch, other.epoch]
    for number in range(4):
        sender.compute(END, [number], f"x{number}")
    for receiver, blocks in ((one, [0, 2]), (other, [1, 3])):
        found: list[JobResult] = []
        wait_until(lambda receiver=receiver, found=found: len(extended(found, receiver)) == 2)
        assert [result.error for result in found] == [None, None]
        assert np.array_equal(receiver.rank.cache[blocks], source.rank.cache[blocks])


def extended(found: list[JobResult], receiver: ReceivingRank) -> list[JobResult]:
    found += receiver.executor.collect()
    return found


def test_hole_9_a_transfer_that_began_before_the_sender_was_restarted_fails_with_a_reason_and_moves_no_byte(
    engines: Pairs,
) -> None:
    """The router repeats the former engine's name, so the announcement reaches the new process. The new process has no
    prompt under the transfer's id; and where it has one, the prompt's digest decides.
    """
    former, [receiver] = engines.open()
    former.compute(END, [5, 1])
    former.close()
    engines.senders.remove(former)
    engines.senders.append(SendingEngine(1, None, Batches.CHUNKS))
    latter = engines.senders[-1]
    receiver.receive(latter.hold(), [0, 3], seconds=0.5)
    late = receiver.result().error
    assert late is not None
    assert late.reason is Reason.DEADLINE_EXCEEDED
    latter.compute(END, [5, 1], "y", digest="another prompt")
    receiver.receive(latter.hold(), [0, 3], "y")
    mixed_up = receiver.result().error
    assert mixed_up is not None
    assert mixed_up.reason is Reason.INVALID_REQUEST
    assert not receiver.rank.cache.any()
    latter.compute(END, [5, 1], "z")
    receiver.receive(latter.hold(), [0, 3], "z")
    assert receiver.result().error is None
    check_arrived(latter, [receiver], [5, 1], [0, 3])


def test_messages_to_another_epoch_are_refused(engines: Pairs) -> None:
    """Reports and announcements of a process that has ended say nothing of blocks in the memory of its successor."""
    sender, [receiver] = engines.open()
    [source] = sender.ranks
    asked = {rank: recorded_questions(rank) for rank in (source, receiver)}
    sender.compute(END, [5, 1])
    receiver.receive(sender.hold(), [0, 3])
    assert receiver.result().error is None
    [written] = [question for question in asked[receiver] if isinstance(question, Written)]
    to_source = [*asked[source], Revoke(source.epoch, written.key)]
    assert {type(question) for question in to_source} == {Introduce, Announce, Revoke}
    for question in to_source:
        later = msgspec.structs.replace(question, epoch=source.epoch + 1)
        assert refusal(source.writer, later) is Reason.PEER_CHANGED
    key = msgspec.structs.replace(written.key, receiver_epoch=receiver.epoch + 1)
    assert refusal(receiver.announcer, msgspec.structs.replace(written, key=key)) is Reason.PEER_CHANGED


def test_an_announcement_of_another_part_is_refused(engines: Pairs) -> None:
    """Before a byte is written: the destination would notice only when its blocks are full of other bytes."""
    _, source, _, asked = asked_in_a_load(engines)
    [announced] = [question for question in asked if isinstance(question, Announce)]
    key = msgspec.structs.replace(announced.key, number=announced.key.number + 1)
    other = msgspec.structs.replace(announced, key=key, digest="of another part")
    assert refusal(source.writer, other) is Reason.PROTOCOL_MISMATCH


def test_a_hold_is_written_to_who_knows_its_generation(engines: Pairs) -> None:
    sender, receivers = engines.open(2, 1)
    sender.compute(END, [5, 1], transfer_of(HELD))
    receivers[0].receive(sender.hold(HELD), [2, 4])
    assert receivers[0].result().error is None
    check_arrived(sender, receivers, [5, 1], [2, 4])
    receivers[0].receive(sender.hold(Handle("x", HELD.generation + 1)), [2, 4], job_id="s")
    error = receivers[0].result(5.0).error
    assert error is not None
    assert error.reason is Reason.WRONG_PARAMETERS


@pytest.mark.parametrize(("late_seconds", "reason"), [(5.0, None), (0.2, Reason.SOURCE_CHANGED)])
def test_a_hold_may_be_told_late(late_seconds: float, reason: Reason | None, engines: Pairs) -> None:
    sender, [receiver] = engines.open()
    receiver.receive(sender.hold(HELD), [2, 4], late_seconds=late_seconds)
    await_announcement(sender.ranks[0])
    time.sleep(0.3)
    sender.ranks[0].writer.hold([(transfer_of(HELD), prompt_of([5, 1], END))])
    error = receiver.result(5.0).error
    assert (None if error is None else error.reason) is reason


def test_a_reset_fails_what_is_open_and_refuses_the_former_epoch(engines: Pairs) -> None:
    sender, [receiver] = engines.open()
    [source] = sender.ranks
    with questions_to_own_engine(source):
        sender.compute(BLOCK_SIZE, [5, 1])
        receiver.receive(sender.hold(), [0, 3])
        await_announcement(source)
        source.writer.end_epoch(EPOCH + 1)
        error = receiver.result(5.0).error
        assert error is not None
        assert error.reason is Reason.WEIGHTS_CHANGED
        receiver.receive(sender.hold(), [0, 3], "y", "s")
        error = receiver.result(5.0).error
        assert error is not None
        assert error.reason is Reason.PEER_CHANGED
        assert source.writer.engine is not None
        assert source.writer.engine.epoch == EPOCH + 1


def test_an_announcement_that_a_reset_overtakes_is_refused(engines: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would get the cache of the new weights under the epoch of the former ones."""
    sender, [receiver] = engines.open()
    writer = sender.ranks[0].writer
    announced = writer.destinations.announced

    def reset_meanwhile(key: WriteKey, registration: int, token: int) -> source_module.DestinationRank:
        found = announced(key, registration, token)
        writer.end_epoch(EPOCH + 1)
        return found

    monkeypatch.setattr(writer.destinations, "announced", reset_meanwhile)
    receiver.receive(sender.hold(), [0, 3])
    error = receiver.result(5.0).error
    assert error is not None
    assert error.reason is Reason.WEIGHTS_CHANGED


@pytest.mark.parametrize("fails", [False, True])
def test_a_report_that_is_lost_is_asked_for(fails: bool, engines: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cost the load its whole deadline."""
    monkeypatch.setattr(handoff_destination, "ASK_AGAIN_SECONDS", 0.2)
    sender, [receiver] = engines.open(faults=FaultPlan(fail_after=1) if fails else None)
    monkeypatch.setattr(sender.ranks[0].client, "tell", lambda *_, **__: None)
    receiver.receive(sender.hold(), [0, 3])
    sender.compute(END, [5, 1])
    result = receiver.result(5.0)
    assert (result.error is not None) is fails
    if not fails:
        assert result.transport == "cma"
        check_arrived(sender, [receiver], [5, 1], [0, 3])


def test_a_receiver_that_the_sender_may_not_reach_is_refused_at_once(
    engines: Pairs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sender's reports would not come, and each load would wait for its deadline."""
    sender, [receiver] = engines.open()
    monkeypatch.setattr(receiver.announcer.introductions, "_answers_at", EndPoint("10.9.8.7", 5601, receiver.epoch))
    receiver.receive(sender.hold(), [0, 3])
    error = receiver.result(5.0).error
    assert error is not None
    assert error.reason is Reason.PERMISSION_DENIED
    assert "10.9.8.7:5601" in error.message
    assert "allowed_hosts" in error.remedy
    assert "10.9.8.7:5601" in caplog.text


def test_a_receiver_at_loopback_loads_from_its_own_host_alone(engines: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destination, "is_on_this_host", is_on_this_host)
    here = own_identity()
    elsewhere = msgspec.structs.replace(here, boot_id="of another host")
    for process, reason in ((here, None), (elsewhere, Reason.PEER_UNREACHABLE)):
        sender, [receiver] = engines.open(process=process)
        sender.compute(END, [5, 1])
        receiver.receive(sender.hold(), [0, 3])
        error = receiver.result(5.0).error
        assert (None if error is None else error.reason) is reason
        engines.receivers = []
        receiver.close()


def await_announcement(source: SendingRank) -> None:
    wait_until(lambda: not source.writer.is_quiet, "nothing is announced")


def prompt_of(ids: Sequence[int], num_final: int) -> Prompt:
    return Prompt(len(ids) * BLOCK_SIZE, "prompt", {"full": BlockList(0, ids)}, num_final)


def asked_in_a_load(engines: Pairs) -> tuple[SendingEngine, SendingRank, ReceivingRank, list[Question]]:
    """Load a prompt; return the sending engine and its rank, the receiver, and the questions to the sending rank."""
    sender, [receiver] = engines.open()
    [source] = sender.ranks
    asked = recorded_questions(source)
    sender.compute(END, [5, 1])
    receiver.receive(sender.hold(), [0, 3])
    assert receiver.result().error is None
    return sender, source, receiver, asked


def refusal(answerer: Writer | Announcer, question: Question) -> Reason:
    with pytest.raises(HandoffError) as refused:
        answerer.answer(question)
    return refused.value.reason


def test_the_most_recent_receivers_are_kept(engines: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "MAX_DESTINATIONS", 2)
    sender, [first] = engines.open()
    [source] = sender.ranks
    others = [ReceivingRank(Rank(0, 1), name) for name in "ef"]
    engines.receivers += others
    sender.compute(END, [5, 1])
    for receiver in (first, others[0], first, others[1]):
        receiver.receive(sender.hold(), [0, 3])
        assert receiver.result().error is None
    assert [name for name, _, _ in source.writer.destinations.known] == ["d/0", "f/0"]


def test_hole_16_a_stranger_that_takes_a_receivers_name_learns_of_no_write(engines: Pairs) -> None:
    """The name, the shard and the end points are public. A stranger that came first got the reports of writes, with
    their unguessable numbers: with one the stranger had blocks given back that a second rank was still writing.
    """
    sender, [receiver] = engines.open(source_tp=2)
    heard: list[Question] = []

    def hear(question: Question) -> Noted:
        heard.append(question)
        return Noted(receiver.epoch)

    with closing(Server(HOST, 0, hear)) as stranger:
        for source in sender.ranks:
            taken = Introduce(
                version=PROTOCOL_VERSION,
                epoch=source.epoch,
                receiver="d/0",
                identity=IDENTITY,
                sources=tuple(rank.entry.shard for rank in sender.ranks),
                shard=encode_shard(receiver.rank.shard),
                end_points=receiver.end_points,
                answers_at=EndPoint(HOST, stranger.port, receiver.epoch),
                registration=0,
                token=0,
            )
            for registration in (0, 1 << 40):
                later = msgspec.structs.replace(taken, registration=registration)
                assert isinstance(source.writer.answer(later), Noted)
        for number in range(2):
            receiver.receive(sender.hold(), [0, 3], f"x{number}", f"r{number}")
            sender.compute(END, [5, 1], f"x{number}")
            assert receiver.result().error is None
            check_arrived(sender, [receiver], [5, 1], [0, 3])
    assert not heard


def test_what_introductions_make_a_sender_keep_is_bounded_in_bytes(
    engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger may give each of its names end points of 4 MB: 4,096 names would fill the memory."""
    sender, source, receiver, asked = asked_in_a_load(engines)
    [introduced] = [question for question in asked if isinstance(question, Introduce)]
    monkeypatch.setattr(source_module, "MAX_INTRODUCED_BYTES", 3_000_000)
    for name in "abcde":
        stranger = msgspec.structs.replace(introduced, receiver=name, end_points={"none": bytes(1_400_000)})
        assert isinstance(source.writer.answer(stranger), Noted)
    assert [name for name, _, _ in source.writer.destinations.known] == ["d", "e"]
    again = msgspec.structs.replace(introduced, receiver="d", registration=1, end_points={"none": bytes(2_900_000)})
    source.writer.answer(again)
    assert [name for name, _, _ in source.writer.destinations.known] == ["d"]
    # The one that was forgotten is asked to introduce itself again.
    receiver.receive(sender.hold(), [0, 3], job_id="s")
    error = receiver.result().error
    assert error is not None
    assert error.reason is Reason.UNKNOWN_REQUEST
    receiver.receive(sender.hold(), [0, 3], job_id="t")
    assert receiver.result().error is None


def test_the_list_of_introduced_sources_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destination, "MAX_SOURCES", 2)
    client = Mock()
    rank = OwnRank("d", b"", IDENTITY, {}, Mock(), Mock(), Mock(), client)
    receiver = Announcer(rank, EndPoint(HOST, 1, 1), SECONDS, SECONDS)
    for port in (2, 3, 4):
        assert not receiver.introductions.is_introduced(EndPoint(HOST, port, 7), (b"shard",), PROTOCOL_VERSION)
    sent = [Exchange(*call.args[:3], 0.0, answer=Noted(7)) for call in client.send.call_args_list]
    client.collect.return_value = sent
    receiver.collect()
    assert [where.port for where in receiver.introductions._answers] == [3, 4]
    assert receiver.introductions.is_introduced(EndPoint(HOST, 4, 7), (), PROTOCOL_VERSION)


def test_one_check_of_a_peer_serves_all_writes_that_wait_for_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Mock(return_value=False)
    monkeypatch.setattr(peers, "nothing_listens", looks)
    monkeypatch.setattr(peers, "PROBE_AGAIN_SECONDS", 1000.0)
    known, where = Peers(), EndPoint(HOST, 2, 2)
    for _ in range(100):
        assert not known.refuses(where)
        time.sleep(0.001)
    assert looks.call_count == 1
    monkeypatch.setattr(peers, "PROBE_AGAIN_SECONDS", 0.0)
    looks.return_value = True
    wait_until(lambda: known.refuses(where))


def test_a_failed_check_of_a_peer_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Mock(side_effect=ValueError)
    monkeypatch.setattr(peers, "nothing_listens", looks)
    monkeypatch.setattr(peers, "PROBE_AGAIN_SECONDS", 1000.0)
    known = Peers()
    for _ in range(20):
        assert not known.refuses(EndPoint(HOST, 3, 3))
        time.sleep(0.002)
    # A look that an earlier test has begun may come late.
    assert [call.args[1] for call in looks.call_args_list].count(3) == 1


def test_too_many_blocks_for_an_announcement_are_refused_before_any_is_sent(
    engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination, "MAX_ANNOUNCED_BLOCKS", 1)
    sender, [receiver] = engines.open()
    receiver.receive(sender.hold(), [0])
    opened = sender.ranks[0].writer._writes
    wait_until(lambda: opened.num_open == 1, "no announcement comes")
    receiver.receive(sender.hold(), [1, 3], "y", "too long")
    error = receiver.result(5.0).error
    assert error is not None
    assert error.reason is Reason.UNSUPPORTED
    assert opened.num_open == 1


def test_what_a_sender_of_many_ranks_holds_may_be_too_long_to_repeat(
    engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination, "MAX_QUESTION_BYTES", 100)
    sender, [receiver] = engines.open()
    receiver.receive(sender.hold(), [0])
    error = receiver.result(5.0).error
    assert error is not None
    assert error.reason is Reason.UNSUPPORTED


def test_another_prompt_is_refused(engines: Pairs) -> None:
    sender, [receiver] = engines.open()
    receiver.receive(sender.hold(), [0, 3])
    sender.compute(END, [5, 1], digest="another prompt")
    error = receiver.result(5.0).error
    assert error is not None
    assert error.reason is Reason.INVALID_REQUEST


def test_a_sender_that_is_gone_is_an_error_and_its_blocks_come_back(engines: Pairs) -> None:
    sender, [receiver] = engines.open()
    receiver.receive(sender.hold(), [0, 3])
    await_announcement(sender.ranks[0])
    sender.close()
    error = receiver.result(5.0).error
    assert error is not None
    assert error.reason in (Reason.PEER_UNREACHABLE, Reason.CLOSED)


def test_a_host_refuses_only_where_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a name that cannot be looked up now, and not silence."""
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        assert not nothing_listens([HOST], port, SECONDS)
    assert nothing_listens([HOST], port, SECONDS)
    assert not refuses_soon(Peers(), EndPoint("no-such-host.invalid", port, 7))
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=TimeoutError))
    assert not nothing_listens([HOST], port, SECONDS)


def refuses_soon(known: Peers, where: EndPoint) -> bool:
    """Return what a look at the peer has found, once the look has ended."""
    wait_until(lambda: known._probe(where) is not None)
    return known.refuses(where)


def test_a_peer_is_looked_at_only_where_this_engine_may_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's introduction names the address: a rank would try any port of any host for it."""
    connects = Mock(side_effect=ConnectionRefusedError)
    monkeypatch.setattr(socket, "create_connection", connects)
    assert not refuses_soon(Peers(), EndPoint("192.0.2.1", 22, 7))
    assert not connects.called
    assert refuses_soon(Peers(Trust(allowed_hosts=["192.0.2.0/24"])), EndPoint("192.0.2.1", 22, 7))
    assert [call.args[0] for call in connects.call_args_list] == [("192.0.2.1", 22)]


def test_several_requests_and_samples_at_once(engines: Pairs) -> None:
    """Two receivers' requests of one transfer, as parallel samples are, and one of another transfer."""
    sender, [receiver] = engines.open(2, 1)
    pushes = {"0_r": ("x", [0]), "1_r": ("x", [1]), "s": ("y", [2])}
    for job_id, (transfer_id, ids) in pushes.items():
        receiver.receive(sender.hold(), ids, transfer_id, job_id)
    for transfer_id, source in (("y", [3]), ("x", [5])):
        sender.compute(END, source, transfer_id)
    results: list[JobResult] = []
    end = time.monotonic() + SECONDS
    while len(results) < 3 and time.monotonic() < end:
        results += receiver.executor.collect()
        time.sleep(0.002)
    assert {result.job_id: result.error for result in results} == dict.fromkeys(pushes)
    check_arrived(sender, [receiver], [5, 5, 3], [0, 1, 2])


def test_a_preempted_prompt_is_pushed_again(engines: Pairs) -> None:
    sender, receivers = engines.open()
    receivers[0].receive(sender.hold(), [0, 3])
    sender.compute(BLOCK_SIZE, [5, 1])
    time.sleep(0.1)
    sender.ranks[0].writer.preempt(["x"])
    sender.ranks[0].rank.cache[[5, 1]] = 0
    sender.compute(END, [2, 4])
    assert receivers[0].result().error is None
    arrived, sent = receivers[0].rank.cache[3], sender.ranks[0].rank.cache[4]
    assert np.array_equal(arrived, sent)


def layer_bytes(rank: Rank, block: int, layer: int) -> np.ndarray:
    """Return a layer's bytes of a block of a rank with all heads: heads lie one after the other, layers within."""
    return rank.cache[block].reshape(HEADS, len(LAYERS), -1)[:, layer]


def test_a_layer_arrives_before_the_next_has_run(engines: Pairs) -> None:
    sender, [receiver] = engines.open(batches=Batches.SPANS)
    receiver.receive(sender.hold(), [0, 3])
    [source] = sender.ranks
    prompt = Prompt(2 * BLOCK_SIZE, "prompt", {"full": BlockList(0, [5, 1])}, END)
    assert receiver.is_waiting()
    source.writer.begin_step([("x", prompt)])
    source.writer.reach("0")
    for block, target in ((5, 0), (1, 3)):
        wait_until(
            lambda block=block, target=target: np.array_equal(
                layer_bytes(receiver.rank, target, 0), layer_bytes(source.rank, block, 0)
            )
        )
        assert not layer_bytes(receiver.rank, target, 1).any()
    assert receiver.is_waiting()
    source.writer.reach("1")
    source.writer.compute([("x", prompt)])
    assert receiver.result().error is None
    check_arrived(sender, [receiver], [5, 1], [0, 3])


def test_layers_of_a_later_step_do_not_vouch_for_what_it_has_not_run(engines: Pairs) -> None:
    """A step forgets which layers the one before had run."""
    sender, [receiver] = engines.open(batches=Batches.SPANS)
    receiver.receive(sender.hold(), [0, 3])
    [source] = sender.ranks
    first = Prompt(2 * BLOCK_SIZE, "prompt", {"full": BlockList(0, [5, 1])}, BLOCK_SIZE)
    last = Prompt(2 * BLOCK_SIZE, "prompt", {"full": BlockList(0, [5, 1])}, END)
    source.writer.begin_step([("x", first)])
    for layer in LAYERS:
        source.writer.reach(layer)
    source.writer.compute([("x", first)])
    source.writer.begin_step([("x", last)])
    wait_until(lambda: np.array_equal(receiver.rank.cache[0], source.rank.cache[5]))
    assert receiver.is_waiting()
    assert not receiver.rank.cache[3].any()
    source.writer.compute([("x", last)])
    assert receiver.result().error is None


def test_a_whole_prompt_goes_when_it_has_been_computed(engines: Pairs) -> None:
    sender, [receiver] = engines.open(batches=Batches.WHOLE)
    receiver.receive(sender.hold(), [0, 3])
    sender.compute(BLOCK_SIZE, [5, 1])
    assert receiver.is_waiting()
    assert not receiver.rank.cache.any()
    sender.compute(END, [5, 1])
    assert receiver.result().error is None
    check_arrived(sender, [receiver], [5, 1], [0, 3])
    [result] = sender.written(1)
    assert [len(batch["spans"]) for batch in result.events["batches"]] == [1]


def step(source: SendingRank, transfer_id: str, ids: Sequence[int], seconds_per_layer: float) -> None:
    """Compute a prompt in one step, in which every layer takes so long and tells when it has run."""
    num_tokens = len(ids) * BLOCK_SIZE
    prompt = Prompt(num_tokens, "prompt", {"full": BlockList(0, ids)}, END)
    source.writer.begin_step([(transfer_id, prompt)])
    for layer in LAYERS:
        time.sleep(seconds_per_layer)
        source.writer.reach(layer)
    source.writer.compute([(transfer_id, prompt)])


def test_events_show_each_span_pushed_while_the_next_is_computed(engines: Pairs) -> None:
    sender, [receiver] = engines.open(batches=Batches.SPANS)
    [source] = sender.ranks
    receiver.receive(sender.hold(), [0, 3])
    await_announcement(sender.ranks[0])
    step(source, "x", [5, 1], seconds_per_layer=0.1)
    received = receiver.result().events
    [result] = sender.written(1)
    sent, [computed] = result.events, source.writer.take_steps()
    assert source.writer.take_steps() == []
    first, second = sent["batches"]
    assert [batch["spans"] for batch in (first, second)] == [
        [{"group": "full", "layers": [layer], "tokens": [0, 2 * BLOCK_SIZE]}] for layer in LAYERS
    ]
    assert sum(batch["bytes"] for batch in (first, second)) == result.num_bytes
    assert sum(batch["descriptors"] for batch in (first, second)) == result.num_descriptors
    assert computed["prompts"] == {"x": 2 * BLOCK_SIZE}
    times = [
        received["ordered_at"],
        received["announced_at"]["0"],
        sent["announced_at"],
        computed["step_began_at"],
        computed["ran_at"]["0"],
        first["posted_at"],
        first["landed_at"],
        computed["ran_at"]["1"],
        second["posted_at"],
        second["landed_at"],
        sent["reported_at"],
        received["done_at"]["0"],
        received["committed_at"],
    ]
    assert times == sorted(times)
    assert computed["step_ended_at"] >= computed["ran_at"]["1"]
    phases = received["phases"]
    assert sum(phases.values()) == pytest.approx(received["committed_at"] - received["ordered_at"])
    assert min(phases.values()) >= 0
    assert phases["move"] == pytest.approx(result.transfer_seconds)
    # Two layers of 0.1 s, less the first batch, which moves meanwhile.
    first_seconds = first["landed_at"] - first["posted_at"]
    assert phases["post"] == pytest.approx(second["posted_at"] - sent["announced_at"] - first_seconds, abs=0.02)
    assert phases["post"] > 0.15
    for record in (sent, received, computed):
        assert json.loads(json.dumps(record)) == record


def test_a_prompt_that_was_computed_before_its_blocks_were_announced_goes_whole(engines: Pairs) -> None:
    sender, [receiver] = engines.open(batches=Batches.SPANS)
    for transfer_id, num_batches in (("x", len(LAYERS)), ("y", 1)):
        if transfer_id == "x":
            receiver.receive(sender.hold(), [0, 3], transfer_id)
            await_announcement(sender.ranks[0])
        step(sender.ranks[0], transfer_id, [5, 1], seconds_per_layer=0.1)
        if transfer_id == "y":
            receiver.receive(sender.hold(), [0, 3], transfer_id)
        assert receiver.result().error is None
        check_arrived(sender, [receiver], [5, 1], [0, 3])
        [result] = sender.written(1)
        assert [len(batch["spans"]) for batch in result.events["batches"]] == [1] * num_batches
        receiver.rank.cache[:] = 0


def test_a_reset_before_the_first_step_refuses_announcements_of_the_former_epoch(engines: Pairs) -> None:
    """New weights before the first request: the rank has not heard from its engine yet."""
    sender, [receiver] = engines.open()
    writer = sender.ranks[0].writer
    assert writer.engine is None
    writer.end_epoch(EPOCH + 1)
    receiver.receive(sender.hold(), [0, 3])
    sender.compute(END, [5, 1])
    error = receiver.result().error
    assert error is not None
    assert error.reason is Reason.PEER_CHANGED


def test_one_late_answer_to_a_repeated_announcement_fails_no_load(
    engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source has taken the announcement, and is asked each two seconds whether it is done."""
    monkeypatch.setattr(handoff_destination, "ASK_AGAIN_SECONDS", 0.2)
    sender, [receiver] = engines.open()
    receiver.announcer._answer_seconds = 0.5
    [rank] = sender.ranks
    inner, asked = rank.answerer, list[Question]()

    def answer(question: Question) -> Answer:
        if isinstance(question, Announce):
            asked.append(question)
            if len(asked) == 2:
                time.sleep(1.0)
        return inner.answer(question)

    rank.answerer = SimpleNamespace(answer=answer)
    receiver.receive(sender.hold(), [0, 3])
    wait_until(lambda: len(asked) >= 2)
    time.sleep(1.5)
    sender.compute(END, [5, 1])
    assert receiver.result().error is None
    check_arrived(sender, [receiver], [5, 1], [0, 3])
