"""NIXL (UCX back end): memory of hosts and CUDA devices over shared memory, TCP, RDMA or NVLink, between any two hosts.

NIXL cannot revoke a posted transfer, and posting on a warm shared-memory end point blocks for the copy. So host memory
is posted in slices that are small enough for every call to return soon, and a cancelled or failed transfer stays
``PENDING`` until every posted slice has ended. To ask for the state of a request makes UCX go on: no slice waits for
NIXL's own thread.

NIXL knows memory by its type, the number of its device, and its address. A region's number is that of its process: CUDA
counts the devices that the process sees.
"""

import ctypes
import logging
import os
import re
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from kvferry.arrays import Addresses, Descriptors
from kvferry.errors import Reason, TransportError, open_port
from kvferry.layout.shard import HOST_DEVICE, Region
from kvferry.transport.network import LOOPBACK_DEVICE, has_efa_device, interface_of, listens_at
from kvferry.transport.protocol import (
    NONCE_BYTES,
    Address,
    Capabilities,
    DeviceList,
    Direction,
    NonceBytes,
    Peer,
    RegionList,
    RegionTable,
    Sides,
    Status,
    Transfer,
    check_devices,
    decode_end_point,
    install_nixl,
    pack_devices,
    pack_regions,
    plain_address,
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

PROGRESS_DELAY_MICROSECONDS = 1000  # with 0, the Python wrapper's value, NIXL's progress thread occupies a core
MAX_DESCRIPTORS_PER_SLICE = 512
MAX_BYTES_PER_SLICE = 8 << 20
MAX_DEVICE_BYTES_PER_SLICE = 256 << 20
"""To post a slice takes some 60 us, in which an H200 copies half as much within itself."""
MAX_SLICES_IN_FLIGHT = 8
MAX_DEVICE_SLICES_IN_FLIGHT = 4
"""Where UCX finds no way but TCP between the devices, these are a second's bytes, which cannot be revoked."""
SILENCE_SECONDS = 30
"""How long a host may leave what it was sent over TCP unacknowledged before its transfers fail: without a bound they
wait for a host that has vanished as long as the kernel repeats packets, a quarter of an hour. A transfer that only
receives ends within 20 s more, when UCX asks whether the peer is alive."""
CONNECT_SECONDS = 20.0
"""Where a link fails for some seconds, Linux tries again 7 and 15 s after the first packet, in either direction."""
DEVICES_VARIABLE, MODULES_VARIABLE = "UCX_NET_DEVICES", "UCX_MODULES"
PORTS_VARIABLE = "UCX_TCP_PORT_RANGE"
CLOSE_SECONDS = 2.0
_NUM_LANDINGS = 1024
"""Places for peers' nonces: the limit of concurrent connections."""
MAX_UNUSED = 16
"""Agents without an open peer that stay loaded for a later connection: an agent that NIXL 1.5.1 forgets and loads
again at once may not answer, as seen between engines."""

SENT_VARIABLE, RECEIVED_VARIABLE = "UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"
SENT_BYTES = 64 << 10
"""UCX's own 8 KiB make reads a quarter as fast as writes. No peer receives more than 64 KiB, unless its variable says
so. See docs/decisions/transports-without-threads.md."""
UCX_SENT_BYTES, UCX_RECEIVED_BYTES = 8 << 10, 64 << 10
MAX_PLACES = 64
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

_Place = tuple[
    Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Fa-f:.]{2,45}\Z")], Annotated[int, msgspec.Meta(ge=1, le=65535)]
]
_Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]

_still_writing: list[object] = []  # agents that were closed with a transfer running: destroying one could crash


