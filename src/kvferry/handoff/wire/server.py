"""The control end point of an engine or rank: a thread that answers questions and survives any question and any peer.

What peers can make the server keep is bounded (:mod:`kvferry.handoff.wire.connection`).
"""

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff import messages as protocol
from kvferry.handoff.messages import Answer, Question, Refusal
from kvferry.handoff.wire.connection import Connection, Frame, most_connections
from kvferry.handoff.wire.trust import Keys, bare, is_ipv6
from kvferry.peer_log import PeerLog

logger = PeerLog(logging.getLogger(__name__))

POLL_SECONDS = 0.2
PAUSE_SECONDS = 0.02
SECOND = 1.0
MAX_CONNECTIONS = 4096
SHARE_OF_FILES = 0.5
"""At most this share of the files that the process may open are connections of one server."""
MAX_HANDSHAKES = 1024
"""Connections that have not shaken hands: a peer without a trusted key makes OpenSSL keep 150 KB of its handshake."""
NEWCOMER_SECONDS, IDLE_SECONDS = 1.0, 5.0
"""Where there are too many connections, one that has asked nothing for so long gives way to another: the first for a
peer that has asked nothing yet, the second for one that has."""
MAX_KEPT_BYTES = 256 << 20
"""Of all unfinished questions and unsent answers; beyond that the server closes the connection with most bytes."""
BACKLOG = 1024
_STOP = object()
"""The selector's data for the event that ends its wait."""


