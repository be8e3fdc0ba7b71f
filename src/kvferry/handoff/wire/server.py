"""The control end point of an engine or rank: a thread that answers questions and survives any question.

Clients use zmq sockets. The server uses plain ones, which bound the memory that clients can make it use
(:mod:`kvferry.handoff.wire.zmtp`).
"""

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff import messages as protocol
from kvferry.handoff.messages import Answer, Question, Refusal
from kvferry.handoff.wire.addresses import bare, is_ipv6
from kvferry.handoff.wire.zmtp import HELLO, Inbox, encode_message
from kvferry.peer_log import PeerLog

logger = PeerLog(logging.getLogger(__name__))

POLL_SECONDS = 0.2
PAUSE_SECONDS = 0.02
MAX_CONNECTIONS = 512
"""For one more the server closes the connection that has been idle longest; its client connects again when needed."""
MAX_KEPT_BYTES = 256 << 20
"""Of all unfinished questions and unsent answers; beyond that the server closes the connection with most bytes."""
READ_BYTES = 64 << 10
MAX_FRAMES = 2
"""Of a question and of an answer: the client's number for the question, and the message."""
BACKLOG = 128
_STOP = object()
"""The selector's data for the event that ends its wait."""


class _Connection:
    """One client: its unfinished questions, and the unsent rest of its last answer."""

    def __init__(self, peer: socket.socket, host: str) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = peer
        self.host = host
        self.inbox = Inbox(MAX_FRAMES, protocol.MAX_QUESTION_BYTES)
        self.unsent = memoryview(HELLO)
        self.asked_at = time.monotonic()
        self.events = selectors.EVENT_WRITE

    @property
    def num_bytes(self) -> int:
        return self.inbox.num_bytes + len(self.unsent)

    def send(self) -> bool:
        """Send as much of the last answer as the kernel takes; return whether all is sent. Raises :class:`OSError`."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            return False
        return True

    def read(self) -> list[bytes] | None:
        """Return the next question, reading at most ``READ_BYTES``; None while it is not whole.

        Raises :class:`HandoffError` or :class:`OSError`, which end the connection.
        """
        question = self.inbox.take()
        if question is not None:
            return question
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionError
        self.inbox.add(data)
        return self.inbox.take()


class Server:
    """Answers each question with ``answer(question)``, on a thread.

    The thread calls ``upkeep`` several times a second, so that leases are renewed while an engine's step takes long.
    ``port`` 0 takes a free port, which :attr:`port` names. Raises :class:`HandoffError` (port-in-use, invalid-setting).
    """

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[Question], Answer],
        upkeep: Callable[[], None] = lambda: None,
    ) -> None:
        self.host = host
        self._answer = answer
        self._upkeep = upkeep
        self._stop = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._next_upkeep = 0.0
        self._socket = _listen(host, port)
        self.port = int(self._socket.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ, _STOP)
        self._connections: dict[_Connection, None] = {}
        self._answered: list[_Connection] = []
        self._thread = threading.Thread(target=self._run, name="kvferry-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and close the port, within milliseconds; twice is fine."""
        if not self._stop.is_set():
            os.eventfd_write(self._wake, 1)  # before the thread may close it
            self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        with self._socket, self._selector:
            while not self._stop.is_set():
                try:
                    self._turn()
                except Exception:
                    logger.exception("kvferry server: a turn failed")
                    self._stop.wait(PAUSE_SECONDS)
            for connection in list(self._connections):
                connection.socket.close()
        os.close(self._wake)

    def _turn(self) -> None:
        """Serve each connection that has a question or takes an answer, once."""
        # A client that was just answered may have sent its next question with the last one.
        answered, self._answered = dict.fromkeys(self._answered), []
        for key, _ in self._selector.select(0 if answered else POLL_SECONDS):
            if key.data is None:
                self._accept()
            elif key.data is not _STOP:
                answered[key.data] = None
        for connection in answered:
            if connection in self._connections:
                self._serve(connection)
                self._keep_up()
        self._keep_up()

    def _keep_up(self) -> None:
        now = time.monotonic()
        if now >= self._next_upkeep:
            self._next_upkeep = now + POLL_SECONDS
            try:
                self._upkeep()
            except Exception:
                logger.exception("kvferry server: upkeep failed")

    def _accept(self) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            self._close_idlest()
        try:
            peer, (host, *_) = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            logger.warning("kvferry server: cannot accept a connection: %s", error)
            self._close_idlest()
            self._stop.wait(PAUSE_SECONDS)
            return
        connection = _Connection(peer, host)
        self._selector.register(peer, connection.events, connection)
        self._connections[connection] = None

    def _serve(self, connection: _Connection) -> None:
        """Send the rest of the last answer, or answer one more question."""
        try:
            question = connection.read() if connection.send() else None
            if question is not None:
                connection.asked_at = time.monotonic()
                connection.unsent = memoryview(self._answer_message(question, connection.host))
                if connection.send():
                    self._answered.append(connection)
        except HandoffError as error:
            self._close(connection, str(error))
        except OSError:
            self._close(connection)
        else:
            self._wait_for(connection, selectors.EVENT_WRITE if connection.unsent else selectors.EVENT_READ)
            if connection.num_bytes > READ_BYTES:
                self._make_room()

    def _wait_for(self, connection: _Connection, events: int) -> None:
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.socket, events, connection)

    def _make_room(self) -> None:
        while sum(each.num_bytes for each in self._connections) > MAX_KEPT_BYTES:
            self._close(
                max(self._connections, key=lambda each: each.num_bytes),
                "it has most of the bytes that all connections may have",
            )

    def _close_idlest(self) -> None:
        if self._connections:
            idlest = min(self._connections, key=lambda each: each.asked_at)
            self._close(idlest, "others want to connect, and it has been idle longest")

    def _close(self, connection: _Connection, why: str = "") -> None:
        if why:
            logger.warning("kvferry server closes a connection of %s: %s", connection.host, why, peer=connection.host)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        del self._connections[connection]

    def _answer_message(self, question: list[bytes], host: str) -> bytes:
        """Return the answer as bytes; none for a question without a number."""
        if len(question) < MAX_FRAMES:
            logger.warning(
                "kvferry server: ignored a message of %s with %d frames, expected %d",
                host,
                len(question),
                MAX_FRAMES,
                peer=host,
            )
            return b""
        number, data = question
        return encode_message(number, self._answer_or_refuse(data, host))

    def _answer_or_refuse(self, data: bytes, host: str) -> bytes:
        try:
            return protocol.encode(self._answer(protocol.decode_question(data)))
        except KVFerryError as error:
            logger.warning("kvferry server refused a message of %s: %s", host, error, peer=host)
            refusal = Refusal.of(error)
        except Exception:
            logger.exception("kvferry server failed on a message of %s", host, peer=host)
            refusal = Refusal(Reason.UNSUPPORTED.value, "the server failed on this message.", "Its log says why.")
        return protocol.encode(refusal)


def _listen(host: str, port: int) -> socket.socket:
    try:
        listening = socket.create_server(
            ("" if host == "*" else bare(host), port),
            family=socket.AF_INET6 if is_ipv6(host) else socket.AF_INET,
            backlog=BACKLOG,
            dualstack_ipv6=is_ipv6(host),
        )
    except (OSError, UnicodeError) as error:
        is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise HandoffError(
            Reason.PORT_IN_USE if is_taken else Reason.INVALID_SETTING,
            f"cannot listen on {host}:{port}: {error}.",
            'Set another "host" or "port" in kv_connector_extra_config; port 0 takes a free one.',
        ) from error
    listening.setblocking(False)
    return listening
