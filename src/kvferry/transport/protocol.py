"""What every transport is and works on: its interface, end points, and registered memory.

The interface is six verbs, called by one thread at a time: ``register`` local memory and send the end point to a peer,
``connect`` to a peer's end point, ``submit`` descriptors, ``poll`` until the transfer ends, ``cancel``, ``close``. A
transport makes progress only inside these calls; ``poll`` makes a bounded amount of progress and returns. A connection
is a transfer too: it reads a nonce, and its peer can be used once the transfer is ``DONE``.

An end point has the identity of a process, its registered regions, and a nonce in its memory. A process of this host is
held by a file descriptor: a later process with its pid is not taken for it.
"""

import os
import re
import select
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, Literal, NamedTuple, Protocol, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.arrays import Addresses, Descriptors, Integers
from kvferry.errors import Reason, TransportError, install_command
from kvferry.layout.shard import HOST_DEVICE, Region

CUDA_DEVICE = re.compile(r"cuda:([0-9]{1,3})")
MAX_DESCRIPTORS = 1 << 22
MAX_REGIONS = 65536
MAX_END_POINT_BYTES = 4 << 20
NONCE_BYTES = 16

Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Length = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
DeviceName = Annotated[str, msgspec.Meta(pattern=f"^({HOST_DEVICE}|{CUDA_DEVICE.pattern})$")]
DeviceList = Annotated[list[DeviceName], msgspec.Meta(max_length=MAX_REGIONS)]
RegionList = Annotated[list[tuple[Address, Length]], msgspec.Meta(max_length=MAX_REGIONS)]
NonceBytes = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Direction(StrEnum):
    """Which side is remote: the source of a ``READ``, the destination of a ``WRITE``."""

    READ = "read"
    WRITE = "write"


class Status(StrEnum):
    """The status of a transfer. All but ``PENDING`` are final."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a transport.

    ``moves_device_memory``: regions may lie on CUDA devices, by their names in torch, such as ``cuda:0``. Once a
    transfer that landed in such memory is ``DONE``, work that is launched on the device afterwards sees the bytes.

    ``ends_with_process``: a ``WRITE`` is carried out by the process that submits it, to a process of its host and pid
    namespace: no byte of it lands once that process has ended. ``close_ends_writes``: no byte of a peer on another
    host, or of a process that has ended, lands once ``close`` has returned True.
    """

    name: str
    ends_with_process: bool = False
    close_ends_writes: bool = False
    moves_device_memory: bool = False

    def moves(self, device: str) -> bool:
        """Return whether the transport moves memory of this device.

        >>> Capabilities("nixl", moves_device_memory=True).moves("cuda:1"), Capabilities("cma").moves("cuda:1")
        (True, False)
        """
        return device == HOST_DEVICE or (self.moves_device_memory and CUDA_DEVICE.fullmatch(device) is not None)


class RegionTable:
    """A set of regions that checks many ranges at once.

    Regions that overlap count as one; on the host also those that touch, so a range may extend from one into the next.
    On a device these are two allocations, which CUDA and network cards map one at a time: UCX asks CUDA where the
    allocation of a region's first byte ends, and would reach nothing behind that. Host and devices of one process have
    no address in common.

    >>> table = RegionTable([Region(100, 50), Region(150, 50), Region(200, 10, "cuda:0"), Region(210, 10, "cuda:0")])
    >>> table.regions
    (cpu 0x64 + 100, cuda:0 0xc8 + 10, cuda:0 0xd2 + 10)
    >>> ranges = np.array([[140, 20], [205, 5], [5, 1], [198, 4], [205, 6], [210, 10]], np.uint64)
    >>> table.outside(*ranges.T).tolist()
    [2, 3, 4]
    >>> table.devices, table.device_indices(np.array([140, 205], np.uint64)).tolist()
    (('cpu', 'cuda:0'), [0, 1])
    """

    __slots__ = ("_device_of", "_ends", "_starts", "devices", "regions")

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(_merge(regions))
        self.devices = tuple(sorted({region.device for region in self.regions}))
        self._starts: Addresses = np.array([region.base_address for region in self.regions], np.uint64)
        self._ends: Addresses = np.array([_end(region) for region in self.regions], np.uint64)
        self._device_of = np.array([self.devices.index(region.device) for region in self.regions], np.int64)

    def of_device(self, device: str) -> list[Region]:
        """Return the regions of one device."""
        return [region for region in self.regions if region.device == device]

    def device_indices(self, addresses: Addresses) -> Integers:
        """Return for each address, which must lie inside a region, the index of its device in ``devices``."""
        if len(self.devices) <= 1:
            return np.zeros(len(addresses), np.int64)
        return self._device_of[np.searchsorted(self._starts[1:], addresses, side="right")]

    def device_of(self, address: int) -> str:
        """Return the device of an address; outside of all regions, where nonces are, the host."""
        index = int(np.searchsorted(self._starts, np.uint64(address), side="right")) - 1
        return self.regions[index].device if index >= 0 and address < int(self._ends[index]) else HOST_DEVICE

    def outside(self, addresses: Addresses, lengths: Addresses) -> npt.NDArray[np.intp]:
        """Return the indices of the ranges that do not lie inside one region."""
        if not len(self._starts):
            return np.arange(len(addresses))
        if len(self._starts) == 1:
            starts, ends = self._starts[0], self._ends[0]
        else:
            nearest = np.searchsorted(self._starts[1:], addresses, side="right")
            starts, ends = self._starts[nearest], self._ends[nearest]
        # For an address beyond the end the subtraction wraps around, so that case has its own comparison.
        inside = (addresses >= starts) & (addresses <= ends) & (lengths <= ends - addresses)
        return np.flatnonzero(~inside)


