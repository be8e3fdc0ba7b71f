"""Mooncake Transfer Engine over TCP: memory between processes that reach each other's ports.

Host memory, and with Mooncake's build for CUDA memory of devices too, which the engine copies through the host's.

Mooncake's engine reports a batch as failed while other requests of the batch may still write; for a running batch it
reports without blocking only whether the first request has ended. So a slice of a transfer is one batch and then a
*fence*: a batch of one request, which reads the peer's nonce. With one connection per peer (Mooncake's "lane") requests
end strictly in order: a slice has ended, successfully or not, when its fence has, and an equal nonce proves that the
peer was the same after the bytes. Posted requests cannot be revoked: a cancelled or failed transfer stays ``PENDING``
until its fences have ended.
"""

import errno
import importlib
import logging
import os
import re
import select
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from kvferry.arrays import Descriptors
from kvferry.errors import KVFerryError, Reason, SettingsError, TransportError, install_command, open_port
from kvferry.layout.shard import Region
from kvferry.transport.network import AddressesOf, listeners, listens_at
from kvferry.transport.protocol import (
    NONCE_BYTES,
    Address,
    Capabilities,
    DeviceList,
    Direction,
    Nonce,
    NonceBytes,
    Peer,
    RegionList,
    RegionTable,
    Status,
    Transfer,
    any_addresses,
    check_devices,
    decode_end_point,
    pack_devices,
    pack_regions,
    unpack_regions,
)
from kvferry.transport.sliced import (
    Connection,
    SlicedTransfer,
    SlicedTransport,
    cannot_reach_itself,
    connection_lost,
    other_nonce,
)

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_QUEUED_DESCRIPTORS = 65535  # Mooncake's limit of one peer's queue; beyond it descriptors fail
_VERSION = "0.3.13"
_WITHOUT_CUDA, _WITH_CUDA = _DISTRIBUTIONS = "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"
_NUM_LISTENERS = 2  # one for handshakes, one for data
_INTERFACE = b"lo\0"
_ENVIRONMENT: dict[str, str | None] = {
    "MC_FORCE_TCP": "1",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(MAX_QUEUED_DESCRIPTORS),
    "MC_TRANSFER_TIMEOUT": "86400",  # seconds after which a batch counts as failed; the caller has its own deadlines
    "MC_USE_TENT": None,
    "MC_USE_TEV1": None,
    "MC_DISABLE_METACACHE": None,
    "MC_USE_IPV6": None,
}
"""Variables that Mooncake reads on import and when an engine starts; None removes the variable."""

_opening = threading.Lock()
MAX_DESCRIPTORS_PER_SLICE = 256
MAX_BYTES_PER_SLICE = 8 << 20
MAX_SLICES_IN_FLIGHT = 2
CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 2.0
MAX_LOOKUPS = 64
"""Look-ups of names that run at a time."""

_HOST = r"[0-9A-Za-z]([0-9A-Za-z.\-]{0,251}[0-9A-Za-z])?"
_COMPLETED = 1
_RUNNING = (0, -2)  # -2: over Mooncake's own time limit for a request, and still running


class MooncakeEndPoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """The address of a Mooncake engine, its registered memory, and a nonce in that memory."""

    transport: Literal["mooncake"]
    version: Literal[1]
    host: Annotated[str, msgspec.Meta(pattern=f"^{_HOST}$")]
    port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    regions: RegionList
    nonce_address: Address
    nonce: NonceBytes
    devices: DeviceList = []
    """The device of each region; empty where all is host memory."""

    def __post_init__(self) -> None:
        check_devices(self.regions, self.devices)


@dataclass(slots=True, eq=False)
class MooncakePeer(Peer):
    """A remote Mooncake engine; ``name`` is ``host:port``, ``place`` its numeric form, once the host was looked up.

    Mooncake gets the numeric form only: it would look a name up itself, on the thread that calls it.
    """

    nonce_address: int
    nonce: bytes
    place: str = ""


@dataclass(slots=True, eq=False)
class Slice:
    """A posted slice of a transfer. ``batch`` is 0 for a fence alone, ``fence`` 0 until the fence is posted."""

    peer: MooncakePeer
    batch: int
    num_descriptors: int
    num_bytes: int
    fence: int = 0
    has_landed: bool = False  # known of a slice that ended while the transport was being closed
    landed_nonce: np.ndarray = field(default_factory=lambda: np.zeros(NONCE_BYTES, np.uint8))


