"""Sends questions to prefill engines and hands back their answers, on a thread of its own.

Lost messages are sent again until answered or until their deadline; the answers are
collected without blocking.
"""

import logging
import queue
import socket as socket_module
import threading
import time
from contextlib import suppress
from itertools import count

import msgspec
import zmq

from kvferry.errors import HandoffError, Reason
from kvferry.handoff import protocol
from kvferry.handoff.protocol import Answer, Question, Refusal

logger = logging.getLogger(__name__)

RESEND_SECONDS = 2.0
IDLE_SOCKET_SECONDS = 120.0

# Not id(): a closed socket keeps its address for a moment after its owner's id is taken again.
_courier_numbers = count(1)


class Parcel(msgspec.Struct):
    """One question on its way. ``answer`` is None when the deadline passed first."""

    host: str
    port: int
    question: Question
    deadline: float
    sent_at: float = 0.0
    resend_at: float = 0.0
    answer: Answer | None = None


class Courier:
    """Delivers questions; :meth:`collect` returns what came back.

    Any thread may send; one thread should collect.
    """

    def __init__(self) -> None:
        self._outgoing: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        self._returned: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._wake_address = f"inproc://kvferry-courier-{next(_courier_numbers)}"
        self._wake_receiver = self._context.socket(zmq.PULL)
        self._wake_receiver.bind(self._wake_address)
        self._wake_sender = self._context.socket(zmq.PUSH)
        self._wake_sender.connect(self._wake_address)
        self._wake_lock = threading.Lock()
        self._sequence = count(1)
        self._on_the_way: dict[bytes, Parcel] = {}
        self._sockets: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        self._used_at: dict[tuple[str, int], float] = {}
        self._thread = threading.Thread(target=self._run, name="kvferry-courier", daemon=True)
        self._thread.start()

    def send(self, host: str, port: int, question: Question, timeout_seconds: float) -> None:
        """Queue a question; its parcel comes back through :meth:`collect`, answered or not."""
        self._outgoing.put(Parcel(host, port, question, time.monotonic() + timeout_seconds))
        self._wake()

    def collect(self) -> list[Parcel]:
        """Return the parcels that came back since the last call."""
        returned = []
        while not self._returned.empty():
            returned.append(self._returned.get_nowait())
        return returned

    def close(self) -> None:
        """Stop; questions not yet sent are sent once, answers are no longer awaited. Twice is fine."""
        if not self._stop.is_set():
            self._stop.set()
            self._wake()
        self._thread.join(timeout=5)

    def _wake(self) -> None:
        # A full pipe already wakes the thread: the caller never waits for it.
        with self._wake_lock, suppress(zmq.Again):
            if not self._wake_sender.closed:
                self._wake_sender.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_receiver, zmq.POLLIN)
        while not self._stop.is_set():
            for socket, _ in poller.poll(self._milliseconds_to_next_event()):
                if socket is self._wake_receiver:
                    self._wake_receiver.recv()
                else:
                    self._receive(socket)
            self._take_outgoing(poller)
            self._resend_or_give_up(time.monotonic())
            self._close_idle(poller, time.monotonic())
        self._take_outgoing(poller)
        for socket in self._sockets.values():
            socket.close(linger=500)
        with self._wake_lock:
            self._wake_sender.close(linger=0)
        self._wake_receiver.close(linger=0)

    def _milliseconds_to_next_event(self) -> int:
        if not self._on_the_way:
            return 1000
        now = time.monotonic()
        next_event = min(min(parcel.resend_at, parcel.deadline) for parcel in self._on_the_way.values())
        return max(1, min(1000, int((next_event - now) * 1000)))

    def _take_outgoing(self, poller: zmq.Poller) -> None:
        while not self._outgoing.empty():
            parcel = self._outgoing.get_nowait()
            sequence = next(self._sequence).to_bytes(8, "big")
            try:
                self._send(sequence, parcel, poller)
            except Exception as error:
                # A bad address or message must not end the thread that carries all others.
                problem = f"nothing can be sent to {parcel.host}:{parcel.port}: {error}"
                parcel.answer = Refusal(Reason.PEER_UNREACHABLE.value, problem[:4096])
                self._returned.put(parcel)
            else:
                self._on_the_way[sequence] = parcel

    def _send(self, sequence: bytes, parcel: Parcel, poller: zmq.Poller | None = None) -> None:
        now = time.monotonic()
        destination = (parcel.host, parcel.port)
        if destination not in self._sockets and poller is not None:
            self._sockets[destination] = self._open(parcel.host, parcel.port)
            poller.register(self._sockets[destination], zmq.POLLIN)
        self._used_at[destination] = now
        # An answer may be to the first sending: a lease is counted from that.
        parcel.sent_at = parcel.sent_at or now
        parcel.resend_at = now + RESEND_SECONDS
        try:
            self._sockets[destination].send_multipart([sequence, protocol.encode(parcel.question)], zmq.NOBLOCK)
        except zmq.Again:
            logger.debug("kvferry courier: %s:%d takes no message now", *destination)

    def _open(self, host: str, port: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.SNDHWM, 10000)
        try:
            socket.connect(f"tcp://{host}:{port}")
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def _receive(self, socket: "zmq.Socket[bytes]") -> None:
        frames = socket.recv_multipart()
        parcel = self._on_the_way.get(frames[0]) if len(frames) == 2 else None
        if parcel is None or self._sockets[parcel.host, parcel.port] is not socket:
            return
        try:
            parcel.answer = protocol.decode_answer(frames[1])
        except HandoffError as error:
            logger.warning("kvferry courier: %s:%d answered badly: %s", parcel.host, parcel.port, error)
            parcel.answer = Refusal(error.reason.value, str(error)[:4096])
        del self._on_the_way[frames[0]]
        self._returned.put(parcel)

    def _resend_or_give_up(self, now: float) -> None:
        for sequence, parcel in list(self._on_the_way.items()):
            if now >= parcel.deadline:
                del self._on_the_way[sequence]
                self._returned.put(parcel)
            elif now >= parcel.resend_at:
                self._send(sequence, parcel)

    def _close_idle(self, poller: zmq.Poller, now: float) -> None:
        busy = {(parcel.host, parcel.port) for parcel in self._on_the_way.values()}
        for destination, used_at in list(self._used_at.items()):
            if destination not in busy and now - used_at > IDLE_SOCKET_SECONDS:
                poller.unregister(self._sockets[destination])
                self._sockets.pop(destination).close()
                del self._used_at[destination]


