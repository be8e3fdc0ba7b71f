"""Asks other engines without waiting for them: questions on one thread, longer calls on a thread each.

The client sends a lost message again until it is answered or its deadline; collecting answers never blocks. A
:class:`BackgroundCall` takes long and may fail, such as a handshake; fetching its result never blocks. Names are looked
up so too: a slow look-up delays no question.
"""

import heapq
import logging
import os
import queue
import random
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import closing
from functools import partial
from itertools import count
from typing import Generic, TypeVar

import msgspec

from kvferry.errors import HandoffError, KVFerryError, Reason, open_port
from kvferry.handoff import messages as protocol
from kvferry.handoff.messages import Answer, Question, Refusal
from kvferry.handoff.wire.server import CONNECTION, Connection, Frame, connect, most_connections
from kvferry.handoff.wire.trust import THIS_MACHINE, Trust
from kvferry.peer_log import PeerLog

logger = PeerLog(logging.getLogger(__name__))

RESEND_SECONDS = 2.0
SILENT_SECONDS = 4.0
"""So long after a question the client gives up a connection that has brought nothing, and connects anew.

After a network failure TCP may pause for as long again as the failure lasted. Since a server or a network may also be
slow, each further connection without an answer has twice the time of the last one, up to ``MAX_SILENT_SECONDS``.
"""
MAX_SILENT_SECONDS = 32.0
SECOND = 1.0
IDLE_SOCKET_SECONDS = 120.0
MAX_SOCKETS = 4096
SHARE_OF_FILES = 0.25
"""At most this share of the files that the process may open are connections of one client."""
MAX_RECEIVED_BYTES = 256 << 20
"""Of all unfinished answers; beyond that the client closes the connection with most bytes."""
MAX_UNSENT_BYTES = 8 << 20
"""For one server that takes nothing; further questions to it are sent later."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.1, 2.0
"""Between attempts to connect: each pause is twice the last one, and a random part of it is left out."""
PAUSE_SECONDS = 0.1
CLOSING_SECONDS = 0.5
"""How long closing waits for the last questions to be sent."""
MAX_RUNNING = 64
"""Background calls of one kind that have a slot; a further call waits for a slot, the oldest first."""
LATE_SECONDS = 15.0
"""A call that has run for so long has no slot any more: a look-up of a name cannot be stopped, and may hang."""
MAX_LATE = 192
"""Calls without a slot that run; a later one keeps its slot."""
WAIT_SECONDS = 15.0
"""How long a call waits for a slot; then it fails."""
MAX_WAITING = 4096
"""Background calls of one kind that wait for a slot."""
FAILURE_SECONDS = 2.0
"""How long a failed call answers for its key; then the next request calls again."""
UNCLAIMED_SECONDS = 30.0
"""How long a result that nobody fetched is kept."""

Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")


class BackgroundCall(Generic[Found]):
    """One call on a thread of its own, whose result is fetched without blocking. ``wake`` is called when it ends."""

    def __init__(self, name: str, call: Callable[[], Found], wake: Callable[[], None] = lambda: None) -> None:
        self._name, self._call, self._wake = name, call, wake
        self._result: Found | None = None
        self._error: KVFerryError | None = None
        self._asked_at = time.monotonic()
        self._started_at: float | None = None
        self._ended_at: float | None = None

    def start(self) -> None:
        """Start the call. Where the process can start no thread, the call fails."""
        self._started_at = time.monotonic()
        try:
            threading.Thread(target=self._run, name=f"kvferry-{self._name}", daemon=True).start()
        except RuntimeError as error:
            self.fail(unexpected_error(self._name, error))

    @property
    def is_running(self) -> bool:
        """Whether the call has not ended; it may wait for its start."""
        return self._ended_at is None

    @property
    def has_result(self) -> bool:
        return self._result is not None

    def takes_longer_than(self, seconds: float) -> bool:
        """Return whether the call has not ended and was asked for more than ``seconds`` ago."""
        return self._ended_at is None and time.monotonic() - self._asked_at > seconds

    def is_late(self, now: float) -> bool:
        return self._ended_at is None and self._started_at is not None and now - self._started_at > LATE_SECONDS

    def is_expired(self, now: float) -> bool:
        """Return whether the call ended so long ago that a request for its key calls again."""
        kept = UNCLAIMED_SECONDS if self._error is None else FAILURE_SECONDS
        return self._ended_at is not None and now - self._ended_at > kept

    def is_older_than(self, seconds: float) -> bool:
        return self._ended_at is not None and time.monotonic() - self._ended_at > seconds

    def fail(self, error: KVFerryError) -> None:
        """Replace the result by an error: the caller found the result to be of no use."""
        if self._error is None:
            self._error, self._ended_at = error.without_traceback(), time.monotonic()
            self._result = None

    def result(self) -> Found:
        """Return the result of the call, which must have ended, or raise its error."""
        if self._error is not None:
            raise self._error.without_traceback()
        if self._result is None:
            problem = f"the {self._name} ended without a result."
            raise HandoffError(Reason.PEER_UNREACHABLE, problem, "Send the request again.")
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._call()
        except KVFerryError as error:
            self._error = error.without_traceback()
        except Exception as error:
            logger.exception("kvferry: a %s failed unexpectedly", self._name)
            self._error = unexpected_error(self._name, error)
        self._ended_at = time.monotonic()
        self._wake()


def within(seconds: float, name: str, call: Callable[[], Found], remedy: str) -> Found:
    """Return what a call returns that waits for others, or may compute for hours, or raise what it raises.

    Raises :class:`HandoffError` (deadline-exceeded) where it takes longer; the call goes on then, on its own thread.
    """
    has_ended = threading.Event()
    running = BackgroundCall(name, call, has_ended.set)
    running.start()
    if running.is_running and not has_ended.wait(seconds):
        raise HandoffError(Reason.DEADLINE_EXCEEDED, f"the {name} has not ended within {seconds:g} s.", remedy)
    return running.result()


class BackgroundCalls(Generic[Key, Found]):
    """Background calls by key: one for each key. At most :data:`MAX_RUNNING` have a slot; the others wait in order.

    One thread may use it.

    >>> lookups = BackgroundCalls[str, int]("lookup")
    >>> while (found := lookups.get("a", lambda: 7)) is None:
    ...     time.sleep(0.001)
    >>> found.result(), len(lookups)
    (7, 1)
    """

    def __init__(self, name: str, wake: Callable[[], None] = lambda: None) -> None:
        self._name, self._wake = name, wake
        self._known: dict[Key, BackgroundCall[Found]] = {}
        self._waiting: deque[BackgroundCall[Found]] = deque()
        self._running: list[BackgroundCall[Found]] = []

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Key, call: Callable[[], Found]) -> BackgroundCall[Found] | None:
        """Return the call for this key once it has ended, else None; queue it where there is none."""
        now = time.monotonic()
        known = self._known.get(key)
        if known is None or known.is_expired(now):
            self._known = {key: each for key, each in self._known.items() if not each.is_expired(now)}
            if len(self._waiting) >= MAX_WAITING:
                # Of calls for which nobody asks any more, too: else their places would stay taken.
                self._start_waiting(now)
            if len(self._waiting) >= MAX_WAITING:
                return None
            known = self._known[key] = BackgroundCall(self._name, call, self._wake)
            self._waiting.append(known)
        if self._waiting:
            self._start_waiting(now)
        return None if known.is_running else known

    def with_results(self) -> list[BackgroundCall[Found]]:
        return [each for each in self._known.values() if each.has_result]

    def takes_longer_than(self, key: Key, seconds: float) -> bool:
        """Return whether the call for this key has not ended after ``seconds``, its wait for a slot included."""
        known = self._known.get(key)
        return known is not None and known.takes_longer_than(seconds)

    def forget(self, key: Key) -> None:
        """Forget the result: the next request for this key calls again."""
        self._known.pop(key, None)

    def _start_waiting(self, now: float) -> None:
        """Start as many calls as there are slots, and fail the calls that have waited too long."""
        # Not all calls: each that waits asks for itself, and there may be thousands.
        self._running = [each for each in self._running if each.is_running]
        num_late = sum(each.is_late(now) for each in self._running)
        num_free = MAX_RUNNING - (len(self._running) - min(num_late, MAX_LATE))
        while self._waiting and self._waiting[0].takes_longer_than(WAIT_SECONDS):
            self._waiting.popleft().fail(_no_slot(self._name))
        for _ in range(min(num_free, len(self._waiting))):
            self._running.append(self._waiting.popleft())
            self._running[-1].start()


def _no_slot(what: str) -> HandoffError:
    return HandoffError(
        Reason.DEADLINE_EXCEEDED,
        f"the {what} did not begin within {WAIT_SECONDS:g} s: {MAX_RUNNING} others have not ended.",
        "Check the hosts that this engine is told to ask: too many of them do not answer.",
    )


def unexpected_error(what: str, error: Exception) -> HandoffError:
    """Return the error for an exception that the code does not expect."""
    return HandoffError(
        Reason.PEER_UNREACHABLE,
        f"the {what} failed: {type(error).__name__}: {error}.",
        "Please report it with the traceback in the log.",
    )


class Exchange(msgspec.Struct, eq=False):
    """One question and its ``answer``, which is None when the deadline passed first.

    The answer to a message only acknowledges it: the exchange is not collected. ``is_trusted`` says that a trusted
    engine has named the host, or this engine itself.
    """

    host: str
    port: int
    question: Question
    deadline: float
    is_message: bool = False
    is_trusted: bool = False
    sent_at: float = 0.0
    answer: Answer | None = None


class _Link(msgspec.Struct, eq=False):
    """One server: its connection, where there is one, and the questions that await its answers, by their numbers.

    A host that is trusted for one question is not for another: then there are two links.
    """

    host: str
    port: int
    is_trusted: bool
    used_at: float
    awaiting: dict[int, Exchange] = {}
    untried: list[str] = []
    """Addresses that the present attempt to connect has left."""
    connection: Connection | None = None
    num_failures: int = 0
    is_waiting: bool = False
    """Whether a look-up or a timer leads to the next attempt to connect."""

    @property
    def server(self) -> tuple[str, int, bool]:
        return self.host, self.port, self.is_trusted

    @property
    def num_unsent(self) -> int:
        return 0 if self.connection is None else self.connection.num_unsent

    def is_silent(self, exchange: Exchange, now: float) -> bool:
        """Whether the connection has brought nothing for too long since a question was sent on it.

        While the kernel has not taken all that was put, :meth:`Connection.count_second` bounds the time instead.
        """
        if self.connection is None or not self.connection.is_open or self.num_unsent:
            return False
        patience = min(MAX_SILENT_SECONDS, SILENT_SECONDS * (1 << min(self.num_failures, 10)))
        return now - max(exchange.sent_at, self.connection.heard_at) >= patience


class Client:
    """Delivers questions; :meth:`collect` returns the exchanges that have ended.

    Any thread may send and tell; one thread should collect. ``trust`` has the keys, and says where the client connects.
    """

    def __init__(self, trust: Trust = THIS_MACHINE) -> None:
        self.trust = trust
        self._outgoing: queue.SimpleQueue[Exchange] = queue.SimpleQueue()
        self._returned: queue.SimpleQueue[Exchange] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._event_lock = threading.Lock()
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._event, selectors.EVENT_READ)
        self._max_links = most_connections(MAX_SOCKETS, SHARE_OF_FILES)
        self._links: dict[tuple[str, int, bool], _Link] = {}
        self._unserved: list[_Link] = []
        self._looked_up: list[_Link] = []
        self._without_link: list[Exchange] = []
        self._lookups: BackgroundCalls[tuple[str, int, bool], list[str]] = BackgroundCalls("lookup", self._wake)
        self._numbers = count(CONNECTION + 1)
        # When to look at a question of a link again, or, with the number CONNECTION, to connect the link.
        self._timers: list[tuple[float, int, _Link, int]] = []
        self._num_timers = count()
        self._next_second = 0.0
        self._received_bytes: dict[_Link, int] = {}  # of unfinished answers, where there are some
        self._num_received_bytes = 0
        self._thread = threading.Thread(target=self._run, name="kvferry-client", daemon=True)
        self._thread.start()

    def send(
        self, host: str, port: int, question: Question, timeout_seconds: float, *, is_trusted: bool = False
    ) -> None:
        """Queue a question; :meth:`collect` returns its exchange, answered or not."""
        self._queue(Exchange(host, port, question, time.monotonic() + timeout_seconds, is_trusted=is_trusted))

    def tell(
        self, host: str, port: int, message: Question, timeout_seconds: float, *, is_trusted: bool = False
    ) -> None:
        """Queue a message whose answer only acknowledges it; a refusal, or no answer in time, is logged."""
        deadline = time.monotonic() + timeout_seconds
        self._queue(Exchange(host, port, message, deadline, is_message=True, is_trusted=is_trusted))

    @property
    def knows_peers(self) -> bool:
        """Whether what a peer has said comes from a trusted engine: there are keys, so others are not heard."""
        return self.trust.keys is not None

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

    def _queue(self, exchange: Exchange) -> None:
        self._outgoing.put(exchange)
        self._wake()

    def _wake(self) -> None:
        with self._event_lock:
            if not self._is_closed:
                os.eventfd_write(self._event, 1)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._try_turn(SECOND)
        end = time.monotonic() + CLOSING_SECONDS
        self._try_turn(0)
        while any(link.num_unsent for link in self._links.values()) and time.monotonic() < end:
            self._try_turn(PAUSE_SECONDS)
        for link in list(self._links.values()):
            self._remove(link)
        with self._event_lock:
            self._is_closed = True
            self._selector.close()
            os.close(self._event)

    def _try_turn(self, most_seconds: float) -> None:
        try:
            self._turn(most_seconds)
        except Exception:
            # No question and no peer may end the thread that carries all others.
            logger.exception("kvferry client: a turn failed")
            self._stop.wait(PAUSE_SECONDS)

    def _turn(self, most_seconds: float) -> None:
        """Serve each link once that has an answer or takes a question, and do what is due."""
        unserved, self._unserved = dict.fromkeys(self._unserved), []
        for key, _ in self._selector.select(0 if unserved else min(most_seconds, self._seconds_to_next_event())):
            if key.data is None:
                os.eventfd_read(self._event)
            else:
                unserved[key.data] = None
        unserved |= dict.fromkeys(self._take_outgoing())
        looked_up, self._looked_up = self._looked_up, []
        for link in looked_up:
            self._open(link)
        for link in unserved:
            self._serve(link)
        self._act_on_time(time.monotonic())

    def _seconds_to_next_event(self) -> float:
        events = [exchange.deadline for exchange in self._without_link]
        events += [when for when, *_ in self._timers[:1]]
        now = time.monotonic()
        return max(0.0, min(events, default=now + SECOND) - now)

    # Questions.

    def _take_outgoing(self) -> list[_Link]:
        """Give each new question to the link of its server, and return these links."""
        new, self._without_link = self._without_link, []
        while not self._outgoing.empty():
            new.append(self._outgoing.get_nowait())
        links = []
        for exchange in new:
            try:
                protocol.encode(exchange.question)  # what cannot be sent is returned, without a connection
                link = self._link(exchange)
            except Exception as error:
                self._return_unsent(exchange, error)
                continue
            if link is None:
                self._without_link.append(exchange)
                continue
            number = next(self._numbers)
            link.awaiting[number] = exchange
            self._set_timer(min(time.monotonic() + RESEND_SECONDS, exchange.deadline), link, number)
            if link.connection is not None:
                self._put(link, number)
            elif not link.is_waiting:
                self._open(link)
            links.append(link)
        return links

    def _link(self, exchange: Exchange) -> _Link | None:
        """Return the server's link, None while a message has no room: nobody sends a message again, so it waits."""
        server = exchange.host, exchange.port, exchange.is_trusted
        if (link := self._links.get(server)) is not None:
            return link
        if len(self._links) >= self._max_links:
            idle = [each for each in self._links.values() if not each.awaiting]
            if not idle and exchange.is_message:
                return None
            if not idle:
                raise HandoffError(
                    Reason.PEER_UNREACHABLE,
                    f"questions to {len(self._links)} engines wait for their answers.",
                    "Check the hosts and ports in kv_transfer_params, or let the engine open more files (ulimit -n).",
                )
            self._remove(min(idle, key=lambda each: each.used_at))
        link = self._links[server] = _Link(*server, used_at=time.monotonic())
        return link

    def _put(self, link: _Link, number: int) -> None:
        """Queue a question on the connection; where the server takes nothing, the question is put again later."""
        assert link.connection is not None
        exchange, link.used_at = link.awaiting[number], time.monotonic()
        # What the server has not taken is not sent a second time.
        if link.num_unsent and (exchange.sent_at or link.num_unsent > MAX_UNSENT_BYTES):
            return
        try:
            link.connection.put(Frame(number, protocol.encode(exchange.question)))
        except Exception as error:
            del link.awaiting[number]
            self._return_unsent(exchange, error)
        # The answer may be to the first sending, so a lease counts from that.
        exchange.sent_at = exchange.sent_at or link.used_at

    def _receive(self, link: _Link, frame: Frame) -> None:
        """End the exchange that the frame answers. Raises :class:`HandoffError` for a refusal of the connection."""
        exchange = link.awaiting.pop(frame.number, None)
        if exchange is None:
            if frame.number == CONNECTION and isinstance(refusal := protocol.decode_answer(frame.message), Refusal):
                raise refusal.error()
            return
        link.num_failures = 0
        try:
            exchange.answer = protocol.decode_answer(frame.message)
        except HandoffError as error:
            told = "kvferry client: the answer of %s:%d is malformed: %s"
            logger.warning(told, link.host, link.port, error, peer=link.host)
            exchange.answer = Refusal.of(error)
        self._end(exchange)

    def _return_unsent(self, exchange: Exchange, error: Exception) -> None:
        known = error if isinstance(error, KVFerryError) else HandoffError(Reason.PEER_UNREACHABLE, str(error), "")
        problem = f"no question can be sent to {exchange.host}:{exchange.port}: {known.message}"
        exchange.answer = Refusal.of(HandoffError(known.reason, problem, known.remedy))
        self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        if not exchange.is_message:
            self._returned.put(exchange)
        elif exchange.answer is None or isinstance(exchange.answer, Refusal):
            log_undelivered(exchange)

    # Connections.

    def _open(self, link: _Link) -> None:
        """Connect to the server, after its name has been looked up on another thread."""
        link.is_waiting = False
        if not link.awaiting:
            self._remove(link)
            return
        try:
            address = self.trust.known_address(link.host, link.is_trusted)
            if address is not None:
                link.untried = [address]
            elif (lookup := self._lookups.get(link.server, partial(self.trust.addresses, *link.server))) is not None:
                link.untried = list(lookup.result())
                self._lookups.forget(link.server)
            else:
                link.is_waiting = True
                self._looked_up.append(link)
                return
            self._connect(link)
        except Exception as error:
            self._fail(link, error)

    def _connect(self, link: _Link) -> None:
        """Begin to connect to the next address; after the last one try again later."""
        while link.untried:
            address = link.untried.pop(0)
            try:
                link.connection = connect(address, link.port, protocol.MAX_MESSAGE_BYTES, self.trust.keys)
            except OSError as error:
                logger.debug("kvferry client: cannot connect to %s:%d: %s", address, link.port, error)
                continue
            self._selector.register(link.connection.socket, link.connection.events, link)
            for number in list(link.awaiting):
                self._put(link, number)
            return
        link.num_failures += 1
        link.is_waiting = True
        pause = min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(link.num_failures - 1, 10))
        pause *= random.uniform(0.5, 1.0)  # nosec B311 # nobody gains by guessing a pause
        self._set_timer(time.monotonic() + pause, link, CONNECTION)

    def _serve(self, link: _Link) -> None:
        """Go on connecting, take one answer, and send."""
        connection = link.connection
        if connection is None:
            return
        try:
            if connection.advance():
                if (frame := connection.take()) is not None:
                    self._receive(link, frame)
                connection.send()
                if connection.has_more:
                    self._unserved.append(link)
                self._note_bytes(link, connection.num_received)
            self._selector.modify(connection.socket, connection.events, link)
        except Exception as error:
            self._fail(link, error)
        else:
            self._make_room()

    def _note_bytes(self, link: _Link, num_bytes: int) -> None:
        self._num_received_bytes += num_bytes - self._received_bytes.pop(link, 0)
        if num_bytes:
            self._received_bytes[link] = num_bytes

    def _make_room(self) -> None:
        while self._num_received_bytes > MAX_RECEIVED_BYTES:
            most = max(self._received_bytes, key=lambda each: self._received_bytes[each])
            problem = (
                f"{most.host}:{most.port} has sent most of the {MAX_RECEIVED_BYTES} bytes that unfinished answers may "
                "have."
            )
            remedy = "Check which program listens there: engines answer in few bytes."
            self._fail(most, HandoffError(Reason.MALFORMED_MESSAGE, problem, remedy))

    def _fail(self, link: _Link, error: Exception) -> None:
        """Close a connection that failed. Its questions are sent again, unless the failure would only repeat."""
        was_open = link.connection is not None and link.connection.is_open
        self._disconnect(link)
        is_late = isinstance(error, HandoffError) and error.reason is Reason.DEADLINE_EXCEEDED
        if not link.awaiting:
            self._remove(link)
        elif isinstance(error, OSError) or is_late:
            logger.debug("kvferry client: the connection to %s:%d failed: %s", link.host, link.port, error)
            link.untried = [] if was_open else link.untried
            self._connect(link)
        else:
            if not isinstance(error, KVFerryError):
                logger.exception("kvferry client: a connection failed and is closed")
            self._remove(link)
            refused, link.awaiting = link.awaiting, {}  # of which timers know
            for exchange in refused.values():
                self._return_unsent(exchange, error)

    def _disconnect(self, link: _Link) -> None:
        if link.connection is not None:
            self._selector.unregister(link.connection.socket)
            link.connection.close()
            link.connection = None
            self._note_bytes(link, 0)

    def _remove(self, link: _Link) -> None:
        self._disconnect(link)
        if self._links.get(link.server) is link:
            del self._links[link.server]

    # Time.

    def _set_timer(self, when: float, link: _Link, number: int) -> None:
        heapq.heappush(self._timers, (when, next(self._num_timers), link, number))

    def _act_on_time(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            _, _, link, number = heapq.heappop(self._timers)
            exchange = link.awaiting.get(number)
            if number == CONNECTION:
                if self._links.get(link.server) is link:
                    self._open(link)
            elif exchange is not None and now >= exchange.deadline:
                del link.awaiting[number]
                self._end(exchange)
            elif exchange is not None:
                self._set_timer(min(now + RESEND_SECONDS, exchange.deadline), link, number)
                if link.connection is not None:
                    self._put(link, number)
                    self._serve(link)
                if link.is_silent(exchange, now):
                    self._fail(link, TimeoutError("it has brought nothing since a question"))
        late = [exchange for exchange in self._without_link if now >= exchange.deadline]
        self._without_link = [exchange for exchange in self._without_link if now < exchange.deadline]
        for exchange in late:
            self._end(exchange)
        if now >= self._next_second:
            self._next_second = now + SECOND
            self._look_after(now)

    def _look_after(self, now: float) -> None:
        """Give up connections whose servers leave something unfinished, and close idle ones."""
        for link in list(self._links.values()):
            if not link.awaiting and now - link.used_at > IDLE_SOCKET_SECONDS:
                self._remove(link)
            elif link.connection is not None:
                try:
                    link.connection.count_second()
                except HandoffError as error:
                    self._fail(link, error)


def ask(
    host: str,
    port: int,
    question: Question,
    timeout_seconds: float,
    trust: Trust = THIS_MACHINE,
    *,
    is_trusted: bool = False,
) -> Answer:
    """Ask one question on the caller's thread and wait at most ``timeout_seconds`` for its answer.

    Raises :class:`HandoffError`: peer-unreachable where nothing listens or no answer comes in time, permission-denied
    where this side may not connect to the host or one side does not trust the other, the refusal's reason where the
    peer refuses. Looking a name up may take longer.
    """
    deadline = time.monotonic() + timeout_seconds
    data = protocol.encode(question)
    addresses = trust.addresses(host, port, is_trusted)
    pause = FIRST_RETRY_SECONDS
    while time.monotonic() < deadline:
        num_refusing = 0
        for turn, address in enumerate(addresses):
            now = time.monotonic()
            connect_by = now + max(0.0, deadline - now) / (len(addresses) - turn)
            try:
                answer = protocol.decode_answer(_ask_address(address, port, data, trust, connect_by, deadline))
            except OSError as error:
                num_refusing += isinstance(error, ConnectionRefusedError)
                continue
            if isinstance(answer, Refusal):
                raise HandoffError(answer.error().reason, f"{host}:{port} refused: {answer.message}", answer.remedy)
            return answer
        if num_refusing == len(addresses):
            raise HandoffError(
                Reason.PEER_UNREACHABLE,
                f"nothing listens on {host}:{port}.",
                "The prefill engine has ended, or does not listen on the host and port that it advertises: check its "
                "log.",
            )
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        pause = min(LAST_RETRY_SECONDS, 2 * pause)
    raise HandoffError(
        Reason.PEER_UNREACHABLE,
        f"no answer from {host}:{port} within {timeout_seconds:g} s.",
        f"Check that the prefill engine runs. {open_port(port, host)}",
    )


def _ask_address(address: str, port: int, data: bytes, trust: Trust, connect_by: float, deadline: float) -> bytes:
    connection = connect(address, port, protocol.MAX_MESSAGE_BYTES, trust.keys)
    with closing(connection), selectors.DefaultSelector() as selector:
        connection.put(Frame(CONNECTION + 1, data))
        selector.register(connection.socket, connection.events)
        while True:
            if connection.advance():
                if (frame := connection.take()) is not None:
                    return frame.message
                connection.send()
            left = (deadline if connection.is_open else connect_by) - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if not connection.has_more:
                selector.modify(connection.socket, connection.events)
                selector.select(left)


def log_undelivered(exchange: Exchange) -> None:
    """Log a message that was refused, or not answered in time."""
    kind = type(exchange.question).__name__.lower()
    refusal = exchange.answer if isinstance(exchange.answer, Refusal) else None
    remedy = open_port(exchange.port, exchange.host)
    why = f"no answer. {remedy}" if refusal is None else f"{refusal.message} {refusal.remedy}"
    told = "kvferry: a %s to %s:%d was not acknowledged: %s"
    logger.warning(told, kind, exchange.host, exchange.port, why, peer=f"{exchange.host}:{exchange.port} {kind}")
