"""Messages of a decode engine about remote holds: releases and renewals, batched for each prefill engine."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec

from kvferry.errors import Reason
from kvferry.handoff.holds import Lease
from kvferry.handoff.messages import MAX_REQUESTS_PER_MESSAGE, Handle, Refusal, Release, Renew, Renewed
from kvferry.handoff.remote_holds import RemoteHold, RemoteHolds
from kvferry.handoff.wire.client import Client, Exchange, log_undelivered

SIBLING_LINGER_SECONDS = 0.5
RENEW_SHARE = 0.25


class RenewalOutcome(msgspec.Struct, frozen=True):
    """A prefill engine's answer to a renewal: the holds that it keeps, under which lease, and the lost ones."""

    held: tuple[RemoteHold, ...]
    lost: tuple[RemoteHold, ...]
    sent_at: float
    lease_seconds: float


class HoldMessages:
    """Sends releases and renewals; collects the answers to renewals."""

    def __init__(self) -> None:
        self._client = Client()
        self._holds_of: dict[tuple[str, int, int, Handle], RemoteHold] = {}

    def release(self, holds: Iterable[RemoteHold], timeout_seconds: float) -> None:
        """Release holds that no request of this engine uses any more; sent again until acknowledged."""
        for (host, port, epoch), handles in _batches(holds):
            self._client.tell(host, port, Release(epoch, handles), timeout_seconds)

    def renew(self, holds: Iterable[RemoteHold], timeout_seconds: float) -> None:
        """Renew the leases of these holds, but not of one whose last renewal has no answer yet."""
        holds = [hold for hold in holds if (*hold.engine, hold.handle) not in self._holds_of]
        for hold in holds:
            self._holds_of[(*hold.engine, hold.handle)] = hold
        for (host, port, epoch), handles in _batches(holds):
            self._client.send(host, port, Renew(epoch, handles), timeout_seconds)

    def collect(self) -> list[RenewalOutcome]:
        """Return the renewals that were answered since the last call."""
        ended = self._client.collect()
        return [outcome for exchange in ended if (outcome := self._renewal_outcome(exchange)) is not None]

    def close(self) -> None:
        """Stop the client; twice is fine."""
        self._client.close()

    def _renewal_outcome(self, exchange: Exchange) -> RenewalOutcome | None:
        question = exchange.question
        assert isinstance(question, Renew)
        engine = (exchange.host, exchange.port, question.epoch)
        holds = {handle: self._holds_of.pop((*engine, handle), None) for handle in question.handles}
        if isinstance(exchange.answer, Renewed):
            lost = set(exchange.answer.lost)
            lease_seconds = exchange.answer.lease_seconds
        elif isinstance(exchange.answer, Refusal) and exchange.answer.reason == Reason.PEER_CHANGED:
            lost, lease_seconds = set(question.handles), 0.0
        else:
            log_undelivered(exchange)
            return None
        known = {handle: hold for handle, hold in holds.items() if hold is not None}
        return RenewalOutcome(
            held=tuple(hold for handle, hold in known.items() if handle not in lost),
            lost=tuple(hold for handle, hold in known.items() if handle in lost),
            sent_at=exchange.sent_at,
            lease_seconds=lease_seconds,
        )


class LeaseKeeper:
    """Renews and releases the remote holds of a decode engine's requests, for several threads of that engine.

    Messages are sent again until they are acknowledged or ``lease_seconds`` are over.
    """

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._holds = RemoteHolds(SIBLING_LINGER_SECONDS, RENEW_SHARE)
        self._messages = HoldMessages()
        self._lock = threading.Lock()
        self._lost: list[str] = []

    def arrive(self, request_id: str, hold: RemoteHold, lease_seconds: float) -> None:
        """A request that may use this hold has arrived: renew the hold's lease from now on."""
        with self._lock:
            self._holds.arrive(request_id, hold, lease_seconds, time.monotonic())

    def finish(self, request_id: str) -> None:
        """The request is done with its hold: release the hold once no request uses it."""
        now = time.monotonic()
        with self._lock:
            self._holds.finish(request_id, now)
            self._messages.release(self._holds.take_releases(now), self._lease_seconds)

    def running_lease(self, request_id: str) -> Lease:
        """Return the lease under which a request may be loaded. Raises :class:`HandoffError` (lease-lost)."""
        with self._lock:
            return self._holds.running_lease(request_id, time.monotonic())

    def keep(self) -> None:
        """Send the renewals and releases that are due, and record the answers."""
        now = time.monotonic()
        with self._lock:
            self._messages.release(self._holds.take_releases(now), self._lease_seconds)
            for outcome in self._messages.collect():
                self._holds.renewed(outcome.held, outcome.sent_at, outcome.lease_seconds)
                self._lost += self._holds.lost(outcome.lost)
            self._messages.renew(self._holds.take_renewals(now), self._lease_seconds)

    def take_lost(self) -> list[str]:
        """Return the requests whose holds were lost since the last call."""
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        """Stop sending; twice is fine."""
        self._messages.close()


def _batches(holds: Iterable[RemoteHold]) -> Iterator[tuple[tuple[str, int, int], tuple[Handle, ...]]]:
    by_engine: dict[tuple[str, int, int], list[Handle]] = defaultdict(list)
    for hold in holds:
        by_engine[hold.engine].append(hold.handle)
    for engine, handles in by_engine.items():
        for start in range(0, len(handles), MAX_REQUESTS_PER_MESSAGE):
            yield engine, tuple(handles[start : start + MAX_REQUESTS_PER_MESSAGE])
