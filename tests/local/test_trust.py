"""Who is heard, and where an engine connects: refusals have their reasons, and valid questions beside them answers."""

import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import Answer, Handle, Noted, Question, Refusal, Release, Renew, Renewed, encode
from kvferry.handoff.wire import client as client_module
from kvferry.handoff.wire import server as server_module
from kvferry.handoff.wire.bootstrap import query
from kvferry.handoff.wire.client import Client, ask
from kvferry.handoff.wire.server import CONNECTION, Connection, Frame, Server
from kvferry.handoff.wire.trust import Keys, Trust, make_keys

from ..waits import collect, wait_until

HOST = "127.0.0.1"
ELSEWHERE = "203.0.113.1"
"""An address for documents, which belongs to nobody."""
QUESTION, ANSWER = Release(7, (Handle("a", 1),)), Noted(7)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return make_keys(tmp_path / "keys")


@pytest.fixture
def strangers(tmp_path: Path) -> Keys:
    """Keys of another deployment."""
    return make_keys(tmp_path / "strangers")


class Engine:
    """A server that notes its questions, and whether valid ones are answered."""

    def __init__(self, keys: Keys | None) -> None:
        self.asked: list[Question] = []
        self.fingerprint = "" if keys is None else keys.fingerprint[:16]
        self._trust = Trust(keys)
        self.server = Server(HOST, 0, self._answer, keys=keys)
        self.port = self.server.port

    def _answer(self, question: Question) -> Answer:
        self.asked.append(question)
        return Renewed(7, 60.0, question.handles) if isinstance(question, Renew) else ANSWER

    def answers(self) -> bool:
        return ask(HOST, self.port, QUESTION, 10.0, self._trust) == ANSWER


@pytest.fixture
def engine(keys: Keys) -> Iterator[Engine]:
    engine = Engine(keys)
    yield engine
    engine.server.close()


@pytest.fixture
def plain() -> Iterator[Engine]:
    engine = Engine(None)
    yield engine
    engine.server.close()


def reason_of(call: Callable[[], object]) -> Reason:
    with pytest.raises(HandoffError) as caught:
        call()
    assert caught.value.remedy
    return caught.value.reason


def refusal_of(trust: Trust, port: int, host: str = HOST, *, is_trusted: bool = False) -> Refusal:
    """Return the refusal that a client's question ends with."""
    with closing(Client(trust)) as client:
        client.send(host, port, QUESTION, timeout_seconds=20, is_trusted=is_trusted)
        [exchange] = collect(client)
    assert isinstance(exchange.answer, Refusal), exchange.answer
    return exchange.answer


def test_engines_with_one_key_ask_and_answer(keys: Keys, engine: Engine) -> None:
    """One after the other, all at once, and at length: several frames lie in one record of TLS, and one in many."""
    handles = tuple(Handle("r" * 500, number) for number in range(1000))
    with closing(Client(Trust(keys))) as client:
        for epoch in range(300):
            client.send(HOST, engine.port, Release(epoch, ()), timeout_seconds=20)
        client.send(HOST, engine.port, Renew(7, handles), timeout_seconds=20)
        exchanges = collect(client, 301)
    assert [exchange.answer for exchange in exchanges[:300]] == [ANSWER] * 300
    assert exchanges[300].answer == Renewed(7, 60.0, handles)
    assert [question.epoch for question in engine.asked[:300]] == list(range(300))  # type: ignore[union-attr]
    assert ask(HOST, engine.port, Renew(7, handles), 20.0, Trust(keys)) == Renewed(7, 60.0, handles)


def test_what_travels_is_encrypted(keys: Keys, engine: Engine) -> None:
    with Relay(engine.port) as relay:
        assert ask(HOST, relay.port, Release(7, (Handle("a request's name", 1),)), 10.0, Trust(keys)) == ANSWER
        assert len(relay.sent) > 100
        assert b"a request's name" not in relay.sent


