"""NIXL (UCX back end): host memory over shared memory, TCP or RDMA, between any two hosts.

NIXL cannot revoke a posted transfer, and posting on a warm shared-memory end point blocks for the copy. So a
submission is posted in slices, each small enough for a responsive driver, and a cancelled or failed transfer stays
``PENDING`` until every posted slice has ended.
"""

import itertools
import logging
import os
import time
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from kvferry.errors import Reason, TransportError
from kvferry.layout.shard import Region
from kvferry.transport.end_points import (
    NONCE_BYTES,
    NixlEndPoint,
    decode_end_point,
    pack_regions,
    unpack_regions,
)
from kvferry.transport.protocol import Capabilities, Descriptors, Direction, Peer, Transfer
from kvferry.transport.regions import RegionTable, check_regions
from kvferry.transport.sliced import SlicedTransfer, SlicedTransport
from kvferry.transport.submission import check_submission

logger = logging.getLogger(__name__)

PROGRESS_DELAY_MICROSECONDS = 1000  # with 0, the Python wrapper's value, NIXL's progress thread burns a core
MAX_DESCRIPTORS_PER_SLICE = 512
MAX_BYTES_PER_SLICE = 8 << 20
MAX_SLICES_IN_FLIGHT = 8
CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 2.0
_PROBE_SLOTS = 255

_unquiet: list[object] = []  # agents that were closed with a transfer on the wire: destroying one could crash


@dataclass(slots=True, eq=False)
class NixlPeer(Peer):
    """A remote agent, of which NIXL is told to let go when the last peer is closed or collected."""

    agent_name: str
    left: deque[str]
    """Where the transport learns, on its own thread, of peers that are gone."""
    is_closed: bool = False

    def close(self) -> None:
        """Forget the agent; from any thread."""
        if not self.is_closed:
            self.is_closed = True
            self.left.append(self.agent_name)

    __del__ = close


@dataclass(slots=True, eq=False)
class NixlTransfer(SlicedTransfer):
    """A transfer whose running slices are NIXL handles, with the bytes of each."""

    running: dict[int, int] = field(default_factory=dict)


