"""What a peer sends over a real socket makes few log lines, and forges none."""

import logging
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.holds import check_epoch
from kvferry.handoff.messages import Answer, Handle, Noted, Question, Refusal, Release, Renew
from kvferry.handoff.wire.client import Client
from kvferry.handoff.wire.server import Server
from kvferry.peer_log import LINES_PER_SECOND

from ..waits import collect

HOST = "127.0.0.1"
EPOCH = 7


def answer(question: Question) -> Answer:
    assert isinstance(question, Renew | Release)
    check_epoch(question.epoch, EPOCH)
    return Noted(EPOCH)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(HOST, 0, answer)
    yield server
    server.close()


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


def most_in_a_second(records: list[logging.LogRecord]) -> int:
    """Return the largest number of kvferry's lines in any second."""
    times = [record.created for record in records if record.name.startswith("kvferry")]
    return max((sum(begin <= each < begin + 0.99 for each in times) for begin in times), default=0)


def test_hole_13_renewals_for_a_wrong_epoch_do_not_flood_the_log(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The client's questions are well-formed, and each one is refused: once there was a line for each."""
    for number in range(2000):
        client.send(HOST, server.port, Renew(EPOCH + 1, (Handle("a", number),)), 60.0)
    answers = [exchange.answer for exchange in collect(client, 2000)]
    assert len(answers) == 2000
    assert {each.reason for each in answers if isinstance(each, Refusal)} == {Reason.PEER_CHANGED}
    assert all(isinstance(each, Refusal) for each in answers)
    assert 1 <= most_in_a_second(caplog.records) <= LINES_PER_SECOND
    kinds = Counter(record.msg for record in caplog.records)
    assert max(kinds.values()) <= 1 + caplog.records[-1].created - caplog.records[0].created, kinds


def test_hole_13_random_bytes_do_not_flood_the_log(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    noise = random.Random(0)
    for _ in range(500):
        with suppress(ConnectionError), socket.create_connection((HOST, server.port), timeout=20) as peer:
            peer.sendall(noise.randbytes(300))
    client.send(HOST, server.port, Release(EPOCH, ()), 60.0)
    assert [exchange.answer for exchange in collect(client, 1)] == [Noted(EPOCH)]
    assert most_in_a_second(caplog.records) <= LINES_PER_SECOND


def test_hole_13_a_host_that_a_request_names_forges_no_line(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    host = "prefill\nERROR 11-23 everything is lost\x1b[2J"
    client.tell(host, 5600, Release(EPOCH, ()), 0.5)
    end = time.monotonic() + 20
    while not caplog.records and time.monotonic() < end:
        time.sleep(0.01)
    assert "prefill\\nERROR 11-23 everything is lost\\x1b[2J" in caplog.messages[0]
    assert all(message.isprintable() for message in caplog.messages)


def test_the_text_of_a_refusal_forges_no_line(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(question: Question) -> Answer:
        raise HandoffError(Reason.ABORTED, "no\nERROR forged", "none\x1b[2J")

    server = Server(HOST, 0, refuse)
    try:
        client.tell(HOST, server.port, Release(EPOCH, ()), 10.0)
        end = time.monotonic() + 20
        while len(caplog.records) < 2 and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        server.close()
    assert len(caplog.messages) == 2, "the server's line and the client's"
    assert all("no\\nERROR forged none\\x1b[2J" in message for message in caplog.messages)
