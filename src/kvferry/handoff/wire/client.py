"""Sends questions to servers and returns their answers, on a thread.

The client sends a lost message again until it is answered or its deadline; collecting answers never blocks. Names are
looked up on other threads, so that a slow look-up delays no other question.
"""

import logging
import queue
import threading
import time
from contextlib import suppress
from itertools import count

import msgspec
import zmq

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff import messages as protocol
from kvferry.handoff.messages import Answer, Question, Refusal
from kvferry.handoff.wire.addresses import end_point, find_address, is_ipv6, is_numeric
from kvferry.handoff.wire.background import BackgroundCalls
from kvferry.peer_log import PeerLog

logger = PeerLog(logging.getLogger(__name__))

RESEND_SECONDS = 2.0
IDLE_SOCKET_SECONDS = 120.0
LOOKUP_SECONDS = 10.0
MAX_SOCKETS = 512
PAUSE_SECONDS = 0.1
CLOSING_MILLISECONDS = 500
"""How long closing waits for the last questions to be sent."""


class Exchange(msgspec.Struct):
    """One question and its ``answer``, which is None when the deadline passed first.

    The answer to a message only acknowledges it: the exchange is not collected.
    """

    host: str
    port: int
    question: Question
    deadline: float
    is_message: bool = False
    sent_at: float = 0.0
    resend_at: float = 0.0
    answer: Answer | None = None


