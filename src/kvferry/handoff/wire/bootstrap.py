"""Where a router and decode engines learn of a prefill engine: the bootstrap query of Mooncake's protocol.

A router asks ``GET /query`` once, at its start, reads ``{"0": {"engine_id": ...}}`` and hands that engine id, with the
address it asked, to decode engines, which ask the same address for the offer. The engine id includes the epoch. A
router may remember the id of an earlier epoch, so a decode engine takes the engine that answers at the address now:
the transfer id and the prompt's digest show whether that engine has the prompt.

A query is one HTTP request with bounds (:func:`exchange`): a whole answer within a time, of at most so many bytes,
however slowly bytes come. No proxy of the environment is used and no redirect followed: engines and whoever checks them
know each other.
"""

import errno
import http.client
import io
import json
import logging
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any, NamedTuple

import msgspec

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.handshake import Versions, agree
from kvferry.handoff.messages import Bounded, EndPoint, Identifier, Unsigned
from kvferry.handoff.wire.client import BackgroundCalls
from kvferry.handoff.wire.trust import SIGNATURE_PATTERN, THIS_MACHINE, Keys, Trust, is_ipv6, parse_place
from kvferry.peer_log import PeerLog
from kvferry.transport.protocol import bare

logger = PeerLog(logging.getLogger(__name__))

MAX_ANSWER_BYTES = 1 << 16
QUERY_SECONDS = 5.0
"""How long a query may take, on both sides, however slowly bytes come; on the asking side after the name's look-up."""
ANSWER_SECONDS = 15.0
"""How long a request waits for an answer: for a slot, the look-up of the name and the query."""
OFFER_SECONDS = 5.0
"""How long an answer counts; an engine takes longer to start again."""
MAX_OFFERS = 1024
MAX_CONNECTIONS = 64
"""Queries that are answered at a time."""
MAX_QUERY_BYTES = 1 << 14
"""Of a query with its headers; Python's reader alone would take 6 MB."""
BACKLOG = 1024
MAX_HEADER_BYTES = 1 << 16
FAILURES = (OSError, ValueError, HTTPException)
"""What :func:`exchange` raises where no whole answer comes, ``TimeoutError`` among them."""
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
_ADDRESS = re.compile(r"http://([^/?#@]+)/?")


class HttpRequest(NamedTuple):
    """A request to ``host:port``; with ``tls`` over TLS, by the certificates that this machine trusts."""

    host: str
    port: int
    path: str
    method: str = "GET"
    headers: Mapping[str, str] = {}
    body: bytes = b""
    tls: bool = False

    def encode(self) -> bytes:
        """Return the request as it is sent. Raises ``ValueError`` where a value would begin another line."""
        fixed = {"Host": f"{self.host}:{self.port}", "Connection": "close"}
        if self.body:
            fixed["Content-Length"] = str(len(self.body))
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{k}: {v}" for k, v in {**fixed, **self.headers}.items())]
        if any(not line.isprintable() or not line.isascii() for line in lines):
            raise ValueError("a line of the request has a character that HTTP does not allow")
        return "\r\n".join([*lines, "", ""]).encode() + self.body


class HttpAnswer(NamedTuple):
    """The status and the body of an answer. A body that ``is_cut`` was longer than allowed."""

    status: int
    body: bytes
    is_cut: bool


def exchange(request: HttpRequest, addresses: Sequence[str], seconds: float, most_bytes: int) -> HttpAnswer:
    """Send a request to the first of a host's addresses that accepts a connection. Raises :data:`FAILURES`."""
    deadline = time.monotonic() + seconds
    try:
        with closing(_connected(addresses, request, deadline)) as connected:
            connected.settimeout(_remaining(deadline))
            connected.sendall(request.encode())
            reader = UntilDeadline(connected, deadline, 2 * most_bytes + MAX_HEADER_BYTES)
            # The response only calls ``makefile``.
            response = HTTPResponse(reader, method=request.method)  # type: ignore[arg-type]
            response.begin()
            body = response.read(most_bytes + 1)
            if response.length and len(body) <= most_bytes:
                raise http.client.IncompleteRead(body, response.length)
            return HttpAnswer(response.status, body[:most_bytes], len(body) > most_bytes)
    except TimeoutError as error:
        raise TimeoutError(f"no whole answer within {seconds:g} s") from error


class UntilDeadline(io.RawIOBase):
    """Reads at most ``most_bytes`` from a socket until a deadline.

    The timeout of a socket begins anew with every byte that comes. After the last byte that may be read comes the end.
    """

    def __init__(self, connected: socket.socket, deadline: float, most_bytes: int) -> None:
        self._socket, self._deadline = connected, deadline
        self._num_left = most_bytes

    def makefile(self, mode: str = "rb") -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(_remaining(self._deadline))
        num_read = self._socket.recv_into(buffer, min(len(buffer), self._num_left)) if self._num_left else 0
        self._num_left -= num_read
        return num_read