@dataclass(slots=True, eq=False)
class MooncakeTransfer(SlicedTransfer):
    """A transfer whose running slices end in the order in which they were posted."""

    running: deque[Slice] = field(default_factory=deque)


class Lookup:
    """The look-up of a host on a thread of its own: the operating system may take long, and cannot be stopped."""

    def __init__(self, host: str, port: int, addresses_of: AddressesOf) -> None:
        self._host, self._port, self._addresses_of = host, port, addresses_of
        self._address = ""
        self._error: TransportError | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-mooncake-lookup", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise OSError(str(error)) from error

    @property
    def is_running(self) -> bool:
        """Whether the look-up has not ended."""
        return self._thread.is_alive()

    def address(self) -> str:
        """Return an IPv4 address to which this process may connect; the look-up must have ended.

        Raises :class:`TransportError`.
        """
        if self._error is not None:
            raise self._error.without_traceback()
        return self._address

    def _run(self) -> None:
        try:
            addresses = self._addresses_of(self._host, self._port)
            found = next((each for each in addresses if ":" not in each), None)
            if found is None:
                raise OSError("it has no IPv4 address")
            self._address = found
        except KVFerryError as error:
            self._error = TransportError(error.reason, error.message, error.remedy)
        except OSError as error:
            why = f"{self._host} cannot be looked up: {error}"
            self._error = _unanswered(f"{self._host}:{self._port}", why)


