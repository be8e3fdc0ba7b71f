"""Transports by name, and the choice among those that two engines have in common."""

import importlib
import importlib.util
import logging
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvferry.errors import KVFerryError, Reason, SettingsError, TransportError, did_you_mean
from kvferry.layout.shard import Region
from kvferry.peer_log import PeerLog
from kvferry.transport.network import Network, ucx_devices
from kvferry.transport.protocol import Peer, Status, Transfer, Transport, install_nixl

logger = PeerLog(logging.getLogger(__name__))

FACTORIES: dict[str, str] = {
    "cma": "kvferry.transport.cma:CmaTransport",
    "nixl": "kvferry.transport.nixl:NixlTransport",
    "mooncake": "kvferry.transport.mooncake:MooncakeTransport",
}
"""Module and class by name. A module is imported when its transport is opened."""

AUTO = ("cma", "nixl")
"""The transports that ``auto`` opens, in order of preference."""
THIS_HOST_ONLY = Network()
"""Other hosts cannot connect to the transports."""


@dataclass(frozen=True, slots=True)
class Link:
    """A reachable peer and the transport that reaches it: a :class:`Connecting` that has ended."""

    name: str
    transport: Transport
    peer: Peer

    def poll(self) -> "Link":
        """Return this link."""
        return self

    def close(self) -> None:
        """Close the connection."""
        self.peer.close()


class Connecting:
    """A connection in progress: ``poll`` tries the common transports in order of preference until one works."""

    def __init__(self, transports: Mapping[str, Transport], end_points: Mapping[str, bytes]) -> None:
        self._transports, self._end_points = transports, end_points
        self._untried = deque(in_common(transports, end_points))
        self._transfer: Transfer | None = None
        self._reached: Link | None = None
        self._refusals: list[TransportError] = []

    @property
    def name(self) -> str:
        """The transport of the link, which every later call of ``poll`` returns; empty while connecting."""
        return "" if self._reached is None else self._reached.name

    def poll(self) -> Link | None:
        """Return the link, or None while connecting. Later calls return the same link.

        Raises ``TransportError``: at once for a malformed end point, else with the errors of all transports once every
        transport has failed.
        """
        while self._untried and self._reached is None:
            name = self._untried[0]
            try:
                peer = self._peer(name)
            except TransportError as error:
                if error.reason is Reason.MALFORMED_MESSAGE:
                    raise
                refusal = error.without_traceback()
                logger.info("%s does not reach the peer: %s", name, refusal, peer=name)
                self._refusals.append(refusal)
                self._untried.popleft()
                self._transfer = None
                continue
            if peer is None:
                return None
            self._reached = self._link(name, peer)
        if self._reached is None:
            raise self._unreachable()
        return self._reached

    def close(self) -> None:
        """Give up, or close the connection; twice is fine."""
        if self._reached is not None:
            self._reached.close()
        elif self._transfer is not None:
            self._transports[self._untried[0]].cancel(self._transfer)

    def _peer(self, name: str) -> Peer | None:
        """Advance the connection of this transport; return the peer, or None while connecting."""
        transport = self._transports[name]
        if self._transfer is None:
            self._transfer = transport.connect(self._end_points[name])
        if transport.poll(self._transfer) is Status.PENDING:
            return None
        if self._transfer.error is not None:
            raise self._transfer.error
        return self._transfer.peer

    def _link(self, name: str, peer: Peer) -> Link:
        failed = "; ".join(f"a preferred transport failed: {error.message}" for error in self._refusals)
        logger.info(
            "using the %s transport for %s: %s", name, peer.name, failed or "the preferred transport", peer=peer.name
        )
        return Link(name, self._transports[name], peer)

    def _unreachable(self) -> TransportError:
        refusals = self._refusals
        if not refusals:
            return nothing_in_common("this engine", self._transports, "the peer", self._end_points)
        if len(refusals) == 1:
            return refusals[0].without_traceback()
        message = " ".join(error.message for error in refusals)
        return TransportError(refusals[-1].reason, message, " ".join(error.remedy for error in refusals))


