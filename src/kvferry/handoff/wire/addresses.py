"""Hosts as addresses: where a control end point listens, and the addresses of a host that a request names."""

import ipaddress
import re
import socket
from collections.abc import Sequence
from contextlib import suppress

from kvferry.errors import HandoffError, Reason

MAX_ADDRESSES = 8
"""Addresses of one name that are tried."""
MAX_HOST_LENGTH = 255
LAST_PORT = 65535
EVERY_INTERFACE = "*"
"""Where an engine listens, in the place of a host."""
_HOST = re.compile(r"\[[0-9A-Za-z._:%-]+\]|[0-9A-Za-z._:%-]+")
_NUMBERS = re.compile(r"[0-9.]+")


def check_host(host: str) -> None:
    """Raise ``ValueError`` unless this is a name or an address alone, an IPv6 address in brackets or not.

    Decoders check every host that a peer or a request names so, and an engine its own settings. Nothing is looked up:
    this machine may not know a name that its peers know.

    >>> [check_host(host) for host in ("prefill-0.example", "10.0.0.1", "fd00::1", "[fd00::1]")]
    [None, None, None, None]
    >>> check_host("127.0.0.1:5600")
    Traceback (most recent call last):
    ValueError: '127.0.0.1:5600' is no host: it has a colon and is no IPv6 address
    """
    if why := _why_no_host(host):
        raise ValueError(f"{host[:MAX_HOST_LENGTH]!r} is no host: {why}")


def _why_no_host(host: str) -> str:
    """Return why this is no name and no address; empty for one."""
    if not 1 <= len(host) <= MAX_HOST_LENGTH:
        return f"it has {len(host)} characters, a host has 1 to {MAX_HOST_LENGTH}"
    if "://" in host:
        return "it is a URL"
    if ":" in host and not is_numeric(host):
        return "it has a colon and is no IPv6 address"
    if _HOST.fullmatch(host) is None:
        return "a name has ASCII letters, digits, '.', '-' and '_' only, and an address digits and '.' or ':'"
    if is_numeric(host):
        return ""
    if "%" in host or host.startswith("["):
        return "it is no IPv6 address"
    try:
        if _NUMBERS.fullmatch(host):
            socket.inet_aton(host)
        host.encode("idna")  # as every look-up does
    except OSError:
        return "it is no IPv4 address"
    except UnicodeError:
        return "each part of a name has 1 to 63 characters"
    return ""


def host_meant(text: str) -> str | None:
    """Return the host in a URL, or before a port; None where there is none.

    >>> host_meant("http://10.0.0.1"), host_meant("[fd00::1]:5600"), host_meant("prefill 0")
    ('10.0.0.1', '[fd00::1]', None)
    """
    place = text.strip().rpartition("://")[2].partition("/")[0].rpartition("@")[2]
    for host in (place, place.rpartition(":")[0]):
        if not _why_no_host(host):
            return host
    return None


def parse_place(text: str) -> tuple[str, int]:
    """Return the host and port of ``host:port``, an IPv6 address in brackets. Raises ``ValueError``.

    >>> parse_place("prefill-0:5600"), parse_place("[::1]:5600")
    (('prefill-0', 5600), ('[::1]', 5600))
    >>> parse_place("prefill-0")
    Traceback (most recent call last):
    ValueError: 'prefill-0' is no host:port: no port from 1 to 65535 follows a last colon
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= LAST_PORT):
        raise ValueError(f"{text!r} is no host:port: no port from 1 to {LAST_PORT} follows a last colon")
    check_host(host)
    if is_ipv6(host) and not host.startswith("["):
        raise ValueError(f"{text!r} is no host:port: an IPv6 address before a port is in brackets")
    return host, int(port)


def is_wildcard(host: str) -> bool:
    """Return whether listening on ``host`` means every interface; no peer can connect to such an address.

    >>> [is_wildcard(host) for host in ("0.0.0.0", "0", "[::]", "*", "127.0.0.1", "::1", "prefill-0")]
    [True, True, True, True, False, False, False]
    """
    with suppress(OSError):
        return socket.inet_aton(host) == bytes(4)
    return host == EVERY_INTERFACE or (is_numeric(host) and ipaddress.ip_address(bare(host)).is_unspecified)


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
