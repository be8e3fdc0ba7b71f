"""The server over real sockets: after any input the server answers the next question."""

import errno
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from kvferry.errors import HandoffError, Reason
from kvferry.handoff import messages as protocol
from kvferry.handoff.messages import (
    PROTOCOL_VERSION,
    Answer,
    Directory,
    DirectoryRequest,
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
from kvferry.handoff.wire.server import Server
from kvferry.handoff.wire.zmtp import DEALERS_HELLO, LONG, MORE, Inbox, encode_message

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


def send_and_receive(port: int, frames: list[bytes], wait_seconds: float = 0.05) -> list[bytes] | None:
    client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    with client:
        client.setsockopt(zmq.LINGER, 500)
        client.connect(f"tcp://{HOST}:{port}")
        client.send_multipart(frames)
        return client.recv_multipart() if client.poll(int(wait_seconds * 1000)) else None


@pytest.mark.parametrize("frames", [[b""], [b"x"], [b"a", b"b", b"c"], [b"", b"", b"", b""], [NOISE] * 5])
def test_frames_that_are_no_question_are_ignored(listener: Server, frames: list[bytes]) -> None:
    assert send_and_receive(listener.port, frames) is None
    assert answers(listener)


@pytest.mark.parametrize("data", [b"", b"\x80", b"cposix\nsystem\n", NOISE[:64], b"\x91" * 50_000])
def test_bytes_that_are_no_question_are_refused(listener: Server, data: bytes) -> None:
    frames = send_and_receive(listener.port, [b"my sequence", data], wait_seconds=20)
    assert frames is not None
    sequence, refusal = frames[0], decode_answer(frames[1])
    assert sequence == b"my sequence"
    assert isinstance(refusal, Refusal)
    assert refusal.reason == Reason.MALFORMED_MESSAGE
    assert answers(listener)


def test_a_message_over_the_bound_is_not_even_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_QUESTION_BYTES", 1024)
    small = Server(HOST, 0, answer)
    try:
        assert send_and_receive(small.port, [b"1", bytes(1025)], wait_seconds=0.3) is None
        assert send_and_receive(small.port, [b"1", bytes(1024)], wait_seconds=20) is not None
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
    flooder: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    flooder.setsockopt(zmq.LINGER, 0)
    flooder.setsockopt(zmq.SNDHWM, 1)
    flooder.connect(f"tcp://{HOST}:{busy.port}")
    try:
        flooder.send_multipart([b"1", encode(Release(7, ()))])
        assert is_asked.wait(20)
        num_sent = 0
        while num_sent < 200 and flooder.poll(500, zmq.POLLOUT):
            flooder.send_multipart([b"1", bytes(1 << 20)])
            num_sent += 1
        assert 1 < num_sent < 100, "beside the waiting ones the kernel's buffers hold some"
    finally:
        flooder.close()
        may_answer.set()
        busy.close()


def test_bytes_that_are_not_even_zmq_are_survived(listener: Server) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", NOISE[:256], b"\xff" * 64):
        with socket.create_connection((HOST, listener.port)) as client:
            client.sendall(data)
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


class RawPeer:
    """A connection that speaks ZMTP only as far as the test does, and reads only on command."""

    def __init__(self, listener: Server, *sent: bytes) -> None:
        self.socket = socket.create_connection((HOST, listener.port), timeout=20)
        self.say(DEALERS_HELLO, *sent)

    def say(self, *sent: bytes) -> None:
        self.socket.sendall(b"".join(sent))

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


def frame(flags: int, body: bytes) -> bytes:
    return bytes((flags | LONG,)) + len(body).to_bytes(8, "big") + body


def test_a_message_that_never_ends_is_not_kept(listener: Server) -> None:
    """A zmq socket would keep all of its frames, each within the bound, until the last has come."""
    peer = RawPeer(listener)
    with suppress(ConnectionError):
        peer.say(*[frame(MORE, bytes(1 << 20))] * 3)
    wait_until(lambda: peer.is_closed)
    assert answers(listener)


def test_a_frame_that_is_only_announced_is_refused_at_once(listener: Server) -> None:
    peer = RawPeer(listener, bytes((LONG,)) + (1 << 62).to_bytes(8, "big"))
    wait_until(lambda: peer.is_closed)
    assert answers(listener)


def test_a_peer_may_take_its_time(listener: Server) -> None:
    """Byte by byte; and the next question may come before the last is answered."""
    question = encode_message(b"1", encode(Release(7, ())))
    peer = RawPeer(listener)
    for byte in question[:-1]:
        peer.say(bytes((byte,)))
    peer.say(question[-1:], question.replace(b"\x011", b"\x012"))
    inbox = Inbox(2, 1000)
    found = []
    while len(found) < 2:
        inbox.add(peer.socket.recv(7))
        while (message := inbox.take()) is not None:
            found.append(message)
    assert found == [[number, encode(Noted(7))] for number in (b"1", b"2")]


def test_the_longest_idle_connection_closes_when_there_are_too_many(
    listener: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 3)
    asked, *silent = [RawPeer(listener) for _ in range(3)]
    wait_until(lambda: len(listener._connections) == 3)
    asked.say(encode_message(b"1", encode(Release(7, ()))))
    assert asked.socket.recv(1000).startswith(b"\xff")
    time.sleep(0.05)
    more = RawPeer(listener)
    wait_until(lambda: silent[0].is_closed)
    assert [peer.is_closed for peer in (asked, silent[1], more)] == [False] * 3
    assert len(listener._connections) == 3
    assert answers(listener)


def test_a_zmq_peer_that_gave_way_asks_again(listener: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 1)
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
    announced = bytes((MORE | LONG,)) + (4 << 20).to_bytes(8, "big")
    small, large = RawPeer(listener, announced, bytes(1 << 20)), RawPeer(listener, announced, bytes((2 << 20) - 1000))
    wait_until(lambda: sum(each.num_bytes for each in list(listener._connections)) > (3 << 20) - 2000)
    assert not small.is_closed
    assert not large.is_closed
    small.say(bytes(2000))
    wait_until(lambda: large.is_closed)
    assert not small.is_closed
    assert answers(listener)


def long_answers(asked: list[Question]) -> Server:
    """Answer handshakes with six megabytes, more than the kernel takes at once."""
    identity = Identity("model", "weights", "Qwen3ForCausalLM", "float32", 2, 4, 8, "none", "float32")
    entry = RankEntry(0, 0, bytes(6 << 20), {}, 0, 1)

    def answer_at_length(question: Question) -> Answer:
        asked.append(question)
        is_handshake = isinstance(question, DirectoryRequest)
        return Directory(PROTOCOL_VERSION, "prefill", 7, identity, (entry,)) if is_handshake else Noted(7)

    return Server(HOST, 0, answer_at_length)


def handshakes(count: int, sender: str) -> bytes:
    question = encode(DirectoryRequest(PROTOCOL_VERSION, sender))
    return b"".join(encode_message(bytes((number,)), question) for number in range(count))


def test_a_peer_that_takes_no_answer_waits_with_its_questions_and_loses_none() -> None:
    asked: list[Question] = []
    listener = long_answers(asked)
    try:
        peer = RawPeer(listener, handshakes(10, "slow"))
        wait_until(lambda: bool(asked) and any(len(each.unsent) > 1000 for each in list(listener._connections)))
        time.sleep(0.1)
        assert len(asked) < 8, "the kernel's buffers hold some"
        assert sum(each.num_bytes for each in list(listener._connections)) < 7 << 20
        inbox, numbers = Inbox(2, 8 << 20), []
        while len(numbers) < 10:
            inbox.add(peer.socket.recv(1 << 20))
            while (message := inbox.take()) is not None:
                assert isinstance(decode_answer(message[1]), Directory)
                numbers.append(message[0][0])
        assert numbers == list(range(10))
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


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)