class Client:
    """Delivers questions; :meth:`collect` returns the exchanges that have ended.

    Any thread may send and tell; one thread should collect.
    """

    def __init__(self) -> None:
        self._outgoing: queue.SimpleQueue[Exchange] = queue.SimpleQueue()
        self._returned: queue.SimpleQueue[Exchange] = queue.SimpleQueue()
        self._stop = threading.Event()
        # A context of its own: a peer that disturbs these sockets disturbs no other socket of this process.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake_receiver = self._context.socket(zmq.PULL)
        self._wake_receiver.bind("inproc://wake")
        self._wake_sender = self._context.socket(zmq.PUSH)
        self._wake_sender.connect("inproc://wake")
        self._wake_lock = threading.Lock()
        self._sequence = count(1)
        self._unsent: list[Exchange] = []
        self._awaiting_answer: dict[bytes, Exchange] = {}
        self._lookups: BackgroundCalls[tuple[str, int], str] = BackgroundCalls("lookup", self._wake)
        self._sockets: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        self._used_at: dict[tuple[str, int], float] = {}
        self._thread = threading.Thread(target=self._run, name="kvferry-client", daemon=True)
        self._thread.start()

    def send(self, host: str, port: int, question: Question, timeout_seconds: float) -> None:
        """Queue a question; :meth:`collect` returns its exchange, answered or not."""
        self._outgoing.put(Exchange(host, port, question, time.monotonic() + timeout_seconds))
        self._wake()

    def tell(self, host: str, port: int, message: Question, timeout_seconds: float) -> None:
        """Queue a message whose answer only acknowledges it; a refusal, or no answer in time, is logged."""
        self._outgoing.put(Exchange(host, port, message, time.monotonic() + timeout_seconds, is_message=True))
        self._wake()

    def collect(self) -> list[Exchange]:
        """Return the exchanges that have ended since the last call."""
        returned = []
        while not self._returned.empty():
            returned.append(self._returned.get_nowait())
        return returned

    def close(self) -> None:
        """Send unsent questions once, await no more answers, and stop. Twice is fine."""
        if not self._stop.is_set():
            self._stop.set()
            self._wake()
        self._thread.join(timeout=5)

    def _wake(self) -> None:
        # A full pipe already wakes the thread: the caller need not wait for room.
        with self._wake_lock, suppress(zmq.Again):
            if not self._wake_sender.closed:
                self._wake_sender.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_receiver, zmq.POLLIN)
        while not self._stop.is_set():
            try:
                self._turn(poller)
            except Exception:
                # No question and no peer may end the thread that carries all others.
                logger.exception("kvferry client: a turn failed")
                self._stop.wait(PAUSE_SECONDS)
        self._take_outgoing(poller)
        for socket in self._sockets.values():
            socket.close(linger=CLOSING_MILLISECONDS)
        with self._wake_lock:
            self._wake_sender.close(linger=0)
        self._wake_receiver.close(linger=0)
        self._context.term()

    def _turn(self, poller: zmq.Poller) -> None:
        for socket, _ in poller.poll(self._milliseconds_to_next_event()):
            if socket is self._wake_receiver:
                self._wake_receiver.recv()
                continue
            try:
                self._receive(socket)
            except Exception:
                logger.exception("kvferry client: a connection failed and is closed")
                self._close(next(name for name, known in self._sockets.items() if known is socket), poller)
        self._take_outgoing(poller)
        self._resend_or_give_up(time.monotonic())
        self._close_idle(poller, time.monotonic())

    def _milliseconds_to_next_event(self) -> int:
        events = [exchange.deadline for exchange in self._unsent]
        events += [min(exchange.resend_at, exchange.deadline) for exchange in self._awaiting_answer.values()]
        now = time.monotonic()
        return max(1, min(1000, int((min(events, default=now + 1) - now) * 1000)))

    def _take_outgoing(self, poller: zmq.Poller) -> None:
        while not self._outgoing.empty():
            self._unsent.append(self._outgoing.get_nowait())
        unsent, self._unsent = self._unsent, []
        for exchange in unsent:
            try:
                if not self._has_socket(exchange, poller):
                    self._unsent.append(exchange)
                    continue
                sequence = next(self._sequence).to_bytes(8, "big")
                self._send(sequence, exchange)
            except Exception as error:
                self._return_unsent(exchange, error)
            else:
                self._awaiting_answer[sequence] = exchange

    def _return_unsent(self, exchange: Exchange, error: Exception) -> None:
        remedy = error.remedy if isinstance(error, KVFerryError) else ""
        why = error.message if isinstance(error, KVFerryError) else str(error)
        problem = f"no question can be sent to {exchange.host}:{exchange.port}: {why}"
        exchange.answer = Refusal.of(HandoffError(Reason.PEER_UNREACHABLE, problem, remedy))
        self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        if not exchange.is_message:
            self._returned.put(exchange)
        elif exchange.answer is None or isinstance(exchange.answer, Refusal):
            log_undelivered(exchange)

    def _has_socket(self, exchange: Exchange, poller: zmq.Poller) -> bool:
        """Return whether the question can be sent: False while its host is looked up, or a message has no room."""
        server = exchange.host, exchange.port
        if server in self._sockets:
            return True
        if exchange.is_message and len(self._sockets) >= MAX_SOCKETS and not self._idle():
            # Nobody sends a message again: it waits for a connection whose question has ended.
            return False
        address = exchange.host
        if not is_numeric(address):
            lookup = self._lookups.get(server, lambda: find_address(*server, LOOKUP_SECONDS))
            if lookup is None:
                return False
            address = lookup.result()
            self._lookups.forget(server)
        self._make_room(poller)
        self._sockets[server] = _connected(self._context, address, exchange.port)
        poller.register(self._sockets[server], zmq.POLLIN)
        return True

    def _send(self, sequence: bytes, exchange: Exchange) -> None:
        now = time.monotonic()
        server = (exchange.host, exchange.port)
        self._used_at[server] = now
        # The answer may be to the first sending, so a lease counts from that.
        exchange.sent_at = exchange.sent_at or now
        exchange.resend_at = now + RESEND_SECONDS
        try:
            self._sockets[server].send_multipart([sequence, protocol.encode(exchange.question)], zmq.NOBLOCK)
        except zmq.Again:
            logger.debug("kvferry client: the socket to %s:%d is full, the question is sent again later", *server)

    def _receive(self, socket: "zmq.Socket[bytes]") -> None:
        frames = socket.recv_multipart(zmq.NOBLOCK)
        exchange = self._awaiting_answer.get(frames[0]) if len(frames) == 2 else None
        if exchange is None or self._sockets[exchange.host, exchange.port] is not socket:
            return
        try:
            exchange.answer = protocol.decode_answer(frames[1])
        except HandoffError as error:
            logger.warning(
                "kvferry client: the answer of %s:%d is malformed: %s",
                exchange.host,
                exchange.port,
                error,
                peer=exchange.host,
            )
            exchange.answer = Refusal.of(error)
        del self._awaiting_answer[frames[0]]
        self._end(exchange)

    def _resend_or_give_up(self, now: float) -> None:
        late = [exchange for exchange in self._unsent if now >= exchange.deadline]
        self._unsent = [exchange for exchange in self._unsent if now < exchange.deadline]
        for exchange in late:
            self._end(exchange)
        for sequence, exchange in list(self._awaiting_answer.items()):
            if now >= exchange.deadline:
                del self._awaiting_answer[sequence]
                self._end(exchange)
            elif now >= exchange.resend_at:
                try:
                    self._send(sequence, exchange)
                except Exception as error:
                    del self._awaiting_answer[sequence]
                    self._return_unsent(exchange, error)

    def _close_idle(self, poller: zmq.Poller, now: float) -> None:
        for server in self._idle():
            if now - self._used_at[server] > IDLE_SOCKET_SECONDS:
                self._close(server, poller)

    def _make_room(self, poller: zmq.Poller) -> None:
        """Close the connection that was used longest ago where there are :data:`MAX_SOCKETS`."""
        if len(self._sockets) < MAX_SOCKETS:
            return
        idle = self._idle()
        if not idle:
            raise HandoffError(
                Reason.PEER_UNREACHABLE,
                f"questions to {MAX_SOCKETS} prefill engines wait for their answers.",
                "Check the hosts and ports in kv_transfer_params: no deployment has so many engines.",
            )
        self._close(min(idle, key=self._used_at.__getitem__), poller)

    def _idle(self) -> list[tuple[str, int]]:
        busy = {(exchange.host, exchange.port) for exchange in self._awaiting_answer.values()}
        return [server for server in self._used_at if server not in busy]

    def _close(self, server: tuple[str, int], poller: zmq.Poller) -> None:
        poller.unregister(self._sockets[server])
        self._sockets.pop(server).close()
        del self._used_at[server]