def test_a_peer_with_a_wrong_key_is_refused(engine: Engine, keys: Keys, strangers: Keys) -> None:
    """It trusts this engine's certificate, but the engine does not trust the peer's."""
    (strangers.folder / "trusted" / "engine.pem").write_bytes((keys.folder / "certificate.pem").read_bytes())
    trust = Trust(Keys(strangers.folder))
    assert reason_of(lambda: ask(HOST, engine.port, QUESTION, 10.0, trust)) is Reason.PERMISSION_DENIED
    assert refusal_of(trust, engine.port).reason == Reason.PERMISSION_DENIED
    assert engine.asked == []
    assert engine.answers()


@pytest.mark.parametrize("refuses", ["listening", "connecting"])
def test_both_logs_name_the_certificates_and_the_remedy_where_engines_do_not_trust_each_other(
    refuses: str, engine: Engine, keys: Keys, strangers: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """TLS does not show an engine the certificate that the engine refuses: that one is in the other engine's log."""
    if refuses == "listening":
        (strangers.folder / "trusted" / "engine.pem").write_bytes((keys.folder / "certificate.pem").read_bytes())
    refusal = refusal_of(Trust(Keys(strangers.folder)), engine.port)
    wait_until(lambda: "server closes a connection" in caplog.text)
    [listening] = [line for line in caplog.messages if "server closes a connection" in line]
    connecting = f"{refusal.message} {refusal.remedy}"
    ours, theirs = keys.fingerprint[:16], strangers.fingerprint[:16]
    assert f"certificate: this side has {ours}" in listening
    assert f"certificate: this side has {theirs}" in connecting
    assert (f"the peer has {ours}" in connecting) == (refuses == "listening"), connecting
    for line, is_refusing in ((listening, refuses == "listening"), (connecting, refuses == "connecting")):
        said = "this side does not trust the peer" if is_refusing else "the peer does not trust this side"
        assert said in line, line
        assert "folder trusted/" in line
        assert "kvferry keys show" in line


def test_an_engine_that_this_side_does_not_trust_is_asked_nothing(engine: Engine, keys: Keys, strangers: Keys) -> None:
    """Although that engine would hear this side: somebody has taken the prefill engine's port."""
    (keys.folder / "trusted" / "peer.pem").write_bytes((strangers.folder / "certificate.pem").read_bytes())
    open_to_all = Engine(Keys(keys.folder))
    try:
        trust = Trust(strangers)
        assert reason_of(lambda: ask(HOST, open_to_all.port, QUESTION, 10.0, trust)) is Reason.PERMISSION_DENIED
        assert refusal_of(trust, open_to_all.port).reason == Reason.PERMISSION_DENIED
        assert open_to_all.asked == []
    finally:
        open_to_all.server.close()


@pytest.mark.parametrize("certificate", ["none", "unknown"])
def test_a_peer_that_knows_only_tls_is_refused(engine: Engine, strangers: Keys, certificate: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate == "unknown":
        context.load_cert_chain(strangers.folder / "certificate.pem", strangers.folder / "key.pem")
    with socket.create_connection((HOST, engine.port), timeout=10) as peer, context.wrap_socket(peer) as wrapped:
        with suppress(OSError):
            wrapped.sendall(encode(QUESTION))
        with suppress(ssl.SSLError, ConnectionError):
            assert wrapped.recv(1) == b"", "an answer"
    assert engine.asked == []
    assert engine.answers()


def test_a_plain_peer_of_an_engine_with_keys_is_refused(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    began_at = time.monotonic()
    assert reason_of(lambda: ask(HOST, engine.port, QUESTION, 10.0)) is Reason.PERMISSION_DENIED
    refusal = refusal_of(Trust(), engine.port)
    assert '"keys"' in refusal.remedy
    assert time.monotonic() - began_at < 5
    has = f"the engine that listens has them (certificate {engine.fingerprint}), the one that connects has none"
    assert has in refusal.message
    assert has in caplog.text
    assert "permission-denied" in caplog.text
    assert engine.asked == []
    assert engine.answers()


def test_a_peer_with_keys_of_an_engine_without_is_refused(
    plain: Engine, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    trust, began_at = Trust(keys), time.monotonic()
    assert reason_of(lambda: ask(HOST, plain.port, QUESTION, 10.0, trust)) is Reason.PERMISSION_DENIED
    refusal = refusal_of(trust, plain.port)
    assert '"keys"' in refusal.remedy
    assert f"the one that connects has them (certificate {keys.fingerprint[:16]})" in refusal.message
    assert time.monotonic() - began_at < 5
    assert "the engine that connects has them: it speaks TLS, the one that listens has none" in caplog.text
    assert plain.asked == []
    assert plain.answers()


class Relay:
    """Passes bytes on between a client and an engine, and keeps what the client has sent."""

    def __init__(self, port: int) -> None:
        self.sent = b""
        self._listening = socket.create_server((HOST, 0))
        self.port: int = self._listening.getsockname()[1]
        self._engine = socket.create_connection((HOST, port))
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        peer, _ = self._listening.accept()
        back = threading.Thread(target=self._pass_back, args=[peer])
        back.start()
        with suppress(OSError):
            while data := peer.recv(1 << 16):
                self.sent += data
                self._engine.sendall(data)
            self._engine.shutdown(socket.SHUT_RDWR)
        back.join()
        peer.close()

    def _pass_back(self, peer: socket.socket) -> None:
        with suppress(OSError):
            while data := self._engine.recv(1 << 16):
                peer.sendall(data)

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads[0].join()
        self._engine.close()
        self._listening.close()


def test_recorded_bytes_that_are_sent_again_are_not_heard(keys: Keys, engine: Engine) -> None:
    """A release that somebody has recorded would free the blocks of a later hold."""
    with Relay(engine.port) as relay:
        assert ask(HOST, relay.port, QUESTION, 10.0, Trust(keys)) == ANSWER
    assert engine.asked == [QUESTION]
    with socket.create_connection((HOST, engine.port), timeout=10) as replayer:
        replayer.sendall(relay.sent)
        with suppress(ConnectionError):
            while replayer.recv(1 << 16):
                pass
    assert engine.asked == [QUESTION]
    assert engine.answers()


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
def test_an_unfinished_handshake_ends_at_its_deadline(
    engine: Engine, keys: Keys, sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "SECOND", 0.02)
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.02)
    with socket.create_connection((HOST, engine.port), timeout=10) as peer:
        peer.sendall(sent)
        with suppress(ConnectionError):
            while peer.recv(1000):
                pass
    assert "deadline-exceeded" in caplog.text
    assert engine.answers()


def test_handshakes_that_nobody_finishes_are_bounded(
    engine: Engine, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL keeps 150 KB of each, of peers without a key. Engines that have shaken hands stay connected."""
    monkeypatch.setattr(server_module, "MAX_HANDSHAKES", 4)
    monkeypatch.setattr(server_module, "NEWCOMER_SECONDS", 0.3)
    most = 0
    with closing(Client(Trust(keys))) as client:
        client.send(HOST, engine.port, QUESTION, timeout_seconds=20)
        assert collect(client)[0].answer == ANSWER
        [known] = engine.server._connections
        half_open = [socket.create_connection((HOST, engine.port)) for _ in range(20)]
        for peer in half_open:
            peer.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        end = time.monotonic() + 20
        while len(engine.server._shaking_hands) < 4:
            assert time.monotonic() < end
        assert ask(HOST, engine.port, QUESTION, 20.0, Trust(keys)) == ANSWER
        for _ in range(100):
            most = max(most, len(engine.server._shaking_hands))
            time.sleep(0.005)
        assert most <= 4
        assert known in engine.server._connections
    for peer in half_open:
        peer.close()
    wait_until(lambda: not engine.server._shaking_hands)


def test_a_server_that_never_shakes_hands_does_not_hold_a_client_up(
    engine: Engine, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of a host's two addresses accepts, and says nothing."""
    monkeypatch.setattr(client_module, "SECOND", 0.02)
    look_up = socket.getaddrinfo

    def two(host: str, port: int, **options: Any) -> Any:
        if host != "prefill-0":
            return look_up(host, port, **options)
        return [(0, 0, 0, "", (address, port)) for address in ("127.0.0.2", HOST)]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    with socket.create_server(("127.0.0.2", engine.port)):
        assert ask("prefill-0", engine.port, QUESTION, 2.0, Trust(keys)) == ANSWER
        with closing(Client(Trust(keys))) as client:
            client.send("prefill-0", engine.port, QUESTION, timeout_seconds=20)
            assert [exchange.answer for exchange in collect(client)] == [ANSWER]


def test_a_lost_connection_is_made_again_and_the_question_answered(keys: Keys, engine: Engine) -> None:
    with closing(Client(Trust(keys))) as client:
        for epoch in range(3):
            client.send(HOST, engine.port, Release(epoch, ()), timeout_seconds=20)
            assert [exchange.answer for exchange in collect(client)] == [ANSWER]
            for connection in list(engine.server._connections):
                connection.socket.shutdown(socket.SHUT_RDWR)


def test_garbage_beside_valid_questions(keys: Keys, engine: Engine) -> None:
    """Whatever is sent to an engine with keys, its peers are answered, and nothing else is."""
    with closing(Client(Trust(keys))) as client:
        for number in range(100):
            with socket.create_connection((HOST, engine.port), timeout=10) as peer, suppress(ConnectionError):
                peer.sendall((b"\x16\x03\x01\x00\xff" if number % 2 else b"") + os.urandom(300))
            client.send(HOST, engine.port, QUESTION, timeout_seconds=20)
        assert [exchange.answer for exchange in collect(client, 100)] == [ANSWER] * 100
    assert len(engine.asked) == 100


def test_hole_4_a_thousand_peers_keep_their_connections(
    keys: Keys, engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turns, for which every connection is needed: none is closed for another, and nothing is logged."""
    import resource

    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files[1], 8192), files[1]))
    accepted, accept = [], socket.socket.accept

    def counted(self: socket.socket) -> Any:
        accepted.append(self)
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", counted)
    server = Server(HOST, 0, lambda _: ANSWER)
    peers = [socket.create_connection((HOST, server.port), timeout=20) for _ in range(1000)]
    try:
        connections = [Connection(peer, HOST, 1 << 20, None, must_ask=False) for peer in peers]
        for turn in range(3):
            for connection in connections:
                connection.advance()
                connection.put(Frame(turn + 1, encode(QUESTION)))
                connection.send()
            for connection in connections:
                connection.socket.settimeout(20)
                assert connection.take() == Frame(turn + 1, encode(ANSWER))
                connection.socket.setblocking(False)
        assert len(accepted) == 1000
        assert caplog.messages == []
    finally:
        server.close()
        for peer in peers:
            peer.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, files)


# Where an engine connects.


def resolve(monkeypatch: pytest.MonkeyPatch, **hosts: list[str]) -> list[str]:
    """Let names stand for addresses; return the list of what is looked up."""
    looked_up: list[str] = []
    look_up = socket.getaddrinfo

    def resolved(host: str, port: int, **options: Any) -> Any:
        looked_up.append(host)
        addresses = hosts.get(host.replace("-", "_"))
        return look_up(host, port, **options) if addresses is None else [(0, 0, 0, "", (a, port)) for a in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    return looked_up


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses to which this process connects; only those of this machine are."""
    found: list[str] = []
    connect = socket.socket.connect

    def noted(self: socket.socket, address: tuple[str, int]) -> None:
        found.append(address[0])
        if address[0] != HOST:
            raise ConnectionRefusedError
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", noted)
    return found


def test_a_foreign_address_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, connected: list[str]
) -> None:
    resolve(monkeypatch, prefill_0=[ELSEWHERE])
    trust = Trust(allowed_hosts=["10.0.0.0/8", "prefill-1"])
    for host in (ELSEWHERE, "prefill-0", "0.0.0.0", "::ffff:203.0.113.1", "3405803777"):
        assert reason_of(lambda host=host: ask(host, 5600, QUESTION, 10.0, trust)) is Reason.PERMISSION_DENIED  # type: ignore[misc]
        refusal = refusal_of(trust, 5600, host)
        assert refusal.reason == Reason.PERMISSION_DENIED
        assert "allowed_hosts" in refusal.remedy
        assert f"host: {host!r} is at" in refusal.message
        assert '"allowed_hosts", which has 10.0.0.0/8, prefill-1' in refusal.message
    assert connected == []


def test_a_bootstrap_query_of_a_foreign_address_is_refused(connected: list[str]) -> None:
    assert reason_of(lambda: query(f"http://{ELSEWHERE}:8998")) is Reason.PERMISSION_DENIED
    assert reason_of(lambda: query(f"http://{ELSEWHERE}:8998", Trust(anywhere=True))) is Reason.PEER_UNREACHABLE
    assert connected == [ELSEWHERE]


def test_allowed_hosts_are_names_addresses_and_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, prefill_0=["10.9.9.9"], other=["10.9.9.9"], decode_0=["10.1.2.3", "10.2.0.1"])
    trust = Trust(allowed_hosts=["prefill-0", "10.1.0.0/16", "[fd00::1]", "no-such-host.invalid"])
    for host, addresses in (
        ("PREFILL-0", ["10.9.9.9"]),
        ("other", ["10.9.9.9"]),
        ("10.9.9.9", ["10.9.9.9"]),
        ("10.1.255.255", ["10.1.255.255"]),
        ("::ffff:10.1.2.3", ["::ffff:10.1.2.3"]),
        ("decode-0", ["10.1.2.3"]),
        ("fd00::1", ["fd00::1"]),
        ("localhost", [HOST]),
    ):
        with monkeypatch.context() as patch:
            resolve(patch, **{"PREFILL_0": ["10.9.9.9"], "localhost": [HOST]})
            assert trust.addresses(host, 5600, False) == addresses
    assert reason_of(lambda: trust.addresses("10.2.0.1", 5600, False)) is Reason.PERMISSION_DENIED
    assert reason_of(lambda: trust.addresses("fd00::2", 5600, False)) is Reason.PERMISSION_DENIED


def test_the_checked_address_is_the_one_that_is_connected_to(
    monkeypatch: pytest.MonkeyPatch, connected: list[str], plain: Engine
) -> None:
    """A name server may give another answer to a second look-up."""
    looked_up = resolve(monkeypatch, prefill_0=[HOST])
    assert ask("prefill-0", plain.port, QUESTION, 10.0) == ANSWER
    assert (looked_up, set(connected)) == (["prefill-0"], {HOST})


def test_a_host_that_is_trusted_for_one_question_is_not_for_another(connected: list[str]) -> None:
    with closing(Client()) as client:
        client.send(ELSEWHERE, 5600, QUESTION, timeout_seconds=0.2, is_trusted=True)
        client.send(ELSEWHERE, 5600, QUESTION, timeout_seconds=20)
        refused, unanswered = collect(client, 2)
    assert isinstance(refused.answer, Refusal)
    assert refused.answer.reason == Reason.PERMISSION_DENIED
    assert unanswered.answer is None
    assert set(connected) == {ELSEWHERE}


def test_names_of_allowed_hosts_are_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = resolve(monkeypatch, prefill_0=["10.9.9.9"])
    trust = Trust(allowed_hosts=["prefill-0"])
    for _ in range(5):
        assert trust.addresses("10.9.9.9", 5600, False) == ["10.9.9.9"]
    assert looked_up.count("prefill-0") == 1


def test_a_refusal_of_the_whole_connection_is_given_to_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = socket.create_server((HOST, 0))

    def refuse() -> None:
        peer, _ = listening.accept()
        with peer:
            connection = Connection(peer, HOST, 1 << 20, None, must_ask=True)
            connection.advance()
            # A question that the client takes up later would connect anew.
            wait_until(lambda: [link for link in client._links.values() if len(link.awaiting) == 3])
            refusal = Refusal.of(HandoffError(Reason.PERMISSION_DENIED, "no.", "Do not ask."))
            connection.put(Frame(CONNECTION, encode(refusal)))
            connection.send()
            time.sleep(0.2)

    with closing(Client()) as client, listening:
        thread = threading.Thread(target=refuse)
        thread.start()
        for _ in range(3):
            client.send(HOST, listening.getsockname()[1], QUESTION, timeout_seconds=20)
        answers = [exchange.answer for exchange in collect(client, 3)]
        thread.join()
    assert [type(answer) for answer in answers] == [Refusal] * 3
    assert json.dumps([answer.reason for answer in answers]) == json.dumps(["permission-denied"] * 3)  # type: ignore[union-attr]