def ask(host: str, port: int, question: Question, timeout_seconds: float) -> Answer:
    """Ask one question on the caller's thread and wait for its answer, in all no longer than the timeout.

    Raises :class:`HandoffError`: peer-unreachable when nothing listens there or no answer came in time, the
    refusal's reason when the peer refused.
    """
    deadline = time.monotonic() + timeout_seconds
    check_listening(host, port, timeout_seconds)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    with socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_MESSAGE_BYTES)
        try:
            socket.connect(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            raise HandoffError(
                Reason.PEER_UNREACHABLE, f"{host}:{port} is no address of a prefill engine: {error.strerror}."
            ) from error
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
        raise HandoffError(known_reason(answer.reason), f"{host}:{port} refused: {answer.message}")
    return answer


def check_listening(host: str, port: int, timeout_seconds: float) -> None:
    """Raise :class:`HandoffError` (peer-unreachable) at once where the host says that nothing listens.

    zmq would go on knocking; but an epoch is one process's, so who is gone will not come back.
    """
    try:
        socket_module.create_connection((host, port), timeout_seconds).close()
    except ConnectionRefusedError as error:
        raise HandoffError(
            Reason.PEER_UNREACHABLE,
            f"nothing listens on {host}:{port}.",
            "The prefill engine has ended, or its kvferry host and port are not what it says: check its log.",
        ) from error
    except (OSError, UnicodeError) as error:
        logger.debug("kvferry: %s:%d takes no connection yet: %s", host, port, error)


def known_reason(reason: str) -> Reason:
    """Return a peer's reason code, or protocol-mismatch if this version does not know it."""
    try:
        return Reason(reason)
    except ValueError:
        return Reason.PROTOCOL_MISMATCH