def ask(host: str, port: int, question: Question, timeout_seconds: float) -> Answer:
    """Ask one question on the caller's thread and wait at most ``timeout_seconds`` for its answer.

    Raises :class:`HandoffError`: peer-unreachable where nothing listens or no answer comes in time, the refusal's
    reason where the peer refuses. Looking a name up may take longer.
    """
    deadline = time.monotonic() + timeout_seconds
    address = find_address(host, port, timeout_seconds)
    with _connected(zmq.Context.instance(), address, port) as socket:
        socket.send_multipart([b"\0", protocol.encode(question)])
        if not socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            raise HandoffError(
                Reason.PEER_UNREACHABLE,
                f"no answer from {host}:{port} within {timeout_seconds:g} s.",
                "Check that the prefill engine runs, and that its kvferry host and port can be reached from here.",
            )
        frames = socket.recv_multipart()
    answer = protocol.decode_answer(frames[-1])
    if isinstance(answer, Refusal):
        raise HandoffError(answer.error().reason, f"{host}:{port} refused: {answer.message}", answer.remedy)
    return answer


def log_undelivered(exchange: Exchange) -> None:
    """Log a message that was refused, or not answered in time."""
    kind = type(exchange.question).__name__.lower()
    refusal = exchange.answer if isinstance(exchange.answer, Refusal) else None
    why = "no answer" if refusal is None else f"{refusal.message} {refusal.remedy}"
    told = "kvferry: a %s to %s:%d was not acknowledged: %s"
    logger.warning(told, kind, exchange.host, exchange.port, why, peer=f"{exchange.host}:{exchange.port} {kind}")


def _connected(context: "zmq.Context[zmq.Socket[bytes]]", address: str, port: int) -> "zmq.Socket[bytes]":
    """Return a socket that connects to a numeric address."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, 10000)
    socket.setsockopt(zmq.IPV6, is_ipv6(address))
    try:
        socket.connect(end_point(address, port))
    except zmq.ZMQError as error:
        socket.close()
        raise HandoffError(
            Reason.PEER_UNREACHABLE,
            f"the prefill engine's address {address}:{port} is not valid: {error.strerror}.",
            "Check that the router copies the prefill engine's kv_transfer_params whole.",
        ) from error
    return socket