class Greeting:
    """Checks that a process runs at a port: Mooncake closes a connection without a message, a stopped process cannot.

    Without this check Mooncake would wait for a minute and start no other transfer. Raises ``OSError``.
    """

    def __init__(self, host: str, port: int) -> None:
        self._is_shut_down = False
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
        """Return whether the peer has closed the connection."""
        if number := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(number, os.strerror(number))
        try:
            if not self._is_shut_down:
                self._socket.getpeername()  # fails while connecting: a shutdown would end the attempt with ECONNRESET
                self._socket.shutdown(socket.SHUT_WR)
                self._is_shut_down = True
            self._socket.recv(1)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ENOTCONN and not self._is_shut_down:
                return False
            raise
        return True

    def wait(self, seconds: float) -> None:
        """Wait until the connection has got further, at most so many seconds."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN if self._is_shut_down else select.POLLOUT)
        poller.poll(seconds * 1e3)

    def close(self) -> None:
        """Close the socket; twice is fine."""
        self._socket.close()


@dataclass(slots=True, eq=False)
class MooncakeConnection(Connection):
    """A connection that looks the host up, greets its process, and then reads the nonce."""

    host: str = field(kw_only=True)
    port: int = field(kw_only=True)
    greeting: Greeting | None = None


class MooncakeTransport(SlicedTransport[MooncakeTransfer, MooncakeConnection]):
    """One Mooncake engine, on loopback or at the address in ``MC_TCP_BIND_ADDRESS``.

    Mooncake neither authenticates nor encrypts. On loopback only processes of this host reach the engine; at another
    address every host that reaches its ports can read and write registered memory.
    """

    _transfer_type = MooncakeTransfer
    _connection_type = MooncakeConnection
    capabilities = Capabilities(name="mooncake", close_ends_writes=True)
    _slice_descriptors = MAX_DESCRIPTORS_PER_SLICE
    _slice_bytes = _device_slice_bytes = MAX_BYTES_PER_SLICE

    def __init__(self, addresses_of: AddressesOf = any_addresses) -> None:
        super().__init__()
        self._addresses_of = addresses_of
        self._host = os.environ.get("MC_TCP_BIND_ADDRESS", LOOPBACK)
        _check_host(self._host)
        self._slices: set[Slice] = set()
        self._engine_has_ended = False
        self._num_queued: Counter[str] = Counter()  # descriptors and fences, by peer
        self._nonce = Nonce()
        self._lookups: dict[str, Lookup] = {}
        if is_built_with_cuda():
            self.capabilities = replace(self.capabilities, moves_device_memory=True)
        self._engine: Any = open_engine(self._host)  # the only reference: ``close`` ends the engine by dropping it
        self._register_memory(Region(self._nonce.address, NONCE_BYTES))

    def _make_reachable(self, regions: Sequence[Region]) -> None:
        for region in RegionTable(regions).regions:
            self._register_memory(region)

    def _end_point(self) -> MooncakeEndPoint:
        return MooncakeEndPoint(
            transport="mooncake",
            version=1,
            host=self._host,
            port=self._engine.get_rpc_port(),
            regions=pack_regions(self._local),
            nonce_address=self._nonce.address,
            nonce=self._nonce.value,
            devices=pack_devices(self._local),
        )

    def connect(self, end_point: bytes) -> Transfer:
        """Look the peer's host up, check that the peer runs and read its nonce, in at most ``CONNECT_SECONDS``."""
        self._check_open()
        remote = decode_end_point(end_point, MooncakeEndPoint, "mooncake")
        if remote.nonce == self._nonce.value:
            raise cannot_reach_itself("mooncake")
        name = f"{remote.host}:{remote.port}"
        self._check_answered(name)
        peer = MooncakePeer(
            name=name,
            regions=unpack_regions(remote.regions, remote.devices),
            nonce_address=remote.nonce_address,
            nonce=remote.nonce,
        )
        deadline = time.monotonic() + CONNECT_SECONDS
        connection = MooncakeConnection(
            peer, Direction.READ, 1, NONCE_BYTES, deadline=deadline, host=remote.host, port=remote.port
        )
        return self._follow(connection)

    def poll(self, transfer: Transfer) -> Status:
        """Make bounded progress and return the status.

        What was posted to an engine that could not be ended is pending for good: its bytes may still land. So may those
        of a write that had not landed when the engine ended.
        """
        if self._closed and isinstance(transfer, MooncakeTransfer) and transfer.status is Status.PENDING:
            if not self._slices.isdisjoint(transfer.running):
                return transfer.status
            transfer.may_land |= not all(posted.has_landed for posted in transfer.running)
        return super().poll(transfer)

    def close(self) -> bool:
        """Wait up to ``CLOSE_SECONDS`` for running slices and end the engine, which takes up to a second.

        No byte lands in local memory afterwards: the engine's own thread receives what peers write, and it has ended. A
        peer may still write bytes of a ``WRITE`` that it has received.
        """
        if self._closed:
            return self._engine_has_ended
        self._closed = True
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._slices and time.monotonic() < deadline:
            self._slices = {posted for posted in self._slices if not self._has_ended(posted)}
            time.sleep(0.0005)
        for connection in self._connections:
            self._take_back(connection)
        engine, self._engine = self._engine, None
        # The engine ends with the last reference to it: this one, which is counted twice.
        self._engine_has_ended = sys.getrefcount(engine) == 2
        if self._engine_has_ended:
            self._slices.clear()
        return self._engine_has_ended

    def _has_ended(self, posted: Slice) -> bool:
        """Return whether a slice has ended, and keep whether it has landed."""
        status = self._fence_status(posted)
        if status in _RUNNING:
            return False
        posted.has_landed = self._error_of(posted, status == _COMPLETED) is None
        return True

    def _register_memory(self, region: Region) -> None:
        if code := self._engine.register_memory(region.base_address, region.length):
            raise TransportError(
                Reason.INVALID_REQUEST,
                f"Mooncake refuses to register {region} (code {code}).",
                "Register each region once, and none that overlaps another.",
            )

    def _is_reached(self, connection: MooncakeConnection) -> bool:
        assert isinstance(connection.peer, MooncakePeer)
        if connection.reading is None:
            try:
                if not self._is_greeted(connection, connection.peer):
                    return False
            except TransportError:  # an OSError too
                raise
            except OSError as error:
                raise _unanswered(connection.peer.name, str(error)) from error
            connection.reading = self._read_nonce(connection.peer)
        if self.poll(connection.reading) is Status.PENDING:
            return False
        if connection.reading.error is not None:
            raise connection.reading.error
        return True

    def _is_greeted(self, connection: MooncakeConnection, peer: MooncakePeer) -> bool:
        """Return whether the peer's process has answered the greeting. Raises ``OSError``."""
        if connection.greeting is None:
            address = self._address_of(connection.host, connection.port)
            if address is None:
                return False
            peer.place = f"{address}:{connection.port}"
            connection.greeting = Greeting(address, connection.port)
        return connection.greeting.is_over()

    def _address_of(self, host: str, port: int) -> str | None:
        """Return the numeric address of a host, None while it is looked up.

        Raises :class:`TransportError`: permission-denied where this process may not connect to the host.
        """
        lookup = self._lookups.get(host)
        if lookup is None:
            # Look-ups whose connections were given up are forgotten once they have ended.
            self._lookups = {name: each for name, each in self._lookups.items() if each.is_running}
            if len(self._lookups) < MAX_LOOKUPS:
                self._lookups[host] = Lookup(host, port, self._addresses_of)
            return None
        if lookup.is_running:
            return None
        del self._lookups[host]
        return lookup.address()

    def _read_nonce(self, peer: MooncakePeer) -> MooncakeTransfer:
        """Return a transfer with a fence and no batch."""
        transfer = MooncakeTransfer(peer, Direction.READ, 0, 0, descriptors=np.empty((0, 3), np.uint64), bounds=[0])
        self._start(transfer, Slice(peer, batch=0, num_descriptors=0, num_bytes=0))
        return transfer

    def _take_back(self, connection: MooncakeConnection) -> None:
        if connection.greeting is not None:
            connection.greeting.close()

    def _unanswered(self, peer: Peer, found: str) -> TransportError:
        return _unanswered(peer.name, found)

    def _has_room(self, transfer: MooncakeTransfer) -> bool:
        room = MAX_QUEUED_DESCRIPTORS - self._num_queued[transfer.peer.name]
        return len(transfer.running) < MAX_SLICES_IN_FLIGHT and room > MAX_DESCRIPTORS_PER_SLICE

    def _post(self, transfer: MooncakeTransfer, descriptors: Descriptors) -> None:
        assert isinstance(transfer.peer, MooncakePeer)
        sources, destinations, lengths = descriptors.T
        if transfer.direction is Direction.READ:
            batch = self._engine.batch_transfer_async_read(
                transfer.peer.place, destinations.tolist(), sources.tolist(), lengths.tolist()
            )
        else:
            batch = self._engine.batch_transfer_async_write(
                transfer.peer.place, sources.tolist(), destinations.tolist(), lengths.tolist()
            )
        if batch:
            self._start(transfer, Slice(transfer.peer, batch, len(descriptors), int(lengths.sum())))
        else:
            # The engine may have begun a part of the batch.
            transfer.end_failed(_refused(transfer.peer), may_land=True)

    def _start(self, transfer: MooncakeTransfer, posted: Slice) -> None:
        """Post the fence of a slice, whose batch is posted, and keep the slice."""
        self._slices.add(posted)
        self._num_queued[posted.peer.name] += posted.num_descriptors + 1
        transfer.running.append(posted)
        self._post_fence(posted)

    def _post_fence(self, posted: Slice) -> None:
        posted.fence = self._engine.batch_transfer_async_read(
            posted.peer.place, [posted.landed_nonce.ctypes.data], [posted.peer.nonce_address], [NONCE_BYTES]
        )

    def _fence_status(self, posted: Slice) -> int:
        """Return the engine's status of a fence. The engine forgets a fence that has ended: do not call again then."""
        if not posted.fence:  # the engine has refused the fence; without a fence the end of the batch is unknown
            self._post_fence(posted)
            return _RUNNING[0]
        return int(self._engine.transfer_check_status(posted.fence))

    def _reap(self, transfer: MooncakeTransfer) -> None:
        while transfer.running:
            posted = transfer.running[0]
            fence_status = self._fence_status(posted)
            if fence_status in _RUNNING:
                return
            transfer.running.popleft()
            self._slices.discard(posted)
            self._num_queued[posted.peer.name] -= posted.num_descriptors + 1
            if error := self._error_of(posted, fence_status == _COMPLETED):
                transfer.end_failed(error, may_land=True)
            else:
                transfer.bytes_done += posted.num_bytes

    def _error_of(self, posted: Slice, fence_completed: bool) -> TransportError | None:
        """Return the error of a slice whose fence has ended, or None; the engine forgets the batch."""
        moved = posted.batch == 0 or self._engine.get_batch_transfer_status([posted.batch]) == 0
        if not fence_completed:
            return connection_lost(posted.peer.name)
        if posted.landed_nonce.tobytes() != posted.peer.nonce:
            return other_nonce(posted.peer.name)
        return None if moved else _refused(posted.peer)