def in_common(ours: Iterable[str], theirs: Container[str]) -> list[str]:
    """Return the transports that both engines have, in the order in which the writing one, ours, tries them."""
    return [name for name in ours if name in theirs]


def nothing_in_common(writes: str, ours: Iterable[str], other: str, theirs: Iterable[str]) -> TransportError:
    """Return the error of two engines without a common transport."""
    return TransportError(
        Reason.TRANSPORT_UNAVAILABLE,
        f"no transport in common: {writes} has {', '.join(ours)}, {other} has "
        f"{', '.join(sorted(theirs)[:8]) or 'none'}.",
        "Set the same transport, or auto, in both engines.",
    )


class TransportSet:
    """The open transports of one rank. Registers memory with all, connects with the first that works."""

    def __init__(
        self, transports: Mapping[str, Transport], open_anew: Callable[[str], Transport] | None = None
    ) -> None:
        """``open_anew`` opens a transport of this set again, by its name and as it was opened before."""
        self.transports = dict(transports)
        self.num_fences = 0
        """How often :meth:`renew` has opened transports anew: a new connection goes over them."""
        self._former: dict[str, Transport] = {}
        self._holes: list[str] = []
        self._open_anew = open_anew or open_transport
        self._registered: list[Sequence[Region]] = []
        self._end_points: dict[str, bytes] = {}

    def register(self, regions: Sequence[Region]) -> dict[str, bytes]:
        """Register memory with every transport and return end points by transport name.

        Of several transports, those that do not move memory of these devices are closed and left out: a peer would
        connect by one that reaches a part of the cache only.
        """
        self._leave_out_unable({region.device for region in regions})
        self._registered.append(regions)
        self._end_points = {name: transport.register(regions) for name, transport in self.transports.items()}
        return dict(self._end_points)

    def _leave_out_unable(self, devices: Set[str]) -> None:
        able = [name for name, each in self.transports.items() if all(map(each.capabilities.moves, devices))]
        if not able:
            return  # each refuses the memory, with its reason
        for name in self.transports.keys() - able:
            logger.info("the %s transport is left out: it does not move memory of %s", name, ", ".join(sorted(devices)))
            self.transports.pop(name).close()
            self._end_points.pop(name, None)

    def connect(self, end_points: Mapping[str, bytes]) -> Connecting:
        """Begin to connect to a peer."""
        return Connecting(self.transports, end_points)

    def ends_with_process(self, name: str) -> bool:
        """Return whether the writes of a peer over this transport, an empty name for any, end with its process."""
        known = {**self.transports, **self._former}
        names = [name] if name else list(known)
        return bool(names) and all(each in known and known[each].capabilities.ends_with_process for each in names)

    def renew(self) -> dict[str, bytes]:
        """Open the transports anew, with the same memory, for all connections from now on; return the end points.

        Connections over the former transports go on until :meth:`close_former`, which must come before the next
        renewal. Transports whose writes end with their process stay as they are: such a peer on another host cannot
        write. Where there is no room for a second transport beside the first, the first closes at once. It may take
        some seconds. The thread of the transports calls it.
        """
        assert not self._former, "the former transports are closed before the next renewal"
        opened = dict(self.transports)
        for name, former in self.transports.items():
            if former.capabilities.ends_with_process:
                continue
            self._former[name] = former
            del opened[name], self._end_points[name]
            transport = self._opened_anew(name)
            if transport is None:
                logger.warning("kvferry: the %s transport closes at once, in case there is no room for a second", name)
                self._close_one(name)
                transport = self._opened_anew(name)
            if transport is not None:
                opened[name] = transport
        # Other threads connect meanwhile: over the former transports, or over all that are open.
        self.transports = opened
        self.num_fences += 1
        return dict(self._end_points)

    def close_former(self) -> tuple[str, ...]:
        """Close the transports of before the last renewal; return why bytes sent over them may still land, if any may.

        Otherwise nothing lands any more that a peer on another host, or a process that has ended, was told of the
        former end points. Transfers under way over them fail, in either direction. The thread of the transports calls
        it.
        """
        for name in list(self._former):
            self._close_one(name)
        holes, self._holes = tuple(self._holes), []
        return holes

    def _close_one(self, name: str) -> None:
        former = self._former.pop(name)
        if not (_is_closed(name, former) and former.capabilities.close_ends_writes):
            self._holes.append(f"the {name} transport could not be closed")

    def _opened_anew(self, name: str) -> Transport | None:
        """Return the transport, with the same memory; None where that fails, and the log says why."""
        transport: Transport | None = None
        try:
            transport = self._open_anew(name)
            for regions in self._registered:
                self._end_points[name] = transport.register(regions)
        except KVFerryError as error:
            logger.error("kvferry: the %s transport cannot be opened anew: %s", name, error)
        except Exception:
            logger.exception("kvferry: the %s transport cannot be opened anew", name)
        else:
            return transport
        self._end_points.pop(name, None)
        if transport is not None:
            _is_closed(name, transport)
        return None

    def close(self) -> None:
        """Close every transport; twice is fine."""
        for transport in (*self._former.values(), *self.transports.values()):
            transport.close()