class TcpMessages(NamedTuple):
    """The longest message that one side sends, and the longest that it receives, in bytes."""

    sent: _Bytes = SENT_BYTES
    received: _Bytes = UCX_RECEIVED_BYTES

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> "TcpMessages":
        """Return the sizes with these variables of the environment.

        Who sets one size alone gets UCX's own value of the other: UCX does not start with send buffers that are larger
        than its receive buffers. Raises :class:`TransportError` (transport-unavailable).

        >>> TcpMessages.of({}), TcpMessages.of({"UCX_TCP_RX_SEG_SIZE": "128k"})
        (TcpMessages(sent=65536, received=65536), TcpMessages(sent=8192, received=131072))
        """
        is_default = RECEIVED_VARIABLE not in variables
        sent = _size(variables, SENT_VARIABLE, SENT_BYTES if is_default else UCX_SENT_BYTES)
        return cls(sent, _size(variables, RECEIVED_VARIABLE, UCX_RECEIVED_BYTES))

    def check(self, peer: "TcpMessages", name: str) -> None:
        """Raise :class:`TransportError` (unsupported) unless each side receives what the other sends.

        >>> TcpMessages().check(TcpMessages(sent=8192), "a peer")
        """
        if self.sent > peer.received or peer.sent > self.received:
            raise TransportError(
                Reason.UNSUPPORTED,
                f"over TCP UCX sends messages of up to {self.sent} bytes here and receives {self.received}; {name} "
                f"sends {peer.sent} and receives {peer.received}. A longer message overruns its receiver's buffer.",
                f"Set {SENT_VARIABLE} and {RECEIVED_VARIABLE} to the same values for all engines, or for none.",
            )


def ucx_settings(variables: Mapping[str, str] = os.environ) -> list[str]:
    """Return what UCX is told of these sizes. Where UCX's variable of a setting is set, UCX takes that value."""
    return [] if RECEIVED_VARIABLE in variables else [f"TCP_TX_SEG_SIZE={SENT_BYTES}"]


def _size(variables: Mapping[str, str], name: str, default: int) -> int:
    """Return a size as UCX writes it.

    >>> [_size({"": text}, "", 0) for text in ("8kb", "256K", "65536", "1m", "64b")]
    [8192, 262144, 65536, 1048576, 64]
    """
    if name not in variables:
        return default
    found = re.fullmatch(r"(\d{1,9})([kmg]?)b?", variables[name].lower())
    if found is None:
        raise TransportError(
            Reason.TRANSPORT_UNAVAILABLE,
            f"{name} is {variables[name]!r}, which names no number of bytes.",
            "Write it as 256k, or unset it.",
        )
    return int(found[1]) * _UNITS[found[2]]


class TcpPorts(NamedTuple):
    """Address and port of each TCP socket on which an agent listens, and the range of ports that is set for its UCX."""

    places: Annotated[tuple[_Place, ...], msgspec.Meta(max_length=MAX_PLACES)] = ()
    port_range: Annotated[str, msgspec.Meta(pattern=r"^([0-9]{1,5}-[0-9]{1,5})?\Z")] = ""

    @classmethod
    def of(cls, places: Sequence[tuple[str, int]], variables: Mapping[str, str]) -> "TcpPorts":
        """Return the ports with these variables of the environment, without loopback where there are others.

        UCX listens at addresses of interfaces: what listens on every interface is something else, and left out.

        >>> TcpPorts.of([("127.0.0.1", 23701), ("10.0.0.2", 23712)], {"UCX_TCP_PORT_RANGE": "23700-23799"})
        TcpPorts(places=(('10.0.0.2', 23712),), port_range='23700-23799')
        """
        found = sorted((str(plain_address(address)), port) for address, port in places)
        bare = [place for place in found if not plain_address(place[0]).is_unspecified]
        beyond = [place for place in bare if not plain_address(place[0]).is_loopback]
        ports = variables.get(PORTS_VARIABLE, "")
        return cls(tuple(beyond or bare)[:MAX_PLACES], ports if re.fullmatch(r"\d{1,5}-\d{1,5}", ports) else "")

    def __str__(self) -> str:
        """Return the places after a name; empty where there are none."""
        places = [f"[{at}]:{port}" if ":" in at else f"{at}:{port}" for at, port in self.places[:4]]
        return " at " + ", ".join(places) if places else ""

    def remedy(self) -> str:
        """Return what to open for this agent; empty where no port is known, as without TCP.

        >>> TcpPorts((("10.0.0.2", 23712),), "23700-23799").remedy().partition(" to ")[0]
        'Open TCP ports 23700-23799 of 10.0.0.2 (UCX_TCP_PORT_RANGE there)'
        """
        if not self.places:
            return ""
        if self.port_range:
            hosts = ", ".join(dict.fromkeys(address for address, _ in self.places[:4]))
            return open_port(self.port_range, f"{hosts} ({PORTS_VARIABLE} there)")
        *others, (last, port) = self.places[:4]
        told = open_port(", ".join([*(f"{each} of {address}" for address, each in others), str(port)]), last)
        return f"{told} The port is a free one: set {PORTS_VARIABLE} there, such as 23700-23799, to keep it in a range."


