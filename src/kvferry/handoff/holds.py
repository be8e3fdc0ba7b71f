"""The holder's side of a pull: which requests' blocks are held, for whom, until when.

Pure: messages and the time are inputs. A request *begins* when its prefill starts (it gets a
guard slot and a generation), is *exported* when it finishes (a lease starts), and *ends* on
release, on expiry or when it will not be exported. An ended exported request is named once in
:meth:`PrefillSide.take_ended`; only then may the engine free its blocks, and only after every rank has
cleared the guard word.
"""

import re
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from kvferry.handoff.epochs import check_epoch
from kvferry.handoff.lease import Lease
from kvferry.handoff.messages import MAX_IDENTIFIER_LENGTH, Handle

_SAMPLE_PREFIX = re.compile(r"^\d+_")


def sampling_family(request_id: str) -> str:
    """Return the id that the parallel samples (``n`` > 1) of one request share.

    >>> sampling_family("1_cmpl-7"), sampling_family("cmpl-7")
    ('cmpl-7', 'cmpl-7')
    """
    return _SAMPLE_PREFIX.sub("", request_id)


class Ending(StrEnum):
    """Why a hold ended."""

    RELEASED = "released"
    EXPIRED = "expired"
    NOT_EXPORTED = "not-exported"


class Hold(msgspec.Struct, frozen=True):
    """A request whose blocks a reader may read while its guard word says ``generation``."""

    handle: Handle
    slot: int
    lease: Lease | None = None

    @property
    def is_exported(self) -> bool:
        """Whether the engine waits for this hold's end before it frees the blocks."""
        return self.lease is not None


class Ended(msgspec.Struct, frozen=True):
    """A hold that is over. ``hold.is_exported`` tells whether the engine waits for a report."""

    hold: Hold
    ending: Ending


class PrefillSide:
    """All holds of one prefill engine.

    ``epoch`` identifies this process's life; a message with another epoch is refused, so that a
    restarted engine is never mistaken for its former self.

    >>> side = PrefillSide(epoch=7, num_slots=2, lease_seconds=60)
    >>> hold = side.begin("a")
    >>> side.export("a", now=0.0).lease.end
    60.0
    >>> side.release(7, [hold.handle]), [e.ending.value for e in side.take_ended()]
    (None, ['released'])
    """

    def __init__(self, epoch: int, num_slots: int, lease_seconds: float) -> None:
        self.epoch = epoch
        self.lease_seconds = lease_seconds
        self._holds: dict[str, Hold] = {}
        self._families: dict[str, set[str]] = {}
        self._free_slots = list(range(num_slots))[::-1]
        self._next_generation = 1
        self._ended: list[Ended] = []

    @property
    def num_held(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._holds)

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`take_ended` has something to return."""
        return bool(self._ended)

    def begin(self, request_id: str) -> Hold | None:
        """Give the request a slot and a generation; again for a preempted request gives the same.

        None means that the request cannot be exported: all slots are taken, a finished request of
        the same id is still held, or no message could carry the id.
        """
        hold = self._holds.get(request_id)
        if hold is not None:
            return None if hold.is_exported else hold
        if not self._free_slots or len(request_id) > MAX_IDENTIFIER_LENGTH:
            return None
        hold = Hold(Handle(request_id, self._next_generation), self._free_slots.pop())
        self._next_generation += 1
        self._holds[request_id] = hold
        self._families.setdefault(sampling_family(request_id), set()).add(request_id)
        return hold

    def unfinished(self, request_ids: Iterable[str]) -> list[Hold]:
        """Return the holds of those of these requests that have begun and are not exported: they are being written."""
        holds = (self._holds.get(request_id) for request_id in request_ids)
        return [hold for hold in holds if hold is not None and not hold.is_exported]

    def export(self, request_id: str, now: float) -> Hold | None:
        """Start the lease of a finished request; None if it never began.

        An exported hold is a former request's: one of the same id that did not begin leaves it alone.
        """
        hold = self._holds.get(request_id)
        return None if hold is None or hold.is_exported else self._extend(hold, now)

    def drop(self, request_id: str) -> None:
        """End a request that will not be exported (aborted, or nothing to send)."""
        hold = self._holds.get(request_id)
        if hold is not None and not hold.is_exported:
            self._end(request_id, Ending.NOT_EXPORTED)

    def renew(self, epoch: int, handles: Iterable[Handle], now: float) -> list[Handle]:
        """Extend leases; return the handles that are not held. Raises on a foreign epoch."""
        check_epoch(epoch, self.epoch)
        lost = []
        for handle in handles:
            hold = self._holds.get(handle.request_id)
            if hold is None or hold.handle != handle:
                lost.append(handle)
            else:
                self._extend_family(handle.request_id, now)
        return lost

    def release(self, epoch: int, handles: Iterable[Handle]) -> None:
        """End exported holds; those already ended are ignored. Raises on a foreign epoch.

        Parallel samples of one prompt are held apart, but only one of them is named to the
        reader: releasing one releases its whole family.
        """
        check_epoch(epoch, self.epoch)
        for handle in handles:
            hold = self._holds.get(handle.request_id)
            if hold is None or hold.handle != handle:
                continue
            for member in sorted(self._families[sampling_family(handle.request_id)]):
                if self._holds[member].is_exported:
                    self._end(member, Ending.RELEASED)

    def expire(self, now: float) -> None:
        """End the holds whose lease is over."""
        over = [rid for rid, hold in self._holds.items() if hold.lease is not None and hold.lease.is_over(now)]
        for request_id in over:
            self._end(request_id, Ending.EXPIRED)

    def take_ended(self) -> list[Ended]:
        """Return the holds that ended since the last call, each exactly once."""
        ended, self._ended = self._ended, []
        return ended

    def _extend_family(self, request_id: str, now: float) -> None:
        """Extend all samples of the prompt: only one of them was named to the reader."""
        for member in self._families[sampling_family(request_id)]:
            if self._holds[member].is_exported:
                self._extend(self._holds[member], now)

    def _extend(self, hold: Hold, now: float) -> Hold:
        exported = msgspec.structs.replace(hold, lease=Lease.granted(now, self.lease_seconds))
        self._holds[hold.handle.request_id] = exported
        return exported

    def _end(self, request_id: str, ending: Ending) -> None:
        hold = self._holds.pop(request_id)
        family = self._families[sampling_family(request_id)]
        family.discard(request_id)
        if not family:
            del self._families[sampling_family(request_id)]
        self._free_slots.append(hold.slot)
        self._ended.append(Ended(hold, ending))
