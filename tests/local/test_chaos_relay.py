"""The relay of the chaos suite: what it forwards, and what its troubles do to a connection."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from ..host.vllm.chaos.relay import ENGINE_HOST, Relay, Trouble

RELAY = "127.0.0.4"
SECONDS = 5.0


class Echo:
    """A server that answers each line with itself, and keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.listener = socket.create_server((ENGINE_HOST, 0))
        self.port = int(self.listener.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while line := connection.recv(100):
                self.lines.append(line)
                connection.sendall(line)


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    with suppress(OSError):
        server.close()


@pytest.fixture
def relay(echo: Echo) -> Iterator[Relay]:
    relay = Relay(RELAY)
    relay.open([echo.port])
    yield relay
    relay.close()


def connected(echo: Echo) -> socket.socket:
    return socket.create_connection((RELAY, echo.port), SECONDS)


def has_ended(connection: socket.socket) -> bool:
    """Whether the connection ends, by its end or by a reset, before anything arrives."""
    try:
        return connection.recv(100) == b""
    except ConnectionError:
        return True


def test_it_forwards_both_ways_and_cuts_all_at_once(relay: Relay, echo: Echo) -> None:
    connections = [connected(echo) for _ in range(3)]
    for connection in connections:
        connection.sendall(b"one")
        assert connection.recv(100) == b"one"
    assert relay.cut_all() == 3
    assert all(has_ended(connection) for connection in connections)
    with connected(echo) as again:
        again.sendall(b"two")
        assert again.recv(100) == b"two"


def test_a_lost_question_never_arrives_and_a_lost_answer_was_asked(relay: Relay, echo: Echo) -> None:
    relay.trouble = Trouble(loses="questions", one_in=2)
    with connected(echo) as connection:
        connection.sendall(b"one")
        assert connection.recv(100) == b"one"
        connection.sendall(b"two")
        assert has_ended(connection)
    relay.trouble = Trouble(loses="answers", one_in=1)
    with connected(echo) as connection:
        connection.sendall(b"three")
        assert has_ended(connection)
    assert echo.lines == [b"one", b"three"]
    assert relay.num_lost == 2


def test_it_delays_and_it_is_silent(relay: Relay, echo: Echo) -> None:
    relay.trouble = Trouble(delay_seconds=0.2)
    with connected(echo) as connection:
        began_at = time.monotonic()
        connection.sendall(b"one")
        assert connection.recv(100) == b"one"
        assert 0.4 <= time.monotonic() - began_at < SECONDS
        relay.trouble = Trouble(is_silent=True)
        connection.sendall(b"two")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        relay.end_trouble()
        connection.settimeout(SECONDS)
        assert has_ended(connection), "what follows a gap would be misread"
    assert echo.lines == [b"one"]


def test_where_nothing_listens_the_relay_refuses_too(relay: Relay, echo: Echo) -> None:
    echo.close()
    with connected(echo) as connection:
        assert has_ended(connection)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            connected(echo).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.01)
    pytest.fail("the relay still accepts connections")