def _unanswered(name: str, found: str) -> TransportError:
    return TransportError(
        Reason.PEER_UNREACHABLE,
        f"Mooncake does not reach {name}: {found}.",
        "Check that the peer runs; on another host, set MC_TCP_BIND_ADDRESS there to the address of that host. "
        + open_port("from MC_MIN_RPC_PORT (15000) to MC_MAX_RPC_PORT (17000)", name.rpartition(":")[0]),
    )


def _check_host(host: str) -> None:
    if not re.fullmatch(_HOST, host):
        raise SettingsError(
            Reason.INVALID_SETTING,
            f"MC_TCP_BIND_ADDRESS is {host!r}.",
            "Set this host's IPv4 address or host name as peers see it, or unset the variable for loopback.",
        )


def _refused(peer: MooncakePeer) -> TransportError:
    return TransportError(
        Reason.TRANSFER_FAILED,
        f"{peer.name} refused a descriptor, or Mooncake lost the connection.",
        "Keep the peer's memory registered, and each descriptor inside the memory of one register call.",
    )


def open_engine(host: str, num_connections: int = 1) -> Any:
    """Start an engine that peers reach at ``host``, with ``num_connections`` connections to each peer.

    Several connections (Mooncake's "lanes") overtake each other: a fence proves nothing then.

    On loopback its two ports accept connections from this host only. Raises ``TransportError``
    (``TRANSPORT_UNAVAILABLE``) where the package or a library is missing or of another version, or the engine does not
    start.
    """
    with _opening:
        before = _listener_ids()
        with mooncake_environment({**_ENVIRONMENT, "MC_TCP_LANES_PER_PEER": str(num_connections)}):
            engine = _import_engine()()
            code = engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
        if code:
            raise _unavailable(
                f"Mooncake's engine does not start on {host!r} (code {code}).",
                "It takes two TCP ports from MC_MIN_RPC_PORT (15000) to MC_MAX_RPC_PORT (17000): free some, or set "
                "these variables.",
            )
        if host == "localhost" or host.startswith("127."):
            _confine_to_loopback(before)
            return engine
    logger.warning(
        "mooncake: every process that reaches TCP port %d of this host can read and write registered memory",
        engine.get_rpc_port(),
    )
    return engine


