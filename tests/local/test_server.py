"""The server over real sockets: after any input the server answers the next question."""

import errno
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.handoff import messages as protocol
from kvferry.handoff.messages import (
    PROTOCOL_VERSION,
    Answer,
    Directory,
    DirectoryRequest,
    EndPoint,
    Identity,
    Noted,
    Question,
    RankEntry,
    Refusal,
    Release,
    Renew,
    Renewed,
    decode_answer,
    encode,
)
from kvferry.handoff.wire import server as server_module
from kvferry.handoff.wire.client import Client, ask
from kvferry.handoff.wire.server import Frame, Server

from ..waits import wait_until

HOST = "127.0.0.1"
NOISE = random.Random(0).randbytes(1000)


def answer(question: Question) -> Answer:
    if isinstance(question, Renew):
        raise HandoffError(Reason.PEER_CHANGED, "another epoch.")
    if question.epoch == 13:  # type: ignore[union-attr]
        raise RuntimeError("a fault in the engine")
    if question.epoch == 14:  # type: ignore[union-attr]
        return Noted(1 << 70)  # cannot be encoded
    return Noted(question.epoch)  # type: ignore[union-attr]


@pytest.fixture
def listener() -> Iterator[Server]:
    listener = Server(HOST, 0, answer)
    yield listener
    listener.close()


def test_close_returns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.handoff.wire.server.POLL_SECONDS", 60.0)
    listener = Server(HOST, 0, answer)
    wait_until(lambda: listener._thread.is_alive())
    listener.close()
    assert not listener._thread.is_alive()
    listener.close()


def answers(listener: Server) -> bool:
    return ask(HOST, listener.port, Release(7, ()), timeout_seconds=20) == Noted(7)


def frame(number: int, message: bytes) -> bytes:
    return len(message).to_bytes(4, "big") + number.to_bytes(8, "big") + message


def ends_of(data: bytes) -> list[int]:
    """Return where each whole frame ends."""
    ends = [0]
    while len(data) >= ends[-1] + 12 and len(data) >= (
        end := ends[-1] + 12 + int.from_bytes(data[ends[-1] : ends[-1] + 4], "big")
    ):
        ends.append(end)
    return ends[1:]


class RawPeer:
    """A connection that says only what the test says, and reads only on command."""

    def __init__(self, listener: Server, *sent: bytes) -> None:
        self.socket = socket.create_connection((HOST, listener.port), timeout=20)
        self.say(*sent)

    def say(self, *sent: bytes) -> None:
        self.socket.sendall(b"".join(sent))

    def hear(self, number: int = 1, most: int = 1 << 20) -> list[Frame]:
        """Return so many frames, or those that come before the listener closes the connection."""
        data = b""
        with suppress(ConnectionError):
            while len(ends_of(data)) < number and (more := self.socket.recv(most)):
                data += more
        frames = [data[begin:end] for begin, end in pairwise([0, *ends_of(data)])]
        return [Frame(int.from_bytes(each[4:12], "big"), each[12:]) for each in frames]

    @property
    def is_closed(self) -> bool:
        """Whether the listener has closed it; waits for what is on its way."""
        self.socket.settimeout(0.02)
        try:
            while self.socket.recv(1 << 20):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        finally:
            self.socket.settimeout(20)
        return True


@pytest.mark.parametrize("data", [b"", b"\x80", b"cposix\nsystem\n", NOISE[:64], b"\x91" * 50_000])
def test_bytes_that_are_no_question_are_refused(listener: Server, data: bytes) -> None:
    [[number, message]] = RawPeer(listener, frame(77, data)).hear()
    refusal = decode_answer(message)
    assert number == 77
    assert isinstance(refusal, Refusal)
    assert refusal.reason == Reason.MALFORMED_MESSAGE
    assert answers(listener)


def refusal_of_connection(peer: RawPeer) -> Refusal:
    """Return what the listener says before it closes the connection."""
    [[number, message]] = peer.hear()
    refusal = decode_answer(message)
    assert number == 0
    assert isinstance(refusal, Refusal)
    wait_until(lambda: peer.is_closed)
    return refusal


def test_a_message_over_the_bound_is_not_even_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_QUESTION_BYTES", 1024)
    small = Server(HOST, 0, answer)
    try:
        refusal = refusal_of_connection(RawPeer(small, frame(1, bytes(1025))[:4]))
        assert refusal.reason == Reason.MALFORMED_MESSAGE
        assert "1025" in refusal.message
        assert RawPeer(small, frame(1, bytes(1024))).hear()[0].number == 1
        assert answers(small)
    finally:
        small.close()


