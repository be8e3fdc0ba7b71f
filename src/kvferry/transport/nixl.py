"""NIXL (UCX back end): host memory over shared memory, TCP or RDMA, between any two hosts.

NIXL cannot revoke a posted transfer, and posting on a warm shared-memory end point blocks for the copy. So a transfer
is posted in slices that are small enough for every call to return soon, and a cancelled or failed transfer stays
``PENDING`` until every posted slice has ended.
"""

import ctypes
import logging
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from kvferry.arrays import Descriptors
from kvferry.errors import Reason, TransportError
from kvferry.layout.shard import Region
from kvferry.transport.end_points import (
    NONCE_BYTES,
    decode_end_point,
    pack_regions,
)
from kvferry.transport.nixl_agents import NixlEndPoint, NixlPeer, RemoteAgents
from kvferry.transport.protocol import Capabilities, Direction, Status, Transfer
from kvferry.transport.regions import RegionTable, check_regions
from kvferry.transport.sliced import Connection, SlicedTransfer, SlicedTransport

logger = logging.getLogger(__name__)

PROGRESS_DELAY_MICROSECONDS = 1000  # with 0, the Python wrapper's value, NIXL's progress thread occupies a core
MAX_DESCRIPTORS_PER_SLICE = 512
MAX_BYTES_PER_SLICE = 8 << 20
MAX_SLICES_IN_FLIGHT = 8
CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 2.0
_NUM_LANDINGS = 1024
"""Places for peers' nonces: the limit of concurrent connections."""

