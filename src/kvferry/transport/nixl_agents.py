"""The remote agents that a NIXL agent has loaded, each with the number of its open peers."""

import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from kvferry.errors import Reason, TransportError
from kvferry.transport.end_points import NONCE_BYTES, Address, RegionList, unpack_regions
from kvferry.transport.protocol import Peer

logger = logging.getLogger(__name__)

MAX_UNUSED = 16
"""Agents without an open peer that stay loaded for a later connection: an agent that NIXL 1.5.1 forgets and loads
again at once may not answer, as seen between engines."""


class NixlEndPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A NIXL agent's metadata, its registered memory, and a nonce in it."""

    transport: Literal["nixl"]
    version: Literal[1]
    agent_name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    metadata: Annotated[bytes, msgspec.Meta(min_length=1, max_length=2 << 20)]
    regions: RegionList
    nonce_address: Address
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


@dataclass(slots=True, eq=False)
class NixlPeer(Peer):
    """A remote agent. NIXL may forget the agent when its last peer is closed or collected."""

    agent_name: str
    left: deque[str]
    """Names of agents whose peers were closed, for the transport's thread."""
    is_closed: bool = False

    def close(self) -> None:
        """Release the agent; from any thread."""
        if not self.is_closed:
            self.is_closed = True
            self.left.append(self.agent_name)

    __del__ = close


class RemoteAgents:
    """The remote agents of ``agent``. ``running`` maps the handles of posted transfers to their agents' names."""

    def __init__(self, nixl: Any, agent: Any, running: Mapping[int, str]) -> None:
        self._nixl = nixl
        self._agent = agent
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
        return NixlPeer(name, unpack_regions(remote.regions), name, self._left)

    def load_anew(self, remote: NixlEndPoint) -> None:
        """Forget and load an agent again: NIXL drops an agent whose connection it has lost."""
        self._forget(remote.agent_name)
        self._load(remote.agent_name, remote.metadata)

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
            self._load(name, remote.metadata)
        except TransportError:
            if former is not None:
                self._load(name, former)
            raise

    def _load(self, name: str, metadata: bytes) -> None:
        try:
            loaded = self._agent.loadRemoteMD(metadata).decode()
        except self._nixl.nixlBackendError as error:
            message = f"NIXL cannot open a connection to {name}: {error!r}."
            raise TransportError(Reason.PEER_UNREACHABLE, message, "Is it still running?") from error
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


def _malformed(found: str) -> TransportError:
    return TransportError(
        Reason.MALFORMED_MESSAGE, f"this is not a nixl end point: {found}.", "Run NIXL 1.5.1 in both engines."
    )
