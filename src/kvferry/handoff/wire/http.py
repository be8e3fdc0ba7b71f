"""One HTTP request with bounds: a whole answer within a time, of at most so many bytes, however slowly bytes come.

No proxy of the environment is used and no redirect followed: engines and whoever checks them know each other.
"""

import http.client
import io
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple

MAX_HEADER_BYTES = 1 << 16
FAILURES = (OSError, ValueError, HTTPException)
"""What :func:`exchange` raises where no whole answer comes, ``TimeoutError`` among them."""


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
