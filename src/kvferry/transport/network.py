"""Where a process's transports listen, and the hosts to which they connect.

Transports neither authenticate nor encrypt: whoever reaches their ports can read and write registered memory. So a
transport listens where the engine itself does, and no further.
"""

import fcntl
import logging
import os
import socket
import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from struct import pack, unpack

from kvferry.transport.protocol import any_addresses, plain_address

logger = logging.getLogger(__name__)

LOOPBACK_DEVICE = "lo"
THIS_HOST = "127.0.0.1"
AddressesOf = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a host that a peer has named, to which this process may connect. May wait for a name server.
Raises :class:`kvferry.errors.KVFerryError` or :class:`OSError`."""
_LIST_ADDRESSES = 0x8912
"""The number of SIOCGIFCONF, which lists every IPv4 address of every interface."""
_ENTRY_BYTES, _NAME_BYTES = 40, 16
"""Of ``struct ifreq``: a name, and a ``sockaddr_in`` with the address in its bytes 4 to 8."""


@dataclass(frozen=True, slots=True)
class Network:
    """The network of one process's transports.

    They listen at ``listens_at``, an address or a name of this host; an empty text means every interface. They connect
    to the addresses of ``addresses_of``.
    """

    listens_at: str = THIS_HOST
    addresses_of: AddressesOf = any_addresses


def ucx_devices(listens_at: str) -> str:
    """Return the devices for UCX to listen at an address or name of this host: its interfaces, and beyond loopback all
    RDMA devices, which open no port. Empty for every device, also where no interface has the address.

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
    found = {device for address in addresses if (device := interface_of(address)) is not None}
    if all(plain_address(address).is_loopback for address in addresses):
        found = {LOOPBACK_DEVICE}
    if not found:
        logger.warning("kvferry: no interface has the address of %r: NIXL listens on every interface.", listens_at)
        return ""
    if found == {LOOPBACK_DEVICE}:
        return LOOPBACK_DEVICE
    return ",".join([*sorted(found), *rdma_devices()])


def listeners() -> Iterator[tuple[int, socket.socket]]:
    """Yield inode and duplicate of every TCP socket on which this process listens; the caller closes the duplicates."""
    seen = set()  # a listed file descriptor may meanwhile be one of the duplicates
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode) or status.st_ino in seen:
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        seen.add(status.st_ino)
        is_tcp = duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM
        if is_tcp and duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1:
            yield status.st_ino, duplicate
        else:
            duplicate.close()


def listens_at() -> dict[int, tuple[str, int]]:
    """Return address and port of every TCP socket on which this process listens, by its inode."""
    found = {}
    for inode, duplicate in listeners():
        with duplicate:
            found[inode] = duplicate.getsockname()[:2]
    return found


def interface_of(address: str) -> str | None:
    """Return the interface that has this address, IPv4 or IPv6."""
    wanted = plain_address(address)
    return next((name for name, found in _addresses() if found == wanted), None)


def _addresses() -> Iterator[tuple[str, IPv4Address | IPv6Address]]:
    """Yield every address of this machine with its interface; an interface may have many."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        room = length = 16 * _ENTRY_BYTES
        while length >= room:  # else the list may be cut off
            room *= 4
            entries = array("B", bytes(room))
            answer = fcntl.ioctl(asking, _LIST_ADDRESSES, pack("iL", room, entries.buffer_info()[0]))
            length, _ = unpack("iL", answer)
        listed = entries.tobytes()[:length]
        for begin in range(0, length, _ENTRY_BYTES):
            entry = listed[begin : begin + _ENTRY_BYTES]
            label = entry[:_NAME_BYTES].split(b"\0")[0].decode()
            # An address may have a label of its own, such as eth0:1.
            yield label.partition(":")[0], IPv4Address(entry[_NAME_BYTES + 4 : _NAME_BYTES + 8])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            packed, *_, name = line.split()
            yield name, IPv6Address(bytes.fromhex(packed))


def rdma_devices() -> list[str]:
    """Return the RDMA devices of this host that UCX can use, by UCX's names: device and port."""
    return [name for name, why in rdma_ports().items() if not why]


def rdma_ports(sys: Path = Path("/sys/class"), dev: Path = Path("/dev/infiniband")) -> dict[str, str]:
    """Return the ports of RDMA devices that the kernel lists, by UCX's names, each with the reason why UCX cannot use
    it; empty where it can. Containers see the host's list, also where they were not given a device's file.
    """
    files: dict[str, Path] = {}
    for listed in (sys / "infiniband_verbs").glob("uverbs*"):
        with suppress(OSError):
            files[(listed / "ibdev").read_text().strip()] = dev / listed.name
    found = {}
    for port in sorted((sys / "infiniband").glob("*/ports/*")):
        device = port.parts[-3]
        found[f"{device}:{port.name}"] = _why_unusable(port, files.get(device))
    return found


def _why_unusable(port: Path, file: Path | None) -> str:
    if file is None:
        return "the kernel module ib_uverbs gives it no file"
    if not os.access(file, os.R_OK | os.W_OK):
        return f"this process cannot open {file}"
    try:
        state = (port / "state").read_text().strip()
    except OSError as error:
        return f"its state cannot be read: {error}"
    return "" if state.endswith("ACTIVE") else f"its state is {state}"


def has_efa_device(sys: Path = Path("/sys/class")) -> bool:
    """Return whether the kernel lists an Elastic Fabric Adapter of Amazon's."""
    return any(driver.resolve().name == "efa" for driver in (sys / "infiniband").glob("*/device/driver"))
