"""Hosts as addresses: where a control end point listens, and the addresses of a host that a request names."""

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress

from kvferry.errors import HandoffError, Reason

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


def is_loopback(host: str) -> bool:
    """Return whether only processes of this host can connect to ``host``; of names only ``localhost`` is known.

    >>> [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "[::1]", "localhost", "0.0.0.0", "prefill-0", "*")]
    [True, True, True, True, False, False, False]
    """
    return host == "localhost" or (is_numeric(host) and ipaddress.ip_address(bare(host)).is_loopback)


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


def nothing_listens(addresses: Sequence[str], port: int, timeout_seconds: float) -> bool:
    """Return whether each of these addresses of one host refuses a connection to ``port``.

    An address that does not answer says nothing.
    """
    for address in addresses:
        try:
            socket.create_connection((address, port), timeout_seconds).close()
        except ConnectionRefusedError:
            continue
        except OSError:
            return False
        return False
    return True


def look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a host, on the caller's thread. Raises :class:`HandoffError` (peer-unreachable)."""
    try:
        found = socket.getaddrinfo(bare(host), port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise HandoffError(
            Reason.PEER_UNREACHABLE,
            f"the host {host!r} cannot be looked up: {error}.",
            'Set "advertised_host" on that engine to an address or a name that this machine knows.',
        ) from error
    return list(dict.fromkeys(str(place[4][0]) for place in found))[:MAX_ADDRESSES]