def _merge(regions: Iterable[Region]) -> list[Region]:
    """Return ascending regions; those that overlap become one, and those of the host that touch."""
    merged: list[Region] = []
    for region in sorted(regions, key=lambda region: (region.base_address, region.length)):
        last = merged[-1] if merged else None
        if last is not None and last.device == region.device and region.base_address < _merges_before(last):
            length = max(_end(last), _end(region)) - last.base_address
            merged[-1] = Region(last.base_address, length, last.device)
        else:
            merged.append(region)
    return merged


def _end(region: Region) -> int:
    return region.base_address + region.length


def _merges_before(region: Region) -> int:
    """Return the address before which the next region must begin to be one with this region."""
    return _end(region) + (region.device == HOST_DEVICE)


@dataclass(slots=True, eq=False)
class Peer:
    """A reachable peer and its registered regions. ``close`` releases the connection (twice is fine)."""

    name: str
    regions: RegionTable

    def close(self) -> None:
        """Release the connection; its transfers must have ended."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One submission and its progress. ``error`` is set exactly when ``status`` is ``FAILED``.

    ``may_land`` says of a ``WRITE`` that is ``FAILED`` whether bytes of it may still land, out of a connection that
    broke. A transport whose bytes end with its calls, or that has posted none, says that none may.
    """

    peer: Peer
    direction: Direction
    num_descriptors: int
    num_bytes: int
    bytes_done: int = 0
    status: Status = Status.PENDING
    error: TransportError | None = None
    may_land: bool = True

    def fail(self, error: TransportError) -> Status:
        """End as ``FAILED`` with this error."""
        self.error = error
        self.status = Status.FAILED
        return self.status

    def cancel(self) -> Status:
        """End as ``CANCELLED``, unless it has ended."""
        if self.status is Status.PENDING:
            self.status = Status.CANCELLED
        return self.status


class Transport(Protocol):
    """Moves bytes between the registered memory of this process and of peers."""

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of this transport."""

    def register(self, regions: Sequence[Region]) -> bytes:
        """Add memory and return the end point: opaque bytes with which a peer reaches all memory registered so far.

        The memory must stay mapped until ``close``.
        """

    def connect(self, end_point: bytes) -> Transfer:
        """Begin to connect to a peer by reading its nonce; ``transfer.peer`` can be used once the transfer is ``DONE``.

        The transfer ends within some seconds even if the peer is stopped or dead, and at once when cancelled. Raises,
        or fails with, ``TransportError``: ``MALFORMED_MESSAGE`` (raised) for bytes that are not an end point,
        ``TRANSPORT_UNAVAILABLE``, ``PERMISSION_DENIED``, ``PEER_UNREACHABLE``, ``PEER_DIED`` or ``PEER_CHANGED``.
        """

    def submit(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        """Check the descriptors and start or queue the copies; an empty list is ``DONE`` at once.

        Source and destination of every descriptor are checked before a byte moves. Raises ``TransportError`` for errors
        of the caller: ``INVALID_REQUEST`` (also for a length of 0), ``UNREGISTERED_RANGE``, ``UNSUPPORTED``,
        ``CLOSED``. Later errors end the transfer as ``FAILED``.
        """

    def poll(self, transfer: Transfer) -> Status:
        """Make bounded progress on the caller's thread and return the status. A failed peer raises no error."""

    def cancel(self, transfer: Transfer) -> Status:
        """Stop. After ``CANCELLED`` no more bytes land; while ``PENDING``, keep polling."""

    def close(self) -> bool:
        """Release all resources; pending transfers fail with ``CLOSED``. Twice is fine.

        Return False where that is not possible, because a posted transfer has not ended: peers may go on writing, and
        the posted transfer fails once it has ended.
        """


