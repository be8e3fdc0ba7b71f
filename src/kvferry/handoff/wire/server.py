"""Connections of both sides, and the control end point of an engine or rank.

A :class:`Connection` carries frames: the length of a message, the number of its question, and the message; with keys
inside TLS. A :class:`Server` is a thread that answers questions and survives any question and any peer: what peers can
make it keep is bounded, and a peer that leaves something unfinished is given up.
"""

import errno
import logging
import os
import resource
import selectors
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from struct import Struct
from typing import NamedTuple

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff import messages as protocol
from kvferry.handoff.messages import Answer, Question, Refusal, encode
from kvferry.handoff.wire.trust import Keys, is_ipv6
from kvferry.peer_log import PeerLog
from kvferry.transport.protocol import bare

logger = PeerLog(logging.getLogger(__name__))
READ_BYTES = 64 << 10
"""Read, or sent, at a time."""
PATIENCE_SECONDS = 10
"""How long a peer may take to shake hands and ask its first question, to finish a frame, or to take one."""
CONNECTION = 0
"""The number of a refusal that is of the whole connection."""
NAMED_DIGITS = 16
"""Digits of a certificate's fingerprint in messages."""
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
_HEADER = Struct(">IQ")
_LENGTH_BYTES = 4
_TLS_RECORDS = range(20, 25)
"""First bytes of what TLS sends; the first byte of a frame is that of its length, 0 or 1."""
_TLS_ALERT, _TLS_HANDSHAKE = 21, 22
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})
"""What OpenSSL calls bytes that are no TLS: a refusal of a peer without keys."""
_OTHER_PEER = "Check which program connects to this port: it is for kvferry's engines."
_KEYS = 'Give both engines the setting "keys" with folders that trust each other, or neither of them.'
_STOP = object()
"""The selector's data for the event that ends its wait."""


class Frame(NamedTuple):
    """A message and the number of its question."""

    number: int
    message: bytes