def test_a_peer_that_only_asks_has_few_questions_waiting() -> None:
    """It reads no answer, and the engine is busy: what it sends stays on its side."""
    is_asked, may_answer = threading.Event(), threading.Event()

    def answer_later(question: Question) -> Answer:
        is_asked.set()
        may_answer.wait(20)
        return Noted(7)

    busy = Server(HOST, 0, answer_later)
    try:
        flooder = RawPeer(busy, frame(1, encode(Release(7, ()))))
        assert is_asked.wait(20)
        flooder.socket.settimeout(0.5)
        num_sent = 0
        with suppress(TimeoutError):
            while num_sent < 200:
                flooder.say(frame(1, bytes(1 << 20)))
                num_sent += 1
        assert num_sent < 100, "beside the waiting ones the kernel's buffers hold some"
    finally:
        may_answer.set()
        busy.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, NOISE[:256]])
def test_bytes_that_are_no_frame_are_refused_at_once(listener: Server, data: bytes) -> None:
    assert refusal_of_connection(RawPeer(listener, data)).reason == Reason.MALFORMED_MESSAGE
    assert answers(listener)


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (Renew(7, ()), Reason.PEER_CHANGED),
        (Release(13, ()), Reason.UNSUPPORTED),
        (Release(14, ()), Reason.UNSUPPORTED),
    ],
)
def test_a_question_without_an_answer_is_refused(listener: Server, question: Question, reason: Reason) -> None:
    with pytest.raises(HandoffError) as caught:
        ask(HOST, listener.port, question, timeout_seconds=20)
    assert caught.value.reason is reason
    assert answers(listener)


def test_peers_do_not_see_the_text_of_an_unexpected_error(listener: Server) -> None:
    with pytest.raises(HandoffError) as caught:
        ask(HOST, listener.port, Release(13, ()), timeout_seconds=20)
    assert "a fault in the engine" not in str(caught.value)


def test_a_reason_of_a_later_version_is_a_protocol_mismatch() -> None:
    refusing = Server(HOST, 0, lambda question: Refusal("a-later-reason", "no"))
    try:
        with pytest.raises(HandoffError) as caught:
            ask(HOST, refusing.port, Release(7, ()), timeout_seconds=20)
        assert caught.value.reason is Reason.PROTOCOL_MISMATCH
    finally:
        refusing.close()


def test_a_peer_may_take_its_time(listener: Server) -> None:
    """Byte by byte; and the next question may come before the last is answered."""
    question = encode(Release(7, ()))
    peer = RawPeer(listener)
    for byte in frame(1, question)[:-1]:
        peer.say(bytes((byte,)))
    peer.say(frame(1, question)[-1:], frame(2, question))
    assert peer.hear(2, most=7) == [Frame(number, encode(Noted(7))) for number in (1, 2)]


@pytest.fixture
def seconds_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer may leave unfinished for seconds ends after hundredths of them."""
    monkeypatch.setattr(server_module, "SECOND", 0.01)
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.01)


@pytest.mark.usefixtures("seconds_are_short")
@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (b"", "to ask"),
        (frame(1, b"question")[:7], "to ask"),
        (frame(1, encode(Release(7, ()))) + frame(2, b"question")[:-1], "for a message"),
    ],
    ids=["says nothing", "never asks", "never finishes its second question"],
)
def test_half_open_and_slow_peers_are_closed_at_their_deadline(listener: Server, sent: bytes, problem: str) -> None:
    peer = RawPeer(listener, sent)
    *answered, last = peer.hear(2 if len(sent) > 12 else 1)
    refusal = decode_answer(last.message)
    assert [each.number for each in answered] == [1][: len(answered)]
    assert isinstance(refusal, Refusal)
    assert refusal.reason == Reason.DEADLINE_EXCEEDED
    assert problem in refusal.message
    assert answers(listener)


@pytest.mark.usefixtures("seconds_are_short")
def test_a_peer_that_takes_no_answer_is_closed_at_its_deadline() -> None:
    asked: list[Question] = []
    listener = long_answers(asked)
    try:
        peer = RawPeer(listener, handshakes(3, "slow"))
        wait_until(lambda: bool(asked) and not listener._connections)
        assert len(peer.hear(3)) < 3
        assert answers(listener)
    finally:
        listener.close()


@pytest.mark.usefixtures("seconds_are_short")
def test_a_peer_that_has_asked_may_be_idle(listener: Server) -> None:
    peer = RawPeer(listener, frame(1, encode(Release(7, ()))))
    assert peer.hear()
    time.sleep(0.3)
    assert not peer.is_closed
    peer.say(frame(2, encode(Release(7, ()))))
    assert peer.hear()[0].number == 2


def test_too_many_connections_close_the_longest_idle_one(listener: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """First one that has never asked."""
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(server_module, "NEWCOMER_SECONDS", 0.0)
    listener._max_connections = 3
    asked = [RawPeer(listener, frame(1, encode(Release(7, ())))) for _ in range(2)]
    assert all(peer.hear() for peer in asked)
    silent = RawPeer(listener)
    wait_until(lambda: len(listener._connections) == 3)
    more = RawPeer(listener, frame(1, encode(Release(7, ()))))
    assert more.hear()
    assert silent.is_closed
    assert [peer.is_closed for peer in (*asked, more)] == [False] * 3
    another = RawPeer(listener, frame(1, encode(Release(7, ()))))
    assert another.hear()
    assert [peer.is_closed for peer in (*asked, more)] == [True, False, False]
    assert len(listener._connections) == 3


def test_more_peers_than_connections_evict_no_busy_one(
    listener: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One more waits in the kernel until another has been idle for a while: else they would evict each other."""
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 0.5)
    listener._max_connections = 3
    peers = [RawPeer(listener, frame(1, encode(Release(7, ())))) for _ in range(3)]
    assert all(peer.hear() for peer in peers)
    began_at = time.monotonic()
    more = RawPeer(listener, frame(1, encode(Release(7, ()))))
    for _ in range(3):
        time.sleep(0.1)
        for peer in peers[1:]:
            peer.say(frame(2, encode(Release(7, ()))))
            assert peer.hear()
    assert more.hear()
    assert time.monotonic() - began_at > 0.4
    assert [peer.is_closed for peer in (*peers, more)] == [True, False, False, False]
    assert len(caplog.messages) == 1


