"""Garbage, half-open and slow connections beside valid questions: bounds of connections, memory, answers and log lines.

``benchmarks/hostile_peers.py`` measures what they cost.
"""

import random
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvferry.handoff.messages import Answer, Handle, Question, Renew, Renewed
from kvferry.handoff.wire import server as connection_module
from kvferry.handoff.wire.client import Client
from kvferry.handoff.wire.server import Server
from kvferry.handoff.wire.trust import Keys, Trust, make_keys
from kvferry.peer_log import LINES_PER_SECOND

from ..fuzzed_messages import resident_bytes
from ..waits import wait_until

HOST, EPOCH = "127.0.0.1", 7
NUM_GARBAGE, NUM_HALF_OPEN, NUM_SLOW = 2000, 600, 100
MAX_GROWTH = 128 << 20
CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
HALF_FRAME = (100).to_bytes(4, "big") + bytes(20)
QUESTION = Renew(EPOCH, (Handle("a", 1),))


@pytest.fixture
def many_files() -> Iterator[None]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files[1], 8192), files[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, files)


def connected(port: int, says: bytes) -> socket.socket:
    peer = socket.create_connection((HOST, port), timeout=20)
    with suppress(OSError):
        peer.sendall(says)
    return peer


def ask(client: Client, port: int) -> float:
    began_at = time.monotonic()
    client.send(HOST, port, QUESTION, 20.0)
    while not (ended := client.collect()):
        time.sleep(0.0005)
    assert isinstance(ended[0].answer, Renewed)
    return time.monotonic() - began_at


@pytest.mark.parametrize("over_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.usefixtures("many_files")
def test_hostile_peers_neither_fill_nor_deafen_a_server(
    over_tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_module, "PATIENCE_SECONDS", 2)
    keys: Keys | None = make_keys(tmp_path / "keys") if over_tls else None

    def answer(question: Question) -> Answer:
        return Renewed(EPOCH, 60.0, ())

    server = Server(HOST, 0, answer, keys=keys)
    noise, peers, waits = random.Random(0), [], []
    with closing(server), closing(Client(Trust(keys))) as client:
        ask(client, server.port)
        before = resident_bytes()
        try:
            for number in range(NUM_HALF_OPEN):
                peers.append(connected(server.port, (b"", HALF_FRAME[:3], HALF_FRAME, CLIENT_HELLO)[number % 4]))
            slow = [connected(server.port, b"") for _ in range(NUM_SLOW)]
            peers += slow
            for number in range(NUM_GARBAGE):
                connected(server.port, noise.choice((b"", CLIENT_HELLO, HALF_FRAME)) + noise.randbytes(300)).close()
                with suppress(OSError):
                    slow[number % NUM_SLOW].send(HALF_FRAME[:1])
                if number % 20 == 0:
                    waits.append(ask(client, server.port))
            assert max(waits) < 2.0
            assert resident_bytes() - before < MAX_GROWTH
            wait_until(
                lambda: len(server._connections) <= 1,
                "connections are kept for ever",
                each=lambda: ask(client, server.port),
            )
        finally:
            for peer in peers:
                peer.close()
    times = [record.created for record in caplog.records]
    assert 1 <= max(sum(begin <= each < begin + 0.99 for each in times) for begin in times) <= LINES_PER_SECOND
