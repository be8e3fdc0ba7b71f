"""The receiver's side of a pull: which local requests read which remote holds, and when those may end.

Pure: events and the time are inputs, messages to send are outputs. A remote hold is released
once every local reader is done with it, whatever the outcome, and its lease is renewed while one is not.
Parallel samples (``n`` > 1) of one request name the same hold and arrive one after the
other: a hold read by a sample lingers for ``sibling_linger_seconds`` so that the others find it.
"""

from collections.abc import Iterable

import msgspec

from kvferry.handoff.holds import sampling_family
from kvferry.handoff.lease import Lease, lease_lost
from kvferry.handoff.messages import Handle

MIN_RENEW_SECONDS = 0.1


class RemoteHold(msgspec.Struct, frozen=True, order=True):
    """A hold as the receiver knows it: whose, where its engine listens, in which epoch."""

    engine_id: str
    epoch: int
    host: str
    port: int
    handle: Handle

    @property
    def destination(self) -> tuple[str, int, int]:
        """Host, port and epoch: messages to one destination travel together."""
        return self.host, self.port, self.epoch


class Reading(msgspec.Struct):
    """What is known of one remote hold."""

    lease: Lease
    readers: set[str]
    linger_until: float = 0.0
    is_lost: bool = False


class DecodeSide:
    """All remote holds that one decode engine reads.

    >>> side = DecodeSide(sibling_linger_seconds=0.5, renew_share=0.25)
    >>> hold = RemoteHold("p", 7, "127.0.0.1", 5600, Handle("a", 1))
    >>> side.arrive("x", hold, lease_seconds=60.0, now=0.0)
    >>> side.finish("x", now=1.0)
    >>> side.take_releases(now=1.0) == [hold], side.num_reading
    (True, 0)
    """

    def __init__(self, sibling_linger_seconds: float, renew_share: float) -> None:
        self._sibling_linger_seconds = sibling_linger_seconds
        self._renew_share = renew_share
        self._readings: dict[RemoteHold, Reading] = {}
        self._hold_of: dict[str, RemoteHold] = {}
        self._renew_at: dict[RemoteHold, float] = {}

    @property
    def num_reading(self) -> int:
        """Remote holds not yet released."""
        return len(self._readings)

    def arrive(self, request_id: str, hold: RemoteHold, lease_seconds: float, now: float) -> None:
        """A local request that may read ``hold`` has arrived, under a lease that some of may be over already: it counts
        from now until the first renewal, due at once, says what is left.

        A request reads one hold: naming another lets the former go.
        """
        if self._hold_of.get(request_id, hold) != hold:
            self.finish(request_id, now)
        reading = self._readings.get(hold)
        if reading is None:
            reading = self._readings[hold] = Reading(Lease.granted(now, lease_seconds), set())
            self._renew_at[hold] = now
        reading.readers.add(request_id)
        self._hold_of[request_id] = hold

    def finish(self, request_id: str, now: float) -> None:
        """The request is done with its hold (committed, failed, aborted or never needed it). Idempotent."""
        hold = self._hold_of.pop(request_id, None)
        if hold is None:
            return
        reading = self._readings[hold]
        reading.readers.discard(request_id)
        if sampling_family(request_id) != request_id:
            reading.linger_until = now + self._sibling_linger_seconds

    def lease_of(self, request_id: str) -> Lease | None:
        """Return the lease under which the request reads, None once it is lost or finished."""
        hold = self._hold_of.get(request_id)
        if hold is None or self._readings[hold].is_lost:
            return None
        return self._readings[hold].lease

    def running_lease(self, request_id: str, now: float) -> Lease:
        """Return the lease under which a request may be loaded. Raises :class:`HandoffError` (lease-lost)."""
        lease = self.lease_of(request_id)
        if lease is None or lease.is_over(now):
            raise lease_lost(request_id)
        return lease

    def take_releases(self, now: float) -> list[RemoteHold]:
        """Return the holds that nobody reads any more, each once, and forget them."""
        done = [
            hold
            for hold, reading in self._readings.items()
            if not reading.readers and (now >= reading.linger_until or reading.is_lost)
        ]
        for hold in done:
            del self._readings[hold], self._renew_at[hold]
        return done

    def take_renewals(self, now: float) -> list[RemoteHold]:
        """Return the holds whose lease is due for renewal."""
        due = [hold for hold, at in self._renew_at.items() if now >= at and not self._readings[hold].is_lost]
        for hold in due:
            self._renew_at[hold] = now + max(
                MIN_RENEW_SECONDS, self._renew_share * self._readings[hold].lease.remaining(now)
            )
        return due

    def renewed(self, holds: Iterable[RemoteHold], sent_at: float, lease_seconds: float) -> None:
        """The holder granted ``lease_seconds`` to a renewal sent at ``sent_at``."""
        for hold in holds:
            if reading := self._readings.get(hold):
                reading.lease = Lease.granted(sent_at, lease_seconds)
                self._renew_at[hold] = sent_at + self._renew_share * lease_seconds

    def lost(self, holds: Iterable[RemoteHold]) -> list[str]:
        """The holder no longer holds these: return the local requests that were to read them."""
        readers: list[str] = []
        for hold in holds:
            if reading := self._readings.get(hold):
                reading.is_lost = True
                readers.extend(sorted(reading.readers))
        return readers
