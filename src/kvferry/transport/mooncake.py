"""Mooncake Transfer Engine over TCP: host memory between processes that reach each other's ports.

The engine calls a batch failed while other requests of it may still write, and of a batch that runs it says without
blocking only whether the first request has ended. So each slice of a transfer is one batch and then a *fence*: a batch
of one request, which reads the peer's nonce. With one lane per peer requests end strictly in order, so that a slice
has ended, well or not, when its fence has; and a right nonce says that the peer was still the peer after the bytes.
Nothing posted can be revoked: a cancelled or failed transfer stays ``PENDING`` until its fences have ended.
"""

import errno
import os
import re
import socket
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from kvferry.arrays import Descriptors
from kvferry.errors import Reason, SettingsError, TransportError
from kvferry.layout.shard import Region
from kvferry.transport.end_points import (
    NONCE_BYTES,
    Address,
    Nonce,
    RegionList,
    decode_end_point,
    pack_regions,
    unpack_regions,
)
from kvferry.transport.mooncake_engine import LOOPBACK, MAX_QUEUED_DESCRIPTORS, open_engine
from kvferry.transport.protocol import Capabilities, Direction, Peer, Status, Transfer
from kvferry.transport.regions import RegionTable, check_regions
from kvferry.transport.sliced import Connection, SlicedTransfer, SlicedTransport

MAX_DESCRIPTORS_PER_SLICE = 256
MAX_BYTES_PER_SLICE = 8 << 20
MAX_SLICES_IN_FLIGHT = 2
CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 2.0

_HOST = r"[0-9A-Za-z]([0-9A-Za-z.\-]{0,251}[0-9A-Za-z])?"
_COMPLETED = 1
_UNDER_WAY = (0, -2)  # -2: longer than Mooncake's own limit for a request, and still under way


class MooncakeEndPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an engine answers, its registered memory, and a nonce in it."""

    transport: Literal["mooncake"]
    version: Literal[1]
    host: Annotated[str, msgspec.Meta(pattern=f"^{_HOST}$")]
    port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    regions: RegionList
    nonce_address: Address
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


@dataclass(slots=True, eq=False)
class MooncakePeer(Peer):
    """A remote engine; ``name`` is ``host:port``, by which Mooncake knows it."""

    nonce_address: int
    nonce: bytes


@dataclass(slots=True, eq=False)
class Slice:
    """A posted part of a transfer. ``batch`` is 0 where there is only a fence, ``fence`` 0 where that is missing."""

    peer: MooncakePeer
    batch: int
    num_descriptors: int
    num_bytes: int
    fence: int = 0
    landed_nonce: np.ndarray = field(default_factory=lambda: np.zeros(NONCE_BYTES, np.uint8))


@dataclass(slots=True, eq=False)
class MooncakeTransfer(SlicedTransfer):
    """A transfer whose running slices end in the order in which they were posted."""

    running: deque[Slice] = field(default_factory=deque)


class Greeting:
    """Sees that a process runs at a port: Mooncake hangs up on a caller that says nothing, a stopped one cannot.

    Mooncake itself would wait for a minute, and would start no other transfer meanwhile. Raises ``OSError``.
    """

    def __init__(self, host: str, port: int) -> None:
        self._has_spoken = False
        self._socket = socket.socket()
        self._socket.setblocking(False)
        try:
            self._socket.connect((host, port))
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            raise

    def is_over(self) -> bool:
        """Return whether the other side has hung up."""
        if number := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(number, os.strerror(number))
        try:
            if not self._has_spoken:
                self._socket.shutdown(socket.SHUT_WR)
                self._has_spoken = True
            self._socket.recv(1)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ENOTCONN and not self._has_spoken:
                return False
            raise
        return True

    def close(self) -> None:
        """Hang up; twice is fine."""
        self._socket.close()


@dataclass(slots=True, eq=False)
class MooncakeConnection(Connection):
    """A connection to an engine that is first seen to run."""

    greeting: Greeting = field(kw_only=True)


class MooncakeTransport(SlicedTransport[MooncakeTransfer, MooncakeConnection]):
    """One engine, reached on loopback, or at the address in ``MC_TCP_BIND_ADDRESS``.

    Mooncake neither authenticates nor encrypts: on loopback only this host's processes reach it, elsewhere whoever
    reaches its ports can read and write registered memory.
    """

    _transfer_type = MooncakeTransfer
    _connection_type = MooncakeConnection
    capabilities = Capabilities(name="mooncake", cancel_is_immediate=False)
    _slice_descriptors = MAX_DESCRIPTORS_PER_SLICE
    _slice_bytes = MAX_BYTES_PER_SLICE

    def __init__(self) -> None:
        super().__init__()
        self._host = os.environ.get("MC_TCP_BIND_ADDRESS", LOOPBACK)
        _check_host(self._host)
        self._slices: set[Slice] = set()
        self._num_queued: Counter[str] = Counter()  # descriptors and fences, by peer
        self._nonce = Nonce()
        self._engine: Any = open_engine(self._host)  # nothing else may hold it, or ``close`` would not end it
        self._register_memory(Region(self._nonce.address, NONCE_BYTES))

    def register(self, regions: Sequence[Region]) -> bytes:
        """Register memory with the engine and return where it answers."""
        self._check_open()
        check_regions(regions, "mooncake")
        for region in RegionTable(regions).regions:
            self._register_memory(region)
        self._add(regions)
        end_point = MooncakeEndPoint(
            transport="mooncake",
            version=1,
            host=self._host,
            port=self._engine.get_rpc_port(),
            regions=pack_regions(self._local),
            nonce_address=self._nonce.address,
            nonce=self._nonce.value,
        )
        return msgspec.msgpack.encode(end_point)

    def connect(self, end_point: bytes) -> Transfer:
        """See that the peer runs and read its nonce, for at most ``CONNECT_SECONDS``. A host name is looked up here."""
        self._check_open()
        remote = decode_end_point(end_point, MooncakeEndPoint, "mooncake")
        if remote.nonce == self._nonce.value:
            raise TransportError(
                Reason.UNSUPPORTED, "a Mooncake engine cannot connect to itself.", "Open a second transport."
            )
        name = f"{remote.host}:{remote.port}"
        self._check_answered(name)
        peer = MooncakePeer(
            name=name,
            regions=unpack_regions(remote.regions),
            nonce_address=remote.nonce_address,
            nonce=remote.nonce,
        )
        try:
            greeting = Greeting(remote.host, remote.port)
        except OSError as error:
            raise self._unanswered(name, str(error)) from error
        deadline = time.monotonic() + CONNECT_SECONDS
        return self._follow(
            MooncakeConnection(peer, Direction.READ, 1, NONCE_BYTES, deadline=deadline, greeting=greeting)
        )

    def close(self) -> None:
        """Wait up to ``CLOSE_SECONDS`` for the wire to be quiet and end the engine, which takes up to a second.

        No byte lands in local memory afterwards; what a peer had received of a ``WRITE`` it may still apply.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._slices and time.monotonic() < deadline:
            self._slices = {part for part in self._slices if self._fence_status(part) in _UNDER_WAY}
            time.sleep(0.0005)
        self._engine = None
        self._slices.clear()
        for connection in self._connections:
            connection.greeting.close()

    def _register_memory(self, region: Region) -> None:
        if code := self._engine.register_memory(region.base_address, region.length):
            raise TransportError(
                Reason.INVALID_REQUEST,
                f"Mooncake refuses to register {region} (code {code}).",
                "Is it registered already, or does it overlap with what is?",
            )

    def _is_reached(self, connection: MooncakeConnection) -> bool:
        assert isinstance(connection.peer, MooncakePeer)
        if connection.reading is None:
            try:
                if not connection.greeting.is_over():
                    return False
            except OSError as error:
                raise self._unanswered(connection.peer.name, str(error)) from error
            connection.reading = self._read_nonce(connection.peer)
        if self.poll(connection.reading) is Status.PENDING:
            return False
        if connection.reading.error is not None:
            raise connection.reading.error
        return True

    def _read_nonce(self, peer: MooncakePeer) -> MooncakeTransfer:
        """Return a transfer of nothing but a fence."""
        transfer = MooncakeTransfer(peer, Direction.READ, 0, 0, descriptors=np.empty((0, 3), np.uint64), bounds=[0])
        self._start(transfer, Slice(peer, batch=0, num_descriptors=0, num_bytes=0))
        return transfer

    def _take_back(self, connection: MooncakeConnection) -> None:
        connection.greeting.close()

    def _unanswered(self, name: str, found: str) -> TransportError:
        return TransportError(
            Reason.PEER_UNREACHABLE,
            f"Mooncake does not reach {name}: {found}.",
            "Is it running? A peer on another host needs MC_TCP_BIND_ADDRESS set to its address there.",
        )

    def _has_room(self, transfer: MooncakeTransfer) -> bool:
        room = MAX_QUEUED_DESCRIPTORS - self._num_queued[transfer.peer.name]
        return len(transfer.running) < MAX_SLICES_IN_FLIGHT and room > MAX_DESCRIPTORS_PER_SLICE

    def _post(self, transfer: MooncakeTransfer, pieces: Descriptors) -> None:
        assert isinstance(transfer.peer, MooncakePeer)
        sources, destinations, lengths = pieces.T
        if transfer.direction is Direction.READ:
            batch = self._engine.batch_transfer_async_read(
                transfer.peer.name, destinations.tolist(), sources.tolist(), lengths.tolist()
            )
        else:
            batch = self._engine.batch_transfer_async_write(
                transfer.peer.name, sources.tolist(), destinations.tolist(), lengths.tolist()
            )
        if batch:
            self._start(transfer, Slice(transfer.peer, batch, len(pieces), int(lengths.sum())))
        else:
            transfer.end_failed(_refused(transfer.peer))

    def _start(self, transfer: MooncakeTransfer, part: Slice) -> None:
        """Follow a slice whose batch is posted, if it has one, from its fence on."""
        self._slices.add(part)
        self._num_queued[part.peer.name] += part.num_descriptors + 1
        transfer.running.append(part)
        self._post_fence(part)

    def _post_fence(self, part: Slice) -> None:
        part.fence = self._engine.batch_transfer_async_read(
            part.peer.name, [part.landed_nonce.ctypes.data], [part.peer.nonce_address], [NONCE_BYTES]
        )

    def _fence_status(self, part: Slice) -> int:
        """Ask the engine, which forgets a fence that has ended: ask no more then."""
        if not part.fence:  # the engine took the batch but not the fence; without one nobody can tell when it ends
            self._post_fence(part)
            return _UNDER_WAY[0]
        return int(self._engine.transfer_check_status(part.fence))

    def _reap(self, transfer: MooncakeTransfer) -> None:
        while transfer.running:
            part = transfer.running[0]
            fence_status = self._fence_status(part)
            if fence_status in _UNDER_WAY:
                return
            transfer.running.popleft()
            self._slices.discard(part)
            self._num_queued[part.peer.name] -= part.num_descriptors + 1
            if error := self._error_of(part, fence_status == _COMPLETED):
                transfer.end_failed(error)
            else:
                transfer.bytes_done += part.num_bytes

    def _error_of(self, part: Slice, fence_completed: bool) -> TransportError | None:
        """Return what went wrong with a slice whose fence has ended; the engine forgets its batch."""
        moved = part.batch == 0 or self._engine.get_batch_transfer_status([part.batch]) == 0
        if not fence_completed:
            return TransportError(
                Reason.PEER_DIED, f"the connection to {part.peer.name} is lost.", "Reconnect when the peer is back."
            )
        if part.landed_nonce.tobytes() != part.peer.nonce:
            return TransportError(
                Reason.PEER_CHANGED, f"{part.peer.name} holds another nonce.", "Ask the peer for a new end point."
            )
        return None if moved else _refused(part.peer)


def _check_host(host: str) -> None:
    if not re.fullmatch(_HOST, host):
        raise SettingsError(
            Reason.INVALID_SETTING,
            f"MC_TCP_BIND_ADDRESS is {host!r}.",
            "Name this host's IPv4 address or host name as peers see it, or unset it for loopback.",
        )


def _refused(peer: MooncakePeer) -> TransportError:
    return TransportError(
        Reason.TRANSFER_FAILED,
        f"{peer.name} refused a piece, or the connection was lost under it.",
        "Is all of that memory still registered there, and every piece inside one register call's memory?",
    )
