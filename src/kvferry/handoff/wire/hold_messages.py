"""Keeps the remote holds of a decode engine: sends releases and renewals, batched for each prefill engine."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

from kvferry.errors import KVFerryError, Reason
from kvferry.handoff.handshake import OURS
from kvferry.handoff.holds import RENEWED_LEASE_SECONDS, Lease
from kvferry.handoff.messages import (
    MAX_REQUESTS_PER_MESSAGE,
    PROTOCOL_VERSION,
    DirectoryRequest,
    Handle,
    HandshakeRefused,
    Refusal,
    Release,
    Renew,
    Renewed,
)
from kvferry.handoff.remote_holds import RemoteHold, RemoteHolds
from kvferry.handoff.wire.client import Client, Exchange, log_undelivered
from kvferry.handoff.wire.trust import THIS_MACHINE, Trust

SIBLING_LINGER_SECONDS = 0.5
RENEW_SHARE = 0.2
VERSIONS_SECONDS = 5.0
"""How long a prefill engine that speaks no common version is told so."""


class LeaseKeeper:
    """Renews and releases the remote holds of a decode engine's requests, for several threads of that engine.

    Releases are sent again until they are acknowledged or ``lease_seconds`` are over. An engine that has begun no step
    for ``lease_seconds`` renews none.
    """

    def __init__(self, lease_seconds: float, trust: Trust = THIS_MACHINE) -> None:
        self._lease_seconds = lease_seconds
        self._holds = RemoteHolds(SIBLING_LINGER_SECONDS, RENEW_SHARE, lease_seconds)
        self._client = Client(trust)
        self._lock = threading.Lock()
        self._renewing: dict[tuple[str, int, int, Handle], RemoteHold] = {}
        self._lost: list[str] = []

    def arrive(self, request_id: str, hold: RemoteHold, lease_seconds: float) -> None:
        """A request that may use this hold has arrived: renew the hold's lease from now on."""
        with self._lock:
            self._holds.arrive(request_id, hold, lease_seconds, time.monotonic())

    def step(self) -> None:
        """The engine begins a step, so its earlier steps have ended."""
        with self._lock:
            self._holds.step(time.monotonic())

    def finish(self, request_id: str) -> None:
        """The request is done with its hold: release the hold once no request uses it."""
        now = time.monotonic()
        with self._lock:
            self._holds.finish(request_id, now)
            self._release(now)

    def running_lease(self, request_id: str) -> Lease:
        """Return the lease under which a request may be loaded. Raises :class:`HandoffError` (lease-expired)."""
        with self._lock:
            return self._holds.running_lease(request_id, time.monotonic())

    def is_lost(self, request_id: str) -> bool:
        """Return whether the hold of a request has ended, as far as this engine knows."""
        with self._lock:
            return self._holds.lease_of(request_id) is None

    def is_renewed(self, request_id: str) -> bool:
        """Return whether the engine that holds the request's tokens has granted a renewal."""
        with self._lock:
            return self._holds.is_renewed(request_id)

    def say_versions(self, host: str, port: int, sender: str, *, is_trusted: bool) -> None:
        """Open a handshake with a prefill engine whose versions this engine does not speak.

        That engine refuses, so that its log too has the versions of both: parameters come through a router, and tell it
        nothing. ``is_trusted`` says that a trusted engine has named the host.
        """
        question = DirectoryRequest(OURS.oldest, OURS.newest, sender)
        self._client.tell(host, port, question, VERSIONS_SECONDS, is_trusted=is_trusted)

    def say_refused(self, hold: RemoteHold, sender: str, error: KVFerryError) -> None:
        """Tell a prefill engine why this engine does not load from it, for that engine's log."""
        told = HandshakeRefused.of(error, version=PROTOCOL_VERSION, epoch=hold.epoch, sender=sender)
        self._client.tell(hold.host, hold.port, told, VERSIONS_SECONDS, is_trusted=hold.is_trusted)

    @property
    def num_requests(self) -> int:
        """Requests that use a remote hold."""
        with self._lock:
            return self._holds.num_requests

    def keep(self) -> None:
        """Send the renewals and releases that are due, and record the answers."""
        now = time.monotonic()
        with self._lock:
            self._release(now)
            for exchange in self._client.collect():
                self._record_answer(exchange)
            self._renew(now)

    def take_lost(self) -> list[str]:
        """Return the requests whose holds were lost since the last call."""
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        """Stop sending; twice is fine."""
        self._client.close()

    def _release(self, now: float) -> None:
        for (host, port, epoch), is_trusted, handles in _batches(self._holds.take_releases(now)):
            self._client.tell(host, port, Release(epoch, handles), self._lease_seconds, is_trusted=is_trusted)

    def _renew(self, now: float) -> None:
        """Renew the leases that are due, but not one whose last renewal has no answer yet."""
        holds = [hold for hold in self._holds.take_renewals(now) if (*hold.engine, hold.handle) not in self._renewing]
        self._renewing |= {(*hold.engine, hold.handle): hold for hold in holds}
        for (host, port, epoch), is_trusted, handles in _batches(holds):
            # A lease counts from the sending: a later answer would grant a lease that is over.
            seconds = min(self._lease_seconds, RENEWED_LEASE_SECONDS)
            self._client.send(host, port, Renew(epoch, handles), seconds, is_trusted=is_trusted)

    def _record_answer(self, exchange: Exchange) -> None:
        question, answer = exchange.question, exchange.answer
        assert isinstance(question, Renew)
        engine = (exchange.host, exchange.port, question.epoch)
        holds = [hold for each in question.handles if (hold := self._renewing.pop((*engine, each), None)) is not None]
        if isinstance(answer, Renewed):
            lost, lease_seconds = set(answer.lost), answer.lease_seconds
        elif isinstance(answer, Refusal) and answer.reason == Reason.PEER_CHANGED:
            lost, lease_seconds = set(question.handles), 0.0
        else:
            log_undelivered(exchange)
            return
        self._holds.renewed([hold for hold in holds if hold.handle not in lost], exchange.sent_at, lease_seconds)
        self._lost += self._holds.lost(hold for hold in holds if hold.handle in lost)


def _batches(holds: Iterable[RemoteHold]) -> Iterator[tuple[tuple[str, int, int], bool, tuple[Handle, ...]]]:
    """Yield the engine, whether its host is trusted, and the handles of each message."""
    by_engine: dict[tuple[tuple[str, int, int], bool], list[Handle]] = defaultdict(list)
    for hold in holds:
        by_engine[hold.engine, hold.is_trusted].append(hold.handle)
    for (engine, is_trusted), handles in by_engine.items():
        for start in range(0, len(handles), MAX_REQUESTS_PER_MESSAGE):
            yield engine, is_trusted, tuple(handles[start : start + MAX_REQUESTS_PER_MESSAGE])