class NixlTransport(SlicedTransport[NixlTransfer]):
    """One NIXL agent with the UCX back end."""

    capabilities = Capabilities(name="nixl", needs_target_progress=True, cancel_is_immediate=False)
    _transfer_type = NixlTransfer

    def __init__(self) -> None:
        self._nixl = _import_bindings()
        self._name = f"kvferry-{os.getpid()}-{uuid.uuid4().hex}"
        self._agent, self._backend = self._create_agent()
        self._operations = {Direction.READ: self._nixl.NIXL_READ, Direction.WRITE: self._nixl.NIXL_WRITE}
        self._regions: list[Region] = []
        self._local = RegionTable([])
        self._metadata_of_peer: dict[str, bytes] = {}
        self._num_peers: Counter[str] = Counter()
        self._left: deque[str] = deque()
        self._unused: set[str] = set()
        self._running_handles: dict[int, str] = {}
        self._registrations: list[Any] = []
        self._probe_slots = itertools.cycle(range(1, _PROBE_SLOTS + 1))
        self._probe_memory = np.frombuffer(bytearray(os.urandom(NONCE_BYTES * (_PROBE_SLOTS + 1))), np.uint8).copy()
        self._probe_address = int(self._probe_memory.ctypes.data)
        self._register_memory([Region(self._probe_address, self._probe_memory.nbytes)])
        self._is_closed = False

    def register(self, regions: Sequence[Region]) -> bytes:
        """Register memory with NIXL and return the agent's metadata with it."""
        self._check_open()
        check_regions(regions, "nixl")
        self._register_memory(RegionTable(regions).regions)
        self._regions.extend(regions)
        self._local = RegionTable(self._regions)
        end_point = NixlEndPoint(
            transport="nixl",
            version=1,
            agent_name=self._name,
            metadata=self._agent.getLocalMD(),
            regions=pack_regions(self._local),
            nonce_address=self._probe_address,
            nonce=self._probe_memory[:NONCE_BYTES].tobytes(),
        )
        return msgspec.msgpack.encode(end_point)

    def connect(self, end_point: bytes) -> Peer:
        """Load the peer's metadata and read its nonce, for at most ``CONNECT_SECONDS``."""
        self._check_open()
        remote = decode_end_point(end_point, NixlEndPoint, "nixl")
        if remote.agent_name == self._name:
            raise TransportError(
                Reason.UNSUPPORTED, "a NIXL agent cannot connect to itself.", "Open a second transport."
            )
        name = remote.agent_name
        self._let_go()
        was_known = self._metadata_of_peer.get(name) == remote.metadata
        self._load_peer(remote)
        peer = NixlPeer(name, unpack_regions(remote.regions), name, self._left)
        self._num_peers[name] += 1
        self._unused.discard(name)
        try:
            self._probe(peer, remote)
        except TransportError:
            if not was_known or name in self._running_handles.values():
                peer.close()
                raise
            # NIXL drops an agent whose connection it has lost, and says so to none who loads it again.
            self._forget_peer(name)
            self._load_peer(remote)
            self._probe(peer, remote)
        return peer

    def submit(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        """Check both sides and queue; slices are posted in ``poll``."""
        self._check_open()
        assert isinstance(peer, NixlPeer)
        check_submission(descriptors, direction, self._local, peer.regions, self.capabilities)
        return self._queue(peer, direction, descriptors)

    def close(self) -> None:
        """Wait up to ``CLOSE_SECONDS`` for the wire to be quiet and destroy the agent."""
        if self._closed:
            return
        self._is_closed = True
        if not self._is_quiet_within(CLOSE_SECONDS):
            logger.warning("closed with %d NIXL transfers on the wire; the agent stays", len(self._running_handles))
            _unquiet.append((self._agent, self._probe_memory))
            return
        for name in list(self._metadata_of_peer):
            self._forget_peer(name)
        for registration in self._registrations:
            self._agent.deregisterMem(registration, [self._backend])
        self._registrations.clear()
        del self._agent

    def _create_agent(self) -> tuple[Any, int]:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True  # a target that nobody polls must still answer
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
                "Is all of it mapped, and registered only once?",
            ) from error
        self._registrations.append(registration)

    def _load_peer(self, remote: NixlEndPoint) -> None:
        """Load metadata in place of an older end point of the same agent, which is kept if the new one is no good."""
        name, known = remote.agent_name, self._metadata_of_peer.get(remote.agent_name)
        if known == remote.metadata:
            return
        if name in self._running_handles.values():
            raise TransportError(
                Reason.PEER_UNREACHABLE,
                f"{name} sent a new end point while transfers over its old one are running.",
                "Connect again when they have ended.",
            )
        self._forget_peer(name)
        try:
            self._load_metadata(name, remote.metadata)
        except TransportError:
            if known is not None:
                self._load_metadata(name, known)
            raise

    def _load_metadata(self, name: str, metadata: bytes) -> None:
        try:
            loaded = self._agent.loadRemoteMD(metadata).decode()
        except self._nixl.nixlBackendError as error:
            message = f"NIXL cannot open a connection to {name}: {error!r}."
            raise TransportError(Reason.PEER_UNREACHABLE, message, "Is it still running?") from error
        except Exception as error:
            raise _malformed(f"NIXL cannot load its metadata: {error!r}") from error
        if loaded != name:
            if loaded not in self._metadata_of_peer:
                self._agent.invalidateRemoteMD(loaded)
            raise _malformed(f"its metadata is of agent {loaded!r}, not {name!r}")
        self._metadata_of_peer[name] = metadata

    def _forget_peer(self, name: str) -> None:
        if self._metadata_of_peer.pop(name, None) is None:
            return
        try:
            self._agent.invalidateRemoteMD(name)
        except Exception:  # it disconnected by itself
            logger.debug("NIXL had already dropped %s", name, exc_info=True)

    def _let_go(self) -> None:
        """Forget the agents that no peer needs any more and of which nothing runs."""
        while self._left:
            name = self._left.popleft()
            self._num_peers[name] -= 1
            if not self._num_peers[name]:
                del self._num_peers[name]
                self._unused.add(name)
        for name in self._unused.difference(self._running_handles.values()):
            self._unused.remove(name)
            self._forget_peer(name)

    def _probe(self, peer: NixlPeer, remote: NixlEndPoint) -> None:
        slot = next(self._probe_slots) * NONCE_BYTES
        row = np.array([[remote.nonce_address, self._probe_address + slot, NONCE_BYTES]], np.uint64)
        if not self._ends_within(self._queue(peer, Direction.READ, row), CONNECT_SECONDS):
            raise TransportError(
                Reason.PEER_UNREACHABLE,
                f"{peer.name} did not answer within {CONNECT_SECONDS} s.",
                "Is it running, and are its addresses reachable (UCX_NET_DEVICES)?",
            )
        if self._probe_memory[slot : slot + NONCE_BYTES].tobytes() != remote.nonce:
            raise TransportError(
                Reason.PEER_CHANGED, f"{peer.name} holds another nonce.", "Ask the peer for a new end point."
            )

    def _queue(self, peer: NixlPeer, direction: Direction, descriptors: Descriptors) -> NixlTransfer:
        return NixlTransfer.cut(peer, direction, descriptors, MAX_DESCRIPTORS_PER_SLICE, MAX_BYTES_PER_SLICE)

    @property
    def _closed(self) -> bool:
        return self._is_closed

    def _has_room(self, transfer: NixlTransfer) -> bool:
        return len(transfer.running) < MAX_SLICES_IN_FLIGHT

    def _post(self, transfer: NixlTransfer, pieces: Descriptors) -> None:
        assert isinstance(transfer.peer, NixlPeer)
        local_column = 1 if transfer.direction is Direction.READ else 0
        try:
            handle = self._agent.createXferReq(
                self._operations[transfer.direction],
                self._descriptor_list(pieces, local_column),
                self._descriptor_list(pieces, 1 - local_column),
                transfer.peer.agent_name,
                "",
                [self._backend],
            )
        except Exception as error:
            transfer.end_failed(_translate(error, transfer))
            return
        transfer.running[handle] = int(pieces[:, 2].sum())
        self._running_handles[handle] = transfer.peer.agent_name
        self._check(transfer, handle, self._agent.postXferReq)

    def _descriptor_list(self, pieces: Descriptors, column: int) -> Any:
        rows = np.zeros((len(pieces), 3), np.uint64)
        rows[:, 0], rows[:, 1] = pieces[:, column], pieces[:, 2]
        return self._nixl.nixlXferDList(self._nixl.DRAM_SEG, rows)

    def _reap(self, transfer: NixlTransfer) -> None:
        if self._left or self._unused:
            self._let_go()
        for handle in list(transfer.running):
            self._check(transfer, handle, self._agent.getXferStatus)

    def _check(self, transfer: NixlTransfer, handle: int, ask: Any) -> None:
        """Ask NIXL about a handle and take it back if it has ended."""
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

    def _is_quiet_within(self, seconds: float) -> bool:
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
            f"NIXL knows no such memory, or {name} no longer: {error}.",
            "A piece must not cross from one register call's memory into another's; a closed peer cannot be used.",
        )
    return TransportError(Reason.TRANSFER_FAILED, f"NIXL failed on a transfer with {name}: {error!r}.")


def _malformed(found: str) -> TransportError:
    return TransportError(
        Reason.MALFORMED_MESSAGE, f"this is not a nixl end point: {found}.", "Both sides must run NIXL 1.5.1."
    )