def is_built_with_cuda() -> bool:
    """Return whether the installed engine copies memory of CUDA devices: its other build takes any address for the
    host's, and would end the process.
    """
    return _installed_version(_WITH_CUDA) is not None and _installed_version(_WITHOUT_CUDA) is None


def install_mooncake() -> str:
    """Return what to do where Mooncake is not installed, or in another version."""
    command = install_command("mooncake-transfer-engine-non-cuda")
    return f"Install it, on Debian after apt-get install libibverbs1 libnuma1: {command}"


def _import_engine() -> Any:
    try:
        engine_class = importlib.import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        raise _unavailable(
            f"the mooncake transport cannot load Mooncake's engine: {error}.", install_mooncake()
        ) from error
    found = [installed for name in _DISTRIBUTIONS if (installed := _installed_version(name))]
    if not any(installed == _VERSION or installed.startswith(f"{_VERSION}.") for installed in found):
        raise _unavailable(
            f"the mooncake transport needs the request order of Mooncake {_VERSION}; "
            f"the installed version is {', '.join(found) or 'unknown'}.",
            install_mooncake(),
        )
    return engine_class


def _installed_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@contextmanager
def mooncake_environment(settings: dict[str, str | None]) -> Iterator[None]:
    """Set what Mooncake reads from the environment only, while a part of Mooncake starts; None removes a variable."""
    wanted = {"MC_LOG_LEVEL": os.environ.get("MC_LOG_LEVEL", "WARNING"), **settings}
    saved = {name: os.environ.get(name) for name in wanted}
    _apply(wanted)
    try:
        yield
    finally:
        _apply(saved)


def _apply(settings: dict[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _confine_to_loopback(before: set[int]) -> None:
    """Bind Mooncake's listeners to loopback: Mooncake listens on all interfaces and does not authenticate peers."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(found) for identity, found in _listeners() if identity not in before]
        if len(listeners) != _NUM_LISTENERS:
            raise _unavailable(
                f"{len(listeners)} listening sockets opened while Mooncake started, which opens {_NUM_LISTENERS}.",
                "Try again.",
            )
        try:
            for listener in listeners:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _INTERFACE)
        except OSError as error:
            raise _unavailable(
                f"Mooncake listens on all interfaces, and the kernel does not bind its sockets to loopback: {error}.",
                "In a trusted network, set MC_TCP_BIND_ADDRESS to this host's address.",
            ) from error


def _listener_ids() -> set[int]:
    return set(listens_at())


def _listeners() -> Iterator[tuple[int, socket.socket]]:
    """Yield inode and duplicate of every TCP socket of this process that listens on all addresses."""
    for identity, found in listeners():
        if ip_address(found.getsockname()[0]).is_unspecified:
            yield identity, found
        else:
            found.close()


def _unavailable(message: str, remedy: str) -> TransportError:
    return TransportError(Reason.TRANSPORT_UNAVAILABLE, message, remedy)