def _connected(addresses: Sequence[str], request: HttpRequest, deadline: float) -> socket.socket:
    """Return a connection to the first address that accepts one. Raises ``OSError``."""
    refused = OSError("the name has no address")
    for turn, address in enumerate(addresses):
        timeout = _remaining(deadline) / (len(addresses) - turn)
        try:
            connected = socket.create_connection((address, request.port), timeout)
        except OSError as error:
            refused = error
            continue
        return _in_tls(connected, request.host) if request.tls else connected
    raise refused


def _in_tls(connected: socket.socket, host: str) -> socket.socket:
    try:
        return ssl.create_default_context().wrap_socket(connected, server_hostname=host.strip("[]"))
    except BaseException:
        connected.close()
        raise


def _remaining(deadline: float) -> float:
    """Return the seconds until the deadline. Raises ``TimeoutError`` once it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


class Offer(msgspec.Struct, frozen=True):
    """A prefill engine: its control end point with the epoch, and its block sizes by cache group.

    ``version`` is the oldest version that the engine speaks, ``newest`` the newest one. HTTP protects neither the query
    nor its answer: an engine with keys signs its offer (:func:`signed`).
    """

    version: Unsigned
    newest: Unsigned
    engine_id: Identifier
    control: EndPoint
    block_sizes: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1)], ...], msgspec.Meta(max_length=256)]
    signature: Annotated[str, msgspec.Meta(pattern=SIGNATURE_PATTERN)] = ""


class Entry(msgspec.Struct, frozen=True):
    """One data-parallel rank in the answer. vLLM's own connector has ``worker_addr`` there, which is ignored."""

    engine_id: Identifier
    kvferry: Offer | None = None


def signed(offer: Offer, keys: Keys | None) -> Offer:
    """Return the offer with a signature, where there are keys."""
    return offer if keys is None else msgspec.structs.replace(offer, signature=keys.sign(_signed_data(offer)).hex())


def _signed_data(offer: Offer) -> bytes:
    return b"bootstrap offer\0" + msgspec.msgpack.encode(msgspec.structs.replace(offer, signature=""))


def id_in_epoch(engine_id: str, epoch: int) -> str:
    """Return the id under which a router knows an engine in one epoch."""
    return f"{engine_id}@{epoch:x}"


