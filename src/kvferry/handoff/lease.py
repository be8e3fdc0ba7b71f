"""Leases: liveness only. That bytes are right is proven by guard words, never by clocks."""

import msgspec

from kvferry.errors import HandoffError, Reason


class Lease(msgspec.Struct, frozen=True):
    """A promise to hold until ``end``, in seconds of the holder's or receiver's own monotonic clock.

    A receiver computes ``end`` from the moment it *sent* the renewal that was granted, so its view
    ends before the holder's. The first lease was granted by the answer of the prefill engine, on its way through a
    router: counted from the request's arrival it may end late, until the first renewal says what is left.

    >>> lease = Lease.granted(sent_at=10.0, seconds=60.0)
    >>> lease.end, lease.is_over(69.0), lease.is_over(70.0)
    (70.0, False, True)
    """

    end: float

    @classmethod
    def granted(cls, sent_at: float, seconds: float) -> "Lease":
        """Return the lease that a grant of ``seconds``, asked for at ``sent_at``, gives."""
        return cls(sent_at + seconds)

    def is_over(self, now: float) -> bool:
        """Return whether the promise has ended."""
        return now >= self.end

    def remaining(self, now: float) -> float:
        """Return the seconds left, at least zero."""
        return max(0.0, self.end - now)


def lease_lost(request_id: str) -> HandoffError:
    """Return the error of a reader whose hold has ended."""
    return HandoffError(
        Reason.LEASE_EXPIRED,
        f"the prefill engine no longer holds the blocks of {request_id}.",
        "Send the prompt again; if this repeats, raise lease_seconds on the prefill side.",
    )
