"""Remote holds: which local requests use which holds of prefill engines, and when to renew and release the holds.

A remote hold is renewed while a local request uses it and released once no request does, whatever the outcome. Parallel
samples (``n`` > 1) of one request name the same hold and arrive one after the other: a hold used by a sample lingers
for :data:`SIBLING_LINGER_SECONDS`, so that the other samples find it. Holds are renewed only while the engine completes
steps: an engine that is paused or hangs would otherwise keep the blocks of prefill engines for ever.

:class:`RemoteHolds` decides. It is pure: events and the time are inputs, messages to send are outputs.
:class:`LeaseKeeper` sends these messages and hands the answers back, under a lock.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec

from kvferry.errors import KVFerryError, Reason
from kvferry.handoff.handshake import OURS
from kvferry.handoff.holds import RENEWED_LEASE_SECONDS, Lease, lease_lost, sampling_family
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
from kvferry.handoff.wire.client import Client, Exchange, log_undelivered
from kvferry.handoff.wire.trust import THIS_MACHINE, Trust

MIN_RENEW_SECONDS = 0.1
SIBLING_LINGER_SECONDS = 0.5
RENEW_SHARE = 0.2
VERSIONS_SECONDS = 5.0
"""How long a prefill engine that speaks no common version is told so."""


class RemoteHold(msgspec.Struct, frozen=True, order=True):
    """A hold as a decode engine knows it: the prefill engine, its host, port and epoch, and the hold's handle.

    ``is_trusted`` says that a trusted key has signed where the engine is.
    """

    engine_id: str
    epoch: int
    host: str
    port: int
    handle: Handle
    is_trusted: bool = False

    @property
    def engine(self) -> tuple[str, int, int]:
        """Host, port and epoch of the prefill engine: messages to one engine travel together."""
        return self.host, self.port, self.epoch


class _Use(msgspec.Struct):
    """One remote hold: its lease and the requests that use it."""

    lease: Lease
    requests: set[str]
    linger_until: float = 0.0
    is_lost: bool = False
    is_renewed: bool = False


class RemoteHolds:
    """All remote holds that one decode engine uses.

    A hold is renewed after :data:`RENEW_SHARE` of its lease. An engine that has completed no step for
    ``stalled_seconds``, while requests used holds, renews none until its next step.

    >>> holds = RemoteHolds(stalled_seconds=60.0)
    >>> hold = RemoteHold("p", 7, "127.0.0.1", 5600, Handle("a", 1))
    >>> holds.arrive("x", hold, lease_seconds=60.0, now=0.0)
    >>> holds.finish("x", now=1.0)
    >>> holds.take_releases(now=1.0) == [hold]
    True
    """

    def __init__(self, stalled_seconds: float) -> None:
        self._stalled_seconds = stalled_seconds
        self._progress_at = 0.0
        self._uses: dict[RemoteHold, _Use] = {}
        self._hold_of: dict[str, RemoteHold] = {}
        self._renew_at: dict[RemoteHold, float] = {}

    def arrive(self, request_id: str, hold: RemoteHold, lease_seconds: float, now: float) -> None:
        """A local request that may use ``hold`` has arrived. The lease counts from now; the first renewal, due at once,
        corrects it, since a part of the lease may be over already.

        A request uses one hold: naming another hold finishes the first one.
        """
        if not self._hold_of:
            # An idle engine has had no step to complete.
            self._progress_at = now
        if self._hold_of.get(request_id, hold) != hold:
            self.finish(request_id, now)
        use = self._uses.get(hold)
        if use is None:
            use = self._uses[hold] = _Use(Lease.granted(now, lease_seconds), set())
            self._renew_at[hold] = now
        use.requests.add(request_id)
        self._hold_of[request_id] = hold

    def step(self, now: float) -> None:
        """The engine begins a step, so its earlier steps have ended."""
        self._progress_at = now

    def finish(self, request_id: str, now: float) -> None:
        """The request is done with its hold (committed, failed, aborted or never needed it). Idempotent."""
        hold = self._hold_of.pop(request_id, None)
        if hold is None:
            return
        use = self._uses[hold]
        use.requests.discard(request_id)
        if sampling_family(request_id) != request_id:
            use.linger_until = now + SIBLING_LINGER_SECONDS

    @property
    def num_requests(self) -> int:
        """Local requests that use a remote hold."""
        return len(self._hold_of)

    def lease_of(self, request_id: str) -> Lease | None:
        """Return the lease of the request's hold; None once the hold is lost or the request is done with it."""
        use = self._use_of(request_id)
        return None if use is None or use.is_lost else use.lease

    def is_renewed(self, request_id: str) -> bool:
        """Return whether the engine that holds the request's tokens has granted a renewal."""
        use = self._use_of(request_id)
        return use is not None and use.is_renewed

    def running_lease(self, request_id: str, now: float) -> Lease:
        """Return the lease under which a request may be loaded. Raises :class:`HandoffError` (lease-expired)."""
        lease = self.lease_of(request_id)
        if lease is None or lease.is_over(now):
            raise lease_lost(request_id)
        return lease

    def take_releases(self, now: float) -> list[RemoteHold]:
        """Return the holds that no request uses any more, each once, and forget them."""
        done = [
            hold for hold, use in self._uses.items() if not use.requests and (now >= use.linger_until or use.is_lost)
        ]
        for hold in done:
            del self._uses[hold], self._renew_at[hold]
        return done

    def take_renewals(self, now: float) -> list[RemoteHold]:
        """Return the holds whose lease is due for renewal, and with them those that are due soon at the same engines,
        so that one message renews them; none while the engine's steps do not end.
        """
        if now - self._progress_at >= self._stalled_seconds:
            return []
        engines = {hold.engine for hold, at in self._renew_at.items() if now >= at and not self._uses[hold].is_lost}
        due = [hold for hold in self._renew_at if hold.engine in engines and self._is_due_soon(hold, now)]
        for hold in due:
            self._renew_at[hold] = now + _seconds_to_renewal(self._uses[hold].lease.remaining(now))
        return due

    def renewed(self, holds: Iterable[RemoteHold], sent_at: float, lease_seconds: float) -> None:
        """The prefill engine granted ``lease_seconds`` to a renewal sent at ``sent_at``."""
        for hold in holds:
            if use := self._uses.get(hold):
                use.lease, use.is_renewed = Lease.granted(sent_at, lease_seconds), True
                self._renew_at[hold] = sent_at + _seconds_to_renewal(lease_seconds)

    def lost(self, holds: Iterable[RemoteHold]) -> list[str]:
        """The prefill engine no longer holds these blocks: return the local requests that use the holds."""
        requests: list[str] = []
        for hold in holds:
            if use := self._uses.get(hold):
                use.is_lost = True
                requests.extend(sorted(use.requests))
        return requests

    def _use_of(self, request_id: str) -> _Use | None:
        hold = self._hold_of.get(request_id)
        return None if hold is None else self._uses[hold]

    def _is_due_soon(self, hold: RemoteHold, now: float) -> bool:
        """Return whether half of the time to the hold's next renewal is over."""
        use = self._uses[hold]
        half = _seconds_to_renewal(use.lease.remaining(now)) / 2
        return not use.is_lost and now + half >= self._renew_at[hold]


