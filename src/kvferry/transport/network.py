"""Where a process's transports listen, and the hosts to which they connect.

Transports neither authenticate nor encrypt: whoever reaches their ports can read and write registered memory. So a
transport listens where the engine itself does, and no further.
"""

import fcntl
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from struct import pack

logger = logging.getLogger(__name__)

LOOPBACK_DEVICE = "lo"
THIS_HOST = "127.0.0.1"
AddressesOf = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a host that a peer has named, to which this process may connect. May wait for a name server.
Raises :class:`kvferry.errors.KVFerryError` or :class:`OSError`."""
_ADDRESS_OF_INTERFACE = 0x8915
"""The number of SIOCGIFADDR."""


def any_addresses(host: str, port: int) -> list[str]:
    """Return all addresses of a host. Raises :class:`OSError`.

    >>> any_addresses("[::1]", 5600), any_addresses("127.0.0.1", 5600)
    (['::1'], ['127.0.0.1'])
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    return [str(place[4][0]) for place in socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)]


@dataclass(frozen=True, slots=True)
class Network:
    """The network of one process's transports.

    They listen at ``listens_at``, an address or a name of this host; an empty text means every interface. They connect
    to the addresses of ``addresses_of``.
    """

    listens_at: str = THIS_HOST
    addresses_of: AddressesOf = any_addresses


def ucx_devices(listens_at: str) -> str:
    """Return the devices for UCX to listen at an address or name of this host: its interface, and all RDMA devices,
    which open no port. Empty for every device, also where no interface has the address.

    >>> ucx_devices("127.0.0.1"), ucx_devices("")
    ('lo', '')
    """
    if not listens_at:
        return ""
    try:
        addresses = any_addresses(listens_at, 0)
    except OSError as error:
        logger.warning("kvferry: %r cannot be looked up, so NIXL listens on every interface: %s", listens_at, error)
        return ""
    if all(ip_address(address).is_loopback for address in addresses):
        return LOOPBACK_DEVICE
    found = {device for address in addresses if (device := _interface_of(address)) is not None}
    if not found:
        logger.warning("kvferry: no interface has the address of %r: NIXL listens on every interface.", listens_at)
        return ""
    return ",".join([*sorted(found), *_rdma_devices()])


def _interface_of(address: str) -> str | None:
    """Return the interface that has this address as its first IPv4 address, or as an IPv6 address."""
    for _, name in socket.if_nameindex():
        if address in _addresses_of_interface(name):
            return name
    return None


def _addresses_of_interface(name: str) -> list[str]:
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _ADDRESS_OF_INTERFACE, pack("256s", name.encode()))
        found.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            packed, *_, interface = line.split()
            if interface == name:
                found.append(str(ip_address(bytes.fromhex(packed))))
    return found


def _rdma_devices() -> list[str]:
    """Return the RDMA devices of this host by UCX's names, device and port."""
    return sorted(f"{port.parts[-3]}:{port.name}" for port in Path("/sys/class/infiniband").glob("*/ports/*"))