NO_PORTS = TcpPorts()


class NixlEndPoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A NIXL agent's metadata, its registered memory, and a nonce in it."""

    transport: Literal["nixl"]
    version: Literal[1]
    agent_name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    metadata: Annotated[bytes, msgspec.Meta(min_length=1, max_length=2 << 20)]
    regions: RegionList
    nonce_address: Address
    nonce: NonceBytes
    devices: DeviceList = []
    """The device of each region, by the sender's numbers; empty where all is host memory."""
    tcp_messages: TcpMessages = TcpMessages()
    tcp_ports: TcpPorts = NO_PORTS

    def __post_init__(self) -> None:
        check_devices(self.regions, self.devices)
        for address, _ in self.tcp_ports.places:
            if plain_address(address).is_unspecified:
                raise ValueError(f"nobody can connect to {address}")

    @property
    def region_table(self) -> RegionTable:
        """The sender's regions."""
        return unpack_regions(self.regions, self.devices)


@dataclass(slots=True, eq=False)
class NixlPeer(Peer):
    """A remote agent. NIXL may forget the agent when its last peer is closed or collected."""

    agent_name: str
    left: deque[str]
    """Names of agents whose peers were closed, for the transport's thread."""
    tcp_ports: TcpPorts = NO_PORTS
    is_closed: bool = False

    def close(self) -> None:
        """Release the agent; from any thread."""
        if not self.is_closed:
            self.is_closed = True
            self.left.append(self.agent_name)

    __del__ = close


class RemoteAgents:
    """The remote agents of ``agent``, which connects through ``devices``, through all where these are empty.

    ``running`` maps the handles of posted transfers to their agents' names.
    """

    def __init__(self, nixl: Any, agent: Any, running: Mapping[int, str], devices: str) -> None:
        self._nixl = nixl
        self._agent = agent
        self._remedy = "Check that the peer runs."
        if devices:
            self._remedy += (
                f" This process connects through {devices} alone: if the peer is on another host, set this engine's "
                "host, or allowed_hosts, so that they name the way to it."
            )
        self._running = running
        self._metadata: dict[str, bytes] = {}
        self._num_peers: Counter[str] = Counter()
        self._left: deque[str] = deque()
        self._unused: dict[str, None] = {}

    def is_known(self, remote: NixlEndPoint) -> bool:
        """Return whether this end point's metadata is loaded."""
        return self._metadata.get(remote.agent_name) == remote.metadata

    def is_in_use(self, name: str) -> bool:
        """Return whether a transfer with this agent is posted. Forgetting such an agent would crash."""
        return name in self._running.values()

    def peer(self, remote: NixlEndPoint) -> NixlPeer:
        """Load an end point's metadata, unless loaded already, and return a new peer of its agent."""
        name = remote.agent_name
        if not self.is_known(remote):
            self._replace(remote)
        self._num_peers[name] += 1
        self._unused.pop(name, None)
        return NixlPeer(name, remote.region_table, name, self._left, remote.tcp_ports)

    def load_anew(self, remote: NixlEndPoint) -> None:
        """Forget and load an agent again: NIXL drops an agent whose connection it has lost."""
        self._forget(remote.agent_name)
        self._load(remote.agent_name, remote.metadata, remote.tcp_ports)

    def let_go(self) -> None:
        """Forget agents without peer and without transfer, the longest unused first, down to ``MAX_UNUSED``."""
        while self._left:
            name = self._left.popleft()
            self._num_peers[name] -= 1
            if not self._num_peers[name]:
                del self._num_peers[name]
                self._unused[name] = None
        num_surplus = len(self._unused) - MAX_UNUSED
        if num_surplus > 0:
            running = set(self._running.values())
            for name in [name for name in self._unused if name not in running][:num_surplus]:
                del self._unused[name]
                self._forget(name)

    def close(self) -> None:
        """Forget all agents."""
        for name in list(self._metadata):
            self._forget(name)

    def _replace(self, remote: NixlEndPoint) -> None:
        """Load metadata in place of an older end point of the same agent; restore the older where that fails."""
        name, former = remote.agent_name, self._metadata.get(remote.agent_name)
        if self.is_in_use(name):
            raise TransportError(
                Reason.PEER_UNREACHABLE,
                f"{name} sent a new end point while transfers over its old end point are running.",
                "Connect again when those transfers have ended.",
            )
        self._forget(name)
        try:
            self._load(name, remote.metadata, remote.tcp_ports)
        except TransportError:
            if former is not None:
                self._load(name, former, remote.tcp_ports)
            raise

    def _load(self, name: str, metadata: bytes, tcp_ports: TcpPorts) -> None:
        try:
            loaded = self._agent.loadRemoteMD(metadata).decode()
        except (self._nixl.nixlBackendError, self._nixl.nixlRemoteDisconnectError) as error:
            message = f"NIXL cannot open a connection to {name}{tcp_ports}: {error!r}."
            remedy = f"{self._remedy} {tcp_ports.remedy()}".strip()
            raise TransportError(Reason.PEER_UNREACHABLE, message, remedy) from error
        except Exception as error:
            raise _malformed(f"NIXL cannot load its metadata: {error!r}") from error
        if loaded != name:
            if loaded not in self._metadata:
                self._agent.invalidateRemoteMD(loaded)
            raise _malformed(f"the metadata is of agent {loaded!r}, not {name!r}")
        self._metadata[name] = metadata

    def _forget(self, name: str) -> None:
        if self._metadata.pop(name, None) is None:
            return
        try:
            self._agent.invalidateRemoteMD(name)
        except Exception:  # the agent has disconnected
            logger.debug("NIXL had already dropped %s", name, exc_info=True)