_still_writing: list[object] = []  # agents that were closed with a transfer running: destroying one could crash


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
    """One NIXL agent with the UCX back end."""

    capabilities = Capabilities(name="nixl", cancel_is_immediate=False)
    _transfer_type = NixlTransfer
    _connection_type = NixlConnection
    _slice_descriptors = MAX_DESCRIPTORS_PER_SLICE
    _slice_bytes = MAX_BYTES_PER_SLICE

    def __init__(self) -> None:
        super().__init__()
        self._nixl = _import_bindings()
        self._name = f"kvferry-{os.getpid()}-{uuid.uuid4().hex}"
        self._agent, self._backend = self._create_agent()
        self._operations = {Direction.READ: self._nixl.NIXL_READ, Direction.WRITE: self._nixl.NIXL_WRITE}
        self._running_handles: dict[int, str] = {}
        self._remote_agents = RemoteAgents(self._nixl, self._agent, self._running_handles)
        self._registrations: list[Any] = []
        # The first nonce is this agent's; the others are places for peers' nonces.
        self._nonces = np.frombuffer(bytearray(os.urandom(NONCE_BYTES * (1 + _NUM_LANDINGS))), np.uint8)
        self._nonce_address = int(self._nonces.ctypes.data)
        self._landings = [self._nonce_address + NONCE_BYTES * (1 + place) for place in range(_NUM_LANDINGS)]
        self._register_memory([Region(self._nonce_address, self._nonces.nbytes)])

    def register(self, regions: Sequence[Region]) -> bytes:
        """Register memory with NIXL and return an end point with the agent's metadata."""
        self._check_open()
        check_regions(regions, "nixl")
        self._register_memory(RegionTable(regions).regions)
        self._add(regions)
        end_point = NixlEndPoint(
            transport="nixl",
            version=1,
            agent_name=self._name,
            metadata=self._agent.getLocalMD(),
            regions=pack_regions(self._local),
            nonce_address=self._nonce_address,
            nonce=self._nonces[:NONCE_BYTES].tobytes(),
        )
        return msgspec.msgpack.encode(end_point)

    def connect(self, end_point: bytes) -> Transfer:
        """Load the peer's metadata and read its nonce, in at most ``CONNECT_SECONDS``."""
        self._check_open()
        remote = decode_end_point(end_point, NixlEndPoint, "nixl")
        if remote.agent_name == self._name:
            raise TransportError(
                Reason.UNSUPPORTED, "a NIXL agent cannot connect to itself.", "Open a second transport."
            )
        self._check_answered(remote.agent_name)
        was_known = self._remote_agents.is_known(remote)
        peer = self._remote_agents.peer(remote)
        self._remote_agents.let_go()
        deadline = time.monotonic() + CONNECT_SECONDS
        return self._follow(
            NixlConnection(peer, Direction.READ, 1, NONCE_BYTES, deadline=deadline, remote=remote, was_known=was_known)
        )

    def close(self) -> None:
        """Wait up to ``CLOSE_SECONDS`` for running transfers and destroy the agent."""
        if self._closed:
            return
        self._closed = True
        if not self._end_within(CLOSE_SECONDS):
            logger.warning("closed with %d NIXL transfers running; the agent stays", len(self._running_handles))
            _still_writing.append((self._agent, self._nonces))
            return
        self._remote_agents.close()
        for registration in self._registrations:
            self._agent.deregisterMem(registration, [self._backend])
        self._registrations.clear()
        del self._agent, self._remote_agents

    def _create_agent(self) -> tuple[Any, int]:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True  # an agent must answer even while no thread polls it
        config.pthrDelay = PROGRESS_DELAY_MICROSECONDS
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
        try:
            agent = self._nixl.nixlAgent(self._name, config)
            return agent, agent.createBackend("UCX", {})
        except Exception as error:
            raise TransportError(
                Reason.TRANSPORT_UNAVAILABLE,
                f"NIXL cannot start its UCX back end: {error!r}.",
                "Keep tcp in UCX_TLS (or unset it), and reinstall nixl and nixl-cu12 in one version.",
            ) from error

    def _register_memory(self, regions: Sequence[Region]) -> None:
        if not regions:
            return
        rows = [(region.base_address, region.length, 0, "") for region in regions]
        registration = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, rows)
        try:
            self._agent.registerMem(registration, [self._backend])
        except Exception as error:
            raise TransportError(
                Reason.INVALID_REQUEST,
                f"NIXL refuses to register {regions}: {error!r}.",
                "Is all of the memory mapped, and registered only once?",
            ) from error
        self._registrations.append(registration)

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
            raise TransportError(
                Reason.PEER_CHANGED, f"{connection.peer.name} holds another nonce.", "Ask the peer for a new end point."
            )
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

    def _unanswered(self, name: str, found: str) -> TransportError:
        return TransportError(
            Reason.PEER_UNREACHABLE,
            f"{name}: {found}.",
            "Is that engine running, and are its addresses reachable (UCX_NET_DEVICES)?",
        )

    def _has_room(self, transfer: NixlTransfer) -> bool:
        return len(transfer.running) < MAX_SLICES_IN_FLIGHT

    def _post(self, transfer: NixlTransfer, descriptors: Descriptors) -> None:
        assert isinstance(transfer.peer, NixlPeer)
        local_column = 1 if transfer.direction is Direction.READ else 0
        try:
            handle = self._agent.createXferReq(
                self._operations[transfer.direction],
                self._descriptor_list(descriptors, local_column),
                self._descriptor_list(descriptors, 1 - local_column),
                transfer.peer.agent_name,
                "",
                [self._backend],
            )
        except Exception as error:
            transfer.end_failed(_translate(error, transfer))
            return
        transfer.running[handle] = int(descriptors[:, 2].sum())
        self._running_handles[handle] = transfer.peer.agent_name
        self._check(transfer, handle, self._agent.postXferReq)

    def _descriptor_list(self, descriptors: Descriptors, column: int) -> Any:
        rows = np.zeros((len(descriptors), 3), np.uint64)
        rows[:, 0], rows[:, 1] = descriptors[:, column], descriptors[:, 2]
        return self._nixl.nixlXferDList(self._nixl.DRAM_SEG, rows)

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
            transfer.end_failed(_translate(error, transfer))

    def _release(self, handle: int) -> None:
        try:
            self._agent.releaseXferReq(handle)
        except Exception:
            logger.warning("NIXL did not release an ended transfer", exc_info=True)

    def _end_within(self, seconds: float) -> bool:
        """Wait for running transfers; return whether all have ended."""
        deadline = time.monotonic() + seconds
        while self._running_handles and time.monotonic() < deadline:
            for handle in list(self._running_handles):
                try:
                    ended = self._agent.getXferStatus(handle) != self._nixl.NIXL_IN_PROG
                except Exception:
                    ended = True
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
            "pip install nixl==1.5.1 nixl-cu12==1.5.1",
        ) from error
    return _bindings


def _translate(error: Exception, transfer: NixlTransfer) -> TransportError:
    kind = type(error).__name__
    name = transfer.peer.name
    if kind in ("nixlRemoteDisconnectError", "nixlCancelledError"):
        return TransportError(
            Reason.PEER_DIED, f"the connection to {name} is lost.", "Reconnect when the peer is back."
        )
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
