"""The agents that a NIXL agent reads from: loaded once, counted by their peers, few kept that have none."""

import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.errors import Reason, TransportError
from kvferry.transport.end_points import NixlEndPoint, unpack_regions
from kvferry.transport.protocol import Peer

logger = logging.getLogger(__name__)

MAX_UNUSED = 16
"""Agents without a peer that are kept, in case one connects again: one that NIXL 1.5.1 loads again just after it was
made to forget it may not answer, as was seen between engines."""


@dataclass(slots=True, eq=False)
class NixlPeer(Peer):
    """A remote agent, of which NIXL may let go when the last peer is closed or collected."""

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


class RemoteAgents:
    """What ``agent`` knows of others. ``running`` maps the handles of posted transfers to the agent of each."""

    def __init__(self, nixl: Any, agent: Any, running: Mapping[int, str]) -> None:
        self._nixl = nixl
        self._agent = agent
        self._running = running
        self._metadata: dict[str, bytes] = {}
        self._num_peers: Counter[str] = Counter()
        self._left: deque[str] = deque()
        self._unused: dict[str, None] = {}

    def is_known(self, remote: NixlEndPoint) -> bool:
        """Return whether this very end point's metadata was loaded before."""
        return self._metadata.get(remote.agent_name) == remote.metadata

    def is_in_use(self, name: str) -> bool:
        """Return whether a transfer with this agent is posted: forgetting it would be a crash."""
        return name in self._running.values()

    def peer(self, remote: NixlEndPoint) -> NixlPeer:
        """Load an end point's metadata, unless it is known, and return one more peer of its agent."""
        name = remote.agent_name
        if not self.is_known(remote):
            self._replace(remote)
        self._num_peers[name] += 1
        self._unused.pop(name, None)
        return NixlPeer(name, unpack_regions(remote.regions), name, self._left)

    def load_anew(self, remote: NixlEndPoint) -> None:
        """Load once more what is known: NIXL forgets an agent whose connection it has lost."""
        self._forget(remote.agent_name)
        self._load(remote.agent_name, remote.metadata)

    def let_go(self) -> None:
        """Forget the agents that no peer has needed for longest and of which nothing runs, but for some."""
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
        """Forget all."""
        for name in list(self._metadata):
            self._forget(name)

    def _replace(self, remote: NixlEndPoint) -> None:
        """Load metadata in place of an older end point of the same agent, which is kept if the new one is no good."""
        name, former = remote.agent_name, self._metadata.get(remote.agent_name)
        if self.is_in_use(name):
            raise TransportError(
                Reason.PEER_UNREACHABLE,
                f"{name} sent a new end point while transfers over its old one are running.",
                "Connect again when they have ended.",
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
            raise _malformed(f"its metadata is of agent {loaded!r}, not {name!r}")
        self._metadata[name] = metadata

    def _forget(self, name: str) -> None:
        if self._metadata.pop(name, None) is None:
            return
        try:
            self._agent.invalidateRemoteMD(name)
        except Exception:  # it disconnected by itself
            logger.debug("NIXL had already dropped %s", name, exc_info=True)


def _malformed(found: str) -> TransportError:
    return TransportError(
        Reason.MALFORMED_MESSAGE, f"this is not a nixl end point: {found}.", "Both sides must run NIXL 1.5.1."
    )
