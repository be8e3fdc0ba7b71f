"""Hosts as addresses: where a control end point listens, and the addresses of a host that a request names.

kvferry looks names up itself: zmq would do so on the one thread that serves all of its sockets.
"""

import ipaddress
import logging
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from kvferry.errors import HandoffError, Reason
from kvferry.peer_log import PeerLog

logger = PeerLog(logging.getLogger(__name__))

MAX_ADDRESSES = 8
"""Addresses of one name that are tried."""


def is_wildcard(host: str) -> bool:
    """Return whether listening on ``host`` means every interface; no peer can connect to such an address.

    >>> [is_wildcard(host) for host in ("0.0.0.0", "0", "[::]", "*", "127.0.0.1", "::1", "prefill-0")]
    [True, True, True, True, False, False, False]
    """
    with suppress(OSError):
        return socket.inet_aton(host) == bytes(4)
    return host == "*" or (is_numeric(host) and ipaddress.ip_address(bare(host)).is_unspecified)


def is_numeric(host: str) -> bool:
    """Return whether the host is an address, not a name.

    >>> is_numeric("[::1]"), is_numeric("127.0.0.1"), is_numeric("localhost")
    (True, True, False)
    """
    try:
        ipaddress.ip_address(bare(host))
    except ValueError:
        return False
    return True


def bare(host: str) -> str:
    """Return the host without the brackets of an IPv6 address."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_ipv6(host: str) -> bool:
    """Return whether the host is an IPv6 address, in brackets or not."""
    return ":" in host


def in_url(host: str) -> str:
    """Return the host as it is written before a port.

    >>> in_url("::1"), in_url("prefill-0")
    ('[::1]', 'prefill-0')
    """
    return f"[{bare(host)}]" if is_ipv6(host) else host


def end_point(host: str, port: int | str) -> str:
    """Return the end point in zmq's notation.

    >>> end_point("::1", 5600), end_point("127.0.0.1", "*")
    ('tcp://[::1]:5600', 'tcp://127.0.0.1:*')
    """
    return f"tcp://{in_url(host)}:{port}"


def find_address(host: str, port: int, timeout_seconds: float) -> str:
    """Return the address at which ``host`` listens on ``port``: looked up and tried on the caller's thread.

    Where no address accepts in time, return the first that does not refuse. Raises :class:`HandoffError`
    (peer-unreachable) for a name without an address, and at once where every address refuses: zmq would try again for
    ever, but an epoch ends with its process, so a process that has ended does not come back.
    """
    deadline = time.monotonic() + timeout_seconds
    silent: list[str] = []
    addresses = _addresses(host, port)
    for turn, address in enumerate(addresses):
        patience = (deadline - time.monotonic()) / (len(addresses) - turn)
        try:
            socket.create_connection((address, port), max(patience, 0.001)).close()
        except ConnectionRefusedError:
            continue
        except OSError as error:
            logger.debug("kvferry: %s:%d takes no connection yet: %s", address, port, error)
            silent.append(address)
        else:
            return address
    if silent:
        return silent[0]
    raise HandoffError(
        Reason.PEER_UNREACHABLE,
        f"nothing listens on {host}:{port}.",
        "The prefill engine has ended, or does not listen on the host and port that it advertises: check its log.",
    )


def nothing_listens(host: str, port: int, timeout_seconds: float) -> bool:
    """Return whether every address of ``host`` refuses a connection to ``port``.

    A name that cannot be looked up, or an address that does not answer, proves nothing.
    """
    try:
        addresses = _addresses(host, port)
    except HandoffError:
        return False
    for address in addresses:
        try:
            socket.create_connection((address, port), timeout_seconds).close()
        except ConnectionRefusedError:
            continue
        except OSError:
            return False
        return False
    return True


def _addresses(host: str, port: int) -> Sequence[str]:
    try:
        found = socket.getaddrinfo(bare(host), port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise HandoffError(
            Reason.PEER_UNREACHABLE,
            f"the prefill engine's host {host!r} cannot be looked up: {error}.",
            'Set "advertised_host" on the prefill side to an address or a name that this machine knows.',
        ) from error
    return list(dict.fromkeys(str(place[4][0]) for place in found))[:MAX_ADDRESSES]
