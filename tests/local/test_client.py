"""The client over real sockets: answers, silence, garbage, impossible addresses, and a close without leaks."""

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import MAX_REQUESTS_PER_MESSAGE, Answer, Handle, Noted, Question, Refusal, Release, encode
from kvferry.handoff.wire import client as client_module
from kvferry.handoff.wire.client import Client, ask
from kvferry.handoff.wire.server import Connection, Frame, Server
from kvferry.handoff.wire.trust import Trust

from ..waits import collect, wait_until

HOST = "127.0.0.1"


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


@pytest.fixture
def resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RESEND_SECONDS", 0.05)


def echo_epoch(question: Question) -> Answer:
    return Noted(question.epoch)  # type: ignore[union-attr]


def check_works(client: Client) -> None:
    """Ask a server that answers."""
    with closing(Server(HOST, 0, echo_epoch)) as server:
        client.send(HOST, server.port, Release(8, ()), timeout_seconds=20)
        assert [exchange.answer for exchange in collect(client)] == [Noted(8)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class RawPeer:
    """A peer that says what the test says: ``reply(number, message)`` gives the frames of each answer."""

    def __init__(self, reply: Callable[[int, bytes], list[Frame]]) -> None:
        self.received: list[int] = []
        self.received_at: list[float] = []
        self._reply = reply
        self._stop = threading.Event()
        self._listening = socket.create_server((HOST, 0))
        self.port: int = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    @property
    def num_connections(self) -> int:
        """All that were accepted so far."""
        return len(self._threads) - 1

    def _run(self) -> None:
        self._listening.settimeout(0.02)
        while not self._stop.is_set():
            with suppress(TimeoutError):
                peer, _ = self._listening.accept()
                self._threads.append(threading.Thread(target=self._answer, args=[peer]))
                self._threads[-1].start()
        self._listening.close()

    def _answer(self, peer: socket.socket) -> None:
        connection = Connection(peer, HOST, 1 << 20, None, must_ask=True)
        with suppress(OSError):
            while not self._stop.is_set():
                connection.advance()
                if select.select([peer], [], [], 0.02)[0] and (frame := connection.take()) is not None:
                    self.received_at.append(time.monotonic())
                    self.received.append(frame.number)
                    for answer in self._reply(*frame):
                        connection.put(answer)
                    assert connection.send()
        peer.close()

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_an_answer_arrives_once_with_its_question(client: Client) -> None:
    listener = Server(HOST, 0, echo_epoch)
    try:
        before = time.monotonic()
        client.send(HOST, listener.port, Release(7, (Handle("a", 1),)), timeout_seconds=20)
        (exchange,) = collect(client)
        assert exchange.answer == Noted(7)
        assert exchange.question == Release(7, (Handle("a", 1),))
        assert before <= exchange.sent_at <= time.monotonic()
        assert client.collect() == []
    finally:
        listener.close()


def test_a_message_is_logged_where_it_is_not_acknowledged(
    client: Client, caplog: pytest.LogCaptureFixture, resend_soon: None
) -> None:
    def answer(question: Question) -> Answer:
        return Noted(7) if question == Release(7, ()) else Refusal("peer-changed", "another epoch.", "Restart it.")

    server = Server(HOST, 0, answer)
    with RawPeer(lambda *_: []) as silent:
        client.tell(HOST, server.port, Release(7, ()), 20.0)
        client.tell(HOST, server.port, Release(8, ()), 20.0)
        client.tell(HOST, silent.port, Release(7, ()), 0.2)
        wait_until(lambda: len(caplog.messages) >= 2)
        assert client.collect() == []
    server.close()
    assert caplog.messages == [
        f"kvferry: a release to {HOST}:{server.port} was not acknowledged: another epoch. Restart it.",
        f"kvferry: a release to {HOST}:{silent.port} was not acknowledged: no answer. "
        f"Open TCP port {silent.port} of {HOST} to the other engine in the firewalls.",
    ]


def test_two_destinations_each_answer_their_own(client: Client) -> None:
    first, second = Server(HOST, 0, lambda question: Noted(1)), Server(HOST, 0, lambda question: Noted(2))
    try:
        for _ in range(20):
            client.send(HOST, first.port, Release(0, ()), timeout_seconds=20)
            client.send(HOST, second.port, Release(0, ()), timeout_seconds=20)
        exchanges = collect(client, 40)
        assert sorted((exchange.port, exchange.answer.epoch) for exchange in exchanges) == sorted(  # type: ignore[union-attr]
            [(first.port, 1), (second.port, 2)] * 20
        )
    finally:
        first.close()
        second.close()


@pytest.mark.usefixtures("resend_soon")
def test_tensorrt_llm_17665_a_lost_message_is_sent_again_and_its_lease_counts_from_the_first_sending(
    client: Client,
) -> None:
    def lose_two(number: int, data: bytes) -> list[Frame]:
        return [Frame(number, encode(Noted(7)))] if len(peer.received) > 2 else []

    with RawPeer(lose_two) as peer:
        client.send(HOST, peer.port, Release(7, ()), timeout_seconds=20)
        (exchange,) = collect(client)
        assert exchange.answer == Noted(7)
        assert len(set(peer.received)) == 1, "the same question under the same number"
        assert len(peer.received) >= 3
        assert exchange.sent_at <= peer.received_at[0], "not the sending that was answered"


def test_a_connection_that_brings_nothing_is_made_anew_with_twice_the_time(
    client: Client, resend_soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after a network failure, when TCP waits before it sends again. The second connection's answer takes more than
    # the first time, and came too late if the time went on from the first connection.
    monkeypatch.setattr(client_module, "SILENT_SECONDS", 1.0)
    pauses = [1.3]

    def answer_later_connections(number: int, message: bytes) -> list[Frame]:
        if peer.num_connections == 1:
            return []
        time.sleep(pauses.pop() if pauses else 0.0)
        return [Frame(number, encode(Noted(8)))]

    with RawPeer(answer_later_connections) as peer:
        for _ in range(2):
            client.send(HOST, peer.port, Release(8, ()), timeout_seconds=20)
            assert [exchange.answer for exchange in collect(client)] == [Noted(8)]
        assert peer.num_connections == 2


def test_a_connection_that_brings_other_answers_is_kept(
    client: Client, resend_soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SILENT_SECONDS", 1.0)
    unanswered: list[int] = []

    def answer_all_but_the_first(number: int, message: bytes) -> list[Frame]:
        unanswered[:] = unanswered or [number]
        return [] if number in unanswered else [Frame(number, encode(Noted(8)))]

    with RawPeer(answer_all_but_the_first) as peer:
        client.send(HOST, peer.port, Release(8, ()), timeout_seconds=20)
        wait_until(lambda: peer.received)
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            client.send(HOST, peer.port, Release(8, ()), timeout_seconds=20)
            assert [exchange.answer for exchange in collect(client)] == [Noted(8)]
        assert peer.num_connections == 1


def test_a_connection_that_was_idle_has_the_whole_time_for_an_answer(
    client: Client, resend_soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SILENT_SECONDS", 1.0)
    pauses = [0.3, 0.0]

    def answer(number: int, message: bytes) -> list[Frame]:
        time.sleep(pauses.pop() if pauses else 0.0)
        return [Frame(number, encode(Noted(8)))]

    with RawPeer(answer) as peer:
        for idle_seconds in (0.0, 1.2):
            time.sleep(idle_seconds)
            client.send(HOST, peer.port, Release(8, ()), timeout_seconds=20)
            assert [exchange.answer for exchange in collect(client)] == [Noted(8)]
        assert peer.num_connections == 1


def test_a_connection_that_has_not_taken_all_questions_is_not_made_anew(
    client: Client, resend_soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a slow network: a new connection would begin again with the first question.
    monkeypatch.setattr(client_module, "SILENT_SECONDS", 0.3)
    question = Release(8, tuple(Handle(str(index), 1 << 60) for index in range(MAX_REQUESTS_PER_MESSAGE)))
    num_questions = (16 << 20) // len(encode(question))
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listening.bind((HOST, 0))
        listening.listen()
        listening.settimeout(20)
        for _ in range(num_questions):
            client.send(HOST, listening.getsockname()[1], question, timeout_seconds=20)
        with closing(listening.accept()[0]):
            listening.settimeout(2.0)
            with pytest.raises(TimeoutError):
                listening.accept()


def test_a_peer_that_appears_late_gets_the_message(client: Client) -> None:
    port = free_port()
    client.send(HOST, port, Release(7, ()), timeout_seconds=10)
    time.sleep(0.2)
    assert client.collect() == []
    listener = Server(HOST, port, echo_epoch)
    try:
        assert [exchange.answer for exchange in collect(client)] == [Noted(7)]
    finally:
        listener.close()


def test_pauses_between_attempts_grow_to_a_bound_and_differ_from_peer_to_peer(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand clients of a restarted engine must not all come back at one moment."""
    monkeypatch.setattr(client_module, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(client_module, "LAST_RETRY_SECONDS", 0.08)
    pauses: dict[int, list[float]] = {}
    set_timer = Client._set_timer

    def noted(self: Client, at: float, link: Any, kind: int) -> None:
        if kind == client_module.CONNECTION and link.is_waiting:
            pauses.setdefault(link.port, []).append(at - time.monotonic())
        set_timer(self, at, link, kind)

    monkeypatch.setattr(Client, "_set_timer", noted)
    for _ in range(8):
        client.send(HOST, free_port(), Release(7, ()), timeout_seconds=5)
    wait_until(lambda: len(pauses) == 8 and all(len(each) > 6 for each in pauses.values()))
    for each in pauses.values():
        for number, pause in enumerate(each[:7]):
            longest = min(0.08, 0.01 * 2**number)
            assert 0.2 * longest < pause <= longest
    assert len({round(each[6], 4) for each in pauses.values()}) > 4


@pytest.mark.usefixtures("resend_soon")
def test_a_question_comes_back_unanswered_at_its_deadline(client: Client) -> None:
    with RawPeer(lambda number, data: []) as peer:
        sent_at = time.monotonic()
        client.send(HOST, peer.port, Release(7, ()), timeout_seconds=0.3)
        (exchange,) = collect(client)
        assert exchange.answer is None
        assert 0.28 < time.monotonic() - sent_at < 5
        num_sent = len(peer.received)
        assert num_sent >= 2
        time.sleep(0.2)
        assert len(peer.received) - num_sent <= 1, "given up is not sent again"


def test_an_answer_after_the_deadline_is_not_delivered(client: Client) -> None:
    def late(number: int, data: bytes) -> list[Frame]:
        time.sleep(0.2)
        return [Frame(number, encode(Noted(7)))]

    with RawPeer(late) as peer:
        client.send(HOST, peer.port, Release(7, ()), timeout_seconds=0.05)
        assert [exchange.answer for exchange in collect(client)] == [None]
        time.sleep(0.3)
        assert client.collect() == []


def test_garbage_answers_are_ignored_or_refusals(client: Client) -> None:
    def garble(number: int, data: bytes) -> list[Frame]:
        unknown, malformed = Frame(1 << 63, encode(Noted(1))), Frame(number, os.urandom(50))
        return [Frame(0, encode(Noted(1))), unknown, malformed, Frame(number, encode(Noted(2)))]

    with RawPeer(garble) as peer:
        client.send(HOST, peer.port, Release(7, ()), timeout_seconds=20)
        (exchange,) = collect(client)
        assert isinstance(exchange.answer, Refusal)
        assert exchange.answer.reason == Reason.MALFORMED_MESSAGE
    check_works(client)


def test_a_peer_cannot_answer_for_another(client: Client) -> None:
    def answer_all(number: int, data: bytes) -> list[Frame]:
        return [Frame(each, encode(Noted(666))) for each in range(1, 5)]

    with RawPeer(lambda number, data: []) as silent, RawPeer(answer_all) as forger:
        client.send(HOST, silent.port, Release(7, ()), timeout_seconds=0.5)
        client.send(HOST, forger.port, Release(7, ()), timeout_seconds=20)
        answers = {exchange.port: exchange.answer for exchange in collect(client, 2)}
    assert answers == {silent.port: None, forger.port: Noted(666)}


@pytest.mark.parametrize(
    ("host", "port", "question"),
    [
        ("no such host", 5600, Release(7, ())),
        ("\ud800", 5600, Release(7, ())),
        ("127.0.0.1", 5600, Release(1 << 80, ())),
        ("127.0.0.1", 5600, Release(7, (Handle("\ud800", 1),))),
    ],
)
def test_what_cannot_be_sent_comes_back_and_stops_nothing(
    client: Client, host: str, port: int, question: Question
) -> None:
    client.send(host, port, question, timeout_seconds=20)
    (exchange,) = collect(client)
    assert isinstance(exchange.answer, Refusal)
    assert exchange.answer.reason == Reason.PEER_UNREACHABLE
    check_works(client)


def test_a_question_that_is_refused_comes_back_once(client: Client, resend_soon: None) -> None:
    with RawPeer(lambda number, data: [Frame(0, encode(Refusal("aborted", "no.")))]) as peer:
        for _ in range(3):
            client.send(HOST, peer.port, Release(7, ()), timeout_seconds=0.2)
        assert [type(exchange.answer) for exchange in collect(client, 3)] == [Refusal] * 3
        assert collect(client, seconds=0.4) == []


def test_a_slow_lookup_of_a_name_delays_no_other_question(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread serves every connection."""
    may_answer, look_up = threading.Event(), socket.getaddrinfo

    def look_up_late(host: str, *arguments: Any, **options: Any) -> Any:
        if host != "late.example":
            return look_up(host, *arguments, **options)
        may_answer.wait(20)
        return look_up(HOST, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_late)
    listener = Server(HOST, 0, echo_epoch)
    try:
        client.send("late.example", listener.port, Release(1, ()), timeout_seconds=20)
        client.send("late.example", listener.port, Release(2, ()), timeout_seconds=0.05)
        client.send(HOST, listener.port, Release(3, ()), timeout_seconds=20)
        exchanges = collect(client, 2)
        assert {exchange.question.epoch: exchange.answer for exchange in exchanges} == {2: None, 3: Noted(3)}  # type: ignore[union-attr]
        may_answer.set()
        assert [exchange.answer for exchange in collect(client)] == [Noted(1)]
    finally:
        listener.close()


def test_a_name_is_asked_at_the_address_that_listens(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may stand for IPv6 and IPv4, of which the engine listens on one."""
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, port, **_: [(0, 0, 0, "", (address, port)) for address in ("127.0.0.2", HOST)],
    )
    listener = Server(HOST, 0, echo_epoch)
    try:
        assert ask("prefill-0", listener.port, Release(7, ()), timeout_seconds=20) == Noted(7)
        client.send("prefill-0", listener.port, Release(8, ()), timeout_seconds=20)
        assert [exchange.answer for exchange in collect(client)] == [Noted(8)]
    finally:
        listener.close()


def test_connections_are_bounded_and_the_idle_one_gives_way(client: Client) -> None:
    client._max_links = 1
    listener = Server(HOST, 0, echo_epoch)
    with RawPeer(lambda number, data: []) as mute:
        client.send(HOST, listener.port, Release(7, ()), timeout_seconds=20)
        assert [exchange.answer for exchange in collect(client)] == [Noted(7)]
        client.send(HOST, mute.port, Release(7, ()), timeout_seconds=0.3)
        client.send(HOST, listener.port, Release(8, ()), timeout_seconds=20)
        refused, given_up = collect(client, 2)
        assert isinstance(refused.answer, Refusal)
        assert "kv_transfer_params" in refused.answer.remedy
        assert (refused.port, given_up.port, given_up.answer) == (listener.port, mute.port, None)
        assert list(client._links) == [(HOST, mute.port, False)]
    listener.close()


def test_a_message_waits_for_a_connection_that_gives_way(client: Client) -> None:
    """A rank reports to its own engine with the client that asks peers, which a request can name."""
    client._max_links = 1
    told: list[Question] = []

    def note(question: Question) -> Answer:
        told.append(question)
        return Noted(8)

    listener = Server(HOST, 0, note)
    with RawPeer(lambda *_: []) as mute:
        client.send(HOST, mute.port, Release(7, ()), timeout_seconds=0.3)
        client.tell(HOST, listener.port, Release(8, ()), timeout_seconds=20)
        assert [exchange.answer for exchange in collect(client)] == [None]
        end = time.monotonic() + 5
        while not told and time.monotonic() < end:
            time.sleep(0.002)
    listener.close()
    assert told == [Release(8, ())]


def test_a_fault_in_a_turn_does_not_end_the_clients_thread(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    look_after, put = Client._look_after, Connection.put
    monkeypatch.setattr(client_module, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(client_module, "RESEND_SECONDS", 0.01)
    monkeypatch.setattr(client_module, "SECOND", 0.0)
    monkeypatch.setattr(Client, "_look_after", lambda *_: 1 / 0)
    listener = Server(HOST, 0, echo_epoch)
    try:
        client.send(HOST, listener.port, Release(7, ()), timeout_seconds=20)
        assert [exchange.answer for exchange in collect(client)] == [Noted(7)]
        assert "a turn failed" in caplog.text
        monkeypatch.setattr(Client, "_look_after", look_after)
        with RawPeer(lambda number, data: []) as mute:
            client.send(HOST, mute.port, Release(8, ()), timeout_seconds=20)
            while not mute.received:
                time.sleep(0.001)
            monkeypatch.setattr(Connection, "put", lambda *_: 1 / 0)
            assert [type(exchange.answer) for exchange in collect(client)] == [Refusal], "not tried again for ever"
        monkeypatch.setattr(Connection, "put", put)
        client.send(HOST, listener.port, Release(9, ()), timeout_seconds=20)
        assert [exchange.answer for exchange in collect(client)] == [Noted(9)]
    finally:
        listener.close()


def test_a_refusals_remedy_reaches_the_client() -> None:
    def refuse(question: Question) -> Answer:
        raise HandoffError(Reason.PEER_CHANGED, "another epoch.", "Send the prompt again.")

    listener = Server(HOST, 0, refuse)
    try:
        with pytest.raises(HandoffError) as caught:
            ask(HOST, listener.port, Release(7, ()), timeout_seconds=20)
        assert caught.value.remedy == "Send the prompt again."
        assert caught.value.message.endswith("refused: another epoch.")
    finally:
        listener.close()


def test_sending_never_waits_for_the_clients_thread(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many questions are queued while the thread is held up."""
    held_up = threading.Event()
    monkeypatch.setattr(Client, "_take_outgoing", lambda self: [held_up.wait(20)][1:])

    def send_many() -> None:
        for _ in range(2500):
            client.send(HOST, 1, Release(7, ()), timeout_seconds=20)

    sender = threading.Thread(target=send_many, daemon=True)
    sender.start()
    sender.join(timeout=4)
    had_to_wait = sender.is_alive()
    monkeypatch.undo()
    held_up.set()
    sender.join(timeout=20)
    assert not had_to_wait


def test_unfinished_answers_are_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server may begin an answer of 16 MB, and requests name servers."""
    monkeypatch.setattr(client_module, "MAX_RECEIVED_BYTES", 3 << 20)
    greedy = [socket.create_server((HOST, 0)) for _ in range(4)]
    begun = (8 << 20).to_bytes(4, "big") + bytes((1 << 20) - 100)

    def begin(listening: socket.socket) -> None:
        peer, _ = listening.accept()
        with peer, suppress(OSError):
            peer.sendall(begun)
            peer.recv(1000)
            while peer.recv(1000):
                pass

    threads = [threading.Thread(target=begin, args=[each]) for each in greedy]
    for thread in threads:
        thread.start()
    for each in greedy:
        client.send(HOST, each.getsockname()[1], Release(7, ()), timeout_seconds=20)
    [refused] = collect(client)
    assert isinstance(refused.answer, Refusal)
    assert refused.answer.reason == Reason.MALFORMED_MESSAGE
    end = time.monotonic() + 20
    while client._num_received_bytes > 3 << 20:
        assert time.monotonic() < end
    client.close()
    assert (client._num_received_bytes, client._received_bytes) == (0, {})
    for thread, each in zip(threads, greedy, strict=True):
        thread.join()
        each.close()


def test_an_idle_connection_is_closed_and_opened_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "IDLE_SOCKET_SECONDS", 0.0)
    monkeypatch.setattr(client_module, "SECOND", 0.0)
    listener = Server(HOST, 0, echo_epoch)
    try:
        for epoch in range(5):
            client.send(HOST, listener.port, Release(epoch, ()), timeout_seconds=20)
            assert [exchange.answer for exchange in collect(client)] == [Noted(epoch)]
            end = time.monotonic() + 20
            while client._links and time.monotonic() < end:
                time.sleep(0.001)
            assert not client._links
    finally:
        listener.close()


def test_a_question_queued_at_the_close_is_still_sent() -> None:
    with RawPeer(lambda number, data: []) as peer:
        client = Client()
        client.send(HOST, peer.port, Release(7, ()), timeout_seconds=20)
        client.close()
        end = time.monotonic() + 3
        while not peer.received and time.monotonic() < end:
            time.sleep(0.01)
        assert len(peer.received) == 1


def test_close_leaves_no_thread_and_no_file() -> None:
    files = len(os.listdir("/proc/self/fd"))
    threads = set(threading.enumerate())
    clients = [Client() for _ in range(30)]
    for client in clients:
        client.send(HOST, free_port(), Release(7, ()), timeout_seconds=60)
    for client in clients:
        client.close()
        client.close()
        client.send(HOST, 1, Release(7, ()), timeout_seconds=1)  # into the void, and no error
    assert not {thread for thread in threading.enumerate() if thread.name == "kvferry-client"} - threads
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_client_can_be_opened_at_once_after_another_closed() -> None:
    for _ in range(100):
        Client().close()


def test_ask_gives_up_in_time() -> None:
    started_at = time.monotonic()
    with socket.create_server((HOST, 0)) as mute, pytest.raises(HandoffError, match=r"within 0.2 s") as caught:
        ask(HOST, mute.getsockname()[1], Release(7, ()), timeout_seconds=0.2)
    assert caught.value.reason is Reason.PEER_UNREACHABLE
    assert time.monotonic() - started_at < 5


def test_ask_has_one_deadline_for_the_connection_and_the_answer() -> None:
    """A full backlog answers no knock: to find that out takes the timeout, and leaves nothing to wait for an answer."""
    with socket.create_server((HOST, 0), backlog=0) as mute, socket.create_connection(mute.getsockname()):
        started_at = time.monotonic()
        with pytest.raises(HandoffError, match=r"within 1 s"):
            ask(HOST, mute.getsockname()[1], Release(7, ()), timeout_seconds=1)
        assert 0.9 < time.monotonic() - started_at < 1.8


def test_ask_has_one_deadline_for_all_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(address: str, port: int, data: bytes, trust: Trust, connect_by: float, deadline: float) -> bytes:
        time.sleep(max(0.0, connect_by - time.monotonic()))
        raise TimeoutError

    monkeypatch.setattr(client_module, "_ask_address", silent)
    monkeypatch.setattr(Trust, "addresses", lambda *_: [f"192.0.2.{number}" for number in range(8)])
    started_at = time.monotonic()
    with pytest.raises(HandoffError):
        ask("prefill-0", 5600, Release(7, ()), timeout_seconds=0.5)
    assert time.monotonic() - started_at < 1.0


def test_ask_gives_each_address_of_a_name_an_equal_share_of_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one may be of a network that does not answer."""
    given: list[float] = []

    def refuse(address: str, port: int, data: bytes, trust: Trust, connect_by: float, deadline: float) -> bytes:
        given.append((connect_by - time.monotonic()) / 3600.0)
        raise ConnectionRefusedError

    monkeypatch.setattr(client_module, "_ask_address", refuse)
    monkeypatch.setattr(Trust, "addresses", lambda *_: ["192.0.2.1", "192.0.2.2", "192.0.2.3"])
    with pytest.raises(HandoffError, match="nothing listens"):
        ask("prefill-0", 5600, Release(7, ()), timeout_seconds=3600.0)
    assert given == pytest.approx([1 / 3, 1 / 2, 1.0], abs=0.01)


def test_ask_fails_at_once_where_nothing_listens() -> None:
    started_at = time.monotonic()
    with pytest.raises(HandoffError, match="nothing listens") as caught:
        ask(HOST, free_port(), Release(7, ()), timeout_seconds=20)
    assert caught.value.reason is Reason.PEER_UNREACHABLE
    assert time.monotonic() - started_at < 5


def test_ask_refuses_what_is_no_address() -> None:
    with pytest.raises(HandoffError) as caught:
        ask("no such host", 5600, Release(7, ()), timeout_seconds=20)
    assert caught.value.reason is Reason.PEER_UNREACHABLE


def test_ask_refuses_a_garbage_answer() -> None:
    with RawPeer(lambda number, data: [Frame(number, b"garbage")]) as peer:
        with pytest.raises(HandoffError) as caught:
            ask(HOST, peer.port, Release(7, ()), timeout_seconds=20)
        assert caught.value.reason is Reason.MALFORMED_MESSAGE


def test_every_reason_survives_a_refusal() -> None:
    assert [Refusal(reason.value, "no.").error().reason for reason in Reason] == list(Reason)
    assert Refusal("of a later version", "no.").error().reason is Reason.PROTOCOL_MISMATCH
