"""Whom an engine talks to: with which keys, and at which addresses.

An engine connects to this machine, to the hosts of the setting ``allowed_hosts``, and to hosts that come from a
trusted engine. What a request or a router names is checked as an address, after the name has been looked up, and the
connection goes to that address.
"""

import time
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff.wire.addresses import bare, is_numeric, look_up
from kvferry.handoff.wire.keys import Keys

REMEMBERED_SECONDS = 10.0
"""How long the addresses of a name of ``allowed_hosts`` are not looked up again."""


class Trust:
    """The keys of an engine, and where it connects.

    ``allowed_hosts`` are names, addresses and networks. ``anywhere`` lifts the restriction.

    >>> trust = Trust(allowed_hosts=["10.1.0.0/16"])
    >>> trust.addresses("10.1.2.3", 5600, is_trusted=False), trust.addresses("127.0.0.1", 5600, is_trusted=False)
    (['10.1.2.3'], ['127.0.0.1'])
    >>> trust.addresses("10.2.0.1", 5600, is_trusted=True)
    ['10.2.0.1']
    """

    def __init__(self, keys: Keys | None = None, allowed_hosts: Sequence[str] = (), *, anywhere: bool = False) -> None:
        self.keys = keys
        self._anywhere = anywhere
        self._allowed_hosts = tuple(allowed_hosts)
        self._names = frozenset(bare(host).lower() for host in allowed_hosts if as_network(host) is None)
        self._networks = [network for host in allowed_hosts if (network := as_network(host)) is not None]
        self._remembered: dict[str, tuple[float, frozenset[str]]] = {}

    def known_address(self, host: str, is_trusted: bool) -> str | None:
        """Return the address of a host where nothing must be looked up, else None."""
        if is_numeric(host) and (is_trusted or self._anywhere or self._is_in_network(bare(host))):
            return bare(host)
        return None

    def addresses(self, host: str, port: int, is_trusted: bool) -> list[str]:
        """Return the addresses of a host to which this engine may connect. Looks names up, on the caller's thread.

        ``is_trusted`` says that a trusted engine has named the host, or this engine itself. Raises
        :class:`HandoffError`: permission-denied where there is no such address, peer-unreachable for an unknown name.
        """
        found = look_up(host, port)
        if is_trusted or self._anywhere or bare(host).lower() in self._names:
            return found
        if allowed := [address for address in found if self._is_allowed(address)]:
            return allowed
        raise self._refusal(host, found)

    def addresses_named_by_peers(self, host: str, port: int) -> list[str]:
        """Return as :meth:`addresses` for a host that a peer's message names: with keys, peers are trusted engines."""
        return self.addresses(host, port, is_trusted=self.keys is not None)

    def refuse_numeric(self, host: str) -> None:
        """Refuse an address to which this engine does not connect, where no look-up is needed to see it. A name passes.

        Raises :class:`HandoffError` (permission-denied).
        """
        # A name of "allowed_hosts" may stand for the address.
        if is_numeric(host) and not self._names and self.known_address(host, is_trusted=False) is None:
            raise self._refusal(host, [bare(host)])

    def _refusal(self, host: str, addresses: Sequence[str]) -> HandoffError:
        return HandoffError(
            Reason.PERMISSION_DENIED,
            f"host: {host!r} is at {', '.join(addresses)}; this engine connects to this machine and to "
            f'"allowed_hosts", which has {", ".join(self._allowed_hosts) or "no host"}.',
            'If an engine of this deployment is there, add its host to "allowed_hosts".',
        )

    def _is_allowed(self, address: str) -> bool:
        return self._is_in_network(address) or any(address in self._addresses_of(name) for name in self._names)

    def _is_in_network(self, address: str) -> bool:
        found = _plain(ip_address(address))
        return found.is_loopback or any(found.version == each.version and found in each for each in self._networks)

    def _addresses_of(self, name: str) -> frozenset[str]:
        now = time.monotonic()
        until, addresses = self._remembered.get(name, (0.0, frozenset()))
        if now >= until:
            try:
                addresses = frozenset(look_up(name, 0))
            except KVFerryError:  # a name of another engine may be unknown today
                addresses = frozenset()
            self._remembered[name] = now + REMEMBERED_SECONDS, addresses
        return addresses


def as_network(host: str) -> IPv4Network | IPv6Network | None:
    """Return an address or a network of ``allowed_hosts`` as a network, None for a name.

    >>> as_network("10.0.0.0/8"), as_network("[::1]"), as_network("prefill-0")
    (IPv4Network('10.0.0.0/8'), IPv6Network('::1/128'), None)
    """
    try:
        return ip_network(bare(host), strict=False)
    except ValueError:
        return None


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return the IPv4 address that an IPv6 address stands for, where it stands for one."""
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address


THIS_MACHINE = Trust()
"""Without keys, and to addresses of this machine only."""
