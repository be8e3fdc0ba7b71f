"""End points: the identity of a process, its registered regions, and a nonce in its memory.

A process of this host is held by a file descriptor: a later process with its pid is not taken for it.
"""

import os
import select
import signal
from collections.abc import Sequence
from typing import Annotated, Literal, Self, TypeVar

import msgspec
import numpy as np

from kvferry.errors import Reason, TransportError
from kvferry.layout.shard import HOST_DEVICE, Region
from kvferry.transport.protocol import CUDA_DEVICE, RegionTable

MAX_REGIONS = 65536
MAX_END_POINT_BYTES = 4 << 20
NONCE_BYTES = 16

Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Length = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
DeviceName = Annotated[str, msgspec.Meta(pattern=f"^({HOST_DEVICE}|{CUDA_DEVICE.pattern})$")]
DeviceList = Annotated[list[DeviceName], msgspec.Meta(max_length=MAX_REGIONS)]
RegionList = Annotated[list[tuple[Address, Length]], msgspec.Meta(max_length=MAX_REGIONS)]
NonceBytes = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


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