def test_a_client_that_gave_way_asks_again(listener: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 0.0)
    listener._max_connections = 1
    client, others = Client(), []
    try:
        for _ in range(3):
            client.send(HOST, listener.port, Release(7, ()), timeout_seconds=20)
            wait_until(lambda: [exchange.answer for exchange in client.collect()] == [Noted(7)])
            others.append(RawPeer(listener))
    finally:
        client.close()


def test_what_all_connections_keep_is_bounded_and_the_one_that_keeps_most_closes(
    listener: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_KEPT_BYTES", 3 << 20)
    announced = frame(1, bytes(4 << 20))[:12]
    small, large = RawPeer(listener, announced, bytes(1 << 20)), RawPeer(listener, announced, bytes((2 << 20) - 1000))
    wait_until(lambda: sum(each.num_bytes for each in list(listener._connections)) > (3 << 20) - 2000)
    assert not small.is_closed
    assert not large.is_closed
    small.say(bytes(2000))
    wait_until(lambda: large.is_closed)
    assert not small.is_closed
    assert answers(listener)
    wait_until(lambda: listener._num_kept_bytes == sum(each.num_bytes for each in list(listener._connections)))
    small.socket.close()
    wait_until(lambda: (listener._num_kept_bytes, listener._kept_bytes) == (0, {}))


def long_answers(asked: list[Question]) -> Server:
    """Answer handshakes with six megabytes, more than the kernel takes at once."""
    identity = Identity("model", "weights", "Qwen3ForCausalLM", "float32", 2, 4, 8, "none", "float32")
    entry = RankEntry(0, 0, bytes(6 << 20), {}, EndPoint("127.0.0.1", 1, 0))

    def answer_at_length(question: Question) -> Answer:
        asked.append(question)
        is_handshake = isinstance(question, DirectoryRequest)
        return Directory(PROTOCOL_VERSION, "prefill", 7, identity, (entry,)) if is_handshake else Noted(7)

    return Server(HOST, 0, answer_at_length)


def handshakes(count: int, sender: str) -> bytes:
    question = encode(DirectoryRequest(PROTOCOL_VERSION, PROTOCOL_VERSION, sender))
    return b"".join(frame(number, question) for number in range(count))


def test_a_peer_that_takes_no_answer_waits_with_its_questions_and_loses_none() -> None:
    asked: list[Question] = []
    listener = long_answers(asked)
    try:
        peer = RawPeer(listener, handshakes(10, "slow"))
        wait_until(lambda: bool(asked) and any(each.num_unsent > 1000 for each in list(listener._connections)))
        time.sleep(0.1)
        assert len(asked) < 8, "the kernel's buffers hold some"
        assert sum(each.num_bytes for each in list(listener._connections)) < 7 << 20
        heard = peer.hear(10)
        assert [each.number for each in heard] == list(range(10))
        assert all(isinstance(decode_answer(each.message), Directory) for each in heard)
    finally:
        listener.close()


def test_answers_that_nobody_takes_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_KEPT_BYTES", 8 << 20)
    asked: list[Question] = []
    listener = long_answers(asked)
    try:
        peers = [RawPeer(listener, handshakes(10, str(number))) for number in range(6)]
        wait_until(lambda: len({question.sender for question in asked}) == len(peers))  # type: ignore[union-attr]
        wait_until(lambda: len(listener._connections) < len(peers))
        assert sum(each.num_bytes for each in list(listener._connections)) < 16 << 20
        assert answers(listener)
    finally:
        listener.close()


def test_a_process_without_a_descriptor_left_goes_on_answering(
    listener: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "NEWCOMER_SECONDS", 0.0)
    idle, accept, refused = RawPeer(listener), socket.socket.accept, []
    wait_until(lambda: len(listener._connections) == 1)

    def accept_later(self: socket.socket) -> tuple[socket.socket, object]:
        if not refused:
            refused.append(True)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    assert answers(listener)
    assert idle.is_closed
    assert refused


def test_upkeep_runs_while_nothing_arrives_and_may_fail() -> None:
    calls: list[float] = []

    def upkeep() -> None:
        calls.append(time.monotonic())
        raise RuntimeError("upkeep failed")

    listener = Server(HOST, 0, answer, upkeep)
    try:
        wait_until(lambda: len(calls) >= 3)
        assert answers(listener)
    finally:
        listener.close()


def test_upkeep_is_not_starved_by_questions() -> None:
    calls: list[float] = []
    listener = Server(HOST, 0, answer, lambda: calls.append(time.monotonic()))
    try:
        end = time.monotonic() + 20
        while len(calls) < 3 and time.monotonic() < end:
            assert answers(listener)
        assert len(calls) == 3
        assert calls[-1] - calls[0] > 0.35, "not once per question"
    finally:
        listener.close()


def test_port_zero_takes_a_free_port_and_two_listeners_two(listener: Server) -> None:
    other = Server(HOST, 0, answer)
    try:
        assert 0 < listener.port != other.port > 0
        assert answers(other)
    finally:
        other.close()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_an_ipv6_address_is_listened_on_and_asked() -> None:
    for host in ("::1", "[::1]"):
        listener = Server(host, 0, answer)
        try:
            assert ask(host, listener.port, Release(7, ()), timeout_seconds=20) == Noted(7)
        finally:
            listener.close()


def test_a_port_in_use_is_named_with_the_remedy(listener: Server) -> None:
    with pytest.raises(HandoffError) as caught:
        Server(HOST, listener.port, answer)
    assert caught.value.reason is Reason.PORT_IN_USE
    assert f"{HOST}:{listener.port}" in caught.value.message
    assert '"port"' in caught.value.remedy
    assert answers(listener)


def test_the_first_free_port_of_a_range_is_taken(listener: Server) -> None:
    following = Server(HOST, range(listener.port, listener.port + 50), answer)
    try:
        assert listener.port < following.port < listener.port + 50
        assert answers(following)
        with pytest.raises(HandoffError) as caught:
            Server(HOST, range(listener.port, listener.port + 1), answer)
        assert caught.value.reason is Reason.PORT_IN_USE
        assert f"{HOST}: each port from {listener.port} to {listener.port}" in caught.value.message
        assert '"rank_ports"' in caught.value.remedy
    finally:
        following.close()


def test_a_range_hides_no_other_problem_than_ports_in_use() -> None:
    with pytest.raises(HandoffError) as caught:
        Server("203.0.113.1", range(5700, 5800), answer)
    assert caught.value.reason is Reason.INVALID_SETTING
    assert "203.0.113.1:5700" in caught.value.message


def test_an_address_of_another_machine_is_an_invalid_setting() -> None:
    with pytest.raises(HandoffError) as caught:
        Server("203.0.113.1", 0, answer)
    assert caught.value.reason is Reason.INVALID_SETTING
    assert '"host"' in caught.value.remedy


def test_a_closed_listener_gives_its_port_back(listener: Server) -> None:
    listener.close()
    listener.close()
    assert not listener._thread.is_alive()
    wait_until(lambda: is_free(listener.port))
    successor = Server(HOST, listener.port, answer)
    try:
        assert answers(successor)
    finally:
        successor.close()


def test_a_full_answer_travels_whole() -> None:
    handles = tuple(protocol.Handle("r" * 500, number) for number in range(protocol.MAX_REQUESTS_PER_MESSAGE))
    listener = Server(HOST, 0, lambda question: Renewed(7, 60.0, question.handles))  # type: ignore[union-attr]
    try:
        renewed = ask(HOST, listener.port, Renew(7, handles), timeout_seconds=20)
        assert isinstance(renewed, Renewed)
        assert renewed.lost == handles
        assert len(encode(renewed)) > 500_000
    finally:
        listener.close()


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex((HOST, port)) != 0