def reached(peer: Peer) -> Transfer:
    """Return the transfer of a connection that ``connect`` has already completed."""
    return Transfer(peer, Direction.READ, num_descriptors=0, num_bytes=0, status=Status.DONE)


def reach(transport: Transport, end_point: bytes) -> Peer:
    """Connect and wait. Raises as :meth:`Transport.connect`."""
    transfer = transport.connect(end_point)
    while transport.poll(transfer) is Status.PENDING:
        time.sleep(0.0002)
    if transfer.error is not None:
        raise transfer.error
    return transfer.peer


class _Memory:
    def __init__(self, address: int, shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": f"|V{element_bytes}",
            "version": 3,
        }


def memory_at(address: int, shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> npt.NDArray[np.void]:
    """Return the memory at an address as an array; numpy copies each element by one memmove. Strides are bytes.

    >>> memory = np.arange(8, dtype=np.uint8)
    >>> memory_at(memory.ctypes.data, (2,), (4,), 2).tobytes().hex()
    '00010405'
    """
    return np.asarray(_Memory(address, shape, strides, element_bytes))


class ProcessIdentity(msgspec.Struct, frozen=True):
    """One process. A pid may be reused; pid, start time and boot id together are unique."""

    boot_id: Annotated[str, msgspec.Meta(max_length=64)]
    pid_namespace: Annotated[int, msgspec.Meta(ge=0)]
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    start_time: Annotated[int, msgspec.Meta(ge=0)]
    uid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class ProcessEndPoint(msgspec.Struct, frozen=True):
    """What another process on this host needs to reach this process's memory."""

    transport: Literal["cma"]
    version: Literal[1]
    identity: ProcessIdentity
    regions: RegionList
    nonce_address: Address
    nonce: NonceBytes

    @classmethod
    def own(cls, regions: RegionTable, nonce: "Nonce") -> Self:
        """Return the end point of this process."""
        return cls("cma", 1, own_identity(), pack_regions(regions), nonce.address, nonce.value)


EndPoint = TypeVar("EndPoint", bound=msgspec.Struct)


def decode_end_point(payload: bytes, kind: type[EndPoint], transport: str) -> EndPoint:
    """Decode an end point of at most ``MAX_END_POINT_BYTES`` that a peer sent.

    >>> decode_end_point(b"garbage", ProcessEndPoint, "cma")
    Traceback (most recent call last):
    kvferry.errors.TransportError: this is not a cma end point: ... [malformed-message]
    """
    try:
        if len(payload) > MAX_END_POINT_BYTES:
            raise msgspec.DecodeError(f"{len(payload)} bytes, more than {MAX_END_POINT_BYTES}")
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TransportError(
            Reason.MALFORMED_MESSAGE,
            f"this is not a {transport} end point: {error}.",
            "Run the same transport of the same kvferry version in both engines.",
        ) from error


def pack_regions(table: RegionTable) -> RegionList:
    """Return regions as (address, length), for an end point."""
    return [(region.base_address, region.length) for region in table.regions]


def check_devices(regions: Sequence[tuple[int, int]], devices: Sequence[str]) -> None:
    """Raise ``ValueError`` unless each region has a device, or none has one."""
    if len(devices) not in (0, len(regions)):
        raise ValueError(f"{len(devices)} devices of {len(regions)} regions")


def pack_devices(table: RegionTable) -> list[str]:
    """Return the device of each region of :func:`pack_regions`; nothing where all is host memory."""
    return [] if table.devices in ((), (HOST_DEVICE,)) else [region.device for region in table.regions]


def unpack_regions(pairs: Sequence[tuple[int, int]], devices: Sequence[str] = ()) -> RegionTable:
    """Return the regions of a received end point; without ``devices``, all are host memory."""
    names = devices or [HOST_DEVICE] * len(pairs)
    return RegionTable([Region(*pair, device) for pair, device in zip(pairs, names, strict=True)])


def own_identity() -> ProcessIdentity:
    """Return the identity of this process. Not cached, since a fork changes it."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    return ProcessIdentity(
        boot_id=boot_id,
        pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
        pid=os.getpid(),
        start_time=parse_start_time(read_stat(os.getpid())),
        uid=os.geteuid(),
    )


def read_stat(pid: int) -> bytes:
    """Return ``/proc/<pid>/stat``; raises ``ProcessLookupError`` or ``FileNotFoundError`` for a pid without process."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read()


def parse_start_time(stat: bytes) -> int:
    """Return the process's start time in clock ticks since boot (field 22); raises ``ProcessLookupError`` for a zombie.

    >>> parse_start_time(b"7 (a) b) S " + b" ".join(b"%d" % i for i in range(4, 30)))
    22
    """
    if stat[stat.rindex(b")") + 2 :][:1] in (b"Z", b"X"):
        raise ProcessLookupError("the process has exited")
    return start_time_in(stat)


def start_time_in(stat: bytes) -> int:
    """Return the start time as :func:`parse_start_time`, that of a zombie too."""
    # The name, in brackets, may contain anything.
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


class Nonce:
    """Random bytes at a fixed address. A peer that reads them has reached the right memory."""

    def __init__(self) -> None:
        self.value = os.urandom(NONCE_BYTES)
        self._memory = np.frombuffer(bytearray(self.value), np.uint8)
        self.address = int(self._memory.ctypes.data)


class Process:
    """The process that has this pid now. Raises ``ProcessLookupError`` where there is none, else ``OSError``.

    >>> process = Process(os.getpid())
    >>> process.has_pid, process.has_ended
    (True, False)
    >>> process.close()
    """

    _descriptor = -1

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    @property
    def has_pid(self) -> bool:
        """Whether the process keeps its pid: it runs, or its parent has not yet taken notice of its end."""
        try:
            signal.pidfd_send_signal(self._descriptor, 0)
        except ProcessLookupError:
            return False
        return True

    @property
    def has_ended(self) -> bool:
        """Whether every thread of the process has ended, so that none of its system calls runs."""
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Let the process go; twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close


def is_visible(identity: ProcessIdentity) -> bool:
    """Return whether the process is, or was, on this host and in this pid namespace, so that its pid means it here."""
    own = own_identity()
    return (own.boot_id, own.pid_namespace) == (identity.boot_id, identity.pid_namespace)


def is_on_this_host(identity: ProcessIdentity) -> bool:
    """Return whether the process is, or was, on this host, in whichever container."""
    return own_identity().boot_id == identity.boot_id


def hold_process(identity: ProcessIdentity) -> Process | None:
    """Return the process; None where nothing can be known of it: it is elsewhere, or the kernel has no pidfd.

    Raises ``ProcessLookupError`` where the process has ended, also where another process has its pid.
    """
    if not is_visible(identity):
        return None
    try:
        process = Process(identity.pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):
        return None
    try:
        # After the descriptor is open: the start time is that of the process that it holds, or of a later one.
        if start_time_in(read_stat(identity.pid)) == identity.start_time:
            return process
    except (FileNotFoundError, ProcessLookupError):
        pass
    except BaseException:
        process.close()
        raise
    process.close()
    raise ProcessLookupError(f"process {identity.pid} has ended")


def install_nixl() -> str:
    """Return what to do where NIXL is not installed. With CUDA 13, its package for CUDA 12 loads nixl-cu13."""
    return f"Install NIXL: {install_command('nixl', 'nixl-cu12')}"


class Sides(NamedTuple):
    """The columns of a descriptor array as local and remote addresses."""

    local: Addresses
    remote: Addresses
    lengths: Addresses

    @classmethod
    def of(cls, descriptors: Descriptors, direction: Direction) -> Self:
        """Return the columns of descriptors that move in this direction."""
        sources, destinations, lengths = descriptors.T
        return (
            cls(destinations, sources, lengths) if direction is Direction.READ else cls(sources, destinations, lengths)
        )


class RangeStream:
    """The local or the remote ranges of a list of descriptors as a stream of bytes, cut for vectored system calls.

    Ranges ``(address, length)`` in order, neighbours merged, addressed by byte position in the stream. The local and
    the remote stream of a transfer have equal length, so each is merged on its own.

    >>> stream = RangeStream(np.array([100, 110, 500], np.uint64), np.array([10, 10, 10], np.uint64))
    >>> stream.cut(5, 25).tolist()
    [[105, 15], [500, 5]]
    >>> stream.reach(5, 1), stream.reach(5, 2)
    (20, 30)
    """

    __slots__ = ("_ends", "_ranges")

    def __init__(self, addresses: Addresses, lengths: Addresses) -> None:
        starts_range = np.ones(len(addresses), bool)
        np.not_equal(addresses[1:], addresses[:-1] + lengths[:-1], out=starts_range[1:])
        first = np.flatnonzero(starts_range)
        ends = np.cumsum(lengths)
        self._ends: Addresses = ends[np.append(first[1:], len(addresses)) - 1] if len(first) else ends
        self._ranges: Addresses = np.empty((len(first), 2), np.uint64)
        self._ranges[:, 0] = addresses[first]
        self._ranges[:, 1] = np.diff(self._ends, prepend=np.uint64(0))

    def __len__(self) -> int:
        return len(self._ranges)

    def reach(self, position: int, max_ranges: int) -> int:
        """Return the position at the end of ``max_ranges`` ranges from ``position``."""
        index = int(np.searchsorted(self._ends, np.uint64(position), side="right"))
        return int(self._ends[min(index + max_ranges, len(self._ends)) - 1])

    def cut(self, start: int, stop: int) -> Addresses:
        """Return the ranges from position ``start`` up to ``stop``, as a new C-contiguous ``(n, 2)`` array."""
        first, last = np.searchsorted(self._ends, np.array([start, stop - 1], np.uint64), side="right")
        ranges = self._ranges[first : last + 1].copy()
        skipped = np.uint64(start) - (self._ends[first] - self._ranges[first, 1])
        ranges[0, 0] += skipped
        ranges[0, 1] -= skipped
        ranges[-1, 1] -= self._ends[last] - np.uint64(stop)
        return ranges


class RegisteredMemoryTransport(ABC):
    """``register``, ``submit``, ``poll``, ``cancel`` and ``close``; a subclass connects and moves the bytes.

    Where bytes move inside ``poll`` only, as here, ``cancel`` stops at once. After ``close`` a poll of a pending
    transfer fails it.
    """

    capabilities: Capabilities

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._local = RegionTable([])
        self._closed = False

    def register(self, regions: Sequence[Region]) -> bytes:
        """Add memory and return the end point. Raises ``TransportError`` (``UNSUPPORTED``) for memory of a device that
        the transport does not move, and where no peer could read the end point.

        ``_make_reachable`` raises further errors.
        """
        self._check_open()
        for region in regions:
            if not self.capabilities.moves(region.device):
                raise self._cannot_move(region)
        self._make_reachable(regions)
        self._regions.extend(regions)
        self._local = RegionTable(self._regions)
        return self._readable(self._end_point())

    def submit(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        """Check the descriptors and queue them; ``poll`` moves the bytes."""
        self._check_open()
        check_descriptors(descriptors, direction, self._local, peer.regions)
        transfer = self._queue(peer, direction, descriptors)
        if not len(descriptors):
            transfer.status = Status.DONE
        return transfer

    def poll(self, transfer: Transfer) -> Status:
        """Make bounded progress and return the status."""
        if transfer.status is not Status.PENDING:
            return transfer.status
        if self._closed:
            return transfer.fail(self._closed_error())
        return self._advance(transfer)

    def cancel(self, transfer: Transfer) -> Status:
        """Stop at once: bytes move only inside ``poll``."""
        return transfer.cancel()

    def close(self) -> bool:
        """Refuse all later calls."""
        self._closed = True
        return True

    def _readable(self, end_point: msgspec.Struct) -> bytes:
        """Return an end point as bytes, which this side has read as a peer reads them."""
        name, encoded = self.capabilities.name, msgspec.msgpack.encode(end_point)
        try:
            decode_end_point(encoded, type(end_point), name)
        except TransportError as error:
            raise TransportError(
                Reason.UNSUPPORTED,
                f"no other engine could reach this memory over {name}: {error.message}",
                'Set another "transport", or run the engine with fewer regions of memory.',
            ) from error
        return encoded

    def _cannot_move(self, region: Region) -> TransportError:
        """Return the error of memory that this transport does not move."""
        if self.capabilities.moves_device_memory:
            found = (
                f"{self.capabilities.name} moves memory of the host and of CUDA devices; region {region} is neither."
            )
            remedy = "Run the engine on a CUDA device or on the CPU."
        else:
            found = (
                f"{self.capabilities.name} moves host memory only, since the processor makes its copies; region "
                f"{region} is memory of a device."
            )
            remedy = f'Set "transport" to "auto" or "nixl" on both engines. {install_nixl()}'
        return TransportError(Reason.UNSUPPORTED, found, remedy)

    def _make_reachable(self, regions: Sequence[Region]) -> None:
        """Prepare new memory for peers; most transports need nothing. Raises ``TransportError``."""
        return

    @abstractmethod
    def _end_point(self) -> msgspec.Struct:
        """Return what a peer needs to reach all registered memory."""

    @abstractmethod
    def _queue(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        """Return a pending transfer of checked descriptors; the caller may change the array afterwards."""

    @abstractmethod
    def _advance(self, transfer: Transfer) -> Status:
        """Make bounded progress on a pending transfer and return its status."""

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> TransportError:
        return TransportError(Reason.CLOSED, f"this {self.capabilities.name} transport is closed.", "Open another.")


def check_descriptors(descriptors: Descriptors, direction: Direction, local: RegionTable, remote: RegionTable) -> None:
    """Raise ``TransportError`` (``INVALID_REQUEST``, ``UNREGISTERED_RANGE``) for what no transport moves."""
    _check_shape(descriptors)
    sides = Sides.of(descriptors, direction)
    _check_inside("local", local, sides.local, sides.lengths)
    _check_inside("remote", remote, sides.remote, sides.lengths)


def _check_shape(descriptors: Addresses) -> None:
    if descriptors.ndim != 2 or descriptors.shape[1] != 3 or descriptors.dtype != np.uint64:
        raise TransportError(
            Reason.INVALID_REQUEST,
            f"descriptors must be a uint64 array of shape (n, 3), not {descriptors.dtype} {descriptors.shape}.",
            "Submit the descriptors of a plan's lower().",
        )
    if len(descriptors) > MAX_DESCRIPTORS:
        raise TransportError(
            Reason.INVALID_REQUEST,
            f"the submission has {len(descriptors)} descriptors; the limit is {MAX_DESCRIPTORS}.",
            "Split the list.",
        )
    if len(descriptors) and not descriptors[:, 2].all():
        first = int(np.argmin(descriptors[:, 2] != 0))
        raise TransportError(Reason.INVALID_REQUEST, f"descriptor {first} has length 0.", "Leave it out.")


def _check_inside(side: str, table: RegionTable, addresses: Addresses, lengths: Addresses) -> None:
    outside = table.outside(addresses, lengths)
    if len(outside):
        first = int(outside[0])
        raise TransportError(
            Reason.UNREGISTERED_RANGE,
            f"{len(outside)} of {len(addresses)} descriptors lie outside the {side} registered memory; the first is "
            f"descriptor {first}: {int(lengths[first])} bytes at {int(addresses[first]):#x}.",
            f"Registered {side} memory: {_describe(table)}.",
        )


def _describe(table: RegionTable) -> str:
    spans = [f"[{r.base_address:#x}, {r.base_address + r.length:#x})" for r in table.regions[:4]]
    more = f" and {len(table.regions) - 4} more" if len(table.regions) > 4 else ""
    return (", ".join(spans) or "nothing") + more


def bare(host: str) -> str:
    """Return the host without the brackets of an IPv6 address."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def any_addresses(host: str, port: int) -> list[str]:
    """Return all addresses of a host. Raises :class:`OSError`.

    >>> any_addresses("[::1]", 5600), any_addresses("127.0.0.1", 5600)
    (['::1'], ['127.0.0.1'])
    """
    return [str(place[4][0]) for place in socket.getaddrinfo(bare(host), port, type=socket.SOCK_STREAM)]


def plain_address(address: str) -> IPv4Address | IPv6Address:
    """Return an address without its scope, and the IPv4 address that an IPv6 address may stand for.

    Raises ``ValueError`` for what is no address.

    >>> plain_address("fe80::1%eth0"), plain_address("::ffff:127.0.0.1")
    (IPv6Address('fe80::1'), IPv4Address('127.0.0.1'))
    """
    found = ip_address(address.partition("%")[0])
    return (isinstance(found, IPv6Address) and found.ipv4_mapped) or found