class Connection:
    """A connection that was accepted, or one that :func:`connect` has begun.

    ``host`` is the peer's address, ``max_bytes`` bounds a received message. An accepted peer ``must_ask``: one that
    says nothing is given up. :meth:`advance`, :meth:`send` and :meth:`take` raise :class:`HandoffError` or
    :class:`OSError`, which end the connection.
    """

    def __init__(self, peer: socket.socket, host: str, max_bytes: int, keys: Keys | None, *, must_ask: bool) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = peer
        self.host = host
        self.is_open = False
        self.wants_write = not must_ask
        self.has_asked = not must_ask
        self._is_server = must_ask
        self._max_bytes, self._keys = max_bytes, keys
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()
        self.num_unsent = 0
        self.heard_at = 0.0
        """When the connection was opened, or last brought bytes, by the monotonic clock."""
        self._seconds = 0
        # TLS shows no certificate that it does not trust, and none any more after an alert.
        self._peers_name = "one that TLS does not show"
        self._own_name = "" if keys is None else keys.fingerprint[:NAMED_DIGITS]

    @property
    def num_bytes(self) -> int:
        """Bytes kept of unfinished frames in both directions."""
        return len(self._received) + self.num_unsent

    @property
    def num_received(self) -> int:
        """Bytes kept of unfinished frames of the peer."""
        return len(self._received)

    @property
    def events(self) -> int:
        """The events of a selector to wait for: a peer that has not taken its answer is asked for nothing more."""
        if self._is_server:
            return selectors.EVENT_WRITE if self.wants_write else selectors.EVENT_READ
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.wants_write else 0)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way: the connection is open, and every frame whole."""
        return self.is_open and self.has_asked and not self._received and not self._unsent

    @property
    def has_more(self) -> bool:
        """Whether :meth:`take` has something to do that the kernel does not announce: the bytes lie in this process."""
        pending = self.socket.pending() if isinstance(self.socket, ssl.SSLSocket) and self.is_open else 0
        return pending > 0 or self._has_whole_frame()

    def advance(self) -> bool:
        """Go on connecting and shaking hands; return whether frames can be exchanged."""
        if self.is_open:
            return True
        # An accepted connection that was reset may still have an alert of TLS to read, which says why.
        if not self._is_server:
            if (error := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) != 0:
                raise OSError(error, "cannot connect")
            try:
                self.socket.getpeername()
            except OSError:
                return False
        if self._keys is not None and not self._shake_hands(self._keys):
            return False
        self.is_open, self.wants_write, self.heard_at = True, bool(self._unsent), time.monotonic()
        return True

    def put(self, frame: Frame) -> None:
        data = _HEADER.pack(len(frame.message), frame.number) + frame.message
        self._unsent.append(memoryview(data))
        self.num_unsent += len(data)
        self.wants_write = True

    def send(self) -> bool:
        """Send what is queued, as far as the kernel takes it; return whether all of it is sent."""
        try:
            while self._unsent:
                num_sent = self.socket.send(self._unsent[0][:READ_BYTES])
                self.num_unsent -= num_sent
                self._unsent[0] = self._unsent[0][num_sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()
                    self._seconds = 0
        except (BlockingIOError, ssl.SSLWantWriteError):
            self.wants_write = True
            return False
        except ssl.SSLWantReadError:
            self.wants_write = False
            return False
        except ssl.SSLError as error:
            raise self._tls_failed(error) from error
        self.wants_write = False
        return True

    def take(self) -> Frame | None:
        """Return the next frame, reading at most ``READ_BYTES``; None while it is not whole.

        Raises :class:`HandoffError`: malformed-message as soon as the peer announces a longer message than allowed,
        permission-denied where one side speaks TLS and the other does not; :class:`ConnectionError` at the end.
        """
        if not self._has_whole_frame():
            self._read()
        self._check()
        if not self._has_whole_frame():
            return None
        length, number = _HEADER.unpack_from(self._received)
        end = _HEADER.size + length
        with memoryview(self._received) as view:
            message = bytes(view[_HEADER.size : end])
        del self._received[:end]
        self.has_asked, self._seconds = True, 0
        return Frame(number, message)

    def count_second(self) -> None:
        """Note that a second has passed in which the peer could go on.

        Raises :class:`HandoffError` (deadline-exceeded) for a peer that has left something unfinished for
        ``PATIENCE_SECONDS``. Seconds are counted, and no clock read, so that a process that was stopped, or busy, does
        not take its own time for its peers'.
        """
        self._seconds = 0 if self.is_idle else self._seconds + 1
        if self._seconds > PATIENCE_SECONDS:
            what = "to ask" if not self.has_asked else "to connect" if not self.is_open else "for a message"
            raise HandoffError(
                Reason.DEADLINE_EXCEEDED, f"the peer took more than {PATIENCE_SECONDS} s {what}.", _OTHER_PEER
            )

    def refuse(self, error: HandoffError) -> None:
        """Tell the peer why the connection is closed, as far as the peer takes it at once."""
        with suppress(OSError, HandoffError):
            self.put(Frame(CONNECTION, encode(Refusal.of(error))))
            self.send()

    def close(self) -> None:
        self.socket.close()

    def _shake_hands(self, keys: Keys) -> bool:
        if not isinstance(self.socket, ssl.SSLSocket):
            if self._is_server and not self._begins_tls():
                return False
            context = keys.server_context if self._is_server else keys.client_context
            self.socket = context.wrap_socket(self.socket, server_side=self._is_server, do_handshake_on_connect=False)
        try:
            self.socket.do_handshake()
        except ssl.SSLWantReadError:
            self.wants_write = False
            return False
        except ssl.SSLWantWriteError:
            self.wants_write = True
            return False
        except ssl.SSLError as error:
            raise self._tls_failed(error) from error
        self._peers_name = keys.check_peer(self.socket.getpeercert(binary_form=True))[:NAMED_DIGITS]
        return True

    def _begins_tls(self) -> bool:
        """Return whether the peer begins a handshake. Raises :class:`HandoffError` for one without TLS, as which it
        can be told why: OpenSSL would close the connection without a word.
        """
        try:
            first = self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        if not first:
            raise ConnectionError("the peer has closed the connection")
        if first[0] != _TLS_HANDSHAKE:
            raise _one_has_keys(
                f"the engine that listens has them (certificate {self._own_name}), the one that connects has none"
            )
        return True

    def _tls_failed(self, error: ssl.SSLError) -> Exception:
        """Return what an error of TLS means: the end of the connection, or a peer that is not trusted."""
        if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return ConnectionError("the peer has closed the connection")
        if error.reason in _NO_TLS and not self._is_server:
            return _one_has_keys(
                f"the engine that listens does not speak TLS: it has none, or is no kvferry engine; the one that "
                f"connects has them (certificate {self._own_name})"
            )
        why = getattr(error, "verify_message", "") or (error.reason or str(error)).replace("_", " ").lower()
        refuses = "TLS fails"
        if "ALERT" in (error.reason or ""):
            refuses = "the peer does not trust this side"
        elif isinstance(error, ssl.SSLCertVerificationError):
            refuses = "this side does not trust the peer"
        return HandoffError(
            Reason.PERMISSION_DENIED,
            f"{refuses}: {why}: certificate: this side has {self._own_name}, the peer has {self._peers_name}.",
            "Copy each engine's certificate.pem into the other's folder trusted/ (\"kvferry keys show FOLDER\" names "
            "both), or give both engines one folder, and start them again.",
        )

    def _read(self) -> None:
        try:
            data = self.socket.recv(READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except ssl.SSLWantWriteError:
            self.wants_write = True
            return
        except ssl.SSLError as error:
            raise self._tls_failed(error) from error
        if not data:
            raise ConnectionError("the peer has closed the connection")
        self._received += data
        self.heard_at = time.monotonic()

    def _has_whole_frame(self) -> bool:
        if len(self._received) < _HEADER.size:
            return False
        length: int = _HEADER.unpack_from(self._received)[0]
        return len(self._received) >= _HEADER.size + length

    def _check(self) -> None:
        """Raise :class:`HandoffError` where the received bytes begin no frame that is allowed."""
        first = self._received[0] if self._received else 0
        if self._keys is None and first in _TLS_RECORDS:
            sides = ("connects", "listens") if self._is_server else ("listens", "connects")
            speaks = "refuses TLS without keys" if first == _TLS_ALERT else "speaks TLS"
            raise _one_has_keys(f"the engine that {sides[0]} has them: it {speaks}, the one that {sides[1]} has none")
        length = int.from_bytes(self._received[:_LENGTH_BYTES], "big")
        if len(self._received) >= _LENGTH_BYTES and length > self._max_bytes:
            raise HandoffError(
                Reason.MALFORMED_MESSAGE,
                f"the peer announces a message of {length} bytes, at most {self._max_bytes} are allowed.",
                _OTHER_PEER,
            )


def connect(address: str, port: int, max_bytes: int, keys: Keys | None) -> Connection:
    """Begin to connect to a numeric address. Raises :class:`OSError`."""
    peer = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection = Connection(peer, address, max_bytes, keys, must_ask=False)
        peer.connect((address, port))
    except BlockingIOError:
        pass
    except BaseException:
        peer.close()
        raise
    return connection


def _one_has_keys(who: str) -> HandoffError:
    """Return the refusal, in words that hold on both sides: the refusing side sends them to the other one."""
    return HandoffError(Reason.PERMISSION_DENIED, f"one of two engines has keys: {who}.", _KEYS)


def most_connections(most: int, share: float) -> int:
    """Return a bound of connections: ``most``, or this share of the files that the process may open, if fewer.

    >>> most_connections(2, 0.5)
    2
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else max(1, min(most, int(files * share)))


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
        self._answer, self._upkeep, self._keys = answer, upkeep, keys
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
        self._refused: Counter[str] = Counter()
        self._told_refused: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="kvferry-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and close the port, within milliseconds; twice is fine."""
        if not self._stop.is_set():
            os.eventfd_write(self._wake, 1)  # before the thread may close it
            self._stop.set()
        self._thread.join(timeout=5)

    @property
    def has_refused(self) -> bool:
        """Whether :meth:`take_refused` has something to tell; any thread may ask."""
        return self._refused.total() != self._told_refused.total()

    def take_refused(self) -> Counter[str]:
        """Return how many messages and connections were refused since the last call, by reason; one thread may call."""
        before, self._told_refused = self._told_refused, self._refused.copy()
        return self._told_refused - before

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
            each
            for each in among
            if now - self._connections[each] >= (IDLE_SECONDS if each.has_asked else NEWCOMER_SECONDS)
            and (each.is_idle or not each.has_asked)
        ]
        if not idle:
            return False
        idlest = min(idle, key=lambda each: (each.has_asked, self._connections[each]))
        self._close(idlest, "others want to connect, and it has been idle longest")
        return True

    def _refuse(self, connection: Connection, error: HandoffError) -> None:
        self._refused[error.reason.value] += 1
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
        self._refused[refusal.reason] += 1
        return protocol.encode(refusal)