class Server:
    """Answers each question with ``answer(question)``, on a thread.

    The thread calls ``upkeep`` several times a second, so that leases are renewed while an engine's step takes long.
    ``port`` 0 takes a free port, a range the first free one of it; :attr:`port` names the port. With ``keys``, only
    peers whose certificates the keys trust are heard. Raises :class:`HandoffError` (port-in-use, invalid-setting).
    """

    def __init__(
        self,
        host: str,
        port: int | range,
        answer: Callable[[Question], Answer],
        upkeep: Callable[[], None] = lambda: None,
        keys: Keys | None = None,
    ) -> None:
        self.host = host
        self._answer = answer
        self._upkeep = upkeep
        self._keys = keys
        self._stop = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._next_upkeep = self._next_second = 0.0
        self._max_connections = most_connections(MAX_CONNECTIONS, SHARE_OF_FILES)
        self._socket = _listen(host, port) if isinstance(port, int) else _listen_in(host, port)
        self.port = int(self._socket.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, _STOP)
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._is_accepting = True
        self._connections: dict[Connection, float] = {}  # and when each has asked last
        self._shaking_hands: set[Connection] = set()
        self._kept_bytes: dict[Connection, int] = {}  # of unfinished questions and unsent answers, where there are some
        self._num_kept_bytes = 0
        self._unserved: list[Connection] = []
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
                connection.close()
        os.close(self._wake)

    def _turn(self) -> None:
        """Serve each connection that has a question or takes an answer, once."""
        # A client may have sent its next question with the last one: no event announces it.
        unserved, self._unserved = dict.fromkeys(self._unserved), []
        for key, _ in self._selector.select(0 if unserved else POLL_SECONDS):
            if key.data is None:
                self._accept()
            elif key.data is not _STOP:
                unserved[key.data] = None
        for connection in unserved:
            if connection in self._connections:
                self._serve(connection)
                self._keep_up()
        self._keep_up()
        self._count_second(time.monotonic())

    def _keep_up(self) -> None:
        now = time.monotonic()
        if now >= self._next_upkeep:
            self._next_upkeep = now + POLL_SECONDS
            if not self._is_accepting:
                self._listen_for_connections(True)
            try:
                self._upkeep()
            except Exception:
                logger.exception("kvferry server: upkeep failed")

    def _count_second(self, now: float) -> None:
        """Close what has been unfinished for too long: after all peers that can go on were served."""
        if now < self._next_second:
            return
        self._next_second = now + SECOND
        for connection in list(self._connections):
            try:
                connection.count_second()
            except HandoffError as error:
                self._refuse(connection, error)

    def _accept(self) -> None:
        is_full = len(self._connections) >= self._max_connections
        has_place = not is_full and len(self._shaking_hands) < MAX_HANDSHAKES
        if not has_place and not self._make_place(self._connections if is_full else self._shaking_hands):
            self._listen_for_connections(False)  # whoever connects waits in the kernel
            return
        try:
            peer, (host, *_) = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            logger.warning("kvferry server: cannot accept a connection: %s", error)
            self._make_place(self._connections)
            self._listen_for_connections(False)
            return
        connection = Connection(peer, host, protocol.MAX_QUESTION_BYTES, self._keys, must_ask=True)
        self._connections[connection] = time.monotonic()
        if self._keys is not None:
            self._shaking_hands.add(connection)
        self._selector.register(peer, selectors.EVENT_READ, connection)

    def _listen_for_connections(self, wanted: bool) -> None:
        if wanted and not self._is_accepting:
            self._selector.register(self._socket, selectors.EVENT_READ)
        elif not wanted and self._is_accepting:
            self._selector.unregister(self._socket)
        self._is_accepting = wanted

    def _serve(self, connection: Connection) -> None:
        """Go on with the handshake or the last answer, or answer one more question."""
        try:
            if connection.advance() and connection.send():
                self._shaking_hands.discard(connection)
                question = connection.take()
                if question is not None:
                    self._connections[connection] = time.monotonic()
                    connection.put(Frame(question.number, self._answer_or_refuse(question.message, connection.host)))
                    connection.send()
                if connection.num_unsent == 0 and connection.has_more:
                    self._unserved.append(connection)
            self._selector.modify(connection.socket, connection.events, connection)
        except HandoffError as error:
            self._refuse(connection, error)
        except OSError:
            self._close(connection)
        except Exception:
            logger.exception("kvferry server: a connection of %s failed", connection.host, peer=connection.host)
            self._close(connection)
        else:
            self._note_bytes(connection, connection.num_bytes)
            self._make_room()

    def _note_bytes(self, connection: Connection, num_bytes: int) -> None:
        # A sum over all connections, after each event of one, would itself be an attack.
        self._num_kept_bytes += num_bytes - self._kept_bytes.pop(connection, 0)
        if num_bytes:
            self._kept_bytes[connection] = num_bytes

    def _make_room(self) -> None:
        while self._num_kept_bytes > MAX_KEPT_BYTES:
            most = max(self._kept_bytes, key=lambda each: self._kept_bytes[each])
            self._close(most, "it has most of the bytes that all connections may have")

    def _make_place(self, among: Iterable[Connection]) -> bool:
        """Close the one of these that has asked nothing for longest; return whether one has been idle long enough.

        Peers that have asked nothing yet go first: those may not even have keys.
        """
        now = time.monotonic()
        idle = [
            (connection.has_asked, asked_at, connection)
            for connection, asked_at in ((each, self._connections[each]) for each in among)
            if now - asked_at >= (IDLE_SECONDS if connection.has_asked else NEWCOMER_SECONDS)
            and (connection.is_idle or not connection.has_asked)
        ]
        if not idle:
            return False
        idlest = min(idle, key=lambda each: each[:2])[2]
        self._close(idlest, "others want to connect, and it has been idle longest")
        return True

    def _refuse(self, connection: Connection, error: HandoffError) -> None:
        connection.refuse(error)
        self._close(connection, str(error))

    def _close(self, connection: Connection, why: str = "") -> None:
        if why:
            logger.warning("kvferry server closes a connection of %s: %s", connection.host, why, peer=connection.host)
        self._selector.unregister(connection.socket)
        connection.close()
        del self._connections[connection]
        self._shaking_hands.discard(connection)
        self._note_bytes(connection, 0)

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
            'Set another "host" or "port" in kv_connector_extra_config; port 0 takes a free one. '
            "'ss -ltnp' lists the processes that listen.",
        ) from error
    listening.setblocking(False)
    return listening


def _listen_in(host: str, ports: range) -> socket.socket:
    """Listen on the first free port of a range."""
    for port in ports:
        try:
            return _listen(host, port)
        except HandoffError as error:
            if error.reason is not Reason.PORT_IN_USE:
                raise
    raise HandoffError(
        Reason.PORT_IN_USE,
        f"cannot listen on {host}: each port from {ports[0]} to {ports[-1]} is in use.",
        'Set wider "rank_ports" in kv_connector_extra_config: each rank of each engine on this host takes one. '
        "'ss -ltnp' lists the processes that listen.",
    )
