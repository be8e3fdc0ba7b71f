"""The control end point over real sockets: whatever arrives, it answers the next question."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kvferry.errors import HandoffError, Reason
from kvferry.handoff import protocol
from kvferry.handoff.courier import ask
from kvferry.handoff.listener import Listener
from kvferry.handoff.protocol import Answer, Question, Refusal, Release, Released, Renew, Renewed, decode_answer, encode

HOST = "127.0.0.1"


def answer(question: Question) -> Answer:
    if isinstance(question, Renew):
        raise HandoffError(Reason.PEER_CHANGED, "another epoch.")
    if question.epoch == 13:  # type: ignore[union-attr]
        raise RuntimeError("a fault in the holder")
    if question.epoch == 14:  # type: ignore[union-attr]
        return Released(1 << 70)  # cannot be encoded
    return Released(question.epoch)  # type: ignore[union-attr]


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener(HOST, 0, answer)
    yield listener
    listener.close()


def answers(listener: Listener) -> bool:
    return ask(HOST, listener.port, Release(7, ()), timeout_seconds=20) == Released(7)


def send_and_receive(port: int, frames: list[bytes], wait_seconds: float = 0.05) -> list[bytes] | None:
    client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    with client:
        client.setsockopt(zmq.LINGER, 500)
        client.connect(f"tcp://{HOST}:{port}")
        client.send_multipart(frames)
        return client.recv_multipart() if client.poll(int(wait_seconds * 1000)) else None


@pytest.mark.parametrize("frames", [[b""], [b"x"], [b"a", b"b", b"c"], [b"", b"", b"", b""], [os.urandom(1000)] * 5])
def test_frames_that_are_no_question_are_ignored(listener: Listener, frames: list[bytes]) -> None:
    assert send_and_receive(listener.port, frames) is None
    assert answers(listener)


@pytest.mark.parametrize("data", [b"", b"\x80", b"cposix\nsystem\n", os.urandom(64), b"\x91" * 50_000])
def test_bytes_that_are_no_question_are_refused(listener: Listener, data: bytes) -> None:
    frames = send_and_receive(listener.port, [b"my sequence", data], wait_seconds=20)
    assert frames is not None
    sequence, refusal = frames[0], decode_answer(frames[1])
    assert sequence == b"my sequence"
    assert isinstance(refusal, Refusal)
    assert refusal.reason == Reason.MALFORMED_MESSAGE
    assert answers(listener)


def test_a_message_over_the_bound_is_not_even_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_QUESTION_BYTES", 1024)
    small = Listener(HOST, 0, answer)
    try:
        assert send_and_receive(small.port, [b"1", bytes(1025)], wait_seconds=0.3) is None
        assert send_and_receive(small.port, [b"1", bytes(1024)], wait_seconds=20) is not None
        assert answers(small)
    finally:
        small.close()


def test_a_peer_that_only_asks_has_few_questions_waiting() -> None:
    """It reads no answer, and the holder is busy: what it sends stays on its side."""
    is_asked, may_answer = threading.Event(), threading.Event()

    def answer_later(question: Question) -> Answer:
        is_asked.set()
        may_answer.wait(20)
        return Released(7)

    busy = Listener(HOST, 0, answer_later)
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


def test_bytes_that_are_not_even_zmq_are_survived(listener: Listener) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(256), b"\xff" * 64):
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
def test_what_the_holder_cannot_answer_is_refused(listener: Listener, question: Question, reason: Reason) -> None:
    with pytest.raises(HandoffError) as caught:
        ask(HOST, listener.port, question, timeout_seconds=20)
    assert caught.value.reason is reason
    assert answers(listener)


def test_a_fault_of_the_holder_is_not_told_to_peers(listener: Listener) -> None:
    with pytest.raises(HandoffError) as caught:
        ask(HOST, listener.port, Release(13, ()), timeout_seconds=20)
    assert "a fault in the holder" not in str(caught.value)


def test_a_reason_of_a_later_version_is_a_protocol_mismatch() -> None:
    refusing = Listener(HOST, 0, lambda question: Refusal("a-later-reason", "no"))
    try:
        with pytest.raises(HandoffError) as caught:
            ask(HOST, refusing.port, Release(7, ()), timeout_seconds=20)
        assert caught.value.reason is Reason.PROTOCOL_MISMATCH
    finally:
        refusing.close()


def test_upkeep_runs_while_nothing_arrives_and_may_fail() -> None:
    calls: list[float] = []

    def upkeep() -> None:
        calls.append(time.monotonic())
        raise RuntimeError("upkeep failed")

    listener = Listener(HOST, 0, answer, upkeep)
    try:
        wait_until(lambda: len(calls) >= 3)
        assert answers(listener)
    finally:
        listener.close()


def test_upkeep_is_not_starved_by_questions() -> None:
    calls: list[float] = []
    listener = Listener(HOST, 0, answer, lambda: calls.append(time.monotonic()))
    try:
        end = time.monotonic() + 20
        while len(calls) < 3 and time.monotonic() < end:
            assert answers(listener)
        assert len(calls) == 3
        assert calls[-1] - calls[0] > 0.35, "not once per question"
    finally:
        listener.close()


def test_port_zero_takes_a_free_port_and_two_listeners_two(listener: Listener) -> None:
    other = Listener(HOST, 0, answer)
    try:
        assert 0 < listener.port != other.port > 0
        assert answers(other)
    finally:
        other.close()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_an_ipv6_address_is_listened_on_and_asked() -> None:
    for host in ("::1", "[::1]"):
        listener = Listener(host, 0, answer)
        try:
            assert ask(host, listener.port, Release(7, ()), timeout_seconds=20) == Released(7)
        finally:
            listener.close()


def test_a_port_in_use_is_named_with_the_remedy(listener: Listener) -> None:
    with pytest.raises(HandoffError) as caught:
        Listener(HOST, listener.port, answer)
    assert caught.value.reason is Reason.PORT_IN_USE
    assert f"{HOST}:{listener.port}" in caught.value.message
    assert '"port"' in caught.value.remedy
    assert answers(listener)


def test_an_address_of_another_machine_is_an_invalid_setting() -> None:
    with pytest.raises(HandoffError) as caught:
        Listener("203.0.113.1", 0, answer)
    assert caught.value.reason is Reason.INVALID_SETTING
    assert '"host"' in caught.value.remedy


def test_a_closed_listener_gives_its_port_back(listener: Listener) -> None:
    listener.close()
    listener.close()
    assert not listener._thread.is_alive()
    wait_until(lambda: is_free(listener.port))
    successor = Listener(HOST, listener.port, answer)
    try:
        assert answers(successor)
    finally:
        successor.close()


def test_a_full_answer_travels_whole() -> None:
    handles = tuple(protocol.Handle("r" * 500, number) for number in range(protocol.MAX_REQUESTS_PER_MESSAGE))
    listener = Listener(HOST, 0, lambda question: Renewed(7, 60.0, question.handles))  # type: ignore[union-attr]
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