def _is_closed(name: str, transport: Transport) -> bool:
    """Close a transport, whose library may fail with any error; return whether it is closed."""
    try:
        return transport.close()
    except Exception:
        logger.exception("kvferry: the %s transport cannot be closed", name)
        return False


def make(factory: str, **options: Any) -> Transport:
    """Import ``module:class`` and open the transport."""
    module, attribute = factory.split(":")
    transport: Transport = getattr(importlib.import_module(module), attribute)(**options)
    return transport


def open_transport(name: str, *, network: Network = THIS_HOST_ONLY) -> Transport:
    """Open one transport by name.

    Raises ``SettingsError`` for an unknown name, ``TransportError`` for a transport that cannot work on this machine.

    >>> open_transport("cam")
    Traceback (most recent call last):
    kvferry.errors.SettingsError: there is no transport 'cam'. Did you mean 'cma'? [unknown-setting]
    """
    check_setting(name)
    options: dict[str, Any] = {}
    if name == "nixl":
        options["devices"] = ucx_devices(network.listens_at)
    elif name == "mooncake":
        options["addresses_of"] = network.addresses_of
    return make(FACTORIES[name], **options)


def open_transports(setting: str = "auto", *, network: Network = THIS_HOST_ONLY) -> TransportSet:
    """Open one transport, or with ``auto`` all that work here, as :func:`open_transport` does.

    Raises ``TransportError`` where none works.
    """
    opens = partial(open_transport, network=network)
    if setting != "auto":
        return TransportSet({setting: opens(setting)}, opens)
    opened: dict[str, Transport] = {}
    refusals: list[TransportError] = []
    for name in AUTO:
        try:
            opened[name] = opens(name)
        except TransportError as error:
            logger.info("the %s transport is not available: %s", name, error)
            refusals.append(error)
    if not opened:
        message = " ".join(error.message for error in refusals)
        remedy = " ".join(error.remedy for error in refusals)
        raise TransportError(Reason.TRANSPORT_UNAVAILABLE, message, remedy)
    return TransportSet(opened, opens)


def check_installed(name: str) -> None:
    """Raise ``TransportError`` (``missing-dependency``) where the package of a transport, or a pool, is not installed.

    Nothing is imported: the libraries start threads.
    """
    if name not in ("nixl", "mooncake") or importlib.util.find_spec(name) is not None:
        return
    from kvferry.transport.mooncake import install_mooncake

    problem = f"the package {name} is needed and is not installed."
    raise TransportError(Reason.MISSING_DEPENDENCY, problem, install_nixl() if name == "nixl" else install_mooncake())


def check_setting(setting: str) -> None:
    """Raise ``SettingsError`` (``unknown-setting``) with the nearest name, unless the name is one transport's."""
    if setting in FACTORIES:
        return
    known = ["auto", *FACTORIES]
    raise SettingsError(Reason.UNKNOWN_SETTING, f"there is no transport {setting!r}.", did_you_mean(setting, known))