def _listen(host: str, port: int) -> socket.socket:
    try:
        listening = socket.create_server(
            ("" if host == "*" else bare(host), port),
            family=_family(host),
            backlog=BACKLOG,
            dualstack_ipv6=is_ipv6(host),
        )
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, "port", error) from error
    listening.setblocking(False)
    return listening


def check_port(host: str, port: int, setting: str = "port") -> None:
    """Raise as :class:`Server` where nothing can listen at a port, and keep nothing; ``setting`` names the port.

    The port is bound and not listened on: no peer connects, and another process may take the port meanwhile.
    """
    try:
        with socket.socket(_family(host)) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_ipv6(host):
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            bound.bind(("" if host == "*" else bare(host), port))
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, setting, error) from error


def check_ports(host: str, ports: range, num_needed: int) -> None:
    """Raise as :class:`Server` unless so many of these ports are free."""
    num_free = 0
    for port in ports:
        if num_free == num_needed:
            return
        with suppress(HandoffError):
            check_port(host, port)
            num_free += 1
    if num_free < num_needed:
        found = f"{num_free} of the ports from {ports[0]} to {ports[-1]} are free"
        raise _too_few_ports(host, f"{found}, and this engine needs {num_needed} for its ranks")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if is_ipv6(host) else socket.AF_INET


def _cannot_listen(host: str, port: int, setting: str, error: Exception) -> HandoffError:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRNOTAVAIL:
        remedy = "Set \"host\" in kv_connector_extra_config to an address of this machine: 'ip address' lists them."
    else:
        remedy = (
            f'Set another "host" or "{setting}" in kv_connector_extra_config; port 0 takes a free one. '
            "'ss -ltnp' lists the processes that listen."
        )
    reason = Reason.PORT_IN_USE if number == errno.EADDRINUSE else Reason.INVALID_SETTING
    return HandoffError(reason, f"cannot listen on {host}:{port}: {error}.", remedy)


def _listen_in(host: str, ports: range) -> socket.socket:
    for port in ports:
        try:
            return _listen(host, port)
        except HandoffError as error:
            if error.reason is not Reason.PORT_IN_USE:
                raise
    raise _too_few_ports(host, f"each port from {ports[0]} to {ports[-1]} is in use")


def _too_few_ports(host: str, found: str) -> HandoffError:
    return HandoffError(
        Reason.PORT_IN_USE,
        f"cannot listen on {host}: {found}.",
        'Set wider "rank_ports" in kv_connector_extra_config: each rank of each engine on this host takes one. '
        "'ss -ltnp' lists the processes that listen.",
    )