class _Server(ThreadingHTTPServer):
    """Closes a connection that comes while :data:`MAX_CONNECTIONS` are being answered, and starts no thread for it."""

    request_queue_size = BACKLOG
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
        self.body = b""
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((bare(host), port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # The base class prints a traceback for each peer that goes away.
        logger.debug("kvferry: a bootstrap query of %s failed: %s", client_address[0], sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    timeout = QUERY_SECONDS
    server: _Server

    def setup(self) -> None:
        super().setup()
        until = time.monotonic() + QUERY_SECONDS
        self.rfile = UntilDeadline(self.connection, until, MAX_QUERY_BYTES).makefile()

    def do_GET(self) -> None:
        found = self.path == "/query"
        content = self.server.body if found else b"{}"
        self.send_response(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


class BootstrapServer:
    """Answers ``GET /query`` with one offer, on a thread, until closed."""

    def __init__(self, host: str, port: int, offer: Offer) -> None:
        body = _body(offer)
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise HandoffError(
                Reason.PORT_IN_USE if error.errno == errno.EADDRINUSE else Reason.INVALID_SETTING,
                f"cannot answer bootstrap queries on {host}:{port}: {error.strerror}.",
                'Set another "host" or "bootstrap_port", and give the port to the router.',
            ) from error
        self._server.body = body
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="kvferry-bootstrap", daemon=True).start()

    def offer(self, offer: Offer) -> None:
        """Answer with this offer from now on. Raises :class:`HandoffError` (unsupported) for one that no decode engine
        could read.
        """
        self._server.body = _body(offer)

    def close(self) -> None:
        """Stop; twice is fine."""
        self._server.shutdown()
        self._server.server_close()


def _body(offer: Offer) -> bytes:
    entry = {"engine_id": offer.engine_id, "worker_addr": {}, "kvferry": msgspec.to_builtins(offer)}
    body = json.dumps({"0": entry}).encode()
    try:
        _read_answer(body)
    except UNREADABLE as error:
        raise HandoffError(
            Reason.UNSUPPORTED,
            f"no decode engine could read the offer of engine {offer.engine_id!r}: {error}.",
            "Run another model.",
        ) from error
    return body


def parse_address(address: str) -> tuple[str, int]:
    """Return the host and the port of a bootstrap address.

    Clients and routers can write the address: with a path, a query or a user name :func:`query` would send another
    request than its own. Raises :class:`HandoffError` (malformed-message).

    >>> parse_address("http://prefill-0:8998"), parse_address("http://[::1]:8998/")
    (('prefill-0', 8998), ('[::1]', 8998))
    """
    found = _ADDRESS.fullmatch(address)
    try:
        return parse_place(found[1] if found else "")
    except ValueError as error:
        raise HandoffError(
            Reason.MALFORMED_MESSAGE,
            f"{address[:100]!r} is not a bootstrap address.",
            "Give the router each prefill engine's address as http://host:port, where port is its bootstrap_port, "
            "without a path.",
        ) from error


def query(address: str, trust: Trust = THIS_MACHINE) -> list[Entry]:
    """Ask a bootstrap address (``http://host:port``). Raises :class:`HandoffError`: permission-denied for a host to
    which this engine may not connect.
    """
    host, port = parse_address(address)
    # A router has named the host, or a client.
    addresses = trust.addresses(host, port, False)
    try:
        found = exchange(HttpRequest(host, port, "/query"), addresses, QUERY_SECONDS, MAX_ANSWER_BYTES)
    except FAILURES as error:
        raise HandoffError(
            Reason.PEER_UNREACHABLE,
            f"the bootstrap address {address} does not answer: {error}.",
            "Check that the prefill engine runs, and that the router has its bootstrap_port.",
        ) from error
    if found.status != HTTPStatus.OK:
        raise HandoffError(
            Reason.MALFORMED_MESSAGE,
            f"{address} answers the bootstrap query with HTTP status {found.status}.",
            "Give the router each prefill engine's bootstrap_port.",
        )
    try:
        return _read_answer(found.body)
    except UNREADABLE as error:
        raise HandoffError(
            Reason.MALFORMED_MESSAGE,
            f"the answer of {address} to the bootstrap query is malformed: {error}.",
            "Give the router each prefill engine's bootstrap_port.",
        ) from error


def _read_answer(body: bytes) -> list[Entry]:
    """Return the entries of an answer. Raises one of :data:`UNREADABLE`."""
    if len(body) > MAX_ANSWER_BYTES:
        raise ValueError(f"it has {len(body)} bytes, an answer has at most {MAX_ANSWER_BYTES}")
    return list(msgspec.json.decode(body, type=dict[str, Entry]).values())


class BootstrapQueries:
    """Offers by bootstrap address and the router's engine id: asked for on threads, remembered for a short time.

    One thread may use it; ``wake`` is called on another one when a query has ended.
    """

    def __init__(
        self,
        ask: Callable[[str], list[Entry]] = query,
        keys: Keys | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._ask, self._keys = ask, keys
        self._answers: Bounded[tuple[str, str], tuple[float, Offer]] = Bounded(MAX_OFFERS)
        self._queries: BackgroundCalls[tuple[str, str], Offer] = BackgroundCalls("bootstrap query", wake)

    def get(self, address: str, engine_id: str) -> Offer | None:
        """Return the offer of the engine at the address that the router names, None while the query runs.

        An answer counts for :data:`OFFER_SECONDS`. Raises :class:`HandoffError`: deadline-exceeded, permission-denied
        for an offer that no trusted key has signed, and as :func:`query`; a later request asks again.
        """
        key = address, engine_id
        fetched_at, offer = self._answers.get(key, (0.0, None))
        if offer is not None and time.monotonic() - fetched_at < OFFER_SECONDS:
            return offer
        found = self._queries.get(key, lambda: self._find(address, engine_id))
        if found is None and self._queries.takes_longer_than(key, ANSWER_SECONDS):
            # The query is kept, and counts, until it ends.
            raise HandoffError(
                Reason.DEADLINE_EXCEEDED,
                f"the bootstrap address {address} has not answered within {ANSWER_SECONDS:g} s.",
                "Check that the prefill engine runs, and that the router has its bootstrap_port.",
            )
        if found is None:
            return None
        offer = found.result()
        self._queries.forget(key)
        self._answers.pop(key, None)
        self._answers[key] = time.monotonic(), offer
        return offer

    def forget(self, address: str, engine_id: str) -> None:
        """The offer may be of an earlier epoch: ask again for the next request."""
        self._answers.pop((address, engine_id), None)

    def _find(self, address: str, engine_id: str) -> Offer:
        offer = _choose(self._ask(address), address, engine_id)
        if self._keys is not None:
            self._keys.check(_signed_data(offer), bytes.fromhex(offer.signature))
        return offer


def _choose(entries: list[Entry], address: str, engine_id: str) -> Offer:
    """Return the offer of the engine that the router names, or the only one there is.

    The router may name an earlier epoch of the engine, or the engine that had the address before. That is no danger:
    the engine writes only a prompt that the router has sent it under the transfer id, and compares the prompt's digest.
    """
    offers = [entry.kvferry for entry in entries if entry.kvferry is not None]
    if not offers:
        raise HandoffError(
            Reason.PROTOCOL_MISMATCH,
            f"the engine at {address} does not run kvferry.",
            "Start it with KVFerryConnector.",
        )
    found = next((offer for offer in offers if offer.engine_id == engine_id), offers[0] if len(offers) == 1 else None)
    if found is None:
        raise HandoffError(
            Reason.PEER_CHANGED,
            f"the router names engine {engine_id}, but engines {', '.join(offer.engine_id for offer in offers)} answer "
            f"at {address}.",
            "Give the router the bootstrap address of one prefill engine.",
        )
    if found.engine_id != engine_id:
        told = "kvferry: the router calls %s at %s by an earlier name, %s"
        logger.info(told, found.engine_id, address, engine_id, peer=address)
    agree(prefill=Versions(found.version, found.newest))
    return found