def _seconds_to_renewal(lease_seconds: float) -> float:
    return max(MIN_RENEW_SECONDS, RENEW_SHARE * lease_seconds)


class LeaseKeeper:
    """Renews and releases the remote holds of a decode engine's requests, for several threads of that engine.

    Releases are sent again until they are acknowledged or ``lease_seconds`` are over. An engine that has begun no step
    for ``lease_seconds`` renews none.
    """

    def __init__(self, lease_seconds: float, trust: Trust = THIS_MACHINE) -> None:
        self._lease_seconds = lease_seconds
        self._holds = RemoteHolds(lease_seconds)
        self._client = Client(trust)
        self._lock = threading.Lock()
        self._renewing: dict[tuple[str, int, int, Handle], RemoteHold] = {}
        self._lost: list[str] = []

    def arrive(self, request_id: str, hold: RemoteHold, lease_seconds: float) -> None:
        """As :meth:`RemoteHolds.arrive`, like the methods up to :meth:`num_requests`."""
        with self._lock:
            self._holds.arrive(request_id, hold, lease_seconds, time.monotonic())

    def step(self) -> None:
        with self._lock:
            self._holds.step(time.monotonic())

    def finish(self, request_id: str) -> None:
        """Release the hold at once where no other request uses it."""
        now = time.monotonic()
        with self._lock:
            self._holds.finish(request_id, now)
            self._release(now)

    def running_lease(self, request_id: str) -> Lease:
        with self._lock:
            return self._holds.running_lease(request_id, time.monotonic())

    def is_lost(self, request_id: str) -> bool:
        """Return whether the hold of a request has ended, as far as this engine knows."""
        with self._lock:
            return self._holds.lease_of(request_id) is None

    def is_renewed(self, request_id: str) -> bool:
        with self._lock:
            return self._holds.is_renewed(request_id)

    @property
    def num_requests(self) -> int:
        with self._lock:
            return self._holds.num_requests

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