@dataclass(slots=True, eq=False)
class NixlTransfer(SlicedTransfer):
    """A transfer whose running slices are NIXL handles, with the bytes of each."""

    running: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class NixlConnection(Connection):
    """A connection to an agent. ``was_known``: the agent was loaded before this connection."""

    remote: NixlEndPoint = field(kw_only=True)
    was_known: bool = field(kw_only=True)


class NixlTransport(SlicedTransport[NixlTransfer, NixlConnection]):
    """One NIXL agent with the UCX back end, which listens on ``devices``: on loopback, or with ``""`` on all devices.

    Everybody who reaches a port of UCX can read and write registered memory. Where the variable ``UCX_NET_DEVICES`` is
    set, it names the devices.
    """

    capabilities = Capabilities(name="nixl", close_ends_writes=True, moves_device_memory=True)
    _transfer_type = NixlTransfer
    _connection_type = NixlConnection
    _slice_descriptors = MAX_DESCRIPTORS_PER_SLICE
    _slice_bytes = MAX_BYTES_PER_SLICE
    _device_slice_bytes = MAX_DEVICE_BYTES_PER_SLICE

    def __init__(self, devices: str = LOOPBACK_DEVICE) -> None:
        super().__init__()
        self._nixl = _import_bindings()
        self._devices = os.environ.get(DEVICES_VARIABLE, devices)
        self._tcp_messages = TcpMessages.of(os.environ)
        self._name = f"kvferry-{os.getpid()}-{uuid.uuid4().hex}"
        before = listens_at()
        self._agent, self._backend = self._create_agent()
        opened = [place for inode, place in listens_at().items() if inode not in before]
        # Other threads may have opened ports meanwhile.
        own = [place for place in opened if interface_of(place[0]) in self._devices.split(",")]
        self._tcp_ports = TcpPorts.of(own or opened, os.environ)
        self._operations = {Direction.READ: self._nixl.NIXL_READ, Direction.WRITE: self._nixl.NIXL_WRITE}
        self._running_handles: dict[int, str] = {}
        self._failed_handles: set[int] = set()  # of those that ended while the transport was being closed
        self._remote_agents = RemoteAgents(self._nixl, self._agent, self._running_handles, self._devices)
        self._registrations: list[Any] = []
        # The first nonce is this agent's; the others are places for peers' nonces.
        self._nonces = np.frombuffer(bytearray(os.urandom(NONCE_BYTES * (1 + _NUM_LANDINGS))), np.uint8)
        self._nonce_address = int(self._nonces.ctypes.data)
        self._landings = [self._nonce_address + NONCE_BYTES * (1 + place) for place in range(_NUM_LANDINGS)]
        self._register_memory([Region(self._nonce_address, self._nonces.nbytes)])

    def _make_reachable(self, regions: Sequence[Region]) -> None:
        self._register_memory(regions)

    def _end_point(self) -> NixlEndPoint:
        return NixlEndPoint(
            transport="nixl",
            version=1,
            agent_name=self._name,
            metadata=self._agent.getLocalMD(),
            regions=pack_regions(self._local),
            nonce_address=self._nonce_address,
            nonce=self._nonces[:NONCE_BYTES].tobytes(),
            devices=pack_devices(self._local),
            tcp_messages=self._tcp_messages,
            tcp_ports=self._tcp_ports,
        )

    def connect(self, end_point: bytes) -> Transfer:
        """Load the peer's metadata and read its nonce, in at most ``CONNECT_SECONDS``."""
        self._check_open()
        remote = decode_end_point(end_point, NixlEndPoint, "nixl")
        if remote.agent_name == self._name:
            raise cannot_reach_itself("nixl")
        self._tcp_messages.check(remote.tcp_messages, remote.agent_name)
        self._check_answered(remote.agent_name)
        was_known = self._remote_agents.is_known(remote)
        peer = self._remote_agents.peer(remote)
        self._remote_agents.let_go()
        deadline = time.monotonic() + CONNECT_SECONDS
        return self._follow(
            NixlConnection(peer, Direction.READ, 1, NONCE_BYTES, deadline=deadline, remote=remote, was_known=was_known)
        )

    def poll(self, transfer: Transfer) -> Status:
        """Make bounded progress and return the status; of a closed transport once every posted slice has ended: the
        agent stays while one runs, and its bytes may still land.
        """
        if not self._closed or not isinstance(transfer, NixlTransfer) or transfer.status is not Status.PENDING:
            return super().poll(transfer)
        transfer.end_failed(self._closed_error(), may_land=False)
        for handle in list(transfer.running):
            if handle in self._running_handles:
                self._check(transfer, handle, self._agent.getXferStatus)
            else:
                # It ended while the transport was being closed.
                transfer.running.pop(handle)
                transfer.may_land |= handle in self._failed_handles
        return transfer.settle()

    def close(self) -> bool:
        """Wait up to ``CLOSE_SECONDS`` for running transfers and destroy the agent.

        With the agent go its UCX context, whose memory registrations are what the remote keys of an RDMA write name,
        and the worker that receives what peers send over TCP. To deregister the memory alone would not do: UCX keeps
        registrations in a cache, and writes what comes over TCP without looking at a key.
        """
        if self._closed:
            return self._agent is None
        self._closed = True
        if not self._ended_in_time():
            logger.warning("closed with %d NIXL transfers running; the agent stays", len(self._running_handles))
            _still_writing.append((self._agent, self._nonces))
            return False
        self._remote_agents.close()
        for registration in self._registrations:
            self._agent.deregisterMem(registration, [self._backend])
        self._registrations.clear()
        del self._remote_agents
        agent, self._agent = self._agent, None
        # The agent ends with the last reference to it: this one, which is counted twice.
        return sys.getrefcount(agent) == 2

    def _create_agent(self) -> tuple[Any, int]:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True  # an agent must answer even while no thread polls it
        config.pthrDelay = PROGRESS_DELAY_MICROSECONDS
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
        try:
            with _ucx_variables(self._devices):
                agent = self._nixl.nixlAgent(self._name, config)
                return agent, agent.createBackend("UCX", {"engine_config": _ucx_configuration()})
        except Exception as error:
            raise TransportError(
                Reason.TRANSPORT_UNAVAILABLE,
                f"NIXL cannot start its UCX back end: {error!r}.",
                "Keep tcp in UCX_TLS (or unset it), and reinstall nixl and nixl-cu12 in one version.",
            ) from error

    def _register_memory(self, regions: Sequence[Region]) -> None:
        """Register memory, each device by a call of its own: a list of NIXL's has one type of memory."""
        table = RegionTable(regions)
        for device in table.devices:
            segment, number = self._segment(device)
            rows = [(region.base_address, region.length, number, "") for region in table.of_device(device)]
            registration = self._nixl.nixlRegDList(segment, rows)
            try:
                self._agent.registerMem(registration, [self._backend])
            except Exception as error:
                raise _not_registered(table.of_device(device), device, error) from error
            self._registrations.append(registration)

    def _segment(self, device: str) -> tuple[Any, int]:
        """Return NIXL's type of a device's memory, and the device's number."""
        if device == HOST_DEVICE:
            return self._nixl.DRAM_SEG, 0
        return self._nixl.VRAM_SEG, int(device.removeprefix("cuda:"))

    def _is_reached(self, connection: NixlConnection) -> bool:
        if connection.reading is None:
            if not self._landings:
                return False
            self._read_nonce(connection, self._landings.pop())
        reading = connection.reading
        assert reading is not None
        if self.poll(reading) is Status.PENDING:
            return False
        if reading.error is not None:
            self._load_anew(connection, reading.error)
            return False
        if ctypes.string_at(_landing(reading), NONCE_BYTES) != connection.remote.nonce:
            raise other_nonce(connection.peer.name)
        return True

    def _read_nonce(self, connection: NixlConnection, landing: int) -> None:
        row = np.array([[connection.remote.nonce_address, landing, NONCE_BYTES]], np.uint64)
        connection.reading = self._queue(connection.peer, Direction.READ, row)

    def _load_anew(self, connection: NixlConnection, error: TransportError) -> None:
        """Load a known agent again, in case NIXL has dropped it, and read the nonce once more; else raise."""
        assert connection.reading is not None
        if not connection.was_known or self._remote_agents.is_in_use(connection.remote.agent_name):
            raise error
        connection.was_known = False
        self._remote_agents.load_anew(connection.remote)
        self._read_nonce(connection, _landing(connection.reading))

    def _take_back(self, connection: NixlConnection) -> None:
        if connection.reading is not None:
            self._landings.append(_landing(connection.reading))

    def _unanswered(self, peer: Peer, found: str) -> TransportError:
        assert isinstance(peer, NixlPeer)
        return TransportError(
            Reason.PEER_UNREACHABLE,
            f"NIXL does not reach {peer.name}{peer.tcp_ports}: {found}.",
            "Check that the peer runs and that its addresses can be reached (UCX_NET_DEVICES). "
            f"{peer.tcp_ports.remedy()}".strip(),
        )

    def _has_room(self, transfer: NixlTransfer) -> bool:
        return len(transfer.running) < (MAX_DEVICE_SLICES_IN_FLIGHT if transfer.is_of_devices else MAX_SLICES_IN_FLIGHT)

    def _post(self, transfer: NixlTransfer, descriptors: Descriptors) -> None:
        assert isinstance(transfer.peer, NixlPeer)
        sides = Sides.of(descriptors, transfer.direction)
        try:
            handle = self._agent.createXferReq(
                self._operations[transfer.direction],
                self._descriptor_list(self._local, sides.local, sides.lengths),
                self._descriptor_list(transfer.peer.regions, sides.remote, sides.lengths),
                transfer.peer.agent_name,
                "",
                [self._backend],
            )
        except Exception as error:
            transfer.end_failed(_translate(error, transfer), may_land=False)
            return
        transfer.running[handle] = int(descriptors[:, 2].sum())
        self._running_handles[handle] = transfer.peer.agent_name
        self._check(transfer, handle, self._agent.postXferReq)

    def _descriptor_list(self, table: RegionTable, addresses: Addresses, lengths: Addresses) -> Any:
        """Return NIXL's list of these ranges, which all lie on one device."""
        segment, number = self._segment(table.device_of(int(addresses[0])))
        rows = np.full((len(addresses), 3), number, np.uint64)
        rows[:, 0], rows[:, 1] = addresses, lengths
        return self._nixl.nixlXferDList(segment, rows)

    def _reap(self, transfer: NixlTransfer) -> None:
        self._remote_agents.let_go()
        for handle in list(transfer.running):
            self._check(transfer, handle, self._agent.getXferStatus)

    def _check(self, transfer: NixlTransfer, handle: int, ask: Any) -> None:
        """Call ``ask`` with a handle and release the handle if its transfer has ended."""
        error = None
        try:
            if ask(handle) == self._nixl.NIXL_IN_PROG:
                return
        except Exception as raised:
            error = raised
        num_bytes = transfer.running.pop(handle)
        self._running_handles.pop(handle, None)
        self._release(handle)
        if error is None:
            transfer.bytes_done += num_bytes
        else:
            transfer.end_failed(_translate(error, transfer), may_land=True)

    def _release(self, handle: int) -> None:
        try:
            self._agent.releaseXferReq(handle)
        except Exception:
            logger.warning("NIXL did not release an ended transfer", exc_info=True)

    def _ended_in_time(self) -> bool:
        """Wait for running transfers, for ``CLOSE_SECONDS`` at most; return whether all have ended."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._running_handles and time.monotonic() < deadline:
            for handle in list(self._running_handles):
                try:
                    ended = self._agent.getXferStatus(handle) != self._nixl.NIXL_IN_PROG
                except Exception:
                    ended = True
                    self._failed_handles.add(handle)
                if ended:
                    self._running_handles.pop(handle, None)
                    self._release(handle)
            time.sleep(0.0005)
        return not self._running_handles


def _landing(reading: SlicedTransfer) -> int:
    """Return the address to which the nonce is read."""
    return int(reading.descriptors[0, 1])


def _import_bindings() -> Any:
    try:
        from nixl import _bindings  # type: ignore[import-untyped]
    except ImportError as error:
        raise TransportError(
            Reason.MISSING_DEPENDENCY,
            f"the nixl transport needs the package nixl: {error}.",
            install_nixl(),
        ) from error
    return _bindings


def _not_registered(regions: Sequence[Region], device: str, error: Exception) -> TransportError:
    if device == HOST_DEVICE:
        reason, remedy = Reason.INVALID_REQUEST, "Register memory that is mapped, and register it once."
    else:
        reason = Reason.TRANSPORT_UNAVAILABLE
        remedy = (
            "UCX must move memory of CUDA devices: leave UCX_TLS unset, or name cuda_copy and cuda_ipc in it; install "
            "nixl-cu12 or nixl-cu13, as the driver's CUDA is."
        )
    return TransportError(reason, f"NIXL refuses to register {list(regions)}: {error!r}.", remedy)


def _translate(error: Exception, transfer: NixlTransfer) -> TransportError:
    kind = type(error).__name__
    name = transfer.peer.name
    if kind in ("nixlRemoteDisconnectError", "nixlCancelledError"):
        assert isinstance(transfer.peer, NixlPeer)
        ports = transfer.peer.tcp_ports
        return connection_lost(f"{name}{ports}", ports.remedy())
    if kind == "nixlNotFoundError":
        return TransportError(
            Reason.UNREGISTERED_RANGE,
            f"NIXL does not know the memory of a descriptor, or {name} any more: {error}.",
            "A descriptor must not cross from one register call's memory into another's; the peer must be open.",
        )
    return TransportError(
        Reason.TRANSFER_FAILED,
        f"NIXL failed on a transfer with {name}: {error!r}.",
        "Send the request again; the logs of both engines have UCX's messages.",
    )


def _ucx_configuration() -> str:
    """Return UCX's settings in NIXL's form. Where UCX's variable of a setting is set, UCX takes that value.

    By default UCX waits within a call until the peer's host takes a connection: 30 s where a firewall drops packets.
    No other transfer of the thread would move meanwhile.
    """
    return ",".join([f"TCP_USER_TIMEOUT={SILENCE_SECONDS}s", "TCP_CONN_NB=y", *ucx_settings()])


@contextmanager
def _ucx_variables(devices: str) -> Iterator[None]:
    """Set what UCX reads from its variables alone, in contexts that are made within the block.

    It uses these devices alone; all where there are none. NIXL has no parameter for them: a value of its
    "engine_config" ends at a comma, so that only the first device was used, and its "device_list" takes RDMA devices
    alone.

    UCX loads its module for Amazon's EFA only where there is such a device, or the user says so: the module loads
    Debian's libibverbs beside the one in NIXL's wheel, and then NIXL 1.5.1 crashes when the process ends.
    """
    wanted = {DEVICES_VARIABLE: devices} if devices else {}
    if MODULES_VARIABLE not in os.environ and not has_efa_device():
        wanted[MODULES_VARIABLE] = "^efa"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _malformed(found: str) -> TransportError:
    return TransportError(
        Reason.MALFORMED_MESSAGE, f"this is not a nixl end point: {found}.", "Run NIXL 1.5.1 in both engines."
    )
