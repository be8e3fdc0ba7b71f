"""One rank of this process, and what it can learn of the life of its peers' processes."""

from dataclasses import dataclass

from kvferry.errors import KVFerryError
from kvferry.execution.device import DeviceOrder
from kvferry.execution.executor import Executor
from kvferry.handoff.messages import Bounded, EndPoint, Identity
from kvferry.handoff.wire.client import BackgroundCall, BackgroundCalls, Client
from kvferry.handoff.wire.trust import THIS_MACHINE, Trust, nothing_listens
from kvferry.layout.shard import HOST_DEVICE
from kvferry.transport.protocol import Process, ProcessIdentity, hold_process, is_on_this_host, is_visible
from kvferry.transport.registry import TransportSet

PROBE_SECONDS = 0.2
PROBE_AGAIN_SECONDS = 0.5
"""How long the result of a probe counts, for all transfers with one peer."""
MAX_PROCESSES = 256
"""Processes of this host that a rank holds, each by an open file."""


@dataclass(frozen=True)
class OwnRank:
    """How peers know the rank, and what moves its bytes.

    ``name`` is unique among all ranks, ``shard`` is encoded, ``end_points`` are those of the rank's memory in
    ``transports``.
    """

    name: str
    shard: bytes
    identity: Identity
    end_points: dict[str, bytes]
    transports: TransportSet
    executor: Executor
    order: DeviceOrder
    client: Client
    """Only a destination collects its answers."""


class Peers:
    """The peers of one rank. One thread may use it.

    A peer that refuses connections has probably ended, and a transfer with it may be given up. That is no proof: a
    firewall refuses too. Only the kernel of this host proves that a process has ended.
    """

    def __init__(self, trust: Trust = THIS_MACHINE) -> None:
        """A peer is probed only at an address to which ``trust`` lets this engine connect."""
        self._trust = trust
        self._probes: BackgroundCalls[EndPoint, bool] = BackgroundCalls("probe")
        self._processes: Bounded[ProcessIdentity, Process | None] = Bounded(MAX_PROCESSES)

    def refuses(self, where: EndPoint) -> bool:
        """Return whether the peer's host refused a connection lately.

        Another thread probes the host. This is the last result; where it is old, the next probe has been started.
        """
        probe = self._probe(where)
        if probe is None:
            return False
        if probe.is_older_than(PROBE_AGAIN_SECONDS):
            self._probes.forget(where)
            self._probe(where)
        try:
            return probe.result()
        except KVFerryError:
            # A probe that failed says nothing.
            return False

    def meet(self, identity: ProcessIdentity | None) -> bool:
        """Hold a peer's process before it is told anything; return False where it has ended already.

        Only a process that was held can be proven to have ended: later another may have its pid.
        """
        if identity is None:
            return True
        if identity not in self._processes:
            try:
                self._processes[identity] = hold_process(identity)
            except ProcessLookupError:
                return False
        return not self.has_ended(identity)

    def has_ended(self, identity: ProcessIdentity | None) -> bool:
        """Return whether the process is known to have ended, with every system call that it made."""
        process = None if identity is None else self._processes.get(identity)
        return process is not None and process.has_ended

    def watches(self, identity: ProcessIdentity | None) -> bool:
        """Return whether the end of the process will be known: it was held, in this pid namespace."""
        return identity is not None and self._processes.get(identity) is not None

    def is_elsewhere(self, identity: ProcessIdentity | None, device: str = HOST_DEVICE) -> bool:
        """Return whether the process is on another host, or, for host memory, in a container of its own: it cannot
        write to the memory of this ``device`` itself. A GPU's memory may be mapped by every process of the host.
        """
        may_write = is_visible if device == HOST_DEVICE else is_on_this_host
        return identity is not None and not may_write(identity)

    def _probe(self, where: EndPoint) -> BackgroundCall[bool] | None:
        def host_refuses() -> bool:
            addresses = self._trust.addresses_named_by_peers(where.host, where.port)
            return nothing_listens(addresses, where.port, PROBE_SECONDS)

        return self._probes.get(where, host_refuses)
